"""`autopar.scaling`: one step planned for several clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.base.progress import Progress
from autopar.report.rich_parts import as_text


def _step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * gradient, value


SHAPES = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 512), (4096, 512))]


def _clusters(*sizes: tuple[int, int]) -> list[autopar.Cluster]:
    return [autopar.Cluster.preset("h100", nodes=n, devices_per_node=k) for n, k in sizes]


def _scaling(*sizes: tuple[int, int], **options: Any) -> Any:
    return autopar.scaling(_step, *SHAPES, clusters=_clusters(*sizes), **options)


def test_each_row_is_the_plan_for_its_cluster() -> None:
    found = _scaling((1, 2), (1, 4), (2, 4), method="data")
    for row in found.rows:
        assert row.plan == autopar.plan(_step, *SHAPES, cluster=row.cluster, method="data")
        assert row.step_seconds == row.plan.estimates.step_seconds
        assert row.throughput == row.plan.throughput
    seconds = [row.step_seconds for row in found.rows]
    ideal = [2 * seconds[0] / (n * t) for n, t in zip((2, 4, 8), seconds, strict=True)]
    assert found.efficiencies == pytest.approx(ideal)
    assert found.efficiencies[0] == 1


def test_what_a_compiler_said_of_a_plan_is_told() -> None:
    found = _scaling((1, 2), method="data", confirm="cpu")
    (row,) = found.rows
    assert row.plan.confirmed is not None
    assert "2 devices, confirmed: XLA:CPU" in as_text(found, 200)


def test_what_has_no_plan_has_its_reason(tmp_path: Path) -> None:
    found = _scaling((1, 3), (1, 1), (1, 8), method="data", memory_limit="8MiB", microbatches=1)
    uneven, small, fits = found.rows
    assert [row.is_feasible for row in found.rows] == [False, False, True]
    assert "cannot be divided among 3 devices" in uneven.reason
    assert "No plan keeps within" in small.reason
    assert "At least" in small.reason
    assert found.efficiencies == (None, None, 1)
    for width in (80, 120):
        text = as_text(found, width)
        assert max(map(len, text.splitlines())) <= width
        assert "no plan for 3 devices" in text
        assert "100%" in text
    found.save_plot(tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    assert fits.peak_bytes_per_device is not None


def test_clusters_have_names() -> None:
    (row,) = autopar.scaling(_step, *SHAPES, clusters=["2x4 h100"], method="data").rows
    assert (row.cluster.num_nodes, row.cluster.devices_per_node) == (2, 4)


def test_no_plan_at_all_still_prints_and_draws() -> None:
    found = _scaling((1, 3), method="data")
    assert found.efficiencies == (None,)
    assert "cannot be divided" in str(found)
    found.plot()


@pytest.mark.parametrize("clusters", [[], "h100", None])
def test_clusters_are_checked(clusters: Any) -> None:
    with pytest.raises(autopar.errors.OptionError, match="clusters="):
        autopar.scaling(_step, *SHAPES, clusters=clusters)


def test_what_is_wrong_everywhere_is_raised() -> None:
    with pytest.raises(autopar.errors.OptionError, match="no option 'methd'"):
        _scaling((1, 2), methd="data")
    with pytest.raises(autopar.errors.OptionError, match="cluster="):
        autopar.scaling(_step, *SHAPES, clusters=[3])  # type: ignore[list-item]


@pytest.mark.parametrize(("word", "rows"), [("2 of", 2), ("for 8 devices", 1)])
def test_an_interrupt_keeps_what_was_planned(
    word: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the second of three clusters, with a plan for it or before there is one."""
    begun: list[str] = []

    def report(self: Progress, line: str) -> None:
        begun.extend(["cluster"] if line.startswith("planning for") else [])
        if len(begun) == 2 and word in line:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "report", report)
    found = _scaling((1, 4), (1, 8), (2, 8), stages=1)
    assert found.interrupted and "interrupted" in str(found)
    assert [row.cluster.num_devices for row in found.rows] == [4, 8][:rows]
    assert [row.plan.interrupted for row in found.rows] == [False, True][:rows]


def test_an_interrupt_before_any_plan_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def report(self: Progress, line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "report", report)
    with pytest.raises(KeyboardInterrupt):
        _scaling((1, 4), (1, 8))


def test_a_kind_of_device_that_cannot_run_the_step_has_a_reason() -> None:
    """cuDNN has no attention for V100s; those of newer GPUs are planned all the same."""

    def attention(q: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    q = jax.ShapeDtypeStruct((64, 128, 8, 64), jnp.bfloat16)
    names = ["1x8 v100", "1x8 h100", "1x8 a100"]
    for clusters in (names, names[::-1]):
        rows = autopar.scaling(attention, q, clusters=clusters).rows
        found = {row.cluster.device.name.split()[0]: row for row in rows}
        assert found["H100"].plan is not None and found["A100"].plan is not None
        assert found["V100"].plan is None and "cudnn" in str(found["V100"].error)
    with pytest.raises(autopar.errors.TraceError, match="cudnn"):
        autopar.scaling(attention, q, clusters=["1x8 v100", "2x8 v100"])
