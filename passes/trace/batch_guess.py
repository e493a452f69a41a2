"""Which leaves hold the batch, where leading sizes alone do not tell.

Dimensions that the program walks in the same loop are one *loop*: the factor rules join the rows of
images with those of their labels, and a weight's rows with the features that it contracts. A batch
is a loop that leads leaves of the arguments, is no feature of another leaf or of the state, and is
summed over, or comes out as a result.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph.graph import Atom, variables
from autopar.passes.graph.primitives import CONTROL_FLOW, SCATTERS
from autopar.passes.graph.scans import ScanParts, WhileParts
from autopar.passes.primitives.factor_rule import MONOIDS, Rules
from autopar.passes.primitives.populate import populate

Dim = tuple[Var, int]

# Parts of a dimension, and arrangements of it, are walked as the dimension is.
ALONG = frozenset({
    "concatenate", "slice", "pad", "rev", "sort", "dynamic_slice", "dynamic_update_slice",
    "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
})  # fmt: skip


@dataclass
class DimensionLoops:
    """The loops of a program, joined while its equations are walked."""

    parents: dict[Hashable, Hashable] = field(default_factory=dict)
    reduced: set[Hashable] = field(default_factory=set)  # dimensions that are summed over
    scanned: set[Hashable] = field(default_factory=set)  # those that a scan with carries walks
    placed: set[Hashable] = field(default_factory=set)  # those of which parts are taken by position
    filled: set[Var] = field(default_factory=set)  # with one number
    walks: list[tuple[Dim, list[Dim]]] = field(default_factory=list)  # of scans, and their carries'
    # What is picked from by number, the numbers, and the dimensions of these.
    lookups: list[tuple[Dim, Atom, list[Dim]]] = field(default_factory=list)

    @classmethod
    def of(cls, jaxpr: Jaxpr, *, warns: bool = True) -> DimensionLoops:
        """The loops of a flat program."""
        loops = cls()
        loops._walk(jaxpr, populate(jaxpr, warns=warns))
        return loops

    def loop(self, dim: Hashable) -> Hashable:
        """What stands for the loop of a dimension."""
        root = dim
        while (parent := self.parents.get(root, root)) != root:
            root = parent
        while (parent := self.parents.get(dim, root)) != root:
            self.parents[dim], dim = root, parent
        return root

    def carried_by(self) -> set[tuple[Hashable, Hashable]]:
        """Loops that scans with carries walk, each with a loop that such a carry has."""
        return {(self.loop(dim), self.loop(own)) for dim, carry in self.walks for own in carry}

    def _join(self, dims: Sequence[Hashable]) -> None:
        for dim in dims[1:]:
            self.parents[self.loop(dims[0])] = self.loop(dim)

    def _bind(self, outer: Iterable[Atom], inner: Iterable[Atom], shift: int = 0) -> None:
        """Values that are the same inside and outside a body; `shift`: inside they are slices.

        JAX makes equal zeros once: a loop may begin with them for a row and for a weight alike.
        """
        for out, var in zip(outer, inner, strict=True):
            if isinstance(out, Var) and out in self.filled:
                continue
            for d in range(len(var.aval.shape)):
                self._join([*_dims(out, d + shift), *_dims(var, d)])

    def _walk(self, jaxpr: Jaxpr, rules: Rules) -> None:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal):
                self.filled.update(eqn.outvars)
            if name == "scan":
                self._scan(eqn, rules)
            elif name == "while":
                loop = WhileParts.of(eqn)
                _, consts, carries = loop.operands(eqn.invars)
                self._bind([*consts, *carries], loop.body.invars)
                self._bind(eqn.outvars, loop.body.outvars)
                self._walk(loop.body, rules)
            elif name == "cond":
                for branch in eqn.params["branches"]:
                    self._bind(eqn.invars[1:], branch.jaxpr.invars)
                    self._bind(eqn.outvars, branch.jaxpr.outvars)
                    self._walk(branch.jaxpr, rules)
            elif name not in CONTROL_FLOW:
                self._equation(eqn, rules)

    def _scan(self, eqn: JaxprEqn, rules: Rules) -> None:
        scan = ScanParts.of(eqn)
        for values, inner in ((eqn.invars, scan.body.invars), (eqn.outvars, scan.body.outvars)):
            split = scan.operands if values is eqn.invars else scan.results
            *whole, stacks = split(values)
            *same, slices = split(inner)
            for outer, body in zip(whole, same, strict=True):
                self._bind(outer, body)
            self._bind(stacks, slices, shift=1)
            leading = [dim for atom in stacks for dim in _dims(atom, 0)]
            self._join(leading)
            if scan.num_carry:
                self.scanned.update(leading)
                carries = scan.operands(scan.body.invars)[1]
                own = [
                    dim for v in carries for d in range(len(v.aval.shape)) for dim in _dims(v, d)
                ]
                self.walks += [(dim, own) for dim in leading[:1]]
        _, before = scan.operands(scan.body.invars)[:2]
        self._bind(before, scan.results(scan.body.outvars)[0])
        self._walk(scan.body, rules)

    def _equation(self, eqn: JaxprEqn, rules: Rules) -> None:
        name, rule = eqn.primitive.name, rules[eqn]
        joined: dict[int, list[Dim]] = defaultdict(list)
        sides = ((eqn.invars, rule.operands), (eqn.outvars, rule.results))
        for atoms, values in sides:
            for atom, dims in zip(atoms, values, strict=True):
                for d, factors in enumerate(dims):
                    if factors:
                        joined[factors[0]] += _dims(atom, d)
        for factor, dims_ in joined.items():
            self._join(dims_)
            # What indices pick from is looked up, not summed.
            if dims_ and rule.factors[factor].kind in MONOIDS and name != "gather":
                self.reduced.add(dims_[0])
        if name in ALONG:
            positions = _in_order(eqn)
            arrays = [a for a in eqn.invars if len(a.aval.shape) == len(eqn.outvars[0].aval.shape)]
            for d in range(len(eqn.outvars[0].aval.shape)):
                along = [dim for a in (*arrays, *eqn.outvars) for dim in _dims(a, d)]
                self._join(along)
                if len({var.aval.shape[d] for var, _ in along}) > 1 or d in positions:
                    self.placed.update(along[:1])
        if name == "gather":
            indices = eqn.invars[1]
            rows = [dim for d in range(len(indices.aval.shape) - 1) for dim in _dims(indices, d)]
            picked = [dim for d in _picked(eqn) for dim in _dims(eqn.invars[0], d)]
            self.lookups += [(dim, indices, rows) for dim in picked]
        if name in SCATTERS and eqn.invars[2].aval.shape:
            # The rows that are scattered are summed or written, but where each has its own place.
            kept = {factor for dim in rule.results[0] for factor in dim}
            if kept.isdisjoint(rule.operands[2][0]):
                self.reduced.update(_dims(eqn.invars[2], 0))


def _in_order(eqn: JaxprEqn) -> tuple[int, ...]:
    """The dimensions along which an equation reads positions in their order."""
    if eqn.primitive.name == "rev":
        return tuple(eqn.params["dimensions"])
    return (eqn.params["axis"],) if eqn.primitive.name.startswith("cum") else ()


def _picked(eqn: JaxprEqn) -> list[int]:
    """The dimensions of a gather's operand in which each index picks one place."""
    sizes, numbers = eqn.params["slice_sizes"], eqn.params["dimension_numbers"]
    return [dim for dim in numbers.start_index_map if sizes[dim] == 1]


