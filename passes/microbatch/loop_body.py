"""The body of the loop over microbatches, written down equation by equation.

What evaluates a step of the loop is traced once for all steps that are alike, as those of a model's
layers are, and its equations are copied for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from autopar.passes.graph import graph as graphs
from autopar.passes.graph import jax_compat, source_infos
from autopar.passes.graph.graph import Atom
from autopar.passes.microbatch.batch_states import WHOLE, Form
from autopar.passes.microbatch.liveness import ABSENT, PhaseStep
from autopar.passes.microbatch.run_steps import Env, combine, evaluate, literal_value, local_struct


class _Given(NamedTuple):
    """An operand that is no variable: a literal's value, and its type."""

    value: Any
    aval: Any


_Operand = Atom | _Given | None


class LoopBody:
    """What one microbatch evaluates.

    Attributes:
      index: the variable of the microbatch's number.
      outer: what the body reads of what is there before the loop, in the order in which it does:
        variables of whole values, and arrays that tracing brings along, each with the body's
        variable for it.
    """

    def __init__(self, parts: int, same: Mapping[Var, Var], types: Mapping[Var, Any]) -> None:
        """`types` are those of the whole values that there are before the loop."""
        self.index = jax_compat.new_var(jax_compat.array_type((), np.dtype(np.int32), False))
        self.outer: list[tuple[Any, Var]] = []
        self._parts, self._same, self._types = parts, same, types
        self._values: dict[tuple[Var, Form], Atom] = {}
        self._eqns: list[JaxprEqn] = []
        self._effects: set[Any] = set()
        self._known: dict[Any, ClosedJaxpr] = {}
        self._here = source_infos.current_source()

    def give(self, var: Var, form: Form, stack: jax.Array) -> Var:
        """The body's variable for a value of which it is given its part of a stack."""
        weak = jax.typeof(stack).weak_type
        row = jax_compat.new_var(jax_compat.array_type(stack.shape[1:], stack.dtype, weak))
        self._values[var, form] = row
        return row

    def read(self, atom: Atom, form: Form) -> _Operand:
        """What a value is in the body."""
        if isinstance(atom, Literal):
            value = _Given(literal_value(atom), atom.aval)
            return value if form is WHOLE else self._formed(value, atom.aval, form)
        atom = self._same.get(atom, atom)
        if (atom, WHOLE) not in self._values and (atom, form) not in self._values:
            inner = jax_compat.new_var(self._types[atom])
            self.outer.append((atom, inner))
            self._values[atom, WHOLE] = inner
        if (atom, form) not in self._values:
            whole = self._values[atom, WHOLE]
            self._values[atom, form] = self._formed(whole, atom.aval, form)
        return self._values[atom, form]

    def run(self, step: PhaseStep) -> None:
        """Write down what evaluates a step."""
        eqn = step.eqn
        info, self._here = self._here, eqn.source_info
        operands = [
            None if form == ABSENT else self.read(atom, form)
            for atom, form in zip(eqn.invars, step.operand_forms, strict=True)
        ]
        there = [k for k, form in enumerate(step.result_forms) if form != ABSENT]

        def function(env: Env, *values: Any) -> list[Any]:
            with eqn.ctx.manager:
                results = evaluate(step, list(values), env)
            return [results[k] for k in there]

        results = self.call(_kind(step), function, operands)
        self._here = info
        for k, atom in zip(there, results, strict=True):
            self._values[eqn.outvars[k], step.result_forms[k]] = atom

    def call(
        self, kind: Any, function: Callable[..., list[Any]], operands: Sequence[_Operand]
    ) -> list[Atom]:
        """Results of a function of an environment and of operands.

        Calls of the same `kind` evaluate the same; one of None evaluates something of its own.
        """
        atoms = [x for x in operands if isinstance(x, Var | Literal)]
        key = None if kind is None else (kind, *(_type(x) for x in operands))
        closed = self._known.get(key) if key is not None else None
        if closed is None:

            def on_atoms(index: Any, *values: Any) -> list[Any]:
                left = iter(values)
                given = [
                    x.value if isinstance(x, _Given) else None if x is None else next(left)
                    for x in operands
                ]
                return function(Env({}, self._parts, index), *given)

            structs = [local_struct(atom.aval) for atom in (self.index, *atoms)]
            with source_infos.unscoped(self._here):
                closed = graphs.flatten(jax.make_jaxpr(on_atoms)(*structs))
            if key is not None:
                self._known[key] = closed
        return self._copied(closed, [self.index, *atoms])

    def _copied(self, closed: ClosedJaxpr, operands: Sequence[Atom]) -> list[Atom]:
        jaxpr = closed.jaxpr
        names: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            names[var] = jax_compat.new_var(var.aval)
            self.outer.append((value, names[var]))
        for eqn in jaxpr.eqns:
            self._effects |= eqn.effects
            outvars = [jax_compat.new_var(var.aval) for var in eqn.outvars]
            invars = [graphs.read_atom(names, atom) for atom in eqn.invars]
            info = source_infos.within(eqn.source_info, self._here)
            self._eqns.append(eqn.replace(invars=invars, outvars=outvars, source_info=info))
            names.update(zip(eqn.outvars, outvars, strict=True))
        return [graphs.read_atom(names, atom) for atom in jaxpr.outvars]

    def combined(self, monoid: str, total: Atom, var: Var, form: Form) -> Atom:
        """What has been accumulated, with what this microbatch makes of a value."""

        def function(env: Env, total: Any, value: Any) -> list[Any]:
            if value.dtype != total.dtype:
                value = lax.convert_element_type(value, total.dtype)
            return [combine(monoid, total, value)]

        (result,) = self.call(("combined", monoid), function, [total, self.read(var, form)])
        return result

    def _formed(self, whole: _Operand, aval: Any, form: Form) -> Atom:
        def function(env: Env, value: Any) -> list[Any]:
            return [env.from_whole(value, aval, form)]

        (result,) = self.call(("from whole", form), function, [whole])
        return result

    def closed(self, inputs: Sequence[Var], results: Sequence[Atom]) -> ClosedJaxpr:
        """The body as a function of what it reads of outside, and of its inputs."""
        jaxpr = jax_compat.replace_jaxpr(
            _EMPTY.jaxpr,
            invars=[*(inner for _, inner in self.outer), *inputs],
            eqns=self._eqns,
            outvars=list(results),
            effects=self._effects,
        )
        return ClosedJaxpr(jaxpr, ())


