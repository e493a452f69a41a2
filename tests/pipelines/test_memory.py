"""Live bytes equal counts by hand and by following every buffer."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines.pipeline_models import Model, model

from autopar.passes.pipeline.buffer_memory import input_bytes, live_bytes
from autopar.passes.pipeline.instructions import Accumulate, Buffer, Free, PipelineProgram, Run
from autopar.passes.pipeline.simulate import simulate
from autopar.passes.schedules.make import make_schedule


def training_step() -> Model:
    """Two stages: 100 bytes of state each, 20 bytes kept, 10 bytes crossing."""
    made = Model()
    w0, x = made.given(0, "w", 100), made.given(0, "x", 4, loop=True)
    w1 = made.given(1, "w", 100)
    made.donated += [w0, x, w1]
    h, kept = made.value(0, "h", 10, loop=True), made.value(0, "kept", 20, loop=True)
    made.piece("F", 0, [w0, x], [h, kept])
    received, held = made.sent(h, 1, "h"), made.value(1, "held", 5, loop=True)
    made.piece("F", 1, [w1, received], [held])
    back, sum1 = made.value(1, "back", 10, loop=True), made.value(1, "sum", 100)
    made.piece("B", 1, [held, w1], [back, sum1], [held])
    sum0 = made.value(0, "sum", 100)
    made.piece("prologue", 0, [], [sum0], name="zeros")
    made.piece("B", 0, [w0, kept, made.sent(back, 0, "back"), sum0], [sum0], [kept, sum0])
    for stage, (weight, total) in enumerate([(w0, sum0), (w1, sum1)]):
        new = made.value(stage, "new", 100)
        made.piece("epilogue", stage, [weight, total], [new], [weight, total], f"update{stage}")
        made.outputs.append(new)
    return made


def test_live_bytes_equal_a_count_by_hand() -> None:
    program = training_step().emit(make_schedule("1f1b", 2, 2))
    assert input_bytes(program) == (108, 100)
    first, second = ([live.during for live in row] for row in live_bytes(program))
    assert list(zip((x.text(str).split()[0] for x in program.meshes[0]), first, strict=True)) == [
        ("run", 208),  # w, both x, and the sum as zeros
        ("run", 238),  # F0[0] adds h and what is kept
        ("free", 238),  # -x
        ("send", 234),
        ("free", 234),  # -h
        ("run", 254),  # F0[1]
        ("free", 254),  # -x
        ("send", 250),
        ("free", 250),  # -h
        ("recv", 250),  # w, sum, 2 kept, and 10 that arrive
        ("run", 250),  # B0[0] takes 20 kept and writes the sum in place
        ("free", 230),
        ("recv", 230),
        ("run", 230),
        ("free", 210),
        ("run", 200),  # the new parameters take the memory of the old ones
    ]
    assert [live.after for live in live_bytes(program)[0]][-2:] == [200, 100]
    assert list(zip((x.text(str).split()[0] for x in program.meshes[1]), second, strict=True)) == [
        ("recv", 110),
        ("run", 115),
        ("free", 115),
        ("run", 210),  # w, back and the first part, in which `held` went
        ("send", 210),
        ("free", 210),
        ("accumulate", 200),  # the sum begins as the part
        ("free", 200),
        ("recv", 210),  # w, the sum and what arrives
        ("run", 215),
        ("free", 215),
        ("run", 310),
        ("send", 310),
        ("free", 310),
        ("accumulate", 300),  # in place
        ("free", 300),
        ("run", 200),
    ]
    assert peaks(program) == (254, 310)
    assert peaks(program, {"B1": 1000, "absent": 7}) == (254, 1310)


@settings(deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2"]),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_live_bytes_are_those_of_the_buffers_that_are_there(name: str, p: int, m: int) -> None:
    program = model(p).emit(make_schedule(name, p, m))
    live = live_bytes(program)
    for mesh, expected in enumerate(followed(program)):
        assert [row.after for row in live[mesh]] == expected
        assert all(row.during >= row.after for row in live[mesh])
    timeline = simulate(program, 1.0, 0.5)
    assert timeline.peak_bytes == peaks(program)


def peaks(program: PipelineProgram, inside: dict[str, int] | None = None) -> tuple[int, ...]:
    return tuple(max(live.during for live in row) for row in live_bytes(program, inside))


def followed(program: PipelineProgram) -> list[list[int]]:
    rows = []
    for mesh, instructions in enumerate(program.meshes):
        here: set[Buffer] = set()
        begun: set[Buffer] = set()  # parts that are sums by another name
        for number in program.inputs:
            if program.mesh_of(number) == mesh:
                here.update(program.buffers_of(number))
        row = []
        for instruction in instructions:
            if isinstance(instruction, Run):
                here -= set(instruction.donates)
            if isinstance(instruction, Free):
                here -= set(instruction.buffers)
            if isinstance(instruction, Accumulate) and instruction.target not in here:
                begun.add(instruction.addend)
            here |= set(instruction.writes)
            row.append(
                sum(program.value_of[buffer.value].bytes_per_device for buffer in here - begun)
            )
        rows.append(row)
    return rows


def test_an_update_that_donates_nothing_needs_both_versions() -> None:
    made = Model()
    total = made.value(0, "sum", 100)
    made.piece("prologue", 0, [], [total], name="zeros")
    made.piece("F", 0, [total], [total])
    made.outputs.append(total)
    program = made.emit(make_schedule("inference", 1, 2))
    assert [tuple(row) for row in live_bytes(program)[0]] == [(100, 100), (200, 100), (200, 100)]
    assert not any(isinstance(x, Accumulate) for x in program.meshes[0])


def test_a_mesh_without_instructions_holds_its_inputs() -> None:
    made = Model()
    made.given(1, "state", 9)
    program = made.emit(make_schedule("inference", 2, 1))
    assert simulate(program, 1.0).peak_bytes == (0, 9)
