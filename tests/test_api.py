"""`parallelize`, `compile` and `plan`: signatures, options, decorators, transformations."""

import functools
import inspect
import threading
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.base.errors import AutoparError, AutoparWarning, OptionError
from autopar.base.options import Options
from autopar.base.progress import Progress
from autopar.passes.planner.compiler import compile_graph

DATA = functools.partial(autopar.parallelize, method="data", microbatches=1)
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
W = np.ones((8, 4), np.float32)


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def train_step(w: Any, x: Any) -> Any:
    """Takes one step."""
    loss, gradient = jax.value_and_grad(loss_fn)(w, x)
    return w - 0.1 * gradient, loss


def assert_equal(found: Any, expected: Any) -> None:
    structure: Any = jax.tree.structure(found)
    assert structure == jax.tree.structure(expected)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected)


EXPECTED = jax.eval_shape(train_step, W, X)


def expected(x: Any = X) -> Any:
    return jax.jit(train_step)(W, x)


# Decorators


def test_decorator_with_and_without_options() -> None:
    @autopar.parallelize
    def plain(w: Any, x: Any) -> Any:
        return train_step(w, x)

    @autopar.parallelize(method="data", microbatches=1)
    def with_options(w: Any, x: Any) -> Any:
        return train_step(w, x)

    assert_equal(plain(W, X), expected())
    assert_equal(with_options(W, X), expected())
    assert with_options.plan.method == "data"


def test_it_keeps_the_name_and_documentation() -> None:
    step = DATA(train_step)
    assert (step.__name__, step.__doc__) == ("train_step", "Takes one step.")
    assert step.__wrapped__ is train_step
    assert repr(step) == "<train_step, parallelized, 0 plans>"


def test_above_and_below_other_decorators() -> None:
    calls = []

    def logged(fn: Any) -> Any:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(fn)
            return fn(*args, **kwargs)

        return call

    above = DATA(logged(jax.jit(train_step, donate_argnums=0)))
    below = logged(DATA(train_step))
    assert_equal(above(W, X), expected())
    assert_equal(below(W, X), expected())
    assert_equal(above(*above(W, X)[:1], X), train_step(expected()[0], X))
    assert len(calls) == 2  # once while tracing, once around a call


class Trainer:
    rate = 0.1

    def plain(self, w: Any, x: Any) -> Any:
        return w - self.rate * jax.grad(loss_fn)(w, x)

    step = DATA(plain)


def test_methods() -> None:
    trainer = Trainer()
    assert_equal(trainer.step(W, X), expected()[0])
    assert_equal(trainer.step(W, x=X), expected()[0])
    assert trainer.step.plan.inputs[0].path == "w"
    bound = DATA(trainer.plain)
    assert_equal(bound(W, X), expected()[0])
    # The instance is a constant of the program: another one is another program.
    other = Trainer()
    other.rate = 0.0
    assert_equal(other.step(W, X), W)


# Signatures


def test_it_plans_once_for_each_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        planned.append(args)
        return compile_graph(*args, **kwargs)

    monkeypatch.setattr("autopar.passes.planner.compiler.compile_graph", counting)
    step = DATA(train_step)
    for _ in range(2):
        assert_equal(step(W, X), expected())
        assert_equal(step(w=W, x=X), expected())
    assert len(planned) == 2
    assert repr(step) == "<train_step, parallelized, 2 plans>"
    half = jnp.asarray(X, jnp.bfloat16)
    with pytest.warns(AutoparWarning, match="step is planned again: x is bfloat16"):
        assert step(W, half)[1].dtype == jax.jit(train_step)(W, half)[1].dtype
    assert len(planned) == 3


def test_a_weak_type_is_part_of_the_signature() -> None:
    def step(w: Any, x: Any, rate: Any) -> Any:
        update = rate * jax.grad(loss_fn)(w, x)
        return w - update.astype(w.dtype), update

    parallel = DATA(step, donate_argnums=())
    w = jnp.asarray(W, jnp.bfloat16)
    parallel(w, X, 0.1)
    with pytest.warns(AutoparWarning, match=r"rate is float32\[\], and was weak float32\[\]"):
        parallel(w, X, np.float32(0.1))
    for rate in (0.1, np.float32(0.1), 0.1, jnp.float32(0.1)):
        result = parallel(w, X, rate)
        assert result[1].dtype == jax.jit(step)(w, X, rate)[1].dtype, rate


