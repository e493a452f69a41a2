"""Tracing: every kind of leaf, what each is used as, and what is refused."""

import dataclasses
import inspect
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.extend import core as jex_core
from jax.sharding import AxisType, NamedSharding
from traced_steps import PARAMS, B, W, X, Y, check, loss_fn, roles, train

from autopar.base.errors import DonationWarning, OptionError, TraceError
from autopar.passes.graph.fingerprint import fingerprint
from autopar.passes.trace.signature import Convention, signature_of
from autopar.passes.trace.trace import Traced, trace


def run(traced: Traced, *args: Any, **kwargs: Any) -> Any:
    """Evaluate the graph as the executable does."""
    leaves = jax.tree.leaves((args, kwargs))
    arrays = [leaves[i] for i in traced.signature.array_positions]
    function = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(traced.graph.jaxpr, ()))
    return traced.result(function(*arrays, *traced.graph.constants))


# Leaves


def test_kinds_of_leaves_become_inputs_with_their_types() -> None:
    key = jax.random.key(0)
    arguments = {
        "array": jnp.ones(2, jnp.bfloat16),
        "bool": True,
        "float": 2.5,
        "int": 3,
        "key": key,
        "none": None,
        "numpy": np.ones((2, 3), np.int8),
        "numpy64": np.ones(2),  # JAX holds it in 32 bits, unless x64 is enabled
        "raw": jax.random.key_data(key),
        "scalar": np.float32(1),
        "shape": jax.ShapeDtypeStruct((5,), jnp.float16),
        "weak": jax.ShapeDtypeStruct((), jnp.float32, weak_type=True),
    }
    traced = trace(lambda tree: tree, (arguments,), batch_argnums=())
    found = [str(v.aval.str_short(short_dtypes=True)) for v in traced.graph.jaxpr.invars]
    expected = "bf16[2] bool[] f32[] i32[] key<fry>[] i8[2,3] f32[2] u32[2] f32[] f16[5] f32[]"
    assert found == expected.split()
    weak = [v.aval.weak_type for v in traced.graph.jaxpr.invars]
    assert [n for n, is_weak in enumerate(weak) if is_weak] == [2, 3, 10]
    assert list(check(traced)) == [f"tree['{name}']" for name in arguments if name != "none"]


def test_shardings_of_inputs_are_stripped() -> None:
    mesh = jax.make_mesh((8,), ("x",))
    assert mesh.axis_types == (AxisType.Explicit,)
    x = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, P("x")))
    as_shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    traced = trace(train, (PARAMS, x, Y))
    assert traced.signature == trace(train, (PARAMS, as_shape, Y)).signature
    assert traced.signature == trace(train, (PARAMS, X, Y)).signature
    assert str(traced.graph.jaxpr) == str(trace(train, (PARAMS, X, Y)).graph.jaxpr)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_a_mesh_of_the_user_leaves_no_trace(axis_type: AxisType) -> None:
    def step(w: Any, x: Any) -> Any:
        def body(h: Any, wi: Any) -> Any:
            h = jax.lax.with_sharding_constraint(jnp.tanh(h @ wi), P("x"))
            return h, jnp.zeros(3).sum()

        gradient = jax.grad(lambda w: jax.lax.scan(body, x, w)[0].sum())(w)
        return w - gradient

    def plain(w: Any, x: Any) -> Any:
        body = lambda h, wi: (jnp.tanh(h @ wi), jnp.zeros(3).sum())  # noqa: E731
        return w - jax.grad(lambda w: jax.lax.scan(body, x, w)[0].sum())(w)

    w = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(axis_type,))):
        traced = trace(step, (w, X), constraints="ignore")
    check(traced)
    assert "AbstractMesh" not in str(traced.graph)
    expected = trace(plain, (w, X)).graph
    assert fingerprint(traced.graph.jaxpr) == fingerprint(expected.jaxpr)
    for value in (*traced.graph.jaxpr.invars, *traced.graph.jaxpr.outvars):
        assert value.aval.sharding.mesh.empty


def test_equinox_model_is_returned_with_its_functions() -> None:
    model = eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    dropout = eqx.nn.Dropout(0.25, inference=True)

    def step(models: Any, x: Any, y: Any) -> Any:
        def loss(models: Any) -> Any:
            model, dropout = models
            return jnp.mean((jax.vmap(lambda x: dropout(model(x)))(x) - y) ** 2)

        loss_value, gradients = eqx.filter_value_and_grad(loss)(models)
        return eqx.apply_updates(models, jax.tree.map(lambda g: -0.1 * g, gradients)), loss_value

    x, y = np.ones((16, 8), np.float32), np.ones((16, 4), np.float32)
    traced = trace(step, ((model, dropout), x, y))
    (new_model, new_dropout), loss = run(traced, (model, dropout), x, y)
    assert new_model.activation is model.activation
    # Numbers of a model are its definition, as in equinox.filter_jit.
    assert (new_dropout.p, new_dropout.inference) == (0.25, True)
    assert type(new_dropout.inference) is bool
    _, expected_loss = eqx.filter_jit(step)((model, dropout), x, y)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert len(traced.signature.statics) == 4
    labels = check(traced)
    assert labels["models[0].layers[0].weight"].donated
    assert traced.signature != signature_of(
        Convention.of(step), ((model, eqx.nn.Dropout(0.5, inference=True)), x, y), {}
    )


