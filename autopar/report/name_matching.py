"""What people call a leaf or a layer, looked up among the names of a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from autopar.report.path_folding import short_path

_RANGE = "\N{HORIZONTAL ELLIPSIS}"  # while dots between names are taken for slashes


def segments(name: str) -> tuple[str, ...]:
    """The names in a path of a pytree or in a name stack, without the transforms around them.

    >>> segments("state['Dense_0']['w']"), segments("transpose(jvp(GPT))/Block_0")
    (('state', 'Dense_0', 'w'), ('GPT', 'Block_0'))
    """
    plain = re.sub(r"\b\w+\((?=\w|\))|\)", "", short_path(name))
    return tuple(part for part in plain.split("/") if part)


def is_called(parts: Sequence[str], wanted: Sequence[re.Pattern[str]]) -> bool:
    """Whether some of the parts, side by side, are what is wanted."""
    return any(
        all(pattern.fullmatch(part) for pattern, part in zip(wanted, parts[i:], strict=False))
        for i in range(len(parts) - len(wanted) + 1)
    )


def patterns(name: str) -> tuple[re.Pattern[str], ...]:
    """What the parts of a name must look like; `*`, `{0..3}` and `{mu,nu}` as tables print them.

    >>> [bool(patterns("block_{0..2}")[0].fullmatch(f"block_{i}")) for i in (2, 3)]
    [True, False]
    """
    masked = segments(name.replace("..", _RANGE))
    return tuple(re.compile(_pattern(part.replace(_RANGE, ".."))) for part in masked)


def near_names(name: str, known: Iterable[str], count: int = 5) -> list[str]:
    """The known names closest to one, by all of it or by its last part."""
    names = list(dict.fromkeys(known))
    by_short = {"/".join(segments(known_name)).lower(): known_name for known_name in names}
    wanted = "/".join(segments(name.replace("..", "-"))).lower()
    close = get_close_matches(wanted, by_short, n=count, cutoff=0.6)
    by_end: dict[str, str] = {}
    for short, whole in by_short.items():
        for length in (1, 2, 3):
            by_end.setdefault("/".join(short.split("/")[-length:]), whole)
            by_end.setdefault("/".join(short.split("/")[:length]), whole)
    close_ends = [by_end[end] for end in get_close_matches(wanted, by_end, n=count, cutoff=0.6)]
    return list(dict.fromkeys([*(by_short[short] for short in close), *close_ends]))[:count]


def _pattern(part: str) -> str:
    def one_of(match: re.Match[str]) -> str:
        choices = []
        for choice in match[1].split(","):
            ends = re.fullmatch(r"(\d+)\.\.(\d+)", choice)
            numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
            choices += [str(number) for number in numbers] if ends else [re.escape(choice)]
        return f"(?:{'|'.join(choices)})"

    pieces = re.split(r"(\{[^{}]*\}|\*)", part)
    texts = []
    for piece in pieces:
        if piece == "*":
            texts.append(".*")
        elif piece.startswith("{"):
            texts.append(re.sub(r"\{([^{}]*)\}", one_of, piece))
        else:
            texts.append(re.escape(piece))
    return "".join(texts)
