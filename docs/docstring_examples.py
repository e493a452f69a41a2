"""For the site's reference: sessions in docstrings (`>>>`) become blocks of code."""

import re
import textwrap
from typing import Any

import griffe

SESSION = re.compile(r"^>>> .*?(?=\n\s*\n(?!>>> )|\Z)", re.DOTALL | re.MULTILINE)


def fenced(text: str) -> str:
    """The text with every session between fences."""
    plain = textwrap.dedent(text)
    return SESSION.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```", plain)


class DocstringExamples(griffe.Extension):
    """Applies `fenced` to every docstring."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by Griffe for everything that it reads."""
        if obj.docstring and ">>> " in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