@dataclasses.dataclass(frozen=True)
class Frozen:
    power: int
    name: str


def test_static_leaves_and_arguments() -> None:
    def step(w: Any, x: Any, config: Frozen, *, mode: str) -> Any:
        return {"w": w - (x.sum(0) ** config.power).sum(), "name": config.name + mode}

    config, kwargs = Frozen(power=2, name="a"), {"mode": "train"}
    traced = trace(step, (B, Y, config), kwargs, static_argnums=(2,))
    by_name = trace(step, (B, Y), {**kwargs, "config": config}, static_argnums=(2,))
    as_leaf = trace(step, (B, Y, config), kwargs)
    w, y = np.ones(4, np.float32), np.ones((16, 4), np.float32)
    for one, args in ((traced, (w, y)), (by_name, (w, y)), (as_leaf, (w, y, config))):
        result = run(one, *args, **kwargs)
        assert result["name"] == "atrain"
        np.testing.assert_allclose(result["w"], step(w, y, config, mode="train")["w"])
    other = trace(step, (B, Y, Frozen(3, "a")), kwargs, static_argnums=(2,))
    assert traced.signature != other.signature


def test_what_jit_was_told_is_known() -> None:
    def step(w: Any, m: Any, x: Any, config: Frozen, *, mode: str) -> Any:
        scale = config.power if mode == "train" else 0
        return w - scale * x.sum(0), 2 * m

    config, w, y = Frozen(2, "a"), np.ones(4, np.float32), np.ones((16, 4), np.float32)
    options: dict[str, Any] = {"static_argnums": (3,), "static_argnames": ("mode",)}
    for donated in ((), (1,)):
        jitted = jax.jit(step, donate_argnums=donated, **options)
        traced = trace(jitted, (B, B, Y, config), {"mode": "train"})
        got = run(traced, w, w, y, config, mode="train")
        np.testing.assert_allclose(got[0], step(w, w, y, config, mode="train")[0])
        labels = {label.path: label.donated for label in traced.graph.inputs}
        assert labels == {"w": not donated, "m": True, "x": False}

    class Trainer:
        power = 3

        @partial(jax.jit, static_argnums=(0, 2))
        def step(self, w: Any, power: int) -> Any:
            return w**power * self.power

    np.testing.assert_allclose(run(trace(Trainer().step, (B, 2)), w, 2), 3 * w**2)


def test_true_and_one_are_different_static_arguments() -> None:
    convention = Convention.of(lambda x, flag: x, (1,))
    signatures = [signature_of(convention, (B, flag), {}) for flag in (True, 1, 1.0)]
    assert len(set(signatures)) == 3


class NotHashable:
    __hash__ = None  # type: ignore[assignment]


class OtherArray:
    """As an array of another library: hashable by identity, with a shape and a dtype."""

    shape, dtype = (16,), "float32"


@pytest.mark.parametrize(
    ("leaf", "why"),
    [
        (NotHashable(), "NotHashable"),
        (np.array(["a", "b"]), "<U1"),
        (np.array([object()]), "object"),
        (OtherArray(), "another library"),
    ],
)
def test_a_leaf_that_is_neither_an_array_nor_hashable(leaf: Any, why: str) -> None:
    with pytest.raises(TraceError, match=why) as caught:
        trace(lambda state, batch: batch["x"], ({"w": W}, {"x": X, "names": leaf}))
    assert caught.value.where == "batch['names']"
    assert caught.value.hint is not None


def test_a_static_argument_that_is_not_hashable() -> None:
    with pytest.raises(TraceError, match="static argument config is not hashable"):
        trace(lambda x, config: x, (X, {"a": 1}), static_argnums=(1,))


def test_errors_of_the_function_pass_as_they_are() -> None:
    class Mine(Exception):
        pass

    def raises(x: Any) -> Any:
        raise Mine("as it is")

    with pytest.raises(Mine) as caught:
        trace(raises, (X,))
    assert caught.value.args == ("as it is",)

    def branches(state: Any, batch: Any) -> Any:
        return state if batch["flag"] else -state

    # JAX's message names the user's function and argument, not our wrapper's.
    with pytest.raises(TraceError, match=r"branches decides in Python") as told:
        trace(branches, (B, {"flag": True}))
    assert isinstance(told.value.__cause__, jax.errors.TracerBoolConversionError)
    assert "batch['flag']" in str(told.value.__cause__)


@pytest.mark.parametrize("result", [None, {}, {"name": "x"}, (None, "text")])
def test_a_function_without_arrays_in_its_result(result: Any) -> None:
    def step(x: Any) -> Any:
        return result

    with pytest.raises(TraceError, match="step returns no arrays") as caught:
        trace(step, (X,))
    assert caught.value.where is not None
    assert "test_trace.py" in caught.value.where


async def _later(x: Any) -> Any:
    return x


def _in_parts(x: Any) -> Any:
    yield x


