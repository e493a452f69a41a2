"""Compares all golden plans with what the compiler decides now, or replaces them.

    python tests/golden/regenerate.py --check               # diffs, and exit status 1 if any
    python tests/golden/regenerate.py --only 'linen_gpt/'   # replaces what the expression matches
    python tests/golden/regenerate.py --since main          # estimates here against a commit's

A table shows which estimates moved; they may move without failing a check.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

TESTS = Path(__file__).resolve().parent.parent
# Run as a script: pytest has these on its path. New processes inherit them.
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from golden import files  # noqa: E402
from golden.compute import Estimates, Request, goldens, missing, requests  # noqa: E402

Planned = dict[str, tuple[str, Estimates, float]]
"""By the name of the options: a plan's section, its estimates, and seconds of a core."""

console = Console()


def main() -> int:
    """Runs the command; returns its exit status."""
    arguments = _arguments()
    if arguments.since:
        _show_estimates(_estimates_of(arguments.since), files.read_estimates())
        return 0
    asked = [r for r in requests() if re.search(arguments.only, str(r))]
    other = files.other_versions()
    if other and arguments.check:
        console.print(f"Goldens are of other versions: {other}.", style="yellow", soft_wrap=True)
    start = time.monotonic()
    planned = dict(_plan_all(asked, arguments.jobs))
    seconds = time.monotonic() - start
    # In the order of the matrix, whatever came first.
    planned = {r.program: planned[r.program] for r in asked if r.program in planned}
    wrong = _compare(planned, complete=not arguments.only, lines=arguments.lines)
    before = files.read_estimates()
    now = {
        f"{program}/{name}": estimates
        for program, plans in planned.items()
        for name, (_, estimates, _) in plans.items()
    }
    _show_estimates({plan: before[plan] for plan in now if plan in before}, now)
    if not arguments.check:
        _replace(planned, {**before, **now}, complete=not arguments.only)
    _summarize(planned, wrong, seconds, arguments.check)
    return 1 if arguments.check and wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and replace nothing")
    parser.add_argument(
        "--only",
        metavar="REGEX",
        default="",
        help="plans whose program/options it finds a match in",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes; by default 2")
    parser.add_argument("--lines", type=int, default=60, help="of a diff at most; by default 60")
    parser.add_argument(
        "--since", metavar="COMMIT", help="only show how estimates moved since then"
    )
    return parser.parse_args()


def _plan_all(asked: list[Request], jobs: int) -> Iterator[tuple[str, Planned]]:
    """Plans a program at a time in new processes, those with the most text first."""
    by_program: dict[str, list[Request]] = {}
    for request in asked:
        by_program.setdefault(request.program, []).append(request)
    for program in list(by_program):
        reason = missing(program)
        if reason:
            console.print(f"{program} is left out: {reason}", style="yellow", soft_wrap=True)
            del by_program[program]

    def length(program: str) -> int:
        return sum(map(len, files.read(program).values()))

    total = sum(map(len, by_program.values()))
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=console, transient=True) as progress,
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_start) as pool,
    ):
        bar = progress.add_task("planning", total=total)
        order = sorted(by_program, key=length, reverse=True)
        waiting = {pool.submit(_plan_program, p, by_program[p]): p for p in order}
        for done in as_completed(waiting):
            program = waiting[done]
            progress.update(bar, advance=len(by_program[program]), description=f"{program:24}")
            yield program, done.result()


def _start() -> None:
    """Sets up a new process as tests/conftest.py does."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)


def _plan_program(program: str, asked: list[Request]) -> Planned:
    planned: Planned = {}
    start = time.process_time()  # other work on the machine does not count
    for request, golden in goldens(program, asked):
        now = time.process_time()
        text = files.section(request.name, request.title, golden.text)
        planned[request.name] = (text, golden.estimates, now - start)
        start = now
    return planned


def _compare(planned: Mapping[str, Planned], *, complete: bool, lines: int) -> list[str]:
    """Prints how plans differ from the stored ones; returns which do."""
    wrong = []
    for program, plans in planned.items():
        stored = files.read(program)
        for name, (text, _, _) in plans.items():
            plan = f"{program}/{name}"
            diff = files.difference(plan, stored.get(name, ""), text)
            if diff:
                wrong.append(plan)
                _show_diff(diff, lines)
        if complete:
            wrong += [f"{program}/{name} (no longer asked for)" for name in stored.keys() - plans]
    if complete:
        asked = {request.program for request in requests()}
        strangers = [p for p in files.stored_programs() if p not in asked]
        wrong += [f"{program} (no longer asked for)" for program in strangers]
    return wrong


def _show_diff(diff: str, most: int) -> None:
    styles = {"+": "green", "-": "red", "@": "cyan"}
    lines = diff.splitlines()
    for line in lines[:most]:
        console.print(Text(line, style=styles.get(line[0], "")), soft_wrap=True)
    if len(lines) > most:
        console.print(f"... and {len(lines) - most} more lines (--lines)", style="dim")
    console.print()


def _show_estimates(before: Mapping[str, Estimates], now: Mapping[str, Estimates]) -> None:
    """A table of the estimates that moved."""
    table = Table("plan", "quantity", title="Estimates that moved", title_justify="left")
    for heading in ("before", "now", "ratio"):
        table.add_column(heading, justify="right")
    for plan, old in before.items():
        new = now.get(plan, {})
        for quantity in dict.fromkeys([*old, *new]):
            left, right = old.get(quantity), new.get(quantity)
            if left != right:
                ratio = f"{right / left:.3f}" if left and right is not None else ""
                numbers = ["" if x is None else f"{x:.4g}" for x in (left, right)]
                table.add_row(plan, quantity, *numbers, ratio)
    if table.row_count:
        console.print(table)


def _estimates_of(commit: str) -> dict[str, Estimates]:
    """The estimates that a commit stored."""
    path = files.ESTIMATES.relative_to(TESTS.parent).as_posix()
    command = ["git", "-C", str(TESTS.parent), "show", f"{commit}:{path}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode:
        sys.exit(shown.stderr.strip())
    return files.parse_estimates(shown.stdout)


def _replace(
    planned: Mapping[str, Planned], estimates: Mapping[str, Estimates], *, complete: bool
) -> None:
    """Stores what was planned; what could not be planned here stays as it is."""
    asked = requests()
    for program in planned:
        kept = files.read(program) | {name: plan[0] for name, plan in planned[program].items()}
        names = [request.name for request in asked if request.program == program]
        files.write(program, {name: kept[name] for name in names if name in kept})
    if complete:
        for program in set(files.stored_programs()) - {request.program for request in asked}:
            files.write(program, {})
        files.write_versions()
    files.write_estimates({str(r): estimates[str(r)] for r in asked if str(r) in estimates})


def _summarize(
    planned: Mapping[str, Planned], wrong: list[str], seconds: float, check: bool
) -> None:
    took = {f"{p}/{name}": plan[2] for p, plans in planned.items() for name, plan in plans.items()}
    slowest = ", ".join(f"{p} {took[p]:.1f} s" for p in sorted(took, key=lambda p: -took[p])[:3])
    console.print(
        f"{len(took)} plans of {len(planned)} programs in {seconds:.0f} s "
        f"({sum(took.values()):.0f} s of a core; slowest: {slowest}).",
        soft_wrap=True,
    )
    if wrong:
        verb = "differ" if check else "were replaced or added"
        console.print(f"{len(wrong)} {verb}: {', '.join(wrong)}.", style="red", soft_wrap=True)
    else:
        console.print("All are as stored.", style="green")


if __name__ == "__main__":
    sys.exit(main())
