# mypy: disallow-untyped-defs=False
"""Steps whose state is more than parameters and moments: queues, histories, small integers."""

import jax
import jax.numpy as jnp
import optax
from programs import Case, data
from programs.optimizers import adam

from .common import dense_layers, mlp, normal, supervised
from .losses import PAIRS

VECTORS = [(data.vectors(i),) for i in range(data.STEPS)]


def _unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def build_queue() -> Case:
    """MoCo: a network that follows, and a queue of its keys, of which a batch replaces some."""

    def train_step(state, images):
        follower = optax.incremental_update(state["params"], state["follower"], 0.05)
        keys = _unit(mlp(follower, jnp.flip(images, axis=-1)))

        def loss_fn(params):
            queries = _unit(mlp(params, images))
            own = jnp.sum(queries * keys, axis=-1, keepdims=True)
            logits = jnp.concatenate([own, queries @ state["queue"].T], axis=-1) / 0.3
            right = (jnp.argmax(logits, axis=-1) == 0).mean()
            return -jax.nn.log_softmax(logits)[:, 0].mean(), right

        (loss, right), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        place = state["place"]
        after = {
            "params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads),
            "follower": follower,
            "queue": jax.lax.dynamic_update_slice_in_dim(state["queue"], keys, place, axis=0),
            "place": (place + keys.shape[0]) % state["queue"].shape[0],
        }
        return after, {"loss": loss, "right": right}

    params = dense_layers(1, 24, 32, 8)
    state = {
        "params": params,
        "follower": jax.tree.map(lambda p: 0.9 * p, params),
        "queue": _unit(normal(7, 2 * data.BATCH, 8)),
        "place": jnp.int32(0),
    }
    return Case(train_step, state, VECTORS)


def build_adversaries() -> Case:
    """A GAN of two optimizers, one after the other, with spectral norms by power iteration."""
    optimizers = {"maker": adam(), "judge": optax.rmsprop(1e-2, eps=1e-1)}

    def judge(layers, vectors, x):
        after = []
        for number, ((w, b), left) in enumerate(zip(layers, vectors, strict=True)):
            right = jax.lax.stop_gradient(_unit(left @ w))
            left = jax.lax.stop_gradient(_unit(w @ right))
            x = x @ (w / (left @ w @ right)) + b
            x = x if number + 1 == len(layers) else jax.nn.leaky_relu(x)
            after.append(left)
        return x[..., 0], after

    def train_step(state, real):
        key, key1, key2 = jax.random.split(state["key"], 3)
        nets, vectors = state["nets"], state["vectors"]

        def judge_loss(layers):
            made = mlp(nets["maker"], jax.random.normal(key1, (real.shape[0], 6)))
            on_real, after = judge(layers, vectors, real)
            on_made, after = judge(layers, after, made)
            return jnp.mean(jax.nn.softplus(-on_real) + jax.nn.softplus(on_made)), after

        def maker_loss(layers):
            made = mlp(layers, jax.random.normal(key2, (real.shape[0], 6)))
            return jnp.mean(jax.nn.softplus(-judge(nets["judge"], vectors, made)[0]))

        losses, optimizing = {}, {}
        for name, loss_fn in (("judge", judge_loss), ("maker", maker_loss)):
            is_judge = name == "judge"
            value, grads = jax.value_and_grad(loss_fn, has_aux=is_judge)(nets[name])
            losses[name], vectors = value if is_judge else (value, vectors)
            updates, optimizing[name] = optimizers[name].update(grads, state["optimizing"][name])
            nets = nets | {name: optax.apply_updates(nets[name], updates)}
        return {"nets": nets, "optimizing": optimizing, "vectors": vectors, "key": key}, losses

    nets = {"maker": dense_layers(1, 6, 32, 24), "judge": dense_layers(5, 24, 32, 1)}
    state = {
        "nets": nets,
        "optimizing": {name: jax.jit(o.init)(nets[name]) for name, o in optimizers.items()},
        "vectors": [_unit(normal(9 + i, w.shape[0])) for i, (w, _) in enumerate(nets["judge"])],
        "key": jax.random.key(3),
    }
    return Case(train_step, state, VECTORS)


def build_small_moments() -> Case:
    """Adam whose first moments are int8, in padded blocks with a scale each."""

    def packed(x, block=16):
        rows = jnp.pad(x.ravel(), (0, -x.size % block)).reshape(-1, block)
        scale = jnp.abs(rows).max(axis=1, keepdims=True) / 8 + 1e-6
        return jnp.round(rows / scale).astype(jnp.int8), scale

    def unpacked(moment, like):
        numbers, scale = moment
        return (numbers * scale).ravel()[: like.size].reshape(like.shape)

    def init(params):
        return jax.tree.map(lambda p: packed(jnp.zeros_like(p)), params)

    def update(grads, moments, params=None):
        del params
        wide = jax.tree.map(lambda g, m: 0.9 * unpacked(m, g) + 0.1 * g, grads, moments)
        return jax.tree.map(lambda m: -0.5 * m, wide), jax.tree.map(packed, wide)

    def loss_fn(params, batch):
        x, label = batch
        return optax.softmax_cross_entropy_with_integer_labels(mlp(params, x), label).mean()

    optimizer = optax.GradientTransformation(init, update)
    return supervised(loss_fn, dense_layers(1, 24, 37, 10), PAIRS, optimizer)


