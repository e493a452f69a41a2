"""What notebooks show: every page says what the value says, and a browser shows it whole."""

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.base.displayed import Displayed
from autopar.base.records import Differences
from autopar.base.units import format_bytes, format_seconds
from autopar.base.user_code import named
from autopar.notebook.small_pages import differences_page
from autopar.notebook.timeline_svg import timeline_rows

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (400, 1000)


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def train_step(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        h = x
        for layer in params["layers"]:
            h = h + jnp.tanh(h @ layer["<kernel>"])
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


PARAMS = {"layers": [{"<kernel>": shape(64, 64)} for _ in range(4)]}


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return autopar.plan(
        train_step, PARAMS, shape(64, 64), cluster="2x4 h100", stages=2, microbatches=4
    )


@pytest.fixture(scope="module")
def step() -> autopar.Executable:
    return autopar.compile(train_step, PARAMS, shape(64, 64), stages=2, microbatches=2)


@pytest.fixture(scope="module")
def values(plan: autopar.Plan, step: autopar.Executable) -> dict[str, Displayed]:
    one = autopar.plan(train_step, PARAMS, shape(64, 64), cluster="h100", method="zero3")
    arrays = jax.tree.map(lambda x: jnp.ones(x.shape), PARAMS)
    parallelized = autopar.parallelize(train_step, method="data", microbatches=1)
    parallelized(jax.tree.map(jnp.copy, arrays), jnp.ones((64, 64)))
    return {
        "plan": plan,
        "one mesh": one,
        "step": step,
        "parallelized": parallelized,
        "not planned yet": autopar.parallelize(train_step),
        "simulation": plan.simulate(),
        "timeline": plan.simulate(microbatches=32, schedule="1f1b").timeline,
        "profile": step.profile(arrays, jnp.ones((64, 64))),
        "differences": plan.diff(one),
        "cluster": autopar.Cluster.named("8x8 h100"),
    }


class Words(HTMLParser):
    """The text of a page, once its elements have been seen to be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("wbr", "input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def words(value: Displayed) -> str:
    return " ".join(Words(value._repr_html_()).words)


def test_every_page_is_html_without_files(values: dict[str, Displayed]) -> None:
    for name, value in values.items():
        page = value._repr_html_()
        assert words(value), name
        assert not re.search(r"<script|<link|<img|url\(|https?:", page), name
        assert "<kernel>" not in page
        assert len(page) < 300_000


def test_a_plan_answers_at_a_glance(plan: autopar.Plan) -> None:
    said = words(plan)
    for expected in (
        format_seconds(plan.estimates.step_seconds),
        format_bytes(plan.estimates.peak_bytes_per_device),
        "gap to the best",
        f"{len(plan.certificate)} outputs",
        "mesh 1",
        "reduce" if "reduce" in str(plan) else "Communication",
    ):
        assert expected in said
    page = plan._repr_html_()
    assert "layers/<wbr>{0,1}<" in page and "layers/<wbr>{2,3}<" in page, "what each mesh holds"
    found_by = html.unescape(" ".join(re.findall(r'data-s="([^"]*)"', page)))
    assert "layers/3/<kernel>" in found_by, "a folded leaf is found by its own path"


def test_a_step_shows_its_plan_once_it_has_one(values: dict[str, Displayed]) -> None:
    assert "parallelized, 0 plans" in words(values["not planned yet"])
    said = words(values["parallelized"])
    assert "train_step, compiled. Plan: data on" in said and "gap to the best" in said


def test_a_diff_tells_both_sides(plan: autopar.Plan, values: dict[str, Displayed]) -> None:
    page = values["differences"]._repr_html_()
    assert re.search(r"<del>.*</del> → <ins>.*</ins>", page)
    assert "No differences" in plan.diff(plan)._repr_html_()


def test_long_timelines_are_folded(plan: autopar.Plan) -> None:
    short, long = (
        timeline_rows(plan.simulate(microbatches=count, schedule="1f1b").timeline)
        for count in (8, 64)
    )
    assert "left out" in long and "left out" not in short
    assert len(long) < 6 * len(short)


def test_what_is_not_shown_is_not_loaded() -> None:
    code = "import autopar.plans.plan, sys; print([m for m in sys.modules if 'notebook' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


PROBE = """
window.onerror = message => { document.title = 'error: ' + message };
window.onload = () => {
  const found = {};
  for (const frame of document.querySelectorAll('iframe')) {
    const page = frame.contentDocument, view = page.querySelector('.apv');
    for (const each of page.querySelectorAll('details')) each.open = true;
    const wide = page.documentElement.scrollWidth - page.documentElement.clientWidth;
    const search = page.querySelector('input[type=search]'), left = [];
    if (search) {
      search.value = 'layers/3';
      search.dispatchEvent(new frame.contentWindow.Event('input'));
      const rows = [...search.closest('details').querySelectorAll('tr[data-s]')];
      left.push(rows.filter(row => !row.hidden).length, rows.length);
    }
    const colors = [frame.contentWindow.getComputedStyle(view).backgroundColor];
    page.body.dataset.jpThemeLight = 'false';
    colors.push(frame.contentWindow.getComputedStyle(view).backgroundColor);
    found[frame.name] = {wide, left, colors, height: view.offsetHeight};
  }
  document.body.innerHTML = '<pre id="found">' + JSON.stringify(found) + '</pre>';
};
"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_shows_pages_whole(values: dict[str, Displayed], tmp_path: Path) -> None:
    frames = [
        f'<iframe name="{name} {width}" style="width:{width}px;height:800px" '
        f'srcdoc="{html.escape("<!doctype html><body>" + value._repr_html_())}"></iframe>'
        for name, value in values.items()
        for width in WIDTHS
    ]
    file = tmp_path / "pages.html"
    page = f"<!doctype html><meta charset=utf-8><script>{PROBE}</script>{''.join(frames)}"
    file.write_text(page, encoding="utf-8")
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    folder = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [CHROMIUM, *options, folder, "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)[-1])
    assert set(found) == {f"{name} {width}" for name in values for width in WIDTHS}
    for name, seen in found.items():
        assert seen["wide"] <= 0, f"{name} is cut off or scrolled"
        assert seen["height"] > 60
        assert seen["colors"] == ["rgb(255, 255, 255)", "rgb(22, 25, 29)"], name
        if seen["left"]:
            assert 0 < seen["left"][0] < seen["left"][1]


def test_names_and_lines_of_differences_keep_together() -> None:
    found = Differences(["step: 1 ms -> 2 ms", "and 3 kinds of leaves"])
    found.details = ("stages[layers 0 0].strategies[1: state[1]].choice: a -> b",)
    shown = differences_page(found)
    assert "<b>stages[layers 0 0].strategies[1: state[1]].choice</b>" in shown
    assert "<del>a</del> → <ins>b</ins>" in shown
    assert "<i>and 3 kinds of leaves</i>" in shown
    assert "<b></b>" not in shown


CELL = """
def train_step(params, x):
    def loss(params):
        return jnp.mean(jnp.tanh(x @ params) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return params - 0.1 * grads, value
"""


def test_lines_are_those_of_cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As IPython names them, and not by the files of one process in which their code is kept."""
    files = ["/tmp/ipykernel_1/2.py", "/tmp/ipykernel_4/5.py"]

    def format_code_name(name: str) -> tuple[str, str] | None:
        return ("Cell", "In[3]") if name in files else None

    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=format_code_name))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    saved = []
    for number, file in enumerate(files):
        cell: dict[str, Any] = {"jax": jax, "jnp": jnp}
        exec(compile(CELL, file, "exec"), cell)
        plan = autopar.plan(cell["train_step"], shape(64, 64), shape(64, 64), cluster="2xh100")
        lines = {x.source for x in plan.hot_lines.lines}
        assert "In[3]:4" in lines and lines <= {"In[3]:4", "In[3]:6", "In[3]:7"}
        plan.save(path := tmp_path / f"{number}.json")
        saved.append(path.read_bytes())
    assert saved[0] == saved[1]
    # IPython 7 (Colab's) does not say, nor does one that is being imported.
    for other in (SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=1)), object()):
        monkeypatch.setitem(sys.modules, "IPython", other)
        assert named(files[0]) == files[0]
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))

    def meets_an_if(params: Any, x: Any) -> Any:
        return cell["train_step"](params, x if x[0, 0] > 0 else -x)

    meets_an_if.__code__ = meets_an_if.__code__.replace(co_filename=files[0])
    with pytest.raises(autopar.errors.TraceError, match=r"In\[3\]:\d+ \(meets_an_if\)"):
        autopar.plan(meets_an_if, shape(64, 64), shape(64, 64), cluster="2xh100")
