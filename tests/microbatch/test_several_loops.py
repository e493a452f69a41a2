"""Steps that need the whole batch in their middle: loop, whole-batch middle, loop."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core
from microbatch.helpers import analyzed, check_split

import autopar
from autopar.base.errors import InexactMicrobatchError, PlanMismatchError
from autopar.passes.graph.graph import walk
from autopar.passes.microbatch import split

Params = dict[str, Any]


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[0])


def encode(weights: list[Any], x: Any) -> Any:
    for w in weights[:-1]:
        x = jax.nn.gelu(x @ w)
    z = x @ weights[-1]
    return z / jnp.sqrt(jnp.sum(z * z, axis=-1, keepdims=True) + 1e-3)


def clip_loss(params: Params, batch: Params) -> Any:
    images, texts = (encode(params[name], batch[name]) for name in ("image", "text"))
    logits = jnp.exp(params["scale"]) * images @ texts.T
    right = jnp.exp(params["scale"]) * jnp.sum(images * texts, axis=1)
    by_image, by_text = (jax.nn.logsumexp(logits, axis=axis) for axis in (1, 0))
    return jnp.mean(by_image + by_text - 2 * right)


def step_of(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Params, batch: Params) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def prints(params: Params, batch: Params) -> Any:
    new, loss = step_of(clip_loss)(params, batch)
    jax.debug.print("loss {}", loss)
    return new, loss


def with_embeddings(params: Params, batch: Params) -> Any:
    return *step_of(clip_loss)(params, batch), encode(params["image"], batch["image"])


def two_views(params: Params, batch: Params) -> Any:
    """SimCLR: two views of each example in one batch."""
    z = encode(params["image"], jnp.concatenate([batch["image"], batch["image"] + 0.1]))
    scores = z @ z.T / 0.5 - 1e9 * jnp.eye(z.shape[0])
    right = jnp.roll(jnp.arange(z.shape[0]), z.shape[0] // 2)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), right[:, None], axis=1))


def redundancy(params: Params, batch: Params) -> Any:
    """Barlow twins: the correlation of features over the batch."""
    one, two = (encode(params[name], batch[name]) for name in ("image", "text"))
    one, two = one - one.mean(0), two - two.mean(0)
    return jnp.sum((one.T @ two / one.shape[0] - jnp.eye(one.shape[1])) ** 2)


def plain_loss(params: Params, batch: Params) -> Any:
    return jnp.mean((encode(params["image"], batch["image"]) - batch["text"][:, :4]) ** 2)


def hardest(params: Params, batch: Params) -> Any:
    """The largest loss of a row: the gradient goes where a row equals the batch's maximum."""
    again = jax.checkpoint(lambda x, up, down: x + jax.nn.gelu(x @ up) @ down)
    first, *between, last = params["image"]
    x = batch["image"] @ first
    for w in between:
        x = again(x, w, w.T)
    losses = jnp.sum((x @ last - batch["text"][:, :4]) ** 2, axis=1)
    return jnp.max(losses) + jnp.mean(x * x)


def whitened(params: Params, batch: Params) -> Any:
    """PPO: advantages by a model that is not trained, with the batch's mean and deviation."""
    reference = jax.tree.map(jax.lax.stop_gradient, params["text"])
    advantages = jnp.sum(encode(reference, batch["text"]) ** 3, axis=-1)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-3)
    ratios = jnp.exp(jnp.sum(encode(params["image"], batch["image"]), axis=-1))
    return -jnp.mean(jnp.minimum(ratios * advantages, jnp.clip(ratios, 0.8, 1.2) * advantages))


