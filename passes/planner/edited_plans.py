"""A plan whose file was edited: what it asks for now, as pins, and the plan that has it."""

from __future__ import annotations

import dataclasses

from autopar.base.cluster import Cluster
from autopar.base.errors import PlanMismatchError
from autopar.base.options import Options, Pin
from autopar.base.plan_edits import chosen_layouts, edited_parts, layout_of
from autopar.base.plan_records import Spec, TensorPlan
from autopar.base.units import without_rows
from autopar.passes.graph.graph import Graph
from autopar.passes.planner.candidates import PlannedStep, Report
from autopar.passes.planner.following import follow_plan, plan_with
from autopar.passes.planner.plan_writer import output_specs
from autopar.passes.planner.split_step import SplitStep
from autopar.plans.plan import Plan


def with_pins_of(plan: Plan, options: Options) -> Options:
    """The options with the pins that stand in the plan, where the call gives none.

    Raises:
      PinError: a pin in the plan is malformed.
    """
    written = plan.options.get("pins", {})
    return options if options.pins or not written else dataclasses.replace(options, pins=written)


def with_plain_pins(plan: Plan) -> Plan:
    """The plan with its pins as options write them, whatever empty dimensions its file adds.

    Raises:
      PinError: a pin in the plan is malformed.
    """
    written = plan.options.get("pins")
    if not written:
        return plan
    pins = Options(pins=written).to_dict()["pins"]
    return dataclasses.replace(plan, options={**plan.options, "pins": pins})


def follow_edited(
    plan: Plan, split: SplitStep, options: Options, report: Report
) -> tuple[PlannedStep, Options]:
    """The plan that an edited one asks for, and the options with what it pins.

    Specs that were edited are pins, as are those in its options: stages, logical meshes, schedule
    and microbatches stay, all else is chosen anew. Where strategies were edited, every node takes
    the one that is written.

    Raises:
      PlanMismatchError: what is written contradicts itself; names the leaves.
      PinError: a pin is impossible, or contradicts another.
    """
    edited = edited_parts(plan)
    report(f"the plan's {', '.join(sorted(edited))} were edited: planning with what is written")
    if "strategies" in edited:
        _check_strategies(plan)
        pins: tuple[Pin, ...] = ()
    else:
        pins = _pins_of_inputs(plan, split.graph)
        if "outputs" in edited:
            pins += _pins_of_outputs(plan, split, options, edited, pins)
    asked = dataclasses.replace(options, pins=(*options.pins, *pins))
    cluster = Cluster.from_dict(plan.cluster)
    return plan_with(plan, split, asked, cluster, "strategies" in edited), asked


def _check_strategies(plan: Plan) -> None:
    """Strategies that were edited say of every leaf what its spec says."""
    layouts = chosen_layouts(plan)
    for tensor in plan.inputs:
        choice = layouts.get((tensor.stages[0], tensor.path))
        if choice is not None and choice != layout_of(tensor.spec, tensor.memory):
            raise PlanMismatchError(
                f"The plan says two things of {tensor.path}.",
                why=f"its spec is {layout_of(tensor.spec, tensor.memory)}, and the strategy of its "
                f"node is {choice}; strategies were edited.",
                hint="change only the spec, and strategies will follow; or plan again with pins=.",
            )


def _pins_of_inputs(plan: Plan, graph: Graph) -> tuple[Pin, ...]:
    """Inputs, and outputs that replace them, whose spec is not what the strategies choose."""
    layouts = chosen_layouts(plan)
    paths = [label.path for label in graph.inputs]
    later = {
        paths[label.alias]: tensor
        for label, tensor in zip(graph.outputs, plan.outputs, strict=False)
        if label.alias is not None
    }
    pins = []
    for tensor in plan.inputs:
        choice = layouts.get((tensor.stages[0], tensor.path))
        if choice is None:
            continue
        if (tensor.memory == "host") != choice.endswith(" host"):
            raise PlanMismatchError(
                f"The plan says two things of {tensor.path}.",
                why=f"its memory is that of the {tensor.memory}, its node's strategy is {choice}.",
                hint="plan again, with offload= naming what lies in the hosts' memory.",
            )
        own = layout_of(tensor.spec, tensor.memory) != choice
        other = later.get(without_rows(tensor.path))
        its = other is not None and layout_of(other.spec, other.memory) != choice
        if own and its and other is not None and other.spec != tensor.spec:
            raise PlanMismatchError(
                f"The plan says two things of {tensor.path}, which {other.path} replaces.",
                why=f"their specs are {layout_of(tensor.spec)} and {layout_of(other.spec)}; new "
                "state lies as the old one.",
                hint="write the same spec for both, or change only that of the input.",
            )
        if own:
            pins.append(_pin(tensor.path, tensor.spec))
        elif its and other is not None:
            pins.append(_pin(tensor.path, other.spec))
    return tuple(pins)


def _pins_of_outputs(
    plan: Plan,
    split: SplitStep,
    options: Options,
    edited: frozenset[str],
    known: tuple[Pin, ...],
) -> tuple[Pin, ...]:
    """Other outputs whose spec is not that of what the strategies compute."""
    labels = split.graph.outputs
    own = [(x, tensor) for x, tensor in zip(labels, plan.outputs, strict=True) if x.alias is None]
    if not own:
        return ()
    if "pins" in edited:
        raise PlanMismatchError(
            "The plan's pins and the specs of its outputs were both edited.",
            why="what the outputs would be without that is not known any more.",
            hint="write the outputs' specs as pins too.",
        )
    made = output_specs(follow_plan(plan, split, options).pieces)
    natural = {label.path: spec for label, spec in zip(labels, made, strict=True)}
    found: list[tuple[TensorPlan, Spec]] = [(tensor, natural[x.path]) for x, tensor in own]
    return tuple(_pin(tensor.path, tensor.spec) for tensor, spec in found if tensor.spec != spec)


def _pin(path: str, spec: Spec) -> Pin:
    for axes in spec:
        if list(axes) != sorted(axes):
            raise PlanMismatchError(
                f"The spec of {path} names the axes {', '.join(axes)} for one dimension.",
                hint=f"name them in the order of the mesh: {', '.join(sorted(axes))}.",
            )
    return f"={without_rows(path)}", spec
