"""The compiler's value: a flat jaxpr whose inputs and outputs know what they are.

A `Graph` is one `Jaxpr` without constvars in which every call (jit, custom_jvp, custom_vjp,
checkpoint, closed_call) is inlined; scan, while and cond stay equations, their bodies are flat too.
Closed-over arrays are inputs of role "constant", their values are in `Graph.constants`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Var

from autopar.base.row_sorts import RowSort
from autopar.passes.graph import jax_compat, primitives, source_infos
from autopar.passes.graph.barriers import is_barrier, part_of_barrier, passed_by_barrier
from autopar.passes.graph.cond_literals import with_literals_inside
from autopar.passes.graph.held_constants import HeldConstants, passed_down
from autopar.passes.graph.library_primitives import stands_for
from autopar.passes.graph.plain_equations import plain
from autopar.passes.graph.platforms import known_branch, only_platform
from autopar.passes.graph.selected_branches import are_selected, product_flops, selections

Role = Literal["state", "batch", "constant", "received", "other"]
Atom = Any  # Var | Literal
_SELECTED = 1 / 50  # of a step's FLOPs may a `cond` take that computes both of its branches


@dataclass(frozen=True)
class Input:
    """One input leaf: where it is in the user's arguments and what it is used as.

    `batch_axis` is the dimension along which a batch leaf holds examples (None: it has none),
    `alias` the index of the output that the next call takes in this leaf's place, `donated`
    whether its buffer may be reused; `loops` are the kinds of its dimensions' loops, where a
    method asks for them.
    """

    path: str
    role: Role
    batch_axis: int | None = None
    alias: int | None = None
    donated: bool = False
    loops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Output:
    """One output leaf: its path, the input that it will replace, whether it becomes state."""

    path: str
    alias: int | None = None
    into_state: bool = False  # on another stage


@dataclass(frozen=True)
class Graph:
    """A flat program with labelled inputs and outputs. `constants` are the last inputs' values.

    `row_sorts` says what became of rows that are sorted by expert.
    """

    jaxpr: Jaxpr
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: tuple[Any, ...] = ()
    row_sorts: tuple[RowSort, ...] = ()

    def __str__(self) -> str:
        lines = [f"graph of {len(self.jaxpr.eqns)} equations"]
        for var, label in zip(self.jaxpr.invars, self.inputs, strict=True):
            axis = "" if label.batch_axis is None else f" batch axis {label.batch_axis}"
            alias = "" if label.alias is None else f" -> {self.outputs[label.alias].path}"
            donated = " donated" if label.donated else ""
            lines.append(
                f"  {label.role:8} {label.path}: {var.aval.str_short()}{axis}{alias}{donated}"
            )
        lines.append(str(self.jaxpr))
        return "\n".join(lines)


def from_closed_jaxpr(
    closed: ClosedJaxpr, inputs: Sequence[Input], outputs: Sequence[Output]
) -> Graph:
    """Flatten a traced program: constants become inputs, calls are inlined, dead code goes."""
    closed = flatten(closed, selected_flops=round(_SELECTED * product_flops(closed.jaxpr)))
    jaxpr, constants = closed.jaxpr, tuple(closed.consts)
    labels = [*inputs, *(Input(f"constant[{i}]", "constant") for i in range(len(constants)))]
    jaxpr = jax_compat.replace_jaxpr(jaxpr, constvars=[], invars=[*jaxpr.invars, *jaxpr.constvars])
    used = used_vars(jaxpr)
    keep = len(inputs)
    kept = [i for i in range(len(jaxpr.invars)) if i < keep or jaxpr.invars[i] in used]
    return Graph(
        jaxpr=jax_compat.replace_jaxpr(jaxpr, invars=[jaxpr.invars[i] for i in kept]),
        inputs=tuple(labels[i] for i in kept),
        outputs=tuple(outputs),
        constants=tuple(constants[i - keep] for i in kept if i >= keep),
    )


# Inlining. A call's jaxpr may be cached and occur many times, so each inlining takes new variables.


def flatten(closed: ClosedJaxpr, selected_flops: int = 0) -> ClosedJaxpr:
    """`closed` with every call inlined, recursively inside control flow.

    Arrays that calls and bodies hold become constants of the result. Of equal equations the first
    one stays, as XLA keeps one of them; dead code goes. A `cond` whose products take no more FLOPs
    than `selected_flops` may be a choice between two results (`selected_branches.py`).
    """
    whole = inlined(closed, selected_flops)
    return ClosedJaxpr(eliminate_dead_code(merge_equal_equations(whole.jaxpr)), whole.consts)


def inlined(closed: ClosedJaxpr, selected_flops: int = 0) -> ClosedJaxpr:
    """The same with every equation that the function makes, dead ones and equal ones too."""
    jaxpr, held = closed.jaxpr, HeldConstants(closed)
    eqns: list[JaxprEqn] = []
    env: dict[Var, Atom] = {}
    _inline_into(jaxpr, env, eqns, held, None, selected_flops)
    outvars = [read_atom(env, v) for v in jaxpr.outvars]
    jaxpr = jaxpr.replace(eqns=eqns, outvars=outvars)
    if len(held.variables) > len(jaxpr.constvars):
        jaxpr = jax_compat.replace_jaxpr(jaxpr, constvars=held.variables)
    return ClosedJaxpr(jaxpr, held.values)


def read_atom(env: Mapping[Var, Atom], atom: Atom) -> Atom:
    """What stands for an atom where variables have been renamed."""
    return atom if isinstance(atom, jex_core.Literal) else env.get(atom, atom)


def _inline_into(
    jaxpr: Jaxpr,
    env: dict[Var, Atom],
    eqns: list[JaxprEqn],
    held: HeldConstants,
    outer: JaxprEqn | None,
    selected_flops: int,
) -> None:
    for eqn in itertools.chain.from_iterable(map(plain, jaxpr.eqns)):
        operands = [read_atom(env, v) for v in eqn.invars]
        info = eqn.source_info if outer is None else source_infos.with_outer_source(eqn, outer)
        name = eqn.primitive.name
        only = operands[0] if primitives.is_identity(eqn) else only_platform(eqn)
        if only is not None:
            env[eqn.outvars[0]] = only
            continue
        called, operands = _called(eqn, operands)
        if called is not None:
            inner = called.jaxpr
            is_separate = eqn.params.get("differentiated") and eqn.params.get("prevent_cse")
            if name in primitives.REMATS and is_separate:
                operands = passed_by_barrier(operands, info, eqns)
            inner_env: dict[Var, Atom] = dict(zip(inner.invars, operands, strict=True))
            inner_env.update(zip(inner.constvars, held.atoms(called), strict=True))
            calling = eqn.replace(source_info=info)
            _inline_into(inner, inner_env, eqns, held, calling, selected_flops)
            for var, result in zip(eqn.outvars, inner.outvars, strict=True):
                env[var] = read_atom(inner_env, result)
            continue
        outvars = list(eqn.outvars)
        if outer is not None:  # variables of an inlined jaxpr may occur twice
            outvars = [v if isinstance(v, DropVar) else jax_compat.new_var(v.aval) for v in outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
        if name in primitives.CONTROL_FLOW:
            operands, bodies = with_literals_inside(eqn, operands)
            inside = selected_flops if name == "cond" else 0
            bodies = [flatten(body, inside) for body in bodies]
            if are_selected(eqn, bodies, inside):
                env.update(_selected(eqn.replace(source_info=info), operands, bodies, eqns, held))
                continue
            operands, params = passed_down(eqn, operands, bodies, held)
        elif name in primitives.KERNELS:
            params = eqn.params
        else:
            params = map_inner_jaxprs(eqn.params, _flat_body)
        eqns.append(eqn.replace(invars=operands, outvars=outvars, params=params, source_info=info))


def _selected(
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    branches: Sequence[ClosedJaxpr],
    eqns: list[JaxprEqn],
    held: HeldConstants,
) -> dict[Var, Atom]:
    """What the results of a `cond` are where both of its branches are inlined."""
    found = []
    for branch in branches:
        inner: dict[Var, Atom] = dict(zip(branch.jaxpr.invars, operands[1:], strict=True))
        inner.update(zip(branch.jaxpr.constvars, held.atoms(branch), strict=True))
        _inline_into(branch.jaxpr, inner, eqns, held, eqn, 0)
        found.append([read_atom(inner, atom) for atom in branch.jaxpr.outvars])
    chosen, results = selections(eqn, operands[0], found)
    eqns += chosen
    return dict(zip(eqn.outvars, results, strict=True))


def _called(eqn: JaxprEqn, operands: list[Atom]) -> tuple[ClosedJaxpr | None, list[Atom]]:
    """What a call calls, and with which of its operands."""
    name, params = eqn.primitive.name, eqn.params
    called: ClosedJaxpr | Jaxpr | None = known_branch(eqn, operands)
    if called is not None:
        operands = operands[1:]
    elif name == "call_hi_primitive":
        called = jax_compat.expanded(eqn)
    elif name == "custom_linear_solve":  # its other functions are there for derivatives
        lengths, called = params["const_lengths"], params["jaxprs"].solve
        rest = (first := lengths.matvec + lengths.vecmat) + lengths.solve + lengths.transpose_solve
        operands = [*operands[first : first + lengths.solve], *operands[rest:]]
    elif primitives.BODY_PARAM.get(name) in params:
        called = params[primitives.BODY_PARAM[name]]
    else:
        called = stands_for(eqn)
    is_open = isinstance(called, Jaxpr) and not isinstance(called, ClosedJaxpr)  # one in JAX 0.11
    return ClosedJaxpr(called, ()) if is_open else called, operands


def _flat_body(jaxpr: Jaxpr) -> Jaxpr:
    """A body that no pass looks into; one that holds arrays stays as it is."""
    flat = flatten(ClosedJaxpr(jaxpr, [object() for _ in jaxpr.constvars]))
    return flat.jaxpr if len(flat.jaxpr.constvars) == len(jaxpr.constvars) else jaxpr


def map_inner_jaxprs(
    params: Mapping[str, Any], function: Callable[[Jaxpr], Jaxpr]
) -> dict[str, Any]:
    """`params` with `function` applied to every jaxpr of a control-flow equation."""

    def apply(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr) and isinstance(value.jaxpr, Jaxpr):
            return ClosedJaxpr(function(value.jaxpr), value.consts)
        if isinstance(value, Jaxpr):
            return function(value)
        if isinstance(value, tuple) and value and isinstance(value[0], (ClosedJaxpr, Jaxpr)):
            applied = map(apply, value)  # a named tuple stays one: that of custom_linear_solve
            return type(value)(*applied) if hasattr(value, "_fields") else tuple(applied)
        return value

    return {key: apply(value) for key, value in params.items()}


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The bodies of a control-flow equation, in the order of its params; a kernel has none."""
    return [] if eqn.primitive.name in primitives.KERNELS else jaxprs_in(eqn.params)


