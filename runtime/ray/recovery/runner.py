"""What a recovery asks of the actors of a step: the log knows them by these names alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np

from autopar.arrays.ray_array import Keeper, LeafPlace, RayArray, Resident
from autopar.base.errors import StageError


class Coming(Protocol):
    """Copies of arrays that are on their way; see `driver.fetch.Copies`."""

    def is_there(self) -> bool: ...
    def get(self) -> list[np.ndarray] | None: ...


class Unfinished(Protocol):
    """Arrays that are being written to files; see `driver.save.Saving`."""

    is_done: bool

    def is_settled(self) -> bool: ...


class ToldSteps(Protocol):
    """The steps that the actors were told of; see `driver.step_queue.StepQueue`."""

    serial: int

    def finish(self) -> None: ...
    def called_off(self, serial: int) -> bool: ...


class HeldArrays(Protocol):
    """The arrays that the actors have; see `driver.resident_arrays.ResidentArrays`."""

    def copies(self, residents: Sequence[Resident]) -> Coming: ...
    def lost_array(self) -> StageError: ...


class Runner(Protocol):
    """What runs a step, and puts arrays where it wants them; see `driver.running.Running`."""

    @property
    def steps(self) -> ToldSteps: ...
    @property
    def arrays(self) -> HeldArrays: ...
    def step(
        self, leaves: Sequence[Any], donated: Collection[int], keeper: Keeper
    ) -> list[RayArray]: ...
    def place(self, leaf: Any, place: LeafPlace, weak: bool, keeper: Keeper) -> RayArray: ...
    def make(
        self, function: bytes, places: Sequence[LeafPlace], weak: Sequence[bool], keeper: Keeper
    ) -> list[RayArray]: ...
    def save(self, saving: Any, arrays: Sequence[RayArray]) -> None: ...
