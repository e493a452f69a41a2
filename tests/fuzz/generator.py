"""Random train steps, as Python source: the same seed gives the same program.

A program is a loss of lines that each make one value from earlier ones, an optimizer, and how the
loss is put together. Values have a batch of rows first; weights are made where they are used. What
a line does is written by one of the functions in `OPERATIONS`, so a new kind of line is one more.
`BF16` and `F32` are names in the source: the reference binds both to float64.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

Shape = tuple[int, ...]
VOCABULARY, CLASSES = 50, 10

HEADER = """
def norm(x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)

@jax.custom_vjp
def halved(x):
    return jnp.tanh(x)
halved.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (0.5 * g * (1 - jnp.tanh(x) ** 2),))

def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jax.nn.logsumexp(logits, -1) - picked

def conv(x, kernel):
    numbers = ("NHC", "HIO", "NHC")
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=numbers)
"""


class Value(NamedTuple):
    """A value of the program: a name, a shape whose first dimension is the batch, and a dtype."""

    name: str
    shape: Shape
    dtype: str = "F32"


@dataclass(frozen=True)
class GeneratedProgram:
    """A train step's source, and the shapes of what it takes."""

    seed: int
    lines: tuple[str, ...]
    loss: str
    optimizer: str
    weights: dict[str, Shape]
    batch: dict[str, Shape]
    is_low: bool

    @property
    def source(self) -> str:
        """The whole step, as text that runs by itself."""
        body = "\n".join("    " + line for text in self.lines for line in text.split("\n"))
        return (
            f"{HEADER}\n"
            f"def loss_fn(p, b, key):\n"
            f"    x, ids, y, m = b['x'], b['ids'], b['y'], b['m']\n{body}\n"
            f"    return {self.loss}\n\n"
            f"optimizer = {self.optimizer}\n\n"
            "def step(state, b, key):\n"
            "    p, o = state\n"
            "    loss, g = jax.value_and_grad(loss_fn)(p, b, key)\n"
            "    u, o = optimizer.update(g, o, p)\n"
            "    return (optax.apply_updates(p, u), o), loss\n"
        )

    def build(self, *, is_reference: bool = False) -> tuple[Callable[..., Any], Any]:
        """The step and its optimizer; the reference computes in float64."""
        names: dict[str, Any] = {"functools": functools, "jax": jax, "jnp": jnp, "optax": optax}
        names["checkpoint_name"] = checkpoint_name
        names["F32"] = jnp.float64 if is_reference else jnp.float32
        names["BF16"] = jnp.float64 if is_reference else jnp.bfloat16
        exec(compile(self.source, f"<program {self.seed}>", "exec"), names)
        return names["step"], names["optimizer"]

    def arguments(self, optimizer: Any, dtype: Any = np.float32) -> tuple[Any, Any, Any]:
        """State, batch and key, with the same numbers in any dtype."""
        numbers = np.random.default_rng(self.seed)
        weights = {
            name: jnp.asarray(numbers.normal(size=shape) / max(shape[-2:-1] or (4,)) ** 0.5, dtype)
            for name, shape in self.weights.items()
        }
        rows = self.batch["x"]
        batch = {
            "x": jnp.asarray(numbers.normal(size=rows), dtype),
            "ids": jnp.asarray(numbers.integers(0, VOCABULARY, rows[:2]), jnp.int32),
            "y": jnp.asarray(numbers.integers(0, CLASSES, rows[0]), jnp.int32),
            "m": jnp.asarray(numbers.random(rows[:2]) < 0.8, dtype),
        }
        return (weights, optimizer.init(weights)), batch, jax.random.key(self.seed)

    def shorter(self) -> list[GeneratedProgram]:
        """The same program with one line replaced by the value that it was made from."""
        found = []
        for number, line in enumerate(self.lines):
            name, _, rest = line.partition(" = ")
            for other in reversed(self.lines[:number]):
                earlier = other.partition(" = ")[0]
                if name.isidentifier() and earlier in rest:
                    changed = (*self.lines[:number], f"{name} = {earlier}")
                    found.append(replace(self, lines=(*changed, *self.lines[number + 1 :])))
                    break
        return found


