"""Methods that say which loops each mesh axis cuts: Megatron's, and expert parallelism.

The last axis of the mesh is the *tensor axis*; the others cut the batch (or, as well, experts), and
along them the state lies as the search likes it.

- `megatron`: the tensor axis cuts inner loops (heads, the width of an MLP, the vocabulary), which
  are the columns of some weights and the rows of others; what the layers read and add to is whole
  along it.
- `megatron_sp`: where nothing is inner, the tensor axis cuts the sequence: the residual stream with
  its norms and dropouts.
- `expert`: the tensor axis cuts the experts in their products with activations, and the batch
  elsewhere. The rows of grouped products go to blocks of experts (`passes/experts/`) where that is
  quicker than to gather them: of `k` experts a token on `n` devices, an even routing sends `k / n`
  of the bytes that gathering all tokens takes (one and a half times that is priced), and each
  device has places for all rows, as if it had gathered them.

(Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", MLSys 2023; Lepikhin et al., "GShard", ICLR 2021.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Literal

from autopar.base.errors import OptionError
from autopar.passes.graph.graph import Atom, Graph
from autopar.passes.graph.primitives import BLOCK_PRODUCT, PRODUCTS
from autopar.passes.primitives.factor_rule import FactorRule, Rules
from autopar.passes.sharding.fused_projections import warn_of_fused
from autopar.passes.sharding.layout import Layout, num_parts
from autopar.passes.sharding.loop_kinds import (
    BATCH,
    EXPERT,
    INNER,
    SEQUENCE,
    STREAM,
    LoopKinds,
    label_loops,
    loop_kinds,
)
from autopar.passes.sharding.strategies import Shape

Allowed = tuple[frozenset[int] | None, ...]
"""For every mesh axis the factors that it may cut; None: any."""


@dataclass(frozen=True)
class LoopMethod:
    """What a method allows on a mesh, by the kinds of the program's loops."""

    method: str
    kinds: LoopKinds
    mesh: tuple[int, ...]

    def of(self, atom: Atom) -> tuple[str, ...]:
        """The kinds of a value's dimensions, where the tensor axis divides them."""
        return self.kinds.of(atom, self.mesh[-1])

    def equation(
        self, eqn: JaxprEqn, shape: Shape, from_state: bool
    ) -> tuple[Allowed, frozenset[int]]:
        """The factors that each axis may cut, and the axes that cut one if any option does."""
        factors: dict[str, set[int]] = defaultdict(set)
        rule = shape.rule
        atoms = (*eqn.invars, *eqn.outvars)
        for atom, value in zip(atoms, (*rule.operands, *rule.results), strict=True):
            for dim, kind in enumerate(self.of(atom)):
                factor = rule.outermost(value[dim])
                if kind and factor is not None:
                    factors[kind].add(factor)
        if eqn.primitive.name == BLOCK_PRODUCT:
            factors.pop(BATCH, None)  # places for rows are whole: any axis may cut the blocks
        meets = eqn.primitive.name in PRODUCTS and self._meets_experts(eqn, rule, factors[EXPERT])
        allowed: list[frozenset[int] | None] = []
        must = set()
        for axis, size in enumerate(self.mesh):
            kinds, is_must = self._wanted(factors.keys(), axis, from_state, meets)
            if kinds is not None:
                allowed.append(frozenset(f for kind in kinds for f in factors.get(kind, ())))
            else:
                allowed.append(None)
            if is_must and size > 1:
                must.add(axis)
        return tuple(allowed), frozenset(must)

    def _meets_experts(self, eqn: JaxprEqn, rule: FactorRule, experts: Set[int]) -> bool:
        """Whether a product has a matrix of weights for each expert; a router has a column."""
        kept = {f for dim in rule.results[0] for f in dim}
        for place in (0, 1):
            weight, own, others = eqn.invars[place], rule.operands[place], rule.operands[1 - place]
            shared = {f for dim in others for f in dim}
            if not isinstance(weight, Literal) and BATCH not in self.of(weight):
                found = experts & {f for dim in own for f in dim}
                if any((f in shared) == (f in kept) for f in found):
                    return True
        return False

    def layouts(
        self, atom: Atom, layouts: Iterable[Layout], from_state: bool, tiny: bool
    ) -> tuple[Layout, ...]:
        """Those that a value may have where it is stored, or enters or leaves a loop.

        What is tiny is cut along no more axes than it has to be.
        """
        kinds, axes = self.of(atom), range(len(self.mesh))
        wanted = [self._wanted(set(kinds), axis, from_state, False) for axis in axes]

        def fits(layout: Layout) -> bool:
            for dim, cutting in enumerate(layout.dims):
                for axis in cutting:
                    may, _ = wanted[axis]
                    if may is not None and kinds[dim] not in may:
                        return False
            return True

        def cut(layout: Layout) -> int:
            return num_parts((a for dim in layout.dims for a in dim if wanted[a][1]), self.mesh)

        found = [layout for layout in layouts if fits(layout)]
        most = max(map(cut, found))
        found = [layout for layout in found if cut(layout) == most]
        if tiny:
            least = min(sum(map(len, layout.dims)) for layout in found)
            found = [layout for layout in found if sum(map(len, layout.dims)) == least]
        return tuple(found)

    def _wanted(
        self, found: Set[str], axis: int, from_state: bool, meets_experts: bool
    ) -> tuple[tuple[str, ...] | None, bool]:
        """Kinds of loops that an axis may cut where these are found, and whether it must cut one.

        None: it may cut anything.
        """
        has_batch = BATCH in found
        if axis != len(self.mesh) - 1:
            if self.method == "expert" and has_batch and EXPERT in found:
                return (BATCH, EXPERT), True
            return ((BATCH,), True) if has_batch else (None, False)
        if self.method == "expert":
            if EXPERT in found and (meets_experts or not has_batch):
                return (EXPERT,), meets_experts
            return ((BATCH, EXPERT), True) if has_batch else (None, False)
        if INNER in found:
            return (INNER,), True
        if not has_batch and not from_state:
            return None, False
        if self.method == "megatron_sp" and has_batch and SEQUENCE in found:
            return (SEQUENCE,), STREAM in found
        return (), False


