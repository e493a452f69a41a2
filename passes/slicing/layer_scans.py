"""Scans over layers: loops in the forward pass whose slices are a state's stacked leaves.

`lax.scan(layer, x, stacked_params)` is one equation, but a pipeline may be cut between any two of
its iterations. A scan over time is none: what it reads of the state is the same in every iteration.
"""

from __future__ import annotations

from typing import NamedTuple

from jax.extend.core import Literal

from autopar.passes.graph.barriers import is_barrier
from autopar.passes.graph.graph import Atom, variables
from autopar.passes.graph.primitives import ELEMENTWISE
from autopar.passes.graph.scans import ScanParts
from autopar.passes.slicing.anatomy import Anatomy, bytes_of, held_leaves


class Origins:
    """Which state leaf a value is made from, element by element, and along which dimension."""

    def __init__(self, parts: Anatomy) -> None:
        self._leaves = held_leaves(parts.graph)
        self._outside = parts.loop.consts
        self._made_by = {
            var: (eqn, place)
            for eqn in (*parts.graph.jaxpr.eqns, *parts.body.eqns)
            for place, var in enumerate(eqn.outvars)
        }

    def of(self, atom: Atom, axis: int) -> tuple[int, int] | None:
        """The input number of the leaf, and its dimension that is the value's dimension `axis`.

        None if the value is made from several leaves, or not element by element.
        """
        while not isinstance(atom, Literal):
            if atom in self._leaves:
                return self._leaves[atom], axis
            if atom in self._outside:
                atom = self._outside[atom]
                continue
            if atom not in self._made_by:
                return None
            eqn, place = self._made_by[atom]
            name = eqn.primitive.name
            if is_barrier(eqn):
                atom = eqn.invars[place]
            elif name == "transpose":
                atom, axis = eqn.invars[0], int(eqn.params["permutation"][axis])
            elif name in ELEMENTWISE:
                shape = eqn.outvars[place].aval.shape
                large = [v for v in eqn.invars if v.aval.shape == shape]
                if len({id(v) for v in large}) != 1:
                    return None
                atom = large[0]
            else:
                return None
        return None


class LayerScan(NamedTuple):
    """A scan over `length` layers, each of which takes a slice of these leaves of the state."""

    length: int
    leaves: frozenset[int]


def find_layer_scans(parts: Anatomy) -> dict[int, LayerScan]:
    """The body's forward equations that scan over layers, by their numbers."""
    origins, leaves = Origins(parts), parts.leaves
    found = {}
    for index in parts.trunk():
        eqn = parts.body.eqns[index]
        if eqn.primitive.name != "scan" or eqn.effects or eqn.params["length"] < 2:
            continue
        consts, _, slices = ScanParts.of(eqn).operands(eqn.invars)
        stacked = {}  # bytes of the state's leaves
        for var in variables(slices):
            origin = origins.of(var, 0) if var.aval.shape else None
            if origin is not None:
                stacked[origin[0]] = bytes_of(var)
        shared = variables(consts)
        if sum(stacked.values()) > sum(bytes_of(v) for v in shared if v in leaves):
            found[index] = LayerScan(int(eqn.params["length"]), frozenset(stacked))
    return found
