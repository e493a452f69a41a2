"""Plans held against compilers: what is compiled, what one that fails leaves, what is told."""

import copy
import dataclasses
import importlib.util
import json
import pickle
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from small_steps import with_a_table as step

import autopar
from autopar.base.compiled_records import ProgramFinding, ProgramMemory
from autopar.base.errors import AutoparError, DeviceError, OptionError, PlanMismatchError
from autopar.base.verification_records import CollectiveCheck, StageCheck
from autopar.report.verification_report import Verification
from autopar.runtime.verification import checking
from autopar.runtime.verification.compile_all import CompiledPrograms, compile_all
from autopar.runtime.verification.hlo_collectives import collectives
from autopar.runtime.verification.known_findings import KnownFindings
from autopar.runtime.verification.targets import gpu_target_text, target_named

ROWS = jax.ShapeDtypeStruct((16, 8), jnp.float32)
WEIGHTS = {f"layer_{i}": jax.ShapeDtypeStruct((8, 8), jnp.float32) for i in range(4)}
PIPELINE: Any = {"method": "data", "stages": 4, "microbatches": 2, "schedule": "gpipe"}


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return autopar.plan(step, WEIGHTS, ROWS, cluster="8xh100", **PIPELINE)


@pytest.fixture(scope="module")
def verified(plan: autopar.Plan, tmp_path_factory: pytest.TempPathFactory) -> Verification:
    return plan.verify("cpu", cache=tmp_path_factory.mktemp("known"), processes=1)


def test_a_pipeline_is_compared_piece_by_piece(
    verified: Verification, plan: autopar.Plan, tmp_path: Path
) -> None:
    assert verified.holds, str(verified)
    pieces = {x.piece: x for x in verified.pieces}
    assert {"F0", "B0", "F3", "B3"} <= set(pieces)
    assert (pieces["F2"].same_as, pieces["F2"].runs) == ("F1", 2)
    made = autopar.compile(step, WEIGHTS, ROWS, **PIPELINE)
    assert verified.planned_for and "by the rules of the target's compiler" in str(verified)
    assert [x.planned_bytes for x in verified.stages] == [
        stage.peak_bytes_per_device for stage in made.plan.stages
    ]
    for name, memory in made.memory().items():
        finding = pieces[name].finding
        assert finding is not None and finding.memory is not None
        assert finding.memory.arguments == memory.arguments
        assert finding.memory.outputs == memory.outputs
        promised = pieces[name].planned
        assert promised.arguments == memory.arguments
        assert 0 <= memory.outputs - promised.outputs <= 64  # the pointers of a tuple of results
        assert promised.aliased >= memory.aliased
    planned = [c for stage in plan.stages for c in stage.collectives]
    assert sum(x.planned_bytes for x in verified.collectives) == sum(c.bytes for c in planned)
    assert {x.kind for x in verified.collectives} == {"all-reduce"}
    verified.save(tmp_path / "made.json")
    assert Verification.load(tmp_path / "made.json") == verified
    text = str(verified)
    backward = pieces["B1"].finding
    assert backward is not None and backward.buffers
    assert any("small_steps.py:" in x.source for x in backward.buffers), backward.buffers
    assert "Largest temporaries of" in text
    assert "planned" in text and "aliased" in text
    assert "Verdict: holds." in text and "same as F1" in text
    assert "tune" not in text
    assert "tune" in str(dataclasses.replace(verified, target="gpu:h100"))
    with pytest.raises(PlanMismatchError, match="not a verification"):
        plan.save(tmp_path / "plan.json")
        Verification.load(tmp_path / "plan.json")


def test_verdicts() -> None:
    big = 1 << 30
    assert StageCheck(0, 0, big, int(1.04 * big), 2 * big).verdict == "holds"
    assert StageCheck(0, 0, big, int(1.06 * big), 2 * big).verdict == "needs more than planned"
    assert StageCheck(0, 0, big, 3 * big, 2 * big).verdict == "does not fit"
    assert StageCheck(0, 0, 1000, 5000, None).verdict == "holds", "compilers round up"
    assert StageCheck(0, 0, big, None, None).verdict == "not compiled"


