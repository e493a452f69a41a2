"""Quantities as people write them: parsing and printing bytes, seconds and FLOPs.

Plans, errors and reports print through these functions, so a number looks the same wherever it is
met. Memory is printed in binary units (1 GiB = 2**30 bytes).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_UNIT_BYTES = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgtp", start=1)
    for base, name in ((1000, letter + "b"), (1024, letter + "ib"))
}
_QUANTITY = re.compile(
    r"\s*([0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE
)


def parse_bytes(text: str) -> int:
    """Number of bytes that `text` names.

    Args:
      text: a number and a unit: B, KB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB
        (powers of 1024), in any case. Without a unit the number is bytes.

    Raises:
      ValueError: `text` is not such a quantity.

    >>> parse_bytes("12GiB") == 12 * 2**30
    True
    >>> parse_bytes("1.5 GB")
    1500000000
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in _UNIT_BYTES:
        raise ValueError(f"{text!r} is not a number of bytes such as '12GiB' or '500MB'")
    num_bytes: int = round(float(match[1]) * _UNIT_BYTES[match[2].lower()])
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` in binary units with three significant digits.

    >>> [format_bytes(n) for n in (0, 999, 1536, 80 * 2**30)]
    ['0 B', '999 B', '1.5 KiB', '80 GiB']
    """
    return _scaled(num_bytes, 1024, _BINARY_UNITS)


def format_seconds(seconds: float) -> str:
    """`seconds` in s, ms, us or ns, whichever reads best, with three significant digits.

    >>> [format_seconds(t) for t in (0, 2.5, 0.00321, 4e-6, 1e-20)]
    ['0 s', '2.5 s', '3.21 ms', '4 us', '0 s']
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if not abs(seconds) < size:
            return f"{_digits(seconds / size)} {unit}"
    digits = _digits(seconds / 1e-9)
    return "0 s" if float(digits) == 0 else f"{digits} ns"


def format_flops(flops: float) -> str:
    """`flops` (a count of operations) with a decimal prefix.

    >>> format_flops(3.2e12)
    '3.2 TFLOP'
    """
    return _scaled(flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def format_count(number: float) -> str:
    """A number of things with a decimal prefix.

    >>> [format_count(n) for n in (12, 3_400, 2.1e6, 0.00112)]
    ['12', '3.4 k', '2.1 M', '0.00112']
    """
    if abs(number) < 0.1:
        return f"{number:.3g}"
    return _scaled(number, 1000, ("", "k", "M", "G", "T")).rstrip()


def format_mesh(sizes: Sequence[int], names: Sequence[str]) -> str:
    """A logical mesh as `x=4, y=2`."""
    return ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))


def format_microbatches(number: int) -> str:
    """`1 microbatch`, `4 microbatches`."""
    return f"{number} microbatch{'' if number == 1 else 'es'}"


def format_examples(number: int) -> str:
    """`1 example`, `4 examples`."""
    return f"{number} example{'' if number == 1 else 's'}"


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    # Rounding to three digits can carry into the next unit: 1023.9 KiB reads as 1 MiB.
    while power + 1 < len(units) and abs(number) / base**power >= base - 0.5:
        power += 1
    return f"{_digits(number / base**power)} {units[power]}"


def _digits(number: float) -> str:
    if not math.isfinite(number):
        return str(number)
    decimals = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


_ROWS = re.compile(r"\[(:, )*\d+:\d+\]$")


def without_rows(path: str) -> str:
    """The path of a leaf, from that of rows of it which lie on one stage.

    >>> without_rows("state['w'][2:5]")
    "state['w']"
    """
    return _ROWS.sub("", path)
