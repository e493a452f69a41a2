"""For the site's reference: sessions in docstrings (`>>>`) become code, options are shown."""

import re
import textwrap
from typing import Any

import griffe

from autopar import shown_options
from autopar.base.options import Options

SESSION = re.compile(r"^>>> .*?(?=\n\s*\n(?!>>> )|\Z)", re.DOTALL | re.MULTILINE)

OPTIONS_PAGE = f"the page [Options][{Options.__module__}.{Options.__qualname__}]"
"""For `shown_options.PAGE`, with a link."""


def fenced(text: str) -> str:
    """The text with every session between fences."""
    plain = textwrap.dedent(text)
    return SESSION.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```", plain)


def with_options(parameters: griffe.Parameters) -> griffe.Parameters:
    """The parameters of what takes `**options` with every option in their place."""
    *known, rest = parameters
    kind = griffe.ParameterKind.keyword_only
    types = {name: field.type for name, field in Options.__dataclass_fields__.items()}
    options = [
        griffe.Parameter(name, annotation=str(types[name]), kind=kind, default=repr(value))
        for name, value in shown_options.defaults().items()
    ]
    takes_more = rest.name != "options"  # the step's own
    rest.name = "kwargs"
    return griffe.Parameters(*known, *options, *([rest] if takes_more else []))


class DocstringExamples(griffe.Extension):
    """Applies `fenced` to every docstring, and `with_options` to what is decorated to show them."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by Griffe for everything that it reads."""
        if obj.docstring and ">>> " in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Called by Griffe for every function."""
        names = [decorator.value for decorator in func.decorators]
        if "shows_options" in map(str, names):
            func.parameters = with_options(func.parameters)
            if func.docstring:
                value = func.docstring.value
                func.docstring.value = value.replace(shown_options.PAGE, OPTIONS_PAGE)
