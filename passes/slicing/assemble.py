"""One stage's graph from what it needs, and the links between the stages' graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.extend import core as jex_core
from jax.extend.core import Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Graph, Input, Output, variables
from autopar.passes.graph.microbatched import LoopPhase, Task, in_phases, scan_like, stacked
from autopar.passes.graph.primitives import HEAVY
from autopar.passes.slicing.anatomy import bytes_of, is_small
from autopar.passes.slicing.placed import PlacedProgram
from autopar.passes.slicing.stage_graphs import StageGraph, StageLink
from autopar.passes.slicing.transfers import Needs, StageExchange, Transfer


def assemble(
    program: PlacedProgram, exchange: StageExchange, *, split_backward: bool
) -> tuple[tuple[StageGraph, ...], tuple[StageLink, ...]]:
    """The stages' graphs and their links."""
    made = [
        _StageAssembly(program, exchange, stage, split_backward=split_backward)
        for stage in range(len(exchange.needs))
    ]
    links = tuple(
        StageLink(
            source=passed.source,
            target=passed.target,
            per_microbatch=passed.inside,
            label=receiver.label(passed),
            shape=tuple(passed.var.aval.shape),
            dtype=passed.var.aval.dtype,
            bytes=bytes_of(passed.var),  # what comes first is the stage's own
            source_output=len(sender.needs.outputs) + sender.sent.index(passed.var),
            target_input=len(receiver.own) + receiver.received.index(passed),
        )
        for passed in exchange.passed
        for sender, receiver in [(made[passed.source], made[passed.target])]
    )
    return tuple(stage.graph() for stage in made), links


class _StageAssembly:
    """One stage being put together.

    Attributes:
      own: input numbers of the whole graph's leaves that it has; `constants` are apart.
      received: what it gets, first what is from outside of the loop; `sent` is alike.
      stacks: for what is received or sent by the body, the stacked variable outside.
    """

    def __init__(
        self, program: PlacedProgram, exchange: StageExchange, stage: int, *, split_backward: bool
    ) -> None:
        self.program, self.needs = program, exchange.needs[stage]
        whole = program.parts.graph
        leaves = set(self.needs.leaves)
        if stage == 0:  # what nobody reads has to be somewhere
            leaves |= set(range(len(whole.inputs))).difference(*(n.leaves for n in exchange.needs))
        self.own = sorted(n for n in leaves if whole.inputs[n].role != "constant")
        self.constants = sorted(n for n in leaves if whole.inputs[n].role == "constant")
        passed = sorted(exchange.passed, key=lambda p: p.inside)
        self.received = [p for p in passed if p.target == stage]
        sent = {p.var: p.inside for p in passed if p.source == stage}
        self.sent, self.sent_inside = [*sent], [var for var, inside in sent.items() if inside]
        self.order, self.tasks = _order_tasks(
            program, self.needs, self.sent_inside, split_backward=split_backward
        )
        self.received_inside = [p.var for p in self.received if p.inside]
        self.stacks = {
            var: stacked(var, program.parts.loop.num_microbatches)
            for var in (*self.received_inside, *self.sent_inside)
        }

    def label(self, passed: Transfer) -> str:
        """What a value is that the stage receives."""
        program, var = self.program, passed.var
        if passed.inside:
            if var in program.backward_values:
                return "gradient"
            forward = any(
                task == "F" and var in program.body[index].eqn.invars
                for index, task in zip(self.order, self.tasks, strict=True)
            )
            return "activation" if forward else "residual"
        graph = program.parts.graph
        if var in graph.jaxpr.invars:
            return graph.inputs[graph.jaxpr.invars.index(var)].path
        if any(carry.total is var for carry in program.carries):
            return "partial sum"
        if any(stack is var for _, stack in program.parts.loop.stacks):
            return "collected"
        return "scalar" if is_small(var.aval) else "result"

    def graph(self) -> StageGraph:
        """The stage's program."""
        program, whole = self.program, self.program.parts.graph
        loop, outputs = self._loop(), sorted(self.needs.outputs)
        outside = sorted(self.needs.outside)
        eqns = [program.outside[index].eqn for index in outside]
        if loop is not None:
            eqns.insert(sum(index < program.num_before for index in outside), loop.scan)
        received = [self.stacks.get(p.var, p.var) for p in self.received]
        sent = [self.stacks.get(var, var) for var in self.sent]
        (own, own_labels), (constants, constant_labels) = (
            ([whole.jaxpr.invars[n] for n in numbers], [whole.inputs[n] for n in numbers])
            for numbers in (self.own, self.constants)
        )
        jaxpr = jax_compat.replace_jaxpr(
            whole.jaxpr,
            invars=[*own, *received, *constants],
            outvars=[*(whole.jaxpr.outvars[n] for n in outputs), *sent],
            eqns=eqns,
            effects=jex_core.no_effects.union(*(eqn.effects for eqn in eqns)),
        )
        numbers = (*self.own, *(None for _ in received), *self.constants)
        results = (*outputs, *(None for _ in sent))
        arriving = [
            Input(f"recv[{i}] {self.label(p)}", "other" if p.var in self.stacks else "received")
            for i, p in enumerate(self.received)
        ]
        inputs = [*own_labels, *arriving, *constant_labels]
        left = [whole.outputs[n] for n in outputs]
        left += [
            Output(f"send[{n}]", into_state=var in program.read_for_state)
            for n, var in enumerate(self.sent)
        ]
        # What is replaced on another stage has no alias here.
        places: list[dict[int | None, int]] = [
            {number: place for place, number in enumerate(group) if number is not None}
            for group in (numbers, results)
        ]
        into, out_of = places
        first_constant = len(whole.inputs) - len(whole.constants)
        graph = Graph(
            jaxpr=jaxpr,
            inputs=tuple(replace(label, alias=out_of.get(label.alias)) for label in inputs),
            outputs=tuple(
                replace(
                    label,
                    alias=into.get(label.alias),
                    into_state=label.into_state or label.alias is not None,
                )
                for label in left
            ),
            constants=tuple(whole.constants[n - first_constant] for n in self.constants),
        )
        return StageGraph(in_phases(graph, [] if loop is None else [loop]), numbers, results)

    def _loop(self) -> LoopPhase | None:
        """The stage's part of the loop."""
        program, loop, needs = self.program, self.program.parts.loop, self.needs
        if not self.order and not needs.carries and not needs.stacked:
            return None
        consts, slices = (
            [pair for pair in pairs.items() if pair[0] in needs.entering]
            for pairs in (loop.consts, loop.slices)
        )
        carries = [program.carries[index] for index in sorted(needs.carries)]
        slices += [(var, self.stacks[var]) for var in self.received_inside]
        stacks = [loop.stacks[index] for index in sorted(needs.stacked)]
        stacks += [(var, self.stacks[var]) for var in self.sent_inside]
        eqns = [program.body[index].eqn for index in self.order]
        scan = scan_like(loop.scan, consts, carries, slices, stacks, eqns)
        return LoopPhase(scan, self.tasks, frozenset(self.stacks.values()))


