"""Plans: canonical JSON, files that are not plans, what differs, and their text."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import report
from autopar.base.cluster import Cluster
from autopar.base.errors import PlanMismatchError
from autopar.base.options import Options
from autopar.base.plan_records import (
    Candidate,
    Collective,
    Estimates,
    NodeStrategy,
    OutputCertificate,
    SolverSummary,
    StagePlan,
    TensorPlan,
    check,
)
from autopar.base.records import dump_json
from autopar.plans.plan import Plan


def small_plan() -> Plan:
    weights = [
        TensorPlan(f"state['l{i}']['w']", "state", (8, 16), "float32", ((), ("x",)), 512, 128, True)
        for i in range(3)
    ]
    inputs = [
        *weights,
        TensorPlan("batch['x']", "batch", (32, 8), "float32", (("x", "y"), ()), 1024, 128),
    ]
    outputs = [
        *(TensorPlan(f"[0]['l{i}']['w']", "state", *layout(weights[i])) for i in range(3)),
        TensorPlan("[1]", "result", (), "float32", (), 4, 4),
    ]
    collectives = [
        Collective("all-reduce", ("y",), 128, 1, "gradient", f"state['l{i}']['w']", seconds=2e-5)
        for i in range(3)
    ]
    stage = StagePlan(
        logical_mesh=(4, 2),
        axis_names=("x", "y"),
        num_devices=8,
        strategies=(
            NodeStrategy("dot_general:0", "train.py:12", "[i/x,k]", 4096.0),
            NodeStrategy("add:1", "train.py:13", "[i/x]"),
        ),
        collectives=tuple(collectives),
    )
    return Plan(
        autopar_version="0.1.0",
        jax_version="0.10.2",
        program_hash="0123456789abcdef",
        options=Options.from_kwargs(microbatches=4).to_dict(),
        cluster=Cluster.preset("dgx-h100").to_dict(),
        method="shard",
        num_microbatches=4,
        reason_for_microbatches="asked for",
        stages=(stage,),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        certificate=(
            *(OutputCertificate(t.path, "epilogue") for t in outputs[:3]),
            OutputCertificate("[1]", "sum"),
        ),
        estimates=Estimates(2e-3, 1e-3, 1e-3, 2**20, 384, 1e9),
        solver=SolverSummary(1000, 990, 0.01, 2, 1, 9),
        candidates=(
            Candidate("shard", (4, 2), 4, 2e-3, 2**20, True, "the fastest"),
            Candidate("data", (8,), 4, None, None, note="too large"),
        ),
    )


def layout(tensor: TensorPlan) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.spec, tensor.bytes, tensor.bytes_per_device


TEXT = """\
╭─ autopar plan ────────────────────────────────────────────────────────────────────────────────╮
│ method        shard                                                                           │
│ mesh          x=4  y=2  1 node of 8 x H100 SXM5 80GB                                          │
│ microbatches  4  asked for                                                                    │
│ step          2 ms estimated  ━━━━━━━━━━══════════  compute 1 ms  communication 1 ms  1 GFLOP │
│ memory        1 MiB a device  ────────────────────  state 384 B  the rest 1 MiB  of 70.8 GiB  │
│ solver        2 nodes, 1 edges; at most 1.00% of the cost above the best                      │
╰───────────────────────────────────────────────────────────────────────────────────────────────╯
Inputs

  path              type   shape, cut along   tensors       all   per device
 ────────────────────────────────────────────────────────────────────────────
  state (donated)                                   3   1.5 KiB        384 B
    l{0..2}/w       f32    8 x 16/x                 3   1.5 KiB        384 B

  batch                                             1     1 KiB        128 B
    x               f32    32/x/y x 8               1     1 KiB        128 B

  together                                          4   2.5 KiB        512 B

donated: the step reuses the buffer, the caller's array is gone

Results

  path     type   shape, cut along   tensors   all   per device
 ───────────────────────────────────────────────────────────────
  result                                   1   4 B          4 B
    [1]    f32    scalar                   1   4 B          4 B

Communication in a step

  purpose    collective   along   a step   bytes   estimate
 ───────────────────────────────────────────────────────────
  gradient   all-reduce   y          3 x   384 B      60 us

How outputs come out of the microbatches

  how        outputs   which
 ────────────────────────────────────────────────
  epilogue         3   3 leaves of the new state
  sum              1   1

