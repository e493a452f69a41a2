"""One plan in one process and in Ray actors: step time, driver, compilation, bytes, bandwidth.

A GPT in pipeline stages, each on an actor with virtual CPU devices of its own; the same plan in
this process. Both run in turns, so that they meet the same machine.

    python benchmarks/ray_runtime.py --json
    python benchmarks/ray_runtime.py --layers 12 --width 256 --rows 64 --microbatches 8

- step: median seconds of a call until everything is computed;
- stream: seconds of a step when nobody waits for its results, over all repeats;
- driver: median milliseconds that a call takes until it returns, and its CPU milliseconds in the
  calling thread, and in the whole process until everything is computed (which also tells and asks
  the actors);
- compile: seconds of `autopar.compile` with the plan at hand; under Ray, starting the actors is in
  it, and the seconds that each actor compiled are listed apart;
- bytes: what went from actor to actor in a step, and what the plan sends between stages (the leaves
  that a second stage reads are not in the plan's list);
- recovery (`--kills 2`): actors that are killed while steps run, one after the other: seconds until
  all was as before, how many steps were run again in that time, and the seconds that new actors
  compiled, beside those of the first ones; also the seconds of a step, as in `stream`, with
  `max_restarts` and a snapshot every 10 steps;
- throughput (`--throughput`): each actor on one core of its own, beside the step that the simulator
  gives from what each instruction took alone; and the speed-up, measured and simulated, over the
  same program on one actor with one core (where it is one program of XLA; the mean over the cores,
  since those of a shared machine are not equally quick) and over the pieces of
  the stages one after the other; `share` is the first measured one over the last simulated one,
  so it also counts what cutting a program into pieces costs. All are medians over rounds (half as
  many as `--repeats`) of one step each; the quartiles of `share` say how much they differ;
- bandwidth: GB/s of the transport between two ends in this process, and of a bare socket that
  copies the same bytes.

The last line is then a JSON object. Timings need a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import threading
import time
from typing import Any

import jax
import numpy as np
import ray
from pipeline import language_model
from rich.console import Console
from rich.table import Table

import autopar
from autopar.passes.pipeline.instructions import Recv, Send
from autopar.profile import Profile
from autopar.ray_executable import RayExecutable
from autopar.runtime.ray.driver.ray_cluster import start_local
from autopar.runtime.ray.transport.sockets import Sockets

SNAPSHOT_EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1, help="of each stage")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kills", type=int, default=0, help="actors to kill")
    parser.add_argument("--throughput", action="store_true", help="one core for each actor")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.stages * options.devices)
    found = {**measure(options), "bandwidth": bandwidth()}
    if options.kills:
        found["recovery"] = recovery(options)
    if options.throughput:
        found["throughput"] = throughput(options)
    Console().print(table(found))
    if options.json:
        print(json.dumps({"options": vars(options), **found}))


def asked_for(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "cluster": autopar.Cluster.preset("cpu", devices_per_node=options.stages * options.devices),
        "stages": options.stages,
        "microbatches": options.microbatches,
        "schedule": options.schedule,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = language_model(options.layers, options.width, options.length, options.rows)
    shapes, asked = jax.eval_shape(model.make), asked_for(options)
    plan = autopar.plan(model.step, shapes, model.batch, **asked)
    steps, compiling = {}, {}
    for runtime in ("local", "ray"):
        start = time.perf_counter()
        steps[runtime] = autopar.compile(
            model.step, shapes, model.batch, plan=plan, runtime=runtime, **asked
        )
        compiling[runtime] = time.perf_counter() - start
    on_actors = steps["ray"]
    assert isinstance(on_actors, RayExecutable)
    with on_actors:
        states = {name: step.initialize(model.make) for name, step in steps.items()}
        times: dict[str, list[tuple[float, ...]]] = {name: [] for name in steps}
        sent = 0
        for repeat in range(options.repeats + 2):
            for name, step in steps.items():
                states[name], *taken = call(step, states[name], model.batch)
                if repeat >= 2:
                    times[name].append(tuple(taken))
            if repeat == 1:
                sent = sum(on_actors.sent_bytes())
        moved = (sum(on_actors.sent_bytes()) - sent) / options.repeats
        stream = {}
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(options.repeats):
                states[name], _ = step(states[name], model.batch)
            jax.block_until_ready(states[name])
            stream[name] = (time.perf_counter() - start) / options.repeats
        actors = on_actors.compile_seconds
    assert plan.pipeline is not None
    return {
        "step_seconds": {name: statistics.median(x[0] for x in t) for name, t in times.items()},
        "stream_seconds": stream,
        "driver_ms": {name: 1e3 * statistics.median(x[1] for x in t) for name, t in times.items()},
        "driver_cpu_ms": {
            name: 1e3 * statistics.median(x[2] for x in t) for name, t in times.items()
        },
        "process_cpu_ms": {
            name: 1e3 * statistics.median(x[3] for x in t) for name, t in times.items()
        },
        "compile_seconds": compiling,
        "compile_seconds_of_actors": actors,
        "moved_bytes": moved,
        "planned_bytes": sum(t.bytes * t.times for t in plan.pipeline.transfers),
    }


def recovery(options: argparse.Namespace) -> dict[str, Any]:
    model = language_model(options.layers, options.width, options.length, options.rows)
    runtime = autopar.Ray(max_restarts=options.kills, snapshot_every=SNAPSHOT_EVERY)
    step = autopar.compile(
        model.step, jax.eval_shape(model.make), model.batch, runtime=runtime, **asked_for(options)
    )
    assert isinstance(step, RayExecutable)
    with step:
        state, first = step.initialize(model.make), step.compile_seconds
        for _ in range(2):
            state, _ = step(state, model.batch)
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(options.repeats):
            state, _ = step(state, model.batch)
        jax.block_until_ready(state)
        stream = (time.perf_counter() - start) / options.repeats
        for kill in range(options.kills):
            for _ in range(SNAPSHOT_EVERY // 2):
                state, _ = step(state, model.batch)
            os.kill(step.actor_pids[kill % options.stages], signal.SIGKILL)
            for _ in range(SNAPSHOT_EVERY):
                state, _ = step(state, model.batch)
            jax.block_until_ready(state)
    return {
        "stream_seconds": stream,
        "first_compile_seconds": first,
        "seconds": [x.seconds for x in step.recoveries],
        "num_steps": [x.num_steps for x in step.recoveries],
        "compile_seconds": [x.compile_seconds for x in step.recoveries],
    }


def throughput(options: argparse.Namespace) -> dict[str, float]:
    """Speed-ups of one core for each stage over one core for all."""
    model = language_model(options.layers, options.width, options.length, options.rows)
    cores = sorted(os.sched_getaffinity(0))[: options.stages]
    if len(cores) < options.stages:
        raise SystemExit(f"{options.stages} stages need a core each, and there are {len(cores)}.")
    os.environ["PJRT_NPROC"] = "1"  # XLA's threads in an actor: more of them hinder each other
    start_local(options.stages + 1)  # both steps are there at the same time
    steps = {}
    for name, stages in (("one", 1), ("all", options.stages)):
        step = autopar.compile(
            model.step,
            jax.eval_shape(model.make),
            model.batch,
            cluster=autopar.Cluster.preset("cpu", devices_per_node=stages),
            stages=stages,
            microbatches=options.microbatches,
            schedule=options.schedule if stages > 1 else "auto",
            runtime="ray",
        )
        assert isinstance(step, RayExecutable)
        steps[name] = step
        for pid, core in zip(step.actor_pids, cores, strict=False):
            pin(pid, core)
    states = {name: step.initialize(model.make) for name, step in steps.items()}
    for name, step in steps.items():  # the first calls are slower
        for _ in range(2):
            states[name], *_ = call(step, states[name], model.batch)
    rounds = []
    for _ in range(max(options.repeats // 2, 1)):
        alone = []
        for core in cores:
            pin(steps["one"].actor_pids[0], core)
            states["one"], seconds, *_ = call(steps["one"], states["one"], model.batch)
            alone.append(seconds)
        states["all"], seconds, *_ = call(steps["all"], states["all"], model.batch)
        profile = steps["all"].profile(states["all"], model.batch)
        found = compared(statistics.mean(alone), seconds, profile)
        rounds.append({**found, "slowest_over_quickest_core": max(alone) / min(alone)})
    for step in steps.values():
        step.shutdown()
    ray.shutdown()
    medians = {key: statistics.median(x[key] for x in rounds) for key in rounds[0]}
    low, high = np.percentile([x["share"] for x in rounds], [25, 75])
    return {**medians, "share_quartile_1": float(low), "share_quartile_3": float(high)}


def pin(pid: int, core: int) -> None:
    """Let all threads of a process run on one core."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def compared(one: float, all_: float, profile: Profile) -> dict[str, float]:
    """Two calls beside what the simulator says of them; one round on a noisy machine."""
    program = profile.timeline.program
    pieces = sum(
        seconds
        for (mesh, index), seconds in profile.seconds.items()
        if not isinstance(program.meshes[mesh][index], (Send, Recv))
    )
    simulated = profile.on_own_devices.step_seconds
    return {
        "one_seconds": one,
        "all_seconds": all_,
        "simulated_seconds": simulated,
        "deviation": (all_ - simulated) / all_,
        "pieces_seconds": pieces,
        "speed_up": one / all_,
        "simulated_speed_up": one / simulated,
        "speed_up_over_pieces": pieces / all_,
        "simulated_speed_up_over_pieces": pieces / simulated,
        "share": one / all_ / (pieces / simulated),
    }


