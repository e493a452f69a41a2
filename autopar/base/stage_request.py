"""`Stage`: what a user asks of one pipeline stage; and the values of the option `stages`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import Any

from autopar.base import option_values as values
from autopar.base.errors import OptionError, did_you_mean
from autopar.base.methods import check_method
from autopar.base.option_values import impossible, integer, number_hint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a pipeline, for `stages=[autopar.Stage(...), ...]`, first to last.

    What is not said is as the step's options have it.

    Args:
      layers: a number of the layers that autopar cuts the step into (`plan.pipeline.boundaries`
        counts them; all must be given away), or a share between 0 and 1 of the step's FLOPs: the
        stage gets about that much, cut where the fewest bytes cross. All stages say it in the same
        way; None: shares in proportion to the devices.
      devices: how many the stage has; None: as many as its logical mesh, or an equal part of what
        the others leave. A stage is part of a node or some whole nodes: in the order of the stages,
        or with the largest first.
      logical_mesh: the shape of the stage's mesh.
      method: as the option of this name, for this stage.
      remat: "none", "full" or "auto", for this stage.

    Raises:
      OptionError: a value is not possible.

    >>> Stage(layers=0.25, logical_mesh=(1, 2), method="zero2")
    Stage(layers=0.25, devices=2, logical_mesh=(1, 2), method='zero2')
    """

    layers: int | float | Fraction | None = None
    devices: int | None = None
    logical_mesh: tuple[int, ...] | None = None
    method: str | None = None
    remat: str | None = None

    def __post_init__(self) -> None:
        mesh, devices = values.logical_mesh(self.logical_mesh), self.devices
        if devices is not None:
            devices = integer(devices, "devices", at_least=1)
        if mesh is not None:
            if devices not in (None, math.prod(mesh)):
                why = f"these are {math.prod(mesh)} devices."
                raise impossible("logical_mesh", mesh, f"the stage has {devices} devices, {why}")
            devices = math.prod(mesh)
        if self.method is not None:
            check_method(self.method)
        object.__setattr__(self, "layers", _layers(self.layers))
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "logical_mesh", mesh)
        if self.remat is not None:
            values.remat(self.remat)

    def __repr__(self) -> str:
        said = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return f"Stage({', '.join(f'{name}={x!r}' for name, x in said if x is not None)})"

    def to_dict(self) -> dict[str, Any]:
        """What is said, as JSON values."""
        said = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {n: list(x) if isinstance(x, tuple) else x for n, x in said if x is not None}


def _layers(value: Any) -> int | float | None:
    if value is None:
        return None
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if 0 < number < 1:
        return number
    if number >= 1 and number == int(number) and not isinstance(value, float):
        return int(value)
    why = "it must be a number of layers, or a share between 0 and 1 of the step's FLOPs."
    raise impossible("layers", value, why)


Asked = int | str | tuple[int, ...] | tuple[Stage, ...]
"""The values of the option `stages`, in one form."""


def parse_stages(value: Any) -> Asked:
    """Check "auto", a number of stages, the layers at which later stages begin, or `Stage`s.

    Raises:
      OptionError: it is none of these, or the stages' layers cannot be those of one step.
    """
    why = (
        'it must be "auto", a number of stages, layer boundaries in ascending order, or a list of '
        "autopar.Stage."
    )
    if value is None or (isinstance(value, str) and value == "auto"):
        return "auto"
    if isinstance(value, str):
        raise impossible("stages", value, why, number_hint("stages", value))
    if isinstance(value, (Stage, Mapping)):
        value = [value]
    if not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        try:
            return integer(value, "stages", at_least=1)
        except OptionError:
            raise impossible("stages", value, why) from None
    items = list(value)
    if items and all(isinstance(item, (Stage, Mapping)) for item in items):
        return _several([x if isinstance(x, Stage) else _stage_of(x) for x in items])
    try:
        found = tuple(integer(layer, "stages", at_least=1) for layer in items)
    except OptionError:
        raise impossible("stages", value, why) from None
    if not found or any(b <= a for a, b in itertools.pairwise(found)):
        raise impossible("stages", list(found), why)
    return found


def _stage_of(said: Mapping[str, Any]) -> Stage:
    """A stage that is said as a mapping."""
    names = [each.name for each in dataclasses.fields(Stage)]
    for name in said:
        if name not in names:
            why = f"a stage has {', '.join(names)}, and no {name!r}."
            raise impossible("stages", dict(said), why, did_you_mean(name, names))
    return Stage(**said)


def _several(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    if len(stages) == 1:
        why = "one stage has no pipeline."
        hint = "say logical_mesh= and method= of the step instead."
        raise impossible("stages", list(stages), why, hint)
    if len({type(stage.layers) for stage in stages}) > 1:
        said = ", ".join(str(stage.layers) for stage in stages)
        raise OptionError(
            f"The stages' layers cannot be told from layers={said}.",
            where=f"stages of {len(stages)}",
            why="some stages count layers, and others give shares or say nothing.",
            hint="give every stage a number of layers, or every stage a share, or none.",
        )
    shares = [stage.layers for stage in stages if isinstance(stage.layers, float)]
    if shares and not math.isclose(sum(shares), 1, abs_tol=1e-3):
        raise OptionError(
            f"The stages' shares add up to {sum(shares):.4g}.",
            where=f"layers={', '.join(f'{share:.4g}' for share in shares)}",
            why="every share is a part of the whole step, so together they are 1.",
        )
    return tuple(stages)
