# mypy: disallow-untyped-defs=False
"""A ResNet in Haiku whose batch norm couples the examples of a batch."""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from . import data
from .case import Case, same_state
from .optimizers import momentum


class TrainState(NamedTuple):
    """What Haiku's ImageNet example carries from step to step."""

    params: hk.Params
    state: hk.State
    opt_state: optax.OptState


def forward(images, is_training):
    """Logits of a ResNet with four blocks."""
    net = hk.nets.ResNet(
        blocks_per_group=(1, 1, 1, 1),
        num_classes=10,
        # Its default is zeros, and then no example would make a difference at first.
        logits_config={"w_init": hk.initializers.VarianceScaling()},
        bottleneck=False,
        resnet_v2=True,
        channels_per_group=(8, 8, 16, 16),
        use_projection=(False, False, True, False),
        strides=(1, 1, 2, 1),
        initial_conv_config={"output_channels": 8, "kernel_shape": 3, "stride": 1},
    )
    return net(images, is_training=is_training)


def build(train: bool = True) -> Case:
    """The train step, or the evaluation step, in which examples are independent."""
    network = hk.transform_with_state(forward)
    optimizer = momentum()

    def loss_fn(params, state, batch):
        logits, state = network.apply(params, state, None, batch["images"], is_training=True)
        labels = jax.nn.one_hot(batch["labels"], 10)
        loss = optax.softmax_cross_entropy(logits, optax.smooth_labels(labels, 0.1)).mean()
        decay = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params) if p.ndim > 1)
        return loss + 1e-4 * decay, (loss, state)

    def train_step(train_state, batch):
        params, state, opt_state = train_state
        grads, (loss, new_state) = jax.grad(loss_fn, has_aux=True)(params, state, batch)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        return TrainState(new_params, new_state, new_opt_state), {"loss": loss}

    def eval_step(train_state, batch):
        params, state, _ = train_state
        logits, _ = network.apply(params, state, None, batch["images"], is_training=False)
        correct = jnp.argmax(logits, axis=-1) == batch["labels"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return {"loss": jnp.mean(losses), "correct": jnp.sum(correct)}

    batches = [({"images": data.images(i), "labels": data.classes(i)},) for i in range(data.STEPS)]
    init = jax.jit(network.init, static_argnames="is_training")
    params, state = init(jax.random.PRNGKey(0), batches[0][0]["images"], is_training=True)
    train_state = TrainState(params, state, jax.jit(optimizer.init)(params))
    if train:
        return Case(train_step, train_state, batches)
    return Case(eval_step, train_state, batches, next_state=same_state)
