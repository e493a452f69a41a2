# mypy: disallow-untyped-defs=False
"""A small U-Net that learns to remove noise, as diffusion models are trained."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.training import train_state

from . import data
from .case import Case
from .optimizers import clipped_adamw

NOISE_LEVELS = 50


class Block(nn.Module):
    """Two convolutions with group norms, shifted by the embedded time, with a skip connection."""

    channels: int

    @nn.compact
    def __call__(self, x, time):
        y = nn.Conv(self.channels, (3, 3))(nn.silu(nn.GroupNorm(num_groups=4)(x)))
        y = y + nn.Dense(self.channels)(nn.silu(time))[:, None, None]
        y = nn.Conv(self.channels, (3, 3))(nn.silu(nn.GroupNorm(num_groups=4)(y)))
        if x.shape[-1] != self.channels:
            x = nn.Conv(self.channels, (1, 1))(x)
        return x + y


class UNet(nn.Module):
    """Two resolutions, with a concatenation across."""

    channels: int = 8

    @nn.compact
    def __call__(self, x, time):
        frequencies = jnp.exp(-jnp.arange(4) * 1.5)
        angles = time[:, None] * frequencies
        time = nn.Dense(16)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))
        fine = Block(self.channels)(nn.Conv(self.channels, (3, 3))(x), time)
        coarse = nn.Conv(2 * self.channels, (3, 3), strides=(2, 2))(fine)
        coarse = Block(2 * self.channels)(coarse, time)
        up = nn.ConvTranspose(self.channels, (2, 2), strides=(2, 2))(coarse)
        y = Block(self.channels)(jnp.concatenate([up, fine], axis=-1), time)
        return nn.Conv(x.shape[-1], (3, 3))(nn.silu(y))


class TrainState(train_state.TrainState):
    """A state that owns the key of the noise."""

    key: jax.Array = struct.field()


def train_step(state, images):
    """Noise levels and noise are drawn for the whole batch from the state's key."""
    key, level_key, noise_key = jax.random.split(state.key, 3)
    levels = jax.random.randint(level_key, (images.shape[0],), 0, NOISE_LEVELS)
    noise = jax.random.normal(noise_key, images.shape)
    signal = jnp.cos(levels / NOISE_LEVELS * jnp.pi / 2)[:, None, None, None]
    noisy = signal * images + jnp.sqrt(1 - signal**2) * noise

    def loss_fn(params):
        predicted = state.apply_fn({"params": params}, noisy, levels.astype(jnp.float32))
        return jnp.mean((predicted - noise) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads, key=key), {"loss": loss}


def build() -> Case:
    """The U-Net on images of 8 by 8 pixels."""
    model = UNet()
    batches = [(data.images(i),) for i in range(data.STEPS)]
    levels = jnp.zeros(data.BATCH)
    params = jax.jit(model.init)(jax.random.key(0), batches[0][0], levels)["params"]
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=clipped_adamw(), key=jax.random.key(1)
    )
    return Case(train_step, state, batches)