@jax.custom_vjp
def _narrow(x, history):
    scale = history.max() / 448 + 1e-3
    return (x / scale).clip(-448, 448).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale


def _narrow_backward(kept, gradient):
    history, top = kept
    return gradient, jnp.roll(history, -1).at[0].set(top)


_narrow.defvjp(
    lambda x, history: (_narrow(x, history), (history, jnp.abs(x).max())), _narrow_backward
)


def build_delayed_scales() -> Case:
    """Float8 with scales from the maxima of past steps, whose history comes back as a gradient."""

    def train_step(state, batch):
        x, label = batch

        def loss_fn(layers, histories):
            h = x
            for number, ((w, b), history) in enumerate(zip(layers, histories, strict=True)):
                h = _narrow(h, history["x"]) @ _narrow(w, history["w"]) + b
                h = jax.nn.gelu(h) if number + 1 < len(layers) else h
            return optax.softmax_cross_entropy_with_integer_labels(h, label).mean()

        both = jax.value_and_grad(loss_fn, argnums=(0, 1))
        loss, (grads, histories) = both(state["layers"], state["histories"])
        layers = jax.tree.map(lambda p, g: p - 0.1 * g, state["layers"], grads)
        return {"layers": layers, "histories": histories}, loss

    layers = dense_layers(1, 24, 32, 10)
    histories = [{"x": 3 * jnp.ones(4), "w": jnp.ones(4)} for _ in layers]
    return Case(train_step, {"layers": layers, "histories": histories}, PAIRS)


def build_scanned_scales() -> Case:
    """The same in layers that are a scan, computed again in the backward pass."""

    @jax.checkpoint
    def layer(h, given):
        w, history = given
        return h + jax.nn.gelu(_narrow(h, history["x"]) @ _narrow(w, history["w"])), None

    def train_step(state, batch):
        x, label = batch

        def loss_fn(params, histories):
            h, _ = jax.lax.scan(layer, x @ params["in"], (params["layers"], histories))
            logits = h @ params["out"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

        both = jax.value_and_grad(loss_fn, argnums=(0, 1))
        loss, (grads, histories) = both(state["params"], state["histories"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "histories": histories}, loss

    layers = normal(2, 3, 32, 32) / 6
    params = {"in": normal(1, 24, 32), "layers": layers, "out": normal(3, 32, 10)}
    histories = {"x": 3 * jnp.ones((3, 4)), "w": jnp.ones((3, 4))}
    return Case(train_step, {"params": params, "histories": histories}, PAIRS)


@jax.custom_vjp
def _reversible(layers, halves):
    def layer(halves, w):
        a, b = halves
        a = a + jnp.tanh(b @ w["first"])
        return (a, b + jnp.tanh(a @ w["second"])), None

    return jax.lax.scan(layer, halves, layers)[0]


def _reversible_backward(kept, cotangents):
    def back(carry, w):
        (a, b), (da, db) = carry
        change, pull = jax.vjp(lambda w, a: jnp.tanh(a @ w), w["second"], a)
        second, flow = pull(db)
        b, da = b - change, da + flow
        change, pull = jax.vjp(lambda w, b: jnp.tanh(b @ w), w["first"], b)
        first, flow = pull(da)
        return ((a - change, b), (da, db + flow)), {"first": first, "second": second}

    layers, halves = kept
    (_, inputs), grads = jax.lax.scan(back, (halves, cotangents), layers, reverse=True)
    return grads, inputs


def _reversible_forward(layers, halves):
    halves = _reversible(layers, halves)
    return halves, (layers, halves)


_reversible.defvjp(_reversible_forward, _reversible_backward)


def build_reversible() -> Case:
    """A reversible network: its backward scan computes the activations from its results."""

    def loss_fn(params, batch):
        x, label = batch
        h = x @ params["in"]
        logits = jnp.concatenate(_reversible(params["layers"], (h, h)), axis=-1) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    layers = {"first": normal(2, 4, 16, 16) / 2, "second": normal(3, 4, 16, 16) / 2}
    params = {"in": normal(1, 24, 16), "layers": layers, "out": normal(4, 32, 10)}
    return supervised(loss_fn, params, PAIRS)
