"""What a step prescribes by `with_sharding_constraint` and the like is a pin of the plan."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import ConstraintWarning
from autopar.passes.graph.constraints import Constraint
from autopar.passes.sharding.constraint_axes import match_axes, most_kept
from autopar.passes.trace.trace import trace

Constrain = Callable[[Any, P], Any]
PARAMS = {"in": np.ones((8, 32), np.float32) / 8, "out": np.ones((32, 8), np.float32) / 8}
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def user_mesh(axis_type: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    devices = np.array(jax.devices()).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(axis_type,) * len(sizes))


MESH = user_mesh(data=4, model=2)


def on_mesh(x: Any, spec: P, mesh: Any = MESH) -> Any:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def step_with(constrain: Constrain) -> Callable[..., Any]:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = constrain(jnp.tanh(x @ params["in"]), P("data", "model"))
            return jnp.mean(constrain(hidden @ params["out"], P("data", None)) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def choices(plan: autopar.Plan) -> list[str]:
    found = (s for stage in plan.stages for s in stage.strategies if "constrain" in s.node)
    return [s.choice.split()[1] for s in found]


def same(got: Any, wanted: Any) -> bool:
    pairs = zip(*map(jax.tree.leaves, jax.device_get((got, wanted))), strict=True)
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


FORMS: dict[str, tuple[Constrain, Mesh | None]] = {
    "named": (on_mesh, None),
    "bare": (jax.lax.with_sharding_constraint, MESH),
    "device_put": (lambda x, spec: jax.device_put(x, NamedSharding(MESH, spec)), None),
    "reshard": (jax.sharding.reshard, user_mesh(AxisType.Explicit, data=4, model=2)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_constraint_is_a_pin(form: str) -> None:
    constrain, context = FORMS[form]
    step = step_with(constrain)
    with jax.set_mesh(context) if context else contextlib.nullcontext():
        wanted = jax.device_get(jax.jit(step)(PARAMS, X))
        compiled = autopar.compile(step, PARAMS, X, microbatches=1)
        assert same(compiled(PARAMS, X), wanted)
    assert compiled.plan.stages[0].logical_mesh == (4, 2)
    # Forward; the gradients of these two values are laid out alike.
    assert {"[x|y]", "[x|-]"} == set(choices(compiled.plan))


DATA, BOTH = P("data"), P("data", "model")
PRESCRIBED: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "products": (
        lambda p, x, ids: jnp.einsum(
            "bh,ho->bo",
            jnp.tanh(jnp.dot(x, p["in"], out_sharding=BOTH)),
            p["out"],
            out_sharding=DATA,
        ),
        {"[x|y]", "[x|-]"},
    ),
    "rows": (
        lambda p, x, ids: jnp.tanh((x + p["out"].at[ids].get(out_sharding=DATA)) @ p["in"]),
        {"[x|-]"},
    ),
    "shape": (
        lambda p, x, ids: jax.lax.reshape(x @ p["in"], (16, 4, 8), out_sharding=DATA),
        {"[x|-|-]"},
    ),
    "noise": (
        lambda p, x, ids: jnp.tanh(
            x @ p["in"] + jax.random.normal(jax.random.key(0), (16, 32), out_sharding=DATA)
        ),
        {"[x|-]"},
    ),
    "explicit_axes": (
        lambda p, x, ids: jax.sharding.explicit_axes(lambda x: x + 1, in_sharding=(DATA,))(
            x @ p["in"]
        ),
        {"[x|-]"},
    ),
    "auto_axes": (
        lambda p, x, ids: jax.sharding.auto_axes(lambda x: x + 1, out_sharding=BOTH)(x @ p["in"]),
        {"[x|y]"},
    ),
    "repeated": (
        lambda p, x, ids: (
            x @ p["in"] + jnp.broadcast_to(p["out"][:, 0], (16, 32), out_sharding=BOTH)
        ),
        {"[x|y]"},
    ),
    "zeros": (
        lambda p, x, ids: x @ p["in"] + jnp.zeros((16, 32), out_sharding=BOTH),
        {"[x|y]"},
    ),
}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("form", PRESCRIBED)
def test_what_operations_prescribe_is_a_pin(form: str, microbatches: int) -> None:
    """On a mesh of Explicit axes, under which equations are traced, but not evaluated."""
    function, chosen = PRESCRIBED[form]
    x, ids = X, np.arange(16) % 32

    def step(params: Any, x: Any, ids: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean(function(params, x, ids) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    with jax.set_mesh(user_mesh(AxisType.Explicit, data=4, model=2)):
        wanted = jax.device_get(jax.jit(step)(PARAMS, x, ids))
        compiled = autopar.compile(
            step, PARAMS, x, ids, microbatches=microbatches, batch_argnums=(1, 2)
        )
        assert same(compiled(PARAMS, x, ids), wanted)
    assert compiled.plan.stages[0].logical_mesh == (4, 2)
    assert chosen == set(choices(compiled.plan))


def test_what_follows_from_types_is_no_constraint() -> None:
    """JAX writes the shardings that it concludes into broadcasts as well."""

    def step(w: Any, x: Any) -> Any:
        hidden = jax.sharding.reshard(x @ w, BOTH)
        return w, jnp.sum(jnp.where(hidden > 0, hidden, 2.0) + jnp.zeros_like(hidden))

    with jax.set_mesh(user_mesh(AxisType.Explicit, data=4, model=2)):
        graph = trace(step, (PARAMS["in"], X)).graph
        ignored = trace(step, (PARAMS["in"], X), constraints="ignore").graph
    names = [eqn.primitive.name for eqn in graph.jaxpr.eqns]
    assert names.count("constrain") == 1 < names.count("broadcast_in_dim")
    assert "constrain" not in [eqn.primitive.name for eqn in ignored.jaxpr.eqns]


def test_stages_keep_what_their_meshes_can_keep() -> None:
    mesh = user_mesh(pipe=2, data=2, model=2)
    step = step_with(lambda x, spec: jax.lax.with_sharding_constraint(x, spec))
    with jax.set_mesh(mesh):
        wanted = jax.device_get(jax.jit(step)(PARAMS, X))
        compiled = autopar.compile(step, PARAMS, X, stages=2, microbatches=2)
        state, loss = compiled(PARAMS, X)
        assert same(compiled.gather((state, loss)), wanted)

        def init(key: Any) -> Any:
            made = jax.random.normal(key, (8, 32))
            return {"in": jax.lax.with_sharding_constraint(made, P(None, "model")), "out": made.T}

        born, plain = (f(jax.random.key(0)) for f in (lambda k: compiled.initialize(init, k), init))
        assert same(compiled.gather(born), plain)
    assert [stage.logical_mesh for stage in compiled.plan.stages] == [(2, 2), (2, 2)]
    assert {"[x|y]", "[x|-]"} == set(choices(compiled.plan))


def test_a_gradient_of_a_loop_is_completed_once_a_step() -> None:
    """Also of parameters that are constrained inside of a scan over layers."""

    def step(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            w = on_mesh(w, P(None, "model"))
            return on_mesh(jnp.tanh(x @ w), P("data", None)), None

        loss, gradient = jax.value_and_grad(
            lambda w: jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)
        )(params)
        return params - gradient, loss

    params = np.random.default_rng(1).normal(size=(3, 8, 8)).astype(np.float32)
    compiled = autopar.compile(step, params, X, microbatches=4)
    wanted = jax.jit(step)(params, X)
    assert same(compiled(params, X), wanted)
    assert {"[x|-]", "[-|y]"} <= set(choices(compiled.plan))
    gradients = [c for c in compiled.plan.stages[0].collectives if c.purpose == "gradient"]
    assert gradients
    assert {c.times for c in gradients} == {1}


SMALL_MESHES: list[tuple[dict[str, Any], set[str]]] = [
    ({"microbatches": 1}, {"[y]"}),
    ({"microbatches": 4}, {"[y]"}),
    ({"stages": 2, "microbatches": 2}, {"[x]"}),
]


@pytest.mark.parametrize(("options", "chosen"), SMALL_MESHES)
def test_a_handful_of_numbers_is_cut_where_that_is_asked(
    options: dict[str, Any], chosen: set[str]
) -> None:
    """What is made from scalars alone is whole on every device otherwise."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            scales = on_mesh(jnp.arange(32.0) * params["step"], P("model"))
            whole = on_mesh(jnp.arange(8.0) * params["step"], P())
            return jnp.mean((jnp.tanh(x @ params["in"] + scales) @ params["in"].T + whole) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params = {"in": PARAMS["in"], "step": np.float32(0.1)}
    wanted = jax.device_get(jax.jit(step)(params, X))
    compiled = autopar.compile(step, params, X, **options)
    assert same(compiled.gather(compiled(params, X)), wanted)
    made = {choice.partition(" ")[0] for choice in choices(compiled.plan)}
    assert chosen <= made <= {*chosen, "[-]"}


def test_dimensions_that_are_left_open_are_chosen() -> None:
    def step(params: Any, x: Any) -> Any:
        return params, jnp.sum(on_mesh(x @ params["in"], P(P.UNCONSTRAINED, "model")))

    graph = trace(step, (PARAMS, X)).graph
    (eqn,) = (e for e in graph.jaxpr.eqns if e.primitive.name == "constrain")
    layouts = match_axes(graph.jaxpr, (4, 2)).layouts(eqn)
    assert layouts is not None
    assert {layout.dims for layout in layouts} == {((), (1,)), ((0,), (1,))}


def test_one_warning_names_what_is_not_kept() -> None:
    step = step_with(on_mesh)
    with pytest.warns(ConstraintWarning) as caught:
        plan = autopar.plan(step, PARAMS, X, logical_mesh=(8,))
    (message,) = (str(w.message) for w in caught)
    assert message.count("test_constraints.py:") == 1  # both are made by one line
    assert "data=4 model=2, for which the plan's mesh x=8 has no axes" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ignored = autopar.plan(step, PARAMS, X, logical_mesh=(8,), constraints="ignore")
        plain = autopar.plan(step_with(lambda x, spec: x), PARAMS, X, logical_mesh=(8,))
    assert ignored.program_hash == plain.program_hash != plan.program_hash
    assert ignored.options["constraints"] == "ignore"


@pytest.mark.parametrize(
    ("mesh", "spec", "why"),
    [
        (Mesh(np.array(jax.devices()[:1]), ("data",)), P("data"), "has one device"),
        (user_mesh(data=8), P("data"), "unevenly"),
    ],
)
def test_why_a_constraint_is_not_kept(mesh: Mesh, spec: P, why: str) -> None:
    def step(w: Any, x: Any) -> Any:
        return w, jnp.sum(on_mesh(jnp.concatenate([x, x[:4]]), spec, mesh)) + w

    with pytest.warns(ConstraintWarning, match=why):
        autopar.plan(step, jnp.zeros(()), X, batch_argnums=1, microbatches=1)


def test_constraints_of_the_parts_in_a_shard_map_are_named() -> None:
    def body(x: Any, w: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        hidden = on_mesh(jnp.tanh(x @ w), P(None, "model"), mesh)
        return on_mesh(hidden @ w.T, P(None, None), mesh)  # it is so

    def step(w: Any, x: Any) -> Any:
        specs: Any = {"in_specs": (P("data"), P()), "out_specs": P("data")}
        mapped = jax.shard_map(body, mesh=MESH, axis_names={"data"}, **specs)
        return w, jnp.sum(mapped(x, w))

    with jax.set_mesh(MESH), pytest.warns(ConstraintWarning) as caught:
        autopar.plan(step, PARAMS["in"], X)
    (message,) = (str(w.message) for w in caught)
    assert "inside a shard_map" in message
    assert message.count("test_constraints.py:") == 1
    with jax.set_mesh(MESH):
        autopar.plan(step, PARAMS["in"], X, constraints="ignore")


def test_flax_logical_axes() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            normal = nn.initializers.normal(0.1)
            into = nn.with_logical_partitioning(normal, ("embed", "mlp"))
            out = nn.with_logical_partitioning(normal, ("mlp", "embed"))
            x = nn.with_logical_constraint(nn.Dense(32, kernel_init=into)(x), ("batch", "mlp"))
            return nn.Dense(8, kernel_init=out)(nn.gelu(x))

    model = Model()
    rules = (("batch", "data"), ("mlp", "model"), ("embed", None))

    def step(params: Any, x: Any) -> Any:
        loss = lambda p: jnp.mean(model.apply(p, x) ** 2)  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    with jax.set_mesh(MESH), nn.logical_axis_rules(rules):
        params = jax.device_get(model.init(jax.random.key(0), X))
        wanted = jax.device_get(jax.jit(step)(params, X))
        compiled = autopar.compile(step, params, X, microbatches=2)
        assert same(compiled(params, X), wanted)
    assert {"[x|y]", "[-|y]", "[y|-]"} == set(choices(compiled.plan))


def constraint(*spec: tuple[str, ...] | None, **mesh: int) -> Constraint:
    return Constraint(spec, tuple(mesh.items()))


@pytest.mark.parametrize(
    ("mesh", "sizes", "specs", "kept"),
    [
        ((4, 2), {"data": 4, "model": 2}, [P("data", "model")], ["[(0,), (1,)]"]),
        ((4, 2), {"data": 2, "model": 4}, [P("data", "model")], ["[(1,), (0,)]"]),
        ((8,), {"data": 2, "fsdp": 4}, [P(("data", "fsdp"))], ["[(0,), ()]"]),
        ((8,), {"data": 2, "fsdp": 4}, [P("data"), P(("data", "fsdp"))], [None, None]),
        ((4, 2), {"data": 8}, [P("data"), P()], ["[(0, 1), ()]", "[(), ()]"]),
        ((4,), {"data": 4, "model": 2}, [P("data"), P("data", "model")], ["[(0,), ()]", None]),
        ((2, 2, 2), {"data": 4, "model": 2}, [P("model", "data")], ["[(2,), (0, 1)]"]),
    ],
)
def test_axes_are_matched_by_their_sizes(
    mesh: tuple[int, ...], sizes: dict[str, int], specs: list[P], kept: list[str | None]
) -> None:
    own = user_mesh(AxisType.Auto, **sizes, rest=8 // int(np.prod([*sizes.values()])))

    def step(x: Any) -> Any:
        return [on_mesh(x + i, spec, own) for i, spec in enumerate(specs)]

    jaxpr = trace(step, (jax.ShapeDtypeStruct((32, 32), jnp.float32),), batch_argnums=()).graph
    eqns = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "constrain"]
    matching = match_axes(jaxpr.jaxpr, mesh)
    layouts = [matching.layouts(eqn) for eqn in eqns]
    assert [x and str([*x[0].dims]) for x in layouts] == kept
    if None not in kept:
        assert most_kept(jaxpr.jaxpr, ((2, 3), mesh), ((2, 3),)) == (mesh,)
