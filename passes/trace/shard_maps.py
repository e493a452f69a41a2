"""`jax.shard_map` inside a step, as the same computation on whole arrays.

Its body is evaluated once for all devices. A value that the devices hold parts of is the whole
array, wherever its dimension is a loop of the equation by its factor rule; where such a loop is
summed over, only the sum is known, which a `psum` asks for. So a body that computes row by row
becomes what the user would have written for the whole batch. What does not go in this way along a
mesh axis gets a dimension for it, over which the body is mapped (`jax.vmap`): JAX says what its
collectives are there.

Two `shard_map`s of one mesh (a forward and a backward pass) hand over values as they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import closed_call_p

from autopar.base.errors import TraceError
from autopar.base.user_code import is_users
from autopar.passes.graph import jax_compat, source_infos
from autopar.passes.graph.graph import Atom, flatten, map_inner_jaxprs, user_source, walk
from autopar.passes.graph.primitives import CONTROL_FLOW
from autopar.passes.trace.device_blocks import (
    AllDevices,
    Blocks,
    Cuts,
    NotWholeError,
    axes_of,
    relayout,
)


def without_shard_maps(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A flat program in which every `shard_map` is what it computes on whole arrays.

    Raises:
      TraceError: a `jax.pmap`, or what devices exchange cannot be said on whole arrays.
    """
    if not any(eqn.primitive.name == "shard_map" for eqn in walk(closed.jaxpr)):
        return closed
    return flatten(ClosedJaxpr(_replaced(closed.jaxpr), closed.consts))


def _replaced(jaxpr: Jaxpr) -> Jaxpr:
    eqns: list[JaxprEqn] = []
    lying: dict[Atom, tuple[Any, Cuts, Blocks]] = {}  # what a result was put together from
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CONTROL_FLOW:
            eqn = eqn.replace(params=map_inner_jaxprs(eqn.params, _replaced))
        if eqn.primitive.name != "shard_map":
            eqns.append(eqn)
            continue
        mesh, given = eqn.params["mesh"], list[Blocks]()
        for atom, spec in zip(eqn.invars, eqn.params["in_specs"], strict=True):
            cuts = _cuts(spec, atom)
            known = None if isinstance(atom, Literal) else lying.get(atom)
            is_same = known is not None and known[:2] == (mesh, cuts)
            given.append(known[2] if known is not None and is_same else Blocks(atom, cuts))
        call, blocks = _called(eqn, given)
        eqns.append(call)
        outs = zip(eqn.outvars, eqn.params["out_specs"], blocks, strict=False)
        lying.update((var, (mesh, _cuts(spec, var), x)) for var, spec, x in outs)
    return jaxpr.replace(eqns=eqns)


def _cuts(spec: Any, atom: Atom) -> Cuts:
    """For each dimension the mesh axes that cut it, the outermost first."""

    def of_dim(entry: Any) -> tuple[str, ...]:
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        return tuple(map(str, names))

    return tuple(of_dim(spec[d]) if d < len(spec) else () for d in range(len(atom.aval.shape)))


def _called(eqn: JaxprEqn, given: Sequence[Blocks]) -> tuple[JaxprEqn, list[Blocks]]:
    """A call that computes a `shard_map`, and how what it returns beside its results lies."""
    if jax_compat.is_pmap(eqn):
        raise _refused(eqn, "it says what each device computes, and here the plan decides that")
    specs = zip(eqn.invars, eqn.params["in_specs"], strict=True)
    whole = [Blocks(atom, _cuts(spec, atom)) for atom, spec in specs]
    outs = [*map(_cuts, eqn.params["out_specs"], eqn.outvars)]
    sizes = {str(name): int(size) for name, size in eqn.params["mesh"].shape.items()}
    body = flatten(ClosedJaxpr(eqn.params["jaxpr"], ()))
    used = {name for x in (*given, *whole) for name in x.axes}
    used |= {name for cuts in outs for dim in cuts for name in dim}
    used |= {name for inner in walk(body.jaxpr) for name in axes_of(inner)}
    mapped: tuple[str, ...] = ()
    while True:
        values = whole if mapped else given
        program = _OnWholeArrays(body, sizes, mapped, [x.cuts for x in values], outs)
        try:
            with source_infos.unscoped(eqn.source_info):  # of what its parts are put together by
                traced = jax.make_jaxpr(program)(*[_struct(x.array) for x in values])
            break
        except NotWholeError as error:
            left = [name for name in sizes if name in used - {*mapped}]
            if not left:
                raise _refused(eqn, _EXCHANGE + str(error)) from error
            mapped = (*mapped, *([name for name in left if name in error.axes] or left))
        except _NOT_MAPPED as error:
            raise _refused(eqn, _EXCHANGE + str(error).partition("\n")[0].rstrip(".")) from error
    new = [jax_compat.new_var(aval) for aval in traced.out_avals]
    call = jex_core.new_jaxpr_eqn(
        [x.array for x in values],
        [*eqn.outvars, *new[len(eqn.outvars) :]],
        closed_call_p,
        {"call_jaxpr": traced},
        jex_core.no_effects,
        eqn.source_info,
    )
    lying = zip(new[len(eqn.outvars) :], program.lying, strict=True)
    return call, [Blocks(var, x.cuts) for var, x in lying]


