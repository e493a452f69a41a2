"""Compares the runs of two forms of one train step: outputs and states, over several steps.

What is compared, leaf by leaf: the tree's structure, the dtype, the shape and (of the first step)
the weak type exactly; the values of integers, booleans and random keys (by their key data) exactly;
where floating-point values are not finite, which kind of not finite exactly; the finite ones by
their *relative difference*, the largest absolute difference in the leaf over the largest magnitude
in the plain run's leaf. What the steps print must be the same lines.

Why not element by element: a sum over a batch that is added up in another order is wrong by about
the dtype's precision times the magnitude of what was added, and so are small elements next to
large ones.

Why these tolerances (`RELATIVE`): on eight devices and in microbatches every sum over the batch is
added up in another order. In float32 (precision 6e-8) plain `jax.jit` on sharded inputs differs
from plain `jax.jit` on one device by up to 3e-6 over three steps of the programs here, mostly where
a gradient is the small difference of large terms; 1e-4 leaves room for ten times that and is still
far below any mistake (a lost row of 32 is 3e-2). In float64 the same sums differ by
1e-14 and the bound is 1e-10: so a difference that float32 would hide shows there. With computation
in bfloat16 (precision 4e-3) a value next to a rounding boundary falls on its other side when its
float32 sum changes in the last bit, and later layers carry that on: single elements of a gradient
differ by one or two such roundings (measured: 1e-2 of the leaf's largest); the bound is 5e-2, and
the float32 programs check the arithmetic. What Adam would do to all this is in
`programs.optimizers`.

Leaves whose gradient is zero in exact arithmetic hold nothing but rounding noise, of which no
relative difference makes sense: a program names them (`Tolerance.zero_gradients`), and they are
compared in units of `Tolerance.zero_scale`.
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.arrays.ray_array import RayArray
from autopar.arrays.split_array import SplitArray

from . import data
from .case import Case, Tolerance

RELATIVE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""The largest accepted relative difference, by dtype."""

DEFAULT = Tolerance()
"""The tolerance by dtype alone."""


@dataclass(frozen=True)
class Leaf:
    """A leaf of a run on the host.

    Args:
        kind: "array", "key" or "object" (a static leaf, such as an Equinox model's activation).
        dtype: the dtype's name, or a key's generator.
        shape: the shape; a key's data may have more dimensions.
        weak_type: whether JAX promotes the array as it does a Python number.
        value: a NumPy array, or the object itself.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    weak_type: bool
    value: Any


@dataclass(frozen=True)
class Run:
    """What the steps of a program did.

    Args:
        structures: for each step, the tree that it returned.
        steps: for each step, the leaves of that tree by path.
        printed: the lines that all steps printed, sorted, because `jax.debug.print` keeps no order.
    """

    structures: tuple[Any, ...]
    steps: tuple[dict[str, Leaf], ...]
    printed: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """How one leaf of one step differs.

    Args:
        step: the step's index.
        path: the leaf's path below "outputs" or "state".
        relative: the relative difference; infinite where the leaves are not comparable.
        allowed: the tolerance that applies.
        detail: a sentence for people.
    """

    step: int
    path: str
    relative: float
    allowed: float
    detail: str

    @property
    def excess(self) -> float:
        """The difference in units of what is allowed."""
        if self.relative == 0:
            return 0.0
        return self.relative / self.allowed if self.allowed else np.inf

    def __str__(self) -> str:
        return f"step {self.step}, {self.path}: {self.detail}"


def copy_tree(tree: Any) -> Any:
    """A copy of the arrays of a tree; leaves that are one array stay one array."""
    copies: dict[int, Any] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, (jax.Array, np.ndarray)):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.copy()
        return copies[id(leaf)]

    return jax.tree.map(copy, tree)


def record(function: Callable[..., Any], case: Case, steps: int = data.STEPS) -> Run:
    """Runs `function`, a form of `case.step`, from a copy of the case's state."""
    state = copy_tree(case.state)
    structures, leaves = [], []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for index in range(steps):
            outputs = case.call(function, state, index)
            state = case.next_state(state, outputs)
            tree = {"outputs": outputs}
            returned = {id(leaf) for leaf in jax.tree.leaves(outputs)}
            if not all(id(leaf) in returned for leaf in jax.tree.leaves(state)):
                tree["state"] = state
            paths, structure = jax.tree_util.tree_flatten_with_path(tree)
            structures.append(structure)
            leaves.append({_path(path): _to_host(leaf) for path, leaf in paths})
        jax.effects_barrier()
    lines = sorted(printed.getvalue().splitlines())
    return Run(tuple(structures), tuple(leaves), tuple(lines))


def differences(plain: Run, parallel: Run, tolerance: Tolerance = DEFAULT) -> list[Difference]:
    """The differences of all leaves of all steps, the worst first.

    Raises:
        AssertionError: the runs returned other trees, so that leaves cannot be paired.
    """
    found = []
    for step, (expected, actual) in enumerate(zip(plain.steps, parallel.steps, strict=True)):
        if plain.structures[step] != parallel.structures[step]:
            missing, added = sorted(expected.keys() - actual), sorted(actual.keys() - expected)
            raise AssertionError(
                f"step {step} returned another tree: without {missing}, with {added};\n"
                f"plain:    {plain.structures[step]}\nparallel: {parallel.structures[step]}"
            )
        for path, leaf in expected.items():
            found.append(_difference(step, path, leaf, actual[path], tolerance))
    return sorted(found, key=lambda difference: -difference.excess)


