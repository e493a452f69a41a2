"""Values of options, checked and brought to one form; an `OptionError` names the option."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.base.errors import OptionError, did_you_mean
from autopar.base.units import parse_bytes


def impossible(name: str, value: Any, why: str, hint: str | None = None) -> OptionError:
    """The error of an option that has a value which it cannot have."""
    return OptionError(f"{name}={value!r} is not possible.", why=why, hint=hint)


def auto_or(value: Any, parse: Any, name: str) -> Any:
    """The text "auto", or what `parse` makes of a value and its name."""
    if isinstance(value, str):
        if value == "auto":
            return value
        what = "an integer of at least 1" if parse is count else "an integer or several"
        why = f'it must be "auto" or {what}.'
        raise impossible(name, value, why, number_hint(name, value))
    return parse(value, name)


def one_of(value: Any, choices: Sequence[str], name: str) -> str:
    """One of several texts."""
    if isinstance(value, str) and value in choices:
        return value
    *others, last = (f'"{choice}"' for choice in choices)
    why = f"it must be {', '.join(others)} or {last}."
    raise impossible(name, value, why, did_you_mean(value, choices))


def number_hint(name: str, value: str) -> str | None:
    """What to write instead of a number in quotes; None: it is none."""
    is_count = value.strip().isdecimal() and int(value) > 0
    return f"write {name}={int(value)}." if is_count else None


def integer(value: Any, name: str, *, at_least: int | None = None) -> int:
    """An integer, of at least some value."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (at_least is not None and number < at_least):
        bound = "" if at_least is None else f" of at least {at_least}"
        raise impossible(name, value, f"it must be an integer{bound}.")
    return number


def count(value: Any, name: str) -> int:
    """An integer of at least 1, for an option that may be "auto" too."""
    try:
        return integer(value, name, at_least=1)
    except OptionError:
        raise impossible(name, value, 'it must be "auto" or an integer of at least 1.') from None


def argnums(value: Any, name: str) -> tuple[int, ...]:
    """Argument positions, sorted; negative ones count from the end, as in jax.jit."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        value = (value,)
    return tuple(sorted({integer(number, name) for number in value}))


def _real(value: Any) -> float | None:
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number


def memory_limit(value: Any) -> int | None:
    """Bytes per device from a number or text such as "12GiB"; None: no limit."""
    if value is None:
        return None
    why = "it must be a positive number of bytes per device, or text such as '12GiB'."
    if isinstance(value, str):
        try:
            number = float(parse_bytes(value))
        except ValueError:
            raise impossible("memory_limit", value, why, _bytes_hint(value)) from None
    else:
        number = _real(value) or 0.0
    if not 1 <= number < math.inf:
        raise impossible("memory_limit", value, why)
    return int(number)


def _bytes_hint(text: str) -> str | None:
    """How to write what looks like so many gigabytes."""
    words = r"(?:i|igs?|egs?|(?:ilo|ega|iga|era|eta|ibi|ebi)?bytes?)?"
    found = re.fullmatch(rf"\s*(\d*\.?\d+)\s*([kmgtp]){words}\s*", text, re.IGNORECASE)
    if found is None:
        return None
    number, letter = found[1], found[2].upper()
    power = "KMGTP".index(letter) + 1
    return (
        f"write '{number}{letter}iB' ({number} x 2**{10 * power} bytes) or "
        f"'{number}{letter}B' ({number} x 10**{3 * power})."
    )


def share(value: Any, name: str) -> float:
    """A number between 0 and 1."""
    number = _real(value)
    if number is None or not 0 <= number <= 1:
        raise impossible(name, value, "it must be a share between 0 and 1.")
    return number


def seconds(value: Any, name: str) -> float | None:
    """A positive number of seconds; None: no limit."""
    if value is None:
        return None
    number = _real(value)
    if number is None or not 0 < number < math.inf:
        raise impossible(name, value, "it must be a positive number of seconds, or None.")
    return number


def logical_mesh(value: Any) -> tuple[int, ...] | None:
    """The sizes of one to three axes; None: not asked for."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        value = (value,)
    shape = tuple(integer(size, "logical_mesh", at_least=1) for size in value)
    if not 1 <= len(shape) <= 3:
        raise impossible("logical_mesh", shape, "a logical mesh has one, two or three axes.")
    return shape


OFFLOADED = ("none", "auto", "optimizer")
"""The named values of `offload`."""


def offload(value: Any) -> str | tuple[str, ...]:
    """What lies in the hosts' memory: a named value, or patterns of paths; None: "none"."""
    if value is None:
        return "none"
    if isinstance(value, str) and value in OFFLOADED:
        return value
    patterns = (value,) if isinstance(value, str) else value
    is_list = isinstance(patterns, Iterable) and not isinstance(patterns, Mapping)
    found = tuple(patterns) if is_list else ()
    if found and all(isinstance(pattern, str) and pattern for pattern in found):
        named = [name for name in found if name in OFFLOADED]
        if not named:
            return found
        why = f"{named[0]!r} is no path; it is said alone."
        raise impossible("offload", value, why, f"write offload={named[0]!r}.")
    why = (
        f"it must be one of {', '.join(map(repr, OFFLOADED))}, or a pattern of paths of the state, "
        "or several."
    )
    raise impossible("offload", value, why, "for instance offload='opt_state' or ('*mu*', '*nu*').")


def remat(value: Any) -> str:
    """What is computed again: "none", "full", "override", or "auto" (also None)."""
    known = ("auto", "none", "full", "override")
    if value is None or (isinstance(value, str) and value in known):
        return "auto" if value is None else value
    hint = "wrap parts of the model in jax.checkpoint for a choice of your own; it is respected."
    raise impossible("remat", value, f"it must be one of {', '.join(map(repr, known))}.", hint)


def confirm(value: Any) -> str | bool | None:
    """What `confirm` may be; whether there is such a target is known when it is used."""
    if value is None or value is False:
        return None
    if value is True or (isinstance(value, str) and value):
        return value
    why = "it must be a target of Plan.verify, True, or None."
    raise impossible("confirm", value, why, "confirm='gpu:h100', or confirm='tpu:v5e:2x4'.")
