"""Where a planned step has its leaves, and which of them an argument of another function is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import Mesh, NamedSharding

from autopar.arrays.ray_array import MeshSharding, RayArray, RaySharding
from autopar.arrays.split_array import SplitArray, SplitSharding
from autopar.arrays.typed_keys import is_key
from autopar.base.errors import DeviceError
from autopar.compiled_only import CompiledOnly
from autopar.executable import Executable
from autopar.leaf_paths import common_parts, path_parts
from autopar.passes.trace.signature import shape_of
from autopar.ray_executable import RayExecutable
from autopar.runtime.followed import MeshProgram
from autopar.runtime.on_meshes import Cut, HeldRows, Home

if TYPE_CHECKING:
    from autopar.runtime.ray.driver.ray_step import RayStep


@dataclass(frozen=True)
class HeldLeaf:
    """A leaf of the step's state: its path in parts, and where it lies."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    home: int | HeldRows


@dataclass(frozen=True)
class HeldBatch:
    """A leaf of the step's batch, and how it is cut."""

    path: tuple[str, ...]
    ndim: int
    cut: Cut


@dataclass(frozen=True)
class HeldLeaves:
    """What of a plan a function follows."""

    meshes: tuple[Mesh, ...]
    state: tuple[HeldLeaf, ...]
    batch: tuple[HeldBatch, ...]

    def place(self, leaf: Any) -> Any:
        """Where a leaf lies; None: it is bound to no devices."""
        if isinstance(leaf, RayArray):
            raise _not_on_actors("an array is")
        return leaf.sharding if _is_placed(leaf) else None

    def home_of(self, leaf: Any, held: HeldLeaf | None) -> tuple[Home, Any]:
        """The stage of a leaf, and the sharding that it is to be put into, if any.

        Args:
          leaf: an argument's.
          held: the leaf of the step's state that it is.
        """
        if isinstance(leaf, SplitArray):
            is_same = held is not None and held.sharding == leaf.sharding
            return held.home if held is not None and is_same else self._home_of_parts(leaf), None
        if held is None:
            return None, None
        if _is_placed(leaf):
            devices = leaf.sharding.device_set
            if isinstance(held.home, int) and set(self.meshes[held.home].devices.flat) == devices:
                return held.home, None
            stage = self._stage_on(devices)
            if stage is not None:
                return stage, None
        return held.home, held.sharding

    def _home_of_parts(self, leaf: SplitArray) -> Home:
        found = [self._stage_on(part.sharding.device_set) for part in leaf.parts]
        stages = tuple(stage for stage in found if stage is not None)
        if len(stages) < len(found):
            return max(stages, default=0)
        return HeldRows(leaf.axis, leaf.ends, stages)

    def _stage_on(self, devices: set[jax.Device]) -> int | None:
        stages = (n for n, mesh in enumerate(self.meshes) if set(mesh.devices.flat) == devices)
        return next(stages, None)

    def find(self, path: tuple[str, ...], leaf: Any) -> HeldLeaf | None:
        """The leaf of the step's state that an argument's leaf is, or takes the place of.

        It has the same shape and dtype, and the most of the path from its end; one without any of
        that only where the leaf lies as it does.
        """
        shape, dtype = np.shape(leaf), shape_of(leaf).dtype
        alike = [x for x in self.state if x.shape == shape and x.dtype == dtype]
        here = [x for x in alike if shape and _is_placed(leaf) and _lies_as(leaf, x)]
        named = [x for x in here or alike if common_parts(x.path, path)] or here
        named = named or [x for x in alike if common_parts(x.path, path)]
        return max(named, key=lambda x: common_parts(x.path, path), default=None)

    def program(self, jaxpr: Jaxpr, homes: Sequence[Home], name: str) -> MeshProgram:
        """A program on the meshes of the stages."""
        return MeshProgram(jaxpr, homes, self.meshes, name)

    def cut(self, path: tuple[str, ...], leaf: Any, rows: set[int]) -> Cut | None:
        """How an array that is no parameter is cut among the devices.

        Args:
          path: its own.
          leaf: the array.
          rows: the first dimensions of all such arrays with two dimensions or more.
        """
        if not self.batch or not np.ndim(leaf) or is_key(shape_of(leaf).dtype):
            return None
        for known in self.batch:
            if known.ndim == np.ndim(leaf) and known.path[1:] and known.path[-1] == path[-1]:
                return known.cut
        is_batch = np.ndim(leaf) >= 2 or np.shape(leaf)[0] in rows
        return Cut(0, self.batch[0].cut.axes) if is_batch else None