@dataclass
class Writer:
    """What is written so far."""

    rng: random.Random
    size: int
    lines: list[str] = field(default_factory=list)
    weights: dict[str, Shape] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    count: int = 0

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = shape
        return f"p['{name}']"

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def add(self, text: str, shape: Shape, dtype: str = "F32") -> Value:
        value = Value(self.fresh(), shape, dtype)
        self.lines.append(f"{value.name} = {text}")
        self.values.append(value)
        return value

    def pick(self, rank: int | None = None) -> Value:
        """A value, most often a recent one; one of `rank` dimensions is made if there is none."""
        known = [v for v in self.values if rank in (None, len(v.shape))]
        if not known:
            return self._of_rank(rank)
        value = known[-1 - min(int(self.rng.expovariate(1.0)), len(known) - 1)]
        self.used.add(value.name)
        return value

    def _of_rank(self, rank: int | None) -> Value:
        source = self.pick()
        name, (rows, *_, width), dtype = source
        if rank == 2:
            return self.add(f"{name}.mean(1)", (rows, width), dtype)
        steps = f"jnp.arange(1, 5, dtype={dtype})[:, None] / 4"
        return self.add(f"{name}[:, None] * {steps}", (rows, 4, width), dtype)

    def alike(self, value: Value) -> Value:
        """Another value of the same shape, or the same one."""
        other = self.rng.choice([v for v in self.values if v.shape == value.shape])
        self.used.add(other.name)
        return other


# Lines. Each takes the writer, and adds values to it.


def elementwise(w: Writer) -> None:
    v = w.pick()
    forms = (
        "jnp.tanh({0})", "jax.nn.gelu({0})", "jax.nn.silu({0})", "jnp.sin({0}) * {0}",
        "jnp.exp(-{0} * {0})", "jnp.sqrt(jnp.abs({0}) + 0.1)", "jax.nn.softplus({0})",
        "halved({0})", "jnp.log1p({0} * {0})", "jnp.clip({0}, -1.0, 1.5)", "{0} ** 3 / 8",
    )  # fmt: skip
    w.add(w.rng.choice(forms).format(v.name), v.shape, v.dtype)


def two_values(w: Writer) -> None:
    v = w.pick()
    o = w.alike(v)
    forms = (
        "{0} + {1}", "{0} * jnp.tanh({1})", "{0} - 0.5 * {1}", "jnp.maximum({0}, {1})",
        "jnp.where({0} > {1}, {0}, 0.1 * {1})", "{0} / (1 + {1} * {1})",
    )  # fmt: skip
    dtype = v.dtype if v.dtype == o.dtype else "F32"
    w.add(w.rng.choice(forms).format(v.name, o.name), v.shape, dtype)


def dense(w: Writer) -> None:
    v = w.pick()
    width, cast = w.rng.choice((w.size, 2 * w.size)), v.dtype
    out = w.rng.choice(("", f" + {w.weight(width)}.astype({cast})"))
    kernel = w.weight(v.shape[-1], width)
    w.add(f"{v.name} @ {kernel}.astype({cast}){out}", (*v.shape[:-1], width), cast)


def dense_widened(w: Writer) -> None:
    v = w.pick()
    kernel = w.weight(v.shape[-1], w.size)
    text = f"jnp.matmul({v.name}.astype(BF16), {kernel}.astype(BF16), preferred_element_type=F32)"
    w.add(text, (*v.shape[:-1], w.size))


def residual_block(w: Writer) -> None:
    v = w.pick()
    up, down, d = w.weight(v.shape[-1], 16), w.weight(16, v.shape[-1]), v.dtype
    text = f"{v.name} + jnp.tanh(norm({v.name}) @ {up}.astype({d})) @ {down}.astype({d})"
    w.add(text, v.shape, d)


def normalize(w: Writer) -> None:
    v = w.pick()
    forms = (
        "norm({0})", "jax.nn.softmax({0}, -1)", "jax.nn.log_softmax({0}, -1)",
        "({0} - {0}.mean(-1, keepdims=True)) / ({0}.std(-1, keepdims=True) + 0.1)",
        "{0} - jax.lax.stop_gradient({0}.max(-1, keepdims=True))",
        "{0} * {1}.astype({2})",
    )  # fmt: skip
    form = w.rng.choice(forms)
    scale = w.weight(v.shape[-1]) if "{1}" in form else ""
    w.add(form.format(v.name, scale, v.dtype), v.shape, v.dtype)


