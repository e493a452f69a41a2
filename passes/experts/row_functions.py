"""What is known of values row by row: constants, functions of one number for each row, counts.

Rows are told apart by numbers: a row's own place, its key, where a sort put it. An index that is
computed from such a number is a function of it alone, which is evaluated here, for all numbers that
there can be: so it is proven, not guessed, that `order // 2` names the token of a choice, that a
wrapped index is the index, that a scatter's mask is all true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.lax import GatherScatterMode

from autopar.passes.experts.bounds import bounds_of
from autopar.passes.experts.row_arithmetic import evaluated, lead_after
from autopar.passes.graph.graph import Atom
from autopar.passes.primitives.shardings import shape_of

LARGEST_CONSTANT = 4096
"""Elements of a constant that is kept as an array."""
LARGEST_NUMBER = 1 << 28
AT_ONCE = 1 << 16
"""Numbers that are tried at once."""
MOST_KEYS = 1 << 16
"""Of how many keys it is tried what becomes of them."""

Compute = Callable[[Any, dict[int, Any]], Any]
"""From numbers [D] to values [D, ...]; dimensions along which all is equal may have size 1.

It is given what is computed already, by the keys of functions.
"""

_keys: dict[Hashable, int] = {}


def key_of(*parts: Hashable) -> int:
    """A number for what makes up a function, the same for the same parts."""
    return _keys.setdefault(parts, len(_keys))


@dataclass(frozen=True)
class RowNumbers:
    """What tells rows apart: "place" (their own), "keys" of a sort, "order" and "rank" by one.

    A sort's order has, at each place, the row that it puts there; its rank has, for each row, the
    place to which it is put. "sorted" are the keys in an order.
    """

    kind: str
    of: Any = None

    @property
    def keys(self) -> Var | None:
        """The keys of rows, in whichever order."""
        if self.kind not in ("keys", "sorted"):
            return None
        keys: Var = self.of if self.kind == "keys" else self.of.keys
        return keys


@dataclass(frozen=True)
class RowFunction:
    """A value each row of which is a function of a number of the row.

    Args:
      numbers: which.
      lead: how many first dimensions are those of rows.
      rows: how many rows.
      key: equal for equal functions.
      compute: the function, for any numbers.
      tried: its values for 0 and 1.
    """

    numbers: RowNumbers
    lead: int
    rows: int
    key: int
    compute: Compute
    tried: Any = None

    def evaluate(self, numbers: Any, known: dict[int, Any] | None = None) -> Any:
        """Its values for numbers, each part computed once."""
        known = {} if known is None else known
        if self.key not in known:
            known[self.key] = self.compute(numbers, known)
        return known[self.key]

    @property
    def is_number(self) -> bool:
        """Whether it is the number itself, wherever there is one."""
        return _known(("number", self.key, self.rows), lambda: self._holds(lambda x, f: f == x))

    def is_local(self, parts: int, rows: int) -> bool:
        """Whether each part of the numbers is sent into the same part of so many rows, as others.

        If so, its values on the numbers of the first part are those within every part.
        """
        if rows % parts:
            return False
        size, each = self.rows // parts, rows // parts

        def is_same(numbers: Any, found: Any) -> Any:
            found = found - each * (numbers // size)
            first = self.evaluate(numbers % size).reshape(-1)
            return (found == first) & (found >= 0) & (found < each)

        key = "local", self.key, self.rows, parts, rows
        return _known(key, lambda: self._holds(is_same))

    def constant(self) -> np.ndarray | None:
        """What it is for all rows, with a first dimension of 1; None: not the same."""
        return _known(("constant", self.key, self.rows), self._constant)

    def _constant(self) -> np.ndarray | None:
        first = self.evaluate(np.zeros(1, np.int32))
        if first.size != 1:
            return None
        is_same = self._holds(lambda _, found: found == first.reshape(()))
        return first if is_same else None

    def _holds(self, claim: Callable[[Any, Any], Any]) -> bool:
        """Whether something holds for each number and its value."""
        if self.rows >= LARGEST_NUMBER:
            return False
        for start in range(0, self.rows, AT_ONCE):
            numbers = np.arange(start, min(start + AT_ONCE, self.rows), dtype=np.int32)
            found = self.evaluate(numbers)
            if found.size != numbers.size or not np.all(claim(numbers, found.reshape(-1))):
                return False
        return True


TWO = np.arange(2, dtype=np.int32)

_results: dict[Hashable, Any] = {}


def _known(key: Hashable, find: Callable[[], Any]) -> Any:
    """Found once: layers have the same functions."""
    if key not in _results:
        _results[key] = find()
    return _results[key]


def numbers_themselves(numbers: RowNumbers, lead: int, rows: int) -> RowFunction:
    """The number of each row."""
    return RowFunction(numbers, lead, rows, key_of("number"), lambda x, _: x, TWO)


def flattened(function: RowFunction, eqn: JaxprEqn) -> RowFunction | None:
    """Of places, each of which has several elements: of the places of all these elements.

    So is each row repeated by `jnp.repeat`.
    """
    (var,) = eqn.outvars
    shape = shape_of(eqn.invars[0])[function.lead :]
    each = math.prod(shape)
    is_flat = eqn.primitive.name == "reshape" and shape_of(var) == (function.rows * each,)
    if not is_flat or function.numbers.kind != "place":
        return None

    def compute(numbers: Any, _: Any = None) -> Any:
        places, which = np.unique(numbers // each, return_inverse=True)
        made = function.evaluate(places)
        made = np.broadcast_to(made, (len(places), *shape)).reshape(len(places), each)
        return made[which, numbers % each]

    own = key_of("flattened", function.key, shape)
    tried = compute(TWO)
    return RowFunction(function.numbers, 1, function.rows * each, own, compute, tried)


@dataclass(frozen=True)
class Counts:
    """How many rows have each key; by `function`, of a key, which numbers a row with it adds to."""

    keys: Var
    function: RowFunction

    def are_of(self, groups: int, bounds: tuple[int, int]) -> bool:
        """Whether they are the counts of keys 0, 1, ... for keys within bounds (last excluded)."""
        first, last = bounds
        if first < 0 or last <= first or last > MOST_KEYS:
            return False
        key = ("counts", self.function.key, groups, last)
        return bool(_known(key, lambda: self._are_of(groups, last)))

    def _are_of(self, groups: int, last: int) -> bool:
        found = self.function.evaluate(np.arange(last, dtype=np.int32))
        wanted = np.arange(last)[:, None] == np.arange(groups)
        return found.shape == wanted.shape and bool((found == wanted).all())


class Facts:
    """What is known of the values of a program, or of a body."""

    def __init__(self) -> None:
        self.constants: dict[Var, np.ndarray] = {}
        """Values whose elements are known; dimensions along which all is equal have size 1."""
        self.functions: dict[Var, RowFunction] = {}
        self.counts: dict[Var, Counts] = {}
        self.bounds: dict[Var, tuple[int, int]] = {}
        """The least integer, and one more than the greatest."""

    def passed(self, pairs: Sequence[tuple[Atom, Var]]) -> Facts:
        """For a body: of its variables that are these values outside."""
        inner = Facts()
        for atom, var in pairs:
            if (constant := self.constant(atom)) is not None:
                inner.constants[var] = constant
            if isinstance(atom, Literal):
                continue
            if atom in self.functions and self.functions[atom].numbers.kind == "place":
                inner.functions[var] = self.functions[atom]
            if atom in self.bounds:
                inner.bounds[var] = self.bounds[atom]
        return inner

    def constant(self, atom: Atom) -> np.ndarray | None:
        """The elements of a value, if they are known."""
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            return value if value.size <= LARGEST_CONSTANT else None
        return self.constants.get(atom)

    def function(self, atom: Atom) -> RowFunction | None:
        return None if isinstance(atom, Literal) else self.functions.get(atom)

    def learn(self, eqn: JaxprEqn) -> None:
        """What follows for an equation's results from what is known of its operands."""
        if len(eqn.outvars) == 1:
            self._constant_of(eqn)
            function = self._function_of(eqn)
            if function is not None:
                self.functions[eqn.outvars[0]] = function
            counts = self._counts_of(eqn)
            if counts is not None:
                self.counts[eqn.outvars[0]] = counts
        for var, bounds in bounds_of(eqn, self._bounds).items():
            self.bounds[var] = bounds

    def _bounds(self, atom: Atom) -> tuple[int, int] | None:
        known = self.constant(atom)
        if known is not None and known.size and jnp.issubdtype(known.dtype, jnp.integer):
            return int(known.min()), int(known.max()) + 1
        return None if isinstance(atom, Literal) else self.bounds.get(atom)

    def _constant_of(self, eqn: JaxprEqn) -> None:
        (var,) = eqn.outvars
        if eqn.primitive.name == "iota":
            self._iota(eqn)
            return
        known = [self.constant(atom) for atom in eqn.invars]
        if not known or any(x is None for x in known):
            return
        made = evaluated(eqn, known, 0, None)
        if made is not None and made.size <= LARGEST_CONSTANT:
            self.constants[var] = made

    def _iota(self, eqn: JaxprEqn) -> None:
        (var,), shape = eqn.outvars, eqn.params["shape"]
        dim = eqn.params["dimension"]
        if shape[dim] <= LARGEST_CONSTANT:
            lazy = [size if d == dim else 1 for d, size in enumerate(shape)]
            self.constants[var] = np.arange(shape[dim]).astype(var.aval.dtype).reshape(lazy)
        if dim == 0:
            dtype, rest = var.aval.dtype, (1,) * (len(shape) - 1)
            key = key_of("iota", str(dtype), rest)

            def compute(numbers: Any, _: Any = None) -> Any:
                return numbers.astype(dtype).reshape(-1, *rest)

            own = RowNumbers("place"), 1, shape[0], key, compute, compute(TWO)
            self.functions[var] = RowFunction(*own)

    def _function_of(self, eqn: JaxprEqn) -> RowFunction | None:
        if eqn.primitive.name == "iota":
            return self.functions.get(eqn.outvars[0])
        functions = [self.function(atom) for atom in eqn.invars]
        found = [f for f in functions if f is not None]
        if not found or any(f.numbers != found[0].numbers for f in found):
            return None
        if any(f.lead != found[0].lead for f in found):
            return None
        lead, rows = found[0].lead, found[0].rows
        after = lead_after(eqn, lead, rows)
        if after is None:
            return flattened(found[0], eqn)
        operands: list[Any] = []
        tried: list[Any] = []
        keys: list[Hashable] = []
        for atom, function in zip(eqn.invars, functions, strict=True):
            if function is not None:
                operands.append(function.evaluate)
                tried.append(function.tried)
                keys.append((function.key, str(atom.aval.dtype)))
                continue
            known = self.constant(atom)
            if known is None or (known.ndim and any(n > 1 for n in known.shape[:lead])):
                return None
            if known.ndim:
                known = known.reshape(1, *known.shape[lead:])
            operands.append(lambda *_, known=known: known)
            tried.append(known)
            keys.append((known.tobytes(), str(known.dtype), known.shape))

        def compute(numbers: Any, known: dict[int, Any]) -> Any:
            return evaluated(eqn, [x(numbers, known) for x in operands], lead, len(numbers))

        made = evaluated(eqn, tried, lead, 2)
        if made is None:
            return None
        (var,) = eqn.outvars
        kind = eqn.primitive.name, str(eqn.params), str(var.aval.dtype), shape_of(var)[after:]
        return RowFunction(found[0].numbers, after, rows, key_of(kind, *keys), compute, made)

    def _counts_of(self, eqn: JaxprEqn) -> Counts | None:
        name = eqn.primitive.name
        if name in ("convert_element_type", "reshape", "copy"):
            known = None if isinstance(eqn.invars[0], Literal) else self.counts.get(eqn.invars[0])
            if known is None or shape_of(eqn.invars[0]) != shape_of(eqn.outvars[0]):
                return None
            return known if _holds_counts(eqn.outvars[0], known.function.rows) else None
        if name == "reduce_sum":
            function = self.function(eqn.invars[0])
            if function is None or function.numbers.keys is None:
                return None
            if tuple(eqn.params["axes"]) != tuple(range(function.lead)):
                return None
            if not _holds_counts(eqn.outvars[0], function.rows):
                return None
            rest = shape_of(eqn.invars[0])[function.lead :]

            def table(keys: Any, known: dict[int, Any]) -> Any:
                return np.broadcast_to(function.evaluate(keys, known), (len(keys), *rest))

            own = key_of("summed", function.key, rest)
            return Counts(
                function.numbers.keys,
                RowFunction(function.numbers, 1, function.rows, own, table),
            )
        return self._scattered_counts(eqn) if name == "scatter-add" else None

    def _scattered_counts(self, eqn: JaxprEqn) -> Counts | None:
        """Ones that are added where each row's index says: `jnp.bincount`."""
        base, indices, updates = eqn.invars
        zeros, ones = self.constant(base), self.constant(updates)
        function, numbers = self.function(indices), eqn.params["dimension_numbers"]
        is_plain = (
            zeros is not None
            and ones is not None
            and not zeros.any()
            and bool((ones == 1).all())
            and function is not None
            and function.numbers.keys is not None
            and len(shape_of(base)) == 1
            and numbers.update_window_dims == ()
            and numbers.inserted_window_dims == (0,)
            and shape_of(indices) == (*shape_of(updates), 1)
            and math.prod(shape_of(updates)) == function.rows
            and _holds_counts(eqn.outvars[0], function.rows)
        )
        if not is_plain:
            return None
        assert function is not None and function.numbers.keys is not None
        groups, mode = shape_of(base)[0], eqn.params["mode"]

        def table(keys: Any, known: dict[int, Any]) -> Any:
            index = function.evaluate(keys, known).reshape(len(keys), 1)
            if mode == GatherScatterMode.CLIP:
                index = np.clip(index, 0, groups - 1)
            return index == np.arange(groups)

        own = key_of("scattered", function.key, groups, str(mode))
        return Counts(
            function.numbers.keys,
            RowFunction(function.numbers, 1, function.rows, own, table),
        )


def _holds_counts(var: Var, rows: int) -> bool:
    """Whether a dtype has all numbers up to so many rows."""
    dtype = var.aval.dtype
    if jnp.issubdtype(dtype, jnp.integer):
        return bool(rows <= jnp.iinfo(dtype).max)
    return jnp.issubdtype(dtype, jnp.floating) and rows <= 2 ** (jnp.finfo(dtype).nmant + 1)
