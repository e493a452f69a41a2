# mypy: disallow-untyped-defs=False
"""How steps are written around a model: NNX in place, adapters, small dtypes, odd optimizers."""

from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import dynamic_scale, train_state
from programs import Case, data
from programs.case import same_state
from programs.optimizers import adam, sgd

from .common import TOKENS, WIDTH, dense_layers, mlp, next_token_loss, normal, supervised
from .language import block, hidden, model_params
from .losses import PAIRS, cross_entropy


class Network(nnx.Module):
    """The convolutional network of Flax's first tutorial, smaller."""

    def __init__(self, rngs: nnx.Rngs, norm: bool = False):
        self.conv1 = nnx.Conv(3, 8, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else nnx.LayerNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(rate=0.1, rngs=rngs)
        self.linear = nnx.Linear(8 * 16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv1(x))), (2, 2), strides=(2, 2))
        return self.linear(self.dropout(x.reshape(x.shape[0], -1)))


def build_in_place(norm: bool = False) -> Case:
    """A model, an optimizer and metrics that the step updates in place; it returns the loss."""

    def loss_fn(model, batch):
        logits = model(batch["image"])
        label = batch["label"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean(), logits

    def train_step(state, batch):
        model, optimizer, metrics = state
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)
        return loss

    model = Network(nnx.Rngs(0), norm)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    state = (model, nnx.Optimizer(model, adam(), wrt=nnx.Param), metrics)
    batches = [({"image": data.images(i), "label": data.classes(i)},) for i in range(data.STEPS)]
    return Case(train_step, state, batches, plain=nnx.jit(train_step), next_state=same_state)


def build_adapters() -> Case:
    """LoRA on a frozen decoder in bfloat16."""
    optimizer = adam()
    frozen = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model_params(False))

    def merged(frozen, adapters):
        def add(weights, low):
            return weights + (low["a"] @ low["b"]).astype(weights.dtype)

        layers = [
            layer | {"qkv": add(layer["qkv"], low)}
            for layer, low in zip(frozen["layers"], adapters, strict=True)
        ]
        return frozen | {"layers": layers}

    def train_step(state, tokens):
        def loss_fn(adapters):
            params = merged(state["frozen"], adapters)
            x = hidden(params, tokens[:, :-1], jnp.bfloat16, block)
            return next_token_loss(x @ params["head"], tokens)

        loss, grads = jax.value_and_grad(loss_fn)(state["adapters"])
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        adapters = optax.apply_updates(state["adapters"], updates)
        return {"frozen": state["frozen"], "adapters": adapters, "opt_state": opt_state}, loss

    adapters = [
        {"a": normal(10 + i, WIDTH, 4), "b": normal(20 + i, 4, 3 * WIDTH)}
        for i in range(len(frozen["layers"]))
    ]
    state = {"frozen": frozen, "adapters": adapters, "opt_state": jax.jit(optimizer.init)(adapters)}
    return Case(train_step, state, TOKENS)


def build_quantized() -> Case:
    """A frozen int4 layer with scales under trained layers, and an int8 product."""
    packed = jnp.round(normal(31, 24, 32) * 20).clip(-8, 7).astype(jnp.int4)
    scales = jnp.abs(normal(32, 32)) / 8 + 0.05

    def loss_fn(params, batch):
        x, label = batch
        x = jax.nn.relu(x @ (packed.astype(jnp.float32) * scales))
        x = jnp.concatenate([x, mlp(params["side"], batch[0])], axis=-1)
        step = jnp.abs(jax.lax.stop_gradient(x)).max(axis=-1, keepdims=True) / 127 + 1e-3
        small = jnp.round(jax.lax.stop_gradient(x) / step).astype(jnp.int8)
        exact = jax.lax.dot_general(
            small,
            jnp.ones((x.shape[-1], 4), jnp.int8),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.int32,
        )
        logits = mlp(params["head"], jnp.concatenate([x, exact * step], axis=-1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    params = {"side": dense_layers(1, 24, 16, 8), "head": dense_layers(11, 44, 10)}
    return supervised(loss_fn, params, PAIRS)


@jax.custom_vjp
def _float8_dot(x, w, x_scale, w_scale):
    x8 = (x / x_scale).astype(jnp.float8_e4m3fn)
    w8 = (w / w_scale).astype(jnp.float8_e4m3fn)
    y = jax.lax.dot_general(
        x8, w8, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return y * (x_scale * w_scale)


def _float8_forward(x, w, x_scale, w_scale):
    return _float8_dot(x, w, x_scale, w_scale), (x, w, x_scale, w_scale)


def _float8_backward(kept, g):
    x, w, x_scale, w_scale = kept
    g = g.astype(jnp.float8_e5m2).astype(jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    return (
        g @ w.T,
        rows.T @ g.reshape(-1, g.shape[-1]),
        jnp.zeros_like(x_scale),
        jnp.zeros_like(w_scale),
    )


_float8_dot.defvjp(_float8_forward, _float8_backward)


def build_float8() -> Case:
    """Products in float8 with scales kept in the state, as Transformer Engine has them."""
    optimizer = adam()

    def train_step(state, batch):
        x, label = batch

        def loss_fn(params):
            h, tops = x, []
            for (w, b), scale in zip(params, state["scales"], strict=True):
                tops.append(jnp.abs(h).max())
                h = jax.nn.relu(_float8_dot(h, w, scale, jnp.abs(w).max() / 448)) + b
            losses = optax.softmax_cross_entropy_with_integer_labels(h, label)
            return losses.mean(), jnp.stack(tops)

        (loss, tops), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "scales": tops / 448 + 1e-3}, loss

    params = dense_layers(1, 24, 32, 32, 10)
    state = {
        "params": params,
        "opt_state": jax.jit(optimizer.init)(params),
        "scales": jnp.ones(3) / 50,
    }
    return Case(train_step, state, PAIRS)


def build_if_finite() -> Case:
    """`optax.apply_if_finite` around clipped Adam; the second batch overflows."""
    optimizer = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), adam()), 3)
    batches = [((x * (1e30 if i == 1 else 1), label),) for i, ((x, label),) in enumerate(PAIRS)]
    return supervised(cross_entropy, dense_layers(1, 24, 32, 10), batches, optimizer)