@pytest.mark.parametrize("name", ["gpu:h300", "h100", "tpu:v5e", "tpu:v9:2x2", "tpu:v5e:0x2", None])
def test_an_unknown_target_lists_those_that_exist(plan: autopar.Plan, name: Any) -> None:
    with pytest.raises(OptionError, match=r"'gpu:a100'(.|\n)*tpu:v5e:2x4"):
        plan.verify(name)


@pytest.mark.parametrize(("name", "extra"), [("gpu:h100", "gpu"), ("tpu:v5e:2x4", "tpu")])
def test_a_missing_wheel_names_the_extra(
    plan: autopar.Plan, name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AutoparError, match=rf"autopar\[{extra}-check\]"):
        plan.verify(name)


def test_a_slice_must_have_the_devices_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(DeviceError, match="8 devices, and 'tpu:v4:2x2x1' has 4"):
        target_named("tpu:v4:2x2x1").require(8)


def test_a_slice_may_have_less_memory() -> None:
    whole, less = target_named("tpu:v5e:2x4"), target_named("tpu:v5e:2x4:4000MiB")
    assert (less.num_devices, less.memory_bytes) == (8, 4000 << 20)
    assert less.compiler_options == {"xla_tpu_max_hbm_size_mib": "4000"}
    assert not whole.compiler_options and whole.memory_bytes == 16_000_000_000
    for wrong in ("tpu:v5e:2x4:0MiB", "tpu:v5e:2x4:4000", "gpu:h100:4000MiB"):
        with pytest.raises(OptionError, match="There is no target"):
            target_named(wrong)
    assert target_named("tpu:v5e:2x4:15259MiB").limit_mib == 15259
    with pytest.raises(OptionError, match=r"more memory than there is(.|\n)*15259 MiB"):
        target_named("tpu:v5e:2x4:15260MiB")


def test_a_plan_without_its_step_says_what_to_call(plan: autopar.Plan) -> None:
    for other in (
        pickle.loads(pickle.dumps(plan)),
        copy.deepcopy(plan),
        dataclasses.replace(plan),
        autopar.Plan.from_json(plan.to_json()),
    ):
        assert other == plan
        with pytest.raises(AutoparError, match=r"autopar.verify\(step"):
            other.verify("cpu")


def test_a_plan_for_another_program_is_refused(plan: autopar.Plan) -> None:
    with pytest.raises(PlanMismatchError, match="another program"):
        autopar.verify(
            lambda w, x: step(w, 2 * x), WEIGHTS, ROWS, plan=plan, target="cpu", **PIPELINE
        )


@pytest.mark.parametrize("wrong", [{"processes": 0}, {"compile_seconds": -1.0}, {"cache": 3}])
def test_impossible_options(plan: autopar.Plan, wrong: Any) -> None:
    with pytest.raises(OptionError, match="not possible"):
        plan.verify("cpu", **wrong)


def test_gpu_targets_are_told_by_their_fields() -> None:
    text = gpu_target_text("a100")
    assert "cuda_compute_capability { major: 8 }" in text and "core_count: 108" in text
    assert text.count("{") == text.count("}")


# The processes that compile: a stub speaks for the real one.

STUB = """
    import os, sys, time
    from multiprocessing.connection import Connection
    from autopar.base.compiled_records import ProgramFinding
    connection = Connection(int(sys.argv[1]))
    connection.recv_bytes()
    connection.send(("ready", None))
    while True:
        try:
            name, _ = connection.recv()
        except EOFError:
            break
        if name == "early":
            os.abort()
        connection.send(("lowered", name.rstrip("'")))
        if connection.recv() == "skip":
            connection.send(("skipped", None))
        elif name == "crash":
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        elif name == "slow":
            time.sleep(100)
        elif name == "fail":
            connection.send(("failed", "XlaRuntimeError: too large"))
        else:
            print("[spmd] Involuntary full rematerialization", file=sys.stderr, flush=True)
            connection.send(("found", ProgramFinding(seconds=1.0)))
"""


