"""Steps that change NNX objects in place, as `nnx.jit` runs them: the same numbers, there."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar.errors import TraceError

WIDTH, CLASSES, ROWS = 16, 8, 16


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, norm: bool = False, rate: float = 0.0):
        self.dense = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if norm else nnx.LayerNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.drop(jnp.tanh(self.norm(self.dense(x))))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, depth: int = 1, **block: Any):
        self.blocks = nnx.List([Block(rngs, **block) for _ in range(depth)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, logits


def train_step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> Any:
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["y"])
    optimizer.update(model, grads)
    return loss


def sgd_step(model: Any, optimizer: Any, batch: Any) -> None:
    grads = nnx.grad(lambda model: loss_fn(model, batch)[0])(model)
    optimizer.update(model, grads)


def with_optimizer(model: Any) -> Any:
    return nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def make_metrics() -> Any:
    return nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))


def batch_of(number: int, rows: int = ROWS) -> Any:
    rng = np.random.default_rng(number)
    x, y = rng.normal(size=(rows, WIDTH)), rng.integers(0, CLASSES, rows)
    return {"x": x.astype(np.float32), "y": y.astype(np.int32)}


def numbers(objects: Any) -> list[Any]:
    """All arrays of objects, none of which is deleted."""
    leaves = jax.tree.leaves(nnx.state(objects))
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [
        np.asarray(jax.random.key_data(x) if k else x) for x, k in zip(leaves, is_key, strict=True)
    ]


def assert_same(left: Any, right: Any) -> None:
    for a, b in zip(numbers(left), numbers(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


def test_a_step_as_the_tutorial_writes_it() -> None:
    def objects() -> Any:
        model = Net(nnx.Rngs(0), norm=True, rate=0.1)
        return model, with_optimizer(model), make_metrics()

    plain, ours = objects(), objects()
    model, optimizer, metrics = ours
    kernel = model.head.kernel
    step, expected = autopar.parallelize(train_step, method="data"), nnx.jit(train_step)
    for number in range(3):
        batch = batch_of(number)
        np.testing.assert_allclose(step(*ours, batch), expected(*plain, batch), rtol=1e-4)
    assert_same(ours, plain)
    assert int(optimizer.step.get_value()) == 3
    assert model.head.kernel is kernel  # the object that the caller has
    for name, value in plain[2].compute().items():
        np.testing.assert_allclose(metrics.compute()[name], value, rtol=1e-4)
    labels = step.executable._traced.graph.inputs
    assert {label.path for label in labels if not label.donated} == {"batch['x']", "batch['y']"}
    assert {label.path for label in labels} >= {"model.blocks[0].norm.mean", "optimizer.step"}
    assert len(step._executables) == 1
    metrics.reset()
    step(*ours, batch_of(3))
    assert int(metrics.loss.count.get_value()) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2, "method": "zero2"},
        {"stages": 2, "microbatches": 2, "method": "zero2", "schedule": "1f1b"},
    ],
    ids=str,
)
def test_microbatches_and_stages(options: Any, tmp_path: Path) -> None:
    def objects() -> Any:
        model = Net(nnx.Rngs(1), depth=2, rate=0.1)
        return model, with_optimizer(model)

    plain, ours = objects(), objects()
    step = autopar.compile(sgd_step, *ours, batch_of(0), **options)
    expected: Any = nnx.jit(sgd_step)
    with autopar.Checkpoints(tmp_path / "run") as checkpoints:
        for number in range(3):
            batch = batch_of(number)
            assert step(*ours, batch) is None
            expected(*plain, batch)
            if number == 1:
                checkpoints.save(number, {"model": ours[0], "optimizer": ours[1]})
    assert_same(step.gather(ours), plain)
    # Restored, and made anew where the step wants them, objects go the same way.
    saved = checkpoints.restore({"model": ours[0], "optimizer": ours[1]}).state
    again = saved["model"], saved["optimizer"]
    step(*again, batch_of(2))
    assert_same(step.gather(again), plain)
    made = step.initialize(objects)
    assert isinstance(made[0], Net)
    assert [x.sharding for x in jax.tree.leaves(nnx.state(made))] == [
        x.sharding for x in jax.tree.leaves(nnx.state(ours))
    ]
    assert_same(step.gather(made), objects())

    def halved(model: Any) -> Any:
        nnx.update(model, jax.tree.map(lambda x: x / 2, nnx.state(model, nnx.Param)))
        return model

    half = step.apply(halved, ours[0])
    assert half.head.kernel.get_value().sharding == ours[0].head.kernel.get_value().sharding
    np.testing.assert_allclose(
        jax.device_get(half.head.kernel.get_value()),
        jax.device_get(ours[0].head.kernel.get_value()) / 2,
        rtol=1e-6,
    )
    step.profile(*ours, batch_of(0))
    assert_same(step.gather(ours), plain)  # a profile keeps the state
    step(half, ours[1], batch_of(4))


def test_objects_that_share_variables_anywhere_in_the_arguments() -> None:
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.up = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))
            self.down = self.up

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ self.up[...]) @ self.down[...].T

    def step(state: Any, batch: Any, *, key: Any) -> Any:
        model, (head, both) = state["model"], state["heads"]

        def loss(both: Any) -> Any:
            noise = jax.random.normal(key, batch["x"].shape)
            return jnp.mean(both[1](both[0](batch["x"] + 0.1 * noise)) ** 2)

        grads = nnx.grad(loss)(both)
        for name, variable in (("up", model.up), ("kernel", head.kernel)):
            grad = grads[0]["down"] if name == "up" else grads[1]["kernel"]
            variable[...] = variable[...] - 0.1 * grad[...]
        return {"norm": jnp.sum(model.down[...] ** 2), "model": model}

    def objects() -> Any:
        model, head = Tied(nnx.Rngs(0)), nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(1))
        return {"model": model, "heads": (head, nnx.List([model, head]))}

    plain, ours = objects(), objects()
    compiled = autopar.parallelize(step, method="zero3")
    expected = nnx.jit(step)
    for number in range(2):
        given = batch_of(number), jax.random.key(number)
        left = compiled(ours, given[0], key=given[1])
        right = expected(plain, given[0], key=given[1])
        np.testing.assert_allclose(left["norm"], right["norm"], rtol=1e-4)
        assert left["model"] is ours["model"]
    assert ours["model"].up is ours["model"].down is ours["heads"][1][0].up
    assert_same(ours["heads"], plain["heads"])
    assert all(x.donated for x in compiled.executable._traced.graph.inputs if x.role == "state")


def test_evaluation_plans_once_more_and_leaves_the_model_alone() -> None:
    model = Net(nnx.Rngs(0), rate=0.5)
    metrics = make_metrics()

    @autopar.parallelize(method="data")
    def eval_step(model: Any, metrics: Any, batch: Any) -> None:
        loss, logits = loss_fn(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["y"])

    model.eval()
    before = model.head.kernel.get_value()
    eval_step(model, metrics, batch_of(0))
    assert model.head.kernel.get_value() is before
    first = eval_step.executable
    model.train()  # a static attribute: another program, which draws random numbers
    eval_step(model, metrics, batch_of(0))
    assert eval_step.executable is not first
    model.eval()
    eval_step(model, metrics, batch_of(0))
    assert eval_step.executable is first
    assert int(metrics.loss.count.get_value()) == 3
    with pytest.raises(TraceError, match=r"drop\.deterministic: True, False"):
        first(Net(nnx.Rngs(0), rate=0.5), metrics, batch_of(0))


def test_configs_without_a_hash() -> None:
    """Models often keep the config they were made of: a dataclass that compares, and no more."""

    @dataclasses.dataclass
    class Config:
        scale: float = 1.0

    class Scaled(Net):
        def __init__(self, rngs: nnx.Rngs, config: Config):
            super().__init__(rngs)
            self.config = config

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.config.scale * super().__call__(x)

    def objects(scale: float) -> Any:
        model = Scaled(nnx.Rngs(0), Config(scale))
        return model, nnx.Optimizer(model, update, wrt=nnx.Param)

    update = optax.sgd(0.1)
    step, expected = autopar.parallelize(sgd_step, method="data"), nnx.jit(sgd_step)
    for scale in (1.0, 0.5, 1.0):
        plain, ours = objects(scale), objects(scale)
        expected(*plain, batch_of(0))
        step(*ours, batch_of(0))
        assert_same(ours, plain)
    assert len(step._executables) == 2


def test_what_a_step_adds_to_an_object_stays_there() -> None:
    def step(model: Any, batch: Any) -> Any:
        hidden = model(batch["x"])
        means = model.means.get_value() if hasattr(model, "means") else ()
        model.means = nnx.Intermediate((*means, hidden.mean()))
        model.last = nnx.Intermediate(hidden.sum())
        model.was_called = True
        return hidden.mean()

    plain, ours = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    parallel = autopar.parallelize(step, method="data")
    for _ in range(2):
        expected = nnx.jit(step)(plain, batch_of(0))
        np.testing.assert_allclose(parallel(ours, batch_of(0)), expected, rtol=1e-5)
    assert ours.was_called
    assert len(ours.means.get_value()) == 2
    np.testing.assert_allclose(ours.last.get_value(), plain.last.get_value(), rtol=1e-4)


def test_shapes_are_enough_to_plan() -> None:
    def objects() -> Any:
        model = Net(nnx.Rngs(0))
        return model, with_optimizer(model)

    abstract = nnx.eval_shape(objects)
    batch = jax.eval_shape(lambda: batch_of(0))
    plan = autopar.plan(sgd_step, *abstract, batch, method="zero3")
    step = autopar.compile(sgd_step, *abstract, batch, plan=plan, method="zero3")
    made = step.initialize(objects)
    step(*made, batch_of(0))
    plain = objects()
    nnx.jit(sgd_step)(*plain, batch_of(0))
    assert_same(made, plain)


def test_flax_is_not_imported() -> None:
    code = (
        "import jax.numpy as jnp, autopar, sys\n"
        "step = autopar.parallelize(lambda w, x: w + x.sum(0), method='data')\n"
        "step(jnp.ones(4), jnp.ones((8, 4)))\n"
        "assert 'flax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_mutable_reference_in_an_object_is_refused() -> None:
    with nnx.var_defaults(hijax=False, ref=True):
        model = nnx.Linear(WIDTH, CLASSES, rngs=nnx.Rngs(0))
    with pytest.raises(TraceError, match="holds a mutable reference"):
        autopar.plan(lambda model, x: model(x).sum(), model, batch_of(0)["x"])
