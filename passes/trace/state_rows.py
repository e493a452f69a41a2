"""The batch of a step whose state holds it, as an inference's caches and tokens do.

Beside such a state there are parameters, whose leading dimensions are features or what tokens look
up (a vocabulary), and perhaps data with the same rows. A train step sums the rows of its data into
the state; here every row of the new state comes from the same row of the old one.

Features of parameters may look so too, where the loss is no part of the state. So nothing is said
of a state that gradients lead to, and rows must be seen to decode (`_decodes`). Or there is nothing
else that may be the batch, as where a sampler of dense layers takes its examples a step further
(`x - f(params, x)`): all other leaves begin with features, their own or the examples'. (Kernels of
convolutions do not, nor do schedules that a scan walks: the user says so then.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.passes.graph.graph import (
    Atom,
    eliminate_dead_code,
    inner_jaxprs,
    made_from,
    variables,
    walk,
)
from autopar.passes.graph.name_stacks import pass_of
from autopar.passes.graph.primitives import HEAVY, SCATTERS
from autopar.passes.trace.batch_guess import (
    DimensionLoops,
    Leaf,
    leading_axes,
    loop_at,
    meet_themselves,
)

NOTHING: tuple[None, frozenset[int]] = (None, frozenset())


def rows_of_state(
    jaxpr: Jaxpr, leaves: Sequence[Leaf], updates: Mapping[int, int]
) -> tuple[dict[int, int] | None, frozenset[int]]:
    """The batch dimension of every leaf that has one, if the state's rows are the batch.

    They are a loop that leads some leaf, that half of the state's leaves have, that nothing on the
    way to the new state sums over, shifts, or compares with itself, and whose rows decode, or are
    all that is left.

    Args:
      jaxpr: the flat program.
      leaves: those that are neither state nor keys nor scalars.
      updates: of the state's arrays but for keys, the outputs that are their new values.

    Returns:
      The batch dimensions; None: the state has no such rows, or all the other leaves have them too.
      And the numbers of arguments in which tokens look something up: these are parameters,
      whatever is the batch.
    """
    held = {i: jaxpr.invars[i].aval.shape for i in updates if jaxpr.invars[i].aval.shape}
    is_empty = any(0 in leaf.shape for leaf in leaves)
    if not leaves or is_empty or not _may_have_rows(list(held.values()), leaves):
        return NOTHING
    state = [jaxpr.outvars[output] for output in updates.values()]
    if _is_derived(jaxpr, state):
        return NOTHING
    path = eliminate_dead_code(jaxpr.replace(outvars=state))
    loops = DimensionLoops.of(path, warns=False)
    mixed = {loops.loop(dim) for dim in loops.reduced | loops.scanned | loops.placed}
    mixed |= meet_themselves(path, loops)
    axes, _ = leading_axes(path, loops, leaves)

    def dims(index: int, first: int, rank: int) -> list[Hashable | None]:
        return [loop_at(path, loops, index, d) for d in range(first, rank)]

    own = {i: dims(i, 0, len(shape)) for i, shape in held.items()}
    others = {x.index: dims(x.index, axes[x.index], len(x.shape)) for x in leaves}
    features = {loop for own_dims in others.values() for loop in own_dims[1:]}
    inner = {loop for own_dims in own.values() for loop in own_dims[1:]}
    looked_up = _looked_up(path, loops, list(own | others), list(own), mixed)
    data = {own_dims[0] for own_dims in others.values()} - features - inner - {None}
    if data & mixed - looked_up:
        return NOTHING  # summed into the state, as the batch of a train step is
    parameters = frozenset(x.argument for x in leaves if others[x.index][0] in looked_up)
    first = {own_dims[0] for own_dims in (own | others).values()} - mixed - features - {None}
    rows = _main([[x for x in own_dims if x in first] for own_dims in own.values()])
    if rows is None or all(own_dims[0] == rows for own_dims in others.values()):
        return None, parameters
    is_left = not data - looked_up - {rows} and rows not in inner
    is_seen = is_left and _are_multiplied(path, loops, rows)
    if not (is_seen or _decodes(path, loops, rows, list(own | others))):
        return None, parameters
    batch = {i: own_dims.index(rows) for i, own_dims in own.items() if rows in own_dims}
    batch |= {i: axes[i] for i, own_dims in others.items() if own_dims[0] == rows}
    return batch, parameters


def _main(candidates: Sequence[Sequence[Hashable]]) -> Hashable | None:
    """What half of the leaves have, or more; None: nothing, or several alike."""
    counts = Counter(loop for own in candidates for loop in set(own)).most_common(2)
    is_tie = len(counts) > 1 and counts[0][1] == counts[1][1]
    if not counts or is_tie or 2 * counts[0][1] < len(candidates):
        return None
    return counts[0][0]


def _may_have_rows(shapes: Sequence[tuple[int, ...]], leaves: Sequence[Leaf]) -> bool:
    """Whether some leading size is in half of the state's shapes, as rows that it holds are."""
    counts = Counter(size for shape in shapes for size in set(shape))
    leading = {shape[0] for shape in (*shapes, *(leaf.shape for leaf in leaves))}
    return any(2 * counts[size] >= len(shapes) for size in leading)