def compiled(
    tmp_path: Path, *names: str, script: str = STUB, folder: Path | None = None, **more: Any
) -> CompiledPrograms:
    path = tmp_path / "stub.py"
    path.write_text(textwrap.dedent(script))
    settings: dict[str, Any] = {"processes": 1, "seconds": 60.0, **more}
    return compile_all(
        b"",
        [(name, ()) for name in names],
        target="none",
        compiler="stub",
        environment={},
        known=KnownFindings(folder),
        worker=(sys.executable, str(path)),
        **settings,
    )


def test_what_fails_is_a_finding_and_the_rest_goes_on(tmp_path: Path) -> None:
    made = compiled(tmp_path, "a", "crash", "early", "fail", "b", "a'", processes=2)
    failures = {name: finding.failure for (name, _), finding in made.findings.items()}
    assert "ended with 3" in failures["crash"] and "out of luck" in failures["crash"]
    assert "SIGABRT" in failures["early"]
    assert failures["fail"] == "XlaRuntimeError: too large"
    assert failures["a"] == failures["b"] == failures["a'"] == ""
    assert made.digests["a", ()] == made.digests["a'", ()]
    assert "rematerialization" in made.findings["b", ()].warnings[0]


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    made = compiled(tmp_path, "slow", "a", seconds=1.5)
    assert made.findings["slow", ()].failure == "it took longer than 1.5 s"
    assert made.findings["a", ()].failure == ""


def test_a_process_that_cannot_begin_says_why(tmp_path: Path) -> None:
    made = compiled(tmp_path, "a", "b", script="raise SystemExit('no such compiler')")
    assert all("no such compiler" in x.failure for x in made.findings.values())
    assert len(made.findings) == 2


def test_what_was_compiled_is_kept_and_ctrl_c_ends_the_rest(tmp_path: Path) -> None:
    def interrupted(message: str) -> None:
        if message.startswith("b"):
            raise KeyboardInterrupt

    folder = tmp_path / "known"
    made = compiled(tmp_path, "a", "b", folder=folder, report=interrupted)
    assert made.interrupted and set(made.findings) == {("a", ())}
    again = compiled(tmp_path, "a", "b", folder=folder)
    assert again.known == {("a", ())} and len(again.findings) == 2
    (first, *_) = folder.glob("*.json")
    first.write_text("{")
    assert KnownFindings(folder).get(first.stem) is None


def test_flags_of_the_environment_make_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was compiled with other flags of XLA is compiled again."""
    folder = tmp_path / "known"
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.delenv(name, raising=False)
    assert not compiled(tmp_path, "a", folder=folder).known
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "--xla_of_another_kind=true")
            assert not compiled(tmp_path, "a", folder=folder).known
            assert compiled(tmp_path, "a", folder=folder).known
    assert compiled(tmp_path, "a", folder=folder).known


def test_for_a_gpu_that_is_not_known_those_that_are_come_as_a_hint() -> None:
    with pytest.raises(OptionError) as caught:
        target_named("gpu:h300")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("'gpu:h100' or 'gpu:h200' or 'gpu:a100'")


def test_an_account_in_numbers() -> None:
    memory = ProgramMemory(arguments=100, outputs=60, aliased=50, temporaries=7)
    assert memory.total == 117
    finding = ProgramFinding(memory=memory, warnings=("w",))
    assert ProgramFinding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding


HLO = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %all-gather-start = (f32[8]{0}, f32[32]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8]
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %w = (s32[], f32[8]) while(%t), condition=%condition, body=%body
  %reduce-scatter-start = ((f32[8]{0}), (f32[4]{0})) reduce-scatter-start(%a), replica_groups={}
  %c = bf16[8]{0} collective-permute(%a), source_target_pairs={{0,4},{4,0}}
  %s = f8e4m3fn[8]{0} all-reduce(%a), replica_groups={{0,5},{1,4}}
}
"""


def test_collectives_as_accelerators_write_them() -> None:
    assert dict(collectives(HLO, (2, 4), ("x", "y"))) == {
        ("all-gather", ("y",), 6): 128,
        ("reduce-scatter", ("x", "y"), 1): 32,
        ("collective-permute", ("x",), 1): 32,
        ("all-reduce", ("?",), 1): 32,
    }


