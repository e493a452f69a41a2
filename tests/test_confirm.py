"""`confirm=`: what the target's compiler says of memory decides which plan is taken."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_releases
import pytest

import autopar
from autopar import building
from autopar.base.compiled_records import ProgramFinding, ProgramMemory
from autopar.base.confirmation import CompiledTry, Confirmation
from autopar.base.errors import AutoparWarning, MemoryLimitError, OptionError
from autopar.base.verification_records import PieceCheck, StageCheck
from autopar.executable import Executable
from autopar.report.verification_report import Verification
from autopar.runtime.verification import checking
from autopar.runtime.verification.targets import target_for

WEIGHTS = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
ROWS = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
ASKED: dict[str, Any] = {"cluster": "4xh100", "method": "data", "stages": 1, "progress": False}
LIMIT = 1_300_000
"""Bytes: what two microbatches are planned with fits, what XLA makes of them for CPUs does not."""


def step(weights: Any, rows: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        hidden = rows
        for weight in weights:
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean(hidden**2)

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def planned(**options: Any) -> autopar.Plan:
    return autopar.plan(step, WEIGHTS, ROWS, **{**ASKED, "memory_limit": LIMIT, **options})


def taken(made: autopar.Executable) -> list[int]:
    return [size for size in made.peak_bytes() if size is not None]


class Claims:
    """A compiler that takes so much of what is planned; None: it fails."""

    def __init__(self, *shares: float | None) -> None:
        self.shares = list(shares)
        self.plans: list[autopar.Plan] = []

    def __call__(self, plan: autopar.Plan, *args: Any, target: Any = None, **more: Any) -> Any:
        self.plans.append(plan)
        share = self.shares.pop(0)
        stages = tuple(
            StageCheck(
                number,
                stage.mesh,
                stage.peak_bytes_per_device,
                None if share is None else int(share * stage.peak_bytes_per_device),
                None,
            )
            for number, stage in enumerate(plan.stages)
        )
        pieces: tuple[PieceCheck, ...] = ()
        if share is None:
            failed = ProgramFinding(failure="Mosaic: no such layout")
            memory = ProgramMemory(0, 0, 0, 0)
            pieces = (PieceCheck("step", 0, "step", 1, memory, finding=failed),)
        return Verification(
            "cpu", "XLA", "0", "0", plan.program_hash, "", repr(plan), pieces, stages, ()
        )


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Claims:
    made = Claims(*request.param)
    monkeypatch.setattr(checking, "verify_step", made)
    return made


def test_what_takes_more_than_there_is_is_planned_again() -> None:
    plain = planned()
    assert plain.num_microbatches == 2 and plain.confirmed is None
    refuted = plain.verify("cpu")
    assert (refuted.stages[0].compiled_bytes or 0) > LIMIT
    plan = planned(confirm="cpu")
    assert plan.num_microbatches == 4
    found = plan.confirmed
    assert found is not None and len(found.tries) == 2
    first, last = found.tries
    assert first.planned_bytes <= LIMIT < first.compiled_bytes
    assert last.planned_within < first.planned_bytes and last.compiled_bytes <= LIMIT
    assert plan.verify("cpu").stages[0].compiled_bytes == found.compiled_bytes
    assert "confirmed" in str(plan) and "of what was planned before" in str(found)
    assert plan.options == plain.options, "the plan runs without confirm"
    assert autopar.Plan.from_json(plan.to_json()) == plan


def test_a_confirmed_plan_runs_and_gives_the_same_numbers() -> None:
    state = [jnp.full((64, 64), 0.01 * i) for i in range(1, 5)]
    rows = jnp.linspace(0, 1, 4096 * 64).reshape(4096, 64)
    wanted, loss = jax.jit(step)(state, rows)
    options: dict[str, Any] = {
        "method": "data",
        "stages": 1,
        "memory_limit": LIMIT,
        "confirm": True,
    }
    made = autopar.compile(step, state, rows, cluster=autopar.Cluster.local(), **options)
    assert made.plan.confirmed is not None and made.plan.confirmed.target == "cpu"
    found, own_loss = made(state, rows)
    assert jnp.allclose(own_loss, loss) and jax.tree.all(jax.tree.map(jnp.allclose, found, wanted))


@pytest.mark.parametrize(("stages", "limit"), [(1, 1_050_000), (2, 1_638_410)])
def test_what_does_not_fit_the_devices_here_is_planned_again(
    monkeypatch: pytest.MonkeyPatch, stages: int, limit: int
) -> None:
    """Limits are a little more than what is planned, and less than what XLA makes of it."""
    asked: dict[str, Any] = {"method": "data", "stages": stages, "memory_limit": limit}
    state = [jnp.full((64, 64), 0.01 * i) for i in range(1, 5)]
    rows = jnp.linspace(0, 1, 4096 * 64).reshape(4096, 64)
    cluster = autopar.Cluster.local(jax.devices()[:4])
    wanted, loss = jax.jit(step)(state, rows)
    plain = autopar.compile(step, state, rows, cluster=cluster, **asked)
    assert plain.plan.confirmed is None, "virtual devices of a CPU share its memory"
    most = max(taken(plain))
    if most <= limit and not jax_releases.IS_OURS:
        pytest.skip("here XLA takes no more than is planned")
    assert most > limit
    monkeypatch.setattr(building, "is_limited", lambda device: True)
    made = autopar.compile(step, state, rows, cluster=cluster, **asked)
    found = made.plan.confirmed
    assert found is not None and found.target == "here"
    assert found.tries[0].compiled_bytes == most
    assert max(taken(made)) == found.compiled_bytes <= limit
    assert found.tries[-1].planned_bytes < found.tries[0].planned_bytes
    assert made.plan.options == plain.plan.options
    new, own_loss = made(state, rows)
    assert jnp.allclose(own_loss, loss) and jax.tree.all(jax.tree.map(jnp.allclose, new, wanted))
    enough = autopar.compile(step, new, rows, cluster=cluster, method="data", stages=stages)
    assert enough.plan.confirmed is None


def test_a_program_of_float64_is_confirmed() -> None:
    with jax.enable_x64(True):
        weights = [jax.ShapeDtypeStruct((64, 64), jnp.float64)] * 2
        rows = jax.ShapeDtypeStruct((64, 64), jnp.float64)
        asked: dict[str, Any] = {"method": "data", "microbatches": 1, "progress": False}
        plan = autopar.plan(step, weights, rows, cluster="2xh100", confirm="cpu", **asked)
    assert plan.confirmed is not None


def here(monkeypatch: pytest.MonkeyPatch, sizes: list[int | None]) -> autopar.Executable:
    """Compiled for devices whose compiler says such sizes one after the other; None: it fails."""
    load = Executable.__init__
    left = list(sizes)

    def said(self: Any, *args: Any, **kwargs: Any) -> None:
        self.says = left.pop(0)
        if self.says is None:
            words = "RESOURCE_EXHAUSTED: Used 1.1M of 1.0M hbm. Exceeded hbm capacity by 64.0K."
            raise jax.errors.JaxRuntimeError(words)
        load(self, *args, **kwargs)

    monkeypatch.setattr(building, "is_limited", lambda device: True)
    monkeypatch.setattr(Executable, "__init__", said)
    monkeypatch.setattr(Executable, "peak_bytes", lambda self: [self.says])
    state, rows = [jnp.ones((64, 64))] * 4, jnp.ones((4096, 64))
    cluster = autopar.Cluster.local(jax.devices()[:4])
    asked: dict[str, Any] = {"method": "data", "stages": 1, "memory_limit": 1_050_000}
    return autopar.compile(step, state, rows, cluster=cluster, **asked)


def test_a_compiler_that_runs_out_of_memory_is_asked_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = here(monkeypatch, [None, 900_000]).plan.confirmed
    assert found is not None and len(found.tries) == 2
    assert found.tries[0].compiled_bytes == 1_050_000 + 2**16
    with pytest.raises(jax.errors.JaxRuntimeError, match="Exceeded hbm") as error:
        here(monkeypatch, [None, None, None, None])
    assert "is planned to take" in "".join(error.value.__notes__)


def test_where_nothing_fits_what_needs_least_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(AutoparWarning, match="may need more memory than the devices have"):
        made = here(monkeypatch, [1_060_000, 1_500_000, 1_500_000, 1_500_000])
    assert made.peak_bytes() == [1_060_000] and made.plan.confirmed is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryLimitError("No plan.")])
def test_an_executable_survives_what_stops_planning_again(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    calls = []

    def once(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > 1:
            raise error
        return plan_traced(*args, **kwargs)

    plan_traced = building.plan_traced
    monkeypatch.setattr(building, "plan_traced", once)
    with pytest.warns(AutoparWarning, match="may need more memory"):
        assert here(monkeypatch, [1_060_000]).peak_bytes() == [1_060_000]


def test_a_plan_that_is_given_is_not_planned_again(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"method": "data", "stages": 1, "microbatches": 1}
    plan = autopar.plan(step, WEIGHTS, ROWS, **asked)
    with pytest.raises(OptionError, match="confirm='cpu' is not possible with plan="):
        autopar.compile(step, WEIGHTS, ROWS, plan=plan, confirm="cpu", **asked)
    found = Confirmation("cpu", "XLA", LIMIT, (CompiledTry(LIMIT, 1, 1),))
    file = tmp_path / "plan.json"
    dataclasses.replace(plan, confirmed=found).save(file)
    made = autopar.compile(step, WEIGHTS, ROWS, plan=file, confirm=True, **asked)
    assert made.plan.confirmed == found


@pytest.mark.parametrize("claims", [(1.0,)], indirect=True)
def test_what_fits_is_compiled_once(claims: Claims) -> None:
    found = planned(confirm="cpu").confirmed
    assert found is not None and len(found.tries) == 1 and len(claims.plans) == 1


@pytest.mark.parametrize("claims", [(0.6,)], indirect=True)
def test_a_refusal_is_compiled_first(claims: Claims) -> None:
    options: dict[str, Any] = {"microbatches": 1, "remat": "none", "memory_limit": 1_200_000}
    with pytest.raises(MemoryLimitError):
        planned(**options)
    plan = planned(confirm="cpu", **options)
    assert plan.confirmed is not None
    assert plan.confirmed.tries[0].planned_bytes > 1_200_000 >= plan.confirmed.compiled_bytes
    assert "by autopar's estimate it would not fit" in str(plan.confirmed)


@pytest.mark.parametrize("claims", [(0.9,)], indirect=True)
def test_a_refusal_that_the_compiler_confirms(claims: Claims) -> None:
    options: dict[str, Any] = {"microbatches": 1, "remat": "none", "memory_limit": 1_200_000}
    with pytest.raises(MemoryLimitError, match=r"at most 1,200,000 bytes") as error:
        planned(confirm="cpu", **options)
    size = int(0.9 * claims.plans[0].estimates.peak_bytes_per_device)
    assert error.value.least_bytes == size and "XLA:CPU" in str(error.value)


@pytest.mark.parametrize("claims", [()], indirect=True)
def test_what_is_far_too_large_is_not_compiled(claims: Claims) -> None:
    with pytest.raises(MemoryLimitError, match="keeps within 100,000"):
        planned(confirm="cpu", memory_limit=100_000, microbatches=1)
    assert not claims.plans


@pytest.mark.parametrize("claims", [(1.3, 1.3, 1.3, 1.3, 1.3)], indirect=True)
def test_it_ends(claims: Claims) -> None:
    """Each plan is smaller than the one before, until one fits or nothing is smaller."""
    found = planned(confirm="cpu").confirmed
    assert found is not None
    sizes = [x.planned_bytes for x in found.tries]
    assert sizes == sorted(set(sizes), reverse=True)
    assert found.compiled_bytes <= LIMIT < found.tries[0].compiled_bytes


@pytest.mark.parametrize("claims", [(9.0, 9.0, 9.0, 9.0, 9.0)], indirect=True)
def test_a_compiler_that_fits_nothing(claims: Claims) -> None:
    with pytest.raises(MemoryLimitError, match="when compiled") as error:
        planned(confirm="cpu")
    assert "memory_limit" not in (error.value.hint or "")
    assert error.value.least_bytes == min(
        9 * x.estimates.peak_bytes_per_device for x in claims.plans
    )


@pytest.mark.parametrize("claims", [(None,)], indirect=True)
def test_a_compiler_that_fails_leaves_the_plan(claims: Claims) -> None:
    with pytest.warns(AutoparWarning, match=r"not confirmed.*\n.*\n.*Mosaic"):
        plan = planned(confirm="cpu")
    assert plan.confirmed is None and plan.num_microbatches == 2


def test_names_of_targets() -> None:
    with pytest.raises(OptionError, match="gpu:h999") as error:
        planned(confirm="gpu:h999")
    assert error.value.where == "confirm"
    with pytest.raises(OptionError, match="confirm=3"):
        planned(confirm=3)
    assert target_for(True, autopar.Cluster.named("2x8 h100")).name == "gpu:h100"
    assert target_for(True, autopar.Cluster.named("8xtpu-v5e")).name == "tpu:v5e:2x4"
    assert target_for("gpu:a100", autopar.Cluster.named("8xh100")).name == "gpu:a100"
    with pytest.raises(OptionError, match="confirm=True is not possible for V100"):
        target_for(True, autopar.Cluster.named("8xv100"))


def test_records_are_plain() -> None:
    tries = (CompiledTry(10, 9, 12), CompiledTry(7, 6, 9))
    made = Confirmation("gpu:h100", "XLA", 10, tries)
    assert Confirmation.from_dict(made.to_dict()) == made
    assert dataclasses.replace(made, tries=tries[1:]) != made
