"""What a pipelined step is made of, as plain data: enough to schedule and simulate it again.

A plan holds no program. With these records it can still answer what another schedule, other links
or more devices would change (`Plan.simulate`).
"""

from __future__ import annotations

import dataclasses

from autopar.base.records import Record


@dataclasses.dataclass(frozen=True)
class ModelValue(Record):
    """An array that pieces of the step's program pass on; its number is its position.

    It is on each device of the mesh of its pipeline `stage`, and of one microbatch if every one has
    its own. The `label` is for people: a parameter's path, "activation", "gradient".
    """

    stage: int
    bytes_per_device: int
    per_microbatch: bool
    label: str


@dataclasses.dataclass(frozen=True)
class ModelPiece(Record):
    """A function of one stage's program, and what the cost model expects of one run of it.

    The seconds are those of its parts, one after the other: computing on one device, starting
    collectives of whatever size, and moving bytes that are in proportion to the rows of a
    microbatch, and others (parameters, gradients), and copying to and from the hosts' memory. The
    `name` is unique in the step, `when` is "prologue", "F", "B", "W" or "epilogue", `reads`,
    `writes` and `donates` are numbers of values, and `temporary_bytes` are needed on each device
    beside these.
    """

    name: str
    stage: int
    when: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    donates: tuple[int, ...]
    compute_seconds: float
    latency_seconds: float
    activation_seconds: float
    other_seconds: float
    temporary_bytes: int
    host_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepModel(Record):
    """A pipelined step without its equations.

    `transfers` are (source, target) values of what one stage sends to another; `inputs`, `outputs`
    and `donated` are numbers of the values that the caller gives, takes and gives up; `batch_rows`
    are the sizes of the batch dimensions of the arguments, each once, in order.
    """

    values: tuple[ModelValue, ...]
    pieces: tuple[ModelPiece, ...]
    transfers: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]
    batch_rows: tuple[int, ...]
