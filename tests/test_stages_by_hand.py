"""`stages=[autopar.Stage(...), ...]`: submeshes, logical meshes and methods of their own."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_jit import equals_plain_jit

import autopar
from autopar import Stage
from autopar.base.errors import OptionError
from autopar.base.options import Options

DEPTH, WIDTH, ROWS = 8, 64, 32
BATCH = np.random.default_rng(1).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
UNEQUAL = [
    Stage(layers=0.25, devices=2, logical_mesh=(2, 1), method="zero2"),
    Stage(layers=0.25, logical_mesh=(1, 2), method="shard"),
    Stage(layers=0.5, logical_mesh=(1, 4), remat="full", method="zero3"),
]


def init() -> Any:
    weights = jax.random.normal(jax.random.key(0), (DEPTH, 2, WIDTH, WIDTH)) / 8
    return {"layers": list(weights), "head": jnp.eye(WIDTH)}


def train_step(params: Any, x: Any, y: Any) -> Any:
    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for w in params["layers"]:
            x = x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])
        return jnp.mean((x @ params["head"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_unequal_stages_compute_the_same_and_their_plan_is_followed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"stages": UNEQUAL, "microbatches": 4, "schedule": "1f1b"}
    step = equals_plain_jit(train_step, init(), *BATCH, **options)
    plan = step.plan
    assert [stage.logical_mesh for stage in plan.stages] == [(2, 1), (1, 2), (1, 4)]
    assert [stage.remat for stage in plan.stages] == ["none", "none", "full"]
    stored = {leaf.path: leaf for leaf in plan.inputs}
    (first,) = (leaf for path, leaf in stored.items() if path.endswith("[0]"))
    (last,) = (leaf for path, leaf in stored.items() if path.endswith("[7]"))
    assert first.stages == (0,) and first.bytes_per_device == first.bytes  # zero2: whole
    assert last.stages == (2,) and last.bytes_per_device < last.bytes  # zero3: cut
    assert "zero3" in str(plan)
    plan.save(tmp_path / "plan.json")
    saved = autopar.Plan.load(tmp_path / "plan.json")
    assert saved == plan and Options.from_dict(saved.options).stages == tuple(UNEQUAL)
    again = equals_plain_jit(train_step, init(), *BATCH, plan=tmp_path / "plan.json", **options)
    assert again.plan == plan


@pytest.mark.filterwarnings("ignore:.*follows its plan")
def test_a_smaller_batch_follows_the_stages() -> None:
    step = autopar.parallelize(train_step, stages=UNEQUAL, microbatches=4, donate_argnums=())
    for rows in (ROWS, ROWS // 2):
        batch = BATCH[:, :rows]
        found, expected = step(init(), *batch), jax.jit(train_step)(init(), *batch)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
        assert [stage.num_devices for stage in step.plan.stages] == [2, 2, 4]


def test_stages_that_do_not_say_share_what_is_left() -> None:
    arguments = (train_step, jax.eval_shape(init), *BATCH)
    half = [Stage(devices=4), Stage(), Stage()]
    plan = autopar.plan(*arguments, stages=half, microbatches=4)
    assert [stage.num_devices for stage in plan.stages] == [4, 2, 2]
    first, *_ = plan.stages
    assert first.layers[1] - first.layers[0] >= 4, "half of the devices have half of the layers"
    (*_, last), count = plan.stages, plan.stages[-1].layers[1]
    counted = [Stage(layers=2), Stage(layers=count - 2)]
    plan = autopar.plan(*arguments, stages=counted, microbatches=4)
    assert [stage.layers for stage in plan.stages] == [(0, 2), (2, count)]
    assert last.num_devices == 2


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([Stage(devices=3), Stage(devices=3)], "do not add up to the 8 of the cluster"),
        ([Stage(devices=8), Stage()], "do not add up to the 8 of the cluster"),
        ([Stage(layers=3), Stage(layers=2)], "have 5 layers, and the program has"),
    ],
)
def test_what_does_not_add_up_is_refused(stages: list[Stage], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        autopar.plan(train_step, jax.eval_shape(init), *BATCH, stages=stages, microbatches=4)


def test_a_stage_is_inside_a_node_or_has_whole_nodes() -> None:
    cluster = autopar.Cluster.preset("p3.16xlarge", nodes=2, devices_per_node=4)
    step = train_step, jax.eval_shape(init), *BATCH
    stages = [Stage(devices=3), Stage(devices=3), Stage(devices=2)]
    with pytest.raises(OptionError, match=r"Stage 1 would lie on parts of several nodes"):
        autopar.plan(*step, stages=stages, cluster=cluster)
    stages = [Stage(devices=2), Stage(devices=4), Stage(devices=2)]  # the second has a node
    plan = autopar.plan(*step, stages=stages, cluster=cluster)
    assert [stage.num_devices for stage in plan.stages] == [2, 4, 2]


def test_values_of_stages() -> None:
    assert Stage(layers=Fraction(1, 4)) == Stage(layers=0.25)
    assert Stage(logical_mesh=(2, 2)).devices == 4
    for wrong in ({"layers": 1.5}, {"layers": 0}, {"layers": True}, {"devices": 0}, {"remat": 3}):
        with pytest.raises(OptionError):
            Stage(**wrong)
    with pytest.raises(OptionError, match="the stage has 2 devices, these are 3"):
        Stage(devices=2, logical_mesh=(3,))
    with pytest.raises(OptionError, match="did you mean 'zero3'"):
        Stage(method="zero9")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([Stage(layers=0.3), Stage(layers=0.3)], r"shares add up to 0\.6"),
        ([Stage(layers=3), Stage()], "cannot be told"),
        ([Stage()], "one stage has no pipeline"),
        ([Stage(), 3], "a list of autopar.Stage"),
        ([{"devicez": 4}, {"devices": 4}], r"no 'devicez'(.|\n)*did you mean 'devices'"),
    ],
)
def test_stages_that_are_no_pipeline_are_refused(stages: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options(stages=stages)
    with pytest.raises(OptionError, match="a mesh of its own"):
        Options(stages=tuple(UNEQUAL), num_chunks=2)
