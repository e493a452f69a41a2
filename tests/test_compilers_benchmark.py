"""`benchmarks/compilers.py`: a tiny program on CPUs, one that is refused, and what is told."""

import io
import json
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import compiler_cases, compilers, gpu, other_kinds, placed_worker, registry
from rich.console import Console

import autopar
from autopar.base.compiled_records import ProgramMemory

ITEM = compiler_cases.Case(
    "gpt-125M", 16, False, {"microbatches": 1, "method": "zero3", "stages": 1}
)
MADE = registry.build("gpt-125M", remat=False, batch=16, size=gpu.TINY["gpt"])


def shown(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    Console(file=text, width=250).print(compilers.table(rows, plain=True))
    return text.getvalue()


def test_a_batch_that_fills_devices() -> None:
    item = ITEM._replace(options={**ITEM.options, "microbatches": 2})
    setting = compilers.Setting(layers=1, fill=0.5)
    large = compilers.filling(item, "gpu:h100", setting)
    assert large.batch > item.batch and large.batch % (8 * 2) == 0
    made = compilers.train_step(large, setting.layers)
    cluster = compilers.cluster_of("gpu:h100")
    plan = autopar.plan(made.step, made.state, made.batch, cluster=cluster, **large.options)
    filled = compilers.most_bytes(plan) / cluster.device.program_bytes
    assert 0.45 < filled <= 0.55


@pytest.mark.full
def test_a_program_beside_plain_jit(tmp_path: Path) -> None:
    setting = compilers.Setting(processes=1, plain=True, cache=str(tmp_path))
    row = json.loads(json.dumps(compilers.measure(MADE, ITEM, "cpu", setting)))
    assert not row["failures"] and row["ratio"] > 0
    assert row["collectives_agree"] and row["planned_collective_bytes"] > 0
    assert row["compile_seconds"] > 0 and row["plain_compile_seconds"] > 0
    # Both have a share of the state and of the batch, and both must gather weights.
    assert 0.2 < row["compiled_bytes"] / row["plain_compiled_bytes"] < 5
    assert row["sent_bytes"] > 0 and row["plain_sent_bytes"] > 0
    found = compilers.summary([row])
    assert found["programs"] == found["collectives_agree"] == found["compared_with_plain"] == 1
    assert found["memory_of_plain"] == row["compiled_bytes"] / row["plain_compiled_bytes"]
    text = shown([row])
    assert "plain jit sends" in text and compilers.told_of_collectives(row)[:7] in text


@pytest.mark.usefixtures("no_remedies")
def test_the_least_of_what_is_refused_is_compiled(tmp_path: Path) -> None:
    small = compilers.Setting(processes=1, memory=1 << 15, cache=str(tmp_path))
    row = compilers.measure(MADE, ITEM, "cpu", small)
    assert row["refused"] > 1 << 15 and not row["failures"]
    assert row["least_compiled_bytes"] > 1 << 15 and row["false_alarm"] is False
    found = compilers.summary([row, {**row, "false_alarm": True}])
    assert "2 refused, of which 1 false alarms" in compilers.in_words("cpu", found)
    for is_false, word in ((False, " no "), (True, " yes ")):
        assert word in shown([{**row, "false_alarm": is_false}])


def test_what_is_told_of_many() -> None:
    def row(ratio: float, agree: bool = True, passes: tuple[str, ...] = ()) -> dict[str, Any]:
        return {
            "program": "p",
            "target": "cpu",
            "verdict": "holds",
            "ratio": ratio,
            "collectives_agree": agree,
            "collectives_changed_by": list(passes),
            "failures": {},
        }

    found = compilers.summary(
        [row(1.01), row(0.9), row(1.1, passes=("cse",)), row(1.02, agree=False)]
    )
    assert found["median_error"] == pytest.approx(0.06)
    assert found["worst_error"] == pytest.approx(0.1)
    assert compilers.in_words("cpu, fitted", found) == (
        "cpu, fitted: 4 programs compiled; median error 6.0%, worst 10.0%; 1 more than 5% under; "
        "3 of 4 collectives agree (1 changed by passes of XLA)"
    )
    assert compilers.told_of_collectives(row(1.0, passes=("cse",))) == "changed by cse"
    assert compilers.told_of_collectives(row(1.0, agree=False)) == "differ"


ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, parameter 0, shape |f32[1,128]| at ShapeIndex {}, maybe-live-out:
 value: <1 p @0> (size=512,offset=0): f32[1,128]{1,0}
allocation 1: size 1024, parameter 1, shape |f32[2,128]| at ShapeIndex {}:
allocation 2: size 2048, maybe-live-out:
allocation 3: size 8, output shape is |(f32[1,128], f32[4,128])|, maybe-live-out:
allocation 4: size 64, color 1, preallocated-temp:
allocation 5: size 4096, preallocated-temp:
allocation 6: size 4, thread-local:
"""


def test_what_is_placed_has_the_memory_of_an_executable() -> None:
    placed = placed_worker.Placed.read("HloModule step", ASSIGNMENT, temporaries=4096)
    memory = ProgramMemory.of(placed.memory_analysis())
    assert memory == ProgramMemory(arguments=1536, outputs=2568, aliased=512, temporaries=4096)
    assert memory.total == 512 + 1024 + 2048 + 8 + 4096


def test_cases_are_programs_that_can_be_built() -> None:
    names = [(item.name, item.batch, item.held_out) for item in compiler_cases.ALL]
    assert len(set(names)) == len(names)
    assert sum(item.held_out for item in compiler_cases.ALL) >= 24
    for item in compiler_cases.ALL:
        assert item.program in other_kinds.OTHERS or item.program in registry.NAMES
        assert set(item.options) <= {"method", "microbatches", "stages"}


def test_every_program_is_placed_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    answers = [
        [("lowered", "text of F0"), ("skipped", None), ("lowered", "text of B0"), ("found", 1)],
        [],  # ends before it says anything
    ]
    told: list[Any] = []

    class Process:
        def __init__(self, number: int) -> None:
            self.number = number

        def kill(self) -> None:
            killed.append(self.number)

        def wait(self) -> int:
            return 3

    def started(step: bytes) -> tuple[Any, Process]:
        own, its = Pipe()
        for answer in answers[len(told)]:
            its.send(answer)
        its.close()
        told.append(step)
        return _Deaf(own), Process(len(told))

    monkeypatch.setattr(placed_worker, "_started", started)
    caller, its = Pipe()
    caller.send_bytes(b"a step")
    for message in ("F0", "skip", "B0", "go", "W0"):
        caller.send(message)
    assert placed_worker.hand_on(its) == 3
    assert told == [b"a step"] * 2 and killed == [1]
    heard = [caller.recv() for _ in range(5)]
    assert heard == [("ready", None), *answers[0]]


class _Deaf:
    """A connection into which is written what nobody reads."""

    def __init__(self, connection: Any) -> None:
        self.recv = connection.recv

    def send(self, value: Any) -> None:
        pass