async def _later_in_parts(x: Any) -> Any:
    yield x


class _Later:
    async def __call__(self, x: Any) -> Any:
        return x


class _Holding:
    """Runs at once, whatever it holds."""

    func = staticmethod(_in_parts)

    def __call__(self, w: Any, x: Any) -> Any:
        return w + x.mean()


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (_later, "coroutine"),
        (_later_in_parts, "coroutine"),
        (_in_parts, "generator"),
        (partial(partial(_in_parts)), "generator"),
        (_Later(), "coroutine"),
        (_Later().__call__, "coroutine"),
    ],
)
def test_a_function_that_runs_later(step: Any, kind: str) -> None:
    with pytest.raises(TraceError, match=f"gives a {kind}") as caught:
        trace(step, (X,))
    is_function = inspect.isroutine(step)
    assert not is_function or "test_trace.py" in str(caught.value.where)


def test_what_holds_a_generator_runs_at_once() -> None:
    assert len(trace(_Holding(), (B, X)).graph.outputs) == 1


@pytest.mark.parametrize(
    ("leaf", "why"), [(2**40, "too large"), (np.ma.masked_array([1.0, 2.0]), "masked")]
)
def test_numbers_that_jax_takes_no_array_for(leaf: Any, why: str) -> None:
    with pytest.raises(TraceError, match=why) as caught:
        trace(lambda w, x: w + x["rows"].mean(0), (B, {"more": leaf, "rows": X}))
    assert caught.value.where == "x['more']"


def test_a_result_that_hides_a_tracer_or_cannot_be_a_constant() -> None:
    class Plain:
        def __init__(self, x: Any):
            self.x = x

    for make in (Plain, lambda x: NotHashable(), lambda x: Frozen(x, "a")):
        with pytest.raises(TraceError, match="neither an array nor a constant") as caught:
            trace(lambda x, make=make: (x, {"state": make(x)}), (X,))
        assert caught.value.where == "result[1]['state']"


def test_closed_over_arrays_become_constants() -> None:
    table = jnp.arange(32.0).reshape(8, 4)
    traced = trace(lambda w, x: w + (x @ table).mean(0), (B, X))
    assert roles(traced) == {"w": "state", "x": "batch", "constant[0]": "constant"}
    assert traced.graph.constants[0] is table


# Donation


def test_what_cannot_be_donated_is_warned_about_and_kept() -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        new, loss = train(params, x, y)
        return {"w": new["w"].astype(jnp.bfloat16), "b": new["b"]}, loss

    with pytest.warns(DonationWarning, match=r"params\['w'\] cannot be donated"):
        labels = check(trace(step, (PARAMS, X, Y), donate_argnums=(0,)))
    assert not labels["params['w']"].donated
    assert labels["params['b']"].donated
    with pytest.warns(
        DonationWarning, match="x cannot be donated: the argument does not come back"
    ):
        labels = check(trace(train, (PARAMS, X, Y), donate_argnums=(1,)))
    assert not any(label.donated for label in labels.values())
    assert labels["params['w']"].alias is not None


def test_nothing_is_donated_where_the_user_says_so() -> None:
    labels = check(trace(train, (PARAMS, X, Y), donate_argnums=()))
    assert not any(label.donated for label in labels.values())
    assert labels["params['w']"].role == "state"


# Arguments


def test_arguments_by_keyword_and_variadic_ones() -> None:
    def step(params: Any, *batch: Any, **more: Any) -> Any:
        return train(params, batch[0] + more["shift"], batch[1])

    traced = trace(step, (PARAMS, X, Y), {"shift": X})
    assert list(check(traced)) == ["params['b']", "params['w']", "batch[0]", "batch[1]", "shift"]
    assert roles(traced)["shift"] == "batch"


def test_partial_functions_methods_and_callables() -> None:
    class Trainer:
        rate = 0.1

        def step(self, params: Any, x: Any, y: Any) -> Any:
            gradients = jax.grad(loss_fn)(params, x, y)
            return jax.tree.map(lambda p, g: p - self.rate * g, params, gradients)

        __call__ = step

    for fn in (Trainer().step, Trainer(), partial(train), jax.jit(train)):
        assert list(check(trace(fn, (PARAMS, X, Y))))[-2:] == ["x", "y"]
    # An unbound method: the instance is a static leaf, and argument 0.
    assert roles(trace(Trainer.step, (Trainer(), PARAMS, X, Y)))["x"] == "batch"


def test_an_argument_number_that_does_not_exist() -> None:
    with pytest.raises(OptionError, match="static_argnums"):
        trace(train, (PARAMS, X, Y), static_argnums=(3,))
    with pytest.raises(OptionError, match="donate_argnums"):
        trace(train, (PARAMS, X, Y), donate_argnums=(5,))


def test_the_graph_computes_what_the_function_does() -> None:
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 4)).astype(np.float32), "b": np.zeros(4, np.float32)}
    x, y = rng.normal(size=(16, 8)).astype(np.float32), np.ones((16, 4), np.float32)
    traced = trace(train, (params, x, y))
    found, expected = run(traced, params, x, y), jax.jit(train)(params, x, y)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, expected)
