# mypy: disallow-untyped-defs=False
"""Mixtures of experts: dispatch by one-hot einsums or by sorting, per sequence or over the batch.

Where every sequence is a group of its own (routing, capacity and the balance loss are taken per
sequence), the examples of a batch are independent. Where the whole batch shares an expert's
capacity, whether a token is dropped depends on all other tokens: no exact split exists.
"""

import jax
import jax.numpy as jnp
import optax

from . import data
from .case import Case
from .optimizers import clipped_adamw

WIDTH = 32
EXPERTS = 4
CAPACITY_FACTOR = 1.25


@jax.jit
def init(key):
    """An embedding, one layer of experts, an output layer."""
    keys = jax.random.split(key, 5)
    return {
        "embed": jax.random.normal(keys[0], (data.VOCABULARY, WIDTH)),
        "router": jax.random.normal(keys[1], (WIDTH, EXPERTS)) / 6,
        "up": jax.random.normal(keys[2], (EXPERTS, WIDTH, 2 * WIDTH)) / 6,
        "down": jax.random.normal(keys[3], (EXPERTS, 2 * WIDTH, WIDTH)) / 8,
        "head": jax.random.normal(keys[4], (WIDTH, data.VOCABULARY)) / 6,
    }


def experts(params, x):
    """Every expert on its own tokens, [..., expert, capacity, width]."""
    hidden = jax.nn.gelu(jnp.einsum("...ecd,edf->...ecf", x, params["up"]))
    return jnp.einsum("...ecf,efd->...ecd", hidden, params["down"])


def balance_loss(probabilities, chosen):
    """The Switch transformer's auxiliary loss per group, of [group, tokens, expert]."""
    share = jnp.mean(chosen, axis=-2)
    mean_probability = jnp.mean(probabilities, axis=-2)
    return EXPERTS * jnp.mean(jnp.sum(share * mean_probability, axis=-1))


def one_hot_layer(params, x):
    """Top-1 routing of [group, tokens, width] with dispatch and combination as einsums."""
    tokens = x.shape[1]
    capacity = int(CAPACITY_FACTOR * tokens / EXPERTS)
    probabilities = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, axis=-1), EXPERTS)
    gate = jnp.sum(probabilities * chosen, axis=-1)
    position = jnp.sum((jnp.cumsum(chosen, axis=1) - 1) * chosen, axis=-1).astype(jnp.int32)
    slot = jax.nn.one_hot(position, capacity)
    dispatch = jnp.einsum("gte,gtc->gtec", chosen, slot)
    y = experts(params, jnp.einsum("gtec,gtd->gecd", dispatch, x))
    y = jnp.einsum("gtec,gecd->gtd", dispatch * gate[:, :, None, None], y)
    return x + y, balance_loss(probabilities, chosen)


def sort_group(params, x, probabilities):
    """Routing of [tokens, width] by sorting the tokens by expert and gathering them."""
    tokens = x.shape[0]
    capacity = int(CAPACITY_FACTOR * tokens / EXPERTS)
    expert = jnp.argmax(probabilities, axis=-1)
    order = jnp.argsort(expert, stable=True)
    sorted_expert = expert[order]
    start = jnp.searchsorted(sorted_expert, jnp.arange(EXPERTS))
    position = jnp.arange(tokens) - start[sorted_expert]
    # A token beyond its expert's capacity goes to a slot that does not exist and is dropped there.
    slot = jnp.where(position < capacity, sorted_expert * capacity + position, EXPERTS * capacity)
    buffer = jnp.zeros((EXPERTS * capacity, WIDTH), x.dtype).at[slot].set(x[order], mode="drop")
    y = experts(params, buffer.reshape(EXPERTS, capacity, WIDTH)).reshape(-1, WIDTH)
    gate = jnp.take_along_axis(probabilities, expert[:, None], axis=-1)
    combined = y.at[slot].get(mode="fill", fill_value=0)
    return jnp.zeros_like(x).at[order].set(combined) * gate


def sort_layer(params, x):
    """Routing of [group, tokens, width], every group sorted by itself."""
    probabilities = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(jnp.argmax(probabilities, axis=-1), EXPERTS)
    y = jax.vmap(sort_group, in_axes=(None, 0, 0))(params, x, probabilities)
    return x + y, balance_loss(probabilities, chosen)


LAYERS = {"one_hot": one_hot_layer, "sort": sort_layer}


def build(dispatch: str = "one_hot", whole_batch: bool = False) -> Case:
    """The model with one of the dispatches; `whole_batch` makes the batch one single group."""
    optimizer = clipped_adamw()

    def loss_fn(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        groups = x.reshape(1, -1, WIDTH) if whole_batch else x
        groups, balance = LAYERS[dispatch](params, groups)
        logits = groups.reshape(x.shape) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean() + 0.01 * balance, balance

    def train_step(state, tokens):
        params, opt_state = state
        (loss, balance), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {"loss": loss, "balance": balance}
        return (optax.apply_updates(params, updates), opt_state), metrics

    params = init(jax.random.key(0))
    batches = [(data.tokens(i, length=data.LENGTH + 1),) for i in range(data.STEPS)]
    return Case(train_step, (params, jax.jit(optimizer.init)(params)), batches)
