# mypy: disallow-untyped-defs=False
"""Convolutional networks in Flax linen: a plain one, and one with batch norm."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training import train_state

from . import data
from .case import Case
from .optimizers import BY_NAME, momentum


class CNN(nn.Module):
    """The network of Flax's MNIST example, smaller."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.max_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(10)(x)


def build(optimizer: str = "momentum") -> Case:
    """Cross entropy with label smoothing; accuracy within the three likeliest classes."""
    model = CNN()

    def train_step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], 10), 0.1)
            return optax.softmax_cross_entropy(logits, labels).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        _, best = jax.lax.top_k(logits, 3)
        hit = jnp.any(best == batch["label"][:, None], axis=-1)
        return state.apply_gradients(grads=grads), {"loss": loss, "top_3": jnp.mean(hit)}

    batches = [({"image": data.images(i), "label": data.classes(i)},) for i in range(data.STEPS)]
    params = jax.jit(model.init)(jax.random.key(0), batches[0][0]["image"])["params"]
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=BY_NAME[optimizer]()
    )
    return Case(train_step, state, batches)


class BatchNormCNN(nn.Module):
    """One convolution with batch norm."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(jnp.mean(x, axis=(1, 2)))


class BatchNormState(train_state.TrainState):
    """A state that carries the running statistics."""

    batch_stats: dict = struct.field()


def build_batch_norm() -> Case:
    """Batch norm as in Flax's guide: no exact split exists."""
    model = BatchNormCNN()

    def train_step(state, batch):
        def loss_fn(params):
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                train=True,
                mutable=["batch_stats"],
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), updates

        (loss, updates), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        return state.replace(batch_stats=updates["batch_stats"]), {"loss": loss}

    batches = [({"image": data.images(i), "label": data.classes(i)},) for i in range(data.STEPS)]
    init = jax.jit(model.init, static_argnames="train")
    variables = init(jax.random.key(0), batches[0][0]["image"], train=False)
    state = BatchNormState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=momentum(),
    )
    return Case(train_step, state, batches)