def attention(w: Writer) -> None:
    v = w.pick(3)
    d, head = v.shape[-1], 4
    q, k, u = (w.weight(d, 2, head) for _ in range(3))
    o, cast, names = w.weight(2, head, d), v.dtype, [w.fresh() for _ in range(3)]
    parts = zip(names, (q, k, u), strict=True)
    w.lines += [
        f"{n} = jnp.einsum('btd,dhk->bthk', {v.name}, {x}.astype({cast}))" for n, x in parts
    ]
    mask = ""
    if w.rng.random() < 0.5:
        mask = (
            f" + jnp.where(jnp.tril(jnp.ones(({v.shape[1]},) * 2, bool)), 0.0, -9.0).astype({cast})"
        )
    scores = w.fresh()
    products = f"jnp.einsum('bthk,bshk->bhts', {names[0]}, {names[1]})"
    w.lines.append(f"{scores} = jax.nn.softmax({products} / 2{mask})")
    text = f"jnp.einsum('bhts,bshk->bthk', {scores}, {names[2]})"
    w.add(f"jnp.einsum('bthk,hkd->btd', {text}, {o}.astype({cast}))", v.shape, cast)


def over_time(w: Writer) -> None:
    v = w.pick(3)
    forms = (
        "{0}.mean(1, keepdims=True) + {0}", "{0} - {0}.max(1, keepdims=True)",
        "jnp.cumsum({0}, 1) / 4", "jnp.roll({0}, 1, 1)", "{0}[:, ::-1]", "jnp.sort({0}, 1)",
        "jnp.concatenate([{0}[:, 1:], {0}[:, :1]], 1)",
        "jnp.pad({0}, ((0, 0), (1, 0), (0, 0)))[:, :-1] + {0}",
        "jax.lax.associative_scan(jnp.add, {0} * 0.5, axis=1)",
        "jax.lax.cumlogsumexp({0}, 1)",
        "jnp.take_along_axis({0}, jnp.argsort({0}[..., :1], 1), 1)",
        "{0}.at[:, 0].set(0.0)", "{0}.at[:, :2].add({0}[:, -2:])",
    )  # fmt: skip
    w.add(w.rng.choice(forms).format(v.name), v.shape, v.dtype)


def pooled(w: Writer) -> None:
    v = w.pick(3)
    flat = (v.shape[0], v.shape[1] * v.shape[2])
    text, width = w.rng.choice((
        (f"{v.name}.mean(1)", v.shape[2]),
        (f"{v.name}.max(1)", v.shape[2]),
        (f"{v.name}[:, -1]", v.shape[2]),
        (f"({v.name} * m[:, :{v.shape[1]}, None].astype({v.dtype})).sum(1) / 4", v.shape[2]),
        (f"{v.name}.reshape({v.shape[0]}, -1)", flat[1]),
    ))  # fmt: skip
    w.add(text, (v.shape[0], width), v.dtype)


def rearranged(w: Writer) -> None:
    v = w.pick(3)
    rows, time, d = v.shape
    kind = w.rng.randrange(3)
    if kind == 0:  # as one list of tokens
        kernel = w.weight(d, w.size)
        text = f"({v.name}.reshape(-1, {d}) @ {kernel}.astype({v.dtype}))"
        w.add(f"{text}.reshape({rows}, {time}, {w.size})", (rows, time, w.size), v.dtype)
    elif kind == 1:  # mixing over time
        kernel = w.weight(time, time)
        text = f"({v.name}.swapaxes(1, 2) @ {kernel}.astype({v.dtype})).swapaxes(1, 2)"
        w.add(text, v.shape, v.dtype)
    else:
        w.add(f"jnp.concatenate(jnp.split({v.name}, 2, -1)[::-1], -1)", v.shape, v.dtype)


def joined(w: Writer) -> None:
    v = w.pick()
    o = w.alike(v)
    dtype = v.dtype if v.dtype == o.dtype else "F32"
    shape = (*v.shape[:-1], 2 * v.shape[-1])
    if shape[-1] <= 64:
        w.add(f"jnp.concatenate([{v.name}, {o.name}], -1)", shape, dtype)


def convolved(w: Writer) -> None:
    v = w.pick(3)
    kernel = w.weight(3, v.shape[-1], w.size)
    w.add(f"conv({v.name}, {kernel}.astype({v.dtype}))", (*v.shape[:-1], w.size), v.dtype)


def embedded(w: Writer) -> None:
    table = w.weight(VOCABULARY, w.size)
    w.add(f"{table}[ids]", (*w.values[0].shape[:2], w.size))


