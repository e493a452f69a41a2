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

    Args:
      stage: the pipeline stage that holds it.
      bytes_per_device: on each device of the stage's mesh (of one microbatch, if so).
      per_microbatch: whether every microbatch has one of its own.
      label: for people: a parameter's path, "activation", "gradient".
    """

    stage: int
    bytes_per_device: int
    per_microbatch: bool
    label: str


@dataclasses.dataclass(frozen=True)
class ModelPiece(Record):
    """A function of one stage's program, and what the cost model expects of one run of it.

    The seconds are those of its parts, one after the other.

    Args:
      name: unique in the step.
      stage: the pipeline stage that runs it.
      when: "prologue", "F", "B", "W" or "epilogue".
      reads, writes, donates: numbers of values.
      compute_seconds: of computing on one device.
      latency_seconds: of starting collectives, whatever their size.
      activation_seconds: of moving bytes that are in proportion to the rows of a microbatch.
      other_seconds: of moving other bytes (parameters, gradients).
      temporary_bytes: what it needs on each device beside what it reads and writes.
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


@dataclasses.dataclass(frozen=True)
class StepModel(Record):
    """A pipelined step without its equations.

    Args:
      values: what pieces pass on.
      pieces: what the meshes run.
      transfers: (source, target) values of what one stage sends to another.
      inputs, outputs, donated: numbers of the values that the caller gives, takes and gives up.
      batch_rows: the sizes of the batch dimensions of the arguments, each once, in order.
    """

    values: tuple[ModelValue, ...]
    pieces: tuple[ModelPiece, ...]
    transfers: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]
    batch_rows: tuple[int, ...]
