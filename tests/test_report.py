"""Tables say what the plan says, and in pictures no two texts overlap."""

import dataclasses
import functools
import io
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_schedules import simulate_schedule
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

import autopar
from autopar.base import costs
from autopar.base.cluster import Cluster, axis_names
from autopar.base.options import Options
from autopar.base.plan_records import (
    Candidate,
    Collective,
    Estimates,
    OutputCertificate,
    SolverSummary,
    StagePlan,
    TensorPlan,
    check,
)
from autopar.base.units import format_bytes
from autopar.passes.schedules.make import make_schedule
from autopar.plans.plan import Plan
from autopar.report import palette, plot_plan, plot_timeline, print_plan, save_plot, save_timeline
from autopar.report.candidate_labels import label_candidates
from autopar.report.tensor_tiles import _name_lines


def transformer_plan(
    mesh: tuple[int, ...], *, preset: str = "dgx-h100", layers: int = 6, width: int = 512
) -> Plan:
    """A plan for a GPT with Adam: ZeRO-1 on x, tensor parallelism on the other axes."""
    cluster = Cluster.preset(preset)
    names = axis_names(mesh)
    inner = names[1:]

    def tensor(path: str, role: str, shape: tuple[int, ...], *spec: tuple[str, ...]) -> TensorPlan:
        cut = math.prod(mesh[names.index(axis)] for dim in spec for axis in dim)
        size = 4 * math.prod(shape)
        return TensorPlan(path, role, shape, "float32", spec, size, size // cut, role == "state")

    weights: list[tuple[str, tuple[int, ...], tuple[tuple[str, ...], ...]]] = [
        ("['embedding']", (50304, width), ((), inner))
    ]
    for i in range(layers):
        block = f"['Block_{i}']"
        weights += [
            (f"{block}['LayerNorm_0']['scale']", (width,), ((),)),
            (f"{block}['attention']['qkv']['kernel']", (width, 3 * width), ((), inner)),
            (f"{block}['attention']['qkv']['bias']", (3 * width,), (inner,)),
            (f"{block}['attention']['out']['kernel']", (width, width), (inner, ())),
            (f"{block}['mlp']['up']['kernel']", (width, 4 * width), ((), inner)),
            (f"{block}['mlp']['down']['kernel']", (4 * width, width), (inner, ())),
        ]
    inputs = [tensor("state.step", "state", ())]
    inputs += [tensor(f"state.params{p}", "state", shape, *spec) for p, shape, spec in weights]
    for moment in ("mu", "nu"):
        inputs += [
            tensor(f"state.opt_state[0].{moment}{p}", "state", shape, ("x", *spec[0]), *spec[1:])
            for p, shape, spec in weights
        ]
    state = inputs.copy()
    inputs.append(tensor("batch['tokens']", "batch", (64, 257), ("x",), ()))
    outputs = [*state, tensor("[1]['loss']", "result", ())]

    def collective(kind: str, axes: tuple[str, ...], size: int, times: int, why: str) -> Collective:
        numbers = [names.index(axis) for axis in axes]
        seconds = costs.collective_seconds(kind, size, cluster, mesh, numbers)
        return Collective(kind, axes, size, times, why, seconds=seconds)

    collectives = []
    for item in state:
        if ".params" in item.path:
            size = item.bytes_per_device
            collectives.append(collective("reduce-scatter", ("x",), size, 1, "gradient"))
            collectives.append(collective("all-gather", ("x",), size, 1, "parameter"))
    if inner:
        collectives.append(collective("all-reduce", inner, 2**22, 16 * layers, "activation"))
    communication = sum(item.seconds * item.times for item in collectives)
    compute = 4 * communication
    step = compute + communication
    state_bytes = sum(item.bytes_per_device for item in state)
    return Plan(
        autopar_version="0.1.0",
        jax_version="0.10.2",
        program_hash="0123456789abcdef",
        options=Options().to_dict(),
        cluster=cluster.to_dict(),
        method="shard",
        num_microbatches=4,
        reason_for_microbatches="the fewest that fit",
        stages=(StagePlan(mesh, names, math.prod(mesh), (), tuple(collectives)),),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        certificate=(
            *(OutputCertificate(item.path, "epilogue") for item in state),
            OutputCertificate("[1]['loss']", "sum"),
        ),
        estimates=Estimates(
            compute + communication, compute, communication, 3 * state_bytes, state_bytes, 1e13
        ),
        solver=SolverSummary(1000, 1000, 0.0, 900, 1500, 7000),
        candidates=(
            *(
                Candidate(method, shape, 4, (1 + i / 7) * step, (3 + i) * state_bytes, i == 0)
                for i, (method, shape) in enumerate(
                    itertools.product(("shard", "zero1", "zero2", "data"), ((8,), (4, 2)))
                )
            ),
            Candidate("data", (8,), 1, None, None, note="more than a device has"),
        ),
    )


def convolution_plan() -> Plan:
    """State that is one level of layers, kernels of four dimensions, three axes, nothing sent."""
    names = ("x", "y", "z")
    inputs = []
    for i in range(6):
        shape = (3, 3, 16 << i, 32 << i)
        size = 4 * math.prod(shape)
        spec: tuple[tuple[str, ...], ...] = ((), (), ("x",), ("y", "z"))
        path = f"args[0]['a_rather_long_name_of_a_layer{i}_{'abcdef'[i]}']['kernel']"
        inputs.append(TensorPlan(path, "state", shape, "float32", spec, size, size // 8))
    inputs.append(TensorPlan("args[1]", "batch", (32, 8), "int32", (names, ()), 1024, 128))
    return Plan(
        autopar_version="0.1.0",
        jax_version="0.10.2",
        program_hash="0123456789abcdef",
        options=Options.from_kwargs(memory_limit="1GiB").to_dict(),
        cluster=Cluster.preset("cpu").to_dict(),
        method="data",
        num_microbatches=1,
        reason_for_microbatches="batch norm needs the whole batch",
        stages=(StagePlan((2, 2, 2), names, 8),),
        inputs=tuple(inputs),
        outputs=(TensorPlan("", "result", (), "float32", (), 4, 4),),
        certificate=(),
        estimates=Estimates(1.0, 1.0, 0.0, 10**7, 10**6, 1e9),
    )


def pipelined_plan(**options: Any) -> Plan:
    """A perceptron of eight layers in stages, planned as users plan."""

    def train_step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            h = x
            for layer in params["layers"]:
                h = jnp.tanh(h @ layer["w"] + layer["b"]) * jnp.float32(0.5)
            return jnp.mean(h**2)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
        return jax.tree.map(lambda p, g: p - 0.1 * g / norm, params, gradients), {"loss": loss}

    layer = {
        "w": jax.ShapeDtypeStruct((256, 256), np.float32),
        "b": jax.ShapeDtypeStruct((256,), np.float32),
    }
    params, x = {"layers": [layer] * 8}, jax.ShapeDtypeStruct((128, 256), np.float32)
    cluster = Cluster.preset("dgx-h100")
    return autopar.plan(train_step, params, x, cluster=cluster, progress=False, **options)


def own_schedule(num_meshes: int, num_microbatches: int) -> Any:
    """A user's function; a plan cannot hold it, so it cannot simulate its own step."""
    return [list(tasks) for tasks in make_schedule("gpipe", num_meshes, num_microbatches).tasks]


ONE_STAGE: dict[str, Callable[[], Plan]] = {
    "one axis": lambda: transformer_plan((8,)),
    "two axes": lambda: transformer_plan((4, 2)),
    "three axes": lambda: transformer_plan((2, 2, 2), preset="cpu", layers=2, width=64),
    "convolutions": convolution_plan,
}
PIPELINES: dict[str, Callable[[], Plan]] = {
    "zero bubble": lambda: pipelined_plan(
        stages=4, microbatches=8, schedule="zb_h1", method="data"
    ),
    "chunks": lambda: pipelined_plan(
        stages=4, microbatches=4, num_chunks=2, logical_mesh=(2, 1), schedule="interleaved_1f1b"
    ),
    "own schedule": lambda: pipelined_plan(stages=2, microbatches=4, schedule=own_schedule),
}
PLANS = {**ONE_STAGE, **PIPELINES}


@functools.cache
def sample(name: str) -> Plan:
    return PLANS[name]()


def rendered(plan: Plan, width: int = 120) -> str:
    text = io.StringIO()
    print_plan(plan, Console(width=width, file=text))
    return text.getvalue()


@pytest.mark.parametrize("name", PLANS)
def test_samples_are_plans(name: str) -> None:
    check(sample(name))


@pytest.mark.parametrize("name", PLANS)
def test_tables_fit_their_console(name: str) -> None:
    for width in (80, 100, 140):
        lines = rendered(sample(name), width).splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width


def test_tables_say_what_the_plan_says() -> None:
    plan = sample("two axes")
    text = rendered(plan)
    assert "x=4  y=2" in text
    assert "the fewest that fit" in text
    assert "proved optimal for the cost model" in text
    assert "  Block_{0..5}/attention/qkv/kernel" in text
    assert "params (donated)" in text
    assert "512 x 1536/y" in text
    assert format_bytes(plan.estimates.peak_bytes_per_device) in text
    assert "39 leaves of the new state" not in text
    count = sum(item.role == "state" for item in plan.outputs)
    assert f"{count} leaves of the new state" in text
    assert "reduce-scatter" in text
    assert "more than a device has" in text
    assert text.count("▶") == 1


def test_a_part_of_which_some_is_donated_says_so() -> None:
    plan = sample("two axes")
    kept = next(x for x in plan.inputs if x.donated and "kernel" in x.path)
    inputs = tuple(dataclasses.replace(x, donated=False) if x is kept else x for x in plan.inputs)
    text = rendered(dataclasses.replace(plan, inputs=inputs))
    assert "params (some donated)" in text and "donated: the step reuses" in text


def test_repeated_layers_take_one_row() -> None:
    few, many = transformer_plan((4, 2), layers=2), transformer_plan((4, 2), layers=24)
    assert len(rendered(few).splitlines()) == len(rendered(many).splitlines())


def test_a_plan_without_communication_says_so() -> None:
    assert "No communication between devices." in rendered(sample("convolutions"))


def test_tables_of_pipelines_say_where_and_when() -> None:
    plan = sample("zero bubble")
    text = rendered(plan)
    assert "4 stages on 4 meshes, schedule zb_h1" in text
    stages = [line.split() for line in text.splitlines() if " layers/{" in line]
    assert [row[0] for row in stages] == ["0", "1", "2", "3"]
    for row, stage in zip(stages, plan.stages, strict=True):
        assert " ".join(row).endswith(format_bytes(stage.peak_bytes_per_device))
    assert re.search(r"each to the next +activation +float32\[16, 256\] +24 x", text)
    assert "layers (donated)" in text
    assert re.search(r"\{0..7\}/w .* 0 to 3", text)
    assert re.search(r"gradient +all-reduce .* 0 to 3", text)


def test_a_terminal_shows_the_simulated_step() -> None:
    plan = sample("zero bubble")
    lines = rendered(plan, 400).splitlines()
    timeline = plan.simulate().timeline
    for mesh in range(4):
        (row,) = (line for line in lines if line.strip().startswith(f"mesh {mesh}  "))
        numbers = [int(n) for n in re.findall(r"(\d)━", row)]
        # The forward pass of every microbatch, in order; the last stage has both at once.
        assert numbers == (list(range(8)) if mesh < 3 else [])
        idle = 1 - timeline.busy[mesh] / timeline.step_seconds
        assert row.endswith(f"{idle:4.0%} idle")
        dots = row.count("·") / (row.rindex("·") - row.index("·") + 1)
        assert 0 < dots < 1
    assert any("weights" in line and "waiting" in line for line in lines)


def test_a_plan_that_cannot_simulate_its_step_says_why() -> None:
    reason = "schedule 'own_schedule' is a function, which a plan cannot hold"
    assert reason in rendered(sample("own schedule"))
    shown = [text.get_text() for text in texts(plot_plan(sample("own schedule")))]
    assert any(reason in text for text in shown)


def test_a_picture_of_a_pipeline_shows_stages_and_tasks() -> None:
    from matplotlib.collections import PolyCollection

    plan = sample("chunks")
    figure = plot_plan(plan)
    shown = [text.get_text() for text in texts(figure)]
    assert {f"Stage {i}" for i in range(8)} <= set(shown)
    assert {"mesh 0\nstages 0, 4", "forward", "waiting"} <= set(shown)
    (axes,) = (a for a in figure.axes if a.get_title(loc="left").startswith("A step as"))
    timeline = plan.simulate().timeline
    drawn = [c for c in axes.collections if isinstance(c, PolyCollection)]
    # For each mesh one rectangle of waiting, then its tasks.
    tasks = [len(collection.get_paths()) for collection in drawn]
    assert tasks[::2] == [1] * 4
    runs = [e for e in timeline.events if e.seconds > 0]
    assert tasks[1::2] == [sum(e.mesh == mesh for e in runs) for mesh in range(4)]
    width = sum(
        path.get_extents().width for collection in drawn[1::2] for path in collection.get_paths()
    )
    assert width == pytest.approx(sum(timeline.busy), rel=1e-6)


def test_a_timeline_is_a_picture_of_its_own(tmp_path: Path) -> None:
    timeline = sample("zero bubble").simulate(schedule="gpipe").timeline
    assert_legible(plot_timeline(timeline))
    save_timeline(timeline, tmp_path / "step.svg", "what if")
    assert "<svg" in (tmp_path / "step.svg").read_text()
    many = simulate_schedule(make_schedule("1f1b", 10, 10), 1.0, 2.0)
    assert_legible(plot_timeline(many))


def test_a_notebook_shows_pictures_as_such() -> None:
    simulation = sample("zero bubble").simulate()
    shown = plot_timeline(simulation)
    assert shown._repr_png_().startswith(b"\x89PNG")
    assert len(texts(shown)) == len(texts(plot_timeline(simulation.timeline)))
    with pytest.raises(autopar.errors.OptionError, match=r"step\.profile"):
        plot_timeline(3)  # type: ignore[arg-type]


def test_names_in_pictures_keep_their_beginnings() -> None:
    layers = "layers_{0..3}/{LayerNorm_0,attention_out,mlp_out}"
    assert _name_lines(f"state/params/{layers}/bias", "params") == ["layers_{0..3}/../", "bias"]
    assert _name_lines("state/params/decoder/mlp/kernel", "params") == ["decoder/mlp/kernel"]


def texts(figure: Figure) -> list[Text]:
    figure.draw_without_rendering()
    found = [text for text in figure.findobj(Text) if isinstance(text, Text)]
    return [text for text in found if text.get_text().strip() and text.get_visible()]


@pytest.mark.parametrize("name", PLANS)
def test_no_text_of_a_picture_overlaps_another_or_is_cut(name: str) -> None:
    assert_legible(plot_plan(sample(name)))


def assert_legible(figure: Figure) -> None:
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    assert len(boxes) > 10
    for text, box in boxes:
        inside = figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        inside = inside and figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
        assert inside, f"{text!r} is cut off"
    for (text, box), (other_text, other) in itertools.combinations(boxes, 2):
        # Lines of one label may touch: boxes have the height of the tallest letters.
        across = min(box.x1, other.x1) - max(box.x0, other.x0)
        down = min(box.y1, other.y1) - max(box.y0, other.y0)
        assert across <= 0 or down <= 0.25 * min(box.height, other.height), (text, other_text)


def test_a_picture_tells_what_is_where() -> None:
    shown = [text.get_text() for text in texts(plot_plan(sample("two axes")))]
    assert any(text.startswith("shard on 1 node of 8 x H100") for text in shown)
    assert {"params", "the part on device 0", "cut along x (4 ways)"} <= set(shown)
    assert "Communication in a step" in shown
    assert any(text.endswith(", chosen") for text in shown)
    assert "and 2 slower, 1 not possible" in shown


def considered(*notes: str) -> list[Candidate]:
    return [
        Candidate("auto", (8,), 4, 1.0 + i, 1000, chosen=i == 0, note=note)
        for i, note in enumerate(notes)
    ]


def test_what_was_considered_is_told_apart() -> None:
    few, one = considered("2 stages, 1f1b", "2 stages, zb_h2"), considered("")
    assert label_candidates(few, 26) == ("auto, 2 stages, x=8, 4 microbatches", ["1f1b", "zb_h2"])
    assert label_candidates(one, 26) == ("", ["auto, x=8, 4 microbatches"])
    mixed = considered("", "12 padded to 16", "2 stages, 1f1b, remat on 1", "2 stages, zb_h2")
    _, labels = label_candidates(mixed, 26)
    assert labels == [
        "1 stage",
        "1 stage, 12 padded to 16",
        "2 stages, 1f1b, remat on 1",
        "2 stages, zb_h2",
    ]
    padded = considered("", "12 padded to 16, exceeds the memory limit")
    assert label_candidates(padded, 26)[1] == ["as it is", "12 padded to 16"]
    # A plan of one mesh, beside which stages were considered.
    stages = considered("", "2 stages, 1f1b", "2 stages, zb_h1", "2 stages, zb_h2")
    plan = dataclasses.replace(sample("one axis"), candidates=tuple(stages))
    shown = [text.get_text() for text in texts(plot_plan(plan))]
    assert {"1 stage", "2 stages, 1f1b", "2 stages, zb_h1", "2 stages, zb_h2"} <= set(shown)


def test_a_picture_is_as_high_as_what_it_shows() -> None:
    many = plot_plan(sample("one axis"))
    plan = sample("one axis")
    few = plot_plan(dataclasses.replace(plan, inputs=plan.inputs[:3], candidates=()))
    assert few.get_figheight() < 0.6 * many.get_figheight()
    for figure in (few, many):
        assert_legible(figure)
        lowest = min(text.get_window_extent().y0 for text in texts(figure))
        assert lowest < 0.8 * figure.dpi


def test_device_0_holds_its_share_of_each_tile() -> None:
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    from autopar.report.palette import MINE, OTHERS, WHOLE

    figure = plot_plan(sample("three axes"))
    tiles = figure.axes[0]
    areas: dict[str, float] = dict.fromkeys((MINE, OTHERS, WHOLE), 0.0)
    for patch in tiles.patches:
        color = to_hex(patch.get_facecolor())
        if isinstance(patch, Rectangle) and patch.get_fill() and color in areas:
            areas[color] += patch.get_width() * patch.get_height()
    # Cuts make two to eight parts. A light rectangle is the whole tile, the dark one lies on it.
    assert areas[OTHERS] / 8 < areas[MINE] < areas[OTHERS] / 3
    assert areas[WHOLE] > 0


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_saved_by_their_ending(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan.{suffix}"
    save_plot(sample("one axis"), path)
    assert path.read_bytes()[:5] == {"png": b"\x89PNG\r", "svg": b"<?xml"}[suffix]


@pytest.mark.parametrize("colors", [palette.PARTS, palette.MESHES, tuple(palette.KINDS.values())])
def test_colour_blind_readers_tell_colours_apart(colors: tuple[str, ...]) -> None:
    """Seen without red or green cones (Vienot, Brettel and Mollon, 1999), in linear light."""
    rgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in colors]) ** 2.2
    for red, green in ((0.11238, 0.88762), (0.29275, 0.70725)):
        one = rgb[:, 0] * red + rgb[:, 1] * green
        seen = np.stack([one, rgb[:, 2]], axis=1) ** (1 / 2.2)
        apart = np.abs(seen[:, None] - seen[None]).max(-1) + np.eye(len(colors))
        assert apart.min() > 0.05, (colors, apart.round(2))