def call(step: Any, state: Any, batch: Any) -> tuple[Any, float, float, float, float]:
    """The new state; seconds until all is done, until the call returned, of CPU times.

    These are the thread's until the call returned, and the process's until all is done.
    """
    process = time.process_time()
    start, cpu = time.perf_counter(), time.thread_time()
    state, loss = step(state, batch)
    returned, cpu = time.perf_counter(), time.thread_time() - cpu
    jax.block_until_ready((state, loss))
    seconds = time.perf_counter() - start
    return state, seconds, returned - start, cpu, time.process_time() - process


def bandwidth(size: int = 1 << 26, repeats: int = 5) -> dict[str, float]:
    """GB/s, medians."""
    data = np.ones(size, np.uint8)
    ends = Sockets(0, "127.0.0.1", bytes(32)), Sockets(1, "127.0.0.1", bytes(32))
    ends[0].connect({1: ends[1].address}, 10)
    taken = []
    for step in range(repeats):
        start = time.perf_counter()
        ends[0].send(1, step, 0, size, lambda: [data])
        ends[1].receive(0, step, 0, 60)
        taken.append(time.perf_counter() - start)
    for end in ends:
        end.close()
    bare = []
    left, right = tcp_pair()
    target = np.empty(size, np.uint8)
    for _ in range(repeats):
        start = time.perf_counter()
        sender = threading.Thread(target=left.sendall, args=(data,))
        sender.start()
        view, got = target.data, 0
        while got < size:
            got += right.recv_into(view[got:])
        sender.join()
        bare.append(time.perf_counter() - start)
    left.close()
    right.close()
    return {
        "transport": size / statistics.median(taken) / 1e9,
        "socket": size / statistics.median(bare) / 1e9,
    }


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return left, right