def scan_of(
    body: ClosedJaxpr,
    constants: Sequence[Any],
    start: Sequence[Any],
    stacks: Sequence[Any],
    length: int,
) -> list[Any]:
    """`jax.lax.scan` of a body that is traced already: its last carries, and its stacks."""
    small = jax.make_jaxpr(lambda: lax.scan(lambda x, _: (x, None), 0.0, None, length=length))
    (eqn,) = small().jaxpr.eqns
    params = jax_compat.scan_params(eqn.params, body, len(constants), len(start))
    return jax_compat.bind(eqn, [*constants, *start, *stacks], **params)


_EMPTY = jax.make_jaxpr(list)()


def _type(operand: _Operand) -> Any:
    if operand is None:
        return None
    weak = bool(getattr(operand.aval, "weak_type", False))
    if isinstance(operand, _Given):
        value = np.asarray(operand.value)
        return type(operand.value), value.dtype, value.tobytes(), operand.aval, weak
    return operand.aval, weak


def _kind(step: PhaseStep) -> Any:
    """What steps that are evaluated alike have in common, beside their operands' types."""
    eqn = step.eqn
    if step.bodies:
        return None
    kind = (
        eqn.primitive,
        tuple(sorted(eqn.params.items())),  # names are never equal
        tuple(var.aval for var in eqn.outvars),
        eqn.ctx,
        step.operand_forms,
        step.result_forms,
    )
    try:
        hash(kind)
    except TypeError:
        return None
    return kind