# What JAX raises about collectives that it does not map.
_NOT_MAPPED = (AssertionError, NotImplementedError, NameError, TypeError, ValueError)
_EXCHANGE = "what its devices compute cannot be said for whole arrays: "


def _struct(atom: Atom) -> jax.ShapeDtypeStruct:
    weak = bool(getattr(atom.aval, "weak_type", False))
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, weak_type=weak)


class _OnWholeArrays:
    """A body on whole arrays, but mapped over some mesh axes; to be traced once.

    It returns the results on whole arrays and, where nothing is mapped, as they lie in the body
    (`lying` says how).
    """

    def __init__(
        self,
        body: ClosedJaxpr,
        sizes: Mapping[str, int],
        mapped: tuple[str, ...],
        ins: Sequence[Cuts],
        outs: Sequence[Cuts],
    ) -> None:
        self.body, self.sizes, self.mapped, self.ins, self.outs = body, sizes, mapped, ins, outs
        self.lying: list[Blocks] = []

    def __call__(self, *arrays: Any) -> list[Any]:
        if self.mapped:
            return self.by_blocks(arrays)
        devices = AllDevices(self.body, self.sizes)
        found = devices.run([*map(Blocks, arrays, self.ins)])
        self.lying = found
        wholes = [relayout(x, cuts, self.sizes) for x, cuts in zip(found, self.outs, strict=True)]
        return [*wholes, *(x.array for x in found)]

    def by_blocks(self, arrays: Sequence[Any]) -> list[Any]:
        """The results, where each mapped axis is a dimension of its own."""
        front = self.mapped[::-1]  # the outermost one first

        def named(cuts: Cuts) -> list[str]:
            return [name for name in front if any(name in dim for dim in cuts)]

        def rest(cuts: Cuts) -> Cuts:
            return tuple(tuple(n for n in dim if n not in front) for dim in cuts)

        apart = [
            relayout(Blocks(x, cuts), rest(cuts), self.sizes, front=named(cuts))
            for x, cuts in zip(arrays, self.ins, strict=True)
        ]

        def body(*parts: Any) -> list[Any]:
            devices = AllDevices(self.body, self.sizes)
            found = devices.run([*map(Blocks, parts, map(rest, self.ins))])
            return [
                relayout(x, rest(cuts), self.sizes)
                for x, cuts in zip(found, self.outs, strict=True)
            ]

        mapped: Callable[..., Any] = body
        for name in self.mapped:
            ins = [0 if name in named(cuts) else None for cuts in self.ins]
            mapped = jax.vmap(mapped, tuple(ins), axis_name=name, axis_size=self.sizes[name])
        return [
            self.joined(x, cuts, rest(cuts), front)
            for x, cuts in zip(mapped(*apart), self.outs, strict=True)
        ]

    def joined(self, array: Any, cuts: Cuts, rest: Cuts, front: Sequence[str]) -> Any:
        """A result from one that has all mapped axes in front."""
        made = relayout(
            Blocks(array, (*((name,) for name in front), *rest)),
            (*(() for _ in front), *cuts),
            self.sizes,
        )
        return jax.lax.squeeze(made, range(len(front)))


def _refused(eqn: JaxprEqn, why: str) -> TraceError:
    frame = source_infos.user_frame(eqn)
    return TraceError(
        "The step holds a jax.pmap, or a jax.shard_map that cannot be followed.",
        where=user_source(eqn) if frame and is_users(frame[0]) else None,
        why=f"{why}.",
        hint="call its function on whole arrays: jax.vmap(..., axis_name=...) has the same "
        "collectives, and autopar.local names dimensions that are independent of one another.",
    )
