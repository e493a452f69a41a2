"""Paths of a pytree's leaves as people write them, and repeated layers under one name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence


def fold_paths(paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Paths that fill every combination of some numbers or names, under one short name each.

    >>> list(fold_paths([f"p['a_{i}']['{name}']" for i in range(3) for name in ("w", "b")]))
    ['p/a_{0..2}/{w,b}']
    """
    entries: _Entries = {}
    for path in paths:
        entries.setdefault(tuple(re.split(r"(\d+)", short_path(path))), []).append(path)
    # Numbers are at odd places; after them, names that differ fold as well ({mu,nu}, {bias,scale}).
    segments: _Entries = {}
    for pieces, members in _unite(entries, 2, _number_set).items():
        segments.setdefault(tuple("".join(pieces).split("/")), []).extend(members)
    folded: dict[str, list[str]] = {}
    for pieces, members in _unite(segments, 1, _name_set).items():
        folded.setdefault("/".join(pieces), []).extend(members)
    return {name: tuple(members) for name, members in folded.items()}


def short_path(path: str) -> str:
    """A path of a pytree leaf as people write it: `state.params['a'][0]` is `state/params/a/0`."""
    return re.sub(r"['\"]?\]?(?:\.|\[['\"]?)|['\"]?\]$", "/", path).strip("/")


def relative_path(path: str, category: str) -> str:
    """What follows a category in a short path, without leading numbers; a place alone as one.

    >>> relative_path("state/opt_state/0/mu/w", "opt_state"), relative_path("state/1", "state")
    ('mu/w', '[1]')
    >>> relative_path("state/1/0/mu/w", "state/1")
    'mu/w'
    """
    names, inner = path.split("/"), category.split("/")
    for end in range(len(inner), len(names)):
        if names[end - len(inner) : end] == inner:
            names = names[end:]
            break
    while len(names) > 1 and names[0].isdigit():
        del names[0]
    return f"[{names[0]}]" if len(names) == 1 and names[0].isdigit() else "/".join(names)


def shortened(path: str, width: int) -> str:
    """A path of so many letters at most: its middle is left out first, then ends of names.

    >>> shortened("params/decoder/layers/mlp/kernel", 20)
    'params/../mlp/kernel'
    >>> shortened("{LayerNorm_0,attention_out}/", 12)
    '{LayerNorm..'
    """
    names = path.split("/")
    first, last = names[0], names[1:]
    while len(path) > width and len(last) > 1:
        del last[0]
        path = "/".join([first, "..", *last])
    return path if len(path) <= width else f"{path[: width - 2]}.."


_Entries = dict[tuple[str, ...], list[str]]


def _unite(entries: _Entries, step: int, join: Callable[[Sequence[str]], str]) -> _Entries:
    """Unites entries that differ in one place only, at every `step`th place from the second on.

    It goes place by place, so results are full products.
    """
    for place in range(1, max(map(len, entries), default=0), step):
        united: dict[tuple[object, ...], dict[str, list[str]]] = {}
        for pieces, members in entries.items():
            key: tuple[object, ...] = pieces
            here = ""
            if place < len(pieces):
                key, here = (*pieces[:place], None, *pieces[place + 1 :]), pieces[place]
            united.setdefault(key, {})[here] = members
        entries = {}
        for key, parts in united.items():
            pieces = tuple(join(list(parts)) if piece is None else str(piece) for piece in key)
            for members in parts.values():
                entries.setdefault(pieces, []).extend(members)
    return entries


def _number_set(texts: Sequence[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    values = sorted(map(int, texts))
    if len(values) > 2 and len(values) == values[-1] - values[0] + 1:
        return f"{{{values[0]}..{values[-1]}}}"
    return _name_set([str(value) for value in values])


def _name_set(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
