"""The floors of the code: imports only go down, and what is light to import stays light."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import autopar
from autopar import passes

ROOT = Path(__file__).parent.parent
FLOORS = ("ground", "arrays", "passes", "runtime", "top")
GROUND = {
    "_lazy",
    "_version",
    "cluster",
    "data",
    "errors",
    "hardware",
    "options",
    "plan_text",
    "plans",
    "ray_options",
    "records",
    "stage_summaries",
    "step_model",
    "summaries",
    "units",
}
"""The modules of `autopar/` that are plain data; the others stand on everything else."""

ARRAYS = {"buffers", "operators", "ray_array", "split_array"}
"""Kinds of arrays and their memory, which stand on JAX and on plain data."""

PUBLIC = {
    "parallelize",
    "Checkpoints",
    "compile",
    "plan",
    "Plan",
    "Cluster",
    "Executable",
    "AutoparError",
    "Ray",
    "errors",
}

REEXPORTED = {"autopar.__version__": "autopar.base.version"}
"""The one name that every floor may take from the package's face."""


class Import(NamedTuple):
    """One module that a file imports, and where."""

    source: str
    line: int
    module: str
    lazy: bool  # inside a function: importing the file does not import it

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.module}"


@functools.cache
def modules() -> dict[str, str]:
    """The file of every module of the package, by the module's name."""
    found = {}
    for folder in ("autopar", "passes", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            # autopar/passes and autopar/runtime are links; their files are read where they are.
            if not any(parent.is_symlink() for parent in path.parents):
                source = path.relative_to(ROOT)
                parts = [] if folder == "autopar" else ["autopar"]
                parts += source.with_suffix("").parts
                name = ".".join(parts).removesuffix(".__init__")
                found[name] = str(source)
    return found


def floor(module: str) -> str:
    """The floor that a module of autopar stands on."""
    first = f"{module}.".split(".")[1]
    if first in ARRAYS:
        return "arrays"
    return first if first in FLOORS else "ground" if first in GROUND else "top"


@functools.cache
def imports() -> tuple[Import, ...]:
    """Every import in the package, except those that only type checkers see."""
    return tuple(found for module in modules() for found in imports_of(module))


def imports_of(module: str) -> Iterator[Import]:
    source = modules()[module]
    package = module if source.endswith("__init__.py") else module.rpartition(".")[0]

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(source, node.lineno, alias.name, lazy)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found = REEXPORTED.get(inner, inner if inner in modules() else base)
                yield Import(source, node.lineno, found, lazy)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        children: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children = node.orelse
        for child in children:
            yield from visit(child, lazy)

    yield from visit(ast.parse((ROOT / source).read_text()), False)


def owner(found: Import) -> str:
    return next(name for name, source in modules().items() if source == found.source)


def in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_every_folder_is_seen() -> None:
    sources = modules()
    assert sources["autopar.base.errors"] == "autopar/errors.py"
    assert sources["autopar.passes.graph.graph"] == "passes/graph.py"
    assert sources["autopar.runtime"] == "runtime/__init__.py"
    seen = {(found.source, found.module) for found in imports()}
    assert ("autopar/errors.py", "autopar.base.units") in seen
    assert ("passes/graph.py", "autopar.passes.graph.jax_compat") in seen


def test_the_links_are_relative() -> None:
    for name in ("passes", "runtime"):
        link = ROOT / "autopar" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"


def test_imports_only_go_down() -> None:
    upward = [
        str(found)
        for found in imports()
        if in_package(found.module, "autopar")
        and found.module != "autopar"
        and FLOORS.index(floor(found.module)) > FLOORS.index(floor(owner(found)))
        # Convenience methods of plain data may reach up when they are called.
        and not (found.lazy and floor(owner(found)) == "ground")
    ]
    assert upward == []


def test_nothing_imports_the_face_of_the_package() -> None:
    face = [str(f) for f in imports() if f.module == "autopar" and floor(owner(f)) != "top"]
    assert face == []


def test_the_ground_needs_only_the_standard_library_and_numpy() -> None:
    allowed = sys.stdlib_module_names | {"numpy", "autopar"}
    foreign = [
        str(found)
        for found in imports()
        if floor(owner(found)) == "ground"
        and not found.lazy
        and found.module.split(".")[0] not in allowed
    ]
    assert foreign == []


def test_the_solver_knows_nothing_of_jax() -> None:
    foreign = [
        str(found)
        for found in imports()
        if in_package(owner(found), "autopar.passes.solver")
        and found.module.split(".")[0] in ("jax", "jaxlib", "flax")
    ]
    assert foreign == []


def test_private_jax_is_touched_in_one_file() -> None:
    private = {f.source for f in imports() if in_package(f.module, "jax._src")}
    assert private <= {"passes/jax_compat.py"}


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_folders_are_imported_through_the_package(name: str) -> None:
    assert [str(found) for found in imports() if in_package(found.module, name)] == []


def test_ray_is_imported_only_when_used() -> None:
    eager = [
        str(found)
        for found in imports()
        if in_package(found.module, "ray") and not found.lazy and "ray" not in found.source
    ]
    assert eager == []


def test_public_names() -> None:
    assert set(autopar.__all__) == {*PUBLIC, "__version__"}
    assert set(autopar.__all__) <= set(dir(autopar))


@pytest.mark.parametrize("package", [autopar, passes])
def test_every_public_name_exists(package: object) -> None:
    names: list[str] = package.__all__  # type: ignore[attr-defined]
    assert [name for name in names if not hasattr(package, name)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'autopar' has no attribute 'parallelise'"):
        _ = autopar.parallelise  # type: ignore[attr-defined]


def test_no_module_hides_a_public_name() -> None:
    assert set(modules()) & {f"autopar.{name}" for name in PUBLIC} == {"autopar.base.errors"}


@pytest.mark.parametrize(
    "module",
    [
        "autopar",
        "autopar.base.cluster",
        "autopar.base.errors",
        "autopar.plans.plan",
        "autopar.passes.solver",
    ],
)
def test_light_modules_do_not_load_jax(module: str) -> None:
    loaded = imported_by(module)
    assert module in loaded
    assert loaded & {"jax", "jaxlib", "flax", "ray"} == set()


def test_the_face_loads_nothing_that_is_not_used() -> None:
    heavy = {"numpy", "ortools", "rich", "autopar.api", "autopar.plans.plan", "autopar.passes"}
    assert imported_by("autopar") & heavy == set()


def imported_by(module: str) -> set[str]:
    """What a fresh interpreter has loaded after importing `module`."""
    code = f"import {module}, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
