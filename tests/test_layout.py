"""The layout of the code: imports only go down, names stand once, what is light stays light.

`layout` finds rooms, floors and circles from the real imports, and `python tests/layout.py` prints
how they are.
"""

import ast
import subprocess
import sys

import layout
import pytest
from layout import ROOT, Import

import autopar
from autopar import plans, report

MAX_FLOORS = 10
STOREYS = (
    ("autopar.base",),
    ("autopar.arrays",),
    ("autopar.passes", "autopar.report", "autopar.plans"),
    ("autopar.runtime",),
    ("autopar",),
)
"""Whole subpackages from the ground to the face; each may only import its own and lower ones."""

PUBLIC = {
    "verify_numerics",
    "parallelize",
    "Checkpoints",
    "compile",
    "plan",
    "Plan",
    "Cluster",
    "Executable",
    "AutoparError",
    "Ray",
    "Stage",
    "check_rule",
    "errors",
    "follow",
    "interruptible",
    "local",
    "scaling",
    "tracing_for",
    "verify",
}


def storey(module: str) -> int:
    return max(
        range(len(STOREYS)),
        key=lambda i: max((len(p) for p in STOREYS[i] if in_package(module, p)), default=0),
    )


def in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imports_from(package: str) -> list[Import]:
    return [item for item in layout.imports() if in_package(item.module, package)]


def test_every_folder_and_every_kind_of_import_is_seen() -> None:
    files = layout.modules()
    assert files["autopar.base.errors"] == ROOT / "autopar/base/errors.py"
    assert files["autopar.passes.graph.graph"] == ROOT / "passes/graph/graph.py"
    assert files["autopar.runtime"] == ROOT / "runtime/__init__.py"
    arrows = layout.file_arrows()
    assert "autopar.passes.graph.jax_compat" in arrows["autopar.passes.graph.graph"]
    assert "autopar.report.plan_tables" in arrows["autopar.plans.plan"], "inside a function"
    assert "autopar.report.gantt" in arrows["autopar.report"], "for type checkers"


def test_circles_are_found() -> None:
    arrows = {"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": [], "e": ["a", "e"]}
    assert [sorted(part) for part in layout.circles(arrows)] == [["b", "c"]]


def test_the_links_are_relative() -> None:
    for name in ("passes", "runtime"):
        link = ROOT / "autopar" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"


def test_rooms_stand_on_few_floors_without_a_circle() -> None:
    assert layout.circles(layout.room_arrows()) == []
    assert [str(item) for item in layout.arrows_up()] == []
    assert max(layout.floors().values()) <= MAX_FLOORS


def test_imports_only_go_down() -> None:
    upward = [i for i in layout.inner_imports() if storey(i.module) > storey(i.owner)]
    assert [str(item) for item in upward] == []


def test_no_files_import_each_other() -> None:
    within = {module for part in layout.circles(layout.file_arrows()) for module in part}
    assert within == set()


def test_a_class_has_a_name_of_its_own() -> None:
    repeated = layout.repeated_classes()
    assert repeated == {}


def test_a_file_has_a_name_of_its_own() -> None:
    repeated = layout.repeated_files()
    assert repeated == {}


def test_benchmarks_and_folders_of_tests_have_different_names() -> None:
    """Both are imported by their bare names: whichever comes first would hide the other."""
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    assert scripts and folders and not scripts & folders


def test_long_files_say_why() -> None:
    """`long because` in a module's docstring begins the reason why it is not shorter."""
    long = layout.long_files()
    assert long == {}


def test_nothing_imports_the_face_of_the_package() -> None:
    face = [i for i in layout.inner_imports() if layout.room(i.module) == layout.FACE]
    assert [str(item) for item in face if layout.room(item.owner) != layout.FACE] == []


def test_the_ground_needs_only_the_standard_library_and_numpy() -> None:
    allowed = sys.stdlib_module_names | {"numpy", "autopar"}
    foreign = [
        str(item)
        for item in layout.imports()
        if in_package(item.owner, "autopar.base")
        and not item.lazy
        and item.module.split(".")[0] not in allowed
    ]
    assert foreign == []


def test_the_solver_knows_nothing_of_jax() -> None:
    foreign = [
        str(item)
        for package in ("jax", "jaxlib", "flax")
        for item in imports_from(package)
        if in_package(item.owner, "autopar.passes.solver")
    ]
    assert foreign == []


def test_private_jax_is_touched_in_few_files() -> None:
    assert {i.source for i in imports_from("jax._src")} <= {
        "passes/graph/absent_cudnn.py",
        "passes/graph/jax_compat.py",
        "passes/graph/source_infos.py",
    }


def test_what_releases_of_jax_name_differently_is_named_in_one_file() -> None:
    """JAX 0.10 counts a scan's operands, later ones hold their structure."""
    by_release = {"num_consts", "num_carry", "ft_in", "ft_out"}
    naming = {
        module
        for module in layout.modules()
        for node in ast.walk(layout.tree(module))
        if isinstance(node, ast.Constant) and node.value in by_release
    }
    assert naming == {"autopar.passes.graph.jax_compat"}


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_folders_are_imported_through_the_package(name: str) -> None:
    assert [str(item) for item in imports_from(name)] == []


def test_ray_is_imported_only_when_used() -> None:
    eager = [i for i in imports_from("ray") if not i.lazy and "ray" not in i.source]
    assert [str(item) for item in eager] == []


def test_public_names() -> None:
    assert set(autopar.__all__) == {*PUBLIC, "__version__"}
    assert set(autopar.__all__) <= set(dir(autopar))


@pytest.mark.parametrize("package", [autopar, plans, report])
def test_every_public_name_exists(package: object) -> None:
    names: list[str] = package.__all__  # type: ignore[attr-defined]
    assert [name for name in names if not hasattr(package, name)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'autopar' has no attribute 'parallelise'"):
        _ = autopar.parallelise  # type: ignore[attr-defined]


def test_no_module_hides_a_public_name() -> None:
    names = {f"autopar.{name}" for name in PUBLIC}
    assert set(layout.modules()) & names == {"autopar.errors"}


SLOW = {"ortools", "pandas", "rich", "matplotlib", "ray", "flax", "optax"}
"""What takes long to import, and is not needed before it is used."""


@pytest.mark.parametrize(
    "module",
    [
        "autopar",
        "autopar.errors",
        "autopar.plans",
        "autopar.plans.plan",
        "autopar.report",
        "autopar.report.summaries",
        "autopar.passes.schedules",
    ],
)
def test_light_modules_load_neither_jax_nor_what_is_slow(module: str) -> None:
    loaded = imported_by(f"import {module}")
    assert module in loaded
    assert loaded & {"jax", "jaxlib", *SLOW} == set()


def test_the_solver_loads_no_jax() -> None:
    assert imported_by("import autopar.passes.solver") & {"jax", "jaxlib", "flax", "ray"} == set()


def test_the_face_loads_nothing_that_is_not_used() -> None:
    heavy = {"numpy", "autopar.api", "autopar.plans.plan", "autopar.passes"}
    assert imported_by("import autopar") & heavy == set()


def test_a_decorator_loads_neither_the_planner_nor_the_runtime() -> None:
    loaded = imported_by("from autopar import parallelize")
    rooms = ("planner", "sharding", "solver", "slicing", "pieces", "microbatch", "primitives")
    unused = {*SLOW, "autopar.runtime", *(f"autopar.passes.{room}" for room in rooms)}
    assert loaded & unused == set()


def imported_by(code: str) -> set[str]:
    """What a fresh interpreter has loaded after running `code`."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
