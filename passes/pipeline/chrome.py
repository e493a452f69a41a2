"""A timeline as a trace for chrome://tracing and Perfetto: a row per mesh, memory as counters.

The format is the Trace Event Format's JSON object: complete events ("X"), flows ("s", "f") from
each send to its recv, counters ("C") of live bytes, and metadata ("M"); times are in microseconds.
"""

from __future__ import annotations

from typing import Any

from autopar.passes.pipeline.instructions import Free, Recv, Run, Send, buffer_names
from autopar.passes.pipeline.timeline import Timeline

_MICROSECONDS = 1e6


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace of a timeline, ready for `json.dump`.

    Args:
      timeline: a simulated or a measured one; both give the same rows and names.
    """
    program = timeline.program
    names = buffer_names(program.values)
    rows: list[dict[str, Any]] = [_metadata("process_name", 0, program.schedule.name)]
    for mesh in range(len(program.meshes)):
        rows.append(_metadata("thread_name", mesh, f"mesh {mesh}"))
        for seconds, size in timeline.bytes_over_time(mesh):
            rows.append(
                {
                    "ph": "C",
                    "name": f"mesh {mesh}: bytes per device",
                    "pid": 0,
                    "tid": mesh,
                    "ts": seconds * _MICROSECONDS,
                    "args": {"bytes": size},
                }
            )
    for event in timeline.events:
        instruction = timeline.instruction(event)
        if isinstance(instruction, Free):
            continue
        place = {"pid": 0, "tid": event.mesh}
        rows.append(
            {
                "ph": "X",
                "name": instruction.label,
                "cat": instruction.kind
                if isinstance(instruction, Run)
                else type(instruction).__name__,
                "ts": event.start * _MICROSECONDS,
                "dur": event.seconds * _MICROSECONDS,
                "args": {"index": event.index, "instruction": instruction.text(names)},
                **place,
            }
        )
        if isinstance(instruction, Send | Recv):
            ends = isinstance(instruction, Recv)
            flow = {
                "ph": "f" if ends else "s",
                "name": "transfer",
                "cat": "transfer",
                "id": instruction.tag,
                "ts": (event.start if ends else event.end) * _MICROSECONDS,
                **place,
            }
            rows.append({**flow, "bp": "e"} if ends else flow)
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _metadata(name: str, mesh: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": 0, "tid": mesh, "args": {"name": value}}