def sharpness_aware(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Params, batch: Params) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)) + 1e-6)
        ascended = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, grads)
        grads = jax.grad(loss_fn)(ascended, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def case(
    rows: int = 16, width: int = 12, dtype: Any = np.float64, depth: int = 1
) -> tuple[Params, Params]:
    sizes = ((8, width), *((width, width),) * depth, (width, 4))
    params: Params = {
        name: [normal(10 * k + i, *size).astype(dtype) for i, size in enumerate(sizes)]
        for k, name in enumerate(("image", "text"))
    }
    params["scale"] = np.asarray(1.0, dtype)
    batch = {name: 4 * normal(30 + k, rows, 8).astype(dtype) for k, name in enumerate(params)}
    return params, {name: batch[name] for name in ("image", "text")}


TWO_LOOPS = "2 loops, rows computed again"
"""As JAX 0.12 writes the whitened step, two do, which are quicker; a contrastive loss has these."""

STEPS = {
    "clip": (step_of(clip_loss), 2),
    "prints": (prints, 2),
    "embeddings": (with_embeddings, 2),
    "two_views": (step_of(two_views), 2),
    "hardest": (step_of(hardest), 2),
    "redundancy": (step_of(redundancy), 4),
    "whitened": (step_of(whitened), 3),
    "sharpness_aware": (sharpness_aware(plain_loss), 2),
    "sharpness_aware_clip": (sharpness_aware(clip_loss), 4),
}


@pytest.mark.parametrize("later_loops", ["recompute", "reuse", "keep"])
@pytest.mark.parametrize("name", list(STEPS))
def test_equals_the_plain_step(name: str, later_loops: str) -> None:
    step, loops = STEPS[name]
    with jax.enable_x64(True):
        analysis = check_split(step, case(), 4, later_loops=later_loops)
    assert len(analysis.parts) == loops, analysis


def test_rows_that_are_compared_with_the_whole_batch_are_kept() -> None:
    """Computed again they may be rounded otherwise, and none would equal the maximum."""
    _, analysis = analyzed(step_of(hardest), case(dtype=np.float32), 4)
    (cut,) = analysis.cuts
    assert [var.aval.shape for var in cut.kept if var.aval.shape[:1] == (16,)] == [(16,)]


def test_what_one_loop_does_for_has_one() -> None:
    _, analysis = analyzed(step_of(plain_loss), case(dtype=np.float32), 4)
    assert not analysis.parts


def test_certificate_names_the_loop() -> None:
    _, analysis = analyzed(with_embeddings, case(dtype=np.float32), 4)
    how = {item.path: item.how for item in analysis.certificate}
    assert how["out[1]"] == "sum in loop 2 of 2"
    assert how["out[0]['scale']"] == "epilogue of 2 loops"
    assert how["out[2]"] == "collected in loop 2 of 2"
    assert "loop 2 of 2" in str(analysis)


def test_memory_falls_with_the_number_of_microbatches() -> None:
    """What XLA allocates for values of the step, beyond its inputs and outputs."""
    args = case(rows=256, width=256, dtype=np.float32, depth=4)

    def temporary_bytes(count: int) -> int:
        graph, analysis = analyzed(step_of(clip_loss), args, count)
        function = jex_core.jaxpr_as_fun(
            jex_core.ClosedJaxpr(split(graph, analysis).graph.jaxpr, ())
        )
        compiled = jax.jit(function).lower(*jax.tree.leaves(args), *graph.constants).compile()
        sizes = compiled.memory_analysis()
        assert sizes is not None
        return int(sizes.temp_size_in_bytes)

    sizes = list(map(temporary_bytes, (1, 4, 16)))
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.6 * sizes[1]


def test_memory_decides_whether_rows_are_kept() -> None:
    args = case(rows=256, width=256, dtype=np.float32, depth=3)
    step = step_of(clip_loss)
    free = autopar.plan(step, *args, method="data", microbatches=16)
    peaks = {c.note: c.peak_bytes_per_device or 0 for c in free.candidates}
    again, kept = peaks["2 loops, rows computed again"], peaks["2 loops, rows kept"]
    assert again < kept
    limit = (again + kept) // 2
    plans = [free, autopar.plan(step, *args, method="data", microbatches=16, memory_limit=limit)]
    assert [plan.later_loops for plan in plans] == ["keep", "recompute"]
    assert "several; later ones compute again" in str(plans[1])


@pytest.mark.parametrize(
    ("later_loops", "products"), [("recompute", 17), ("reuse", 11), ("keep", 11)]
)
def test_what_loops_run(later_loops: str, products: int) -> None:
    """Three weights each: three products of the reference, nine less one of the policy."""
    graph, analysis = analyzed(
        step_of(whitened), case(dtype=np.float32), 4, later_loops=later_loops
    )
    eqns = [*walk(split(graph, analysis).graph.jaxpr)]
    assert sum(eqn.primitive.name == "dot_general" for eqn in eqns) == products
    rows = [v.aval for cut in analysis.cuts for v in cut.kept if v.aval.shape[:1] == (16,)]
    if later_loops == "reuse":  # what is whitened
        assert [aval.shape for aval in rows] == [(16,)]
    elif later_loops == "keep":
        assert max(aval.size for aval in rows) == 16 * 12


def test_what_is_whitened_is_reused() -> None:
    """As quick as all kept, and smaller."""
    args = case(rows=256, width=256, dtype=np.float32, depth=3)
    plan = autopar.plan(step_of(whitened), *args, method="data", microbatches=16)
    peaks = {c.note: c.peak_bytes_per_device or 0 for c in plan.candidates}
    assert peaks["3 loops, rows reused"] < peaks["3 loops, rows kept"]
    if TWO_LOOPS not in peaks:
        assert plan.later_loops == "reuse"
        assert "reuse what earlier ones compute for themselves" in str(plan)


def test_a_way_in_which_a_step_cannot_be_cut_is_left_out() -> None:
    """Here to reuse rows; gradients of the advantages lead to the model that they are of."""

    def loss_fn(params: Params, batch: Params) -> Any:
        def net(name: str) -> Any:
            x = batch["x"]
            for w in params[name]:
                x = jax.nn.silu(x @ w)
            return jnp.sum(x, axis=-1)

        advantages = net("value") - batch["target"]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-3)
        ratios = jnp.exp(net("policy") / 9)
        return -jnp.mean(jnp.minimum(ratios * advantages, jnp.clip(ratios, 0.8, 1.2) * advantages))

    params = {
        name: [normal(k + i, 64, 64) for i in range(3)] for k, name in ((0, "value"), (5, "policy"))
    }
    batch = {"x": 16 * normal(9, 256, 64), "target": normal(8, 256)}
    args = jax.tree.map(np.float32, (params, batch))
    _, analysis = analyzed(step_of(loss_fn), args, 4, later_loops="reuse")
    assert analysis.culprits
    plan = autopar.plan(step_of(loss_fn), *args, method="data", microbatches=4)
    assert {c.note for c in plan.candidates} >= {
        "3 loops, rows kept",
        "3 loops, rows computed again",
    }
    assert not any("reused" in c.note for c in plan.candidates)


