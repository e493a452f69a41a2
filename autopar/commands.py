"""The commands of `autopar`, by Typer: `autopar --help` lists them.

Every command answers people in tables that fit the terminal, and programs with `--json`. It exits
with 0; with 1 where the answer is no (plans differ, nothing fits, something needed is missing);
with 2 where there is no answer (no such file, an impossible option); with 130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from autopar.base.cluster import Cluster
from autopar.base.errors import OptionError
from autopar.base.methods import METHODS
from autopar.base.options import SCHEDULES, Options
from autopar.base.units import format_seconds
from autopar.base.version import __version__
from autopar.command_line import (
    INTERRUPTED,
    NO,
    Commands,
    answers,
    check_folder,
    find_object,
    note,
    note_local_devices,
    read_example,
    read_options,
    read_value,
    show,
    show_json,
    show_record,
)
from autopar.device_commands import AsJson, calibrate, doctor, preset_names, presets
from autopar.plans.plan import Plan

app = typer.Typer(
    cls=Commands,
    help="Plans how a JAX train step runs on a cluster, and shows what was decided.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _methods(typed: str) -> list[str]:
    return [name for name in METHODS if name.startswith(typed)]


def _schedules(typed: str) -> list[str]:
    return [name for name in ("auto", *SCHEDULES) if name.startswith(typed)]


PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's file.")]
Step = Annotated[
    str, typer.Argument(metavar="MODULE:FUNCTION", help="The train step, as train.py:train_step.")
]
Example = Annotated[
    str,
    typer.Option(
        "--args",
        metavar="MODULE:NAME",
        help="A function without arguments that returns the step's, as a tuple (or a dict of "
        "keywords), or such a tuple. Shapes will do: jax.eval_shape.",
    ),
]
OtherCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help='Devices, such as "8x8 h100", 64xh100 or cluster.toml; by default '
        "those of the plan, or what is here.",
        autocompletion=preset_names,
    ),
]
OtherSchedule = Annotated[
    str | None,
    typer.Option("--schedule", help=f"{', '.join(SCHEDULES)}.", autocompletion=_schedules),
]


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"autopar {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Plans how a JAX train step runs on a cluster, and shows what was decided."""


