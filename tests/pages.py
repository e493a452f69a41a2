"""The blocks of code in a page of the documentation, run as its reader would run them.

A page's blocks of Python share one namespace. What a block prints stands after it, in a block of
text; the lines of a console begin with `$`, and what they print follows. Of a block with the title
"raises TraceError" (or "warns ...") it is that error's text. In what it "prints about", the figures
may be others; "as JAX 0.10.2 prints it", other versions may print otherwise. A block whose
title begins with "untried" is not run, and its reader sees that; one "with" a package runs where
the package can be imported.

    JAX_PLATFORMS=cpu PYTHONPATH=tests python -m pages docs/tutorial.md

writes what is printed into a page, where it has changed. Text with an ellipsis (`...`) is left as
it is: the ellipsis stands for anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import importlib
import io
import os
import re
import shlex
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>\S[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
FIGURE = re.compile(r"\d[\d.,]*( ([KMGT]iB|B|us|ms|s|k|M)\b)?")
BAR = re.compile(r"[━═─]+")
WIDTH = 88
FOLDER = "/home/me/model"
"""What stands in pages for the current folder."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code or text; `follows` says whether only blank lines part it from the last."""

    language: str
    title: str
    text: str
    line: int
    span: tuple[int, int]
    indent: str
    follows: bool

    @property
    def is_untried(self) -> bool:
        return self.title.startswith("untried")

    @property
    def can_run(self) -> bool:
        verb, _, package = self.title.partition(" ")
        if verb != "with":
            return not self.is_untried
        try:
            importlib.import_module(package)
        except Exception:  # a library may fail in any way beside a newer JAX
            return False
        return True


@dataclasses.dataclass(frozen=True)
class Printed:
    """What was printed where a page has `said`, the text at these positions."""

    block: Block
    said: str
    printed: str

    @property
    def holds(self) -> bool:
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        texts = self.said, self.printed
        version = re.match(r"as JAX (\S+) prints", self.block.title)
        if version is not None and version[1] != metadata.version("jax"):
            return True
        if self.block.title.startswith("prints about"):
            said, printed = (BAR.sub("-", FIGURE.sub("#", text)) for text in texts)
            texts = said, printed
        return doctest.OutputChecker().check_output(*texts, flags)


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text, end = page.read_text(), 0
    found: list[Block] = []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].partition(" ")
        title = re.search(r'title="([^"]*)"', rest)
        span = match.span("text")
        found.append(
            Block(
                language,
                title[1] if title else "",
                textwrap.dedent(match["text"]),
                text.count("\n", 0, match.start()) + 1,
                span,
                match["indent"],
                bool(found) and not text[end : match.start()].strip(),
            )
        )
        end = match.end()
    return found


def run(page: Path, names: dict[str, Any]) -> Iterator[Printed]:
    """Run a page's blocks in the current folder; gives what it says is printed, and what is.

    Args:
      page: a document.
      names: what its blocks find and leave.
    """
    waiting: str | None = None
    for block in blocks(page):
        if block.language == "text" and block.follows and waiting is not None:
            yield Printed(block, block.text, waiting)
        waiting = None
        if not block.can_run:
            continue
        if block.language == "python":
            waiting = _anywhere(_run_python(block, names))
        elif block.language == "console":
            yield Printed(block, block.text, _anywhere(_run_console(block)))


def _anywhere(text: str) -> str:
    """What was printed, with a folder that every reader has another of."""
    return text.replace(os.getcwd(), FOLDER)


def _run_python(block: Block, names: dict[str, Any]) -> str:
    name = block.title if block.title.endswith(".py") else "train.py"
    if block.title.endswith(".py"):
        Path(name).write_text(block.text)
    verb, _, kind = block.title.partition(" ")
    told: list[Any] = []
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.ExitStack() as watched:
        if verb == "warns":
            told = watched.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
        try:
            exec(compile(block.text, name, "exec"), names)
        except Exception as error:
            if verb != "raises" or type(error).__name__ != kind:
                raise
            return f"{type(error).__module__}.{kind}: {error}\n"
    assert verb != "raises", f"line {block.line} raises no {kind}"
    if verb == "warns":
        texts = [str(each.message) for each in told if each.category.__name__ == kind]
        assert texts, f"line {block.line} warns of no {kind}: {told}"
        return f"{kind}: {texts[0]}\n"
    return printed.getvalue()


def _run_console(block: Block) -> str:
    """The console after its commands were typed again, with what they print now."""
    from typer.testing import CliRunner

    from autopar.commands import app

    lines: list[str] = []
    for line in block.text.splitlines():
        if not line.startswith("$ "):
            continue
        lines.append(line)
        program, *arguments = shlex.split(line[2:], comments=True)
        assert program == "autopar", f"a console runs autopar: {line}"
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": str(WIDTH)})
        assert done.exit_code in (0, 1), done.output
        lines += [each.rstrip() for each in done.output.splitlines()]
    return "\n".join(lines) + "\n"


def write(page: Path) -> None:
    """Write into a page what is printed, where that is not what it says."""
    text = page.read_text()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = list(run(page, {"__name__": "__main__"}))
    for each in reversed(found):
        if each.holds and "..." in each.said:
            continue
        if "..." in each.said:
            print(f"{page}:{each.block.line}\n{each.said}--- is\n{each.printed}")
            continue
        start, end = each.block.span
        lines = (line.rstrip() for line in each.printed.strip("\n").splitlines())
        printed = textwrap.indent("\n".join(lines), each.block.indent) + "\n"
        text = text[:start] + printed + text[end:]
    page.write_text(text)


if __name__ == "__main__":
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    os.environ["COLUMNS"] = str(WIDTH)
    for name in sys.argv[1:]:
        write(Path(name).absolute())
