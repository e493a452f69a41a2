"""A pipelined plan under Ray, as the driver calls it: leaves in, leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar.passes.stages.candidate import Runnable
from autopar.passes.stages.result import LeafRows
from autopar.ray_array import ActorSharding, RayArray, RaySharding
from autopar.ray_options import Ray
from autopar.runtime.ray.actors import Actors
from autopar.runtime.ray.parts import ends_of, home_values, result_values, spec
from autopar.split_array import SplitArray


class RayPipeline:
    """A pipelined plan for Ray actors, one for each mesh; nothing is started before `compile`.

    Args:
      runnable: what the meshes run.
      options: the cluster and the deadline.
      name: of the step.
    """

    def __init__(self, runnable: Runnable, options: Ray, name: str) -> None:
        self.runnable, self.options, self.name = runnable, options, name
        self.homes, self.returned = home_values(runnable), result_values(runnable)
        self.in_shardings = tuple(map(self._sharding, runnable.leaves, self.homes))
        self.out_shardings = tuple(map(self._sharding, runnable.results, self.returned))

    def _sharding(self, group: Sequence[LeafRows], values: Sequence[int]) -> RaySharding:
        pieces, program = self.runnable.pieces, self.runnable.program
        parts = []
        for value in values:
            stage = program.value_of[value].stage
            sharded = pieces.programs[stage]
            parts.append(
                ActorSharding(
                    program.mesh_of(value),
                    stage,
                    sharded.mesh,
                    sharded.axis_names,
                    spec(pieces.versions[value], sharded),
                )
            )
        return RaySharding(tuple(parts), group[0].axis, ends_of(group))

    def compile(
        self,
        name: str,
        donated: Sequence[int],
        kept: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[Any],
    ) -> RayStep:
        """Start the actors, which compile their pieces; arguments as of `LocalProgram.compile`.

        Raises:
          AutoparError: as `Actors`.
        """
        del name
        return RayStep(self, donated, kept, shapes, constants)


class RayStep:
    """A compiled step on actors: (donated leaves, kept leaves, constants) -> all output leaves."""

    def __init__(
        self,
        pipeline: RayPipeline,
        donated: Sequence[int],
        kept: Sequence[int],
        shapes: Sequence[jax.ShapeDtypeStruct],
        constants: Sequence[Any],
    ) -> None:
        runnable = pipeline.runnable
        self.pipeline = pipeline
        self._order, self._num_donated = [*donated, *kept], len(donated)
        self._shapes = shapes
        self._types = [
            _type_of(group, values, runnable.pieces.versions)
            for group, values in zip(runnable.results, pipeline.returned, strict=True)
        ]
        self.actors = Actors(
            runnable, pipeline.in_shardings, len(shapes), constants, pipeline.options, pipeline.name
        )

    def __call__(
        self, donated: Sequence[Any], kept: Sequence[Any], constants: Sequence[Any]
    ) -> list[Any]:
        """One step; returns when the actors have been told.

        Raises:
          StageError: an earlier step failed.
          TypeError: a leaf has another shape or dtype than the program was compiled for.
        """
        del constants  # the actors have them
        leaves: list[Any] = [None] * len(self._order)
        for number, leaf in zip(self._order, (*donated, *kept), strict=True):
            leaves[number] = leaf
        _check(leaves, self._shapes)
        actors, shardings = self.actors, self.pipeline.in_shardings
        given = [actors.given(x, where) for x, where in zip(leaves, shardings, strict=False)]
        consumed = [
            resident
            for leaf in donated
            if isinstance(leaf, RayArray)
            for resident in leaf.residents
            if resident.owner is actors
        ]
        outputs = actors.step(given, consumed)
        kept_arrays = {id(leaf) for leaf in kept}
        for leaf in donated:
            if isinstance(leaf, (jax.Array, RayArray, SplitArray)) and id(leaf) not in kept_arrays:
                leaf.delete()
        return [
            RayArray([outputs[value] for value in values], shape, dtype, sharding, weak)
            for values, (shape, dtype, weak), sharding in zip(
                self.pipeline.returned, self._types, self.pipeline.out_shardings, strict=True
            )
        ]

    def as_text(self) -> str:
        """The compiled pieces, as XLA's text (HLO), one behind the other."""
        texts = self._by_piece("text")
        return "\n".join(f"// piece {name}\n{text}" for name, text in texts.items())

    def memory_analysis(self) -> dict[str, Any]:
        """XLA's account of one device's memory, for every piece, as a dictionary."""
        return self._by_piece("memory")

    def cost_analysis(self) -> dict[str, Any]:
        """XLA's count of operations, for every piece."""
        return self._by_piece("cost")

    def _by_piece(self, what: str) -> dict[str, Any]:
        return {k: v for found in self.actors.describe(what) for k, v in found.items()}


def _type_of(
    group: Sequence[LeafRows], values: Sequence[int], versions: Mapping[int, Any]
) -> tuple[tuple[int, ...], Any, bool]:
    """Shape, dtype and weak type of a result."""
    aval = versions[values[0]].atom.aval
    shape = list(aval.shape)
    ends = ends_of(group)
    if ends:
        shape[group[0].axis] = ends[-1]
    return tuple(shape), aval.dtype, bool(getattr(aval, "weak_type", False))


def _check(leaves: Sequence[Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
    for leaf, wanted in zip(leaves, shapes, strict=True):
        aval = leaf if isinstance(leaf, (RayArray, SplitArray)) else jax.typeof(leaf)
        if aval.shape != wanted.shape or aval.dtype != wanted.dtype:
            raise TypeError(
                f"compiled for {wanted.dtype}{list(wanted.shape)}, called with "
                f"{aval.dtype}{list(aval.shape)}"
            )
