"""The documentation is true: its code runs and prints what it says, and nothing is left out."""

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax_releases
import pages
import pytest

import autopar
from autopar import report

pytest.importorskip("typer")

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
RUN = ("python", "console")
SHOWN = ("text", "sh", "yaml", "toml", "ini", "json")
"""Languages of what is read, not run: what is printed, shells, files."""

TRIED = r"make |pip install |python (examples|docs|benchmarks)/|#|$"
"""Lines of a shell that other tests look after."""

WITH_RAY = ("how-to/ray.md",)
"""Pages whose actors run in the tests' own Ray."""


def runs(page: str) -> bool:
    return any(each.language in RUN and not each.is_untried for each in pages.blocks(DOCS / page))


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, as the page's reader begins in, and no module of another reader's."""
    before, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(pages.WIDTH))
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray itself
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)])
def test_a_page_does_what_it_says(page: str, reader: None, request: pytest.FixtureRequest) -> None:
    assert len(jax.devices()) == 8
    if page in WITH_RAY:
        request.getfixturevalue("ray_cluster")
    other = []
    for each in pages.run(DOCS / page, {"__name__": "__main__"}):
        if not each.holds and not jax_releases.IS_OURS:
            other.append(each.block.line)
            continue
        assert each.holds, (
            f"docs/{page}:{each.block.line} says\n{each.said}\nand it is\n{each.printed}\n"
            f"`python -m pages docs/{page}` (with PYTHONPATH=tests) writes what is printed"
        )
    if other:
        pytest.skip(f"all of it runs; lines {other} print what jax {jax_releases.OURS} does")


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_run_says_so(page: str) -> None:
    for each in pages.blocks(DOCS / page):
        where = f"docs/{page}:{each.line}"
        assert each.language in (*RUN, *SHOWN), where
        if each.language not in ("sh", "yaml", "ini") or each.is_untried:
            continue
        assert each.language == "sh", f"{where}: nobody reads this file, so it is untried"
        for line in each.text.splitlines():
            assert re.match(
                r"make |pip install |python (examples|docs|benchmarks)/|\. |#|$", line
            ), f"{where}: nothing tries this, so the block's title begins with 'untried': {line}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (DOCS / page).read_text()
    for link in re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", text):
        assert ((DOCS / page).parent / link).exists(), f"docs/{page}: {link}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets, page
    for script in re.findall(r"python ((?:examples|benchmarks|docs)/\S+?\.py)", text):
        assert (ROOT / script).exists(), f"docs/{page}: {script}"


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = re.findall(r":\s+(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == PAGES


def test_every_error_has_its_cause_and_cure() -> None:
    text = (DOCS / "errors.md").read_text()
    headings = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(autopar.errors.__all__), "docs/errors.md has one for each"
    sections = re.split(r"^## \w+$", text, flags=re.MULTILINE)[1:]
    for name, section in zip(headings, sections, strict=True):
        assert "**Cause.**" in section, name
        assert "**Cure.**" in section, name


def test_the_reference_has_all_that_is_public() -> None:
    text = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    named = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    public = {f"autopar.{name}" for name in autopar.__all__}
    public |= {f"autopar.errors.{name}" for name in autopar.errors.__all__}
    public |= {f"autopar.report.{name}" for name in report.__all__}
    said = {name.rpartition(".")[2] for name in named}
    beside = {"autopar.errors", "autopar.__version__"}
    missing = {name for name in public - beside if name.rpartition(".")[2] not in said}
    assert missing == set(), "docs/reference/ has a line `::: NAME` for each"


def test_the_page_of_measurements_is_made_of_them() -> None:
    spec = importlib.util.spec_from_file_location("measurements", DOCS / "measurements.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    figures = made.figures()
    assert (DOCS / "measurements.md").read_text() == made.page(figures)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for each in figures:
        tool, what = each["command"].split()[:2]
        there = what in targets if tool == "make" else (ROOT / what).exists()
        assert there, each["command"]


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_from_top_to_bottom(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 500_000
    assert not re.search(r"/(?:tmp|home|root|work|Users)/", text)
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    shown = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in shown} <= {
        "display_data", "execute_result", "stream"
    }  # fmt: skip
    assert "stderr" not in {output.get("name") for output in shown}


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, reader: None, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), path.name, "exec"), names)


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()
    page = (tmp_path / "reference" / "steps.html").read_text(encoding="utf-8")
    shown = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert shown.count('reduce_dtype: str = "as computed"') == 6, "signatures show the options"
    assert "options: Any" not in shown and "options_and_kwargs: Any" not in shown
    assert 'href="options.html#autopar.base.options.Options"' in page
