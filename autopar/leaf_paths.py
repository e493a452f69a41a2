"""Paths of leaves in parts, and which leaf of a step another tree's leaf is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

_PART = re.compile(r"\[[^\]]*\]|\.\w+")
_T = TypeVar("_T")


def path_parts(text: str) -> tuple[str, ...]:
    """The parts of a path, keys and attributes written alike; an argument's name is the first.

    >>> path_parts("state.params['block_0'][3]")
    ('state', 'params', 'block_0', '3')
    """
    name = _PART.split(text, maxsplit=1)[0]
    parts = (part.strip("[].").strip("'\"") for part in _PART.findall(text))
    return (name, *parts)


def common_parts(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many parts of two paths are equal, counted from their ends."""
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        count += 1
    return count


def nearest_path(path: tuple[str, ...], known: Iterable[tuple[tuple[str, ...], _T]]) -> _T | None:
    """What has the path with the most parts in common, the first of several; None: none has any."""
    ranked = [(common_parts(other, path), value) for other, value in known]
    best = max((score for score, _ in ranked), default=0)
    return next(value for score, value in ranked if score == best) if best else None
