"""One stage's graph from what it needs, and the links between the stages' graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Graph, Input, Output
from autopar.passes.graph.microbatched import LoopPhase, in_phases
from autopar.passes.slicing.anatomy import bytes_of, is_small
from autopar.passes.slicing.placed import PlacedProgram
from autopar.passes.slicing.stage_graphs import StageGraph, StageLink
from autopar.passes.slicing.task_order import order_tasks
from autopar.passes.slicing.transfers import Needs, StageExchange, Transfer


def assemble(
    program: PlacedProgram, demand: StageExchange, *, split_backward: bool
) -> tuple[tuple[StageGraph, ...], tuple[StageLink, ...]]:
    """The stages' graphs and their links."""
    made = [
        _StageAssembly(program, demand, stage, split_backward=split_backward)
        for stage in range(len(demand.needs))
    ]
    links = []
    for passed in demand.passed:
        source, target = made[passed.source], made[passed.target]
        var = passed.var
        links.append(
            StageLink(
                source=passed.source,
                target=passed.target,
                per_microbatch=passed.space == "inside",
                label=target.received_labels[passed],
                shape=tuple(var.aval.shape),
                dtype=var.aval.dtype,
                bytes=bytes_of(var),
                source_output=source.sent_at[passed.space, var],
                target_input=target.received_at[passed],
            )
        )
    return tuple(stage.result for stage in made), tuple(links)