@pytest.mark.parametrize(
    ("method", "loss_fn"), [("zero2", clip_loss), ("auto", clip_loss), ("data", whitened)]
)
def test_plan_is_followed(method: str, loss_fn: Callable[..., Any]) -> None:
    """A saved plan says which of the programs it is for."""
    args = case(rows=64, width=32, dtype=np.float32)
    step = step_of(loss_fn)
    options: dict[str, Any] = {"method": method, "microbatches": 4, "donate_argnums": ()}
    first = autopar.compile(step, *args, **options)
    if not any(c.note == TWO_LOOPS for c in first.plan.candidates):
        assert first.plan.later_loops == "reuse" or loss_fn is clip_loss
    other = "recompute" if first.plan.later_loops == "keep" else "keep"
    again = autopar.compile(step, *args, plan=first.plan, **options)
    plain = jax.jit(step)(*args)
    for executable in (first, again):
        for one, two in zip(*map(jax.tree.leaves, (plain, executable(*args))), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
    with pytest.raises(PlanMismatchError):
        changed = dataclasses.replace(first.plan, later_loops=other)
        autopar.compile(step, *args, plan=changed, **options)


def test_stages_refuse_it_and_name_one_mesh() -> None:
    args = case(rows=64, dtype=np.float32)
    with pytest.raises(InexactMicrobatchError, match="stages=1"):
        autopar.compile(step_of(clip_loss), *args, stages=2, microbatches=4)


def test_a_batch_that_is_normalised_once_is_divided() -> None:
    """BatchNorm in its plainest form; the rest needs sums of the batch forwards and backwards."""

    def loss_fn(params: Params, batch: Params) -> Any:
        hidden = batch["image"] @ params["image"][0]
        hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-3)
        return jnp.mean((hidden @ params["image"][1] - 1) ** 2)

    args = case(rows=64, dtype=np.float32)
    options: dict[str, Any] = {"microbatches": 4, "donate_argnums": (), "stages": 1}
    step = autopar.compile(step_of(loss_fn), *args, **options)
    for one, two in zip(
        *map(jax.tree.leaves, (step(*args), jax.jit(step_of(loss_fn))(*args))), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
