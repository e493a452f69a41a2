"""Every real program, parallelized by every method, must do what it does under plain `jax.jit`."""

import contextlib
import dataclasses
import io
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from programs import PROGRAMS, Case, Program, Tolerance, compare, data, is_variant
from programs.plain_runs import plain_run

import autopar
from autopar.base.errors import InexactMicrobatchError

METHODS = ("data", "zero1", "zero2", "zero3", "shard", "auto")
MICROBATCHES = (1, 4)


def combinations() -> Iterator[Any]:
    """Programs x methods x microbatches; those beyond the covering subset are marked `full`.

    The subset has every program with one number of microbatches, and those of several loops, or of
    none, with both. Numbers and methods take turns, so that each method meets programs with either.
    (`tests/test_pipelines.py` runs every program but variants in four microbatches again.)
    """
    for index, program in enumerate(PROGRAMS.values()):
        for microbatches, (turn, method) in itertools.product(MICROBATCHES, enumerate(METHODS)):
            chosen = (index + 3 * (microbatches > 1)) % len(METHODS) == turn
            chosen &= in_both(program) or index // 2 % 2 == (microbatches == 1)
            yield pytest.param(
                program,
                method,
                microbatches,
                id=f"{program}-{method}-{microbatches}",
                marks=() if chosen else pytest.mark.full,
            )


def in_both(program: Program) -> bool:
    """Whether `make test` runs it with both numbers of microbatches."""
    return program.loops != 1 and not is_variant(program)


every_program = pytest.mark.parametrize("program", list(PROGRAMS.values()), ids=str)


def parallelize(case: Case, **options: Any) -> Callable[..., Any]:
    """The case's step, compiled for its first batch."""
    arguments = case.arguments(compare.copy_tree(case.state), case.batch)
    return autopar.compile(case.step, *arguments, **case.keywords[0], **{**case.options, **options})


@pytest.mark.parametrize(("program", "method", "microbatches"), list(combinations()))
def test_parallel_step_equals_plain_step(program: Program, method: str, microbatches: int) -> None:
    case, plain = plain_run(program.name)
    with program.context():
        if microbatches > 1 and not program.loops:
            with pytest.raises(InexactMicrobatchError, match=re.escape(program.file.name)):
                step = parallelize(case, method=method, microbatches=microbatches)
                compare.record(step, case, steps=1)
            return
        step = parallelize(case, method=method, microbatches=microbatches)
        compare.assert_steps_equal(plain, step, case, program.tolerance)


def test_every_method_meets_many_programs() -> None:
    chosen = [p.values for p in combinations() if not p.marks]
    for program in PROGRAMS.values():
        met = [m for p, _, m in chosen if p == program]
        assert tuple(met) == MICROBATCHES if in_both(program) else len(met) == 1
    for method, microbatches in itertools.product(METHODS, MICROBATCHES):
        programs = [p for p, *rest in chosen if rest == [method, microbatches] and p.loops]
        assert len(programs) >= 3, (method, microbatches)


@every_program
def test_program_is_sound(program: Program) -> None:
    """Plain runs give finite numbers and change the state, but for what the program is about."""
    _, run = plain_run(program.name)
    for step, leaves in enumerate(run.steps):
        overflows = program.module == "loss_scaling" and step == 1
        for path, leaf in leaves.items():
            if leaf.kind != "object" and leaf.value.dtype.kind == "f" and not overflows:
                assert np.isfinite(leaf.value).all(), f"step {step}, {path}"
    first, last = run.steps[0], run.steps[-1]
    changed = [path for path in first if not np.array_equal(first[path].value, last[path].value)]
    assert changed
    assert bool(run.printed) == program.prints


@every_program
def test_comparison_notices_one_lost_row(program: Program) -> None:
    """The tolerance is below what one row of the batch, replaced by its neighbour, changes."""
    case, plain = plain_run(program.name)

    def lose_row(leaf: Any) -> Any:
        if not isinstance(leaf, (np.ndarray, jax.Array)) or data.BATCH not in leaf.shape:
            return leaf
        axis = leaf.shape.index(data.BATCH)
        rows = np.arange(data.BATCH)
        rows[9] = 8
        return jnp.take(leaf, rows, axis=axis)

    damaged = dataclasses.replace(
        case,
        batches=jax.tree.map(lose_row, case.batches),
        keywords=jax.tree.map(lose_row, case.keywords),
    )
    with program.context(), pytest.raises(AssertionError, match="leaves differ"):
        compare.assert_steps_equal(plain, case.plain, damaged, program.tolerance)


