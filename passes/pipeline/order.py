"""One order for all instructions of all meshes, and what makes meshes wait for each other.

A process that drives several meshes enqueues their programs in this order. It is the order in which
instructions could start if every run took the same time, so no mesh is starved while another's list
is enqueued far ahead, and all meshes' collectives start in an order on which all agree.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from autopar.base.errors import ScheduleError
from autopar.passes.pipeline.instructions import Instruction, Names, Recv, Run, Send
from autopar.passes.schedules.schedule import in_turns


def dispatch_order(
    meshes: Sequence[Sequence[Instruction]], names: Names = str
) -> tuple[tuple[int, int], ...]:
    """(mesh, index) of every instruction, each `Recv` after its `Send`.

    Raises:
      ScheduleError: the meshes wait for each other in a cycle, or for something that nobody sends.
    """
    clock = [(0, 0)] * len(meshes)  # runs, and instructions, on the longest path up to here
    sent: dict[int, tuple[int, int]] = {}
    keyed: list[tuple[int, int, int, int]] = []
    for mesh, index, instruction in dispatchable(meshes, sent, names):
        start = clock[mesh]
        if isinstance(instruction, Recv):
            start = max(start, sent[instruction.tag])
        keyed.append((*start, mesh, index))
        clock[mesh] = (start[0] + isinstance(instruction, Run), start[1] + 1)
        if isinstance(instruction, Send):
            sent[instruction.tag] = clock[mesh]
    return tuple((mesh, index) for _, _, mesh, index in sorted(keyed))


def dispatchable(
    meshes: Sequence[Sequence[Instruction]], sent: Container[int], names: Names
) -> Iterator[tuple[int, int, Instruction]]:
    """(mesh, index, instruction) of every list in order, one mesh after the other.

    A `Recv` waits until its tag is in `sent`, to which the caller adds those that it meets.

    Raises:
      ScheduleError: no mesh can go on, and some have not come to their ends.
    """
    position = [0] * len(meshes)
    for mesh, instruction in in_turns(
        meshes, lambda x: not isinstance(x, Recv) or x.tag in sent, position
    ):
        yield mesh, position[mesh], instruction
    require_end(meshes, position, names)


def require_end(
    meshes: Sequence[Sequence[Instruction]], position: Sequence[int], names: Names
) -> None:
    """Raise if meshes are stuck before the ends of their lists, and say who waits for whom."""
    mesh = next((m for m, xs in enumerate(meshes) if position[m] < len(xs)), None)
    if mesh is None:
        return
    places = ((m, i, x) for m, xs in enumerate(meshes) for i, x in enumerate(xs))
    sender = {x.tag: (m, i) for m, i, x in places if isinstance(x, Send)}
    what = "The instructions deadlock."
    sentences: dict[int, str] = {}
    while mesh not in sentences:
        recv = meshes[mesh][position[mesh]]
        assert isinstance(recv, Recv), recv
        buffers = ", ".join(map(names, recv.buffers))
        reader = _first_run(meshes[mesh][position[mesh] :], "its end")
        waiting = f"mesh {mesh} waits for {buffers} from mesh {recv.source} before {reader}"
        if recv.tag not in sender:
            raise ScheduleError(what, why=f"{waiting}, and no mesh sends it.")
        home, index = sender[recv.tag]
        maker = _first_run(reversed(meshes[home][:index]), "its start")
        sentences[mesh] = f"- {waiting}, sent after {maker}, which mesh {home} has not reached"
        mesh = home
        if position[home] > index:
            raise ScheduleError(what, why=f"{waiting}, which has been received already.")
    cycle = list(sentences)[list(sentences).index(mesh) :]
    raise ScheduleError(
        what,
        why="meshes wait for each other in a cycle:\n" + "\n".join(sentences[m] for m in cycle),
        hint="let the schedule run each task after those whose values its stage receives.",
    )


def _first_run(instructions: Iterable[Instruction], default: str) -> str:
    return next((x.label for x in instructions if isinstance(x, Run)), default)
