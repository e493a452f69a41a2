"""Memory of single layers of attention without flash kernels: planned beside compiled.

    python benchmarks/attention.py --target tpu:v5e:2x4 --lengths 2048 4096
    python benchmarks/attention.py --target gpu:h100 --forms plain grouped --json

What compilers write of scores, exponentials and probabilities hangs on how attention is written: as
einsums or by `jax.nn.dot_product_attention`, with as many key heads as query heads or fewer, with
or without a mask and rotary positions. Each layer is computed again in the backward pass
(`jax.checkpoint`; not with `--keep`), by `data` on eight devices. The last line is JSON with
`--json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import autopar

CLUSTERS = {"tpu:v5e:2x4": "8 tpu-v5e", "tpu:v5p:2x2x2": "8 tpu-v5p", "gpu:h100": "8xh100"}
GROUP = 4
"""Query heads for a key head."""


def masked(scores: jax.Array, dtype: Any, softmax_dtype: Any = jnp.float32) -> jax.Array:
    length, width = scores.shape[-1], jnp.finfo(softmax_dtype)
    wide = jnp.where(
        jnp.tril(jnp.ones((length, length), bool)), scores.astype(softmax_dtype), width.min
    )
    return jax.nn.softmax(wide).astype(dtype)


def plain(q: Any, k: Any, v: Any) -> Any:
    p = masked(jnp.einsum("bqhd,bkhd->bhqk", q, k), q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def library(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def library_grouped(q: Any, k: Any, v: Any) -> Any:
    heads = q.shape[2] // GROUP
    return jax.nn.dot_product_attention(q, k[:, :, :heads], v[:, :, :heads], is_causal=True)


def grouped(q: Any, k: Any, v: Any) -> Any:
    heads = q.shape[2] // GROUP
    split = q.reshape(*q.shape[:2], heads, GROUP, q.shape[-1])
    p = masked(jnp.einsum("btkge,bske->bkgts", split, k[:, :, :heads]), q.dtype)
    return jnp.einsum("bkgts,bske->btkge", p, v[:, :, :heads]).reshape(q.shape)


def turned(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    p = masked(jnp.einsum("bhqd,bhkd->bhqk", q, k), q.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", p, v).swapaxes(1, 2)


def unmasked(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)


def short(q: Any, k: Any, v: Any) -> Any:
    p = masked(jnp.einsum("bqhd,bkhd->bhqk", q, k), q.dtype, q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def windowed_caps(scores: jax.Array, dtype: Any) -> jax.Array:
    """Scores of at most 50 either way, of the last quarter of positions (as Gemma 2 has them)."""
    capped = 50.0 * jnp.tanh(scores.astype(jnp.float32) / 50.0)
    rows, columns = (jnp.arange(scores.shape[-1]) for _ in range(2))
    behind = rows[:, None] - columns[None, :]
    near = (behind >= 0) & (behind < scores.shape[-1] // 4)
    return jax.nn.softmax(jnp.where(near, capped, -2.4e38)).astype(dtype)


def capped(q: Any, k: Any, v: Any) -> Any:
    p = windowed_caps(jnp.einsum("bqhd,bkhd->bhqk", q, k), q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def capped_grouped(q: Any, k: Any, v: Any) -> Any:
    heads = q.shape[2] // GROUP
    split = q.reshape(*q.shape[:2], heads, GROUP, q.shape[-1])
    p = windowed_caps(jnp.einsum("btkge,bske->bkgts", split, k[:, :, :heads]), q.dtype)
    return jnp.einsum("bkgts,bske->btkge", p, v[:, :, :heads]).reshape(q.shape)


def grouped_wide(q: Any, k: Any, v: Any) -> Any:
    return _wide(q, k, v, masked)


def capped_grouped_wide(q: Any, k: Any, v: Any) -> Any:
    return _wide(q, k, v, windowed_caps)


def _wide(q: Any, k: Any, v: Any, softmax: Callable[[Any, Any], Any]) -> Any:
    """Grouped attention whose product of queries and keys is in float32."""
    heads = q.shape[2] // GROUP
    split = q.reshape(*q.shape[:2], heads, GROUP, q.shape[-1])
    scores = jnp.einsum(
        "btkge,bske->bkgts", split, k[:, :, :heads], preferred_element_type=jnp.float32
    )
    p = softmax(scores, q.dtype)
    return jnp.einsum("bkgts,bske->btkge", p, v[:, :, :heads]).reshape(q.shape)


def keys_first(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bkhd,bqhd->bhkq", k, q).astype(jnp.float32)
    mask = jnp.triu(jnp.ones(scores.shape[-2:], bool))
    p = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-2).astype(q.dtype)
    return jnp.einsum("bhkq,bkhd->bqhd", p, v)


def heads_last(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bqkh", q, k).astype(jnp.float32)
    mask = jnp.tril(jnp.ones(scores.shape[1:3], bool))[..., None]
    p = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=2).astype(q.dtype)
    return jnp.einsum("bqkh,bkhd->bqhd", p, v)


_WAYS = (plain, library, library_grouped, grouped, turned, unmasked, short)
_LESS_USUAL = (
    grouped_wide,
    capped,
    capped_grouped,
    capped_grouped_wide,
    keys_first,
    heads_last,
)
FORMS: dict[str, Callable[[Any, Any, Any], Any]] = {f.__name__: f for f in (*_WAYS, *_LESS_USUAL)}


def rotated(x: jax.Array) -> jax.Array:
    """Halves turned by positions, and put together."""
    length, width = x.shape[1], x.shape[-1]
    rate = 10000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = (jnp.arange(length, dtype=jnp.float32)[:, None] * rate)[None, :, None]
    one, other = jnp.split(x.astype(jnp.float32), 2, -1)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    halves = one * cosine - other * sine, other * cosine + one * sine
    return jnp.concatenate(halves, -1).astype(x.dtype)


def step_of(form: str, rotary: bool, keep: bool) -> Callable[..., Any]:
    def layer(weights: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btm,mhd->bthd", x, weights[name]) for name in "qkv")
        q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
        if rotary:
            q, k = rotated(q), rotated(k)
        return x + jnp.einsum("bthd,hdm->btm", FORMS[form](q, k, v), weights["o"])

    applied = layer if keep else jax.checkpoint(layer)

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean(applied(weights, x).astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), weights, gradients), value

    return step


def row(form: str, rotary: bool, length: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Bytes of a device, planned and compiled."""
    model, bf16 = asked.heads * asked.width, jnp.bfloat16
    weights = {n: jax.ShapeDtypeStruct((model, asked.heads, asked.width), bf16) for n in "qkv"}
    weights["o"] = jax.ShapeDtypeStruct((asked.heads, asked.width, model), bf16)
    x = jax.ShapeDtypeStruct((8 * asked.sequences, length, model), bf16)
    cluster = CLUSTERS.get(asked.target, "8 cpu")
    options: dict[str, Any] = {
        "cluster": cluster,
        "method": "data",
        "microbatches": 1,
        "progress": False,
    }
    plan = autopar.plan(step_of(form, rotary, asked.keep), weights, x, **options)
    (stage,) = plan.verify(asked.target).stages
    planned, compiled = stage.planned_bytes, stage.compiled_bytes
    ratio = planned / compiled if compiled else None
    found = {"planned_bytes": planned, "compiled_bytes": compiled, "ratio": ratio}
    return {"form": form, "rotary": rotary, "length": length, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e:2x4", choices=[*CLUSTERS, "cpu"])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048])
    parser.add_argument("--sequences", type=int, default=8, help="on a device")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128, help="of a head")
    parser.add_argument("--keep", action="store_true", help="compute nothing again")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    asked = parser.parse_args()
    rows = [
        row(form, rotary, length, asked)
        for length in asked.lengths
        for rotary in (False, True)
        for form in asked.forms
    ]
    table = Table("attention", "rotary", "length", "planned", "compiled", "planned / compiled")
    for x in rows:
        sizes = [f"{x[kind] / 2**20:.0f} MiB" for kind in ("planned_bytes", "compiled_bytes")]
        is_rotary = "yes" if x["rotary"] else ""
        table.add_row(x["form"], is_rotary, str(x["length"]), *sizes, f"{x['ratio']:.2f}")
    Console(width=100).print(table)
    if asked.json:
        print(json.dumps({"target": asked.target, "rows": rows}))


if __name__ == "__main__":
    main()
