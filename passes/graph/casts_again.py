"""Parameters that are cast in every microbatch, where a step would keep their narrow copies.

A cast of a parameter (`w.astype(float16)`) does not depend on the batch, so it stands before the
loop over the microbatches, and its result is there all the while. Here it stands in the loop of a
pipeline's stage: every task that reads it (F, B, W) casts for itself, just before its first reader,
and the copy lives no longer than that task needs it. The numbers are the same. What is cast so lies
in the loop as it is stored: where a parameter is cut among devices, its narrow copy is gathered.

Stages alone are rewritten so: their tasks are programs of their own. On one mesh the loop is a
while loop of one program, out of which XLA moves what is the same in every trip, as it moves these
casts: they would be kept again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.barriers import passed_by_barrier
from autopar.passes.graph.graph import Atom, read_atom, variables, with_jaxpr
from autopar.passes.graph.microbatched import LoopPhase, Microbatched, Task, in_phases, scan_like
from autopar.passes.graph.primitives import RESHAPES

TINY_SHARE = 1000  # a copy smaller than all of them over this is kept: to start a kernel costs more


@dataclass(frozen=True)
class CastsAgain:
    """A stage's program with casts in its loop.

    Once a step these would read and write `once_bytes` on all devices together, in the loop it is
    `bytes_per_microbatch`; `kept_bytes` are those of the copies that are not kept any more.
    """

    step: Microbatched
    once_bytes: int
    bytes_per_microbatch: int
    kept_bytes: int


def casts_again(step: Microbatched) -> CastsAgain | None:
    """The program of a stage that casts parameters in every microbatch; None: it casts none.

    Args:
      step: its program, whose loop has tasks. Without any, it is no stage, and nothing is done.
    """
    loop = step.loop
    if loop is None or not loop.tasks:
        return None
    chains = _chains(step, loop)
    if not chains:
        return None
    walk = _CastingBody(loop, chains)
    walk.run()
    stored = loop.stored | walk.stored
    new = replace(loop, scan=walk.scan(), tasks=tuple(walk.tasks), stored=stored)
    eqns = [new.scan if eqn is loop.scan else eqn for eqn in step.graph.jaxpr.eqns]
    eqns = _without(eqns, {id(eqn) for chain in chains.values() for eqn in chain}, step)
    graph = with_jaxpr(step.graph, step.graph.jaxpr.replace(eqns=eqns))
    moved = {var: _bytes(_leaf(chain)) + _bytes(var) for var, chain in chains.items()}
    return CastsAgain(
        in_phases(graph, [new]),
        sum(moved.values()),
        sum(moved[var] for _, var in walk.made),
        sum(map(_bytes, chains)),
    )


Chain = Sequence[JaxprEqn]
"""Equations that lead from a parameter to its cast, each reading what the one before made."""


def _chains(step: Microbatched, loop: LoopPhase) -> dict[Var, Chain]:
    """What the loop alone reads of casts that are made before it, and how they are made."""
    graph = step.graph
    pairs = zip(graph.jaxpr.invars, graph.inputs, strict=True)
    known: dict[Var, tuple[JaxprEqn, ...]] = {v: () for v, x in pairs if x.role == "state"}
    wanted = variables(graph.jaxpr.outvars)
    for eqn in step.prologue:
        (atom, *others) = eqn.invars or (None,)
        if isinstance(atom, Var) and atom in known and not others and _keeps_elements(eqn):
            known[eqn.outvars[0]] = (*known[atom], eqn)
        else:
            wanted += variables(eqn.invars)
    for eqn in step.epilogue:
        wanted += variables(eqn.invars)
    _, carries, slices = loop.parts.operands(loop.scan.invars)
    elsewhere = {*wanted, *variables([*carries, *slices])}
    entering = dict.fromkeys(variables(loop.consts.values()))
    found = {
        var: chain
        for var in entering
        if (chain := known.get(var)) and var not in elsewhere and _bytes(var) < _bytes(_leaf(chain))
    }
    total = sum(map(_bytes, found))
    return {var: chain for var, chain in found.items() if _bytes(var) * TINY_SHARE >= total}


def _keeps_elements(eqn: JaxprEqn) -> bool:
    """Whether an equation's result has the elements of its operand, perhaps as other floats."""
    if len(eqn.outvars) != 1 or eqn.effects or eqn.outvars[0].aval.size != eqn.invars[0].aval.size:
        return False
    if eqn.primitive.name == "convert_element_type":
        floats = (atom.aval.dtype for atom in (*eqn.invars, *eqn.outvars))
        return all(jnp.issubdtype(x, jnp.floating) for x in floats) and not eqn.params["sharding"]
    return eqn.primitive.name in RESHAPES


