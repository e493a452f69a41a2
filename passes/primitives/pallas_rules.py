"""The factor rule of a Pallas kernel, where its block specs prove one, and the kernel on slices.

A kernel runs once for every place of its grid, on one block of each array. Where a dimension's
blocks are walked along one axis of the grid, and nothing else in the kernel knows where on that
axis it is, a shorter grid on slices computes slices of the results.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import eliminate_dead_code, jaxprs_in, made_from, used_vars
from autopar.passes.primitives.cuts import Cuts, LocalCall, NotLocalError, local_shape
from autopar.passes.primitives.dependencies import dependencies
from autopar.passes.primitives.factor_rule import DimFactors, FactorRule
from autopar.passes.primitives.own_rules import Loops
from autopar.passes.primitives.shardings import shape_of

MAX_PLACES = 1 << 16  # an index map is evaluated at no more places of the grid


@dataclass(frozen=True)
class _BlockWalk:
    """How the grid walks the blocks of one dimension: along axes, the outermost first.

    An axis is given with the number of its steps for which the block stays the same.
    """

    axes: tuple[tuple[int, int], ...]
    block: int


Walks = tuple[_BlockWalk | None, ...]  # of each dimension; None: it is whole in every block


def pallas_rule(eqn: JaxprEqn, unread: frozenset[int]) -> FactorRule | None:
    """The rule that the block specs of a `pallas_call` prove, or None.

    Args:
      eqn: the equation.
      unread: its results that nobody reads, which are a kernel's scratch memory.
    """
    found = _walks(eqn, unread)
    if found is None:
        return None
    operands, results, blocked = found
    grid = eqn.params["grid_mapping"].grid
    steps: dict[int, set[int]] = {axis: {1, size} for axis, size in enumerate(grid)}
    for walk in _all_walks((*operands, *results)):
        for axis, same in walk.axes:
            steps[axis].add(same)
    loops = Loops()
    factors: dict[int, dict[int, DimFactors]] = {}  # of each axis, by the steps inside of them
    for axis, size in enumerate(grid):
        bounds = sorted(steps[axis], reverse=True)
        if any(outer % inner for outer, inner in itertools.pairwise(bounds)):
            return None
        # An index map names the sizes of what is inside of others: only the outermost is cut.
        kinds = itertools.chain(["replicated" if axis in blocked else "pass"])
        factors[axis] = {
            inner: loops.new(outer // inner, next(kinds, "replicated"))  # type: ignore[arg-type]
            for outer, inner in itertools.pairwise(bounds)
        }
        assert size == bounds[0]

    def dim(size: int, walk: _BlockWalk | None) -> DimFactors:
        if walk is None:
            return loops.new(size, "replicated")
        outer = [f for axis, same in walk.axes for s, f in factors[axis].items() if s >= same]
        return (*itertools.chain(*outer), *loops.new(walk.block, "replicated"))

    def value(var: Any, walks: Walks) -> list[DimFactors]:
        return [dim(size, walk) for size, walk in zip(shape_of(var), walks, strict=True)]

    return loops.rule(
        [value(*pair) for pair in zip(eqn.invars, operands, strict=True)],
        [value(*pair) for pair in zip(eqn.outvars, results, strict=True)],
    )


def _all_walks(values: Sequence[Walks]) -> Iterator[_BlockWalk]:
    return (walk for walks in values for walk in walks if walk is not None)


def _walks(
    eqn: JaxprEqn, unread: frozenset[int] = frozenset()
) -> tuple[list[Walks], list[Walks], set[int]] | None:
    """How every dimension is walked, and the grid's axes along which the kernel cannot be cut.

    None where nothing is known of it at all.
    """
    params, mapping = eqn.params, eqn.params["grid_mapping"]
    grid, num_scalars = mapping.grid, mapping.num_index_operands
    is_static = all(isinstance(size, int) and size > 0 for size in grid)
    if not is_static or params.get("mesh") is not None or mapping.grid_names is not None:
        return None
    if num_scalars + mapping.num_inputs != len(eqn.invars) or eqn.effects:
        return None
    walked = [_block_walks(block, grid) for block in mapping.block_mappings]
    if any(walks is None for walks, _ in walked):
        return None
    values = [walks for walks, _ in walked if walks is not None]
    blocked = {axis for _, axes in walked for axis in axes}
    blocked |= _known_axes(params["jaxpr"], mapping, unread)
    for walks in values:  # an axis that another is outside of, or that walks two dimensions
        places = [
            (axis, i) for walk in walks if walk is not None for i, (axis, _) in enumerate(walk.axes)
        ]
        seen = [axis for axis, _ in places]
        blocked |= {axis for axis, i in places if i or seen.count(axis) > 1}
    operands, results = values[: mapping.num_inputs], values[mapping.num_inputs :]
    written = [walks for number, walks in enumerate(results) if number not in unread]
    kernel_operands = params["jaxpr"].invars[num_scalars : num_scalars + mapping.num_inputs]
    changed = _written(params["jaxpr"])
    written += [w for var, w in zip(kernel_operands, operands, strict=True) if var in changed]
    for walks in written:  # every place of the axis has to write blocks of its own
        blocked |= set(range(len(grid))) - {a for w in _all_walks([walks]) for a, _ in w.axes}
        blocked |= {a for w in _all_walks([walks]) for a, same in w.axes if same > 1}
    for number, result in params["input_output_aliases"]:  # one array, so it is cut alike
        pair = operands[number - num_scalars], results[result]
        if number < num_scalars or pair[0] != pair[1]:
            blocked |= {axis for walk in _all_walks(pair) for axis, _ in walk.axes}
    scalars: list[Walks] = [(None,) * len(shape_of(var)) for var in eqn.invars[:num_scalars]]
    return [*scalars, *operands], results, blocked


def _block_walks(block: Any, grid: Sequence[int]) -> tuple[Walks | None, set[int]]:
    """How an array's dimensions are walked, and the axes that its index map uses in other ways."""
    closed, shape = block.index_map_jaxpr, block.array_aval.shape
    depends = dependencies(closed.jaxpr)
    walks: list[_BlockWalk | None] = []
    other: set[int] = set()
    for dim, (atom, size) in enumerate(zip(closed.jaxpr.outvars, shape, strict=True)):
        inputs = depends(atom)
        axes = sorted(i for i in inputs if i < len(grid))
        kept = _block_size(block.block_shape[dim])
        walk = None
        if axes and len(axes) == len(inputs) and kept is not None:
            walk = _linear_walk(closed, dim, axes, grid, size, kept)
        if walk is None:
            other.update(axis for axis in axes if grid[axis] > 1)
        walks.append(walk)
    return tuple(walks), other


