"""A followed program on actors: each equation runs where its parameters are.

The driver divides the program as it does for meshes of its own (`runtime/followed.py`). What runs
on a stage is one function that its actors are sent once; they find parameters in their stores, and
what is made of them, activations, goes by way of the driver to the next stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.sharding import Mesh

from autopar.arrays.ray_array import key_implementation
from autopar.arrays.typed_keys import is_key
from autopar.base.errors import DeviceError
from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import user_source
from autopar.passes.graph.logical import no_mesh
from autopar.passes.graph.primitives import CONTROL_FLOW
from autopar.runtime.followed import MeshProgram
from autopar.runtime.followed_parts import Environment, OneStage, ProgramPart, literal, read
from autopar.runtime.on_meshes import Cut, HeldRows, Home, OnMeshes, is_var
from autopar.runtime.ray.transport.host_tiles import numbers, plain
from autopar.runtime.ray.transport.pickling import dumps

_NUMBERS = itertools.count()


class GivenArray(NamedTuple):
    """An argument: an array of any kind, which of its parts (None: all), and how it is cut."""

    array: Any
    part: int | None
    cut: Cut | None


@dataclass(frozen=True)
class StageFunction:
    """A function that runs on a stage's mesh: its number, and itself as bytes."""

    number: int
    data: bytes
    stage: int

    @classmethod
    def of(
        cls, function: Callable[..., Sequence[Any]], avals: Sequence[Any], stage: int, name: str
    ) -> StageFunction:
        """A function of arrays of these types; of keys, the numbers that they wrap go over."""
        kinds = [key_implementation(x.dtype) if is_key(x.dtype) else None for x in avals]

        def on_numbers(*arrays: Any) -> list[Any]:
            typed = [
                x if kind is None else jax.random.wrap_key_data(x, impl=kind)
                for x, kind in zip(arrays, kinds, strict=True)
            ]
            return [numbers(x) for x in function(*typed)]

        shapes = [jax.ShapeDtypeStruct(*plain(x.shape, x.dtype)) for x in avals]
        with no_mesh():
            closed = jax.make_jaxpr(on_numbers)(*shapes)
        return cls(next(_NUMBERS), dumps(closed, name), stage)


Evaluate = Callable[[StageFunction, Sequence[GivenArray]], list[np.ndarray]]
"""Lets a stage's actors run a function."""


class ActorsProgram(MeshProgram):
    """A flat program on the actors of a pipeline's stages, of which there are `num_stages`."""

    def __init__(
        self, jaxpr: Jaxpr, homes: Sequence[Home], num_stages: int, name: str, evaluate: Evaluate
    ):
        self.evaluate, self._num_stages = evaluate, num_stages
        self.deferred: dict[Var, JaxprEqn] = {}
        here = Mesh(np.asarray(jax.local_devices()[:1]), ("driver",))
        super().__init__(jaxpr, homes, [here] * num_stages, name)
        for atom in jaxpr.outvars:
            if is_var(atom) and atom in self.deferred:
                raise _needs_all_rows(self.deferred[atom])

    def like(self, jaxpr: Jaxpr, homes: Sequence[Home]) -> MeshProgram:
        """Another one, as a body of this one is."""
        return ActorsProgram(jaxpr, homes, self._num_stages, self.name, self.evaluate)

    def stage_part(self, segment: OneStage, read_outside: set[Var]) -> ProgramPart:
        """What runs the equations of one stage."""
        return _StagePart(self, segment, read_outside)

    def of_rows(
        self, eqn: JaxprEqn, split: Mapping[Var, HeldRows], stages: set[int]
    ) -> ProgramPart | None:
        """What an equation of split values becomes.

        Raises:
          DeviceError: it needs rows of several stages at once.
        """
        name = eqn.primitive.name
        if name != "slice":
            part = super().of_rows(eqn, split, stages)
            if part is not None:
                return part
        if name in CONTROL_FLOW and self.deferred.keys().isdisjoint(split):
            slices = eqn.invars[sum(jax_compat.scan_counts(eqn.params)) :] if name == "scan" else ()
            if not any(is_var(v) and v in split for v in slices):
                return None  # its body scans them
        raise _needs_all_rows(eqn)

    def by_rows(self, eqn: JaxprEqn, rows: HeldRows) -> ProgramPart:
        """It is done by who reads it."""
        del rows
        self.deferred.update(dict.fromkeys(eqn.outvars, eqn))
        return _Nothing()

    def scan_of_rows(self, eqn: JaxprEqn, rows: HeldRows, stages: set[int]) -> ProgramPart:
        """A scan on each stage, the carry moves on."""
        self.write(eqn.outvars, max(stages))
        return _ScanOnStages(self, eqn, rows)