def _order_tasks(
    program: PlacedProgram, needs: Needs, sent: Sequence[Var], *, split_backward: bool
) -> tuple[list[int], tuple[Task, ...]]:
    """The body's equations of one stage in the order F, B, W, and their tasks.

    A copied equation belongs to the first task that reads it. With `split_backward`, B is what a
    gradient that is sent is made from; on a stage that sends none, what a later heavy equation of
    the backward pass is made from. The rest of the backward pass is W.
    """
    task = _forward_or_backward(program, needs, sent)
    if split_backward:
        task.update(dict.fromkeys(_weight_gradients(program, task, sent), "W"))
    order = sorted(task, key=lambda index: ("FBW".index(task[index]), index))
    return order, tuple(task[index] for index in order)


def _forward_or_backward(
    program: PlacedProgram, needs: Needs, sent: Sequence[Var]
) -> dict[int, Task]:
    collected = (program.parts.loop.stacks[number][0] for number in needs.stacked)
    forward = set(variables([*sent, *collected]))  # what F reads or leaves
    read = set(forward)
    task: dict[int, Task] = {}
    for index in sorted(needs.body, reverse=True):
        item = program.body[index]
        late = item.backward
        if item.stage is None:
            late = forward.isdisjoint(item.eqn.outvars) and not read.isdisjoint(item.eqn.outvars)
        task[index] = "B" if late else "F"
        read.update(variables(item.eqn.invars))
        forward.update(() if late else variables(item.eqn.invars))
    return task


def _weight_gradients(
    program: PlacedProgram, task: dict[int, Task], sent: Sequence[Var]
) -> set[int]:
    backward = [index for index in sorted(task, reverse=True) if task[index] == "B"]
    made = {var for index in backward for var in program.body[index].eqn.outvars}
    wanted = made.intersection(sent)
    sends_none = not wanted
    awaited: set[int] = set()
    for index in backward:
        eqn = program.body[index].eqn
        if not wanted.isdisjoint(eqn.outvars):
            awaited.add(index)
        elif not (sends_none and eqn.primitive.name in HEAVY):
            continue
        wanted.update(made.intersection(variables(eqn.invars)))
    return set(backward) - awaited