def _block_size(dim: Any) -> int | None:
    """How many elements a block's index counts in, or None where it counts otherwise."""
    kind = type(dim).__name__
    if kind == "Squeezed" or dim is None:
        return 1
    if kind == "Blocked":
        return int(dim.block_size)
    return dim if isinstance(dim, int) else None


def _linear_walk(
    closed: Any, dim: int, axes: Sequence[int], grid: Sequence[int], size: int, block: int
) -> _BlockWalk | None:
    """The walk along axes, if blocks are visited in order, each as often, and all of them."""
    sizes = [grid[axis] for axis in axes]
    if math.prod(sizes) > MAX_PLACES or size % block:
        return None
    table = _evaluated(closed, dim, axes, grid).reshape(sizes)
    expected = np.zeros(sizes, np.int64)
    parts: list[tuple[int, int, int, int]] = []  # (stride, axis, steps of the same block, count)
    for place, (axis, count) in enumerate(zip(axes, sizes, strict=True)):
        line = np.moveaxis(table, place, 0).reshape(count, -1)[:, 0]
        changed = np.flatnonzero(line != line[0])
        if not changed.size:
            continue
        same = int(changed[0])
        stride = int(line[same] - line[0])
        if count % same or stride <= 0:
            return None
        parts.append((stride, axis, same, count // same))
        shape = [count if i == place else 1 for i in range(len(axes))]
        expected = expected + stride * (np.arange(count) // same).reshape(shape)
    stride = 1
    for step, _, _, count in sorted(parts):
        if step != stride:
            return None
        stride *= count
    if stride * block != size or not np.array_equal(table, np.broadcast_to(expected, sizes)):
        return None
    ordered = sorted(parts, reverse=True)
    return _BlockWalk(tuple((axis, same) for _, axis, same, _ in ordered), block)


def _evaluated(closed: Any, dim: int, axes: Sequence[int], grid: Sequence[int]) -> np.ndarray:
    """A block index at every place of some axes; it depends on no other input."""
    jaxpr = closed.jaxpr
    places = np.stack(
        np.meshgrid(*(np.arange(grid[axis], dtype=np.int32) for axis in axes), indexing="ij"), -1
    ).reshape(-1, len(axes))
    wanted = [jaxpr.outvars[dim]]
    one = jax_compat.replace_jaxpr(
        jaxpr,
        eqns=[jaxpr.eqns[number] for number in sorted(made_from(jaxpr.eqns, wanted))],
        invars=jaxpr.invars[: len(grid)],
        outvars=wanted,
    )
    function = jaxpr_as_fun(ClosedJaxpr(one, closed.consts))

    def at(place: Any) -> Any:
        ids = [np.int32(0)] * len(grid)
        for i, axis in enumerate(axes):
            ids[axis] = place[i]
        return function(*ids)[0]

    if not one.eqns:  # as most are, a place or a constant; to compile takes long
        return np.broadcast_to(at(places.T), len(places)).astype(np.int64)
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.jit(jax.vmap(at))(places)).astype(np.int64)


def _known_axes(kernel: Jaxpr, mapping: Any, unread: frozenset[int]) -> set[int]:
    """Axes whose place the kernel asks for, or along which scratch memory may carry something.

    What a kernel leaves in its scratch memory, a later place of the grid finds there, and what it
    reads may tell it which place is the first. So it has to fill the memory at each place of an
    axis anew, but for an axis that `jax.vmap` brought: its places are calls of their own.
    """
    free = [axis for axis in range(len(mapping.grid)) if axis not in mapping.vmapped_dims]
    first_result = mapping.num_index_operands + mapping.num_inputs
    scratch = kernel.invars[first_result + mapping.num_outputs :]
    scratch = [*scratch, *(kernel.invars[first_result + number] for number in unread)]
    carrying = {
        axis
        for axis in free
        if not all(_is_filled_anew(kernel, ref, axis, free) for ref in scratch)
    }
    return {free[axis] for axis in _asked(kernel)} | carrying


def _written(kernel: Jaxpr) -> set[Any]:
    """The references that a kernel writes to."""
    writes = (effect for effect in kernel.effects if type(effect).__name__ != "ReadEffect")
    return {getattr(effect, "input", None) for effect in writes}


def _is_filled_anew(kernel: Jaxpr, ref: Any, axis: int, free: Sequence[int]) -> bool:
    """Whether memory is written before it is read at each place of an axis.

    The first to touch it either writes all of it, or does so where all axes inside of this one
    begin, and asks for no other axis.
    """
    eqns = eliminate_dead_code(kernel).eqns
    number = next((n for n, eqn in enumerate(eqns) if ref in eqn.invars), None)
    if number is None:
        return True
    eqn = eqns[number]
    if eqn.primitive.name != "cond":
        return _overwrites(eqn, ref, kernel)
    branch = _branch_at_the_beginning(eqns[:number], eqn.invars[0], axis, free)
    if branch is None:
        return False
    body = eqn.params["branches"][branch].jaxpr
    inner = body.invars[eqn.invars.index(ref) - 1]
    first = next((e for e in body.eqns if inner in e.invars), None)
    return first is not None and _overwrites(first, inner, body)


def _overwrites(eqn: JaxprEqn, ref: Any, jaxpr: Jaxpr) -> bool:
    """Whether an equation writes every element of a reference, and does not give the old ones.

    It does where it writes as many as there are, at places that differ: with no arrays of indices.
    """
    if eqn.primitive.name != "swap" or eqn.invars[0] is not ref or eqn.invars.count(ref) > 1:
        return False
    _, value, *indices = eqn.invars
    is_alike = value.aval.size == ref.aval.size and value.aval.dtype == ref.aval.dtype
    is_whole = is_alike and not any(map(shape_of, indices))
    return is_whole and eqn.outvars[0] not in used_vars(jaxpr)


def _branch_at_the_beginning(
    eqns: Sequence[JaxprEqn], index: Any, axis: int, free: Sequence[int]
) -> int | None:
    """The branch where all axes inside of one begin; None if it may depend on something else."""
    if isinstance(index, Literal):
        return int(index.val)
    env: dict[Any, Any] = {}
    for number in sorted(made_from(eqns, [index])):
        eqn = eqns[number]
        if eqn.primitive.name == "program_id":
            if free[eqn.params["axis"]] <= axis:
                return None
            env[eqn.outvars[0]] = np.int32(0)
            continue
        if any(not isinstance(v, Literal) and v not in env for v in eqn.invars) or eqn.effects:
            return None
        operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        with jax.ensure_compile_time_eval():
            env.update(zip(eqn.outvars, jax_compat.bind(eqn, operands), strict=True))
    return int(env[index]) if index in env else None


def _asked(jaxpr: Jaxpr) -> set[int]:
    found: set[int] = set()
    for eqn in eliminate_dead_code(jaxpr).eqns:
        if eqn.primitive.name in ("program_id", "num_programs"):
            found.add(eqn.params["axis"])
        for inner in jaxprs_in(eqn.params):
            found |= _asked(inner)
    return found


def pallas_on_slices(call: LocalCall) -> list[Any]:
    """A `pallas_call` with a shorter grid, on slices that its rule allows."""
    params = call.eqn.params
    mapping = params["grid_mapping"]
    found = _walks(call.eqn)
    if found is None:
        raise NotLocalError("nothing is known of the kernel")
    operands, results, _ = found
    parts: dict[int, set[int]] = defaultdict(set)
    values = [*operands[mapping.num_index_operands :], *results]
    cuts = [*call.operand_cuts[mapping.num_index_operands :], *call.result_cuts]
    for walks, value_cuts in zip(values, cuts, strict=True):
        for walk, cut in zip(walks, value_cuts, strict=True):
            is_whole = walk is None or not walk.axes
            if is_whole and cut is not None:
                raise NotLocalError("a dimension that every block needs whole is cut")
            if walk is not None and walk.axes:
                outer = walk.axes[0][0]
                parts[outer].add(1 if cut is None else cut.parts)
    if any(len(number) > 1 for number in parts.values()):
        raise NotLocalError("arrays that a grid walks together are not cut alike")
    grid = tuple(size // next(iter(parts.get(axis, {1}))) for axis, size in enumerate(mapping.grid))
    blocks = tuple(
        block.replace(array_aval=_resized(block.array_aval, value_cuts))
        for block, value_cuts in zip(mapping.block_mappings, cuts, strict=True)
    )
    avals = tuple(
        _resized(aval, value_cuts)
        for aval, value_cuts in zip(params["out_avals"], call.result_cuts, strict=True)
    )
    share = math.prod(mapping.grid) // max(1, math.prod(grid))
    return call.bind(
        grid_mapping=mapping.replace(grid=grid, block_mappings=blocks),
        out_avals=avals,
        cost_estimate=_share_of(params["cost_estimate"], share),
    )


def _resized(aval: Any, cuts: Cuts) -> Any:
    return aval.update(shape=local_shape(aval.shape, cuts))


def _share_of(estimate: Any, share: int) -> Any:
    if estimate is None:
        return None
    whole: Mapping[str, int] = vars(estimate)
    return type(estimate)(**{name: value // share for name, value in whole.items()})
