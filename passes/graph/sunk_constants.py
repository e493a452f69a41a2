"""What a scan is given that is made of nothing is made in its body.

JAX takes what does not depend on a carry or a slice out of a scan that it differentiates, causal
masks for one: outside, they are arrays of the whole batch, which stay in memory and are read in
every iteration of both passes. Made in the body, of positions and numbers, they are fused into
what reads them, as where a loop is unrolled or has `jax.checkpoint`. What a product reads stays
outside: it would be written in every iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import (
    Atom,
    Graph,
    eliminate_dead_code,
    read_atom,
    variables,
    with_jaxpr,
)
from autopar.passes.graph.microbatched import LoopPhase, scan_like
from autopar.passes.graph.primitives import CHEAP
from autopar.passes.graph.read_whole import read_whole

LARGE = 1 << 16  # elements; caches hold what is smaller, and it may be read there


def with_sunk_constants(graph: Graph) -> Graph:
    """The same program, whose scans make large arrays of numbers alone where they read them."""
    jaxpr = _sunk(graph.jaxpr)
    return graph if jaxpr is graph.jaxpr else with_jaxpr(graph, jaxpr)


def _sunk(jaxpr: Jaxpr) -> Jaxpr:
    if not any(eqn.primitive.name == "scan" for eqn in jaxpr.eqns):
        return jaxpr
    numbers = _Numbers.of(jaxpr.eqns)
    eqns = [_with_sunk(eqn, numbers) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return eliminate_dead_code(jaxpr.replace(eqns=eqns))


@dataclass(frozen=True)
class _Numbers:
    """What a scope makes of numbers alone, by cheap operations element by element: its makers."""

    maker: Mapping[Var, JaxprEqn]

    @classmethod
    def of(cls, eqns: Sequence[JaxprEqn]) -> _Numbers:
        maker: dict[Var, JaxprEqn] = {}
        for eqn in eqns:
            is_cheap = eqn.primitive.name in CHEAP and not eqn.effects
            if is_cheap and maker.keys() >= {*variables(eqn.invars)}:
                maker.update(dict.fromkeys(eqn.outvars, eqn))
        return cls(maker)

    def made_again(self, wanted: Iterable[Var], names: dict[Var, Atom]) -> list[JaxprEqn]:
        """Equations that make what is wanted once more, under names of its own."""
        made, stack = list[JaxprEqn](), [(var, False) for var in wanted]
        while stack:
            var, ready = stack.pop()
            eqn = self.maker[var]
            if var in names:
                continue
            if not ready:
                stack.append((var, True))
                stack += [(operand, False) for operand in variables(eqn.invars)]
                continue
            operands = _read(names, eqn.invars)
            names.update((result, jax_compat.new_var(result.aval)) for result in eqn.outvars)
            made.append(eqn.replace(invars=operands, outvars=_read(names, eqn.outvars)))
        return made


def _with_sunk(scan: JaxprEqn, numbers: _Numbers) -> JaxprEqn:
    """A scan that is given none of what it fuses into its readers, and so the scans in its body."""
    if scan.primitive.name != "scan" or scan.params["jaxpr"].consts:
        return scan
    loop = LoopPhase(scan)
    pairs = [pair for pair in loop.consts.items() if not isinstance(pair[1], Literal)]
    pairs = [pair for pair in pairs if pair[1] in numbers.maker and pair[0].aval.size >= LARGE]
    whole = read_whole(loop.body.eqns) if pairs else ()
    large = {inner: outer for inner, outer in pairs if inner not in whole}
    if large:
        names: dict[Var, Atom] = {}
        made = numbers.made_again(large.values(), names)
        same = {inner: names[outer] for inner, outer in large.items()}
        made += (eqn.replace(invars=_read(same, eqn.invars)) for eqn in loop.body.eqns)
        scan = scan_like(
            scan,
            [pair for pair in loop.consts.items() if pair[0] not in large],
            [replace(item, result=read_atom(same, item.result)) for item in loop.accumulators],
            [*loop.slices.items()],
            [(read_atom(same, atom), outer) for atom, outer in loop.stacks],
            made,
        )
    closed = scan.params["jaxpr"]
    body = _sunk(closed.jaxpr)
    if body is closed.jaxpr:
        return scan
    return scan.replace(params={**scan.params, "jaxpr": ClosedJaxpr(body, closed.consts)})


def _read(names: Mapping[Var, Atom], atoms: Sequence[Atom]) -> list[Atom]:
    return [read_atom(names, atom) for atom in atoms]
