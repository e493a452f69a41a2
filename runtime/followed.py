"""A program on the meshes on which its parameters lie: each equation runs where they are.

A function of a pipeline's parameters (a forward pass) reads them in the order of the stages. So an
equation runs on the highest of the stages that what it reads comes from, and what belongs to no
stage (tokens, masks, caches) goes where it is read. Neighbouring equations of one stage are one
`jax.jit`, in which XLA's partitioner follows the layout of the arguments. A loop that reads
parameters of several stages (over the tokens of a generation) runs trip by trip from Python; a scan
over layers whose rows are on several stages runs there in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh

from autopar.arrays.split_array import SplitArray
from autopar.passes.graph import jax_compat
from autopar.passes.graph.logical import no_mesh
from autopar.passes.graph.primitives import CONTROL_FLOW, ELEMENTWISE
from autopar.runtime.followed_parts import (
    ByRows,
    Environment,
    EquationPart,
    JittedPart,
    OneStage,
    ProgramPart,
    ScanOfRows,
    SliceOfRows,
    literal,
)
from autopar.runtime.on_meshes import (
    HeldRows,
    Home,
    OnMeshes,
    is_by_rows,
    is_scan_of,
    is_var,
    part_sliced,
)


class MeshProgram:
    """A flat program on the meshes of a pipeline's stages.

    Args:
      jaxpr: flat, without constvars.
      homes: for each of its arguments, where it is.
      meshes: of the stages; several stages may have the same devices.
      name: of the function, for profiles.
    """

    def __init__(self, jaxpr: Jaxpr, homes: Sequence[Home], meshes: Sequence[Mesh], name: str):
        self.jaxpr, self.meshes, self.name = jaxpr, tuple(meshes), name
        self._stages: dict[Var, int] = {}
        self._rows: dict[Var, HeldRows] = {}
        for var, home in zip(jaxpr.invars, homes, strict=True):
            self.write([var], home)
        self._parts = tuple(self._divide())
        self._dead = tuple(self._last_reads())

    @property
    def num_parts(self) -> int:
        """How many programs, loops and picks a call runs one after the other."""
        return len(self._parts)

    def __call__(self, values: Sequence[OnMeshes]) -> list[OnMeshes]:
        """The results of one call; nothing is waited for but what decides where a loop goes on."""
        env = dict(zip(self.jaxpr.invars, values, strict=True))
        results = {var: env[var] for var in self.jaxpr.outvars if is_var(var) and var in env}
        outs = {var for var in self.jaxpr.outvars if is_var(var)}
        with no_mesh():
            for part, dead in zip(self._parts, self._dead, strict=True):
                part.run(env)
                results.update((var, env[var]) for var in part.writes if var in outs)
                for var in dead:
                    env.pop(var, None)
        return [
            results[out] if is_var(out) else OnMeshes(literal(out)) for out in self.jaxpr.outvars
        ]

    # Which equation runs where

    def write(self, variables: Sequence[Var], home: Home) -> None:
        for var in variables:
            if isinstance(home, HeldRows):
                self._rows[var] = home
            elif home is not None:
                self._stages[var] = home

    def home(self, atom: Any) -> Home:
        """Where a value of the program is."""
        return self._rows.get(atom, self._stages.get(atom)) if is_var(atom) else None

    def _stages_read(self, eqn: JaxprEqn) -> set[int]:
        found: set[int] = set()
        for atom in eqn.invars:
            home = self.home(atom)
            found |= set() if home is None else _stages_in(home)
        return found

    def _divide(self) -> Iterator[ProgramPart]:
        special: list[ProgramPart | None] = []
        for eqn in self.jaxpr.eqns:
            stages = self._stages_read(eqn)
            part = self._special(eqn, stages)
            special.append(part)
            if part is None and stages:
                self.write(eqn.outvars, max(stages))
        stages_of = self._stages_of_rest(special)
        parts: list[ProgramPart | OneStage] = []
        made: dict[Var, int] = {}
        for eqn, own, stage in zip(self.jaxpr.eqns, special, stages_of, strict=True):
            after = max((made.get(v, 0) for v in eqn.invars if is_var(v)), default=0)
            if own is not None:
                parts.append(own)
                place = len(parts) - 1
            else:
                place = next((n for n in range(after, len(parts)) if _is(parts[n], stage)), -1)
                if place < 0:
                    parts.append(OneStage(stage, []))
                    place = len(parts) - 1
                segment = parts[place]
                assert isinstance(segment, OneStage)
                segment.eqns.append(eqn)
            made.update(dict.fromkeys(eqn.outvars, place))
        read_outside = self._read_outside(parts)
        for each in parts:
            yield self.stage_part(each, read_outside) if isinstance(each, OneStage) else each

    def stage_part(self, segment: OneStage, read_outside: set[Var]) -> ProgramPart:
        """What runs the equations of one stage."""
        mesh = self.meshes[segment.stage]
        return JittedPart(self.jaxpr, segment, mesh, read_outside, self.name)

    def _stages_of_rest(self, special: Sequence[ProgramPart | None]) -> list[int]:
        """The stage of every equation; of those that read no parameter, the first reader's."""
        needed: dict[Var, int] = {}
        result: list[int] = []
        for eqn, own in zip(reversed(self.jaxpr.eqns), reversed(special), strict=True):
            stages = self._stages_read(eqn)
            if stages:
                stage = min(stages) if own is not None else max(stages)
            else:
                stage = min((needed[v] for v in eqn.outvars if v in needed), default=0)
            for var in eqn.invars:
                if is_var(var):
                    needed[var] = min(stage, needed.get(var, stage))
            result.append(stage)
        return result[::-1]

    def _read_outside(self, parts: Sequence[ProgramPart | OneStage]) -> set[Var]:
        """The variables that another part than their maker reads, and the results."""
        found = {v for v in self.jaxpr.outvars if is_var(v)}
        for part in parts:
            if isinstance(part, OneStage):
                own = {v for eqn in part.eqns for v in eqn.outvars}
                reads = {v for eqn in part.eqns for v in eqn.invars if is_var(v)}
                found |= reads - own
            else:
                found |= {v for v in part.reads if is_var(v)}
        return found

    def _last_reads(self) -> Iterator[list[Var]]:
        """For each part the variables that no later one reads."""
        last: dict[Var, int] = {}
        for number, part in enumerate(self._parts):
            last.update((v, number) for v in (*part.reads, *part.writes) if is_var(v))
        for number in range(len(self._parts)):
            yield [var for var, place in last.items() if place == number]

    def _special(self, eqn: JaxprEqn, stages: set[int]) -> ProgramPart | None:
        """What an equation becomes that is not simply part of one stage's program."""
        split = {v: self._rows[v] for v in eqn.invars if is_var(v) and v in self._rows}
        if split:
            part = self.of_rows(eqn, split, stages)
            if part is not None:
                return part
        if len(stages) < 2 or eqn.primitive.name not in CONTROL_FLOW:
            return None
        kinds: dict[str, Any] = {"scan": _TripByTrip, "while": _While, "cond": _Branches}
        kind = kinds.get(eqn.primitive.name)
        if kind is None:
            return None
        loop: ProgramPart = kind(self, eqn, max(stages))
        self.write(eqn.outvars, max(stages))
        return loop

    def of_rows(
        self, eqn: JaxprEqn, split: Mapping[Var, HeldRows], stages: set[int]
    ) -> ProgramPart | None:
        """What an equation of split values becomes; None: they are brought together for it."""
        rows, *others = dict.fromkeys(split.values())
        if not others and eqn.primitive.name in ELEMENTWISE and is_by_rows(eqn, split):
            self.write(eqn.outvars, rows)
            return self.by_rows(eqn, rows)
        if not others and eqn.primitive.name == "scan" and is_scan_of(eqn, split):
            return self.scan_of_rows(eqn, rows, stages)
        number = part_sliced(eqn, rows) if eqn.primitive.name == "slice" else None
        if number is None:
            return None
        self.write(eqn.outvars, rows.stages[number])
        return SliceOfRows(eqn, rows, number)

    def by_rows(self, eqn: JaxprEqn, rows: HeldRows) -> ProgramPart:
        return ByRows(self.meshes, eqn, rows)

    def scan_of_rows(self, eqn: JaxprEqn, rows: HeldRows, stages: set[int]) -> ProgramPart:
        _, num_carry = jax_compat.scan_counts(eqn.params)
        self.write(eqn.outvars[:num_carry], max(stages))
        self.write(eqn.outvars[num_carry:], rows)
        return ScanOfRows(self.meshes, eqn, rows)

    def inner(self, closed: ClosedJaxpr, homes: Sequence[Home]) -> MeshProgram:
        """The program of a body, on the same meshes."""
        jaxpr = closed.jaxpr
        if closed.consts:
            invars = [*jaxpr.invars, *jaxpr.constvars]
            jaxpr = jax_compat.replace_jaxpr(jaxpr, invars=invars, constvars=[])
            homes = [*homes, *[None] * len(closed.consts)]
        inner = self.like(jaxpr, homes)
        inner.held = [OnMeshes(value) for value in closed.consts]
        return inner

    def like(self, jaxpr: Jaxpr, homes: Sequence[Home]) -> MeshProgram:
        return MeshProgram(jaxpr, homes, self.meshes, self.name)

    held: Sequence[OnMeshes] = ()


