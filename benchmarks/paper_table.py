"""One planning case in a process of its own, and the table of all: see `planning.py --paper`."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from models import registry
from paper_cases import PlanningCase, cases
from rich.console import Console
from rich.table import Table

import autopar
from autopar.base.errors import AutoparError
from autopar.base.options import Options
from autopar.passes.graph.logical import no_mesh
from autopar.passes.planner.compiler import compile_graph
from autopar.passes.trace.trace import trace
from autopar.plans.plan import Plan

Row = dict[str, Any]
PAUSE = "..."  # before what a case said last


def measure(case: PlanningCase, layers: int | None) -> Row:
    """Trace and plan a case here; progress goes to standard error with its CPU seconds."""
    built = registry.build(case.model, jnp.dtype(case.dtype), layers=layers, remat=case.remat)
    options = Options.from_kwargs(**case.options)
    start = time.process_time()

    def seconds() -> float:
        return round(time.process_time() - start, 2)

    def report(message: str) -> None:
        print(f"{PAUSE} {message}, {seconds()} CPU s", file=sys.stderr, flush=True)

    report("tracing")
    with autopar.tracing_for(case.cluster):
        traced = trace(
            built.step,
            (built.state, built.batch),
            microbatches=options.microbatches,
            method=options.method,
        )
    trace_seconds, row = seconds(), _named(case)
    try:
        with no_mesh():
            plan = compile_graph(traced.graph, options, case.cluster, None, report).plan
        row.update(_of_plan(plan, case.devices, built.tokens_per_step))
    except AutoparError as error:
        row["failed"] = f"{type(error).__name__}: {error.what}"
    after = round(seconds() - trace_seconds, 2)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        **row,
        "trace_seconds": trace_seconds,
        "after_trace_seconds": after,
        "planner_mib": round(used),
    }


def _named(case: PlanningCase) -> Row:
    return {"model": case.model, "cluster": f"{case.devices} {case.preset}", "asked": case.asked}


def _of_plan(plan: Plan, devices: int, tokens: int) -> Row:
    estimates, step = plan.estimates, plan.estimates.step_seconds
    return {
        "plan": describe(plan),
        "step_seconds": step,
        "tokens_per_second": tokens / step,
        "tflops_per_device": estimates.flops / step / devices / 1e12,
        "peak_gib": estimates.peak_bytes_per_device / 2**30,
        "gap": plan.solver.gap if plan.solver else None,
    }


def describe(plan: Plan) -> str:
    """Meshes, stages that compute their forward pass again, schedule and microbatches."""
    runs: list[tuple[str, int]] = []
    for stage in plan.stages:
        mesh = "x".join(map(str, stage.logical_mesh)) + (" remat" * (stage.remat == "full"))
        if runs and runs[-1][0] == mesh:
            runs[-1] = (mesh, runs[-1][1] + 1)
        else:
            runs.append((mesh, 1))
    text = ", ".join(f"{count} of {mesh}" if count > 1 else mesh for mesh, count in runs)
    schedule = f", {plan.pipeline.schedule}" if plan.is_pipeline else ""
    return f"{text}{schedule}, {plan.num_microbatches} microbatches"


def measured_apart(case: PlanningCase, layers: int | None, timeout: float, script: str) -> Row:
    """A case in a process of its own; a row that says so where it fails or takes too long."""
    command = [sys.executable, script, "--case", case.label]
    command += ["--layers", str(layers)] if layers else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        last = [line for line in said.splitlines() if line.startswith(PAUSE)][-1:]
        return {**_named(case), "failed": f"more than {timeout:g} s; {' '.join(last)}"}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        return {**_named(case), "failed": f"status {done.returncode}; {' '.join(last)}"}
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def one_case(label: str, layers: int | None, *, keeps: bool = False) -> Row:
    """Measure the case of this label; if it `keeps` all, without its model's `jax.checkpoint`."""
    (case,) = (case for case in cases(everywhere=True) if case.label == label)
    return measure(replace(case, remat=False) if keeps else case, layers)


def paper_table(
    only: str, layers: int | None, timeout: float, script: str, *, everywhere: bool
) -> list[Row]:
    """Every case that matches, shown as it is measured."""
    table = Table(title="planning, CPU seconds on this machine; the rest is predicted")
    for heading in ("model", "cluster", "asked", "plan"):
        table.add_column(heading, overflow="fold")
    right = ("trace", "after", "MiB", "step", "/ auto", "TFLOP/s", "GiB", "gap")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    rows: list[Row] = []
    for case in cases(only, everywhere=everywhere):
        row = measured_apart(case, layers, timeout, script)
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    _against_auto(rows)
    for row in rows:
        table.add_row(*_cells(row))
    Console(width=max(Console().width, 170)).print(table)
    return rows


def _against_auto(rows: list[Row]) -> None:
    """How many times the step of the automatic plan for the same model and cluster each takes."""
    autos = {
        (row["model"], row["cluster"]): row["step_seconds"]
        for row in rows
        if row["asked"] == "auto" and "step_seconds" in row
    }
    for row in rows:
        auto = autos.get((row["model"], row["cluster"]))
        if auto and "step_seconds" in row:
            row["over_auto"] = round(row["step_seconds"] / auto, 4)


def _cells(row: Row) -> list[str]:
    def shown(name: str, form: str) -> str:
        return format(row[name], form) if row.get(name) is not None else ""

    return [
        *(row[name] for name in ("model", "cluster", "asked")),
        row.get("plan") or row.get("failed", ""),
        shown("trace_seconds", ".1f"),
        shown("after_trace_seconds", ".1f"),
        shown("planner_mib", ",d"),
        shown("step_seconds", ".4g"),
        shown("over_auto", ".3f"),
        shown("tflops_per_device", ".1f"),
        shown("peak_gib", ".1f"),
        shown("gap", ".2%"),
    ]
