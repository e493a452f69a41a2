"""While loops whose test is made in their body, so that the body alone is what devices share.

A `while` tests before each trip. Here it is tested once before the loop, and then at the end of
each trip: the loop carries whether it goes on. As often as before, with the same numbers; but all
that is computed of what it carries is one program now, which is laid out as a scan's body is
(`as_scan`), its collectives in one place. Under `jax.vmap` each row has a test of its own, and rows
that have ended stay as they are while others go on: JAX selects them where it lowers the loop, here
the body does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat, source_infos
from autopar.passes.graph.graph import Atom, flatten, read_atom, with_jaxpr
from autopar.passes.graph.held_constants import closed_bodies
from autopar.passes.graph.microbatched import Microbatched, in_phases
from autopar.passes.graph.primitives import CONTROL_FLOW
from autopar.passes.graph.scans import WhileParts

GOES_ON = "goes_on"
"""The parameter of a scan that stands for a `while`: which of its carries says that it goes on."""


def with_tests_in_bodies(step: Microbatched) -> Microbatched:
    """A program whose loops of unknown length are tested where their bodies end.

    Those of which devices share nothing stay (`_is_shared`).
    """
    scans: dict[int, JaxprEqn] = {}
    jaxpr = _tested(step.graph.jaxpr, scans)
    if jaxpr is step.graph.jaxpr:
        return step
    loops = [replace(loop, scan=scans.get(id(loop.scan), loop.scan)) for loop in step.loops]
    return in_phases(with_jaxpr(step.graph, jaxpr), loops)


def as_scan(eqn: JaxprEqn) -> JaxprEqn | None:
    """A loop that is tested where its body ends as a scan of one trip, of which `GOES_ON` tells.

    None of other loops. No passes but those that lay it out may take it for a scan: nobody knows
    how many trips it has, for which one stands.
    """
    place, loop = _goes_on(eqn), WhileParts.of(eqn)
    if place is None or not _is_shared(eqn):
        return None
    small = jax.make_jaxpr(lambda x: lax.scan(lambda x, _: (x, None), x, None, length=1))(0.0)
    (scan,) = small.jaxpr.eqns
    _, consts, carries = loop.operands(eqn.invars)
    params = jax_compat.scan_params(
        scan.params, ClosedJaxpr(loop.body, ()), len(consts), len(carries)
    )
    return eqn.replace(
        primitive=scan.primitive,
        invars=[*consts, *carries],
        params={**params, GOES_ON: place},
    )


def _goes_on(eqn: JaxprEqn) -> int | None:
    """Which of a loop's carries is all that its condition reads; None: it computes something."""
    loop = WhileParts.of(eqn)
    (result,) = loop.condition.outvars
    if loop.num_condition_consts or loop.condition.eqns or isinstance(result, Literal):
        return None
    return None if result.aval.shape else loop.condition.invars.index(result)


def _is_shared(eqn: JaxprEqn) -> bool:
    """Whether a loop has arrays, or effects that happen on one device; its condition has none."""
    has_arrays = any(math.prod(atom.aval.shape) > 1 for atom in eqn.invars)
    return (has_arrays or bool(eqn.effects)) and not WhileParts.of(eqn).condition.effects


def _tested(jaxpr: Jaxpr, scans: dict[int, JaxprEqn]) -> Jaxpr:
    """A program with tests in its loops' bodies; `scans` takes what stands for its own scans."""
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        inner = _with_bodies(eqn)
        if inner is not eqn and eqn.primitive.name == "scan":
            scans[id(eqn)] = inner
        is_tested = inner.primitive.name == "while" and _is_shared(inner)
        eqns += _with_test(inner) if is_tested and _goes_on(inner) is None else [inner]
    same = [*map(id, eqns)] == [*map(id, jaxpr.eqns)]
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _with_bodies(eqn: JaxprEqn) -> JaxprEqn:
    """An equation in whose bodies, of loops and branches, the same is done."""
    if eqn.primitive.name not in CONTROL_FLOW:
        return eqn

    def inside(closed: ClosedJaxpr) -> ClosedJaxpr:
        new = _tested(closed.jaxpr, {})
        return closed if new is closed.jaxpr else ClosedJaxpr(new, closed.consts)

    bodies = closed_bodies(eqn)
    new = [*map(inside, bodies)]
    if [*map(id, new)] == [*map(id, bodies)]:
        return eqn
    if eqn.primitive.name == "while":
        changed: dict[str, Any] = dict(zip(("cond_jaxpr", "body_jaxpr"), new, strict=True))
    else:
        changed = {"branches": tuple(new)} if eqn.primitive.name == "cond" else {"jaxpr": new[0]}
    return eqn.replace(params={**eqn.params, **changed})