def _leaf(chain: Chain) -> Var:
    leaf = chain[0].invars[0]
    assert isinstance(leaf, Var)
    return leaf


def _bytes(var: Var) -> int:
    return math.prod(var.aval.shape) * int(var.aval.dtype.itemsize)


class _CastingBody:
    """One walk over a loop's body, in which casts are made before their first readers."""

    def __init__(self, loop: LoopPhase, chains: Mapping[Var, Chain]) -> None:
        self.loop, self.chains = loop, chains
        self.eqns: list[JaxprEqn] = []
        self.tasks: list[Task] = []
        self.stored: set[Var] = set()  # the body's variables for what only casts read
        self.made: dict[tuple[Task, Var], Var] = {}  # by task and cast: what stands for it there
        self.outer: dict[Var, Var] = {  # the body's variables for casts
            v: atom
            for v, atom in loop.consts.items()
            if not isinstance(atom, Literal) and atom in chains
        }
        self.inner: dict[Atom, Var] = {
            atom: v for v, atom in loop.consts.items() if not isinstance(atom, Literal)
        }

    def run(self) -> None:
        """Fill the lists of equations and their tasks."""
        made_in: dict[Var, Task] = {}
        for eqn, task in zip(self.loop.body.eqns, self.loop.tasks, strict=True):
            read = [v for v in dict.fromkeys(variables(eqn.invars)) if v in self.outer]
            if read:
                there = [v for v in variables(eqn.invars) if made_in.get(v) == task]
                env: dict[Var, Atom] = {v: v for v in there[:1]}
                casts = {v: self.cast(self.outer[v], task, env, eqn) for v in read}
                env.update(casts)
                eqn = eqn.replace(invars=[read_atom(env, atom) for atom in eqn.invars])
            self.add(eqn, task)
            made_in.update(dict.fromkeys(eqn.outvars, task))

    def add(self, eqn: JaxprEqn, task: Task) -> None:
        self.eqns.append(eqn)
        self.tasks.append(task)

    def cast(self, var: Var, task: Task, there: dict[Var, Atom], reader: JaxprEqn) -> Var:
        """A cast in a task, made there if it is not yet.

        Where a stage computes its forward pass again, that is one program with the backward pass.
        A barrier, which what is `there` for the reader passes as well, keeps the casts of both
        apart, and each near its readers. The reader reads what has passed: XLA takes out of a
        barrier what nobody reads after it.

        Args:
          var: the cast, outside of the loop.
          task: that reads it.
          there: what the reader reads that the task made, and what stands for it after barriers.
          reader: the equation.
        """
        if (task, var) not in self.made:
            chain = self.chains[var]
            leaf = _leaf(chain)
            if leaf not in self.inner:
                self.inner[leaf] = jax_compat.new_var(leaf.aval)
                self.stored.add(self.inner[leaf])
            value = self.inner[leaf]
            if task != self.loop.tasks[0]:
                eqns: list[JaxprEqn] = []
                atoms = [value, *there.values()]
                passed, *others = passed_by_barrier(atoms, reader.source_info, eqns)
                assert isinstance(passed, Var)
                value = passed
                there.update(zip(there, others, strict=True))
                self.add(eqns[0], task)
            for eqn in chain:
                out = jax_compat.new_var(eqn.outvars[0].aval)
                self.add(eqn.replace(invars=[value], outvars=[out]), task)
                value = out
            self.made[task, var] = value
        return self.made[task, var]

    def scan(self) -> JaxprEqn:
        """The loop with what was made in it."""
        loop = self.loop
        consts = [(v, atom) for v, atom in loop.consts.items() if v not in self.outer]
        known = {v for v, _ in consts}
        leaves = {_leaf(chain): None for chain in self.chains.values()}
        consts += [(self.inner[leaf], leaf) for leaf in leaves if self.inner[leaf] not in known]
        slices = list(loop.slices.items())
        return scan_like(loop.scan, consts, loop.accumulators, slices, loop.stacks, self.eqns)


def _without(eqns: Sequence[JaxprEqn], may_go: set[int], step: Microbatched) -> list[JaxprEqn]:
    """Equations, without those of which nothing is read any more, of those that may go."""
    read = set(variables(step.graph.jaxpr.outvars))
    kept: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        if id(eqn) not in may_go or not read.isdisjoint(eqn.outvars):
            kept.append(eqn)
            read.update(variables(eqn.invars))
    return kept[::-1]