def test_python_numbers_in_the_state() -> None:
    def step(state: Any, x: Any) -> Any:
        w, _ = train_step(state["w"], x)
        return {"w": w, "step": state["step"] + 1, "done": jnp.logical_not(state["done"])}

    parallel = DATA(step)
    state: Any = {"w": W, "step": 0, "done": False}
    for _ in range(3):
        state = parallel(state, X)
    assert (int(state["step"]), bool(state["done"])) == (3, True)
    assert state["step"].weak_type
    assert repr(parallel).endswith("1 plan>")


def test_64_bits() -> None:
    with jax.enable_x64(True):
        w, x = W.astype(np.float64), X.astype(np.float64)
        step = DATA(train_step)
        found = step(w, x)
        assert found[0].dtype == np.float64
        np.testing.assert_allclose(found[0], jax.jit(train_step)(w, x)[0], rtol=1e-12)


@pytest.mark.filterwarnings("ignore:train_step follows:autopar.errors.AutoparWarning")
@pytest.mark.filterwarnings("ignore:train_step is planned again:autopar.errors.AutoparWarning")
def test_threads() -> None:
    step = DATA(train_step, donate_argnums=())
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda i=i: results.append((i, step(W, X[: 8 * (1 + i % 2)]))))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in results:
        assert_equal(result, expected(X[: 8 * (1 + i % 2)]))
    assert len(results) == 4


# Transformations


def test_inside_transformations_it_is_the_plain_function() -> None:
    step = DATA(train_step)
    w, x = jnp.asarray(W), jnp.asarray(X)
    assert jax.eval_shape(step, w, x) == EXPECTED
    assert "shard_map" not in str(jax.make_jaxpr(step)(w, x))
    assert_equal(jax.jit(step)(w, x), expected())
    with pytest.warns(AutoparWarning, match="inside another transformation"):  # told once
        gradient = jax.grad(lambda w: step(w, x)[1])(w)
    np.testing.assert_allclose(gradient, jax.grad(loss_fn)(w, x), rtol=1e-5)
    many = jax.vmap(step, in_axes=(0, None))(jnp.stack([w, w]), x)
    np.testing.assert_allclose(many[0][1], expected()[0], rtol=1e-5)
    with pytest.raises(AutoparError, match="no plan yet"):
        _ = step.plan


# compile and plan


def test_keyword_arguments_and_options_together() -> None:
    def step(w: Any, *, images: Any, scale: Any = 1.0) -> Any:
        return train_step(w, scale * images)

    compiled = autopar.compile(step, W, images=X, method="data", microbatches=1)
    assert_equal(compiled(jnp.asarray(W), images=X), expected())
    assert compiled.kwargs_shardings["images"].spec == jax.P("x", None)
    assert compiled.plan.method == "data"


def test_a_name_of_ours_goes_before_a_parameter_of_the_same_name() -> None:
    def step(w: Any, x: Any, seed: Any = 7) -> Any:
        return train_step(w, x)[0] + 0 * seed

    with pytest.warns(AutoparWarning, match=r"functools\.partial\(step, seed=\.\.\.\)"):
        compiled = autopar.compile(step, W, X, seed=3, method="data", microbatches=1)
    assert compiled.plan.options["seed"] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autopar.compile(functools.partial(step, seed=3), W, X, method="data", microbatches=1)
        # A decorated step's keywords are its own: there is nothing to confuse.
        assert_equal(DATA(step)(W, X, seed=3), expected()[0])


