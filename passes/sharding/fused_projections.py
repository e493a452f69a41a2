"""Fused projections that Megatron's methods cannot cut, told to the user.

The columns of one matrix for queries, keys and values are often three parts one after the other.
Devices hold neighbouring columns, so what a device would compute of each part lies on several: a
cut of the heads is none of the columns. Where the heads come first, each device has whole heads of
all parts, if the devices divide the heads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Literal, Var

from autopar.base.user_code import warn
from autopar.passes.graph.graph import Graph, user_source, variables, walk
from autopar.passes.primitives.factor_rule import Rules
from autopar.passes.sharding.loop_kinds import INNER, LoopKinds

_TAKES_PARTS = ("split", "slice", "dynamic_slice", "gather")


def warn_of_fused(graph: Graph, rules: Rules, kinds: LoopKinds, method: str, parts: int) -> None:
    """Warn once of inner loops whose parts so many devices cannot share."""
    if parts < 2:
        return
    found: dict[str, tuple[int, tuple[int, ...], bool]] = {}
    readers: dict[Var, list[JaxprEqn]] = defaultdict(list)
    for eqn in walk(graph.jaxpr):
        for var in variables(eqn.invars):
            readers[var].append(eqn)
    for eqn in walk(graph.jaxpr):
        if eqn.primitive.name in ("reshape", "split", "slice"):
            for size, sizes in _fused(eqn, rules, kinds, parts):
                apart = eqn.primitive.name != "reshape" or _is_taken_apart(eqn, sizes, readers)
                found.setdefault(user_source(eqn), (size, sizes, apart))
    if not found:
        return
    (size, sizes, apart), *_ = found.values()
    places = [*found]
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    where = ", ".join(places[:3]) + more
    many, first = (", ".join(map(str, x)) for x in (sizes, (*sizes[1:2], sizes[0], *sizes[2:])))
    if sizes[0] > parts or not apart:  # heads, that the devices do not divide
        fewer = math.gcd(sizes[0], parts)
        warn(
            f"method={method!r} cannot share {sizes[0]} heads, or what else {size} columns have so "
            f"many of, among its {parts} devices.",
            where,
            f"the columns are ({many}), the outermost first, and {parts} does not divide "
            f"{sizes[0]}. What reads them is computed whole on every device, or gathered.",
            f"use an axis of {fewer} devices, by logical_mesh=; or another number of heads."
            if fewer > 1
            else "use another number of heads, or of devices, by logical_mesh=.",
        )
        return
    warn(
        f"method={method!r} cannot cut the {size} columns of a fused projection along its "
        f"{parts} devices.",
        where,
        f"they are ({many}), the outermost first: every device needs some of each of the "
        f"{sizes[0]} parts, and holds neighbouring columns. The projection is computed whole on "
        "every device, or gathered.",
        f"let what is cut come first, as ({first}): a kernel whose columns are ordered so, by "
        "heads for instance; or use a projection for each part.",
    )


def _is_taken_apart(
    eqn: JaxprEqn, sizes: tuple[int, ...], readers: Mapping[Var, Sequence[JaxprEqn]]
) -> bool:
    """Whether parts are taken of the outermost of the dimensions that a reshape makes.

    Of the columns that are so many times so many. Nobody takes apart heads.
    """
    shape = eqn.outvars[0].aval.shape
    places = (n for n in range(len(shape)) if shape[n : n + len(sizes)] == sizes)
    left = [(eqn.outvars[0], place) for place in places]
    seen = set[tuple[Var, int]]()
    while left:
        var, place = left.pop()
        if (var, place) in seen:
            continue
        seen.add((var, place))
        for reader in readers.get(var, ()):
            if not reader.outvars or reader.invars[0] is not var:
                continue
            made = reader.outvars[0]
            if reader.primitive.name in _TAKES_PARTS:
                taken = made.aval.shape
                if len(taken) < len(var.aval.shape) or taken[place] < var.aval.shape[place]:
                    return True
            elif reader.primitive.name == "unstack":  # what `q, k, v = y` is from JAX 0.12 on
                axis = reader.params["axis"]
                if axis == place:
                    return True
                left += [(part, place - (axis < place)) for part in reader.outvars]
            elif reader.primitive.name == "transpose":
                left.append((made, reader.params["permutation"].index(place)))
            elif made.aval.shape == var.aval.shape:
                left.append((made, place))
    return False


def _fused(
    eqn: JaxprEqn, rules: Rules, kinds: LoopKinds, parts: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Sizes of inner loops of parts, and of what they consist of."""
    atom = eqn.invars[0]
    if isinstance(atom, Literal):
        return
    for dim, size in enumerate(atom.aval.shape):
        kind = kinds.kinds.get(kinds.dims.root((atom, dim)))
        if kind != INNER or size % parts:
            continue
        if eqn.primitive.name == "reshape":
            rule = rules[eqn]
            sizes = tuple(rule.factors[f].size for f in rule.operands[0][dim])
            if len(sizes) > 1 and sizes[0] % parts and any(n % parts == 0 for n in sizes[1:]):
                yield size, sizes
        else:
            part = eqn.outvars[0].aval.shape[dim]
            if part < size and part % parts == 0 and size % part == 0:
                yield size, (size // part, part)