def looked_up(w: Writer) -> None:
    v = w.pick(3)
    forms = (
        "jax.vmap(lambda a, i: jnp.zeros_like(a).at[i % a.shape[0]].add(a))({0}, ids[:, :{1}])",
        "jax.vmap(lambda a, i: a[i % a.shape[0]])({0}, ids[:, :{1}])",
        "{0} * jax.nn.one_hot(ids[:, :{1}] % {2}, {2}, dtype={3})",
        "jax.vmap(lambda a, i: jax.ops.segment_sum(a, i % {1}, {1}))({0}, ids[:, :{1}])",
    )  # fmt: skip
    if v.shape[1] <= w.values[0].shape[1]:
        text = w.rng.choice(forms).format(v.name, v.shape[1], v.shape[2], v.dtype)
        w.add(text, v.shape, v.dtype)


def best(w: Writer) -> None:
    v = w.pick()
    k = min(4, v.shape[-1])
    w.add(f"jax.lax.top_k({v.name}, {k})[0]", (*v.shape[:-1], k), v.dtype)


def experts(w: Writer) -> None:
    v = w.pick(2)
    gate, kernels, cast = w.weight(v.shape[1], 4), w.weight(4, v.shape[1], w.size), v.dtype
    chosen = w.fresh()
    w.lines.append(f"{chosen} = jax.nn.softmax({v.name} @ {gate}.astype({cast}), -1)")
    text = f"jnp.einsum('be,edf,bd->bf', {chosen}, {kernels}.astype({cast}), {v.name})"
    w.add(text, (v.shape[0], w.size), cast)


def dropped(w: Writer) -> None:
    v = w.pick()
    number = w.rng.randrange(100)
    draw = f"jax.random.uniform(jax.random.fold_in(key, {number}), {v.shape}, jnp.float32)"
    w.add(f"jnp.where({draw} < 0.8, {v.name} / 0.8, 0)", v.shape, v.dtype)


def cast(w: Writer) -> None:
    v = w.pick()
    dtype = "BF16" if v.dtype == "F32" else "F32"
    w.add(f"{v.name}.astype({dtype})", v.shape, dtype)


def layers(w: Writer) -> None:
    """A scan over stacked layers, with or without remat and casts."""
    v = w.pick()
    d, depth = v.shape[-1], w.rng.choice((2, 4))
    kernels, scales, name = w.weight(depth, d, d), w.weight(depth, d), w.fresh()
    half = w.rng.random() < 0.4
    read = "norm(c.astype(BF16)) @ l[0].astype(BF16)" if half else "norm(c) @ l[0]"
    policy = w.rng.choice(("", "@jax.checkpoint\n", f"@{checkpoint(w)}\n"))
    body = f"    return (c + jnp.tanh({read}) * l[1]).astype(c.dtype), None"
    w.lines.append(f"{policy}def {name}(c, l):\n{body}")
    w.add(f"jax.lax.scan({name}, {v.name}, ({kernels}, {scales}))[0]", v.shape, v.dtype)


def recurrent(w: Writer) -> None:
    """A scan over time."""
    v = w.pick(3)
    d, name = v.shape[-1], w.fresh()
    kernel = w.weight(d, d)
    w.lines.append(
        f"def {name}(c, t):\n    c = jnp.tanh(c @ {kernel}.astype(c.dtype) + t)\n    return c, c"
    )
    start = f"jnp.zeros_like({v.name}[:, 0])"
    text = f"jax.lax.scan({name}, {start}, {v.name}.swapaxes(0, 1))[1].swapaxes(0, 1)"
    w.add(text, v.shape, v.dtype)


def checkpoint(w: Writer) -> str:
    """A decorator."""
    policy = w.rng.choice((
        "dots_saveable", "nothing_saveable", "everything_saveable",
        "dots_with_no_batch_dims_saveable", "save_only_these_names('kept')",
    ))  # fmt: skip
    prevent = w.rng.choice(("", ", prevent_cse=False"))
    return f"functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.{policy}{prevent})"


def rematerialized(w: Writer) -> None:
    v = w.pick()
    d, name, cast_ = v.shape[-1], w.fresh(), v.dtype
    up, down = w.weight(d, 16), w.weight(16, d)
    policy = w.rng.choice(("jax.checkpoint", checkpoint(w)))
    w.lines.append(
        f"@{policy}\n"
        f"def {name}(v, up, down):\n"
        f"    h = checkpoint_name(jax.nn.gelu(norm(v) @ up), 'kept')\n"
        "    return v + jnp.sin(h @ down)"
    )
    text = f"{name}({v.name}, {up}.astype({cast_}), {down}.astype({cast_}))"
    w.add(text, v.shape, cast_)


