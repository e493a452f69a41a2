"""What is installed: one package, whether from a wheel, a source distribution or a checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("setuptools", minversion="77.0.3")

ROOT = Path(__file__).parent.parent
INPUTS = (
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "autopar",
    "passes",
    "pyproject.toml",
    "runtime",
    "setup.cfg",
)

PROBE = """
import importlib.util
import autopar.passes.graph.graph, autopar.runtime
for module in (autopar, autopar.passes.graph.graph, autopar.runtime):
    print(module.__file__)
print(autopar.__version__)
print(autopar.Cluster.preset("dgx-h100").num_devices)
print([name for name in ("passes", "runtime") if importlib.util.find_spec(name)])
"""
"""Run outside of the checkout: where modules come from, the version, a data file, bare names."""

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str, folder: Path, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, project: Path, folder: Path) -> Path:
    """Builds a distribution as pip does, with the environment's setuptools."""
    folder.mkdir()
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    return folder / run(sys.executable, "-c", code, folder=project).split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("checkout")
    for name in INPUTS:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, project / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, project / name)
    return build("wheel", project, project / "dist")


@pytest.fixture(scope="module")
def source_distribution(wheel: Path) -> Path:
    return build("sdist", wheel.parent.parent, wheel.parent.parent / "sdist")


def contents(wheel: Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name}


def installed(tmp_path: Path, distribution: Path) -> Path:
    """A folder that holds nothing but the distribution, as pip installs it."""
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--no-compile")
    run(*pip, *options, "--target", str(target), str(distribution), folder=tmp_path)
    return target


def check(folder: Path, package: Path, **variables: str) -> None:
    """Imports autopar in `folder` and compares what it finds with the package at `package`."""
    probe = run(sys.executable, "-W", "error", "-c", PROBE, folder=folder, **variables)
    modules = ("__init__.py", "passes/graph/graph.py", "runtime/__init__.py")
    assert probe.splitlines() == [
        *(str(package / module) for module in modules),
        PROJECT["version"],
        "8",
        "[]",
    ]


def test_a_wheel_holds_one_package(wheel: Path) -> None:
    names = contents(wheel)
    assert {name.split("/")[0] for name in names} == {"autopar"}
    modules = {"autopar/passes/graph/graph.py", "autopar/runtime/__init__.py"}
    assert {"autopar/py.typed", *modules} <= names


def test_a_wheel_holds_every_file(wheel: Path) -> None:
    tracked = {
        str(path.relative_to(ROOT)).removeprefix("autopar/")
        for folder in ("autopar", "passes", "runtime")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not any(parent.is_symlink() for parent in path.parents)
    }
    assert {f"autopar/{name}" for name in tracked} == contents(wheel)


def test_a_source_distribution_makes_the_same_wheel(
    wheel: Path, source_distribution: Path, tmp_path: Path
) -> None:
    with tarfile.open(source_distribution) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path)
    (project,) = tmp_path.iterdir()
    assert contents(build("wheel", project, tmp_path / "dist")) == contents(wheel)
    assert (project / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_an_installed_wheel_is_imported(wheel: Path, tmp_path: Path) -> None:
    site = installed(tmp_path, wheel)
    check(tmp_path, site / "autopar", PYTHONPATH=str(site))


def test_an_installed_source_distribution_is_imported(
    source_distribution: Path, tmp_path: Path
) -> None:
    site = installed(tmp_path, source_distribution)
    check(tmp_path, site / "autopar", PYTHONPATH=str(site))


def test_a_checkout_is_imported(tmp_path: Path) -> None:
    """The editable install that the tests run in."""
    check(tmp_path, ROOT / "autopar", PYTHONPATH="")


def test_no_dependency_is_without_a_tested_bound() -> None:
    extras = PROJECT["optional-dependencies"].values()
    for requirement in (*PROJECT["dependencies"], *(name for extra in extras for name in extra)):
        assert "=" in requirement or requirement.startswith("autopar["), requirement