def build_multi_steps() -> Case:
    """`optax.MultiSteps`: an update every second call."""
    optimizer = optax.MultiSteps(optax.adamw(1e-2, eps=1e-2), every_k_schedule=2)
    return supervised(cross_entropy, dense_layers(1, 24, 32, 10), PAIRS, optimizer)


def build_dynamic_scale() -> Case:
    """Flax's `DynamicScale`, which computes the gradient itself and tells whether it is finite."""

    class State(train_state.TrainState):
        scale: Any = None

    def train_step(state, batch):
        grad_fn = state.scale.value_and_grad(lambda params: cross_entropy(params, batch))
        scale, finite, loss, grads = grad_fn(state.params)
        after = state.apply_gradients(grads=grads)
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        after = after.replace(
            params=jax.tree.map(keep, after.params, state.params),
            opt_state=jax.tree.map(keep, after.opt_state, state.opt_state),
            scale=scale,
        )
        return after, {"loss": loss, "finite": finite}

    params = dense_layers(1, 24, 32, 10)
    state = State.create(
        apply_fn=None, params=params, tx=adam(), scale=dynamic_scale.DynamicScale(growth_interval=2)
    )
    return Case(train_step, state, PAIRS)


def build_muon() -> Case:
    """An optimizer that orthogonalizes every matrix's update by Newton-Schulz steps."""

    def orthogonal(g):
        x = g / (jnp.linalg.norm(g) + 1e-3)
        for _ in range(3):
            a = x @ x.T
            x = 2.0 * x - 1.5 * a @ x + 0.5 * a @ a @ x
        return x

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads, trace, params=None):
        del params
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, grads)
        step = jax.tree.map(lambda t: -0.02 * (orthogonal(t) if t.ndim == 2 else t), trace)
        return step, trace

    optimizer = optax.GradientTransformation(init, update)
    return supervised(cross_entropy, dense_layers(1, 24, 32, 32, 10), PAIRS, optimizer)


def build_factored() -> Case:
    """Adafactor: second moments factored into rows and columns, updates clipped."""
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8, eps=1e-3)
    return supervised(cross_entropy, dense_layers(1, 24, 32, 10), PAIRS, optimizer)


def build_diffusion() -> Case:
    """A denoiser with random times and noise, a moving average of its parameters."""
    optimizer = adam()

    def train_step(state, x):
        key, time_key, noise_key = jax.random.split(state["key"], 3)
        t = jax.random.uniform(time_key, (x.shape[0], 1))
        noise = jax.random.normal(noise_key, x.shape)
        noisy = jnp.cos(t) * x + jnp.sin(t) * noise

        def loss_fn(params):
            features = jnp.concatenate([noisy, jnp.sin(t * jnp.arange(1, 9))], axis=-1)
            weights = 1 / (0.1 + jnp.sin(t[:, 0]) ** 2)
            return jnp.mean(weights * jnp.mean((mlp(params, features) - noise) ** 2, axis=-1))

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 0.1)
        return {"params": params, "opt_state": opt_state, "average": average, "key": key}, loss

    params = dense_layers(1, 32, 48, 24)
    state = {
        "params": params,
        "opt_state": jax.jit(optimizer.init)(params),
        "average": jax.tree.map(jnp.array, params),
        "key": jax.random.key(5),
    }
    return Case(train_step, state, [(data.vectors(i),) for i in range(data.STEPS)])


