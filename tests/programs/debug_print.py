# mypy: disallow-untyped-defs=False
"""`jax.debug.print` inside the loss and in the step."""

import jax
import jax.numpy as jnp
import optax

from . import data, mlp
from .case import Case
from .optimizers import adam


def build() -> Case:
    """The loss function prints what every user prints: the loss and the size of the logits.

    Few digits are printed, so that rounding cannot change the text.
    """
    optimizer = adam()

    def loss_fn(params, x, y):
        logits = mlp.apply(params, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        jax.debug.print("loss {loss:.2f}, largest logit {top:.2f}", loss=loss, top=logits.max())
        return loss

    def train_step(state, batch):
        params, opt_state, step = state
        jax.debug.print("step {}", step)
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, step + 1), {"loss": loss}

    params = mlp.init(jax.random.key(0))
    state = (params, jax.jit(optimizer.init)(params), jnp.zeros((), jnp.int32))
    batches = [((data.vectors(i), data.classes(i)),) for i in range(data.STEPS)]
    return Case(train_step, state, batches)
