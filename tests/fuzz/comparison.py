"""One program, run by autopar and by plain `jax.jit`, and what came of it."""

from __future__ import annotations

import random
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import autopar
from autopar.errors import AutoparError, UnknownPrimitiveWarning
from fuzz.generator import GeneratedProgram

MODES = ("mesh", "microbatches", "stages")
PERTURBATIONS = 4  # runs that show how much rounding may change the numbers of one program


@dataclass(frozen=True)
class Verdict:
    """What came of a program: "equal", "refused", "wrong", "crash" or "hang", and details."""

    seed: int
    mode: str
    kind: str
    summary: str = ""
    detail: str = ""
    options: str = ""


def options_of(program: GeneratedProgram, mode: str) -> dict[str, Any]:
    """What is asked of autopar for a program."""
    rng = random.Random(f"{program.seed} {mode}")
    method = rng.choice(("auto", "auto", "shard", "data", "zero1", "zero2", "zero3"))
    if mode != "mesh" and program.batch["x"][0] % 16:
        method = "auto"  # the others want rows of every microbatch on all devices
    options: dict[str, Any] = {"method": method}
    if mode == "mesh" and method in ("auto", "shard") and rng.random() < 0.6:
        options["logical_mesh"] = rng.choice(((8,), (4, 2), (2, 4), (2, 2, 2)))
    if mode == "mesh":
        options["microbatches"] = 1
    elif mode == "microbatches":
        options["microbatches"] = 2
    else:
        options |= {"stages": 2, "microbatches": rng.choice((2, 4))}
        options["schedule"] = rng.choice(("auto", "gpipe", "1f1b", "zb_h1", "eager_1f1b"))
        options["remat"] = rng.choice(("auto", "auto", "full"))
    return options


def compare(program: GeneratedProgram, mode: str) -> Verdict:
    """Run a program both ways, and compare every leaf of the new state and the loss."""
    options = options_of(program, mode)
    told: dict[str, Any] = {"seed": program.seed, "mode": mode, "options": str(options)}
    step, optimizer = program.build()
    state, batch, key = program.arguments(optimizer)
    plain = jax.jit(step)
    expected = jax.device_get(plain(state, batch, key))  # a failure here is the generator's
    if not all(np.all(np.isfinite(np.asarray(x, float))) for x in jax.tree.leaves(expected)):
        return Verdict(**told, kind="equal", summary="not finite on one device")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnknownPrimitiveWarning)
            parallel = autopar.compile(step, state, batch, key, donate_argnums=(), **options)
            result = parallel(state, batch, key)
        found = jax.device_get(parallel.gather(result))
        parallel(result[0], batch, key)  # what comes back is what goes in
    except AutoparError as error:
        return Verdict(**told, kind="refused", summary=f"{type(error).__name__}: {error.what}",
                       detail=str(error))  # fmt: skip
    except Exception as error:
        first = str(error).split("\n", 1)[0][:100]
        return Verdict(**told, kind="crash", summary=f"{type(error).__name__}: {first}",
                       detail=traceback.format_exc())  # fmt: skip
    far = differences(program, expected, found, plain, (state, batch, key))
    if far:
        return Verdict(**told, kind="wrong", summary=far[0], detail="\n".join(far))
    return Verdict(**told, kind="equal")


def differences(
    program: GeneratedProgram, expected: Any, found: Any, plain: Any, arguments: Any
) -> list[str]:
    """The leaves of a result that rounding does not explain.

    The error of plain `jax.jit` against the program in float64 says what rounding does; where a
    leaf is further off than ten times that, slightly changed arguments show how far it may be.
    """
    tolerance = 2e-2 if program.is_low else 2e-4
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(expected)]
    ours, plains, exact = (_numbers(tree) for tree in (found, expected, _reference(program)))
    reach = [_distance(a, b) for a, b in zip(plains, exact, strict=True)]
    scales = [float(np.max(np.abs(a), initial=1e-3)) for a in plains]
    far: list[str] = []
    allowed: list[float] = []
    for number, path in enumerate(paths):
        off = _distance(ours[number], plains[number])
        if off <= 10 * reach[number] + tolerance * scales[number]:
            continue
        allowed = allowed or _perturbed(plains, plain, arguments, tolerance)
        if not off <= 10 * allowed[number]:
            far.append(f"{path}: off by {off:.2e}, its numbers are up to {scales[number]:.2e}")
    return far


def _reference(program: GeneratedProgram) -> Any:
    with jax.enable_x64(True):
        step, optimizer = program.build(is_reference=True)
        return jax.device_get(jax.jit(step)(*program.arguments(optimizer, np.float64)))


def _perturbed(plains: list[Any], plain: Any, arguments: Any, tolerance: float) -> list[float]:
    """How far each leaf of plain results moves with arguments that are slightly changed."""
    numbers = np.random.default_rng(0)
    most = [0.0] * len(plains)

    def moved(x: Any) -> Any:
        if not np.issubdtype(x.dtype, np.floating):
            return x
        return x * (1 + tolerance / 10 * numbers.standard_normal(x.shape).astype(x.dtype))

    for _ in range(PERTURBATIONS):
        (params, rest), batch, key = arguments
        batch = {name: x if name == "m" else moved(x) for name, x in batch.items()}
        others = _numbers(jax.device_get(plain((jax.tree.map(moved, params), rest), batch, key)))
        most = [max(a, _distance(b, c)) for a, b, c in zip(most, plains, others, strict=True)]
    return most


def _numbers(tree: Any) -> list[Any]:
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def _distance(a: Any, b: Any) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float(np.nan_to_num(np.max(np.abs(a - b), initial=0.0), nan=np.inf))
