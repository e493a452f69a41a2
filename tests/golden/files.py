"""The stored goldens: a text file for each program, all estimates, and the versions they are of."""

from __future__ import annotations

import difflib
import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from .compute import Estimates

FOLDER = Path(__file__).resolve().parent
PLANS = FOLDER / "plans"
ESTIMATES = FOLDER / "estimates.json"
VERSIONS = FOLDER / "versions.json"
_MARK = "=== "
_PACKAGES = ("jax", "numpy", "optax", "flax", "dm-haiku", "equinox", "transformers", "ortools")

Sections = dict[str, str]
"""The plans of a program by the names of their options, each as it stands in the file."""


def section(name: str, title: str, text: str) -> str:
    """A plan as it stands in a file."""
    return f"{_MARK}{name}: {title}\n{text.rstrip()}\n"


def read(program: str) -> Sections:
    """The stored plans of a program."""
    path = PLANS / f"{program}.txt"
    content = path.read_text(encoding="utf-8") if path.exists() else ""
    sections: Sections = {}
    for lines in content.split(_MARK)[1:]:
        sections[lines.partition(":")[0]] = f"{_MARK}{lines.rstrip()}\n"
    return sections


def write(program: str, sections: Sections) -> None:
    """Stores the plans of a program; without any, it has no file."""
    path = PLANS / f"{program}.txt"
    path.parent.mkdir(exist_ok=True)
    if sections:
        path.write_text("\n".join(sections.values()), encoding="utf-8", newline="\n")
    else:
        path.unlink(missing_ok=True)


def stored_programs() -> list[str]:
    """The programs that have a file."""
    return sorted(path.stem for path in PLANS.glob("*.txt"))


def difference(plan: str, before: str, now: str) -> str:
    """A unified diff of a plan's sections, empty if they are equal."""
    lines = difflib.unified_diff(
        before.splitlines(), now.splitlines(), f"{plan} (stored)", f"{plan} (now)", lineterm="", n=2
    )
    return "\n".join(lines)


def parse_estimates(content: str) -> dict[str, Estimates]:
    """The estimates of plans by `program/options`."""
    found: dict[str, Estimates] = json.loads(content)
    return found


def read_estimates() -> dict[str, Estimates]:
    """The stored estimates."""
    return parse_estimates(ESTIMATES.read_text(encoding="utf-8")) if ESTIMATES.exists() else {}


def write_estimates(estimates: Mapping[str, Estimates]) -> None:
    """Stores estimates, those of a plan on a line."""
    lines = [f"{json.dumps(plan)}: {json.dumps(values)}" for plan, values in estimates.items()]
    ESTIMATES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8", newline="\n")


def versions() -> dict[str, str]:
    """The installed versions of what a program's jaxpr, its lines and its plan may depend on."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def other_versions() -> str:
    """How the versions that the goldens are of differ from the installed ones, or an empty text."""
    stored: dict[str, str] = {}
    if VERSIONS.exists():
        stored = json.loads(VERSIONS.read_text(encoding="utf-8"))
    return ", ".join(
        f"{package} {stored.get(package, 'missing')} (here {version})"
        for package, version in versions().items()
        if stored.get(package, "missing") != version
    )


def write_versions() -> None:
    """Stores the installed versions."""
    VERSIONS.write_text(json.dumps(versions(), indent=2) + "\n", encoding="utf-8", newline="\n")
