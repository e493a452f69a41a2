"""Our kernels for grouped products are tried on the GPU that is to run them, once in a process.

They are written in a language that its compiler supports as well as it can, for GPUs of several
kinds: what they compute is held against numbers of the host before a step relies on it. They are
tried with large and small tiles, sizes that these divide and do not, all orders of matrices that
are used, both short dtypes, and rows that lie as they come and not.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.base.errors import KernelWarning
from autopar.passes.primitives.group_kernels import COLUMN, DEPTH, GROUP, Kernels, Roles
from autopar.passes.primitives.group_tiling import GROUPED, LOOPS, GroupedMeans
from autopar.passes.sharding.compiler_rules import CompilerRules, rules_of
from autopar.passes.sharding.spmd_program import Block, Branch, Compute, Loop
from autopar.runtime.agreed_checks import agreed_checks

SIZES = (300, 0, 170, 60, 100)
NUM_ROWS = 640
"""Groups that tiles do not divide, one that is empty, and rows that are in none."""
WIDTHS = ((200, 320), (256, 512))
"""What is summed, and columns: those that tiles do not divide, and those that they do."""
ORDERS: tuple[Roles, ...] = (
    (GROUP, DEPTH, COLUMN),
    (GROUP, COLUMN, DEPTH),
    (DEPTH, GROUP, COLUMN),
    (COLUMN, GROUP, DEPTH),
)
ERROR = {np.dtype(np.float32): 1e-3}
SHORT_ERROR = 1e-2
"""Of sums of exact products in another order, relative to the largest; of results of 16 bits."""


def rules_here(devices: Sequence[jax.Device], blocks: Iterable[Block]) -> CompilerRules:
    """The rules for devices of one kind that are to run some blocks, the same in their processes.

    Warns:
      KernelWarning: kernels of ours do not work there; loops compute grouped products.
    """
    device = devices[0]
    rules = rules_of(device.device_kind)
    if rules.grouped.tiles is None or not any(map(_has_grouped, blocks)):
        return rules
    own = [x for x in jax.local_devices(backend=device.platform) if _is_like(x, device)]
    problem = problem_on(own[0], rules.grouped) if own else ""
    members = [x.process_index for x in devices]
    agreed = agreed_checks("kernels for grouped products", members)
    if agreed is not None and agreed.ask(bool(problem)):
        problem = problem or "another process of the step found so"
    if not problem:
        return rules
    warnings.warn(
        KernelWarning(
            f"autopar's kernels for grouped products do not work on {device.device_kind}: "
            f"{problem.rstrip('.')}. Loops compute them; these take longer than the plan says, and "
            "some more memory."
        ),
        stacklevel=2,
    )
    return dataclasses.replace(rules, grouped=LOOPS)


def _is_like(one: jax.Device, other: jax.Device) -> bool:
    return bool(one.device_kind == other.device_kind)


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


def problem_on(device: jax.Device, means: GroupedMeans) -> str:
    """What is wrong with our kernels on a device; "": nothing."""
    try:
        return _found_on(device, means, jax.dtypes.canonicalize_dtype(np.int64).itemsize == 8)
    except Exception as error:  # which may be gone the next time: memory that was not there
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@functools.cache
def _found_on(device: jax.Device, means: GroupedMeans, is_wide: bool) -> str:
    """The same, once in a process for numbers of 64 bits and for none."""
    assert means.tiles is not None
    kernels = Kernels(means.tiles, means.interpret)

    def tried() -> str:
        with jax.enable_x64(is_wide):
            return next(filter(None, (_tried(kernels, device, *x) for x in _trials(kernels))), "")

    with ThreadPoolExecutor(max_workers=1) as thread:  # of its own, which traces nothing else
        return thread.submit(tried).result()


def _trials(kernels: Kernels) -> Iterable[tuple[Any, ...]]:
    """What is tried together: dtypes of operands and results, widths, a tile's rows, an index."""
    half, brain = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)
    single = jnp.dtype(jnp.float32)
    uneven, even = WIDTHS
    yield brain, single, uneven, kernels.tiles.rows, True
    yield brain, brain, even, kernels.tiles.rows, False
    yield half, half, even, 16, True


def _tried(
    kernels: Kernels,
    device: jax.Device,
    dtype: Any,
    made: Any,
    widths: tuple[int, int],
    tile_rows: int,
    has_index: bool,
) -> str:
    """What is wrong with both kernels, in all orders; "": nothing."""
    random, (depth, columns) = np.random.default_rng(0), widths
    left = random.normal(size=(NUM_ROWS, depth)).astype(dtype)
    right = random.normal(size=(len(SIZES), depth, columns)).astype(dtype)
    other = random.normal(size=(NUM_ROWS, columns)).astype(dtype)
    index = random.permutation(NUM_ROWS).astype(np.int32)
    groups = np.asarray(SIZES, np.int32)
    sizes = np.asarray((*SIZES, NUM_ROWS - sum(SIZES)), np.int32)

    def compute(left: Any, right: Any, other: Any, index: Any, groups: Any, sizes: Any) -> Any:
        place = index if has_index else None
        usual = ORDERS[0]
        rows = [
            kernels.rows(
                left,
                right.transpose([usual.index(role) for role in roles]),
                sizes,
                place,
                made,
                roles=roles,
                tile_rows=tile_rows,
            )
            for roles in ORDERS
        ]
        sums = [
            jnp.moveaxis(kernels.sums(left, other, groups, place, made, group_place=n), n, 0)
            for n in range(3)
        ]
        return rows, sums

    given = [jax.device_put(x, device) for x in (left, right, other, index, groups, sizes)]
    found = jax.device_get(jax.jit(compute)(*given))
    places = index if has_index else np.arange(NUM_ROWS)
    one, matrices, another = (np.asarray(x, np.float32) for x in (left, right, other))
    wanted = _by_host(one, matrices, another, places)
    allowed = ERROR.get(made, SHORT_ERROR)
    for name, results, correct in zip(("rows", "sums"), found, wanted, strict=True):
        for result in results:
            worst = float(np.max(np.abs(np.asarray(result, np.float32) - correct)))
            if not worst <= allowed * float(np.max(np.abs(correct))):
                return f"{name} differ by {worst:.3g} from those of the host"
    return ""


def _by_host(
    left: np.ndarray, right: np.ndarray, other: np.ndarray, places: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    rows = np.zeros((NUM_ROWS, right.shape[2]), np.float32)
    sums = np.zeros(right.shape, np.float32)
    start = 0
    for group, size in enumerate(SIZES):
        own = places[start : start + size]
        rows[own] = left[own] @ right[group]
        sums[group] = left[own].T @ other[own]
        start += size
    return rows, sums