def branched(w: Writer) -> None:
    v = w.pick()
    condition = w.rng.choice((f"{w.weight(1)}[0] > 0", "jax.random.bernoulli(key)"))
    kernel = w.weight(v.shape[-1], v.shape[-1])
    text = (
        f"jax.lax.cond({condition}, lambda a: jnp.tanh(a @ {kernel}.astype(a.dtype)), "
        f"lambda a: 0.5 * a, {v.name})"
    )
    w.add(text, v.shape, v.dtype)


def whole_batch(w: Writer) -> None:
    v = w.pick()
    forms = ("{0} - {0}.mean(0)", "{0} / ({0}.std(0) + 0.5)", "jnp.sort({0}, 0)", "{0}[::-1]")
    w.add(w.rng.choice(forms).format(v.name), v.shape, v.dtype)


def jitted(w: Writer) -> None:
    v = w.pick()
    table = f"jnp.linspace(0.5, 1.5, {v.shape[-1]}, dtype={v.dtype})"
    w.add(f"jax.jit(lambda a: jnp.tanh(a) * {table})({v.name})", v.shape, v.dtype)


OPERATIONS: dict[Callable[[Writer], None], float] = {
    elementwise: 3, two_values: 3, dense: 3, dense_widened: 1, residual_block: 2, normalize: 2,
    attention: 1.5, over_time: 2, pooled: 0.7, rearranged: 1.5, joined: 1, convolved: 1,
    embedded: 0.7, looked_up: 1, best: 0.5, experts: 0.7, dropped: 1, cast: 1.5, layers: 1.5,
    recurrent: 0.5, rematerialized: 1.5, branched: 0.5, whole_batch: 0.15, jitted: 0.5,
}  # fmt: skip

LOSSES = {
    "jnp.mean(l)": 4, "jnp.sum(l) / 16": 1, "jnp.sum(l * m[:, 0]) / jnp.sum(m[:, 0])": 1.5,
    "jnp.sqrt(jnp.mean(l) + 1e-2)": 0.5, "jax.nn.logsumexp(l)": 0.5,
    "jnp.log(jnp.mean(jnp.exp(-l)) + 1.0)": 0.5, "jnp.mean(l ** 2) / (1 + jnp.mean(l))": 0.3,
    "jnp.sum(jax.nn.softmax(l) * l)": 0.2, "jnp.mean(l) ** 2": 0.3, "jnp.max(l)": 0.2,
}  # fmt: skip

OPTIMIZERS = (
    "optax.sgd(0.1)",
    "optax.sgd(0.1, momentum=0.9)",
    "optax.adam(1e-2, eps=1e-2)",
    "optax.adamw(1e-2, eps=1e-2, weight_decay=0.1)",
    "optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))",
    "optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-2))",
)


def generate(seed: int) -> GeneratedProgram:
    """The program of a seed."""
    rng = random.Random(seed)
    rows, time = rng.choice((16, 16, 24, 32)), rng.choice((4, 6, 8))
    w = Writer(rng, size=rng.choice((8, 12, 16)))
    shape = (rows, time, w.size)
    w.values.append(Value("x", shape))
    for function in rng.choices([*OPERATIONS], [*OPERATIONS.values()], k=rng.randint(3, 9)):
        function(w)
    last = w.values[-1]
    if len(last.shape) == 3:
        last = w.add(f"{last.name}.mean(1)", (rows, last.shape[2]), last.dtype)
    if rng.random() < 0.6:
        head = w.weight(last.shape[1], CLASSES)
        w.lines.append(f"l = cross_entropy({last.name}.astype(F32) @ {head}, y)")
    else:
        head = w.weight(last.shape[1], w.size)
        target = "x.mean(1)"
        w.lines.append(f"l = jnp.mean(({last.name}.astype(F32) @ {head} - {target}) ** 2, -1)")
    loss = rng.choices([*LOSSES], [*LOSSES.values()])[0]
    for value in w.values[1:-1]:  # what nothing else reads is a loss of its own
        if value.name not in w.used and value != last:
            loss += f" + 0.1 * jnp.mean(jnp.square({value.name}.astype(F32)))"
    return GeneratedProgram(
        seed=seed,
        lines=tuple(w.lines),
        loss=loss,
        optimizer=rng.choice(OPTIMIZERS),
        weights=w.weights,
        batch={"x": shape},
        is_low="BF16" in "\n".join(w.lines),
    )