def _dims(atom: Atom, d: int) -> list[Dim]:
    return [] if isinstance(atom, Literal) or atom.aval.shape[d] == 1 else [(atom, d)]


@dataclass(frozen=True)
class Leaf:
    """An array leaf that may hold a batch, and the number of its argument."""

    index: int
    argument: int
    shape: tuple[int, ...]


def guess_axes(jaxpr: Jaxpr, leaves: Sequence[Leaf], state: Iterable[int]) -> dict[int, int] | None:
    """The batch dimension of the leaves that have one; None: the program does not tell.

    Args:
      jaxpr: the flat program.
      leaves: those that are neither state nor keys nor scalars.
      state: the inputs that are known to be state.
    """
    loops = DimensionLoops.of(jaxpr)
    final = lambda dims: {loops.loop(dim) for dim in dims}  # noqa: E731
    reduced = final(loops.reduced)
    results = final(
        d for out in jaxpr.outvars for i in range(len(out.aval.shape)) for d in _dims(out, i)
    )

    of = functools.partial(loop_at, jaxpr, loops)
    axes, scanned = leading_axes(jaxpr, loops, leaves)
    leading = {x.index: of(x.index, axes[x.index]) for x in leaves}

    def features_of(leaf: Leaf) -> set[Hashable | None]:
        return {of(leaf.index, d) for d in range(axes[leaf.index] + 1, len(leaf.shape))} - {None}

    features = {loop for leaf in leaves for loop in features_of(leaf)}
    state = list(state)
    for index in state:
        features |= {of(index, d) for d in range(len(jaxpr.invars[index].aval.shape))}
    candidates = {
        loop for loop in leading.values()
        if loop is not None and loop not in features and loop not in scanned
        and (loop in reduced or loop in results)
    }  # fmt: skip
    counts = Counter(loop for loop in leading.values() if loop in candidates)
    if not counts:
        return None
    elements: Counter[Hashable] = Counter()
    for leaf in leaves:
        elements[leading[leaf.index]] += math.prod(leaf.shape)
    arguments = sorted({leaf.argument for leaf in leaves})
    # What nobody reads is in no loop, and says nothing of its argument.
    atoms = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
    read = {*variables(atoms)}
    told = [x for x in leaves if jaxpr.invars[x.index] in read]
    leaders = {n: [leading[x.index] for x in told if x.argument == n] for n in arguments}
    first = None if state else arguments[0]  # where functions take their parameters

    def likelihood(loop: Hashable) -> tuple[float, int, int, int]:
        share = max(own.count(loop) / len(own) for own in leaders.values() if own)
        later = sum(loop in own for number, own in leaders.items() if number != first)
        return share, later, counts[loop], elements[loop]

    main = max(counts, key=likelihood)
    # One of the parameters may have as many rows as the batch, by chance. In other arguments that
    # do not hold the batch, a leading dimension may be a loop of its own: the height of a kernel.
    dropped = {
        number for number, own in leaders.items()
        if not candidates.issuperset(own) and (main not in own or number == first)
    }  # fmt: skip
    if dropped.issuperset(n for n, own in leaders.items() if main in own):
        dropped = set()
    kept = [x for x in leaves if x.argument not in dropped and leading[x.index] in candidates]
    groups: dict[Hashable, list[Leaf]] = defaultdict(list)
    for leaf in kept:
        groups[leading[leaf.index]].append(leaf)
    # Another batch has several leaves as well (nodes and edges), or features of the main one
    # (unlabelled examples); a vector of weights for losses has neither.
    shared = {loop for x in groups[main] for loop in features_of(x)}
    for loop, own in list(groups.items()):
        if loop == main:
            continue
        if _meet(jaxpr, loops, {main, loop}):
            if len(own) == len(groups[main]) and {x.argument for x in own} != {first}:
                return None  # rows of one against rows of the other, and nothing tells them apart
            del groups[loop]
        elif len(own) < 2 and not any(shared & features_of(x) for x in own):
            beside = any(x.argument == own[0].argument for x in groups[main])
            if len(own[0].shape) > 1 and not (beside and elements[loop] < elements[main]):
                return None
            del groups[loop]  # weights, or targets of graphs beside their nodes
    return {x.index: axes[x.index] for own in groups.values() for x in own}