def _is_derived(jaxpr: Jaxpr, results: Sequence[Atom]) -> bool:
    """Whether these results are made of what is differentiated, as a train step's new state is."""
    # The last first: these are the uses of gradients, and soon their backward pass.
    used = (jaxpr.eqns[i] for i in sorted(made_from(jaxpr.eqns, results), reverse=True))
    every = (x for eqn in used for x in (eqn, *(y for j in inner_jaxprs(eqn) for y in walk(j))))
    return any(pass_of(str(eqn.source_info.name_stack)) for eqn in every)


def _decodes(path: Jaxpr, loops: DimensionLoops, rows: Hashable, inputs: Sequence[int]) -> bool:
    """Whether each of these rows looks something up by its number, or is written at some place.

    Tokens do the one and caches the other; parameters, moments and data do neither.
    """
    if any(
        loop_at(path, loops, i, 0) == rows
        for i in inputs
        if jnp.issubdtype(path.invars[i].aval.dtype, jnp.integer)
    ) and any(
        rows in {loops.loop(row) for row in dims} and loops.loop(dim) != rows
        for dim, _, dims in loops.lookups
    ):
        return True
    return any(_writes_into(eqn, loops, rows) for eqn in walk(path))


def _are_multiplied(path: Jaxpr, loops: DimensionLoops, rows: Hashable) -> bool:
    """Whether each of these rows is multiplied with something that has none of them."""

    def has_rows(atom: Atom) -> bool:
        dims = range(len(atom.aval.shape))
        return isinstance(atom, Var) and any(loops.loop((atom, d)) == rows for d in dims)

    products = (eqn.invars for eqn in walk(path) if eqn.primitive.name in HEAVY)
    return any(len({has_rows(atom) for atom in operands}) > 1 for operands in products)


def _writes_into(eqn: JaxprEqn, loops: DimensionLoops, rows: Hashable) -> bool:
    """Whether an equation writes at some place of a dimension that comes after the rows."""
    name = eqn.primitive.name
    if name == "dynamic_update_slice":
        shapes = zip(eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)
        written = {d for d, (size, part) in enumerate(shapes) if part < size}
    elif name in SCATTERS:
        written = set(eqn.params["dimension_numbers"].scatter_dims_to_operand_dims)
    else:
        return False
    operand = eqn.invars[0]
    own = [d for d in range(len(operand.aval.shape)) if loops.loop((operand, d)) == rows]
    return bool(own) and any(d > own[0] for d in written)


def _looked_up(
    path: Jaxpr,
    loops: DimensionLoops,
    inputs: Sequence[int],
    state: Sequence[int],
    mixed: set[Hashable],
) -> set[Hashable]:
    """Loops of which integers among the inputs pick places by number, each row for itself.

    One row is no loop: what is made from it is followed instead, but not into bodies. Where it is
    not the state's, it picks from no loop that is mixed: it may be the one edge of a graph.
    """
    is_token = {i: jnp.issubdtype(path.invars[i].aval.dtype, jnp.integer) for i in inputs}
    tokens = [i for i in inputs if is_token[i]]
    rows = {loop_at(path, loops, i, 0) for i in tokens} - mixed - {None}
    single = _made_from_one(path, tokens)
    own_single = _made_from_one(path, [i for i in tokens if i in state])
    picked = set()
    for dim, indices, dims in loops.lookups:
        loop, by = loops.loop(dim), {loops.loop(row) for row in dims}
        is_single = indices in (own_single if loop in mixed else single) and not by
        if is_single or (by & rows and not by & mixed):
            picked.add(loop)
    return picked


def _made_from_one(path: Jaxpr, tokens: Sequence[int]) -> set[Var]:
    """What is made from those inputs that have one row."""
    made = {path.invars[i] for i in tokens if math.prod(path.invars[i].aval.shape) == 1}
    for eqn in path.eqns if made else ():
        if not made.isdisjoint(variables(eqn.invars)):
            made.update(eqn.outvars)
    return made
