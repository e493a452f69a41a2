"""`make fuzz`: as many random programs as one likes, and a table of what came of them.

    make fuzz ARGS="--count 300 --seed 1000 --mode stages"
    make fuzz ARGS="--seed 1234 --mode mesh --show"    print one program, and make it shorter

Programs run in a process of their own, which is ended where one takes too long. Every find is
printed with its seed; refusals are counted by what they say, for people to read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

from fuzz.comparison import MODES, Verdict, compare, options_of
from fuzz.generator import GeneratedProgram, generate

FINDS = ("wrong", "crash", "hang")
PER_PROCESS = 40  # programs, before compiled ones take too much memory
FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def main() -> int:
    """Read the command's options and run; 1 if something was found."""
    parser = argparse.ArgumentParser(prog="make fuzz ARGS=")
    parser.add_argument("--count", type=int, default=50, help="programs of each mode")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--mode", choices=(*MODES, "all"), default="all")
    parser.add_argument("--seconds", type=float, default=180.0, help="after which one hangs")
    parser.add_argument("--show", action="store_true", help="one program, made shorter if it fails")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    modes = MODES if given.mode == "all" else (given.mode,)
    if given.worker or given.show:
        return work(given.seed, given.count, modes) if given.worker else show(given.seed, modes)
    started, verdicts = time.monotonic(), []
    for mode in modes:
        for verdict in run(given.seed, given.count, mode, given.seconds):
            verdicts.append(verdict)
            if verdict.kind in FINDS:
                print(f"\n{verdict.kind}: --seed {verdict.seed} --mode {verdict.mode} --show "
                      f"({verdict.options})\n  {verdict.summary}", flush=True)  # fmt: skip
    print(table(verdicts))
    print(f"{time.monotonic() - started:.0f} s")
    return int(any(v.kind in FINDS for v in verdicts))


def table(verdicts: list[Verdict]) -> str:
    """Counts by mode, and what was refused."""
    kinds = ("equal", "refused", *FINDS)
    counts = Counter((v.mode, v.kind) for v in verdicts)
    lines = ["", f"{'':14}" + "".join(f"{kind:>9}" for kind in kinds)]
    lines += [
        f"{mode:14}" + "".join(f"{counts[mode, kind]:9}" for kind in kinds)
        for mode in dict.fromkeys(v.mode for v in verdicts)
    ]
    refused: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.kind == "refused":
            refused.setdefault(f"{verdict.mode}: {verdict.summary}", []).append(verdict)
    for text, cases in sorted(refused.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(cases):4} x {text} (seed {cases[0].seed})")
    return "\n".join(lines)


def run(seed: int, count: int, mode: str, seconds: float) -> Iterator[Verdict]:
    """The verdicts of `count` programs, from processes that are ended where one hangs."""
    end = seed + count
    while seed < end:
        command = [sys.executable, "-m", "fuzz", "--worker", "--mode", mode, "--seed", str(seed)]
        command += ["--count", str(min(PER_PROCESS, end - seed))]
        environment = {**os.environ, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        why = ""
        try:
            while (line := lines.get(timeout=seconds)) is not None:
                if line.startswith("{"):
                    yield Verdict(**json.loads(line))
                    seed += 1
        except queue.Empty:
            why = f"no answer in {seconds:.0f} s"
        finally:
            process.kill()
            status = process.wait()
        if seed < end and (why or status):
            kind = "hang" if why else "crash"
            options = str(options_of(generate(seed), mode))
            summary = why or f"the process ended with {status}"
            yield Verdict(seed, mode, kind, summary, options=options)
            seed += 1


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def prepare() -> None:
    """Eight virtual devices, and little time for compiling."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)


def work(seed: int, count: int, modes: tuple[str, ...]) -> int:
    """In a process of its own: print the verdicts of some programs."""
    prepare()
    for number in range(seed, seed + count):
        for mode in modes:
            print(json.dumps(dataclasses.asdict(compare(generate(number), mode))), flush=True)
    return 0


def show(seed: int, modes: tuple[str, ...]) -> int:
    """Print a program and its verdict; where it fails, also a shorter one that fails alike."""
    prepare()
    program = generate(seed)
    for mode in modes:
        verdict = compare(program, mode)
        print(program.source, verdict.options, verdict.kind, verdict.detail, sep="\n", flush=True)
        if verdict.kind == "equal":
            continue
        short = shortest(program, mode, verdict)
        print(f"# {verdict.kind} alike:", short.source, compare(short, mode).detail, sep="\n")
    return 0


def shortest(program: GeneratedProgram, mode: str, verdict: Verdict) -> GeneratedProgram:
    """A shorter program with the same kind of verdict, one line after the other left out."""
    for shorter in program.shorter():
        try:
            found = compare(shorter, mode)
        except Exception:  # the rest does not go with it
            continue
        if found.kind == verdict.kind:
            return shortest(shorter, mode, verdict)
    return program


if __name__ == "__main__":
    sys.exit(main())