def _stages_in(home: int | HeldRows) -> set[int]:
    return set(home.stages) if isinstance(home, HeldRows) else {home}


def _whole(home: Home) -> int | None:
    """The stage on which a value is brought together."""
    return home if home is None else max(_stages_in(home))


def _is(part: Any, stage: int) -> bool:
    return isinstance(part, OneStage) and part.stage == stage


# What a program does


class _TripByTrip(EquationPart):
    """A scan whose body reads parameters of several stages, trip by trip."""

    def __init__(self, program: MeshProgram, eqn: JaxprEqn, stage: int):
        super().__init__(program.meshes, eqn)
        self._mesh = program.meshes[stage]
        self._consts, self._carries = jax_compat.scan_counts(eqn.params)
        homes = [program.home(v) for v in eqn.invars]
        start = self._consts + self._carries
        free: list[Home] = [None] * self._carries
        own = [*homes[: self._consts], *free, *map(_whole, homes[start:])]
        self._body = program.inner(eqn.params["jaxpr"], own)

    def run(self, env: Environment) -> None:
        values, start = self.operands(env), self._consts + self._carries
        consts, carry = values[: self._consts], values[self._consts : start]
        slices = [_sliceable(x, self._mesh) for x in values[start:]]
        length, stacked = self.eqn.params["length"], dict[int, list[Any]]()
        order = range(length)
        for number in reversed(order) if self.eqn.params["reverse"] else order:
            rows = [OnMeshes(_row(x, number)) for x in slices]
            results = self._body([*consts, *carry, *rows, *self._body.held])
            carry = results[: self._carries]
            stacked[number] = [x.on(self._mesh) for x in results[self._carries :]]
        if length:
            columns = zip(*(stacked[number] for number in order), strict=True)
            stacks = [_stack(list(column)) for column in columns]
        else:
            avals = [v.aval for v in self.eqn.outvars[self._carries :]]
            stacks = [jnp.zeros(x.shape, x.dtype) for x in avals]
        self.write(env, [*carry, *map(OnMeshes, stacks)])