_NEEDED = {"megatron": (INNER,), "megatron_sp": (INNER, SEQUENCE), "expert": (EXPERT,)}
_LOOPS = {
    INNER: (
        "no loop inside of a layer",
        "loops that a product of the batch with a weight opens and another one closes are cut: "
        "heads, the width of an MLP, a vocabulary",
    ),
    SEQUENCE: (
        "no sequence",
        "the values that layers add to (x + f(x)) are cut along another dimension than the batch",
    ),
    EXPERT: (
        "no experts",
        "the loop that activations, weights and results of a product all have (einsum "
        "'ebch,ehf->ebcf'), or the groups of jax.lax.ragged_dot, are cut",
    ),
}


def with_loops(graph: Graph, rules: Rules, method: str, parts: int) -> Graph:
    """The graph with labelled loops for one of these methods, of which it has what is needed.

    Raises:
      OptionError: says which loops are not there, or do not divide into so many parts.
    """
    kinds = loop_kinds(graph, rules)
    for kind in _NEEDED[method]:
        sizes = kinds.all_sizes(kind)
        missing, why = _LOOPS[kind]
        if not sizes:
            other = "megatron" if kind == SEQUENCE else "auto"
            raise OptionError(
                f"method={method!r} finds {missing} in this step.",
                why=f"{why}, and there are none.",
                hint=f"use method={other!r}.",
            )
        if not any(size % parts == 0 for size in sizes):
            raise OptionError(
                f"method={method!r} cannot cut this step's loops into {parts} parts.",
                why=f"{why}; of these there are {_listed(sizes)}, and none divides by {parts}.",
                hint="use logical_mesh=(devices for the batch, devices for these loops), "
                "or method='auto'.",
            )
    if INNER in _NEEDED[method]:
        warn_of_fused(graph, rules, kinds, method, parts)
    return label_loops(graph, kinds)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(f"a loop of {size}" for size in sizes[:6]) + (", ..." if sizes[6:] else "")
