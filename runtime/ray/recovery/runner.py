"""What a recovery asks of the actors of a step: the log knows them by these names alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np

from autopar.arrays.ray_array import Keeper, LeafPlace, RayArray, Resident
from autopar.base.errors import StageError


class Coming(Protocol):
    """Copies of arrays that are on their way."""

    def is_there(self) -> bool:
        """Whether all have arrived, or will not come; does not wait."""

    def get(self) -> list[np.ndarray] | None:
        """The arrays; None: a step before failed. Raises a `RayError` if an actor is lost."""


class Unfinished(Protocol):
    """Arrays that are being written to files."""

    is_done: bool

    def is_settled(self) -> bool:
        """Whether it was written, or never can be; does not wait."""


class ToldSteps(Protocol):
    """The steps that the actors were told of."""

    serial: int

    def finish(self) -> None:
        """Wait until all steps are done. Raises a `StageError` if one failed."""

    def called_off(self, serial: int) -> bool:
        """Whether a step was given up, so that its results will not come."""


class HeldArrays(Protocol):
    """The arrays that the actors have."""

    def copies(self, residents: Sequence[Resident]) -> Coming:
        """Ask for the numbers of arrays as they are after the steps so far."""

    def lost_array(self) -> StageError:
        """The error for an array of a step that was given up."""


class Runner(Protocol):
    """What runs a step, and puts arrays where it wants them."""

    @property
    def steps(self) -> ToldSteps:
        """What the actors were told."""

    @property
    def arrays(self) -> HeldArrays:
        """What they have."""

    def step(
        self, leaves: Sequence[Any], donated: Collection[int], keeper: Keeper
    ) -> list[RayArray]:
        """One step that takes over the leaves at the positions `donated`."""

    def place(self, leaf: Any, place: LeafPlace, weak: bool, keeper: Keeper) -> RayArray:
        """A leaf, copied to a place; `weak`: JAX promotes it as it does a Python number."""

    def make(
        self, function: bytes, places: Sequence[LeafPlace], weak: Sequence[bool], keeper: Keeper
    ) -> list[RayArray]:
        """What a pickled function gives: each result in its place, with its weak type."""

    def save(self, saving: Any, arrays: Sequence[RayArray]) -> None:
        """Let the actors write arrays, as an `Unfinished` says."""
