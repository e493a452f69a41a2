# mypy: disallow-untyped-defs=False
"""Several losses in one step: a variational autoencoder, and two networks that train in turns."""

import jax
import jax.numpy as jnp
import optax

from . import data, mlp
from .case import Case
from .optimizers import adam, sgd

LATENT = 5


def build_autoencoder() -> Case:
    """Reconstruction plus divergence, with latents sampled by the state's key."""
    optimizer = adam()

    def loss_fn(params, key, x):
        mean, log_variance = jnp.split(mlp.apply(params["encoder"], x), 2, axis=-1)
        noise = jax.random.normal(key, mean.shape)
        z = mean + jnp.exp(0.5 * log_variance) * noise
        decoded = jnp.tanh(z @ params["decoder"][0]) @ params["decoder"][1]
        reconstruction = jnp.mean(jnp.sum((decoded - x) ** 2, axis=-1))
        divergence = -0.5 * jnp.mean(
            jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), axis=-1)
        )
        return reconstruction + 0.1 * divergence, (reconstruction, divergence)

    def train_step(state, x):
        params, opt_state, key = state
        key, step_key = jax.random.split(key)
        (loss, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, step_key, x)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, key), (loss, *parts)

    key1, key2 = jax.random.split(jax.random.key(1))
    decoder = (
        jax.random.normal(key1, (LATENT, 32)) / 2,
        jax.random.normal(key2, (32, mlp.SIZES[0])) / 6,
    )
    params = {"encoder": mlp.init(jax.random.key(0)), "decoder": decoder}
    state = (params, jax.jit(optimizer.init)(params), jax.random.key(2))
    return Case(train_step, state, [(data.vectors(i),) for i in range(data.STEPS)])


def build_adversarial() -> Case:
    """A generator and a critic, each with its own loss, gradient and optimizer."""
    generator_optimizer, critic_optimizer = sgd(), adam()

    def generate(params, z):
        return jnp.tanh(z @ params["hidden"]) @ params["out"]

    def critic_loss(critic, generator, x, z):
        fake = jax.lax.stop_gradient(generate(generator, z))
        real_score, fake_score = mlp.apply(critic, x)[:, 0], mlp.apply(critic, fake)[:, 0]
        return jnp.mean(jax.nn.softplus(-real_score)) + jnp.mean(jax.nn.softplus(fake_score))

    def generator_loss(generator, critic, z):
        return jnp.mean(jax.nn.softplus(-mlp.apply(critic, generate(generator, z))[:, 0]))

    def train_step(state, batch):
        x, z = batch
        generator, critic = state["generator"], state["critic"]
        critic_value, critic_grads = jax.value_and_grad(critic_loss)(critic, generator, x, z)
        value, grads = jax.value_and_grad(generator_loss)(generator, critic, z)
        updates, critic_state = critic_optimizer.update(critic_grads, state["critic_state"])
        critic = optax.apply_updates(critic, updates)
        updates, generator_state = generator_optimizer.update(grads, state["generator_state"])
        generator = optax.apply_updates(generator, updates)
        state = {
            "generator": generator,
            "critic": critic,
            "generator_state": generator_state,
            "critic_state": critic_state,
        }
        return state, {"critic": critic_value, "generator": value}

    key1, key2 = jax.random.split(jax.random.key(4))
    generator = {
        "hidden": jax.random.normal(key1, (8, 32)) / 3,
        "out": jax.random.normal(key2, (32, mlp.SIZES[0])) / 6,
    }
    critic = mlp.init(jax.random.key(3))
    state = {
        "generator": generator,
        "critic": critic,
        "generator_state": jax.jit(generator_optimizer.init)(generator),
        "critic_state": jax.jit(critic_optimizer.init)(critic),
    }
    batches = [((data.vectors(i), data.vectors(60 + i, 8)),) for i in range(data.STEPS)]
    return Case(train_step, state, batches)