def table(found: dict[str, Any]) -> Table:
    made = Table("", "local", "ray")
    numbers = "step_seconds stream_seconds driver_ms driver_cpu_ms process_cpu_ms compile_seconds"
    for key in numbers.split():
        made.add_row(key, *(f"{found[key][name]:.4g}" for name in ("local", "ray")))
    seconds = ", ".join(f"{x:.3g}" for x in found["compile_seconds_of_actors"])
    made.add_row("compile_seconds_of_actors", "", seconds)
    moved, planned = found["moved_bytes"], found["planned_bytes"]
    made.add_row("moved_bytes (planned)", "", f"{moved:,.0f} ({planned:,})")
    if "recovery" in found:
        taken = found["recovery"]
        made.add_row("stream_seconds with snapshots", "", f"{taken['stream_seconds']:.4g}")
        for total, steps, compiling in zip(
            taken["seconds"], taken["num_steps"], taken["compile_seconds"], strict=True
        ):
            made.add_row(
                "recovery_seconds (steps, compiling)",
                "",
                f"{total:.3g} ({steps}, {max(compiling):.3g})",
            )
    for name, value in found.get("throughput", {}).items():
        made.add_row(f"throughput: {name}", "", f"{value:.4g}")
    speeds = found["bandwidth"]
    made.add_row("GB/s (bare socket)", "", f"{speeds['transport']:.3g} ({speeds['socket']:.3g})")
    return made


if __name__ == "__main__":
    main()
