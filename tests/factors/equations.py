"""Small functions whose equations cover the primitives that have rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_rng = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return np.asarray(_rng.normal(size=shape), np.float32)


def bf16(*shape: int) -> np.ndarray:
    return np.asarray(_rng.random(shape) + 0.5, jnp.bfloat16)


def ints(*shape: int, low: int = 0, high: int = 4) -> np.ndarray:
    return np.asarray(_rng.integers(low, high, shape), np.int32)


def bools(*shape: int) -> np.ndarray:
    return np.asarray(_rng.random(shape) < 0.5)


def positive(*shape: int) -> np.ndarray:
    return np.asarray(_rng.random(shape) * 0.8 + 0.1, np.float32)


def definite(batch: int, size: int) -> np.ndarray:
    x = _rng.normal(size=(batch, size, size))
    return np.asarray(x @ x.transpose(0, 2, 1) + size * np.eye(size), np.float32)


RAGGED = jnp.array([3, 0, 6, 1], np.int32)  # two rows are in no group


def conv(lhs: Any, rhs: Any, **params: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    strides = params.pop("strides", (1, 1))
    padding = params.pop("padding", "SAME")
    return lax.conv_general_dilated(lhs, rhs, strides, padding, dimension_numbers=numbers, **params)


def depthwise(lhs: Any, rhs: Any) -> Any:
    return conv(lhs, rhs, feature_group_count=lhs.shape[-1])


def gradient(
    function: Callable[..., Any], argument: int | tuple[int, ...] = 0
) -> Callable[..., Any]:
    def value_and_gradient(*arguments: Any) -> Any:
        return jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), argnums=argument)(*arguments)

    return value_and_gradient


def take_mode(mode: str, **params: Any) -> Callable[..., Any]:
    return lambda x, i: jnp.take(x, i, axis=0, mode=mode, **params)


Case = tuple[Callable[..., Any], tuple[Any, ...]]

UNARY_FLOAT = (
    lax.abs, lax.acos, lax.acosh, lax.asin, lax.asinh, lax.atan, lax.atanh, lax.bessel_i0e,
    lax.bessel_i1e, lax.cbrt, lax.ceil, lax.cos, lax.cosh, lax.digamma, lax.erf, lax.erf_inv,
    lax.erfc, lax.exp, lax.exp2, lax.expm1, lax.floor, lax.is_finite, lax.lgamma, lax.log,
    lax.log1p, lax.logistic, lax.neg, lax.round, lax.rsqrt, lax.sign, lax.sin, lax.sinh, lax.sqrt,
    lax.square, lax.tan, lax.tanh,
)  # fmt: skip
BINARY_FLOAT = (
    lax.add, lax.atan2, lax.complex, lax.div, lax.eq, lax.ge, lax.gt, lax.igamma, lax.igammac,
    lax.le, lax.lt, lax.max, lax.min, lax.mul, lax.ne, lax.nextafter, lax.pow, lax.rem, lax.sub,
    lax.zeta,
)  # fmt: skip
BINARY_INT = (
    lax.add, lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.div, lax.max, lax.mul, lax.rem,
    lax.shift_left, lax.shift_right_arithmetic, lax.shift_right_logical, lax.sub,
)  # fmt: skip


def elementwise() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    function: Callable[..., Any]
    for function in UNARY_FLOAT:
        cases[f"unary {function.__name__}"] = (function, (positive(4),))
    for function in BINARY_FLOAT:
        cases[f"binary {function.__name__}"] = (function, (positive(4), positive(4)))
    for function in BINARY_INT:
        cases[f"int {function.__name__}"] = (function, (ints(4, low=1), ints(4, low=1)))
    for function in (lax.add, lax.mul, lax.max, lax.sub):
        cases[f"bf16 {function.__name__}"] = (function, (bf16(4), bf16(4)))
    return cases | {
        "not": (lax.bitwise_not, (bools(4, 8),)),
        "population_count": (lax.population_count, (ints(4, 8),)),
        "clz": (lax.clz, (ints(4, 8),)),
        "literal": (lambda x: 2.0 * x + 1.0, (f32(4, 8),)),
        "scalar": (lambda x, s: x * s, (f32(4, 8), f32())),
        "repeated dimension": (lambda x, y: x * y, (f32(4, 8), f32(4, 1))),
        "outer": (lambda x, y: x + y, (f32(4, 1), f32(1, 8))),
        "integer_pow": (lambda x: x**3, (f32(4, 8),)),
        "clamp": (lax.clamp, (f32(4, 8), f32(4, 8), f32(4, 8))),
        "clamp scalars": (lambda x: lax.clamp(-0.5, x, 0.5), (f32(4, 8),)),
        "select": (lax.select_n, (bools(4, 8), f32(4, 8), f32(4, 8))),
        "select scalar": (lax.select_n, (bools(), f32(4, 8), f32(4, 8))),
        "select many": (lax.select_n, (ints(4, 8, high=3), *(f32(4, 8) for _ in range(3)))),
        "convert": (lambda x: x.astype(jnp.bfloat16), (f32(4, 8),)),
        "convert int": (lambda x: x.astype(np.int32), (f32(4, 8),)),
        "reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), (f32(4, 8),)),
        "bitcast": (lambda x: lax.bitcast_convert_type(x, np.int32), (f32(4, 8),)),
        "bitcast narrow": (lambda x: lax.bitcast_convert_type(x, np.uint8), (f32(4, 8),)),
        "real imag": (lambda z: (z.real, z.imag, z.conj()), (f32(4, 8) + 1j * f32(4, 8),)),
        "betainc": (jax.scipy.special.betainc, (positive(4, 8), positive(4, 8), positive(4, 8))),
        "polygamma": (lax.polygamma, (jnp.ones((4, 8)), positive(4, 8))),
        "igamma gradient": (lax.igamma_grad_a, (positive(4, 8), positive(4, 8))),
        "stop_gradient": (lax.stop_gradient, (f32(4, 8),)),
        "device_put": (jax.device_put, (f32(4, 8),)),
        "barrier": (lax.optimization_barrier, ((f32(4, 8), f32(8), ints(2)),)),
        "copy": (jnp.copy, (f32(4, 8),)),
        "logaddexp": (jnp.logaddexp, (f32(4, 8), f32(4, 8))),
        "softmax": (jax.nn.softmax, (f32(4, 8),)),
    }


def shapes() -> dict[str, Case]:
    return {
        "broadcast": (lambda x: jnp.broadcast_to(x[None, :, None], (2, 4, 8)), (f32(4),)),
        "broadcast int": (lambda x: lax.broadcast_in_dim(x, (4, 8), (1,)), (ints(8),)),
        "broadcast scalar": (lambda x: jnp.full((4, 8), x), (f32(),)),
        "reshape merge": (lambda x: x.reshape(32, 2), (f32(4, 8, 2),)),
        "reshape split": (lambda x: x.reshape(4, 2, 8), (f32(8, 8),)),
        "reshape misaligned": (lambda x: x.reshape(4, 6), (f32(6, 4),)),
        "reshape all": (lambda x: x.reshape(-1), (f32(2, 1, 4, 4),)),
        "reshape regroup": (lambda x: x.reshape(2, 8, 4), (f32(4, 2, 8),)),
        "squeeze": (lambda x: lax.squeeze(x, (1,)), (f32(4, 1, 8),)),
        "expand": (lambda x: lax.expand_dims(x, (0, 2)), (f32(4, 8),)),
        "transpose": (lambda x: x.transpose(2, 0, 1), (f32(2, 4, 8),)),
        "rev": (lambda x: lax.rev(x, (1,)), (f32(4, 8),)),
        "repeat": (lambda x: jnp.repeat(x, 2, axis=0), (f32(4, 8),)),
        "tile": (lambda x: jnp.tile(x, (4, 2)), (f32(4, 8),)),
        "stack": (lambda x, y: jnp.stack([x, y], axis=1), (f32(4, 8), f32(4, 8))),
        "concatenate": (lambda x, y: lax.concatenate([x, y], 0), (f32(4, 8), f32(4, 8))),
        "concatenate unequal": (lambda x, y: lax.concatenate([x, y], 1), (f32(4, 8), f32(4, 4))),
        "concatenate itself": (lambda x: lax.concatenate([x, x, x], 0), (ints(4, 8),)),
        "concatenate coprime": (lambda x, y: lax.concatenate([x, y], 0), (f32(4, 8), f32(3, 8))),
        "split": (lambda x: tuple(jnp.split(x, 2, axis=0)), (f32(8, 4),)),
        "split unequal": (lambda x: lax.split(x, (4, 8, 4), axis=1), (f32(4, 16),)),
        "slice": (lambda x: x[4:8], (f32(12, 4),)),
        "slice half": (lambda x: (x[:, :4], x[:, 4:]), (f32(4, 8),)),
        "slice strided": (lambda x: lax.slice(x, (0, 0), (8, 8), (2, 1)), (f32(8, 8),)),
        "slice shifted": (lambda x: x[1:, :], (f32(9, 4),)),
        "pad": (lambda x: lax.pad(x, jnp.float32(1.5), ((4, 8, 0), (0, 0, 0))), (f32(4, 8),)),
        "pad interior": (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 1))), (f32(4, 8),)),
        "pad negative": (lambda x: lax.pad(x, 0.0, ((-4, 0, 0), (0, 0, 0))), (f32(8, 8),)),
        "pad odd": (lambda x: lax.pad(x, 0.0, ((1, 0, 0), (0, 0, 0))), (f32(4, 8),)),
        "iota": (lambda: lax.broadcasted_iota(np.int32, (4, 8), 1), ()),
        "iota float": (lambda: lax.broadcasted_iota(np.float32, (8, 4), 0), ()),
        "iota bf16": (lambda: lax.broadcasted_iota(jnp.bfloat16, (16,), 0), ()),
        "iota uint8": (lambda: lax.iota(np.uint8, 16), ()),
        "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 8)), (f32(4, 8), ints())),
        "dynamic_update_slice": (
            lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)),
            (f32(4, 8), f32(2, 8), ints()),
        ),
        "top_k": (lambda x: lax.top_k(x, 2), (f32(4, 8),)),
        "approx_top_k": (lambda x: lax.approx_max_k(x, 2), (f32(4, 8),)),
        "sort": (lambda x: lax.sort(x, dimension=0), (f32(4, 8),)),
        "sort pairs": (lambda x, y: lax.sort((x, y), num_keys=1), (f32(4, 8), ints(4, 8))),
        "argsort": (lambda x: jnp.argsort(x, axis=1), (f32(4, 8),)),
        "fft": (lambda x: jnp.fft.fft(x, axis=1), (f32(4, 8),)),
        "rfft": (lambda x: jnp.fft.rfft(x), (f32(4, 8),)),
    }


def contractions() -> dict[str, Case]:
    return {
        "matmul": (jnp.matmul, (f32(4, 8), f32(8, 16))),
        "matmul int": (jnp.matmul, (ints(4, 8), ints(8, 4))),
        "matmul bf16": (jnp.matmul, (bf16(4, 8), bf16(8, 4))),
        "matmul widened": (
            lambda x, y: jnp.matmul(x, y, preferred_element_type=np.float32),
            (bf16(4, 8), bf16(8, 4)),
        ),
        "ragged": (lax.ragged_dot, (f32(12, 4), f32(4, 4, 2), RAGGED)),
        "ragged, more than there is": (lax.ragged_dot, (f32(12, 4), f32(4, 4, 2), RAGGED * 2)),
        "ragged gradients": (
            jax.grad(lambda x, w, g: jnp.sum(jnp.sin(lax.ragged_dot(x, w, g))), argnums=(0, 1)),
            (f32(12, 4), f32(4, 4, 2), RAGGED),
        ),
        "matvec": (jnp.matmul, (f32(4, 8), f32(8))),
        "attention": (
            lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
            (f32(2, 4, 2, 8), f32(2, 4, 2, 8)),
        ),
        "two contractions": (
            lambda x, y: jnp.einsum("bhd,hdo->bo", x, y),
            (f32(4, 2, 8), f32(2, 8, 4)),
        ),
        "conv": (conv, (f32(4, 6, 6, 4), f32(3, 3, 4, 8))),
        "conv bf16": (conv, (bf16(2, 4, 4, 4), bf16(3, 3, 4, 4))),
        "conv strided": (
            lambda x, k: conv(x, k, strides=(2, 2), padding="VALID"),
            (f32(4, 8, 8, 4), f32(2, 2, 4, 8)),
        ),
        "conv grouped": (
            lambda x, k: conv(x, k, feature_group_count=2),
            (f32(2, 4, 4, 8), f32(3, 3, 4, 8)),
        ),
        "conv depthwise": (
            lambda x, k: conv(x, k, feature_group_count=4),
            (f32(2, 4, 4, 4), f32(3, 3, 1, 8)),
        ),
        "conv transposed": (
            lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"),
            (f32(2, 4, 4, 4), f32(3, 3, 4, 8)),
        ),
        "conv kernel gradient": (gradient(conv, 1), (f32(4, 4, 4, 4), f32(3, 3, 4, 2))),
        "conv input gradient": (gradient(conv, 0), (f32(4, 4, 4, 4), f32(3, 3, 4, 2))),
        "conv grouped kernel gradient": (
            gradient(lambda x, k: conv(x, k, feature_group_count=2), 1),
            (f32(4, 4, 4, 8), f32(3, 3, 4, 8)),
        ),
        "conv depthwise kernel gradient": (
            gradient(lambda x, k: conv(x, k, feature_group_count=4), 1),
            (f32(4, 4, 4, 4), f32(3, 3, 1, 8)),
        ),
        "conv grouped input gradient": (
            gradient(lambda x, k: conv(x, k, feature_group_count=2), 0),
            (f32(4, 4, 4, 8), f32(3, 3, 4, 8)),
        ),
        "conv kernel gradients of examples": (
            jax.vmap(gradient(conv, 1), (0, None)),
            (f32(4, 2, 4, 4, 2), f32(3, 3, 2, 4)),
        ),
        "conv depthwise kernel gradients of examples": (
            jax.vmap(gradient(depthwise, 1), (0, None)),
            (f32(4, 2, 4, 4, 2), f32(3, 3, 1, 4)),
        ),
        "conv of each with its kernel": (
            jax.vmap(gradient(conv, (0, 1))),
            (f32(4, 2, 4, 4, 2), f32(4, 3, 3, 2, 4)),
        ),
        "conv depthwise of each with its kernel": (
            jax.vmap(gradient(depthwise, (0, 1))),
            (f32(4, 2, 4, 4, 2), f32(4, 3, 3, 1, 4)),
        ),
        "conv by several kernels": (
            jax.vmap(gradient(conv, (0, 1)), (None, 0)),
            (f32(2, 4, 4, 2), f32(4, 3, 3, 2, 4)),
        ),
        "conv depthwise by several kernels": (
            jax.vmap(gradient(depthwise, (0, 1)), (None, 0)),
            (f32(2, 4, 4, 2), f32(4, 3, 3, 1, 4)),
        ),
    }


def reductions() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in ("sum", "max", "min", "prod"):
        function = getattr(jnp, name)
        cases[f"reduce {name}"] = (lambda x, f=function: f(x, axis=1), (f32(4, 8, 2),))
        cases[f"reduce {name} all"] = (lambda x, f=function: f(x), (f32(4, 8),))
        cases[f"reduce {name} int"] = (lambda x, f=function: f(x, axis=0), (ints(8, 4),))
        cases[f"reduce {name} bf16"] = (lambda x, f=function: f(x, axis=0), (bf16(4, 8),))
        cases[f"{name} gradient"] = (jax.grad(lambda x, f=function: f(x)), (f32(4, 8),))
    for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        function = getattr(lax, name)
        cases[name] = (lambda x, f=function: f(x, axis=1), (f32(4, 8),))
        cases[f"{name} reversed"] = (lambda x, f=function: f(x, 0, True), (f32(8, 4),))

    def general(x: Any, initial: Any, body: Any) -> Any:
        return lax.reduce(x, initial, body, (0,))

    pool = ((1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def maximum(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, *pool)

    def total(x: Any) -> Any:
        return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")

    return cases | {
        "all": (lambda x: jnp.all(x, axis=0), (bools(8, 4),)),
        "any": (lambda x: jnp.any(x), (bools(8, 4),)),
        "bitwise": (lambda x: lax.reduce_and(x, (0,)) + lax.reduce_or(x, (0,)), (ints(8, 4),)),
        "xor": (lambda x: lax.reduce_xor(x, (0,)), (ints(8, 4),)),
        "argmax": (lambda x: jnp.argmax(x, axis=1), (f32(4, 8),)),
        "argmin": (lambda x: jnp.argmin(x, axis=0), (f32(8, 4),)),
        "sum of complex": (lambda x: jnp.sum(lax.complex(x, 2 * x), axis=0), (f32(8, 4),)),
        "reduce add": (lambda x: general(x, 0.0, lambda a, b: a + b), (f32(8, 4),)),
        "reduce add from one": (lambda x: general(x, 1.0, lambda a, b: a + b), (f32(8, 4),)),
        "reduce maximum": (lambda x: general(x, 0.5, lambda a, b: lax.max(a, b)), (f32(8, 4),)),
        "reduce other": (lambda x: general(x, 0.0, lambda a, b: a + 2 * b), (f32(8, 4),)),
        "reduce pairs": (
            lambda x, i: lax.reduce(
                (x, i), (-jnp.inf, 0), lambda a, b: (lax.max(a[0], b[0]), lax.max(a[1], b[1])), (0,)
            ),
            (f32(8, 4), ints(8, 4)),
        ),
        "max pool": (maximum, (f32(4, 4, 4, 2),)),
        "max pool gradient": (gradient(maximum), (f32(4, 4, 4, 2),)),
        "average pool": (total, (f32(4, 4, 4, 2),)),
        "average pool gradient": (gradient(total), (f32(4, 4, 4, 2),)),
        "window int": (
            lambda x: lax.reduce_window(x, 0, lax.add, (2, 1), (2, 1), "VALID"),
            (ints(8, 4),),
        ),
        "cholesky": (jnp.linalg.cholesky, (definite(4, 3),)),
        "triangular_solve": (
            lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
            (definite(4, 2), f32(4, 2, 4)),
        ),
        "triangular_solve from the right": (
            lambda a, b: lax.linalg.triangular_solve(a, b, left_side=False, lower=True),
            (definite(4, 2), f32(4, 6, 2)),
        ),
        "lu": (lambda a: lax.linalg.lu(a), (definite(4, 2),)),
        "qr": (lambda a: lax.linalg.qr(a, full_matrices=False), (definite(4, 2),)),
        "eigh": (lambda a: lax.linalg.eigh(a)[1], (definite(4, 2),)),
        "svd": (lambda a: lax.linalg.svd(a, compute_uv=False), (definite(4, 2),)),
        "tridiagonal_solve": (
            lax.linalg.tridiagonal_solve,
            (f32(4, 3), f32(4, 3) + 5, f32(4, 3), f32(4, 3, 2)),
        ),
    }


def indexing() -> dict[str, Case]:
    batched = jax.vmap(lambda x, i: x[i])
    segments = jax.vmap(lambda x, i: jax.ops.segment_sum(x, i, 4))
    outside = jnp.array([0, 3, 7, 8, -1, -9, 20, 5])
    of_bytes = jnp.array([0, 75, 150, 255], np.uint8)
    updates = f32(8, 4)
    cases: dict[str, Case] = {}
    for mode in ("clip", "fill"):
        cases[f"take {mode}"] = (take_mode(mode), (f32(8, 4), outside))
        cases[f"take int {mode}"] = (take_mode(mode), (ints(8, 4), outside))
        cases[f"take by bytes {mode}"] = (take_mode(mode), (f32(304, 2), of_bytes))
    for name in ("set", "add", "mul", "min", "max"):
        for mode in ("clip", "drop", "promise_in_bounds"):
            indices = ints(8, high=8) if mode == "promise_in_bounds" else outside
            if name == "set":
                indices = jnp.array([0, 3, 7, 1, 20, 2, 6, 5]) if mode == "drop" else jnp.arange(8)

            def update(x: Any, i: Any, u: Any, name: str = name, mode: str = mode) -> Any:
                return getattr(x.at[i], name)(u, mode=mode)

            cases[f"scatter {name} {mode}"] = (update, (f32(8, 4), indices, updates))
            place = jnp.array(6 if mode == "promise_in_bounds" else 20)
            cases[f"scatter {name} {mode} at one place"] = (update, (f32(8, 4), place, f32(4)))

    def added_outside(x: Any, i: Any, u: Any) -> Any:
        return x.at[i].add(u, mode="promise_in_bounds")

    cases["scatter add promised outside"] = (added_outside, (f32(8, 4), outside, updates))
    functions = {"sin": jnp.sin, "one": lambda x: 1 + 0 * x, "same": lambda x: x}
    for name, function in functions.items():
        for mode in ("clip", "drop", "promise_in_bounds"):

            def apply(x: Any, i: Any, function: Any = function, mode: str = mode) -> Any:
                return x.at[i].apply(function, mode=mode)

            place = jnp.array(6 if mode == "promise_in_bounds" else 20)
            cases[f"scatter {name} of {mode} at one place"] = (apply, (f32(8, 4), place))
            cases[f"scatter {name} of {mode}"] = (apply, (f32(8, 4), jnp.array([0, 6, 3])))

    def scatter_zeros(i: Any, u: Any) -> Any:
        return jnp.zeros((8, 4)).at[i].add(u, mode="drop")

    def embedding(table: Any, tokens: Any) -> Any:
        return table[tokens]

    return cases | {
        "rows by bytes": (
            lambda x, i: jax.vmap(lambda i: lax.dynamic_index_in_dim(x, i, keepdims=False))(i),
            (f32(304, 2), of_bytes),
        ),
        "take fill value": (take_mode("fill", fill_value=7), (ints(8, 4), outside)),
        "take bool": (take_mode("fill"), (bools(8, 4), outside)),
        "take promised": (lambda x, i: x.at[i].get(mode="promise_in_bounds"), (f32(8, 4), ints(4))),
        "take bf16": (take_mode("clip"), (bf16(8, 4), outside)),
        "embedding": (embedding, (f32(8, 4), ints(2, 4, high=8))),
        "embedding gradient": (gradient(embedding), (f32(8, 4), ints(2, 4, high=8))),
        "scatter zeros": (scatter_zeros, (outside, updates)),
        "scatter zeros int": (
            lambda i, u: jnp.zeros((8,), np.int32).at[i].add(u),
            (ints(8, high=8), ints(8)),
        ),
        "take two dimensions": (
            lambda x, i, j: x.at[i, j].get(mode="fill", fill_value=2.0),
            (f32(8, 4), outside, outside),
        ),
        "scatter one element": (
            lambda x, i, j, u: x.at[i, j].set(u, mode="clip"),
            (f32(8, 8), jnp.array(5), jnp.array(-20), f32()),
        ),
        "scatter two dimensions": (
            lambda x, i, j, u: x.at[i, j].add(u, mode="drop"),
            (f32(8, 8), outside, outside, f32(8)),
        ),
        "scatter two dimensions clip": (
            lambda x, i, j, u: x.at[i, j].add(u, mode="clip"),
            (f32(8, 8), outside, outside, f32(8)),
        ),
        "take windows": (
            lambda x, i: lax.gather(
                x,
                i,
                lax.GatherDimensionNumbers((1, 2), (), (0,)),
                (2, 4),
                mode="fill",
            ),
            (f32(8, 4), outside[:, None]),
        ),
        "take single window": (
            lambda x, i: lax.gather(
                x, i, lax.GatherDimensionNumbers((1, 2), (), (0, 1)), (1, 4), mode="fill"
            ),
            (f32(8, 4), jnp.stack([outside, jnp.zeros(8, int)], -1)),
        ),
        "take_along_axis": (
            lambda x, i: jnp.take_along_axis(x, i[:, None], 1),
            (f32(4, 8), ints(4, high=8)),
        ),
        "take_along_axis gradient": (
            gradient(lambda x, i: jnp.take_along_axis(x, i[:, None], 1)),
            (f32(4, 8), ints(4, high=8)),
        ),
        "batched take": (batched, (f32(4, 8, 2), ints(4, 2, high=8))),
        "batched take gradient": (gradient(batched), (f32(4, 8, 2), ints(4, 2, high=8))),
        "batched segment_sum": (segments, (f32(4, 8, 2), ints(4, 8))),
        "batched segment_sum gradient": (gradient(segments), (f32(4, 8, 2), ints(4, 8))),
        "batched dynamic_slice": (
            jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (4,))),
            (f32(4, 8), ints(4, high=9)),
        ),
        "batched dynamic_update_slice": (
            jax.vmap(lambda x, u, i: lax.dynamic_update_slice(x, u, (i,))),
            (f32(4, 8), f32(4, 4), ints(4, high=9)),
        ),
        "one_hot": (lambda i: jax.nn.one_hot(i, 8), (ints(4, high=8),)),
        "segment_max": (lambda x, i: jax.ops.segment_max(x, i, 4), (f32(8, 2), ints(8))),
        "sort dispatch": (lambda x, k: x[jnp.argsort(k)], (f32(8, 4), f32(8))),
        "index row": (lambda x, i: x[i], (f32(8, 4), ints())),
    }


def generators() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.random.key(3, impl=name)
        keys = jax.random.split(key, 4)
        for width in (8, 16, 32):
            cases[f"{name} bits {width}"] = (
                lambda k, w=width: jax.random.bits(k, (4, 8), f"uint{w}"),
                (key,),
            )
        cases |= {
            f"{name} keys": (jax.vmap(lambda k: jax.random.bits(k, (8,))), (keys,)),
            f"{name} normal": (lambda k: jax.random.normal(k, (4, 8)), (key,)),
            f"{name} dropout": (lambda k: jax.random.bernoulli(k, 0.5, (4, 8)), (key,)),
            f"{name} split": (lambda k: jax.random.split(k, 4), (key,)),
            f"{name} split keys": (jax.vmap(lambda k: jax.random.split(k, 2)), (keys,)),
            f"{name} fold_in": (jax.vmap(jax.random.fold_in, (0, 0)), (keys, jnp.arange(4))),
            f"{name} gamma": (lambda k, a: jax.random.gamma(k, a), (key, jnp.ones((2, 4)))),
            f"{name} key data": (
                lambda k, name=name: jax.random.wrap_key_data(jax.random.key_data(k), impl=name),
                (keys,),
            ),
            f"{name} moved keys": (
                lambda k: jnp.concatenate([k, k[::-1]]).reshape(2, 4).T,
                (keys,),
            ),
            f"{name} chosen keys": (
                lambda k, i, p: jnp.where(p, k[i], k),
                (keys, ints(4), bools(4)),
            ),
        }
    return cases | {
        "raw key": (lambda k: jax.random.uniform(k, (4, 8)), (jax.random.PRNGKey(0),)),
        "seeds": (jax.vmap(jax.random.key), (jnp.arange(4),)),
        "permutation": (lambda k: jax.random.permutation(k, 8), (jax.random.key(0),)),
        "categorical": (lambda k, x: jax.random.categorical(k, x), (jax.random.key(0), f32(4, 8))),
        "rng_bit_generator": (
            lambda k: lax.rng_bit_generator(k, (4, 8)),
            (jnp.arange(4, dtype=np.uint32),),
        ),
    }


def all_equations() -> dict[str, Case]:
    return elementwise() | shapes() | contractions() | reductions() | indexing() | generators()