@app.command()
@answers
def plan(
    step: Step,
    example: Example,
    cluster: OtherCluster = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save the plan here.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help=f"{', '.join(METHODS)}.", autocompletion=_methods)
    ] = None,
    microbatches: Annotated[str | None, typer.Option(metavar="auto|N")] = None,
    stages: Annotated[
        str | None, typer.Option(metavar="auto|N|A,B,..", help="How many, or where they begin.")
    ] = None,
    schedule: OtherSchedule = None,
    memory_limit: Annotated[str | None, typer.Option(metavar="SIZE", help='"70GiB".')] = None,
    confirm: Annotated[str | None, typer.Option(metavar="TARGET", help="To compile for.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any other option of autopar.plan; several times."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Decide how a step would run on a cluster; none of its devices is needed.

    autopar plan train.py:train_step --args train.py:shapes --cluster "8x8 h100" -o plan.json
    """
    import autopar

    options = read_options(option or [])
    named = {"microbatches": microbatches, "stages": stages, "confirm": confirm}
    given = {name: read_value(text) for name, text in named.items() if text is not None}
    texts = {"method": method, "schedule": schedule, "memory_limit": memory_limit}
    given |= {name: text for name, text in texts.items() if text is not None}
    for name in sorted(given.keys() & options.keys()):
        flag = f"--{name.replace('_', '-')}"
        raise OptionError(f"{name} is given twice.", where=f"{flag} and --option {name}=...")
    options |= given
    if quiet:
        options["progress"] = False
    check_folder(output)
    args, kwargs = read_example(example, cluster)
    fn = find_object(step, "the step")
    if cluster is None and not as_json:  # which names it
        note_local_devices()
    made = autopar.plan(fn, *args, cluster=cluster, **options, **kwargs)
    if output is not None:
        made.save(output)
    if as_json:
        show_json(_summary(made))
        return
    from autopar.report.plan_tables import summary_tables

    show(summary_tables(made))
    if output is not None:
        note(f"Saved to {output}; autopar show {output} has everything.")


@app.command()
@answers
def verify(
    step: Step,
    example: Example,
    target: Annotated[
        str,
        typer.Option(metavar="NAME", help='"gpu:h100", "tpu:v5e:2x4", "cpu".'),
    ],
    file: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN", help="By default one is made.")
    ] = None,
    cluster: OtherCluster = None,
    processes: Annotated[
        int | None, typer.Option(help="That compile at a time; by default one a core.", min=1)
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="How long one program may take to compile.", min=0.01)
    ] = 1800.0,
    as_json: AsJson = False,
) -> None:
    """Compile a plan for devices that need not be here; exit code 1 if they do not confirm it.

    Ctrl-C ends it with what was compiled until then, and exit code 130.
    """
    import autopar

    made = None if file is None else Plan.load(file)
    there = cluster if made is None or cluster else Cluster.from_dict(made.cluster)
    args, kwargs = read_example(example, there)
    options = {} if made is None else vars(Options.from_dict(made.options))
    fn = find_object(step, "the step")
    if cluster is None and made is None and not as_json:
        note_local_devices()
    found = autopar.verify(
        fn,
        *args,
        target=target,
        plan=made,
        cluster=cluster,
        processes=processes,
        compile_seconds=seconds,
        **{name: value for name, value in options.items() if name not in ("progress", "runtime")},
        **kwargs,
    )
    if as_json:
        show_json(found.to_dict())
    else:
        show(found)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not found.holds:
        raise typer.Exit(NO)


@app.command("show")
@answers
def show_plan(
    file: PlanFile,
    brief: Annotated[bool, typer.Option("--brief", "-b", help="Without tensors.")] = False,
    by_line: Annotated[bool, typer.Option("--by-line", "-l", help="Where time goes.")] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it: plan.png, plan.svg, plan.pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a plan decided: meshes, stages, tensors, communication, what else was tried."""
    from autopar.report.plan_tables import plan_tables, summary_tables

    made = Plan.load(file)
    if picture is not None:
        from autopar.report.plan_plots import save_plot

        save_plot(made, picture)
        note(f"Drawn: {picture}")
    if by_line:
        show_record(made.hot_lines, as_json)
    elif as_json:
        show_json(_summary(made))
    elif picture is None:
        show(summary_tables(made) if brief else plan_tables(made))


@app.command()
@answers
def explain(
    file: PlanFile,
    name: Annotated[
        str, typer.Argument(help="A leaf, layer, operation or line: block_3, train.py:12.")
    ],
    as_json: AsJson = False,
) -> None:
    """Why something is laid out as it is, and what else it could be."""
    show_record(Plan.load(file).explain(name), as_json)


@app.command()
@answers
def diff(
    first: Annotated[Path, typer.Argument(metavar="PLAN")],
    second: Annotated[Path, typer.Argument(metavar="PLAN")],
    details: Annotated[bool, typer.Option("--details", help="A line for every field.")] = False,
    as_json: AsJson = False,
) -> None:
    """What differs between two plans, by cause; exit code 1 if anything does."""
    found = Plan.load(first).diff(Plan.load(second))
    if as_json:
        show_json({"same": not found, "lines": list(found), "details": list(found.details)})
    elif not found:
        show("The plans are the same.")
    else:
        show(Group(*map(_difference, found.details if details else found)))
    if found:
        raise typer.Exit(NO)


@app.command()
@answers
def simulate(
    file: PlanFile,
    schedule: OtherSchedule = None,
    microbatches: Annotated[int | None, typer.Option(help="Another number.")] = None,
    cluster: OtherCluster = None,
    link_scale: Annotated[float, typer.Option(help="How much more bandwidth links have.")] = 1.0,
    compute_scale: Annotated[float, typer.Option(help="How much faster devices are.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """A step as the cost model expects it, also if something were different."""
    made = Plan.load(file)
    found = made.simulate(
        schedule=schedule,
        microbatches=microbatches,
        cluster=cluster,
        link_scale=link_scale,
        compute_scale=compute_scale,
    )
    planned = made.estimates.step_seconds
    if as_json:
        plain = dataclasses.asdict(found.forecast)
        show_json({**plain, "bubble_fraction": found.bubble_fraction, "planned_seconds": planned})
        return
    shown: list[Any] = [Text(str(found))]
    if made.is_pipeline:
        from autopar.report.drawn_steps import drawn
        from autopar.report.timeline_rows import TimelineRows

        timeline = drawn(found)
        shown.insert(0, Text(timeline) if isinstance(timeline, str) else TimelineRows(timeline))
    if planned and abs(found.step_seconds / planned - 1) >= 0.0005:
        change = f"{found.step_seconds / planned - 1:+.1%}"
        shown.append(Text(f"\nplanned: {format_seconds(planned)} a step; this: {change}", "bold"))
    show(Group(*shown))


@app.command()
@answers
def trace(
    file: PlanFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="By default beside PLAN.")
    ] = None,
    schedule: OtherSchedule = None,
    microbatches: Annotated[int | None, typer.Option(help="Another number.")] = None,
    cluster: OtherCluster = None,
    as_json: AsJson = False,
) -> None:
    """The simulated step as a Chrome trace, for Perfetto or chrome://tracing; "-o -" prints it."""
    check_folder(output)
    found = Plan.load(file).simulate(schedule=schedule, microbatches=microbatches, cluster=cluster)
    text = json.dumps(found.to_chrome_trace())
    if output is not None and str(output) == "-":
        sys.stdout.write(f"{text}\n")
        return
    target = file.with_suffix(".trace.json") if output is None else output
    target.write_text(text, encoding="utf-8")
    if as_json:
        show_json({"file": str(target), "step_seconds": found.step_seconds})
    else:
        show(f"{target}: {str(found).splitlines()[0]}")
        note("Open it at https://ui.perfetto.dev or chrome://tracing.")


for _command in (calibrate, presets, doctor):
    app.command()(answers(_command))


def _summary(made: Plan) -> dict[str, Any]:
    """What programs ask of a plan; all of it is in its file."""
    from autopar.report.summaries import describe_cluster, memory_limit

    done, estimates = made.throughput, made.estimates
    return {
        "method": made.method,
        "cluster": describe_cluster(made.cluster),
        "devices": done.num_devices,
        "microbatches": made.num_microbatches,
        "schedule": made.pipeline.schedule if made.is_pipeline else None,
        "bubble_fraction": made.pipeline.bubble_fraction,
        "step_seconds": estimates.step_seconds,
        "compute_seconds": estimates.compute_seconds,
        "communication_seconds": estimates.communication_seconds,
        "tokens_per_second": done.tokens_per_second,
        "examples_per_second": done.examples_per_second,
        "model_flops_utilization": done.model_flops_utilization,
        "peak_bytes_per_device": estimates.peak_bytes_per_device,
        "state_bytes_per_device": estimates.state_bytes_per_device,
        "memory_limit_bytes": memory_limit(made),
        "gap": made.solver.gap if made.solver else None,
        "interrupted": made.interrupted,
        "confirmed": str(made.confirmed or ""),
        "stages": [
            {
                "mesh": stage.mesh,
                "logical_mesh": dict(zip(stage.axis_names, stage.logical_mesh, strict=True)),
                "layers": list(stage.layers),
                "peak_bytes_per_device": stage.peak_bytes_per_device,
                "remat": "some" if stage.recomputation else stage.remat,
            }
            for stage in made.stages
        ],
        "decisions_hash": made.decisions_hash,
    }


def _difference(line: str) -> Text:
    """`what: before -> after` with its parts told apart."""
    text = Text(line)
    name, colon, _ = line.partition(": ")
    if colon:
        text.stylize("bold", 0, len(name))
    return text