def test_an_unknown_keyword() -> None:
    for call in (autopar.compile, autopar.plan):
        with pytest.raises(OptionError, match="no option 'microbatch'") as caught:
            call(train_step, W, X, microbatch=4)
        assert caught.value.hint == "did you mean 'microbatches'?"
        assert "donate_argnums" in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "hint"),
    [
        ("dgx_h10", "did you mean 'dgx-h100'?"),
        ("8x dgx_h10", "did you mean 'dgx-h100'?"),
        (3, "use a name such as '8x8 h100', Cluster.preset(name) or Cluster.local(devices)."),
    ],
)
def test_what_is_no_cluster_gets_a_hint(cluster: Any, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        autopar.parallelize(lambda state: state, cluster=cluster)
    assert caught.value.hint == hint


def test_a_cluster_has_a_name(tmp_path: Path) -> None:
    """Everywhere a name or a file says the same as what it names."""
    cluster = autopar.Cluster.preset("h100", nodes=2)
    cluster.save(tmp_path / "ours.toml")

    def plan(cluster: Any) -> autopar.Plan:
        return autopar.plan(train_step, W, X, cluster=cluster, method="data", microbatches=1)

    expected = plan(cluster)
    for name in ("2x8 h100", "16xH100", tmp_path / "ours.toml"):
        assert plan(name).to_dict() == expected.to_dict()
        assert str(expected.simulate(cluster=name)) == str(expected.simulate(cluster=cluster))


def test_a_parallelized_function_is_compiled_with_its_own_options() -> None:
    step = autopar.parallelize(train_step, method="data", microbatches=1)
    assert autopar.compile(step, W, X).plan.method == "data"
    assert autopar.compile(step, W, X, method="zero1").plan.method == "zero1"
    assert autopar.plan(step, W, X).method == "data"


def test_shapes_are_enough() -> None:
    w, x = jax.eval_shape(lambda: (W, X))
    compiled = autopar.compile(train_step, w, x, method="zero3", microbatches=1)
    assert_equal(compiled(W, X), expected())
    plan = autopar.plan(train_step, w, x, method="zero3", microbatches=1)
    assert plan == compiled.plan


def test_plan_needs_no_device_of_the_cluster() -> None:
    cluster = autopar.Cluster.preset("dgx-h100", nodes=4)
    x = jax.ShapeDtypeStruct((256, 8), jnp.float32)
    plan = autopar.plan(train_step, W, x, cluster=cluster, method="data", microbatches=1, stages=1)
    assert plan.stages[0].num_devices == 32
    assert plan.cluster["name"] == "dgx-h100"


def test_a_cluster_of_fewer_devices() -> None:
    cluster = autopar.Cluster.local(jax.devices()[:4])
    compiled = autopar.compile(train_step, W, X, cluster=cluster, method="data", microbatches=1)
    result = compiled(W, X)
    assert_equal(result, expected())
    assert result[0].sharding.device_set == set(jax.devices()[:4])


def test_a_saved_plan_runs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "shard", "microbatches": 1}
    plan = autopar.plan(train_step, W, X, **options)
    path = tmp_path / "plan.json"
    plan.save(path)
    for given in (plan, path, str(path)):
        compiled = autopar.compile(train_step, W, X, plan=given, **options)
        assert compiled.plan == plan
        assert_equal(compiled(W, X), expected())
    step = autopar.parallelize(train_step, plan=path, **options)
    assert_equal(step(W, X), expected())
    assert step.plan == plan


def test_progress_is_shown_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    autopar.plan(train_step, W, X, method="data", microbatches=1)
    assert capsys.readouterr() == ("", "")
    autopar.compile(train_step, W, X, method="data", microbatches=1, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    for phase in ("tracing", "compiling", "train_step took"):
        assert phase in err
    assert "a step expected" in err.splitlines()[-1]
    with pytest.raises(ZeroDivisionError), Progress("it", shown=True) as progress:
        progress.report("dividing")
        _ = 1 / 0
    assert "ready" not in capsys.readouterr().err


def test_progress_is_no_part_of_a_plan() -> None:
    plans = [
        autopar.plan(train_step, W, X, method="data", microbatches=1, progress=shown)
        for shown in (None, False)
    ]
    assert plans[0].to_json() == plans[1].to_json()


def test_parallelizing_twice_changes_options() -> None:
    step = autopar.parallelize(DATA(train_step), method="zero1")
    assert_equal(step(W, X), expected())
    assert (step.plan.method, step.plan.num_microbatches) == ("zero1", 1)
    assert step.__wrapped__ is train_step


def test_signatures_show_the_options() -> None:
    takes_more = (autopar.compile, autopar.plan, autopar.scaling, autopar.verify)
    for function in (autopar.parallelize, *takes_more, autopar.verify_numerics):
        shown = inspect.signature(function).parameters
        own = set[str]() if function is autopar.parallelize else {"kwargs"}
        plain = inspect.signature(inspect.unwrap(function))
        own |= set(plain.parameters) - {"options", "options_and_kwargs"}
        assert set(shown) == {*Options.names(), *own}
        assert shown["microbatches"].default == "auto"
        assert shown["progress"].default is None
        if function is not autopar.plan:  # which says that they are those of compile
            said = inspect.getdoc(function) or ""
            assert all(f"      {name}: " in said for name in Options.names())
            assert "base.options" not in said and "page" not in said
