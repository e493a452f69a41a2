"""The layout of the code as its imports make it: rooms, their floors, and a table of measures.

A room is a folder; the files beside `autopar/__init__.py` are the room of the face. An arrow goes
from what imports to what is imported. Every import counts: those inside functions and those that
only type checkers see too.

python tests/layout.py  # prints the measures
"""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import re
import statistics
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("autopar", "passes", "runtime")
FACE = "autopar"
LONG = 400
REASON = re.compile(r"\blong\s+because\b", re.IGNORECASE)
"""What a file of more than `LONG` lines has in its docstring, before the reason why."""

_N = TypeVar("_N", bound=Hashable)


class Import(NamedTuple):
    """One module that a file imports, and where."""

    owner: str
    source: str
    line: int
    module: str
    lazy: bool  # inside a function, or for type checkers alone: importing the file does not do it

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.module}"


@functools.cache
def modules() -> dict[str, Path]:
    """The file of every module of the package, by the module's name."""
    files = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            # autopar/passes and autopar/runtime are links; their files are read where they are.
            if not any(parent.is_symlink() for parent in path.parents):
                parts = [] if folder == FACE else [FACE]
                parts += path.relative_to(ROOT).with_suffix("").parts
                files[".".join(parts).removesuffix(".__init__")] = path
    return files


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def num_lines(module: str) -> int:
    return len(modules()[module].read_text(encoding="utf-8").splitlines())


def is_package(module: str) -> bool:
    return modules()[module].name == "__init__.py"


def room(module: str) -> str:
    """The folder of a module, as a package; the face is `autopar`."""
    return module if is_package(module) else module.rpartition(".")[0]


@functools.cache
def imports() -> tuple[Import, ...]:
    """Every import in the package."""
    return tuple(item for module in modules() for item in _imports_of(module))


def _imports_of(module: str) -> Iterator[Import]:
    source = str(modules()[module].relative_to(ROOT))
    package = room(module)

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, source, node.lineno, alias.name, lazy)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                target = inner if inner in modules() else base
                yield Import(module, source, node.lineno, target, lazy)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        only_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        unseen = node.body if isinstance(node, ast.If) and only_types else []
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy or child in unseen)

    yield from visit(tree(module), False)


def inner_imports() -> Iterator[Import]:
    """The imports of other modules of the package."""
    return (i for i in imports() if i.module in modules() and i.module != i.owner)


@functools.cache
def file_arrows() -> dict[str, set[str]]:
    """For each module, the modules of the package that it imports."""
    arrows: dict[str, set[str]] = {module: set() for module in modules()}
    for item in inner_imports():
        arrows[item.owner].add(item.module)
    return arrows


@functools.cache
def room_arrows() -> dict[str, dict[str, list[Import]]]:
    """For each room, the imports by the other rooms to which they go."""
    arrows: dict[str, dict[str, list[Import]]] = {room(module): {} for module in modules()}
    for item in inner_imports():
        here, there = room(item.owner), room(item.module)
        if here != there:
            arrows[here].setdefault(there, []).append(item)
    return arrows


def circles(arrows: Mapping[_N, collections.abc.Iterable[_N]]) -> list[list[_N]]:
    """The sets of two or more nodes that can all reach each other (Tarjan's algorithm)."""
    return [part for part in _components(arrows) if len(part) > 1]


def _components(arrows: Mapping[_N, collections.abc.Iterable[_N]]) -> list[list[_N]]:
    """Strongly connected components; what a component reaches comes before it."""
    number: dict[_N, int] = {}
    low: dict[_N, int] = {}
    path: list[_N] = []
    parts: list[list[_N]] = []

    def visit(node: _N) -> None:
        number[node] = low[node] = len(number)
        path.append(node)
        for other in arrows[node]:
            if other not in number:
                visit(other)
            if other in path:
                low[node] = min(low[node], low[other])
        if low[node] == number[node]:
            start = path.index(node)
            parts.append(path[start:])
            del path[start:]

    for node in arrows:
        if node not in number:
            visit(node)
    return parts


@functools.cache
def floors() -> dict[str, int]:
    """The floor of every room: 1, or one above the highest that it imports; circles share one."""
    arrows = room_arrows()
    floor: dict[str, int] = {}
    for part in _components(arrows):
        below = {other for here in part for other in arrows[here]} - set(part)
        floor.update(dict.fromkeys(part, 1 + max((floor[o] for o in below), default=0)))
    return floor


def arrows_up() -> list[Import]:
    """Imports that do not go to a lower floor: those between the rooms of a circle."""
    floor = floors()
    return [
        item
        for here, others in room_arrows().items()
        for there, items in others.items()
        for item in items
        if floor[there] >= floor[here]
    ]


def repeated_classes() -> dict[str, list[str]]:
    """Names of classes that stand in several places, and where."""
    names = (
        (node.name, module)
        for module in modules()
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ClassDef)
    )
    return _repeated(names)


def repeated_files() -> dict[str, list[str]]:
    """Names of files that stand in several folders, and of which modules.

    Files that only re-export what others define (`autopar.errors`) do not count.
    """
    defines = ast.ClassDef | ast.FunctionDef
    return _repeated(
        (path.name, module)
        for module, path in modules().items()
        if not is_package(module) and any(isinstance(n, defines) for n in ast.walk(tree(module)))
    )


def _repeated(named: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    homes = collections.defaultdict(list)
    for name, module in named:
        homes[name].append(module)
    return {name: where for name, where in homes.items() if len(where) > 1}


def long_files() -> dict[str, int]:
    """Lines of the files that are longer than `LONG`, and do not say why."""
    return {
        module: num_lines(module)
        for module in modules()
        if num_lines(module) > LONG and not REASON.search(ast.get_docstring(tree(module)) or "")
    }


def count_any() -> int:
    """How often `Any` is written."""
    nodes = itertools.chain.from_iterable(ast.walk(tree(module)) for module in modules())
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)


def measures() -> dict[str, str]:
    """What the layout is measured by, and how it stands."""
    lines = {module: num_lines(module) for module in modules()}
    by_folder = collections.Counter[str]()
    for module, number in lines.items():
        by_folder[modules()[module].relative_to(ROOT).parts[0]] += number
    largest = max(lines, key=lines.__getitem__)
    repeated = {"class names": repeated_classes(), "file names": repeated_files()}
    folders = ", ".join(f"{folder} {by_folder[folder]:,}" for folder in FOLDERS)
    return {
        "lines": f"{sum(lines.values()):,} ({folders})",
        "files": f"{len(lines)}: median {statistics.median(lines.values()):.0f} lines, "
        f"largest {lines[largest]} ({largest})",
        f"files of more than {LONG} lines without a reason": _listed(long_files()),
        "rooms": str(len(room_arrows())),
        "floors": str(max(floors().values())),
        "imports that go up": str(len(arrows_up())),
        "circles of rooms": _listed([" <-> ".join(part) for part in circles(room_arrows())]),
        "circles of files": _listed([" <-> ".join(part) for part in circles(file_arrows())]),
        **{f"repeated {what}": _listed(sorted(names)) for what, names in repeated.items()},
        "`Any`": str(count_any()),
    }


def _listed(names: collections.abc.Collection[str]) -> str:
    return f"{len(names)}: {', '.join(names)}" if names else "0"


if __name__ == "__main__":
    for name, value in measures().items():
        print(f"{name:>50}  {value}")
    for level, rooms in itertools.groupby(
        sorted(floors(), key=lambda r: (-floors()[r], r)), floors().__getitem__
    ):
        print(f"{f'floor {level}':>50}  {', '.join(rooms)}")
