# mypy: disallow-untyped-defs=False
"""Losses that look at the whole batch, steps of two passes, and networks that train each other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from programs import Case, data
from programs.optimizers import adam, sgd

from .common import dense_layers, mlp, normal, supervised

PAIRS = [((data.vectors(i), data.classes(i)),) for i in range(data.STEPS)]
"""Three batches of vectors and their labels."""


def cross_entropy(params, batch):
    """Mean cross entropy of a perceptron."""
    x, label = batch
    return optax.softmax_cross_entropy_with_integer_labels(mlp(params, x), label).mean()


def build_root_mean() -> Case:
    """The root of a mean: every gradient is scaled by one number of the whole batch."""

    def loss_fn(params, batch):
        x, label = batch
        return jnp.sqrt(jnp.mean((mlp(params, x)[:, 0] - label) ** 2))

    return supervised(loss_fn, dense_layers(1, 24, 32, 1), PAIRS)


def build_dice() -> Case:
    """Dice loss of a small convolutional segmentation: a quotient of the batch's sums."""

    def loss_fn(params, batch):
        x = batch["image"]
        for w in params[:-1]:
            x = jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        p = jax.nn.sigmoid(jnp.einsum("nhwc,c->nhw", x, params[-1]))
        y = batch["mask"]
        return 1 - (2 * jnp.sum(p * y) + 1) / (jnp.sum(p) + jnp.sum(y) + 1)

    params = [normal(1, 3, 3, 3, 8), normal(2, 3, 3, 8, 8), normal(3, 8)]
    batches = [
        ({"image": data.images(i), "mask": (data.images(i)[..., 0] > 0.3).astype(np.float32)},)
        for i in range(data.STEPS)
    ]
    return supervised(loss_fn, params, batches)


def build_distillation() -> Case:
    """A student that follows a frozen teacher, its temperature taken from the teacher's spread."""
    teacher = dense_layers(40, 24, 32, 10)

    def loss_fn(params, batch):
        x, label = batch
        target = mlp(teacher, x)
        temperature = 1 + jnp.sqrt(jnp.mean(target**2))
        logits = mlp(params, x)
        soft = jax.nn.softmax(target / temperature)
        follow = -jnp.mean(jnp.sum(soft * jax.nn.log_softmax(logits / temperature), axis=-1))
        hard = optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()
        return 0.5 * hard + 0.5 * temperature**2 * follow

    return supervised(loss_fn, dense_layers(1, 24, 32, 10), PAIRS)


def build_views() -> Case:
    """SimCLR: two augmentations of every example, each told from all others of the batch."""

    def augment(x, key):
        return x + 0.1 * jax.random.normal(key, x.shape)

    def loss_fn(params, x, key):
        one, two = jax.random.split(key)
        z = mlp(params, jnp.concatenate([augment(x, one), augment(x, two)]))
        z = z / jnp.sqrt(jnp.sum(z * z, axis=-1, keepdims=True) + 1e-3)
        scores = z @ z.T / 0.5 - 1e9 * jnp.eye(z.shape[0])
        labels = jnp.roll(jnp.arange(z.shape[0]), x.shape[0])
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    batches = [(data.vectors(i), jax.random.key(i)) for i in range(data.STEPS)]
    return supervised(loss_fn, dense_layers(1, 24, 32, 16), batches)


def build_two_towers() -> Case:
    """A two-tower retrieval model with the other rows of the batch as negatives."""

    def loss_fn(params, batch):
        users = params["users"][batch["user"]] @ params["w"]
        items = mlp(params["items"], batch["item"])
        logits = users @ items.T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.arange(logits.shape[0])
        ).mean()

    params = {
        "users": normal(1, 50, 16) * 4,
        "w": normal(2, 16, 16),
        "items": dense_layers(3, 24, 32, 16),
    }
    batches = [
        ({"user": data.classes(i, kinds=50), "item": data.vectors(i)},) for i in range(data.STEPS)
    ]
    return supervised(loss_fn, params, batches)


