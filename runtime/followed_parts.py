"""What a followed program does: programs of one stage, and equations of values in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.sharding import Mesh

from autopar.arrays.split_array import SplitArray
from autopar.passes.graph import jax_compat
from autopar.runtime.on_meshes import HeldRows, OnMeshes, is_var
from autopar.runtime.pace import keep_pace

Environment = dict[Var, OnMeshes]


class ProgramPart:
    """Something that a program does: it reads variables and writes others."""

    reads: Sequence[Any]
    writes: Sequence[Var]

    def run(self, env: Environment) -> None:
        raise NotImplementedError


@dataclass
class OneStage:
    """Equations of one stage, while a program is divided."""

    stage: int
    eqns: list[JaxprEqn]


class JittedPart(ProgramPart):
    """Equations of one stage as one jitted function."""

    def __init__(
        self, whole: Jaxpr, segment: OneStage, mesh: Mesh, read_outside: set[Var], name: str
    ):
        self._mesh = mesh
        made = {v for eqn in segment.eqns for v in eqn.outvars}
        reads = dict.fromkeys(v for eqn in segment.eqns for v in eqn.invars if is_var(v))
        self.reads = [v for v in reads if v not in made]
        writes = dict.fromkeys(v for eqn in segment.eqns for v in eqn.outvars)
        self.writes = [v for v in writes if v in read_outside]
        jaxpr = jax_compat.replace_jaxpr(
            whole, invars=self.reads, outvars=self.writes, eqns=segment.eqns
        )
        evaluate = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))

        def part(*arrays: Any) -> list[Any]:
            return list(evaluate(*arrays))

        part.__name__ = part.__qualname__ = name
        self._call = jax.jit(part)

    def run(self, env: Environment) -> None:
        results = self._call(*[env[v].on(self._mesh) for v in self.reads])
        keep_pace(results, self._mesh)
        env.update(zip(self.writes, map(OnMeshes, results), strict=True))


class EquationPart(ProgramPart):
    """One equation that runs in parts."""

    def __init__(self, meshes: Sequence[Mesh], eqn: JaxprEqn):
        self.meshes, self.eqn = meshes, eqn
        self.reads, self.writes = eqn.invars, eqn.outvars

    def operands(self, env: Environment) -> list[OnMeshes]:
        return [read(env, v) for v in self.eqn.invars]

    def write(self, env: Environment, values: Sequence[OnMeshes]) -> None:
        env.update(zip(self.eqn.outvars, values, strict=True))


class ByRows(EquationPart):
    """An elementwise equation of split values, part by part."""

    def __init__(self, meshes: Sequence[Mesh], eqn: JaxprEqn, rows: HeldRows):
        super().__init__(meshes, eqn)
        self._rows = rows
        self._call = jax.jit(lambda *xs: jax_compat.bind(eqn, xs))

    def run(self, env: Environment) -> None:
        values, results = self.operands(env), list[list[Any]]()
        for number, stage in enumerate(self._rows.stages):
            mesh = self.meshes[stage]
            operands = [_part_on(x, number, mesh) for x in values]
            results.append(self._call(*operands))
            keep_pace(results[-1], mesh)
        parts = zip(*results, strict=True)
        self.write(env, [OnMeshes(SplitArray(part, self._rows.axis)) for part in parts])


class SliceOfRows(ProgramPart):
    """A slice that lies within one part of a split value."""

    def __init__(self, eqn: JaxprEqn, rows: HeldRows, number: int):
        self.reads, self.writes, self._number = eqn.invars, eqn.outvars, number
        first = rows.bounds()[number][0]
        params = dict(eqn.params)
        for name in ("start_indices", "limit_indices"):
            moved = list(params[name])
            moved[rows.axis] -= first
            params[name] = tuple(moved)
        self._call = jax.jit(lambda x: jax_compat.bind(eqn, [x], **params))

    def run(self, env: Environment) -> None:
        (result,) = self._call(env[self.reads[0]].first.parts[self._number])
        env[self.writes[0]] = OnMeshes(result)


def _part_on(value: OnMeshes, number: int, mesh: Mesh) -> Any:
    whole = value.first
    return whole.parts[number] if isinstance(whole, SplitArray) else value.on(mesh)


class ScanOfRows(EquationPart):
    """A scan over rows that are on several stages: a scan on each, the carry moves on."""

    def __init__(self, meshes: Sequence[Mesh], eqn: JaxprEqn, rows: HeldRows):
        super().__init__(meshes, eqn)
        self._rows = rows
        self._counts = jax_compat.scan_counts(eqn.params)

        def part(*operands: Any, length: int) -> list[Any]:
            return jax_compat.bind(eqn, operands, length=length)

        self._call = jax.jit(part, static_argnames="length")

    def run(self, env: Environment) -> None:
        values, (consts, carries) = self.operands(env), self._counts
        carry = values[consts : consts + carries]
        stacked: dict[int, list[Any]] = {}
        order = list(range(len(self._rows.stages)))
        for number in reversed(order) if self.eqn.params["reverse"] else order:
            mesh = self.meshes[self._rows.stages[number]]
            first, end = self._rows.bounds()[number]
            slices = [
                part if isinstance(x.first, SplitArray) else part[first:end]
                for x in values[consts + carries :]
                for part in [_part_on(x, number, mesh)]
            ]
            whole = [x.on(mesh) for x in (*values[:consts], *carry)]
            results = self._call(*whole, *slices, length=end - first)
            keep_pace(results, mesh)
            carry, stacked[number] = [OnMeshes(x) for x in results[:carries]], results[carries:]
        parts = zip(*(stacked[number] for number in order), strict=True)
        self.write(env, [*carry, *(OnMeshes(SplitArray(part, 0)) for part in parts)])


def read(env: Mapping[Var, OnMeshes], atom: Any) -> OnMeshes:
    """The value of a variable or of a literal."""
    return env[atom] if is_var(atom) else OnMeshes(literal(atom))


def literal(atom: Any) -> Any:
    """The array of a literal."""
    return jax_compat.with_type_of(jnp.asarray(atom.val, atom.aval.dtype), atom.aval)