def build_flow() -> Case:
    """A normalizing flow of coupling layers with its log-determinant."""

    def loss_fn(params, x):
        total = jnp.zeros(x.shape[0])
        for layer in params:
            a, b = jnp.split(x, 2, axis=-1)
            shift, log_scale = jnp.split(mlp(layer, a), 2, axis=-1)
            log_scale = jnp.tanh(log_scale)
            x = jnp.concatenate([b * jnp.exp(log_scale) + shift, a], axis=-1)
            total = total + jnp.sum(log_scale, axis=-1)
        return jnp.mean(0.5 * jnp.sum(x**2, axis=-1) - total)

    params = [dense_layers(10 * i, 12, 32, 24) for i in range(1, 4)]
    return supervised(loss_fn, params, [(data.vectors(i),) for i in range(data.STEPS)])


def build_physics() -> Case:
    """A network fitted to a differential equation: derivatives by its inputs inside the loss."""

    def loss_fn(params, points):
        def u(point):
            return mlp(params, point, jnp.tanh)[0]

        gradient = jax.vmap(jax.grad(u))(points)
        second = jax.vmap(lambda p: jnp.trace(jax.hessian(u)(p)))(points)
        residual = second + gradient[:, 0] - jnp.sin(points[:, 1])
        return jnp.mean(residual**2)

    batches = [(data.vectors(i, 2),) for i in range(data.STEPS)]
    return supervised(loss_fn, dense_layers(1, 2, 24, 24, 1), batches)


def build_meta() -> Case:
    """MAML: each task adapts the parameters by its own gradient before it is judged."""

    def inner(params, x, y):
        return jnp.mean((mlp(params, x)[:, 0] - y) ** 2)

    def loss_fn(params, tasks):
        def judged(x, y):
            grads = jax.grad(inner)(params, x[:4], y[:4])
            adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return inner(adapted, x[4:], y[4:])

        return jnp.mean(jax.vmap(judged)(tasks["x"], tasks["y"]))

    batches = []
    for i in range(data.STEPS):
        rng = np.random.default_rng([9, i])
        x = rng.normal(size=(data.BATCH, 8, 6)).astype(np.float32)
        batches.append(({"x": x, "y": np.sin(x.sum(axis=-1))},))
    return supervised(loss_fn, dense_layers(1, 6, 32, 1), batches, sgd())


def build_mixup() -> Case:
    """Mixup with random strengths and partners, label smoothing, dropout with a split key."""

    def loss_fn(params, batch, key):
        x, label = batch
        key1, key2 = jax.random.split(key)
        strength = jax.random.beta(key1, 2.0, 2.0, (x.shape[0], 1))
        target = optax.smooth_labels(jax.nn.one_hot(label, 10), 0.1)
        x = strength * x + (1 - strength) * jnp.flip(x, axis=-1)
        hidden_ = jax.nn.relu(mlp(params[:1], x))
        keep = jax.random.bernoulli(key2, 0.9, hidden_.shape)
        logits = mlp(params[1:], jnp.where(keep, hidden_ / 0.9, 0))
        return optax.softmax_cross_entropy(logits, target).mean()

    batches = [(*pair, jax.random.key(i)) for i, pair in enumerate(PAIRS)]
    return supervised(loss_fn, dense_layers(1, 24, 48, 10), batches)


def build_logical_axes() -> Case:
    """Flax linen with logical axis names on parameters and activations."""

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x):
            init = linen.with_logical_partitioning(
                linen.initializers.lecun_normal(), ("embed", "mlp")
            )
            y = linen.Dense(64, kernel_init=init)(linen.LayerNorm()(x))
            y = linen.with_logical_constraint(linen.gelu(y), ("batch", "time", "mlp"))
            return x + linen.Dense(WIDTH)(y)

    class Model(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            x = linen.Embed(data.VOCABULARY, WIDTH)(tokens)
            for _ in range(2):
                x = linen.remat(Layer)()(x)
            return linen.Dense(data.VOCABULARY)(x)

    model = Model()

    def loss_fn(params, tokens):
        return next_token_loss(model.apply({"params": params}, tokens[:, :-1]), tokens)

    variables = jax.jit(model.init)(jax.random.key(0), TOKENS[0][0][:, :-1])
    return supervised(loss_fn, linen.unbox(variables["params"]), TOKENS)