def build_sharpness_aware() -> Case:
    """SAM: a second gradient at the parameters that the first one's ascent leads to."""
    optimizer = sgd()

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(cross_entropy)(params, batch)
        scale = 0.05 / (optax.tree.norm(grads) + 1e-6)
        ascended = jax.tree.map(lambda p, g: p + scale * g, params, grads)
        grads = jax.grad(cross_entropy)(ascended, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = dense_layers(1, 24, 32, 32, 10)
    return Case(train_step, (params, jax.jit(optimizer.init)(params)), PAIRS)


def build_actor_critic() -> Case:
    """Soft actor-critic: critics, then the actor against the new critics, then the temperature."""
    optimizer = adam()

    def sample(actor, x, key):
        mean, log_std = jnp.split(mlp(actor, x), 2, axis=-1)
        log_std = jnp.clip(log_std, -4, 1)
        noise = jax.random.normal(key, mean.shape)
        action = jnp.tanh(mean + jnp.exp(log_std) * noise)
        log_p = -0.5 * noise**2 - log_std - jnp.log(1 - action**2 + 1e-3)
        return action, jnp.sum(log_p, axis=-1)

    def value(critic, x, action):
        return mlp(critic, jnp.concatenate([x, action], axis=-1))[:, 0]

    def train_step(state, batch, key):
        params, target, opt_state = state["params"], state["target"], state["opt_state"]
        key1, key2 = jax.random.split(key)
        alpha = jnp.exp(params["log_alpha"])
        action, log_p = sample(params["actor"], batch["next"], key1)
        future = jnp.minimum(*(value(c, batch["next"], action) for c in target)) - alpha * log_p
        goal = jax.lax.stop_gradient(batch["reward"] + 0.9 * (1 - batch["done"]) * future)

        def critic_loss(critics):
            errors = [value(c, batch["x"], batch["action"]) - goal for c in critics]
            return sum(jnp.mean(e**2) for e in errors)

        critic_value, critic_grads = jax.value_and_grad(critic_loss)(params["critics"])
        critics = jax.tree.map(lambda p, g: p - 0.05 * g, params["critics"], critic_grads)

        def actor_loss(rest):
            action, log_p = sample(rest["actor"], batch["x"], key2)
            q = jnp.minimum(*(value(c, batch["x"], action) for c in critics))
            entropy = -jnp.exp(rest["log_alpha"]) * jnp.mean(jax.lax.stop_gradient(log_p) - 2.0)
            return jnp.mean(jax.lax.stop_gradient(alpha) * log_p - q) + entropy

        rest = {"actor": params["actor"], "log_alpha": params["log_alpha"]}
        actor_value, grads = jax.value_and_grad(actor_loss)(rest)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(rest, updates) | {"critics": critics}
        target = optax.incremental_update(critics, target, 0.1)
        state = {"params": params, "target": target, "opt_state": opt_state}
        return state, {"critic": critic_value, "actor": actor_value}

    critics = [dense_layers(1, 28, 32, 1), dense_layers(11, 28, 32, 1)]
    rest = {"actor": dense_layers(21, 24, 32, 8), "log_alpha": jnp.float32(-1)}
    state = {
        "params": rest | {"critics": critics},
        "target": jax.tree.map(jnp.array, critics),
        "opt_state": jax.jit(optimizer.init)(rest),
    }
    batches = []
    for i in range(data.STEPS):
        transition = {
            "x": data.vectors(i),
            "next": data.vectors(20 + i),
            "action": np.tanh(data.vectors(40 + i, 4)),
            "reward": data.classes(i).astype(np.float32) / 10,
            "done": (data.classes(60 + i) == 0).astype(np.float32),
        }
        batches.append((transition, jax.random.key(i)))
    return Case(train_step, state, batches)


def build_q_learning() -> Case:
    """DQN: values picked by `q[jnp.arange(batch), actions]`, a target network, a Huber loss."""

    def loss_fn(params, batch):
        q = mlp(params, batch["x"])
        rows = jnp.arange(q.shape[0])
        best = jnp.argmax(jax.lax.stop_gradient(mlp(params, batch["next"])), axis=-1)
        future = jax.lax.stop_gradient(mlp(params, batch["next"]))[rows, best]
        goal = batch["reward"] + 0.9 * future
        return optax.huber_loss(q[rows, batch["action"]], goal).mean()

    batches = [
        (
            {
                "x": data.vectors(i),
                "next": data.vectors(10 + i),
                "action": data.classes(i),
                "reward": data.classes(30 + i).astype(np.float32) / 10,
            },
        )
        for i in range(data.STEPS)
    ]
    return supervised(loss_fn, dense_layers(1, 24, 32, 10), batches)


def build_policy() -> Case:
    """PPO: advantages normalized over the batch, a clipped ratio, a value and an entropy loss."""

    def loss_fn(params, batch):
        logits = mlp(params["policy"], batch["x"])
        log_p = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_p, batch["action"][:, None], axis=1)[:, 0]
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-3)
        ratio = jnp.exp(picked - batch["log_p"])
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        values = mlp(params["value"], batch["x"])[:, 0]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        value_loss = jnp.mean((values - batch["return"]) ** 2)
        return -gain.mean() + 0.5 * value_loss - 0.01 * entropy.mean()

    params = {"policy": dense_layers(1, 24, 32, 10), "value": dense_layers(11, 24, 32, 1)}
    batches = []
    for i in range(data.STEPS):
        noise = data.vectors(70 + i, 4)
        batch = {
            "x": data.vectors(i),
            "action": data.classes(i),
            "advantage": noise[:, 0],
            "return": noise[:, 1],
            "log_p": -np.abs(noise[:, 2]) - 1,
        }
        batches.append((batch,))
    return supervised(loss_fn, params, batches)