def _needs_all_rows(eqn: JaxprEqn) -> DeviceError:
    return DeviceError(
        f"autopar.follow cannot run `{eqn.primitive.name}` on Ray actors: it reads or returns an "
        "array whose rows are on several of them.",
        where=user_source(eqn),
        why="layers under a scan are on the actors of their stages; they can be scanned there, "
        "and what works on each element alone can come before.",
        hint="step.apply(fn, state) brings all of it together; or train with runtime='local'.",
    )


class _Nothing(ProgramPart):
    """An equation that others do."""

    reads, writes = (), ()

    def run(self, env: Environment) -> None:
        pass


class _StagePart(ProgramPart):
    """Equations of one stage."""

    def __init__(self, program: ActorsProgram, segment: OneStage, read_outside: set[Var]):
        self._program = program
        made = dict.fromkeys(v for eqn in segment.eqns for v in eqn.outvars)
        reads = dict.fromkeys(v for eqn in segment.eqns for v in eqn.invars if is_var(v))
        self.reads = [v for v in reads if v not in made]
        self.writes = [v for v in made if v in read_outside]
        jaxpr = jax_compat.replace_jaxpr(
            program.jaxpr, invars=self.reads, outvars=self.writes, eqns=segment.eqns
        )
        call = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))
        avals = [v.aval for v in self.reads]
        self._function = StageFunction.of(call, avals, segment.stage, program.name)

    def run(self, env: Environment) -> None:
        values = [env[v] for v in self.reads]
        given = [GivenArray(x.first, None, x.cut) for x in values]
        results = self._program.evaluate(self._function, given)
        env.update(zip(self.writes, _typed(results, self.writes, values), strict=True))