FUSED = """
%start (p: bf16[8,4]) -> (bf16[8,4], bf16[64,4]) {
  %p = bf16[8,4]{1,0} parameter(0)
  %g = bf16[64,4]{1,0} all-gather(%p), replica_groups={}, frontend_attributes={chain_id="0"}
  ROOT %c = (bf16[8,4], bf16[64,4]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%step (p.1: bf16[8,4]) -> bf16[64,4] {
  %p.1 = bf16[8,4]{1,0} parameter(0)
  ROOT %g.1 = bf16[64,4] all-gather(%p.1), replica_groups={}, frontend_attributes={chain_id="0"}
}

%all-reduce-scatter (input: bf16[60,4], place: u32[]) -> bf16[8,4] {
  %input = bf16[60,4]{1,0} parameter(0)
  %place = u32[] parameter(1)
  %pad = bf16[64,4]{1,0} pad(%input, %zero), padding=0_4x0_0
  %all-reduce.1 = bf16[64,4]{1,0} all-reduce(%pad), replica_groups={}
  ROOT %slice = bf16[8,4]{1,0} dynamic-slice(%all-reduce.1, %place), dynamic_slice_sizes={8,4}
}
"""


def test_what_tpus_fuse_with_collectives_counts_once() -> None:
    assert dict(collectives(FUSED, (8,), ("x",))) == {
        ("all-gather", ("x",), 1): 512,
        ("reduce-scatter", ("x",), 1): 480,
    }


def test_what_a_pass_explains_is_no_difference(verified: Verification) -> None:
    gone = CollectiveCheck(0, "B", "reduce-scatter", ("x",), 2, 100 << 20, 0, ("a.py:3",))
    there = CollectiveCheck(0, "B", "all-reduce", ("x",), 2, 0, 100 << 20)
    assert not gone.agrees and gone.verdict == "differs a.py:3"
    both = tuple(dataclasses.replace(x, changed_by=("some-pass",)) for x in (gone, there))
    assert both[0].agrees and both[0].verdict == "changed by some-pass"
    made = dataclasses.replace(verified, collectives=both)
    assert made.verdict == "collectives send 100% more, by some-pass"
    made = dataclasses.replace(verified, collectives=both[:1])
    assert made.holds, "a pass that found equal ones sends less"
    assert "changed by some-pass" in str(made)
    made = dataclasses.replace(verified, collectives=(gone, there))
    assert made.verdict == "other collectives than planned"


def test_loops_that_were_unrolled_are_no_difference(
    plan: autopar.Plan, verified: Verification
) -> None:
    """A trip of what was planned at once, or the reverse: a step has as many bytes."""

    def checked(trips: int, parts: int) -> tuple[CollectiveCheck, ...]:
        def unrolled(finding: ProgramFinding | None) -> ProgramFinding | None:
            if finding is None:
                return None
            kept = (
                dataclasses.replace(x, times=x.times * trips, bytes=x.bytes // parts)
                for x in finding.collectives
            )
            return dataclasses.replace(finding, collectives=tuple(kept), changes=())

        pieces = (dataclasses.replace(x, finding=unrolled(x.finding)) for x in verified.pieces)
        return checking._collectives(plan, tuple(pieces))

    assert all(x.planned_bytes == x.compiled_bytes for x in checked(1, 1))
    other_trips = checked(2, 2)
    assert other_trips and all(x.agrees for x in other_trips)
    assert {x.changed_by for x in other_trips} == {("unrolling of loops",)}
    assert sum(x.more_traffic for x in other_trips) == 0
    assert not any(x.agrees for x in checked(2, 1))


@pytest.mark.parametrize("target", ["gpu:h100", "tpu:v5e:2x4"])
def test_compilers_of_accelerators(plan: autopar.Plan, target: str) -> None:
    try:
        target_named(target).require(8)
    except AutoparError:
        pytest.skip("its compiler is not installed")
    made = plan.verify(target, cache=False, processes=1)
    assert not made.failures and not made.differences
    assert made.stages[0].compiled_bytes
