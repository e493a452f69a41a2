"""The step in which values of the forward pass are computed again before they are first read.

An equation that runs again stands, once for its layer, just before the first backward equation that
needs it. What it reads passes a barrier first, as after `jax.checkpoint`, so that XLA does not take
the two for one. A gradient that arrives at the layer passes the same barrier: nothing of the layer
can run again before the backward pass has come to it. Random bits come from the same keys, which
pass it as well: XLA:GPU made the bits of all dropouts of a BERT in one kernel, and kept them.

All of a layer that is kept is read after its barrier, else XLA:GPU keeps what it is made of beside
it: the queries, keys and values of a GPT, and the product that they are parts of. What is kept in
the hosts' memory is put there when it is made, and comes back by that barrier.
"""

from __future__ import annotations

from dataclasses import replace

from jax.extend import core as jex_core
from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var

from autopar.passes.graph import jax_compat
from autopar.passes.graph.graph import Atom, variables
from autopar.passes.graph.host_values import put_away
from autopar.passes.graph.microbatched import Microbatched, Task
from autopar.passes.graph.name_stacks import marked_again
from autopar.passes.recompute.choice import KeptValues
from autopar.passes.recompute.kept_choice import KeptChoice


def recomputed(values: KeptValues, kept: KeptChoice) -> Microbatched:
    """The step that keeps what is chosen, and computes again what else its backward pass reads."""
    step, loop = values.parts.step, values.parts.loop
    walk = _Rewriting(values, kept)
    walk.run()
    body = jax_compat.replace_jaxpr(loop.body, eqns=walk.out)
    scan = loop.scan
    closed = ClosedJaxpr(body, scan.params["jaxpr"].consts)
    return step.with_scan(scan.replace(params={**scan.params, "jaxpr": closed}), walk.tasks)


