"""`Record`: frozen dataclasses of plain data that check their fields and go through JSON unchanged.

Plans and clusters are trees of records. A record's fields are brought to exactly the annotated
types when it is built (a numpy integer becomes an int, a list a tuple), so equal data has equal
JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np


class Record:
    """Base of frozen dataclasses of numbers, text, None, tuples, mappings and records.

    Raises:
      TypeError: a field does not have its annotated type, and has no exact equal of that type.
    """

    def __post_init__(self) -> None:
        for name, hint in self._types().items():
            value = _convert(hint, getattr(self, name), f"{type(self).__name__}.{name}")
            object.__setattr__(self, name, value)

    @classmethod
    def _types(cls) -> dict[str, Any]:
        # mypy does not see that the class of a dataclass is hashable.
        return _field_types(typing.cast("Any", cls))

    def to_dict(self) -> dict[str, Any]:
        """This record as JSON values: dicts, lists, numbers, text."""
        return {name: _plain(getattr(self, name)) for name in self._types()}

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
            if name not in plain and _has_no_default(field):
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


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _convert(inner, value, where)
    if origin is tuple:
        return _convert_tuple(typing.get_args(hint), value, where)
    if origin is not None and issubclass(origin, Mapping):
        _require(isinstance(value, Mapping), hint, value, where)
        key_hint, item_hint = typing.get_args(hint)
        items = sorted(value.items())
        return {
            _convert(key_hint, key, where): _plain(_convert(item_hint, item, f"{where}[{key!r}]"))
            for key, item in items
        }
    if hint is float:
        _require(isinstance(value, (int, float, np.number)), hint, value, where)
        _require(not isinstance(value, bool) and not np.iscomplexobj(value), hint, value, where)
        return float(value)
    if hint is int:
        _require(
            isinstance(value, (int, np.integer)) and not isinstance(value, bool), hint, value, where
        )
        return operator.index(value)
    if hint is bool:
        _require(isinstance(value, (bool, np.bool_)), hint, value, where)
        return bool(value)
    if isinstance(value, Mapping) and issubclass(hint, Record):
        return hint.from_dict(value)
    _require(isinstance(value, hint), hint, value, where)
    return value


def _convert_tuple(hints: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    _require(is_sequence, tuple, value, where)
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(value)
    _require(len(hints) == len(value), tuple, value, where)
    return tuple(
        _convert(hint, item, f"{where}[{i}]")
        for i, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def _require(condition: bool, hint: Any, value: Any, where: str) -> None:
    if not condition:
        raise TypeError(f"{where} must be {getattr(hint, '__name__', hint)}, not {value!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def _lines(plain: Any, indent: str, width: int) -> str:
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError(f"{plain} cannot be written as JSON")
    text = json.dumps(plain, sort_keys=True, allow_nan=False)
    if len(indent) + len(text) <= width or not isinstance(plain, (dict, list)) or not plain:
        return text
    inside = indent + " "
    if isinstance(plain, dict):
        parts = [f"{json.dumps(key)}: {_lines(plain[key], inside, width)}" for key in sorted(plain)]
        return "{\n" + ",\n".join(inside + part for part in parts) + f"\n{indent}}}"
    parts = [_lines(item, inside, width) for item in plain]
    return "[\n" + ",\n".join(inside + part for part in parts) + f"\n{indent}]"


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