@dataclass(frozen=True)
class HeldOnActors(HeldLeaves):
    """The same of a plan on Ray actors: arrays there say themselves where they are."""

    step: RayStep
    num_stages: int

    def place(self, leaf: Any) -> Any:
        """Where a leaf lies; None: in this process, or with another step's actors."""
        return leaf.sharding if self._is_here(leaf) else None

    def _is_here(self, leaf: Any) -> bool:
        return isinstance(leaf, RayArray) and leaf.keeper is self.step

    def find(self, path: tuple[str, ...], leaf: Any) -> HeldLeaf | None:
        """What is known of an array that is on the actors."""
        if not self._is_here(leaf):
            return None
        sharding = leaf.sharding
        stages = tuple(part.stage for part in sharding.parts)
        rows = HeldRows(sharding.axis, sharding.ends, stages) if sharding.ends else stages[0]
        return HeldLeaf(path, leaf.shape, leaf.dtype, sharding, rows)

    def home_of(self, leaf: Any, held: HeldLeaf | None) -> tuple[Home, Any]:
        """The stage of a leaf; nothing is put anywhere before it is read."""
        return None if held is None else held.home, None

    def program(self, jaxpr: Jaxpr, homes: Sequence[Home], name: str) -> MeshProgram:
        """A program on the actors of the stages."""
        from autopar.runtime.ray.driver.followed_stages import ActorsProgram

        return ActorsProgram(jaxpr, homes, self.num_stages, name, self.step.evaluate)


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, SplitArray) or (isinstance(leaf, jax.Array) and leaf.committed)


def _lies_as(leaf: Any, held: HeldLeaf) -> bool:
    return bool(held.sharding.is_equivalent_to(leaf.sharding, leaf.ndim))


def held_leaves(executable: Executable, name: str) -> HeldLeaves:
    """Where a step has its leaves, for a function of this name that follows it.

    Raises:
      DeviceError: its devices are not there.
    """
    if isinstance(executable, CompiledOnly):
        raise DeviceError(
            f"{name} cannot run: the devices of the step that it follows are not there.",
            where="autopar.follow",
            hint="compile the step for jax.devices().",
        )
    program, traced = executable.program, executable.traced
    is_on_actors = isinstance(executable, RayExecutable)
    meshes = () if is_on_actors else tuple(x for _, x in sorted(program.stage_meshes.items()))
    state, batch = list[HeldLeaf](), list[HeldBatch]()
    for i, (label, shape) in enumerate(
        zip(traced.graph.inputs, traced.signature.shapes, strict=False)
    ):
        sharding, path = program.in_shardings[i], path_parts(label.path)
        if label.role == "batch" and label.batch_axis is not None:
            if isinstance(sharding, RaySharding) and not sharding.ends:
                sharding = sharding.parts[0]
            if isinstance(sharding, (NamedSharding, MeshSharding)):
                spec = (*sharding.spec, *[None] * len(shape.shape))
                axes = spec[label.batch_axis] or ()
                axes = (axes,) if isinstance(axes, str) else tuple(axes)
                batch.append(HeldBatch(path, len(shape.shape), Cut(label.batch_axis, axes)))
        elif not is_on_actors:
            home = _home(sharding, program.stages_of_leaf(i))
            state.append(HeldLeaf(path, shape.shape, shape.dtype, sharding, home))
    if isinstance(executable, RayExecutable):
        num_stages = len(executable.plan.stages)
        return HeldOnActors((), (), tuple(batch), executable.actors, num_stages)
    return HeldLeaves(meshes, tuple(state), tuple(batch))


def _home(sharding: Any, stages: tuple[int, ...]) -> int | HeldRows:
    if isinstance(sharding, SplitSharding):
        return HeldRows(sharding.axis, sharding.ends, stages)
    return stages[0]


def _not_on_actors(what: str) -> DeviceError:
    return DeviceError(
        f"autopar.follow runs in this process, and {what} on Ray actors.",
        where="autopar.follow",
        why="arrays on actors are held by other processes; the function would bring all of them "
        "here with every call.",
        hint="step.apply(fn, state) does that once in a while; or parallelize the evaluation step "
        "itself with runtime='ray', or train with runtime='local'.",
    )
