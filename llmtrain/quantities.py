"""Sizes, durations and rates as text, in the unit that fits the number."""

import re
from collections.abc import Sequence

from llmtrain.errors import UserError

_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_LONG_DURATIONS = ((86400, "d"), (3600, "h"), (60, "min"))
_SHORT_DURATIONS = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))


def size_text(size: float) -> str:
    """Return a number of bytes in binary units, such as ``2.75 GiB``."""
    if size < 1024:
        return f"{size:.0f} B"
    return _scaled(size, _SIZES)


def duration_text(seconds: float) -> str:
    """Return a duration, such as ``90.0 min``: above two minutes in a unit of which it has two."""
    if seconds == 0:
        return "0 s"
    for unit_seconds, unit in _LONG_DURATIONS:
        if seconds >= 2 * unit_seconds:
            return f"{_digits(seconds / unit_seconds)} {unit}"
    return _scaled(seconds, _SHORT_DURATIONS)


def rate_text(number: float, unit: str) -> str:
    """Return a number with the prefix that fits, such as ``51.5 GFLOPs``."""
    return _scaled(number, [(factor, f"{prefix}{unit}") for factor, prefix in _PREFIXES])


def _scaled(number: float, units: Sequence[tuple[float, str]]) -> str:
    """Return a number in the largest unit in which it is at least 1, or in the smallest unit.

    Args:
        number: the number.
        units: the size and the name of each unit, the largest first.
    """
    for factor, unit in units:
        if number >= factor:
            return f"{_digits(number / factor)} {unit}"
    factor, unit = units[-1]
    return f"{_digits(number / factor)} {unit}"


def _digits(number: float) -> str:
    """Return a number to three digits, and with all digits before the point."""
    if number >= 100:
        return f"{number:,.0f}"
    if number >= 10:
        return f"{number:.1f}"
    return f"{number:.2f}"


_UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def size_bytes(text: str) -> float:
    """Return the bytes of a size such as ``80gb``, ``1.5 GiB`` or ``800mb``.

    Raises:
        UserError: if the text is no size.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]+)", text.strip().lower())
    size = float(match[1]) * _UNITS.get(match[2], 0) if match else 0.0
    if size == 0:
        raise UserError(
            f"{text} is no size of memory; write a number and a unit, such as 80gb, 24gib or 800mb."
        )
    return size