class _While(EquationPart):
    """A `while` that reads parameters of several stages: its condition is waited for."""

    def __init__(self, program: MeshProgram, eqn: JaxprEqn, stage: int):
        super().__init__(program.meshes, eqn)
        params = eqn.params
        self._counts = params["cond_nconsts"], params["body_nconsts"]
        homes, (first, second) = [program.home(v) for v in eqn.invars], self._counts
        free: list[Home] = [None] * (len(homes) - first - second)
        self._cond = program.inner(params["cond_jaxpr"], [*homes[:first], *free])
        self._body = program.inner(params["body_jaxpr"], [*homes[first : first + second], *free])

    def run(self, env: Environment) -> None:
        values, (first, second) = self.operands(env), self._counts
        consts, carry = values[:first], values[first + second :]
        while bool(np.asarray(self._cond([*consts, *carry, *self._cond.held])[0].first)):
            own = values[first : first + second]
            carry = self._body([*own, *carry, *self._body.held])
        self.write(env, carry)


class _Branches(EquationPart):
    """A `cond` whose branches read parameters of several stages: its index is waited for."""

    def __init__(self, program: MeshProgram, eqn: JaxprEqn, stage: int):
        super().__init__(program.meshes, eqn)
        homes = [program.home(v) for v in eqn.invars[1:]]
        self._branches = [program.inner(closed, homes) for closed in eqn.params["branches"]]

    def run(self, env: Environment) -> None:
        index, *values = self.operands(env)
        number = int(np.clip(int(np.asarray(index.first)), 0, len(self._branches) - 1))
        branch = self._branches[number]
        self.write(env, branch([*values, *branch.held]))


_take: Callable[..., Any] = jax.jit(lambda x, i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False))
_stack: Callable[..., Any] = jax.jit(jnp.stack)


def _sliceable(value: OnMeshes, mesh: Mesh) -> Any:
    return value.on(mesh) if isinstance(value.first, SplitArray) else value.first


def _row(array: Any, number: int) -> Any:
    return _take(array, number) if isinstance(array, jax.Array) else array[number]