class _StageAssembly:
    """One stage being put together."""

    def __init__(
        self, program: PlacedProgram, demand: StageExchange, stage: int, *, split_backward: bool
    ):
        self.program = program
        self.needs: Needs = demand.needs[stage]
        self.leaves = set(self.needs.leaves)
        if stage == 0:  # what nobody reads has to be somewhere
            used = {leaf for needs in demand.needs for leaf in needs.leaves}
            self.leaves |= set(range(len(program.parts.graph.inputs))) - used
        self.stage = stage
        self.received = [passed for passed in demand.passed if passed.target == stage]
        sent = [passed for passed in demand.passed if passed.source == stage]
        self.sent_inside = _distinct(passed.var for passed in sent if passed.space == "inside")
        self.sent_outside = _distinct(passed.var for passed in sent if passed.space == "outside")
        tasks = order_tasks(program, self.needs, self.sent_inside, split_backward=split_backward)
        self.order, self.tasks = tasks
        self.received_labels = {passed: self._label(passed) for passed in self.received}
        self.stacks: dict[Var, Var] = {}  # received and sent values of the body, stacked outside
        for var in (*self._received("inside"), *self.sent_inside):
            self.stacks[var] = jax_compat.new_var(
                _stacked_aval(var.aval, program.parts.loop.num_microbatches)
            )
        self.result = self._build()

    def _received(self, space: str) -> list[Var]:
        return [passed.var for passed in self.received if passed.space == space]

    def _label(self, passed: Transfer) -> str:
        program = self.program
        if passed.space == "inside":
            item = program.body[
                next(i for i, x in enumerate(program.body) if passed.var in x.eqn.outvars)
            ]
            if item.backward:
                return "gradient"
            forward = any(
                task == "F" and passed.var in program.body[index].eqn.invars
                for index, task in zip(self.order, self.tasks, strict=True)
            )
            return "activation" if forward else "residual"
        jaxpr, labels = program.parts.graph.jaxpr, program.parts.graph.inputs
        for var, label in zip(jaxpr.invars, labels, strict=True):
            if var is passed.var:
                return label.path
        if any(carry.total is passed.var for carry in program.carries):
            return "partial sum"
        if any(var is passed.var for _, var in program.parts.loop.stacks):
            return "collected"
        return "scalar" if is_small(passed.var.aval) else "result"

    def _build(self) -> StageGraph:
        program, graph, needs = self.program, self.program.parts.graph, self.needs
        leaves = sorted(self.leaves)
        own = [n for n in leaves if graph.inputs[n].role != "constant"]
        constants = [n for n in leaves if graph.inputs[n].role == "constant"]
        received = [p for p in self.received if p.space == "outside"]
        received += [p for p in self.received if p.space == "inside"]
        self.received_at = {p: len(own) + place for place, p in enumerate(received)}
        first_constant = len(graph.inputs) - len(graph.constants)
        outputs = sorted(needs.outputs)
        sent: list[tuple[str, Var]] = [("outside", var) for var in self.sent_outside]
        sent += [("inside", var) for var in self.sent_inside]
        self.sent_at = {key: len(outputs) + place for place, key in enumerate(sent)}

        before = [i for i in sorted(needs.outside) if i < program.num_before]
        behind = [i for i in sorted(needs.outside) if i >= program.num_before]
        loop = self._loop()
        eqns = [program.outside[index].eqn for index in before]
        eqns += [] if loop is None else [loop.scan]
        eqns += [program.outside[index].eqn for index in behind]
        invars = [
            *(graph.jaxpr.invars[n] for n in own),
            *(p.var if p.space == "outside" else self.stacks[p.var] for p in received),
            *(graph.jaxpr.invars[n] for n in constants),
        ]
        outvars = [
            *(graph.jaxpr.outvars[n] for n in outputs),
            *(var if space == "outside" else self.stacks[var] for space, var in sent),
        ]
        jaxpr = jax_compat.replace_jaxpr(
            graph.jaxpr,
            invars=invars,
            outvars=outvars,
            eqns=eqns,
            effects=jex_core.no_effects.union(*(eqn.effects for eqn in eqns)),
        )
        inputs = [graph.inputs[n] for n in own]
        inputs += [
            Input(f"recv[{place}] {self.received_labels[p]}", "other")
            for place, p in enumerate(received)
        ]
        inputs += [graph.inputs[n] for n in constants]
        labels = [graph.outputs[n] for n in outputs]
        labels += [Output(f"send[{place}]") for place in range(len(sent))]
        numbers: list[int | None] = [*own, *(None for _ in received), *constants]
        results: list[int | None] = [*outputs, *(None for _ in sent)]
        inputs, labels = _twinned(inputs, labels, numbers, results)
        whole = Graph(
            jaxpr=jaxpr,
            inputs=tuple(inputs),
            outputs=tuple(labels),
            constants=tuple(graph.constants[n - first_constant] for n in constants),
        )
        step = in_phases(whole, [] if loop is None else [loop])
        return StageGraph(step, inputs=tuple(numbers), outputs=tuple(results))

    def _loop(self) -> LoopPhase | None:
        """The stage's part of the loop."""
        program, loop, needs = self.program, self.program.parts.loop, self.needs
        if not self.order and not needs.carries and not needs.stacked:
            return None
        consts = [var for var in loop.consts if var in needs.consts]
        carries = [program.carries[index] for index in sorted(needs.carries)]
        slices = [var for var in loop.slices if var in needs.slices]
        received = self._received("inside")
        stacked = [loop.stacks[index] for index in sorted(needs.stacked)]
        invars = [*consts, *(carry.carry for carry in carries), *slices, *received]
        results = [
            *(carry.result for carry in carries),
            *(atom for atom, _ in stacked),
            *self.sent_inside,
        ]
        eqns = [program.body[index].eqn for index in self.order]
        body = jax_compat.replace_jaxpr(
            loop.body,
            invars=invars,
            outvars=results,
            eqns=eqns,
            effects=jex_core.no_effects.union(*(eqn.effects for eqn in eqns)),
        )
        outvars = [
            *(carry.total for carry in carries),
            *(var for _, var in stacked),
            *(self.stacks[var] for var in self.sent_inside),
        ]
        operands = [
            *(loop.consts[var] for var in consts),
            *(carry.start for carry in carries),
            *(loop.slices[var] for var in slices),
            *(self.stacks[var] for var in received),
        ]
        params = jax_compat.scan_params(
            loop.scan.params, ClosedJaxpr(body, ()), len(consts), len(carries)
        )
        scan = loop.scan.replace(
            invars=operands, outvars=outvars, params=params, effects=body.effects
        )
        return LoopPhase(scan, self.tasks)


def _twinned(
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    numbers: Sequence[int | None],
    results: Sequence[int | None],
) -> tuple[list[Input], list[Output]]:
    """Twins renumbered; those that are on another stage are none any more."""
    at_input: Mapping[int, int] = {n: i for i, n in enumerate(numbers) if n is not None}
    at_output: Mapping[int, int] = {n: i for i, n in enumerate(results) if n is not None}

    def at(places: Mapping[int, int], number: int | None) -> int | None:
        return None if number is None else places.get(number)

    return (
        [replace(label, alias=at(at_output, label.alias)) for label in inputs],
        [replace(label, alias=at(at_input, label.alias)) for label in outputs],
    )


def _distinct(variables: Any) -> list[Var]:
    return list(dict.fromkeys(v for v in variables if not isinstance(v, Literal)))


def _stacked_aval(aval: Any, count: int) -> Any:
    weak = bool(getattr(aval, "weak_type", False))
    return jax_compat.array_type((count, *aval.shape), aval.dtype, weak)