def jaxprs_in(params: Mapping[str, Any]) -> list[Jaxpr]:
    """Every jaxpr that params hold, in their order, but for what a library has in place of one."""
    held: list[Any] = []
    for value in params.values():
        several = value if isinstance(value, tuple) else (value,)
        if several and isinstance(several[0], (ClosedJaxpr, Jaxpr)):
            held += (x for x in several if x is not None)  # custom_linear_solve may lack some
    opened = [x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in held]
    return [x for x in opened if isinstance(x, Jaxpr)]


def walk(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a jaxpr, those of inner bodies after the equation that holds them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from walk(inner)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among atoms, in their order: all but literals."""
    return [atom for atom in atoms if not isinstance(atom, jex_core.Literal)]


def makers_of(eqns: Iterable[JaxprEqn]) -> dict[Var, int]:
    """For every variable that equations make, the number of its equation."""
    return {var: number for number, eqn in enumerate(eqns) for var in eqn.outvars}


def readers_of(eqns: Iterable[JaxprEqn]) -> dict[Var, list[int]]:
    """For every variable that equations read, their numbers, ascending and each once."""
    readers: dict[Var, list[int]] = {}
    for number, eqn in enumerate(eqns):
        for var in dict.fromkeys(variables(eqn.invars)):
            readers.setdefault(var, []).append(number)
    return readers


def made_from(eqns: Sequence[JaxprEqn], wanted: Iterable[Atom]) -> set[int]:
    """Numbers of the equations that values are made from, directly or not."""
    live, found = set(variables(wanted)), set[int]()
    for number in reversed(range(len(eqns))):
        if not live.isdisjoint(eqns[number].outvars):
            found.add(number)
            live.update(variables(eqns[number].invars))
    return found


def used_vars(jaxpr: Jaxpr) -> set[Var]:
    """Variables that an equation or a result reads."""
    return set(variables(jaxpr.outvars)).union(*(variables(e.invars) for e in jaxpr.eqns))


def eliminate_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Drop equations whose results nobody reads; an equation with an effect always stays.

    A barrier drops the operands whose results nobody reads, and with them what they are made from.
    """
    live = set(variables(jaxpr.outvars))
    kept: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in live for v in eqn.outvars):
            if is_barrier(eqn):
                eqn = part_of_barrier(eqn, [i for i, v in enumerate(eqn.outvars) if v in live])
            kept.append(eqn)
            live.update(variables(eqn.invars))
    return jaxpr.replace(eqns=kept[::-1])