def build_codebook() -> Case:
    """VQ-VAE: the nearest code, a straight-through gradient, codes by moving averages."""
    optimizer = adam()

    def train_step(state, x):
        codes = state["codes"]

        def loss_fn(params):
            z = mlp(params["encoder"], x)
            distances = jnp.sum((z[:, None] - codes) ** 2, axis=-1)
            nearest = jnp.argmin(distances, axis=-1)
            q = z + jax.lax.stop_gradient(codes[nearest] - z)
            error = jnp.mean((mlp(params["decoder"], q) - x) ** 2)
            commitment = jnp.mean((z - jax.lax.stop_gradient(codes[nearest])) ** 2)
            return error + 0.25 * commitment, (z, nearest)

        (loss, (z, nearest)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        pick = jax.nn.one_hot(nearest, codes.shape[0])
        counts = 0.9 * state["counts"] + 0.1 * pick.sum(axis=0)
        sums = 0.9 * state["sums"] + 0.1 * pick.T @ z
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        state = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "codes": sums / (counts[:, None] + 1e-2),
            "counts": counts,
            "sums": sums,
        }
        return state, loss

    params = {"encoder": dense_layers(1, 24, 32, 8), "decoder": dense_layers(11, 8, 32, 24)}
    codes = normal(21, 12, 8) * 3
    state = {
        "params": params,
        "opt_state": jax.jit(optimizer.init)(params),
        "codes": codes,
        "counts": jnp.ones(12),
        "sums": codes,
    }
    return Case(train_step, state, [(data.vectors(i),) for i in range(data.STEPS)])


def build_extremes() -> Case:
    """Metrics of the batch's extremes, with one NaN in the second batch's extras."""

    def train_step(state, batch):
        params, highest = state

        def loss_fn(params):
            logits = mlp(params, batch["x"])
            label = batch["label"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
        metrics = {
            "loss": loss,
            "largest": logits.max(),
            "smallest": logits.min(),
            "extra": batch["extra"].max(),
            "magnitude": jnp.abs(batch["extra"]).max(axis=0),
            "worst": jnp.argmax(batch["x"][:, 0]),
        }
        return (params, jnp.maximum(highest, jnp.abs(logits).max())), metrics

    batches = []
    for i in range(data.STEPS):
        extra = data.vectors(80 + i, 3)
        if i == 1:
            extra[5, 1] = np.nan
        batches.append(({"x": data.vectors(i), "label": data.classes(i), "extra": extra},))
    return Case(train_step, (dense_layers(1, 24, 32, 10), jnp.float32(0)), batches)
