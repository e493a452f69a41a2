"""Every emitted program computes what its pieces say, and its buffers live exactly as long."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines.pipeline_models import Model, evaluate, execute, model

from autopar.base.errors import ScheduleError
from autopar.passes.pipeline.instructions import (
    Accumulate,
    Buffer,
    Free,
    PipelineProgram,
    Recv,
    Reshard,
    Run,
    Send,
    ValueTransfer,
)
from autopar.passes.schedules.make import make_schedule
from autopar.passes.schedules.schedule import Schedule

NAMES = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "inference")


def schedule_of(name: str, p: int, m: int, v: int = 1) -> Schedule:
    chunked = name in ("interleaved_1f1b", "inference")
    m = m * p if name == "interleaved_1f1b" else m
    return make_schedule(name, p, m, num_chunks=v if chunked else 1)


@settings(deadline=None)
@given(
    st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans()
)
def test_programs_compute_what_their_pieces_do(
    name: str, p: int, m: int, v: int, weights: bool
) -> None:
    schedule = schedule_of(name, p, m, v)
    made = model(schedule.num_stages, backward=not schedule.forward_only, weights=weights)
    program = made.emit(schedule)
    assert execute(program) == evaluate(made, schedule.num_microbatches)
    assert_buffers_are_used_well(program)


def assert_buffers_are_used_well(program: PipelineProgram) -> None:
    """Counts, list by list, what `verify` proves in another way."""
    sends = {}
    recvs = {}
    for mesh, instructions in enumerate(program.meshes):
        written: Counter[Buffer] = Counter()
        freed: Counter[Buffer] = Counter()
        here = [n for n in program.inputs if program.mesh_of(n) == mesh]
        kept = {b for n in here if n not in program.donated for b in program.buffers_of(n)}
        written.update(b for n in here for b in program.buffers_of(n))
        for instruction in instructions:
            assert all(written[b] and not freed[b] for b in instruction.reads), instruction
            if isinstance(instruction, Run):
                assert set(instruction.donates) <= set(instruction.reads) - kept
                freed.update(set(instruction.donates) - set(instruction.writes))
            if isinstance(instruction, Free):
                freed.update(instruction.buffers)
            if isinstance(instruction, Send):
                assert instruction.tag not in sends
                sends[instruction.tag] = (mesh, instruction.to, len(instruction.buffers))
            if isinstance(instruction, Recv):
                assert instruction.tag not in recvs
                recvs[instruction.tag] = (instruction.source, mesh, len(instruction.buffers))
            written.update(instruction.writes)
        outputs = {
            b for n in program.outputs if program.mesh_of(n) == mesh for b in program.buffers_of(n)
        }
        assert {b for b, count in freed.items() if count != 1} == set()
        assert set(freed) == set(written) - outputs - kept
    assert sends == recvs
    assert all(home != to for home, to, _ in sends.values())
    assert sorted(program.order) == [
        (mesh, i) for mesh, row in enumerate(program.meshes) for i in range(len(row))
    ]


def test_the_dispatch_order_starves_no_mesh() -> None:
    """Runs are dispatched in waves: none before what could start a whole run earlier."""
    program = model(4).emit(make_schedule("1f1b", 4, 6))
    level: dict[tuple[int, int], int] = {}
    sent: dict[int, int] = {}
    clock = [0] * 4
    for mesh, index in program.order:
        match program.meshes[mesh][index]:
            case Recv(tag):
                clock[mesh] = max(clock[mesh], sent[tag])
            case Send(tag):
                sent[tag] = clock[mesh]
            case Run():
                level[mesh, index] = clock[mesh]
                clock[mesh] += 1
    assert list(level.values()) == sorted(level.values())


def test_what_goes_to_one_mesh_is_packed_and_a_shared_source_travels_once() -> None:
    program = model(4).emit(make_schedule("interleaved_1f1b", 2, 2, num_chunks=2))
    first = [x for x in program.meshes[0] if isinstance(x, Run | Send) and x.label != "mask"]
    at = next(i for i, x in enumerate(first) if isinstance(x, Run) and x.label == "F0[0]")
    send = first[at + 1]
    assert isinstance(send, Send)
    # The activation for stage 1 and the skip connection for stage 3, both on mesh 1.
    assert [program.value_of[b.value].label for b in send.buffers] == ["activation.0", "skip.0"]
    assert not isinstance(first[at + 2], Send)

    made = Model()
    source = made.given(0, "mask")
    targets = [made.sent(source, 1, "here"), made.sent(source, 3, "there")]
    for stage, target in zip((1, 3), targets, strict=True):
        out = made.value(stage, "out", loop=True)
        made.piece("F", stage, [target], [out])
        made.outputs.append(out)
    program = made.emit(make_schedule("inference", 2, 2, num_chunks=2))
    assert program.meshes[0] == (Send(0, 1, (Buffer(source, None),)),)
    received = program.meshes[1][:2]
    assert received == (
        Recv(0, 0, (Buffer(targets[0], None),)),
        Reshard(Buffer(targets[0], None), Buffer(targets[1], None)),
    )
    assert execute(program) == evaluate(made, 2)


def test_once_a_step_values_cross_once_and_apart_from_microbatches() -> None:
    for name in ("1f1b", "zb_h1"):
        program = model(2).emit(make_schedule(name, 2, 4))
        crossing = Counter(
            program.value_of[b.value].label
            for row in program.meshes
            for x in row
            if isinstance(x, Send)
            for b in x.buffers
        )
        assert crossing == {
            "param.0": 1,  # tied: needed on both stages
            "mask.0": 1,
            "rounded.1": 1,
            "activation.0": 4,
            "skip.0": 4,
            "gradient.1": 4,
            "tied_sum.1": 1,
            "norm.1": 1,
            "whole.0": 1,
            "updated.0": 1,
        }
        for row in program.meshes:
            for x in row:
                if isinstance(x, Send):
                    assert len({b.microbatch for b in x.buffers}) == 1


def test_stages_of_one_mesh_reshard_and_send_nothing() -> None:
    program = model(3).emit(make_schedule("interleaved_1f1b", 1, 2, num_chunks=3))
    kinds = Counter(type(x) for x in program.meshes[0])
    assert kinds[Send] == kinds[Recv] == 0
    assert kinds[Reshard] > 0


def test_weight_gradients_follow_their_backward_pass_where_the_schedule_has_no_split() -> None:
    program = model(2).emit(make_schedule("1f1b", 2, 2))
    runs = [x.label for x in program.meshes[1] if isinstance(x, Run) and x.microbatch is not None]
    assert runs == ["F1[0]", "B1[0]", "W1[0]", "F1[1]", "B1[1]", "W1[1]"]
    rows = program.meshes[1]
    at = next(i for i, x in enumerate(rows) if isinstance(x, Run) and x.label == "B1[0]")
    # The previous stage gets its gradient before this mesh goes on.
    assert isinstance(rows[at + 1], Send)


def test_prologues_and_epilogues_go_back_and_forth() -> None:
    program = model(2).emit(make_schedule("1f1b", 2, 1))
    labels = [
        program.meshes[mesh][index].label
        for mesh, index in program.order
        if isinstance(program.meshes[mesh][index], Run)
    ]
    for before, after in [
        ("mask", "rounded"),
        ("rounded", "slices"),
        ("slices", "F0[0]"),
        ("norm1", "whole"),
        ("whole", "update1"),
    ]:
        assert labels.index(before) < labels.index(after)


def test_donation_takes_what_nothing_else_needs() -> None:
    made = Model()
    state = made.given(0, "state", 8)
    kept = made.given(0, "kept", 8)
    new = made.value(0, "new", 8)
    metric = made.value(0, "metric", 1)
    made.piece("epilogue", 0, [state, kept], [new], [state, kept], name="update")
    made.piece("epilogue", 0, [state], [metric], [state], name="metric")
    made.outputs += [new, metric]
    made.donated.append(state)
    program = made.emit(make_schedule("inference", 1, 1))
    update, metric_run = program.meshes[0]
    assert isinstance(update, Run)
    assert isinstance(metric_run, Run)
    assert update.donates == ()  # `kept` is the caller's, and `state` is read again
    assert metric_run.donates == (Buffer(state, None),)


def test_an_unread_donated_input_goes_at_once_and_unread_values_right_away() -> None:
    made = Model()
    unread = made.given(0, "unread")
    made.donated.append(unread)
    dead = made.value(0, "dead", loop=True)
    made.sent(dead, 1, "never read")
    made.piece("F", 0, [], [dead])
    program = made.emit(make_schedule("inference", 2, 1))
    run = Run("F0", 0, "F", 0, (), (Buffer(dead, 0),))
    assert program.meshes == (
        (Free((Buffer(unread, None),)), run, Free((Buffer(dead, 0),))),
        (),
    )


def test_a_received_value_is_passed_on_from_where_it_was_made() -> None:
    made = Model()
    source = made.value(0, "made", loop=True)
    made.piece("F", 0, [], [source])
    passed = made.sent(made.sent(source, 1, "passing"), 2, "passed")
    out = made.value(2, "out", loop=True)
    made.piece("F", 2, [passed], [out])
    made.outputs.append(out)
    program = made.emit(make_schedule("inference", 3, 2))
    assert program.meshes[1] == ()
    assert [x.to for x in program.meshes[0] if isinstance(x, Send)] == [2, 2]
    assert execute(program) == evaluate(made, 2)


def test_an_output_may_be_an_input_or_arrive_from_elsewhere() -> None:
    made = Model()
    through = made.given(0, "through")
    arrives = made.sent(through, 1, "arrives")
    made.outputs += [through, arrives]
    program = made.emit(make_schedule("inference", 2, 1))
    assert program.meshes == (
        (Send(0, 1, (Buffer(through, None),)),),
        (Recv(0, 0, (Buffer(arrives, None),)),),
    )


def test_programs_print_with_their_labels() -> None:
    made = Model()
    state = made.given(0, "state", 8)
    x = made.given(0, "x", 4, loop=True)
    made.donated += [state, x]
    h = made.value(0, "h", 2, loop=True)
    made.piece("F", 0, [state, x], [h], [x])
    total = made.value(1, "total")
    made.piece("F", 1, [made.sent(h, 1, "h")], [total])
    made.outputs.append(total)
    assert str(made.emit(make_schedule("inference", 2, 2))).splitlines() == [
        "inference, 2 stages on 2 meshes, 2 microbatches",
        "mesh 0, 16 B of inputs per device:",
        "  0  run        F0[0]: (state.0, x.0[0]) -> (h.0[0]) donates x.0[0]",
        "  1  send       #0 to mesh 1: h.0[0]",
        "  2  free       h.0[0]",
        "  3  run        F0[1]: (state.0, x.0[1]) -> (h.0[1]) donates x.0[1]",
        "  4  free       state.0",
        "  5  send       #1 to mesh 1: h.0[1]",
        "  6  free       h.0[1]",
        "mesh 1, 0 B of inputs per device:",
        "  0  recv       #0 from mesh 0: h.1[0]",
        "  1  run        F1[0]: (h.1[0]) -> (total.1[0])",
        "  2  free       h.1[0]",
        "  3  accumulate total.1 += total.1[0]",
        "  4  free       total.1[0]",
        "  5  recv       #1 from mesh 0: h.1[1]",
        "  6  run        F1[1]: (h.1[1]) -> (total.1[1])",
        "  7  free       h.1[1]",
        "  8  accumulate total.1 += total.1[1]",
        "  9  free       total.1[1]",
    ]


def test_a_value_that_a_mesh_reads_too_early_deadlocks_and_is_named() -> None:
    made = Model()
    backwards = made.value(1, "backwards", loop=True)
    made.piece("F", 1, [], [backwards])
    out = made.value(0, "out", loop=True)
    made.piece("F", 0, [made.sent(backwards, 0, "early")], [out])
    made.sent(out, 1, "late")
    made.outputs.append(out)
    made.emit(make_schedule("inference", 2, 1))  # stage 1 waits for nothing: this runs
    made.pieces[0] = replace(made.pieces[0], reads=(made.values[-1].number,))
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        made.emit(make_schedule("inference", 2, 1))
    assert str(caught.value).splitlines()[1:4] == [
        "  why:   meshes wait for each other in a cycle:",
        "         - mesh 0 waits for early.0[0] from mesh 1 before F0[0], sent after F1[0], which",
        "         mesh 1 has not reached",
    ]


def test_accumulated_sums_are_sent_after_their_last_part() -> None:
    program = model(2).emit(make_schedule("zb_h2", 2, 3))
    row = program.meshes[1]
    tied = next(n for n, v in program.value_of.items() if v.label == "tied_sum.1" and v.stage == 1)
    at = next(
        i for i, x in enumerate(row) if isinstance(x, Send) and Buffer(tied, None) in x.buffers
    )
    parts = [i for i, x in enumerate(row) if isinstance(x, Accumulate) and x.target.value == tied]
    assert len(parts) == 3
    assert max(parts) < at


class TestRefusals:
    """Pieces that do not fit together are named."""

    def base(self) -> Model:
        made = Model()
        made.given(0, "weight")
        made.value(0, "h", loop=True)
        made.value(1, "x", loop=True)
        made.piece("F", 0, [0], [1])
        made.piece("F", 1, [2], [])
        made.transfers.append(ValueTransfer(1, 2))
        return made

    def refused(self, made: Model, words: str, name: str = "inference") -> None:
        with pytest.raises(ScheduleError, match=words):
            made.emit(make_schedule(name, 2, 2))

    def test_the_base_is_accepted(self) -> None:
        assert len(self.base().emit(make_schedule("inference", 2, 2)).meshes) == 2

    def test_backward_pieces_under_inference(self) -> None:
        made = self.base()
        made.piece("B", 1, [], [])
        self.refused(made, "has no backward pass, but the program has one")

    def test_unknown_numbers(self) -> None:
        for part in ("inputs", "outputs", "donated"):
            made = self.base()
            getattr(made, part).append(9)
            self.refused(made, f"numbers in {part} are unknown")
        made = self.base()
        made.transfers.append(ValueTransfer(1, 9))
        self.refused(made, "There is no value 9")
        made = self.base()
        made.piece("epilogue", 0, [9], [])
        self.refused(made, "There is no value 9")

    def test_numbers_twice(self) -> None:
        made = self.base()
        made.values.append(made.values[0])
        self.refused(made, "same number")

    def test_donating_what_is_no_input(self) -> None:
        made = self.base()
        made.donated.append(1)
        self.refused(made, "Only inputs can be donated")

    def test_stages_that_do_not_exist(self) -> None:
        made = self.base()
        made.value(2, "far")
        self.refused(made, "is on stage 2 of 2")
        made = self.base()
        made.piece("epilogue", 2, [], [])
        self.refused(made, "Stage 2 does not exist")

    def test_a_value_of_another_stage_without_a_transfer(self) -> None:
        made = self.base()
        made.piece("epilogue", 1, [0], [], name="update")
        self.refused(made, "uses it without a transfer")

    def test_pieces_twice(self) -> None:
        made = self.base()
        made.piece("F", 0, [], [], name="other")
        self.refused(made, "2 pieces of kind F")
        made = self.base()
        made.piece("epilogue", 0, [], [], name="F0")
        self.refused(made, "2 pieces have the name 'F0'")

    def test_donating_what_is_not_read(self) -> None:
        made = self.base()
        made.piece("epilogue", 0, [], [], [0])
        self.refused(made, "donate only what it reads")

    def test_writing_twice(self) -> None:
        made = self.base()
        made.piece("epilogue", 0, [], [1])
        self.refused(made, "written more than once")
        made = self.base()
        twice = made.value(0, "twice")
        made.piece("epilogue", 0, [], [twice], name="a")
        made.piece("epilogue", 0, [], [twice], name="b")
        self.refused(made, "two epilogue pieces")

    def test_overwriting_an_input_that_the_caller_keeps(self) -> None:
        made = self.base()
        made.piece("epilogue", 0, [0], [0])
        self.refused(made, "input that the caller keeps, and is overwritten")

    def test_a_sum_both_in_place_and_added(self) -> None:
        made = self.base()
        both = made.value(0, "both")
        made.pieces[0] = replace(made.pieces[0], writes=(1, both))
        made.piece("B", 0, [both], [both])
        self.refused(made, "in place by one piece and added to by another", "1f1b")

    def test_reading_a_sum_while_it_changes(self) -> None:
        made = self.base()
        running = made.value(0, "running")
        made.pieces[0] = replace(made.pieces[0], writes=(1, running))
        made.piece("B", 0, [running], [])
        self.refused(made, "changes with every microbatch", "1f1b")

    def test_transfers_that_cannot_be(self) -> None:
        made = self.base()
        made.transfers.append(ValueTransfer(1, made.value(0, "same", loop=True)))
        self.refused(made, "is on the stage from which")
        made = self.base()
        made.transfers.append(ValueTransfer(1, made.value(1, "whole")))
        self.refused(made, "exists per microbatch where its source does not, or vice versa")
        made = self.base()
        made.transfers.append(ValueTransfer(1, 2))
        self.refused(made, "received and also an input, written or received again")
        made = self.base()
        there, back = made.value(1, "there"), made.value(0, "back")
        made.transfers += [ValueTransfer(there, back), ValueTransfer(back, there)]
        self.refused(made, "in a circle")

    def test_epilogues_in_a_circle(self) -> None:
        made = self.base()
        a, b = made.value(0, "a"), made.value(1, "b")
        made.piece("epilogue", 0, [made.sent(b, 0, "b")], [a], name="one")
        made.piece("epilogue", 1, [made.sent(a, 1, "a")], [b], name="two")
        self.refused(made, "epilogue pieces one, two need each other")

    def test_reading_what_nobody_writes(self) -> None:
        made = self.base()
        made.piece("epilogue", 0, [made.value(0, "ghost")], [])
        with pytest.raises(ScheduleError, match=r"ghost\.0 is read, but it is not there") as caught:
            made.emit(make_schedule("inference", 2, 2))
        assert "no piece of its stage writes it" in str(caught.value)

    def test_an_output_that_nobody_writes(self) -> None:
        made = self.base()
        made.outputs.append(made.value(1, "ghost"))
        self.refused(made, r"Output ghost\.1 is not there at the end of mesh 1")

    def test_reading_on_the_same_mesh_before_the_last_write(self) -> None:
        made = Model()
        total = made.value(0, "total")
        made.piece("F", 0, [], [total])
        made.piece("F", 1, [made.sent(total, 1, "total")], [])
        with pytest.raises(ScheduleError, match="before value 0, from which it is made"):
            made.emit(make_schedule("inference", 1, 2, num_chunks=2))
