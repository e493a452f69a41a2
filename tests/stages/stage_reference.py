"""Evaluates stages one task after the other, as a pipeline would, on one device.

Every stage's loop is taken apart: for each microbatch its F, B and W equations are evaluated at
different times. Outside of the loop, stages take turns: each evaluates what it can with what it has
received so far. Values pass between stages over the links alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.jax_compat import bind
from autopar.passes.slicing.stage_graphs import StageGraph, Stages


def evaluate(stages: Stages, inputs: Sequence[Any]) -> list[Any]:
    """The whole graph's outputs for the whole graph's inputs, constants included.

    All tasks of all stages are compiled together: that is quicker than each for itself.
    """
    return list(jax.jit(lambda values: _evaluate(stages, values))(list(inputs)))


def _evaluate(stages: Stages, inputs: Sequence[Any]) -> list[Any]:
    run = _Run(stages, inputs)
    run.outside()
    for kind, stage, microbatch in one_forward_one_backward(stages):
        run.machines[stage].task(kind, microbatch)
    for machine in run.machines:
        machine.leave_loop()
    run.outside()
    outputs: dict[int, Any] = {}
    for machine in run.machines:
        assert not machine.waiting, "equations that wait for each other"
        for place, number in enumerate(machine.stage.outputs):
            if number is not None:
                assert number not in outputs, f"output {number} comes from two stages"
                outputs[number] = machine.value(machine.jaxpr.outvars[place])
    return [outputs[number] for number in range(len(outputs))]


def one_forward_one_backward(stages: Stages) -> Iterator[tuple[str, int, int]]:
    """Tasks, each after what it waits for, with several microbatches in flight.

    W tasks come a microbatch later than they could.
    """
    count = next(stage.loop.num_microbatches for stage in stages.graphs if stage.loop is not None)
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
        self.links = {(link.target, link.target_input): link for link in stages.links}
        self.sent: dict[tuple[int, int, int], Any] = {}  # (stage, output, microbatch)
        self.machines = [
            _Machine(self, number, stage, inputs) for number, stage in enumerate(stages.graphs)
        ]

    def outside(self) -> None:
        """What can be evaluated outside of the loops now."""
        while sum(machine.advance() for machine in self.machines):
            pass


class _Machine:
    """One stage: variables outside of the loop, and those of the microbatches in flight."""

    def __init__(self, run: _Run, number: int, stage: StageGraph, inputs: Sequence[Any]):
        self.run, self.number, self.stage = run, number, stage
        self.jaxpr = stage.graph.jaxpr
        self.env: dict[Var, Any] = {}
        self.received = {}
        for place, (var, whole) in enumerate(zip(self.jaxpr.invars, stage.inputs, strict=True)):
            if whole is None:
                self.received[var] = run.links[number, place]
            else:
                self.env[var] = inputs[whole]
        loop = stage.loop
        scan = None if loop is None else loop.scan
        self.waiting = [eqn for eqn in self.jaxpr.eqns if eqn is not scan]
        self.flying: dict[int, dict[Var, Any]] = {}
        self.carry: list[Any] | None = None
        self.stacks: dict[Var, list[Any]] = {}
        if loop is not None:
            self.scan, self.body = loop.scan, loop.body
            self.num_consts, self.num_carry = jax_compat.scan_counts(self.scan.params)
            self.stacks = {outer: [] for outer in self.scan.outvars[self.num_carry :]}
            assert len(stage.tasks) == len(self.body.eqns)
            assert list(stage.tasks) == sorted(stage.tasks, key="FBW".index)
            self.pieces = {kind: self.piece(kind) for kind in dict.fromkeys(stage.tasks)}

    def value(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else self.env[atom]

    # Outside of the loop.

    def advance(self) -> bool:
        """Receive and evaluate what is possible; whether anything was."""
        progress = False
        for var, link in self.received.items():
            if link.per_microbatch or var in self.env:
                continue
            source = self.run.machines[link.source]
            sent = source.jaxpr.outvars[link.source_output]
            if sent in source.env:
                self.env[var] = source.env[sent]
                progress = True
        known = set(self.env)
        ready = []
        for eqn in self.waiting:
            if all(isinstance(v, Literal) or v in known for v in eqn.invars):
                ready.append(eqn)
                known.update(eqn.outvars)
        if not ready:
            return progress
        self.waiting = [eqn for eqn in self.waiting if not any(eqn is done for done in ready)]
        made = [v for eqn in ready for v in eqn.outvars]
        reads, function = function_of(ready, made)
        results = function(*(self.env[v] for v in reads))
        self.env.update(zip(made, results, strict=True))
        return True

    def leave_loop(self) -> None:
        """Write what has left the loop to the variables after it."""
        if self.stage.loop is not None:
            assert not self.flying
            totals = self.scan.outvars[: self.num_carry]
            self.env.update(zip(totals, self.accumulators(), strict=True))
            self.env.update((var, jnp.stack(rows)) for var, rows in self.stacks.items())

    def accumulators(self) -> list[Any]:
        if self.carry is None:
            starts = self.scan.invars[self.num_consts : self.num_consts + self.num_carry]
            self.carry = [self.value(v) for v in starts]
        return self.carry

    # Inside: one task of one microbatch.

    def piece(self, kind: str) -> Any:
        tasks = list(zip(self.body.eqns, self.stage.tasks, strict=True))
        own = [eqn for eqn, task in tasks if task == kind]
        others = [eqn.invars for eqn, task in tasks if task != kind]
        wanted = {v for atoms in (*others, self.body.outvars) for v in variables(atoms)}
        made = [v for eqn in own for v in eqn.outvars if v in wanted]
        return (*function_of(own, made), made)

    def task(self, kind: str, microbatch: int) -> None:
        if self.stage.loop is None:
            return
        env = self.flying.setdefault(microbatch, {})
        if kind in self.pieces:
            reads, function, made = self.pieces[kind]
            for var in reads:
                if var not in env:
                    env[var] = self.entering(var, microbatch)
            env.update(zip(made, function(*(env[v] for v in reads)), strict=True))
        for place, inner in enumerate(self.body.outvars[: self.num_carry]):
            carried = self.body.invars[self.num_consts + place]
            if not isinstance(inner, Literal) and inner in env:
                self.accumulators()[place] = env.pop(inner)
            env.pop(carried, None)
        for place, outer in enumerate(self.jaxpr.outvars):
            if outer in self.stacks and self.stage.outputs[place] is None:
                inner = self.body.outvars[self.scan.outvars.index(outer)]
                if inner in env:
                    self.run.sent.setdefault((self.number, place, microbatch), env[inner])
        last = max(self.stage.tasks, key="FBW".index)
        if kind == last:
            for (_, rows), inner in zip(
                self.stacks.items(), self.body.outvars[self.num_carry :], strict=True
            ):
                if isinstance(inner, Literal):
                    rows.append(inner.val)
                else:
                    rows.append(env[inner] if inner in env else self.entering(inner, microbatch))
            del self.flying[microbatch]
        elif "FBW".index(kind) > "FBW".index(last):
            self.flying.pop(microbatch, None)

    def entering(self, var: Var, microbatch: int) -> Any:
        """What enters an iteration: a constant, an accumulator, a slice, a received value."""
        place = self.body.invars.index(var)
        outer = self.scan.invars[place]
        if place < self.num_consts:
            return self.value(outer)
        if place < self.num_consts + self.num_carry:
            return self.accumulators()[place - self.num_consts]
        if not isinstance(outer, Literal) and outer in self.received:
            link = self.received[outer]
            # A KeyError here: the value is sent later than it is read.
            return self.run.sent[link.source, link.source_output, microbatch]
        return jax.lax.index_in_dim(self.value(outer), microbatch, keepdims=False)


def variables(atoms: Sequence[Any]) -> list[Var]:
    """Without literals and repetitions."""
    return list(dict.fromkeys(v for v in atoms if not isinstance(v, Literal)))


def function_of(
    eqns: Sequence[JaxprEqn], results: Sequence[Var]
) -> tuple[list[Var], Callable[..., list[Any]]]:
    """The variables that equations read, and a function from them to the results."""
    made = {v for eqn in eqns for v in eqn.outvars}
    reads = [v for v in variables([v for eqn in eqns for v in eqn.invars]) if v not in made]

    def function(*values: Any) -> list[Any]:
        env = dict(zip(reads, values, strict=True))
        for eqn in eqns:
            operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            env.update(zip(eqn.outvars, bind(eqn, operands), strict=True))
        return [env[v] for v in results]

    return reads, function
