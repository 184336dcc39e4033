"""Small questions that every check of a caller's options asks."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Sequence
from typing import Any


def nearest(name: str, allowed: Sequence[str]) -> str:
    """` (did you mean 'x'?)` for a misspelt name, else an empty string."""
    close = difflib.get_close_matches(name, allowed, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def is_int(value: Any) -> bool:
    """An integer of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_counts(**counts: Any) -> None:
    """Raises a ValueError for a count, given by name, that is no positive integer.

    Of Python alone: counts go into reports and files as JSON, which takes no integers of NumPy.
    """
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")


def is_number(value: Any) -> bool:
    """A real number of Python or NumPy, infinities included; NaN, True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value


def plain(value: Any) -> Any:
    """NumPy's scalars as Python's, which hash and print alike; everything else as it is."""
    if isinstance(value, (bool, int, float)):
        return value
    if type(value).__name__ in ("bool", "bool_") and hasattr(value, "item"):  # NumPy is not loaded for this
        return value.item()
    return int(value) if is_int(value) else float(value) if isinstance(value, numbers.Real) else value


def settle(options: Any, name: str, value: Any) -> None:
    """Sets a field of a frozen dataclass that is still being made."""
    object.__setattr__(options, name, value)
