"""A program whose grouped products are in blocks of experts, so that a mesh axis can cut these.

What is sorted by expert has rows that meet the matrices of their own expert alone, but which rows
these are is data: no cut of the rows is one of the experts. Here each block of experts has rows of
its own, in as many places as there are rows (`Routing`), and the program gets a dimension over the
blocks, like any other. Rows are sent to their blocks where they were gathered by expert, and back
where results are gathered in the order of the tokens (`exchanges.py`): devices exchange rows then,
and hold their own experts. What is computed row by row between grouped products stays in blocks.

The numbers are those of the program for any routing: all rows to one expert, none to some, rows
that belong to no group. Places cost memory and elementwise work, as if every device had all rows;
the solver is told so, and weighs it against plans that cut the width of the experts.

(Lepikhin et al., "GShard", ICLR 2021, for experts on devices; Gale et al., "MegaBlocks", MLSys
2023, for grouped products that drop no token.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.experts.row_moves import RowIndices, gathered_rows, scattered_rows
from autopar.passes.graph import jax_compat, source_infos
from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import (
    Atom,
    Graph,
    eliminate_dead_code,
    flatten,
    merge_equal_equations,
    walk,
)
from autopar.passes.graph.primitives import ELEMENTWISE, MONOID_REDUCTIONS
from autopar.passes.graph.scans import ScanParts
from autopar.passes.primitives.block_products import block_product
from autopar.passes.primitives.cuts import bind_with
from autopar.passes.primitives.exchanges import from_blocks, to_blocks
from autopar.passes.primitives.ragged_products import RaggedDims, ragged_rule
from autopar.passes.primitives.shardings import shape_of


def num_groups(graph: Graph) -> int:
    """What the numbers of groups of all grouped products have in common; 0: there are none."""
    return math.gcd(*(_groups(eqn) for eqn in walk(graph.jaxpr)))


def most_blocks(graph: Graph) -> int:
    """In how many blocks all rows still have numbers of 32 bits."""
    rows = (shape_of(eqn.invars[0])[0] for eqn in walk(graph.jaxpr) if _groups(eqn))
    return int(jnp.iinfo(jnp.int32).max // max(rows, default=1))


def in_blocks(graph: Graph, blocks: int) -> Graph:
    """The same step, with its grouped products in so many blocks."""
    jaxpr = graph.jaxpr
    program = _InBlocks(blocks).program(jaxpr)
    made = flatten(traced(program, jaxpr.invars)).jaxpr
    return dataclasses.replace(graph, jaxpr=eliminate_dead_code(merge_equal_equations(made)))


def _groups(eqn: JaxprEqn) -> int:
    """How many groups a grouped product has that can be in blocks; 0: it cannot, or is none."""
    if eqn.primitive.name != "ragged_dot_general" or ragged_rule(eqn, frozenset()) is None:
        return 0
    if len(shape_of(eqn.invars[2])) > 1:
        return 0
    dims = RaggedDims.of(eqn)
    plain = not dims.left_batch and dims.rows == 0
    plain = plain and (dims.right_rows == 0 if dims.sums_rows else dims.groups == 0)
    return int(shape_of(eqn.invars[2])[0]) if plain else 0


@dataclass(frozen=True)
class Routing:
    """Where sorted rows are in blocks.

    `place` is that of each row among those of all blocks; `sizes` are the groups' of each block.
    """

    rows: int
    blocks: int
    place: Any
    sizes: Any

    @classmethod
    def of(cls, sizes: Any, rows: int, blocks: int) -> Routing:
        """Of groups of these sizes; what is in no group comes last in the last block.

        Sizes may ask for more rows than there are, which are none.
        """
        ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), rows)
        each = ends.shape[0] // blocks
        firsts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[each - 1 : -1 : each]])
        row = jnp.arange(rows, dtype=jnp.int32)
        block = jnp.sum(row[:, None] >= firsts[None, 1:], axis=1, dtype=jnp.int32)
        place = block * rows + row - firsts[block]
        sizes = jnp.diff(ends, prepend=jnp.zeros((1,), jnp.int32)).reshape(blocks, each)
        return cls(rows, blocks, place, sizes)

    def send(self, rows: Any, sources: Any, targets: RowIndices | None = None) -> Any:
        """Rows to blocks: `rows[sources[i]]` becomes the sorted row `targets[i]`, or `i`."""
        place = self.place
        if targets is not None:
            nowhere = self.blocks * self.rows
            place = jnp.where(targets.are_rows, place[targets.rows], nowhere)
        return to_blocks(rows, sources, place, blocks=self.blocks, places=self.rows)

    def fetch(self, blocks: Any, rows: int, sources: Any, targets: Any) -> Any:
        """Sorted rows `sources[i]` from blocks, added to the row `targets[i]` of so many."""
        return from_blocks(blocks, self.place[sources], targets, rows=rows)


class _InBlocks:
    """How programs and the bodies of their loops are rewritten."""

    def __init__(self, blocks: int):
        self.blocks = blocks

    def program(self, jaxpr: Jaxpr) -> Callable[..., list[Any]]:
        """A function that evaluates a program, with its grouped products in blocks."""
        return lambda *arrays: _Scope(self, jaxpr, arrays).run()

    def scan(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """A loop with its body rewritten."""
        scan = ScanParts.of(eqn)
        body = traced(self.program(scan.body), scan.body.invars)
        kept = eliminate_dead_code(merge_equal_equations(flatten(body).jaxpr))
        closed = ClosedJaxpr(kept, [])
        params = jax_compat.scan_params(eqn.params, closed, scan.num_consts, scan.num_carry)
        typed = [
            jax_compat.with_type_of(x, var.aval) if isinstance(x, jax.Array) else x
            for x, var in zip(operands, scan.body.invars, strict=False)
        ]
        return list(eqn.primitive.bind(*(typed[: len(operands)]), **params))


@dataclass
class _Rows:
    """A value whose rows are sorted by expert, in blocks: [blocks, rows, ...]."""

    array: Any
    routing: Routing


class _Scope:
    """Evaluates the equations of one program or body, while JAX traces that."""

    def __init__(self, rewrite: _InBlocks, jaxpr: Jaxpr, arrays: Sequence[Any]):
        self.rewrite, self.jaxpr = rewrite, jaxpr
        self.whole: dict[Var, Any] = dict(zip(jaxpr.invars, arrays, strict=True))
        self.in_blocks: dict[Var, _Rows] = {}
        self.sent: dict[tuple[Var, int], Any] = {}
        self.makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.routings: dict[tuple[Var, int], Routing] = {}

    def run(self) -> list[Any]:
        for eqn in self.jaxpr.eqns:
            with source_infos.source_context(eqn):
                if not self.rows(eqn):
                    operands = [self.read(atom) for atom in eqn.invars]
                    if eqn.primitive.name == "scan":
                        results = self.rewrite.scan(eqn, operands)
                    else:
                        results = bind_with(eqn, operands, {})
                    self.whole.update(zip(eqn.outvars, results, strict=True))
        return [
            jax_compat.with_type_of(jnp.asarray(x), atom.aval) if not _is_key(atom) else x
            for x, atom in ((self.read(atom), atom) for atom in self.jaxpr.outvars)
        ]

    def read(self, atom: Atom) -> Any:
        """A value as the program has it."""
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self.whole:
            found = self.in_blocks[atom]
            rows = jnp.arange(found.routing.rows)
            self.whole[atom] = found.routing.fetch(found.array, len(rows), rows, rows)
        return self.whole[atom]

    def blocks_of(self, atom: Atom) -> _Rows | None:
        """A value that is in blocks alone."""
        return None if isinstance(atom, Literal) else self.in_blocks.get(atom)

    def rows(self, eqn: JaxprEqn) -> bool:
        """Evaluate an equation in blocks, or say that it must be as it was."""
        if self.rewrite.blocks > 1 and _groups(eqn) and _groups(eqn) % self.rewrite.blocks == 0:
            self.product(eqn)
            return True
        found = [(i, x) for i, atom in enumerate(eqn.invars) if (x := self.blocks_of(atom))]
        if not found:
            return False
        if is_barrier(eqn):
            self.barrier(eqn)
            return True
        routing = found[0][1].routing
        if any(x.routing is not routing for _, x in found):
            return False
        made = self.moved(eqn, found[0][0], routing)
        if made is not None:
            self.whole[eqn.outvars[0]] = made
            return True
        made = self.row_by_row(eqn, routing)
        if made is not None:
            self.in_blocks[eqn.outvars[0]] = _Rows(made, routing)
        return made is not None

    def product(self, eqn: JaxprEqn) -> None:
        """A grouped product: of rows, which stay in blocks, or the sums over rows of each group."""
        left, right, sizes = eqn.invars
        routing = self.routing(sizes, shape_of(left)[0])
        each = (routing.blocks, shape_of(sizes)[0] // routing.blocks)
        if RaggedDims.of(eqn).sums_rows:
            operands = (self.sorted(left, routing), self.sorted(right, routing))
            made = block_product(*operands, routing.sizes, eqn)
            (var,) = eqn.outvars
            self.whole[var] = made.reshape(var.aval.shape)
            return
        matrices = self.read(right)
        matrices = matrices.reshape(*each, *matrices.shape[1:])
        made = block_product(self.sorted(left, routing), matrices, routing.sizes, eqn)
        self.in_blocks[eqn.outvars[0]] = _Rows(made, routing)

    def routing(self, sizes: Atom, rows: int) -> Routing:
        if isinstance(sizes, Literal):
            return Routing.of(jnp.asarray(sizes.val), rows, self.rewrite.blocks)
        if (sizes, rows) not in self.routings:
            found = Routing.of(self.read(sizes), rows, self.rewrite.blocks)
            self.routings[sizes, rows] = found
        return self.routings[sizes, rows]

    def sorted(self, atom: Atom, routing: Routing) -> Any:
        """A value with sorted rows, in blocks: rows are sent there from where they came from."""
        found = self.blocks_of(atom)
        if found is not None and found.routing is routing:
            return found.array
        if isinstance(atom, Literal):
            return jnp.broadcast_to(atom.val, (routing.blocks, *atom.aval.shape))
        key = (atom, id(routing))
        if key not in self.sent:
            self.sent[key] = self.send(atom, routing)
        return self.sent[key]

    def send(self, atom: Var, routing: Routing) -> Any:
        eqn = self.makers.get(atom)
        rows = jnp.arange(routing.rows)
        if eqn is None:
            return routing.send(self.read(atom), rows)
        name, blocks = eqn.primitive.name, routing.blocks
        taken = gathered_rows(eqn, self.read)
        if taken is not None and taken.clips:
            return routing.send(self.read(eqn.invars[0]), taken.rows)
        added = scattered_rows(eqn, self.read)
        if added is not None and self.is_zero(eqn.invars[0]):
            updates = self.read(eqn.invars[2])
            return routing.send(updates, jnp.arange(updates.shape[0]), added)
        if name == "broadcast_in_dim":
            shape, dims = eqn.params["shape"], tuple(eqn.params["broadcast_dimensions"])
            given, operand = eqn.invars[0], shape_of(eqn.invars[0])
            if 0 not in dims:
                value = self.read(given)
                return lax.broadcast_in_dim(value, (blocks, *shape), [d + 1 for d in dims])
            if dims[0] == 0 and operand[0] == shape[0]:
                value = self.sorted(given, routing)
                return lax.broadcast_in_dim(value, (blocks, *shape), [0, *(d + 1 for d in dims)])
        if name == "reshape" and shape_of(eqn.invars[0])[:1] == shape_of(atom)[:1]:
            value = self.sorted(eqn.invars[0], routing)
            return value.reshape(blocks, *shape_of(atom))
        return routing.send(self.read(atom), rows)

    def is_zero(self, atom: Atom) -> bool:
        """Whether a value is zero by how it is made."""
        while not isinstance(atom, Literal):
            eqn = self.makers.get(atom)
            if eqn is None or eqn.primitive.name != "broadcast_in_dim":
                return False
            atom = eqn.invars[0]
        return bool(jnp.ndim(atom.val) == 0 and atom.val == 0)

    def moved(self, eqn: JaxprEqn, place: int, routing: Routing) -> Any:
        """Rows that leave the blocks: gathered, or added to others; None: they do not."""
        if place == 0 and (taken := gathered_rows(eqn, self.read)) is not None:
            count = len(taken.rows)
            made = routing.fetch(
                self.in_blocks[eqn.invars[0]].array, count, taken.rows, jnp.arange(count)
            )
            if taken.clips:
                return made
            known = taken.are_rows.reshape(-1, *(1,) * (made.ndim - 1))
            return jnp.where(known, made, jnp.asarray(taken.fill, made.dtype))
        if place == 2 and (added := scattered_rows(eqn, self.read)) is not None:
            base = eqn.invars[0]
            count = shape_of(base)[0]
            targets = jnp.where(added.are_rows, added.rows, count)
            found = self.in_blocks[eqn.invars[2]].array
            made = routing.fetch(found, count, jnp.arange(routing.rows), targets)
            return made if self.is_zero(base) else self.read(base) + made
        return None

    def row_by_row(self, eqn: JaxprEqn, routing: Routing) -> Any:
        """What an equation computes of each row from that row alone; None: it may mix them."""
        name, (var, *others) = eqn.primitive.name, eqn.outvars
        if others or shape_of(var)[:1] != (routing.rows,):
            return None
        changes: dict[str, Any] = {}
        first = shape_of(eqn.invars[0])
        if name in ELEMENTWISE:
            if any(shape_of(x) and len(shape_of(x)) != len(shape_of(var)) for x in eqn.invars):
                return None
        elif name in MONOID_REDUCTIONS and "axes" in eqn.params:
            if 0 in eqn.params["axes"]:
                return None
            changes["axes"] = tuple(axis + 1 for axis in eqn.params["axes"])
        elif name == "broadcast_in_dim" and tuple(eqn.params["broadcast_dimensions"])[:1] == (0,):
            dims = (0, *(int(d) + 1 for d in eqn.params["broadcast_dimensions"]))
            changes.update(shape=(routing.blocks, *shape_of(var)), broadcast_dimensions=dims)
        elif name in ("reshape", "squeeze") and first[0] == routing.rows:
            return self.sorted(eqn.invars[0], routing).reshape(routing.blocks, *shape_of(var))
        else:
            return None
        if any(shape_of(x) and shape_of(x)[0] != routing.rows for x in eqn.invars):
            return None
        operands = [
            self.sorted(atom, routing) if shape_of(atom) else self.read(atom) for atom in eqn.invars
        ]
        return bind_with(eqn, operands, changes)[0]

    def barrier(self, eqn: JaxprEqn) -> None:
        """Each value passes as it is."""
        values = [self.blocks_of(atom) for atom in eqn.invars]
        operands = [
            self.read(atom) if x is None else x.array
            for x, atom in zip(values, eqn.invars, strict=True)
        ]
        for var, x, made in zip(eqn.outvars, values, bind_with(eqn, operands, {}), strict=True):
            if x is None:
                self.whole[var] = made
            else:
                self.in_blocks[var] = _Rows(made, x.routing)


def _is_key(atom: Atom) -> bool:
    return jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.extended)


def traced(function: Callable[..., Any], variables: Sequence[Var]) -> ClosedJaxpr:
    """The program of a function of arrays like these, which holds none itself."""
    structs = [
        jax.ShapeDtypeStruct(
            var.aval.shape, var.aval.dtype, weak_type=getattr(var.aval, "weak_type", False)
        )
        for var in variables
    ]
    closed = jax.make_jaxpr(function)(*structs)
    assert not closed.consts, "a program's arrays are its inputs"
    return closed