def _with_test(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The first test, and the loop that carries it."""
    loop = WhileParts.of(eqn)
    tested, consts, starts = loop.operands(eqn.invars)
    made: list[JaxprEqn] = []

    def test(carries: Sequence[Atom], consts: Sequence[Atom], eqns: list[JaxprEqn]) -> list[Atom]:
        """Whether the loop goes on, and each row of it if rows have tests of their own."""
        (rows,) = _copied(loop.condition, [*consts, *carries], eqns)
        if not rows.aval.shape:
            return [rows]
        return [*_traced(jnp.any, [rows], eqn, eqns), rows]

    first = test(starts, tested, made)
    inner_consts = [jax_compat.new_var(atom.aval) for atom in tested]
    flags = [jax_compat.new_var(atom.aval) for atom in first]
    own, carries = loop.body.invars[: len(consts)], loop.body.invars[len(consts) :]
    body: list[JaxprEqn] = list(loop.body.eqns)
    results: list[Atom] = list(loop.body.outvars)
    if len(flags) > 1:
        for place, (old, new) in enumerate(zip(carries, results, strict=True)):
            results[place] = _traced(_selected, [flags[1], old, new], eqn, body)[0]
    last = test(results, inner_consts, body)
    outer = [jax_compat.new_var(atom.aval) for atom in first]
    params = {
        "cond_jaxpr": _same_as_first(loop.condition, [*flags, *carries]),
        "cond_nconsts": 0,
        "body_jaxpr": ClosedJaxpr(
            jax_compat.replace_jaxpr(
                loop.body,
                invars=[*inner_consts, *own, *flags, *carries],
                eqns=body,
                outvars=[*last, *results],
            ),
            (),
        ),
        "body_nconsts": len(tested) + len(consts),
    }
    new = eqn.replace(
        invars=[*tested, *consts, *first, *starts],
        outvars=[*outer, *eqn.outvars],
        params={**eqn.params, **params},
    )
    return [*made, new]


def _selected(goes_on: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """A row as it was, if it has ended; the rows' dimensions are the first ones."""
    dims = tuple(range(goes_on.ndim))
    return lax.select(lax.broadcast_in_dim(goes_on, old.shape, dims), new, old)


def _same_as_first(like: Jaxpr, carries: Sequence[Var]) -> ClosedJaxpr:
    """A condition that is the first of what the loop carries."""
    inner = [jax_compat.new_var(var.aval) for var in carries]
    changes = {"constvars": [], "invars": inner, "eqns": [], "outvars": inner[:1]}
    return ClosedJaxpr(jax_compat.replace_jaxpr(like, **changes), ())


def _copied(jaxpr: Jaxpr, operands: Sequence[Atom], eqns: list[JaxprEqn]) -> list[Atom]:
    """Add a program's equations on other operands; what it results in."""
    names: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
    for eqn in jaxpr.eqns:
        outvars = [jax_compat.new_var(var.aval) for var in eqn.outvars]
        eqns.append(eqn.replace(invars=[read_atom(names, x) for x in eqn.invars], outvars=outvars))
        names.update(zip(eqn.outvars, outvars, strict=True))
    return [read_atom(names, atom) for atom in jaxpr.outvars]


def _traced(
    function: Callable[..., Any], operands: Sequence[Atom], by: JaxprEqn, eqns: list[JaxprEqn]
) -> list[Atom]:
    """Add what a function computes of operands, at an equation's line."""
    shapes = [
        jax.ShapeDtypeStruct(
            x.aval.shape, x.aval.dtype, weak_type=bool(getattr(x.aval, "weak_type", False))
        )
        for x in operands
    ]
    with source_infos.unscoped(by.source_info):
        closed = flatten(jax.make_jaxpr(function)(*shapes))
    assert not closed.consts
    added: list[JaxprEqn] = []
    results = _copied(closed.jaxpr, operands, added)
    eqns += [x.replace(source_info=by.source_info) for x in added]
    return results