def assert_steps_equal(
    plain: Callable[..., Any] | Run,
    parallel: Callable[..., Any] | Run,
    case: Case,
    tolerance: Tolerance = DEFAULT,
) -> None:
    """Asserts that two forms of a step do the same over three steps from the same state.

    Args:
        plain: the form that is right, or its recorded run.
        parallel: the form to judge, or its recorded run.
        case: the program; both forms get copies of its state.
        tolerance: the program's tolerance.

    Raises:
        AssertionError: a leaf differs by more than its tolerance, and the message names the worst
            ones; or what the steps printed differs.
    """
    plain = plain if isinstance(plain, Run) else record(plain, case)
    parallel = parallel if isinstance(parallel, Run) else record(parallel, case)
    found = differences(plain, parallel, tolerance)
    wrong = [difference for difference in found if difference.excess > 1]
    if wrong:
        lines = "\n".join(f"  {difference}" for difference in wrong[:8])
        raise AssertionError(f"{len(wrong)} of {len(found)} leaves differ, the worst:\n{lines}")
    if plain.printed != parallel.printed:
        raise AssertionError(f"printed {parallel.printed}, should be {plain.printed}")


def largest_relative_difference(
    plain: Callable[..., Any] | Run,
    parallel: Callable[..., Any] | Run,
    case: Case,
    tolerance: Tolerance = DEFAULT,
) -> Difference:
    """The floating-point leaf whose relative difference over three steps is the largest.

    Takes what `assert_steps_equal` takes. Leaves that hold rounding noise only, which the tolerance
    names, count in units of its `zero_scale`. The result's `relative` is infinite where leaves are
    not comparable or where exact ones differ.
    """
    plain = plain if isinstance(plain, Run) else record(plain, case)
    parallel = parallel if isinstance(parallel, Run) else record(parallel, case)
    return max(differences(plain, parallel, tolerance), key=lambda found: found.relative)


def _path(path: Sequence[Any]) -> str:
    return path[0].key + jax.tree_util.keystr(tuple(path[1:]))


def _to_host(leaf: Any) -> Leaf:
    if isinstance(leaf, RayArray):
        weak, leaf = leaf.weak_type, jax.device_get(leaf)
        host = _to_host(leaf)
        return host if host.kind == "key" else replace(host, kind="array", weak_type=weak)
    if isinstance(leaf, jax.Array):
        aval = jax.typeof(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(leaf))
            return Leaf("key", str(jax.random.key_impl(leaf)), leaf.shape, False, data)
        return Leaf("array", leaf.dtype.name, leaf.shape, aval.weak_type, np.asarray(leaf))
    if isinstance(leaf, SplitArray):
        return Leaf("array", leaf.dtype.name, leaf.shape, leaf.weak_type, np.asarray(leaf))
    if isinstance(leaf, (np.ndarray, np.generic)):
        return Leaf("host array", leaf.dtype.name, leaf.shape, False, np.asarray(leaf))
    return Leaf("object", type(leaf).__name__, (), False, leaf)


def _difference(
    step: int, path: str, expected: Leaf, actual: Leaf, tolerance: Tolerance
) -> Difference:
    def incomparable(detail: str) -> Difference:
        return Difference(step, path, np.inf, 0.0, detail)

    # A weak type of the first state may become a strong one: jit compiles again then, but a step
    # that was compiled ahead of time keeps the types that it was compiled for.
    for name in ("kind", "dtype", "shape", *(["weak_type"] if step == 0 else [])):
        wanted, got = getattr(expected, name), getattr(actual, name)
        if wanted != got:
            return incomparable(f"{name} is {got}, should be {wanted}")
    if expected.kind == "object":
        same = expected.value is actual.value or expected.value == actual.value
        return (
            Difference(step, path, 0.0, 0.0, "the same object")
            if same
            else incomparable(f"is {actual.value!r}, should be {expected.value!r}")
        )
    wanted, got = expected.value, actual.value
    if not jnp.issubdtype(wanted.dtype, jnp.floating):
        wrong = int(np.sum(wanted != got))
        if wrong:
            return incomparable(f"{wrong} of {wanted.size} elements differ, should be exact")
        return Difference(step, path, 0.0, 0.0, "exact")
    return _floating_difference(step, path, wanted, got, tolerance)


def _floating_difference(
    step: int, path: str, wanted: np.ndarray, got: np.ndarray, tolerance: Tolerance
) -> Difference:
    allowed = tolerance.relative or RELATIVE[wanted.dtype.name]
    # NumPy computes bfloat16 in bfloat16, so that differences would be rounded.
    wanted, got = wanted.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(wanted)
    if not np.array_equal(wanted[~finite], got[~finite], equal_nan=True) or not np.array_equal(
        finite, np.isfinite(got)
    ):
        detail = "other elements are infinite or not a number"
        return Difference(step, path, np.inf, allowed, detail)
    if not finite.any():
        return Difference(step, path, 0.0, allowed, "no finite element, the same ones")
    absolute = np.max(np.abs(wanted[finite] - got[finite]))
    scale = np.max(np.abs(wanted[finite]))
    if any(fragment in path for fragment in tolerance.zero_gradients):
        scale = max(scale, tolerance.zero_scale)
    with np.errstate(divide="ignore"):
        relative = float(absolute / scale) if absolute else 0.0
    detail = f"differs by {absolute:.3g} where the largest is {scale:.3g} ({relative:.3g})"
    return Difference(step, path, relative, allowed, f"{detail}, allowed {allowed:.3g}")
