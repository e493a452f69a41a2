"""Evaluates stages one task after the other, as a pipeline would, on one device.

Every stage's loop is taken apart: for each microbatch its F, B and W equations are evaluated at
different times, and values pass between stages through a dictionary. Equations outside of the loop
are evaluated when something asks for them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes import jax_compat
from autopar.passes.microbatch.execute import bind
from autopar.passes.stages import StageGraph, Stages


def evaluate(stages: Stages, inputs: Sequence[Any]) -> list[Any]:
    """The whole graph's outputs for the whole graph's inputs, constants included."""
    run = _Run(stages, inputs)
    for kind, stage, microbatch in one_forward_one_backward(stages):
        run.task(kind, stage, microbatch)
    for machine in run.machines:
        machine.finish()
    outputs: dict[int, Any] = {}
    for machine in run.machines:
        for place, number in enumerate(machine.stage.outputs):
            if number is not None:
                assert number not in outputs, f"output {number} comes from two stages"
                outputs[number] = machine.read(machine.jaxpr.outvars[place])
    return [outputs[number] for number in range(len(outputs))]


def one_forward_one_backward(stages: Stages) -> Iterator[tuple[str, int, int]]:
    """Tasks, each behind what it waits for, with several microbatches in flight.

    W tasks come a microbatch later than they could.
    """
    count = next(
        stage.graph.jaxpr.eqns[stage.loop].params["length"]
        for stage in stages.graphs
        if stage.loop is not None
    )
    number = len(stages.graphs)
    for tick in range(count + 2 * number + 1):
        for stage in range(number):
            if 0 <= tick - stage < count:
                yield "F", stage, tick - stage
        for stage in reversed(range(number)):
            microbatch = tick - (number - 1) - (number - 1 - stage)
            if 0 <= microbatch < count:
                yield "B", stage, microbatch
            if 0 <= microbatch - 1 < count:
                yield "W", stage, microbatch - 1


class _Run:
    def __init__(self, stages: Stages, inputs: Sequence[Any]):
        self.stages = stages
        self.machines = [
            _Machine(self, number, stage, inputs) for number, stage in enumerate(stages.graphs)
        ]
        self.per_step = {
            (link.target, link.target_input): (link.source, link.source_output)
            for link in stages.links
            if not link.per_microbatch
        }
        self.per_microbatch = {
            (link.target, link.target_input): (link.source, link.source_output)
            for link in stages.links
            if link.per_microbatch
        }
        self.sent: dict[tuple[int, int, int], Any] = {}  # (stage, output, microbatch)

    def task(self, kind: str, stage: int, microbatch: int) -> None:
        self.machines[stage].task(kind, microbatch)


class _Machine:
    """One stage: variables outside of the loop, and those of the microbatches in flight."""

    def __init__(self, run: _Run, number: int, stage: StageGraph, inputs: Sequence[Any]):
        self.run, self.number, self.stage = run, number, stage
        self.jaxpr = stage.graph.jaxpr
        self.env: dict[Var, Any] = {}
        self.received: dict[Var, int] = {}
        for place, (var, whole) in enumerate(zip(self.jaxpr.invars, stage.inputs, strict=True)):
            if whole is None:
                self.received[var] = place
            else:
                self.env[var] = inputs[whole]
        self.made_by = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
        self.flying: dict[int, dict[Var, Any]] = {}
        self.outgoing = {
            var: place
            for place, var in enumerate(self.jaxpr.outvars)
            if not isinstance(var, Literal)
        }
        if stage.loop is None:
            return
        self.scan = self.jaxpr.eqns[stage.loop]
        self.body = self.scan.params["jaxpr"].jaxpr
        self.consts, carry = jax_compat.scan_counts(self.scan.params)
        self.first_slice = self.consts + carry
        self.num_carry = carry
        self.stacks: dict[int, list[Any]] = {
            place: [] for place in range(carry, len(self.scan.outvars))
        }
        self.carry: list[Any] | None = None
        assert len(stage.tasks) == len(self.body.eqns)
        assert list(stage.tasks) == sorted(stage.tasks, key="FBW".index)

    # Outside of the loop: on demand.

    def read(self, atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self.env:
            if atom in self.received:
                source = self.run.per_step[self.number, self.received[atom]]
                other = self.run.machines[source[0]]
                self.env[atom] = other.read(other.jaxpr.outvars[source[1]])
            else:
                self.apply(self.made_by[atom], self.env, self.read)
        return self.env[atom]

    def finish(self) -> None:
        """Write what has left the loop to the variables behind it."""
        for eqn in self.jaxpr.eqns:
            if eqn.effects and not any(v in self.env for v in eqn.outvars):
                self.apply(eqn, self.env, self.read)
        if self.stage.loop is None:
            return
        carry = self.carry or [self.read(v) for v in self.starts()]
        self.env.update(zip(self.scan.outvars[: self.num_carry], carry, strict=True))
        for place, rows in self.stacks.items():
            self.env[self.scan.outvars[place]] = jnp.stack(rows)

    def starts(self) -> list[Any]:
        return self.scan.invars[self.consts : self.first_slice]

    @staticmethod
    def apply(eqn: JaxprEqn, env: dict[Var, Any], read: Any) -> None:
        results = bind(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))

    # Inside: one task of one microbatch.

    def task(self, kind: str, microbatch: int) -> None:
        if self.stage.loop is None or not any(kind == task for task in self.stage.tasks):
            self.end(kind, microbatch)
            return
        env = self.flying.setdefault(microbatch, {})

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            if atom not in env:
                env[atom] = self.slice(self.body.invars.index(atom), microbatch)
            return env[atom]

        for eqn, task in zip(self.body.eqns, self.stage.tasks, strict=True):
            if task == kind:
                self.apply(eqn, env, read)
        for inner, outer in zip(self.body.outvars, self.scan.outvars, strict=True):
            if not isinstance(inner, Literal) and inner in env and outer in self.outgoing:
                self.run.sent.setdefault(
                    (self.number, self.outgoing[outer], microbatch), env[inner]
                )
        self.end(kind, microbatch)

    def slice(self, place: int, microbatch: int) -> Any:
        """What enters an iteration: a constant, an accumulator, a slice, a received value."""
        outer = self.scan.invars[place]
        if place < self.consts:
            return self.read(outer)
        if place < self.first_slice:
            if self.carry is None:
                self.carry = [self.read(v) for v in self.starts()]
            return self.carry[place - self.consts]
        if outer in self.received:
            source = self.run.per_microbatch[self.number, self.received[outer]]
            return self.run.sent[(*source, microbatch)]  # missing: sent too late
        return jax.lax.index_in_dim(self.read(outer), microbatch, keepdims=False)

    def end(self, kind: str, microbatch: int) -> None:
        """Take over accumulators, and behind the last task what is stacked."""
        if self.stage.loop is None:
            return
        env = self.flying.get(microbatch, {})
        if self.carry is None:
            self.carry = [self.read(v) for v in self.starts()]
        for place, inner in enumerate(self.body.outvars[: self.num_carry]):
            if not isinstance(inner, Literal) and inner in env:
                self.carry[place] = env.pop(inner)
                env.pop(self.body.invars[self.consts + place], None)
        last = "W" if "W" in self.stage.tasks else "B" if "B" in self.stage.tasks else "F"
        if kind != last:
            return
        for place, rows in self.stacks.items():
            inner = self.body.outvars[place]
            rows.append(
                inner.val
                if isinstance(inner, Literal)
                else env[inner]
                if inner in env
                else self.slice(self.body.invars.index(inner), microbatch)
            )
        self.flying.pop(microbatch, None)
