"""What Flax's variables say of their own sharding is a constraint, or named in one warning."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import autopar
from autopar.errors import ConstraintWarning

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
NORMAL = nnx.initializers.normal(0.1)
INTO, OUT = ((), ("y",)), (("y",), ())


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


class Model(nnx.Module):
    def __init__(self, into: Any, rngs: nnx.Rngs):
        kernel = nnx.with_partitioning(NORMAL, into)
        self.into = nnx.Linear(8, 32, rngs=rngs, kernel_init=kernel)
        self.out = nnx.Param(NORMAL(rngs.params(), (32, 8)), out_sharding=("model", None))

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.into(x)) @ self.out


def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def made(into: Any = (None, "model")) -> tuple[Any, Any]:
    with jax.set_mesh(mesh()):
        model = Model(into, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@pytest.mark.parametrize("options", [{"microbatches": 1}, {"stages": 2, "microbatches": 2}])
def test_variables_lie_as_they_say(options: dict[str, Any]) -> None:
    with jax.set_mesh(mesh()):
        wanted = [nnx.jit(train_step)(*plain, X) for plain in [made()] for _ in range(3)]
    objects = made()
    step = autopar.compile(train_step, *objects, X, **options)
    got = [step.gather(step(*objects, X)) for _ in range(3)]
    np.testing.assert_allclose(jax.device_get(got), jax.device_get(wanted), rtol=1e-5)
    if "stages" not in options:
        specs = {tensor.path: tensor.spec for tensor in step.plan.inputs}
        assert step.plan.stages[0].logical_mesh == (4, 2)
        assert specs["model.into.kernel"] == specs["optimizer.opt_state[0].mu.into.kernel"] == INTO
        assert specs["model.out"] == specs["optimizer.opt_state[0].nu.out"] == OUT
    autopar.compile(train_step, *objects, X, microbatches=1)  # as the plan left them: no warning


def test_logical_names_are_those_of_the_rules() -> None:
    with nn.logical_axis_rules((("embed", None), ("mlp", "model"))):
        plan = autopar.plan(train_step, *made(("embed", "mlp")), X, microbatches=1)
    assert {t.path: t.spec for t in plan.inputs}["model.into.kernel"] == INTO


def test_one_warning_names_variables_whose_axes_the_plan_has_not() -> None:
    with pytest.warns(ConstraintWarning, match="model=2, for which the plan's mesh x=8") as caught:
        autopar.plan(train_step, *made(), X, logical_mesh=(8,))
    (message,) = (str(w.message) for w in caught)
    assert "- model.into.kernel: " in message
    autopar.plan(train_step, *made(), X, logical_mesh=(8,), constraints="ignore")


def test_boxes_of_linen_whose_mesh_nobody_knows_are_named() -> None:
    model = nn.Dense(32, kernel_init=nn.with_partitioning(NORMAL, (None, "model")))
    params = model.init(jax.random.key(0), X)

    def step(params: Any, x: Any) -> Any:
        return params, jnp.sum(model.apply(params, x))

    with pytest.warns(ConstraintWarning) as caught:
        autopar.plan(step, params, X, microbatches=1)
    (message,) = (str(w.message) for w in caught)
    assert "(None, 'model')" in message
    assert "kernel" in message
    autopar.plan(step, params, X, microbatches=1, constraints="ignore")
    with jax.set_mesh(mesh()):
        kept = autopar.plan(step, params, X, microbatches=1)
    choices = [s.choice for s in kept.stages[0].strategies if "constrain" in s.node]
    assert len(choices) == 1
    assert "[-|y]" in choices[0]