def leading_axes(
    jaxpr: Jaxpr, loops: DimensionLoops, leaves: Sequence[Leaf]
) -> tuple[dict[int, int], set[Hashable]]:
    """For each leaf its first dimension but time, and the loops that are time.

    Time is walked by scans: what comes after it may be the batch. But not if that looks more like
    time, of which parts are taken and positions are compared, and is nothing that is carried.
    """
    of = functools.partial(loop_at, jaxpr, loops)
    timed = {loops.loop(dim) for dim in loops.placed} | meet_themselves(jaxpr, loops)
    scanned, carried = {loops.loop(dim) for dim in loops.scanned}, loops.carried_by()
    walked = [(of(x.index, 0), of(x.index, 1)) for x in leaves if len(x.shape) > 1]
    rows = {first for first, _ in walked if first in scanned and first not in timed}
    rows -= {first for first, other in walked if other not in timed or (first, other) in carried}
    scanned -= rows
    axes = {x.index: int(len(x.shape) > 1 and of(x.index, 0) in scanned) for x in leaves}
    return axes, scanned


def loop_at(jaxpr: Jaxpr, loops: DimensionLoops, index: int, axis: int) -> Hashable | None:
    """The loop that an input has along a dimension; None: it has one place there."""
    dims = _dims(jaxpr.invars[index], axis)
    return loops.loop(dims[0]) if dims else None


def _meet(jaxpr: Jaxpr, loops: DimensionLoops, chosen: set[Hashable]) -> bool:
    """Whether two of these loops are dimensions of one value."""
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            dims = (dim for d in range(len(var.aval.shape)) for dim in _dims(var, d))
            if len({loop for dim in dims if (loop := loops.loop(dim)) in chosen}) > 1:
                return True
    return False


def meet_themselves(jaxpr: Jaxpr, loops: DimensionLoops) -> set[Hashable]:
    """Loops that are two dimensions of one value, as time is of attention's scores."""
    return {
        loop
        for eqn in jaxpr.eqns
        for var in eqn.outvars
        for loop, count in Counter(
            loops.loop(dim) for d in range(len(var.aval.shape)) for dim in _dims(var, d)
        ).items()
        if count > 1
    }