Considered

      method   mesh    microbatches   step   peak memory   note
 ──────────────────────────────────────────────────────────────────────
  ▶   shard    4 x 2              4   2 ms         1 MiB   the fastest
      data     8                  4      -             -   too large"""


def test_text_shows_what_a_person_needs() -> None:
    plan = small_plan()
    assert str(plan) == TEXT
    assert repr(plan) == "<Plan shard on x=4, y=2, 4 microbatches, 2 ms a step, 1 MiB a device>"


def test_columns_of_the_text_are_aligned() -> None:
    lines = str(small_plan()).splitlines()
    start = lines.index("Communication in a step") + 2
    assert lines[start].index("collective") == lines[start + 2].index("all-reduce")
    assert lines[start].index("bytes") + len("bytes") == lines[start + 2].index("B ") + 1


def test_text_has_no_colours_and_says_what_is_no_markup() -> None:
    plan = small_plan()
    note = dataclasses.replace(plan.candidates[0], note="[red]the state['w'] [/red] :smile:")
    text = str(dataclasses.replace(plan, candidates=(note,)))
    assert note.note in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_plan_goes_through_a_file(tmp_path: Path) -> None:
    plan = small_plan()
    check(plan)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert loaded.to_json() == plan.to_json()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_json_is_canonical() -> None:
    plan = small_plan()
    reversed_options = dict(reversed(list(plan.options.items())))
    assert dataclasses.replace(plan, options=reversed_options).to_json() == plan.to_json()
    text = plan.to_json()
    assert json.loads(text) == plan.to_dict()
    assert max(map(len, text.splitlines())) <= 240


def test_fields_are_brought_to_plain_types() -> None:
    make: Any = TensorPlan
    tensor = make("w", "state", [np.int64(8)], "float32", [["x"]], np.int32(32), 4, np.bool_(True))
    assert tensor == TensorPlan("w", "state", (8,), "float32", (("x",),), 32, 4, True)
    assert type(tensor.shape[0]) is int
    assert type(tensor.donated) is bool
    make = Estimates
    assert type(make(1, np.float32(2), 3, 4, 5, 6).compute_seconds) is float


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("path", 3, "TensorPlan.path must be str"),
        ("bytes", 1.5, "TensorPlan.bytes must be int"),
        ("bytes", True, "TensorPlan.bytes must be int"),
        ("shape", "8", "TensorPlan.shape must be a sequence"),
        ("spec", (None,), "TensorPlan.spec must be a sequence"),
        ("donated", 1, "TensorPlan.donated must be bool"),
    ],
)
def test_fields_of_other_types_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(small_plan().inputs[0], **{field: value})


def test_numbers_that_json_lacks_are_refused() -> None:
    estimates = dataclasses.replace(small_plan().estimates, step_seconds=float("inf"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        dataclasses.replace(small_plan(), estimates=estimates).to_json()


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    text = small_plan().to_json()
    path = tmp_path / "plan.json"
    for end in range(1, len(text.rstrip()), 97):
        path.write_text(text[:end])
        with pytest.raises(PlanMismatchError, match="truncated") as caught:
            Plan.load(path)
        assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a plan"),
        (b"hello", "not JSON"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[]", "no format_version"),
        (b'{"plan": 1}', "no format_version"),
        (b'{"format_version": "1"}', "no format_version"),
        (b'{"format_version": 3}', "lacks the field"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanMismatchError, match=message):
        Plan.load(path)


def test_a_file_of_another_version_is_refused() -> None:
    newer = {**small_plan().to_dict(), "format_version": 99, "autopar_version": "7.0"}
    with pytest.raises(PlanMismatchError, match="format version 99") as caught:
        Plan.from_json(json.dumps(newer))
    assert "written by autopar 7.0" in str(caught.value.why)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_microbatches": 0}, "0 microbatches"),
        ({"stages": []}, "at least one stage"),
        ({"colour": "red"}, "no field 'colour'"),
        ({"method": 3}, "Plan.method must be str"),
        ({"certificate": [{"path": "[9]", "how": "sum"}]}, "which is no output"),
    ],
)
def test_a_plan_changed_by_hand_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanMismatchError, match=message):
        Plan.from_json(json.dumps({**small_plan().to_dict(), **change}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": ((),)}, r"\(\(\),\) for \(8, 16\)"),
        ({"spec": (("x",), ("x",))}, "cuts two dimensions"),
        ({"spec": (("z",), ())}, "unknown axis"),
        ({"shape": (8, 18)}, "cut 18"),
        ({"bytes_per_device": 512}, "512 over 4"),
    ],
)
def test_check_compares_tensors_with_the_mesh(change: dict[str, Any], message: str) -> None:
    plan = small_plan()
    tensor = dataclasses.replace(plan.inputs[0], **change)
    with pytest.raises(AssertionError, match=message):
        check(dataclasses.replace(plan, inputs=(tensor,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_devices": 4}, "4 devices"),
        ({"axis_names": ("x", "x")}, "axis names repeat"),
        ({"collectives": (Collective("gossip", ("x",), 1, 1, ""),)}, "unknown collective 'gossip'"),
        ({"collectives": (Collective("all-reduce", (), 1, 1, ""),)}, "is not on x=4, y=2"),
        ({"collectives": (Collective("all-reduce", ("z",), 1, 1, ""),)}, "is not on x=4, y=2"),
        ({"strategies": (NodeStrategy("a", "", ""),) * 2}, "two strategies"),
    ],
)
def test_check_compares_stages_with_themselves(change: dict[str, Any], message: str) -> None:
    plan = small_plan()
    with pytest.raises(AssertionError, match=message):
        check(dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], **change),)))


def test_a_plan_for_other_options_or_another_program_is_refused() -> None:
    plan = small_plan()
    plan.require(program_hash=plan.program_hash, options=plan.options)
    with pytest.raises(PlanMismatchError, match="other options") as caught:
        options = Options.from_kwargs(microbatches=2, method="data").to_dict()
        plan.require(program_hash=plan.program_hash, options=options)
    assert "- microbatches: 4 -> 2" in str(caught.value)
    assert '- method: "auto" -> "data"' in str(caught.value)
    assert "method='auto'" in str(caught.value) and "microbatches=4" in str(caught.value)
    with pytest.raises(PlanMismatchError, match="another program"):
        plan.require(program_hash="fedcba", options=plan.options)
    leaves = {tensor.path: tensor.value for tensor in plan.inputs}
    (first, *_) = leaves
    leaves |= {first: "float32[1]", "new": "int32[]"}
    with pytest.raises(PlanMismatchError, match="arguments differ") as caught:
        plan.require(program_hash="fedcba", options=plan.options, leaves=leaves)
    assert "-> float32[1]" in str(caught.value)
    assert "- new: nothing -> int32[]" in str(caught.value)


def test_diff_names_what_differs() -> None:
    plan = small_plan()
    assert plan.diff(plan) == ()
    moved = dataclasses.replace(plan.inputs[0], spec=((), ("x", "y")), bytes_per_device=64)
    other = dataclasses.replace(plan, method="data", inputs=(moved, *plan.inputs[2:]))
    lines = plan.diff(other)
    assert "state/l0/w: P(None, 'x') -> P(None, ('x', 'y')), 128 B -> 64 B a device" in lines
    assert [line for line in lines if "l1" in line and line.endswith("only in the first")]
    assert str(lines) == repr(lines) == "\n".join(lines)
    details = lines.details
    assert 'method: "shard" -> "data"' in details
    assert "inputs[state['l0']['w']].bytes_per_device: 128 -> 64" in details
    assert """inputs[state['l0']['w']].spec: [[], ["x"]] -> [[], ["x", "y"]]""" in details
    assert [line for line in details if "l1" in line and line.endswith("-> (absent)")]
    assert len(details) == 4
    assert str(plan.diff(plan)) == "no differences"


def test_diff_matches_records_by_name_and_not_by_place() -> None:
    plan = small_plan()
    assert plan.diff(dataclasses.replace(plan, inputs=plan.inputs[::-1])) == (
        "inputs: in another order",
    )


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@settings(deadline=None)
@given(value=json_values, width=st.integers(1, 60))
def test_written_json_reads_back(value: Any, width: int) -> None:
    text = dump_json(value, width=width)
    assert json.loads(text) == value
    assert dump_json(json.loads(text), width=width) == text


def test_files_are_written_into_new_folders(tmp_path: Path) -> None:
    cluster = autopar.Cluster.preset("dgx-h100")
    shapes = jax.ShapeDtypeStruct((8,), np.float32), jax.ShapeDtypeStruct((16, 8), np.float32)
    plan = autopar.plan(lambda w, x: w + x.sum(0), *shapes, cluster=cluster, progress=False)
    plan.save(tmp_path / "a" / "b" / "plan.json")
    cluster.save(tmp_path / "c" / "cluster.toml")
    report.save_plot(plan, tmp_path / "d" / "plan.png")
    assert autopar.Plan.load(tmp_path / "a" / "b" / "plan.json") == plan
    assert autopar.Cluster.load(tmp_path / "c" / "cluster.toml") == cluster
    assert (tmp_path / "d" / "plan.png").stat().st_size > 1000