class _Rewriting:
    """One walk over the body of the loop over microbatches."""

    def __init__(self, values: KeptValues, kept: KeptChoice) -> None:
        self.values, self.kept = values, kept
        self.eqns = list(values.parts.body.eqns)
        for number, cut in kept.scans:
            reader, pair = values.pairs[number]
            pair = replace(pair, backward=self.eqns[reader])  # of several forward scans
            self.eqns[number], self.eqns[reader] = pair.rewritten(cut)
        self.late = values.late
        self.home = {var: layer for layer, wanted in values.wanted.items() for var in wanted}
        self.rerun = {layer for layer, _ in kept.again}
        self.out: list[JaxprEqn] = []
        self.since: list[int] = []  # of each of the old equations, where what it needs begins
        self.fresh: dict[tuple[int, Var], Var] = {}  # by layer: what is computed again
        self.through: dict[tuple[int, Var], Var] = {}  # by layer: what has passed its barrier
        self.begun: set[int] = set()
        self.away: dict[Var, Var] = {}  # what is in the hosts' memory
        self.back: dict[Var, Var] = {}  # what was brought back from there last
        self.arrived: dict[Var, Var] = {}  # gradients, as they have passed the last barrier

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Of a stage, the tasks of the new body's equations: what runs again is its reader's."""
        ends = (*self.since[1:], len(self.out))
        old = zip(self.values.parts.loop.tasks, self.since, ends, strict=False)
        return tuple(task for task, start, stop in old for _ in range(stop - start))

    def run(self) -> None:
        """Write the equations of the new body."""
        for index, eqn in enumerate(self.eqns):
            self.since.append(len(self.out))
            if index in self.late:
                eqn = self._reader(index, eqn)
            self.out.append(eqn)
            for var in eqn.outvars:
                if var in self.kept.hosted:
                    put = put_away(var, eqn.source_info)
                    self.out.append(put)
                    self.away[var] = put.outvars[0]

    def _reader(self, index: int, eqn: JaxprEqn) -> JaxprEqn:
        """A backward equation, which may read what is computed again."""
        env: dict[Var, Var] = {}
        for var in variables(eqn.invars):
            layer = self.home.get(var)
            if layer is not None and (layer in self.rerun or var in self.away):
                if layer not in self.begun:
                    self._begin(layer, index)
                if self._is_again(layer, var):
                    env[var] = self._again(layer, var)
        for var in variables(eqn.invars):
            passed = self.through.get((self.home.get(var, -1), var))
            if var in self.away:
                env[var] = self.back.get(var, self.away[var])
            elif passed is not None:
                env.setdefault(var, passed)
            elif var in self.arrived:
                env.setdefault(var, self.arrived[var])
        if not env:
            return eqn
        return eqn.replace(invars=[_read(env, atom) for atom in eqn.invars])

    def _is_again(self, layer: int, var: Var) -> bool:
        """Whether a layer's backward pass computes a value again."""
        number = self.values.maker.get(var)
        runs = number is not None and (layer, number) in self.kept.again
        given = self.values.is_given(layer, var)
        return runs and not given and var not in self.kept.values

    def _begin(self, layer: int, index: int) -> None:
        """The barrier before a layer, of which an equation is the first that reads something.

        Who reads the gradient that it waits for reads it after the barrier, and if another layer
        begins at the same place, after both: else one of the two waits for nothing. XLA:TPU ran
        all of a GPT's attention again at once, for the barrier of the program's own
        `jax.checkpoint` reads two layers of each block.
        """
        self.begun.add(layer)
        needed: dict[Var, None] = {}
        stack = [v for v in self.values.wanted[layer] if self._is_again(layer, v)]
        seen = set(stack)
        while stack:
            eqn = self.eqns[self.values.maker[stack.pop()]]
            for var in variables(eqn.invars):
                if not self._is_again(layer, var):
                    needed[var] = None
                elif var not in seen:
                    seen.add(var)
                    stack.append(var)
        kept = self.kept.values
        needed |= dict.fromkeys(v for v in self.values.wanted[layer] if v in self.away or v in kept)
        gradients = self._arriving(index)
        named = [*needed, *gradients]
        passing = [self.away.get(v, self.arrived.get(v, v)) for v in named]
        results = [jax_compat.new_var(v.aval) for v in passing]
        barrier = jax_compat.optimization_barrier_primitive()
        info, effects = self.eqns[index].source_info, jex_core.no_effects
        if passing:
            self.out.append(jex_core.new_jaxpr_eqn(passing, results, barrier, {}, effects, info))
        passed = dict(zip(named, results, strict=True))
        self.through.update(((layer, var), passed[var]) for var in needed)
        self.back.update((var, passed[var]) for var in needed if var in self.away)
        self.arrived.update((var, passed[var]) for var in gradients)

    def _arriving(self, index: int) -> list[Var]:
        """The gradients that are there before an equation and that it, or what comes next, reads.

        What reads a layer first may read nothing else: its derivatives, of what it has kept.
        """
        made = self.values.maker
        for number in range(index, len(self.eqns)):
            read = variables(self.eqns[number].invars) if number in self.late else []
            there = [v for v in read if made.get(v) in self.late and made[v] < index]
            found = [v for v in there if variables(self.eqns[made[v]].invars)]
            if found:
                return found
        return []

    def _again(self, layer: int, var: Var) -> Var:
        """A value that is computed again, with the equations that it needs."""
        stack: list[tuple[int, bool]] = [(self.values.maker[var], False)]
        while stack:
            number, ready = stack.pop()
            eqn = self.eqns[number]
            if any((layer, v) in self.fresh for v in eqn.outvars):
                continue
            operands = [v for v in variables(eqn.invars) if self._is_again(layer, v)]
            if not ready:
                stack.append((number, True))
                stack += [
                    (self.values.maker[v], False) for v in operands if (layer, v) not in self.fresh
                ]
                continue
            env = {v: self.fresh[layer, v] for v in operands}
            env |= {
                v: self.through[layer, v]
                for v in variables(eqn.invars)
                if (layer, v) in self.through and v not in env
            }
            made = [
                v if isinstance(v, DropVar) else jax_compat.new_var(v.aval) for v in eqn.outvars
            ]
            self.fresh.update(((layer, v), new) for v, new in zip(eqn.outvars, made, strict=True))
            self.out.append(marked_again(eqn, [_read(env, a) for a in eqn.invars], made))
        return self.fresh[layer, var]


def _read(env: dict[Var, Var], atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else env.get(atom, atom)
