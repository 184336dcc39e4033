"""Typed reading of JSON objects and GGUF metadata.

Checkpoints are written by many programs and edited by hand. Whatever an entry turns out to be, the reader of a field
gets a value of the type it asked for or raises one ValueError with the key, the value and what was expected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAMES = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
    list[int]: "a list of integers",
    list[str]: "a list of strings",
}


def get(entries: Mapping[str, Any], key: str, kind: Any, default: Any = None, where: str = "") -> Any:
    """The entry `key` as `kind`; `default` where it is absent or null, which configs use alike.

    Args:
      entries: the object that holds the entry.
      key: its name.
      kind: int, float, bool, str, dict, list, list[int] or list[str].
      default: returned as it is.
      where: the file, or the object inside it, for the message.

    Raises ValueError if the entry is of another type.
    """
    value = entries.get(key)
    if value is None:
        return default
    converted = _convert(value, kind)
    if converted is None:
        raise wrong(key, value, _NAMES[kind], where)
    return converted


def get_ids(entries: Mapping[str, Any], key: str, where: str = "") -> list[int]:
    """An entry that is one token id, a list of them, or absent."""
    value = entries.get(key)
    ids = [] if value is None else _convert(value if isinstance(value, list) else [value], list[int])
    if ids is None:
        raise wrong(key, value, "a token id or a list of token ids", where)
    return ids


def wrong(key: str, value: Any, expected: str, where: str = "") -> ValueError:
    """The error for an entry that is not what it must be."""
    return ValueError(f"{where}{': ' if where else ''}{key}={value!r:.80} must be {expected}")


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ValueError naming the file if it holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 or not JSON; endless nesting
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _convert(value: Any, kind: Any) -> Any:
    """`value` as `kind`, or None if it is something else."""
    if kind in (list[int], list[str]):
        if not isinstance(value, list):
            return None
        items = [_convert(item, kind.__args__[0]) for item in value]
        return None if None in items else items
    if kind is bool:  # 0 and 1 too, as some converters write switches
        return bool(value) if isinstance(value, int) and value in (0, 1) else None
    if kind in (str, dict, list):
        return value if isinstance(value, kind) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if not math.isfinite(number):
        return None
    if kind is float:
        return number
    return int(value) if number.is_integer() else None