class _ScanOnStages(ProgramPart):
    """A scan over rows that are on several stages, and elementwise equations before it.

    Operands are known by their places: a carry may begin with an array that the body reads as well.
    """

    def __init__(self, program: ActorsProgram, eqn: JaxprEqn, rows: HeldRows):
        self._program, self.eqn, self._rows = program, eqn, rows
        self._counts = jax_compat.scan_counts(eqn.params)
        self._start = sum(self._counts)  # where the slices begin
        self._before = list({id(each): each for each in self._needed(eqn)}.values())
        self._made = {v for each in self._before for v in each.outvars}
        for atom in eqn.invars[: self._start]:
            if is_var(atom) and (atom in self._made or self._is_held_in_rows(atom)):
                raise _needs_all_rows(eqn)
        inner = (v for each in self._before for v in each.invars if is_var(v))
        self._inner = [v for v in dict.fromkeys(inner) if v not in self._made]
        # The places of operands that no equation before makes.
        self._places = [
            place
            for place, atom in enumerate(eqn.invars)
            if not (is_var(atom) and atom in self._made)
        ]
        given = (eqn.invars[place] for place in self._places)
        self.reads = list(dict.fromkeys((*self._inner, *filter(is_var, given))))
        self.writes = list(eqn.outvars)
        self._functions: dict[int, StageFunction] = {}

    def _needed(self, eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        for atom in eqn.invars:
            before = self._program.deferred.get(atom) if is_var(atom) else None
            if before is not None:
                yield from self._needed(before)
                yield before

    def _is_held_in_rows(self, atom: Any) -> bool:
        return is_var(atom) and isinstance(self._program.home(atom), HeldRows)

    def _is_by_rows(self, var: Var) -> bool:
        """Whether an operand of an elementwise equation before has the rows, as all but scalars."""
        return bool(var.aval.shape)

    def _function(self, number: int) -> StageFunction:
        if number not in self._functions:
            first, end = self._rows.bounds()[number]

            def call(*arrays: Any) -> list[Any]:
                values = dict(zip(self._inner, arrays, strict=False))
                rest = iter(arrays[len(self._inner) :])
                for each in self._before:
                    read = [values[v] if is_var(v) else literal(v) for v in each.invars]
                    values.update(zip(each.outvars, jax_compat.bind(each, read), strict=True))
                own = set(self._places)
                operands = [
                    next(rest) if place in own else values[atom]
                    for place, atom in enumerate(self.eqn.invars)
                ]
                return list(jax_compat.bind(self.eqn, operands, length=end - first))

            def part(aval: Any) -> Any:
                return jax.ShapeDtypeStruct((end - first, *aval.shape[1:]), aval.dtype)

            avals = [part(v.aval) if self._is_by_rows(v) else v.aval for v in self._inner]
            for place in self._places:
                aval = self.eqn.invars[place].aval
                avals.append(part(aval) if place >= self._start else aval)
            stage = self._rows.stages[number]
            made = StageFunction.of(call, avals, stage, self._program.name)
            self._functions[number] = made
        return self._functions[number]

    def run(self, env: Environment) -> None:
        inner = [env[v] for v in self._inner]
        operands = {place: read(env, self.eqn.invars[place]) for place in self._places}
        known = [*inner, *operands.values()]
        consts, carries = self._counts
        stacked: dict[int, list[Any]] = {}
        order = list(range(len(self._rows.stages)))
        for number in reversed(order) if self.eqn.params["reverse"] else order:
            given = [
                self._part(value, v, number)
                if self._is_by_rows(v)
                else GivenArray(value.first, None, value.cut)
                for v, value in zip(self._inner, inner, strict=True)
            ]
            for place, value in operands.items():
                if place < self._start:
                    given.append(GivenArray(value.first, None, value.cut))
                else:
                    given.append(self._part(value, self.eqn.invars[place], number))
            results = self._program.evaluate(self._function(number), given)
            carry = _typed(results[:carries], self.writes[:carries], known)
            operands.update(zip(range(consts, self._start), carry, strict=True))
            stacked[number] = list(results[carries:])
        joined = [np.concatenate(parts) for parts in zip(*(stacked[n] for n in order), strict=True)]
        env.update(zip(self.writes[:carries], carry, strict=True))
        after = self.writes[carries:]
        env.update(zip(after, _typed(joined, after, known), strict=True))

    def _part(self, value: OnMeshes, atom: Any, number: int) -> GivenArray:
        """The rows of one stage."""
        first, end = self._rows.bounds()[number]
        if self._is_held_in_rows(atom):
            return GivenArray(value.first, number, None)
        return GivenArray(value.first[first:end], None, None)


def _typed(
    results: Sequence[np.ndarray], variables: Sequence[Var], read: Sequence[OnMeshes]
) -> list[OnMeshes]:
    """Results as values: keys wrapped again, and rows cut as those of what was read."""
    cuts = {np.shape(x.first)[x.cut.dim]: x.cut for x in read if x.cut is not None}
    values = []
    for array, var in zip(results, variables, strict=True):
        if is_key(var.aval.dtype):
            kind = key_implementation(var.aval.dtype)
            values.append(OnMeshes(jax.random.wrap_key_data(jnp.asarray(array), impl=kind)))
            continue
        cut = next(
            (c for size, c in cuts.items() if array.shape[c.dim : c.dim + 1] == (size,)), None
        )
        values.append(OnMeshes(array, cut))
    return values
