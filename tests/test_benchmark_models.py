"""The models of the planning table: they are as large as published, and route as they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_modules import deepseek, delta, moe, paper_cases, registry

UNITS = {"M": 10**6, "B": 10**9}
QUICK = (
    "gpt-2.6B",
    "gpt-39B",
    "moe-70B",
    "wide-resnet-1B",
    "llama-7B",
    "llama3-8B",
    "mixtral-8x7B",
)
OTHERWISE = {
    "llama-7B": 6.738e9,
    "llama-70B": 68.98e9,
    "llama3-8B": 8.030e9,
    "llama3-70B": 70.554e9,
    "llama3-405B": 405.853e9,
    "deepseek-16B": 16.38e9,
    "mixtral-8x7B": 46.703e9,
    "mixtral-8x22B": 140.621e9,
    "qwen3-30B": 30.532e9,
    "qwen3-235B": 235.093e9,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in (*QUICK, "deepseek-16B") else pytest.mark.full)
        for name in registry.NAMES
    ],
)
def test_models_have_the_published_number_of_parameters(name: str) -> None:
    size = name.split("-")[-1]
    published = OTHERWISE.get(name.replace("-scanned", "")) or float(size[:-1]) * UNITS[size[-1]]
    # Published sizes are names, rounded to one or two digits; those with more digits are exact.
    tolerance = 1e-3 if published in OTHERWISE.values() else 0.04
    assert abs(registry.num_parameters(name) / published - 1) < tolerance


def test_steps_return_their_state_and_a_loss() -> None:
    """Shallow ones: the state comes back in its shapes, and the loss is a number."""
    for name in ("moe-380M", "deepseek-16B", "wide-resnet-250M"):
        layers = 14 if "resnet" in name else 2
        built = registry.build(name, jnp.float16, batch=8, layers=layers)
        state, metrics = jax.eval_shape(built.step, built.state, built.batch)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, built.state)
        assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32


def test_top_two_experts_share_a_token_and_no_place_is_taken_twice() -> None:
    logits = jax.random.normal(jax.random.key(0), (2, 16, 4))
    combined, balance = moe.top2_gates(logits, capacity=16)
    np.testing.assert_allclose(combined.sum((2, 3)), 1, rtol=1e-5)
    assert ((combined > 0).sum((2, 3)) == 2).all() and ((combined > 0).sum(1) <= 1).all()
    assert balance > 0
    dropped, _ = moe.top2_gates(logits, capacity=2)
    assert ((dropped > 0).sum((1, 3)) <= 2).all() and dropped.sum() < combined.sum()


def test_choices_beyond_an_experts_capacity_have_no_place() -> None:
    places = deepseek.places_of(jnp.array([1, 0, 1, 1, 0]), experts=2, capacity=2)
    assert places.tolist() == [2, 0, 3, 4, 1]


def test_published_plans_have_the_papers_devices() -> None:
    cases = list(paper_cases.cases(everywhere=True))
    assert len({case.label for case in cases}) == len(cases)
    published = {case.model: case for case in cases if case.asked == "published"}
    assert set(published) == set(paper_cases.published())
    for case in published.values():
        stages = case.options["stages"]
        assert sum(stage.devices for stage in stages) == case.cluster.num_devices == case.devices
        np.testing.assert_allclose(sum(stage.layers for stage in stages), 1)
    (only,) = paper_cases.cases("gpt-39B 64 .* published")
    assert [stage.logical_mesh for stage in only.options["stages"]] == [(1, 4)] * 16


def test_states_chunk_by_chunk_are_those_token_by_token() -> None:
    rng, shape = np.random.default_rng(0), (2, 2 * delta.CHUNK, 3, 8)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay, rate = -0.1 * np.abs(q[..., 0]), 1 / (1 + np.exp(-v[..., 0]))
    state, wanted = np.zeros((2, 3, 8, 8)), []
    for t in range(shape[1]):
        state = np.exp(decay[:, t])[..., None, None] * state
        lacking = v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bh,bhk,bhv->bhkv", rate[:, t], k[:, t], lacking)
        wanted.append(np.einsum("bhkv,bhk->bhv", state, q[:, t]) / np.sqrt(8))
    found = delta.gated_delta_rule(*map(jnp.asarray, (q, k, v, decay, rate)))
    np.testing.assert_allclose(found, np.stack(wanted, 1), rtol=1e-4, atol=1e-5)
