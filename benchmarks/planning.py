"""How long planning takes: tracing, factor rules, microbatch analysis, the integer program.

GPTs of several depths with abstract shapes, for eight devices. Every pass is timed by itself in
a fresh process per depth, so nothing is warm; times are CPU seconds of that process, which other
work on the machine disturbs less than wall-clock seconds.

    python benchmarks/planning.py --layers 4 12 48 --json

The last line is then a JSON object. The goal: what follows the trace takes less than twice as long.

    python benchmarks/planning.py --paper --json

plans the models of `benchmarks/models` for the clusters of Alpa's paper (`--all`: for 1, 2, 4 and 8
nodes of V100s and of H100s), automatically, by every method and as Alpa's plans are published, each
in a process of its own that has `--timeout` seconds. `--only REGEX` is searched in labels such as
"gpt-2.6B 8 p3.16xlarge auto"; `--layers N` plans shallower models.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

PASSES = ("trace", "rules", "analysis", "split", "build", "solve", "lower")


def gpt_step(layers: int, width: int = 768, context: int = 1024, batch: int = 64) -> Any:
    """A GPT's train step in Flax with optax, and the shapes of its arguments."""
    sys.path.insert(0, str(_examples()))
    from train_gpt import GPT, State, make_optimizer, mean_loss

    model = GPT(layers=layers, width=width, heads=width // 64, context=context, dropout=0.1)
    optimizer = make_optimizer(1e-3, 1000)

    def init(key: jax.Array) -> Any:
        params = model.init(key, jnp.zeros((1, context), jnp.int32))["params"]
        return State(jnp.zeros((), jnp.int32), params, optimizer.init(params), key)

    def train_step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(state.key, state.step)

        def loss_fn(params: Any) -> jax.Array:
            logits = model.apply(
                {"params": params}, batch["inputs"], train=True, rngs={"dropout": key}
            )
            return mean_loss(logits, batch["targets"])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return state, {"loss": loss}

    state = jax.eval_shape(init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((batch, context), jnp.int32)
    return train_step, state, {"inputs": tokens, "targets": tokens}


def _examples() -> Any:
    from pathlib import Path

    return Path(__file__).resolve().parent.parent / "examples"


def measure(layers: int, mesh: tuple[int, ...], microbatches: int) -> dict[str, Any]:
    """CPU seconds of every pass on one depth."""
    from autopar.base.cluster import Cluster, axis_names
    from autopar.passes import microbatch
    from autopar.passes.graph.microbatched import in_phases
    from autopar.passes.primitives.populate import populate
    from autopar.passes.sharding.batch_dims import batch_dims
    from autopar.passes.sharding.build import build
    from autopar.passes.sharding.integer_program import to_problem
    from autopar.passes.sharding.lower import lower
    from autopar.passes.sharding.pricing import Pricing
    from autopar.passes.sharding.restrict import restriction
    from autopar.passes.solver import solve
    from autopar.passes.trace.trace import trace

    step, state, batch = gpt_step(layers)
    cluster = Cluster.preset("dgx-h100")
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        seconds[name] = time.process_time() - start

    with timed("trace"):
        graph = trace(step, (state, batch), microbatches=microbatches).graph
    with timed("rules"):
        rules = populate(graph.jaxpr)
    with timed("analysis"):
        analysis = microbatch.analyze(graph, rules, microbatches)
    step_in_phases = in_phases(graph)
    with timed("split"):
        if microbatches > 1:
            step_in_phases = microbatch.split(graph, analysis)
            graph = step_in_phases.graph
            rules = populate(graph.jaxpr)
    with timed("build"):
        dims = batch_dims(graph, rules)
        pricing = Pricing(cluster, mesh)
        allowed = restriction(graph, "shard", dims, mesh)
        built = build(step_in_phases, rules, mesh, pricing, allowed)
    with timed("solve"):
        solution = solve(to_problem(built, cluster.device.memory_bytes))
    with timed("lower"):
        assignment = solution.assignment[: len(built.nodes)]
        lower(step_in_phases, built, assignment, pricing, axis_names(mesh), dims)
    after = sum(seconds[name] for name in PASSES[1:])
    return {
        "layers": layers,
        "mesh": list(mesh),
        "microbatches": microbatches,
        "equations": len(graph.jaxpr.eqns),
        "nodes": len(built.nodes),
        "gap": solution.gap,
        "seconds": {name: round(seconds[name], 3) for name in PASSES},
        "after_trace": round(after, 3),
        "ratio": round(after / seconds["trace"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[])
    parser.add_argument("--mesh", type=int, nargs="+", default=[8])
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", action="store_true", help="measure one depth here")
    parser.add_argument("--paper", action="store_true", help="plan the models of the paper")
    parser.add_argument("--all", action="store_true", help="also for 1 to 8 nodes of V100, H100")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose label has this")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a case")
    parser.add_argument("--case", metavar="LABEL", help="measure one case here")
    parser.add_argument(
        "--keep", action="store_true", help="of that case, without the model's jax.checkpoint"
    )
    options = parser.parse_args()
    layers = options.layers[0] if options.layers else None
    if options.case:
        from paper_table import one_case

        print(json.dumps(one_case(options.case, layers, keeps=options.keep)))
        return
    if options.paper or options.all:
        from paper_table import paper_table

        rows = paper_table(options.only, layers, options.timeout, __file__, everywhere=options.all)
        if options.json:
            print(json.dumps({"benchmark": "planning --paper", "results": rows}))
        return
    if options.one:
        found = measure(options.layers[0], tuple(options.mesh), options.microbatches)
        print(json.dumps(found))
        return
    results = []
    for layers in options.layers or [4, 12]:
        command = [sys.executable, __file__, "--one", "--layers", str(layers), "--mesh"]
        command += [*map(str, options.mesh), "--microbatches", str(options.microbatches)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        if done.returncode:
            sys.exit(done.stderr)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    table = Table(title=f"planning for a mesh of {' x '.join(map(str, options.mesh))}, CPU seconds")
    for heading in ("layers", "equations", "nodes", *PASSES, "after / trace", "gap"):
        table.add_column(heading, justify="right")
    for row in results:
        table.add_row(
            str(row["layers"]),
            f"{row['equations']:,}",
            f"{row['nodes']:,}",
            *(f"{row['seconds'][name]:.2f}" for name in PASSES),
            f"{row['ratio']:.2f}",
            f"{row['gap']:.2%}",
        )
    Console(width=max(Console().width, 110)).print(table)
    if options.json:
        print(json.dumps({"benchmark": "planning", "results": results}))


if __name__ == "__main__":
    main()
