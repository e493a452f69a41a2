"""`Record`: frozen dataclasses of plain data that check their fields and go through JSON unchanged.

Plans and clusters are trees of records. A record's fields are brought to exactly the annotated
types when it is built (a numpy integer becomes an int, a list a tuple), so equal data has equal
JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from autopar.base.displayed import Displayed


class Record:
    """Base of frozen dataclasses of numbers, text, None, tuples, mappings and records.

    Raises:
      TypeError: a field does not have its annotated type, and has no exact equal of that type.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)  # mypy does not see that the class of a dataclass is hashable
        for name, convert in _converters(kind).items():
            value = convert(getattr(self, name), f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """This record as JSON values: dicts, lists, numbers, text."""
        kind: Any = type(self)
        return {name: _plain(getattr(self, name)) for name in _converters(kind)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
          TypeError: a field is missing, unknown or of another type.
        """
        if not isinstance(plain, Mapping):
            raise TypeError(f"{cls.__name__} must be a mapping of its fields, not {plain!r}")
        fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls))}
        for name in plain:
            if name not in fields:
                raise TypeError(f"{cls.__name__} has no field {name!r}")
        for name, field in fields.items():
            missing = field.default is field.default_factory is dataclasses.MISSING
            if missing and name not in plain:
                raise TypeError(f"{cls.__name__} lacks the field {name!r}")
        return cls(**plain)


def dump_json(plain: Any, *, width: int = 240) -> str:
    """Canonical JSON that people and `diff` can read: keys sorted, short values on one line.

    Raises:
      ValueError: a number is infinite or not a number.
    """
    return _lines(plain, "", width) + "\n"


def dump_toml(plain: Mapping[str, Any]) -> str:
    """TOML of nested mappings of numbers and text; the inverse of `tomllib.loads`."""
    return "\n".join(_toml_lines(plain, "")) + "\n"


class Differences(Displayed, tuple[str, ...]):
    """What differs between two plans, a line for each cause; shown one below the other.

    `details` has a line for each field that differs, as `field: this value -> the other`.
    """

    details: tuple[str, ...] = ()
    page = ("small_pages", "differences_page")

    def __repr__(self) -> str:
        return "\n".join(self) or "no differences"


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """What differs between JSON values, one line each; lists of records are matched by names."""
    if isinstance(left, dict) and isinstance(right, dict):
        lines = []
        for key in sorted(left.keys() | right.keys()):
            inside = f"{where}.{key}" if where else key
            lines += differences(left.get(key, _ABSENT), right.get(key, _ABSENT), inside)
        return lines
    if isinstance(left, list) and isinstance(right, list):
        a, b = _by_name(left), _by_name(right)
        if a is not None and b is not None:
            lines = []
            for key in dict.fromkeys((*a, *b)):
                lines += differences(a.get(key, _ABSENT), b.get(key, _ABSENT), f"{where}[{key}]")
            if [key for key in a if key in b] != [key for key in b if key in a]:
                lines.append(f"{where}: in another order")
            return lines
    return [] if left == right else [_difference(left, right, where)]


_Converter = Callable[[Any, str], Any]
"""From a value and the name of its field to the same value in the field's type."""


@functools.cache
def _converters(cls: type) -> dict[str, _Converter]:
    hints = typing.get_type_hints(cls)
    return {field.name: _converter(hints[field.name]) for field in dataclasses.fields(cls)}


def _converter(hint: Any) -> _Converter:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value, where: value
    if origin in (typing.Union, types.UnionType):
        (inner,) = [_converter(arg) for arg in args if arg is not type(None)]
        return lambda value, where: None if value is None else inner(value, where)
    if origin is tuple:
        return _tuple_converter(args)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_converter(args[1])
    if issubclass(hint, Record):
        return _record_converter(hint)
    kinds = _ACCEPTED[hint]

    def convert(value: Any, where: str) -> Any:
        if type(value) is hint:
            return value
        if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
            raise _wrong(hint.__name__, value, where)
        return hint(value)

    return convert


_ACCEPTED: dict[type, tuple[type, ...]] = {
    bool: (bool, np.bool_),
    int: (int, np.integer),
    float: (int, float, np.integer, np.floating),
    str: (str,),
}


def _tuple_converter(hints: tuple[Any, ...]) -> _Converter:
    repeated = len(hints) == 2 and hints[1] is Ellipsis
    converters = [_converter(hint) for hint in hints[: 1 if repeated else None]]

    def convert(value: Any, where: str) -> Any:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise _wrong("a sequence", value, where)
        if not repeated and len(value) != len(converters):
            raise _wrong(f"{len(converters)} values", value, where)
        each = converters * len(value) if repeated else converters
        return tuple(to(item, where) for to, item in zip(each, value, strict=True))

    return convert


def _mapping_converter(item_hint: Any) -> _Converter:
    to_item = _converter(item_hint)

    def convert(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong("a mapping", value, where)
        return {str(key): _plain(to_item(value[key], f"{where}[{key!r}]")) for key in sorted(value)}

    return convert


def _record_converter(kind: type[Record]) -> _Converter:
    def convert(value: Any, where: str) -> Any:
        if isinstance(value, Mapping):
            return kind.from_dict(value)
        if not isinstance(value, kind):
            raise _wrong(f"a {kind.__name__}", value, where)
        return value

    return convert


def _wrong(wanted: str, value: Any, where: str) -> TypeError:
    return TypeError(f"{where} must be {wanted}, not {value!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float)) or value is None:
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value)}
    return value.item() if isinstance(value, np.generic) else value


def _lines(plain: Any, indent: str, width: int) -> str:
    """JSON on one line if that fits, else with an item on each line."""
    is_container = isinstance(plain, (dict, list)) and plain
    # Items take three characters or more, so long lists need no trial.
    if not is_container or 3 * len(plain) <= width:
        text = json.dumps(plain, sort_keys=True, allow_nan=False)
        if not is_container or len(indent) + len(text) <= width:
            return text
    inside = indent + " "
    if isinstance(plain, dict):
        parts = [f"{json.dumps(key)}: {_lines(plain[key], inside, width)}" for key in sorted(plain)]
    else:
        parts = [_lines(item, inside, width) for item in plain]
    left, right = "{}" if isinstance(plain, dict) else "[]"
    return f"{left}\n{inside}" + f",\n{inside}".join(parts) + f"\n{indent}{right}"


def _toml_lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Lines of TOML: a table's own values first, then its tables."""
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    for key, value in table.items():
        if key not in tables:
            # JSON's text and numbers are TOML's too.
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for key, value in tables.items():
        yield ""
        yield f"[{prefix}{key}]"
        yield from _toml_lines(value, f"{prefix}{key}.")


_ABSENT = object()


def _by_name(items: list[Any]) -> dict[str, Any] | None:
    """Records by what identifies them, or None where they have no names or share one."""
    named: dict[str, Any] = {}
    for item in items:
        if not isinstance(item, dict):
            return None
        parts = [item[key] for key in ("kind", "purpose", "path", "node") if item.get(key)]
        if "chosen" in item:  # a candidate
            parts = [item["method"], item["logical_mesh"], item["num_microbatches"], item["note"]]
        elif "again_seconds" in item:  # a line of the user's code
            parts = [item["source"] or "others", item["function"]]
        elif isinstance(item.get("layers"), (list, tuple)):  # a stage of a plan
            parts = ["layers", *item["layers"]]
        name = " ".join(map(str, parts))
        if not parts or name in named:
            return None
        named[name] = item
    return named


def _difference(left: Any, right: Any, where: str) -> str:
    def show(value: Any) -> str:
        text = "(absent)" if value is _ABSENT else json.dumps(value)
        return text if len(text) <= 80 else text[:77] + "..."

    return f"{where}: {show(left)} -> {show(right)}"
