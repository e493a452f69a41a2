"""What the README and docstrings say is executed; `test_pages.py` does it for docs/."""

import contextlib
import doctest
import importlib
import io
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import ONE_LAYER, PROGRAMS
from real_steps import REAL_STEPS

import autopar

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md")


def reader() -> dict[str, Any]:
    """What a reader of the README has before its first line: a model, an optimizer and data."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        hidden = jax.nn.relu(batch["x"] @ params["hidden"] + params["bias"])
        return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)

    optimizer = optax.adam(1e-2)
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    params = {"hidden": normal(16, 32), "bias": normal(32), "out": normal(32, 4)}
    batches = [{"x": normal(64, 16), "y": normal(64, 4)} for _ in range(3)]
    return {
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "state": (params, optimizer.init(params)),
        "batches": batches,
    }


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_readme_trains_as_plain_jit_does() -> None:
    code, pipeline = blocks("README.md", "python")
    names = reader()
    initial = jax.tree.map(jnp.copy, names["state"])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), names)

    plain = jax.jit(names["train_step"].__wrapped__)
    state = initial
    for batch in names["batches"]:
        state, loss = plain(state, batch)
    np.testing.assert_allclose(names["loss"], loss, rtol=1e-5)
    for leaf, expected in zip(jax.tree.leaves(names["state"]), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-6)
    assert names["train_step"].plan.stages[0].num_devices == len(jax.devices()) == 8
    assert printed.getvalue() == f"{names['train_step'].plan}\n"

    exec(compile(pipeline, "README.md", "exec"), names)
    state, loss = plain(state, names["batches"][-1])
    np.testing.assert_allclose(names["loss"], loss, rtol=1e-5)
    for leaf, expected in zip(jax.tree.leaves(names["state"]), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-6)
    assert [stage.num_devices for stage in names["step"].plan.stages] == [4, 4]


def modules_with_examples() -> list[str]:
    """Every module of the package in whose text an interactive session stands."""
    found = []
    for folder in ("autopar", "passes", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents) and ">>> " in (
                path.read_text()
            ):
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found.append(name if folder == "autopar" else f"autopar.{name}")
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings_hold(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_public_functions_show_an_example() -> None:
    for function in (autopar.parallelize, autopar.compile, autopar.plan):
        assert ">>> " in (function.__doc__ or ""), function


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    commands = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", text, re.MULTILINE))
    assert {first or second for first, second in commands} <= targets()
    scripts = re.findall(r"python ((?:examples|benchmarks|docs)/\S+?\.py)", text)
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    paths = [*(ROOT / script for script in scripts)]
    paths += [(ROOT / document).parent / link for link in links]
    assert [str(path) for path in paths if not path.exists()] == []


def test_numbers_of_programs_are_those_of_the_tests() -> None:
    said = " ".join((ROOT / "docs/limits.md").read_text(encoding="utf-8").split())
    on_actors = [x for x in PROGRAMS.values() if x.splits and not x.prints]
    in_stages = [x for x in on_actors if x.name not in ONE_LAYER]
    for text in (
        f"The tests run {len(PROGRAMS)} steps as their libraries document them",
        f"and {len(REAL_STEPS)} of the kinds that real models are made of",
        f"there too ({len(in_stages)} of them; the one that prints is left out)",
        f"and {len(on_actors)} of the tests' programs as one stage over two actors",
    ):
        assert text in said