@pytest.mark.full
@every_program
def test_tolerance_covers_another_order_of_sums(program: Program) -> None:
    """XLA's own partitioning of the plain step differs by at most half the tolerance."""
    case, plain = plain_run(program.name)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def shard(leaf: Any) -> Any:
        if not isinstance(leaf, (np.ndarray, jax.Array)) or data.BATCH not in leaf.shape:
            return leaf
        spec: list[str | None] = [None] * leaf.ndim
        spec[leaf.shape.index(data.BATCH)] = "x"
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    def sharded(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(shard, (args, kwargs))
        return case.plain(*args, **kwargs)

    with program.context():
        found = compare.differences(plain, compare.record(sharded, case), program.tolerance)
    assert found[0].excess <= 0.5, found[0]


class TestCompare:
    """What `programs.compare` must notice, on a step with leaves of every kind."""

    @staticmethod
    def case(**changes: Any) -> Case:
        """A step whose outputs can be replaced one by one."""

        def step(state: dict[str, Any], batch: jax.Array) -> tuple[Any, Any]:
            total = jnp.sum(batch) + state["x"]
            outputs = {
                "x": total,
                "half": total.astype(jnp.bfloat16),
                "count": jnp.arange(3),
                "flag": jnp.array([True, False]),
                "key": jax.random.key(1),
                "weak": jnp.asarray(2.0),
                "limits": jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0]),
            }
            text = changes.pop("print", "seven")
            outputs |= changes
            jax.debug.print(text)
            return {"x": total}, outputs

        batches = [(np.ones(4, np.float32),)] * 3
        return Case(step, {"x": jnp.float32(1)}, batches)

    def judge(self, **changes: Any) -> None:
        """Compares the step with its changed form."""
        plain, changed = self.case(), self.case(**changes)
        with contextlib.redirect_stdout(io.StringIO()) as stray:
            compare.assert_steps_equal(plain.plain, changed.plain, plain)
        assert not stray.getvalue()

    def test_accepts_equal_runs(self) -> None:
        self.judge()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"x": np.float32(5.01)}, r"outputs\[1\]\['x'\]: differs by"),
            ({"half": np.array(6, "bfloat16")}, r"'half'\]: differs by"),
            ({"half": np.float32(5)}, r"'half'\]: dtype is float32, should be bfloat16"),
            ({"x": np.zeros((1,))}, r"shape is \(1,\), should be \(\)"),
            ({"weak": np.float32(2)}, "weak_type is False, should be True"),
            ({"count": np.array([0, 1, 3])}, "1 of 3 elements differ"),
            ({"flag": np.array([False, True])}, "2 of 2 elements differ"),
            ({"limits": np.array([np.inf, np.inf, np.nan, 1.0])}, "infinite"),
            ({"limits": np.array([np.inf, -np.inf, 1.0, 1.0])}, "infinite"),
            ({"limits": np.array([1.0, -np.inf, np.nan, 1.0])}, "infinite"),
            ({"more": 1}, r"another tree: without \[\], with \[.*'more'"),
            ({"print": "eight"}, "printed"),
        ],
    )
    def test_notices(self, changes: dict[str, Any], message: str) -> None:
        changes = {k: jnp.asarray(v) if k == "more" else v for k, v in changes.items()}
        with pytest.raises(AssertionError, match=message):
            self.judge(**changes)

    def test_notices_another_key(self) -> None:
        with pytest.raises(AssertionError, match="elements differ"):
            self.judge(key=jax.random.key(2))

    def test_notices_another_generator(self) -> None:
        with pytest.raises(AssertionError, match="dtype is"):
            self.judge(key=jax.random.key(1, impl="rbg"))

    def test_reports_the_largest_difference(self) -> None:
        plain, changed = self.case(), self.case(x=jnp.float32(5.5))
        found = compare.largest_relative_difference(plain.plain, changed.plain, plain)
        # The plain outputs are 5, 9 and 13: the last is farthest from 5.5.
        assert (found.step, found.path) == (2, "outputs[1]['x']")
        assert found.relative == pytest.approx(7.5 / 13)

    def test_noise_is_compared_in_units_of_its_scale(self) -> None:
        plain, changed = self.case(x=jnp.float32(1e-12)), self.case(x=jnp.float32(-1e-12))
        noise = Tolerance(zero_gradients=("[1]['x']",))
        compare.assert_steps_equal(plain.plain, changed.plain, plain, noise)
        with pytest.raises(AssertionError, match="differs by 2e-12"):
            compare.assert_steps_equal(plain.plain, changed.plain, plain)

    def test_copies_keep_aliases(self) -> None:
        leaf = jnp.ones(3)
        first, second, number = compare.copy_tree((leaf, leaf, 3))
        assert first is second
        assert first is not leaf
        assert number == 3