def merge_equal_equations(jaxpr: Jaxpr) -> Jaxpr:
    """Of equations with equal primitives, params and operands and no effects, keep the first."""
    known: dict[Any, JaxprEqn] = {}
    env: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        operands = [read_atom(env, atom) for atom in eqn.invars]
        if any(new is not old for new, old in zip(operands, eqn.invars, strict=True)):
            eqn = eqn.replace(invars=operands)
        key = None
        if not eqn.effects and eqn.primitive.name not in primitives.DISTINCT:
            key = equation_key(eqn)
        first = eqn if key is None else known.setdefault(key, eqn)
        pairs = list(zip(eqn.outvars, first.outvars, strict=True))
        # The first one may not keep what is needed here.
        lacks = any(isinstance(b, DropVar) and not isinstance(a, DropVar) for a, b in pairs)
        if first is eqn or lacks:
            eqns.append(eqn)
        else:
            env.update(pairs)
    outvars = [read_atom(env, atom) for atom in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def equation_key(eqn: JaxprEqn, env: Mapping[Var, Atom] | None = None) -> Any:
    """What makes equations equal, with variables renamed; None where a param cannot be compared."""
    atoms = tuple(
        (atom.aval.str_short(), atom.aval.weak_type, np.asarray(atom.val).tobytes())
        if isinstance(atom, jex_core.Literal)
        else read_atom(env or {}, atom)
        for atom in eqn.invars
    )
    key = (eqn.primitive.name, atoms, tuple(sorted(eqn.params.items())))  # names are never equal
    try:
        hash(key)
    except TypeError:
        return None
    return key


def check(graph: Graph) -> None:
    """Assert that every variable is defined once and before its use, and that labels fit."""
    jaxpr = graph.jaxpr
    assert not jaxpr.constvars
    assert len(jaxpr.invars) == len(graph.inputs), (len(jaxpr.invars), len(graph.inputs))
    assert len(jaxpr.outvars) == len(graph.outputs), (len(jaxpr.outvars), len(graph.outputs))
    number = len(graph.constants)
    roles = [label.role for label in graph.inputs]
    assert all((r == "constant") == (i >= len(roles) - number) for i, r in enumerate(roles)), roles
    for i, label in enumerate(graph.inputs):
        assert label.alias is None or graph.outputs[label.alias].alias == i, label
    jex_core.check_jaxpr(jaxpr)


def user_source(eqn: JaxprEqn) -> str:
    """`file.py:12 (function)` of the user's code that made this equation, or its name stack."""
    frame = source_infos.user_frame(eqn)
    if frame is None:
        return str(eqn.source_info.name_stack) or "an unknown line"
    return f"{frame[0]}:{frame[1]} ({frame[2]})"


def with_jaxpr(graph: Graph, jaxpr: Jaxpr) -> Graph:
    """The same labels on another program."""
    return replace(graph, jaxpr=jaxpr)


def batch_sizes(graph: Graph) -> set[int]:
    """How many rows the inputs that hold a batch have."""
    return {
        var.aval.shape[label.batch_axis]
        for var, label in zip(graph.jaxpr.invars, graph.inputs, strict=True)
        if label.batch_axis is not None
    }
