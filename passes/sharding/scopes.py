"""The program as the integer program sees it: groups of equations that share one strategy.

Every equation becomes an `Entry` of the `Scope` (the program, or the body of a scan or a cond) that
holds it. An entry is one of

- `grouped`: it has a strategy for every strategy of its group (a node of the integer program);
  matrix products and joins of big values open a group, what merely follows an operand belongs to
  that operand's group;
- `recomputed`: made from little (an iota, random bits, a broadcast), it is computed wherever it is
  read, in the layout in which it is read;
- `replicated`: scalars; every device has them, and sums of partial scalars stay partial until a
  nonlinear use;
- `passed`: a barrier, whose results lie as its operands do: it decides nothing and costs nothing;
- `scan`, `cond`: boundary nodes for what enters and leaves, and inner scopes;
- `opaque`: no factor may be cut, every device computes it whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jax.extend.core import Jaxpr, JaxprEqn

from autopar.passes.graph.graph import Atom
from autopar.passes.sharding.layout import Layout
from autopar.passes.sharding.strategies import Shape, Strategy

EntryKind = Literal["grouped", "recomputed", "replicated", "passed", "scan", "cond", "opaque"]


@dataclass
class Entry:
    """One equation: how it is handled, its node, and its strategy for each of the node's."""

    kind: EntryKind
    eqn: JaxprEqn
    shape: Shape | None = None
    node: int | None = None
    strategies: tuple[Strategy, ...] = ()
    scopes: tuple[Scope, ...] = ()
    boundaries: tuple[int | None, ...] = ()  # scan: consts, carry, xs, ys; cond: results
    completions: tuple[int | None, ...] = ()  # scan: nodes that decide how its sums are completed
    part_of: JaxprEqn | None = None  # the program's equation, if the entry is for a part of it


@dataclass
class Scope:
    """A jaxpr, how many times a step it runs, and one entry per equation.

    Of branches, those that are not the longest count as a small part of a time. `microbatch` is
    true in the loop over the microbatches, and in the bodies there.
    """

    jaxpr: Jaxpr
    times: float
    microbatch: bool = False
    entries: list[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class Assigned:
    """A value whose layout is decided by a node: one layout for each of the node's strategies."""

    node: int
    layouts: tuple[Layout, ...]
    shape: tuple[int, ...]
    itemsize: int
    live: LiveRange
    sum_ratio: float = 1.0  # bytes of an element as devices add it, over those that it has


@dataclass
class LiveRange:
    """When an assigned value is alive: from its definition to its last use, in equations walked.

    `entering`: it is one microbatch's slice of a stack, there from its first use. `absent`: it is a
    stack of which a stage only ever has what belongs to a few microbatches. `same_as`: in the
    layout of that value, it is that value's buffer. `made_again`: it is no buffer, because all who
    read it compute it. `copied`: when it was read last, and brought from the hosts' memory if it
    lies there. `since`: from when on it is there in a program that is not cut into pieces, which
    keeps what it has brought into a layout for who reads it next.
    """

    first: int
    last: int
    fused: bool
    entering: bool = False
    absent: bool = False
    made_again: bool = False
    same_as: Assigned | None = None
    copied: int = -1
    since: int | None = None


@dataclass(frozen=True, eq=False)
class Recomputed:
    """A value that is computed in whatever layout it is read.

    Of its equation's operands, those that every device has are None. `depth` counts the equations
    that it takes, one after another.
    """

    eqn: JaxprEqn
    shape: Shape
    operands: tuple[Assigned | Recomputed | None, ...]
    depth: int

    @classmethod
    def of(cls, eqn: JaxprEqn, shape: Shape, values: Sequence[ScopeValue]) -> Recomputed:
        """What an equation makes of these operands."""
        depth = 1 + max((v.depth for v in values if isinstance(v, Recomputed)), default=0)
        operands = (None if isinstance(v, Replicated) else v for v in values)
        return cls(eqn, shape, tuple(operands), depth)


@dataclass(frozen=True)
class Replicated:
    """A scalar, or a handful of numbers."""


ScopeValue = Assigned | Recomputed | Replicated

FILLS = frozenset(("broadcast_in_dim", "convert_element_type", "iota", "reshape"))
"""What is no arithmetic on constants: who reads the result makes it."""


def is_constant(value: ScopeValue) -> bool:
    """Whether a value is filled with scalars, without arithmetic."""
    if not isinstance(value, Recomputed):
        return isinstance(value, Replicated)
    is_filled = value.eqn.primitive.name in FILLS
    return is_filled and all(x is None or is_constant(x) for x in value.operands)


@dataclass
class Node:
    """One decision of the integer program.

    `seconds[s]` is what strategy s costs a step by itself; `label` and `source` are for people.
    """

    label: str
    source: str
    num_strategies: int
    layouts: tuple[Layout, ...]
    times: float
    seconds: list[float] = field(default_factory=list)
    choices: tuple[Strategy, ...] = ()


def aval_shape(var: Atom) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return tuple(var.aval.shape)


def value_bytes(var: Atom) -> int:
    """Bytes of a whole variable or literal."""
    return math.prod(aval_shape(var)) * itemsize(var.aval)


def itemsize(aval: Any) -> int:
    """Bytes of one element; a PRNG key counts as what it wraps."""
    return dtype_bytes(aval.dtype)


def dtype_bytes(dtype: Any) -> int:
    """Bytes of one element of a dtype."""
    return int(getattr(dtype, "itemsize", 8) or 8)
