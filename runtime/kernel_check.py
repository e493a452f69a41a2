"""Our kernels for grouped products are tried on the GPU that is to run them, once in a process.

They are written in a language that its compiler supports as well as it can, for GPUs of several
kinds: what they compute is held against numbers of the host before a step relies on it.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from autopar.base.errors import KernelWarning
from autopar.passes.primitives.group_kernels import COLUMN, DEPTH, GROUP, Kernels
from autopar.passes.primitives.group_tiling import GROUPED, LOOPS, GroupedMeans
from autopar.passes.sharding.compiler_rules import CompilerRules, rules_of
from autopar.passes.sharding.spmd_program import Block, Branch, Compute, Loop

SIZES = (300, 0, 170, 60, 100)
ROWS, DEPTH_SIZE, COLUMNS = 640, 200, 320
"""Groups that tiles do not divide, one that is empty, and rows that are in none."""
ERROR = 1e-3
"""Of sums in float32 of exact products, in another order, relative to the largest."""


def rules_here(device: jax.Device, blocks: Iterable[Block]) -> CompilerRules:
    """The rules for a device that is to run some blocks.

    Warns:
      KernelWarning: kernels of ours do not work there; loops compute grouped products.
    """
    rules = rules_of(device.device_kind)
    if rules.grouped.tiles is None or not any(map(_has_grouped, blocks)):
        return rules
    own = [x for x in jax.local_devices(backend=device.platform) if x.device_kind]
    problem = problem_on(own[0], rules.grouped)
    if not problem:
        return rules
    warnings.warn(
        KernelWarning(
            f"autopar's kernels for grouped products do not work on {device.device_kind}: "
            f"{problem}. Loops compute them, and take longer than the plan says.",
        ),
        stacklevel=2,
    )
    return dataclasses.replace(rules, grouped=LOOPS)


def _has_grouped(block: Block) -> bool:
    for instruction in block.instructions:
        if isinstance(instruction, Compute):
            if instruction.eqn.primitive.name in GROUPED:
                return True
        elif isinstance(instruction, Loop):
            if _has_grouped(instruction.body):
                return True
        elif isinstance(instruction, Branch) and any(map(_has_grouped, instruction.blocks)):
            return True
    return False


@functools.cache
def problem_on(device: jax.Device, means: GroupedMeans) -> str:
    """What is wrong with our kernels on a device; "": nothing."""
    assert means.tiles is not None
    random = np.random.default_rng(0)
    index = jnp.asarray(random.permutation(ROWS), jnp.int32)
    shapes = ((ROWS, DEPTH_SIZE), (len(SIZES), DEPTH_SIZE, COLUMNS), (ROWS, COLUMNS))
    left, right, other = (jnp.asarray(random.normal(size=s), jnp.bfloat16) for s in shapes)
    kernels = Kernels(means.tiles, means.interpret)

    def by_kernels(left: jax.Array, right: jax.Array, other: jax.Array) -> list[jax.Array]:
        groups = jnp.asarray(SIZES, jnp.int32)
        sizes = jnp.asarray((*SIZES, ROWS - sum(SIZES)), jnp.int32)
        turned = right.swapaxes(1, 2)
        rows = functools.partial(kernels.rows, tile_rows=means.tiles.rows)  # type: ignore[union-attr]
        return [
            rows(left, right, sizes, index, jnp.float32, roles=(GROUP, DEPTH, COLUMN)),
            rows(left, turned, sizes, index, jnp.float32, roles=(GROUP, COLUMN, DEPTH)),
            kernels.sums(left, other, groups, index, jnp.float32),
        ]

    try:
        with jax.default_device(device):
            found = [np.asarray(x) for x in jax.jit(by_kernels)(left, right, other)]
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    rows, sums = _by_host(*(np.asarray(x, np.float32) for x in (left, right, other, index)))
    for name, made, wanted in zip(("rows", "rows", "sums"), found, (rows, rows, sums), strict=True):
        worst = float(np.max(np.abs(made - wanted)))
        if not worst <= ERROR * float(np.max(np.abs(wanted))):
            return f"{name} differ by {worst:.3g} from those of the host"
    return ""


def _by_host(
    left: np.ndarray, right: np.ndarray, other: np.ndarray, index: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    rows = np.zeros((ROWS, COLUMNS), np.float32)
    sums = np.zeros((len(SIZES), DEPTH_SIZE, COLUMNS), np.float32)
    start, places = 0, index.astype(np.int64)
    for group, size in enumerate(SIZES):
        own = places[start : start + size]
        rows[own] = left[own] @ right[group]
        sums[group] = left[own].T @ other[own]
        start += size
    return rows, sums
