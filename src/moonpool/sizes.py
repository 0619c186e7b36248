"""Sizes and durations as people write them, both ways.

Units are what they say: kB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB powers of 1024. Memory (a
pool, a limit) is printed in binary units; objects, traffic and bandwidth in decimal ones, as networks are
rated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BYTES_BY_UNIT = {
    unit.lower(): base**power for base, units in ((1000, _DECIMAL), (1024, _BINARY)) for power, unit in enumerate(units)
}
_SECONDS_BY_UNIT = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1_000),
    "s": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3_600),
    "d": Fraction(86_400),
}
_DURATIONS = ((1e-6, "us"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3_600.0, "h"), (86_400.0, "d"))
_BYTE_UNITS = "B, kB, MB, GB, TB, PB (powers of 1000), KiB, MiB, GiB, TiB, PiB (powers of 1024)"
_SECOND_UNITS = "us, ms, s, m or min, h, d"
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", re.ASCII)

# Anything larger is a slip of the pen, and wouldn't fit the 64-bit offsets of a pool file.
BYTES_MAX = 2**63 - 1


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes that `text` names, such as "48GiB", "500MB", "1.5 GB", "4096" or 4096.

    Units are case-insensitive; without one the number is bytes. Raises ValueError, naming the text and the
    accepted units, for anything else: a negative or fractional number of bytes, an unknown unit, and "48G",
    because it doesn't say which of the two it means.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise ValueError(f"{text!r} is not a size: give a whole number of bytes or a text such as '48GiB'")
    if isinstance(text, int):
        exact = Fraction(text)
    else:
        number, unit = _split(text, "size", _BYTE_UNITS)
        factor = _BYTES_BY_UNIT.get(unit.lower() or "b")
        if factor is None:
            raise ValueError(f"{text!r} is not a size: unknown unit {unit!r}; the units are {_BYTE_UNITS}")
        exact = number * factor
    if exact.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    if not 0 <= exact <= BYTES_MAX:
        raise ValueError(f"{text!r} is not a size: it must lie between 0 and {BYTES_MAX} bytes")
    return int(exact)


def format_bytes(count: float, *, binary: bool = False) -> str:
    """Return `count` bytes for people, to three figures: "1.31 GB", or with `binary` "48.0 GiB".

    Decimal units are for objects, traffic and bandwidth; binary ones for memory. Whole bytes below the first
    unit are printed exactly.
    """
    base, units = (1024, _BINARY) if binary else (1000, _DECIMAL)
    return _scaled(count, [(float(base**power), unit) for power, unit in enumerate(units)])


def parse_duration(text: str | float) -> float:
    """Return the seconds that `text` names: "2s", "500ms", "5m", "1h", "7d", or a plain number of seconds.

    Raises ValueError, naming the text and the accepted units, for anything else, negative and infinite
    numbers included.
    """
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise ValueError(f"{text!r} is not a duration: give seconds or a text such as '500ms'")
    if not isinstance(text, str):
        if not 0 <= text < math.inf:
            raise ValueError(f"{text!r} is not a duration: it must be a finite number of seconds, at least 0")
        return float(text)
    number, unit = _split(text, "duration", _SECOND_UNITS)
    factor = _SECONDS_BY_UNIT.get(unit.lower() or "s")
    if factor is None:
        raise ValueError(f"{text!r} is not a duration: unknown unit {unit!r}; the units are {_SECOND_UNITS}")
    return float(number * factor)


def format_duration(seconds: float) -> str:
    """Return `seconds` for people, to three figures: "12.0 us", "500 ms", "2.00 s", "5.00 min", "7.00 d"."""
    return _scaled(seconds, _DURATIONS)


def _split(text: str, noun: str, units: str) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a {noun}: write a number and a unit; the units are {units}")
    return Fraction(match[1]), match[2]


def _scaled(value: float, scale: Sequence[tuple[float, str]]) -> str:
    """Return `value` to three figures in the largest unit of `scale` (rising) that leaves at least one."""
    if value < 0:
        return "-" + _scaled(-value, scale)
    chosen = 0
    while True:
        scaled = value / scale[chosen][0]
        decimals = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
        # Compared as printed, so that 999,999 bytes are "1.00 MB" and never "1000 kB".
        if chosen + 1 == len(scale) or round(scaled, decimals) < scale[chosen + 1][0] / scale[chosen][0]:
            break
        chosen += 1
    unit = scale[chosen][1]
    exact = scaled == 0 or (unit == "B" and scaled == int(scaled))
    return f"{scaled:.{0 if exact else decimals}f} {unit}"
