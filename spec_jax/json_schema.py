"""From a JSON schema to a regular expression of the JSON texts that are valid for it.

`outlines-core` writes the expression, but it ignores keywords it does not know (`minimum`) and gets some wrong that it
knows: a property behind more than three references is dropped, names are not escaped, the alternatives of an empty
schema leak into what is around it, `allOf` concatenates, and a pattern or format may run over the closing quote. So a
schema is rewritten first in the part of the language that it converts rightly, and rejected where there is no way.
What is supported is listed at `spec_jax.grammar.json_schema_grammar`.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Callable
from typing import Any

from spec_jax import fields
from spec_jax.byte_automaton import byte_automaton, import_outlines, unanchored

_ANNOTATIONS = frozenset(
    "$schema $id $comment $defs definitions title description default examples deprecated readOnly writeOnly".split()
)
_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": (),
    "integer": (),
    "boolean": (),
    "null": (),
}
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"  # every month has 31 days
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
}


def schema_pattern(schema: str | dict[str, Any], name: str) -> str:
    """The expression, without anchors.

    Args:
      schema: JSON text, or what `json.loads` makes of it.
      name: what messages call the schema.

    Raises:
      ValueError: text that is not JSON; a keyword that cannot be honoured, with its place in the schema.
      ImportError: `outlines-core` is not installed.
    """
    convert = import_outlines().json_schema.build_regex_from_schema
    try:
        document = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        return convert(json.dumps(_supported(document, document, "#"), allow_nan=False))
    except RecursionError:
        raise ValueError(f"{name} nests too deeply") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} cannot be used: {error}") from None


def _supported(schema: Any, document: Any, where: str, refs: tuple[str, ...] = ()) -> dict[str, Any]:
    """`schema` in the part of the language that outlines-core converts rightly; ValueError where there is no way.

    Args:
      document: the whole schema, for references.
      where: the place of `schema` in it, for messages.
      refs: the references that led here.
    """
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise ValueError(f"{where} is {schema!r:.80}, not a schema that something can fit")
    rules = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}

    def only(*keys: str):
        for key in rules:
            if key not in keys:
                raise ValueError(f"{where}: {key}={rules[key]!r:.80} is not supported here")

    def part(value: Any, *path: Any) -> dict[str, Any]:
        return _supported(value, document, "/".join(map(str, (where, *path))), refs)

    if "$ref" in rules:
        only("$ref")
        ref = rules["$ref"]
        if ref in refs:
            raise ValueError(f"{where}: $ref={ref!r:.80} is recursive, which no automaton can follow")
        return _supported(_referenced(document, ref, where), document, where, (*refs, ref))
    for key in ("allOf", "anyOf"):
        if key in rules:
            only(key)
            branches = fields.get(rules, key, list, [], where)
            if not branches or (key == "allOf" and len(branches) > 1):
                raise ValueError(f"{where}: {key} of {len(branches)} schemas is not supported")
            return {"anyOf": [part(branch, key, i) for i, branch in enumerate(branches)]}
    types = rules.get("type")
    if types is None:  # what the keywords are about; anything where there are none
        types = [t for t, keys in _KEYWORDS.items() if not rules.keys().isdisjoint(keys)]
        types = types or [t for t in _KEYWORDS if t != "integer"]  # an integer is a number
    types = types if isinstance(types, list) else [types]
    if not types or not all(isinstance(t, str) and t in _KEYWORDS for t in types):
        raise fields.wrong("type", rules["type"], f"one or several of {', '.join(_KEYWORDS)}", where)
    for key in ("enum", "const"):
        if key in rules:
            only(key, "type")
            values = fields.get(rules, key, list, [], where) if key == "enum" else [rules[key]]
            if not values or any(isinstance(value, dict | list) for value in values):
                raise fields.wrong(key, rules[key], "made of strings, numbers, true, false or null", where)
            for value in values if "type" in rules else ():
                if not any(_has_type(value, t) for t in types):
                    raise ValueError(f"{where}: {key} has {value!r:.80}, which is not of type {rules['type']!r}")
            return {"enum": values}
    only("type", *(key for t in types for key in _KEYWORDS[t]))
    makers = {"object": _object, "array": _array, "string": _string}
    made = [makers[t](rules, part, where) if t in makers else {"type": t} for t in types]
    return made[0] if len(made) == 1 else {"anyOf": made}


def _object(rules: dict[str, Any], part: Callable[..., dict], where: str) -> dict[str, Any]:
    properties = fields.get(rules, "properties", dict, {}, where)
    required = fields.get(rules, "required", list[str], [], where)
    for name in required:
        if name not in properties:
            raise ValueError(f"{where}: required has {name!r:.80}, which is none of the properties")
    others = rules.get("additionalProperties", True)
    if not properties and others in (True, {}):
        return {"type": "object"}
    if not properties and others is not False:
        return {"type": "object", "additionalProperties": part(others, "additionalProperties")}
    # outlines-core writes names as they are, without JSON's escapes.
    spelled = {name: json.dumps(name, ensure_ascii=False)[1:-1] for name in properties}
    made = {spelled[name]: part(value, "properties", name) for name, value in properties.items()}
    return {"type": "object", "properties": made, "required": [spelled[name] for name in required]}


def _array(rules: dict[str, Any], part: Callable[..., dict], where: str) -> dict[str, Any]:
    bounds = _bounds(rules, "minItems", "maxItems", where)
    if "prefixItems" not in rules:
        items = rules.get("items", True)
        return {"type": "array", **bounds} | ({} if items in (True, {}) else {"items": part(items, "items")})
    items = fields.get(rules, "prefixItems", list, [], where)
    if not bounds.get("minItems", 0) <= len(items) <= bounds.get("maxItems", len(items)):
        raise ValueError(f"{where}: arrays have the {len(items)} prefixItems, which minItems or maxItems excludes")
    return {"prefixItems": [part(item, "prefixItems", i) for i, item in enumerate(items)]}


def _string(rules: dict[str, Any], part: Callable[..., dict], where: str) -> dict[str, Any]:
    bounds = _bounds(rules, "minLength", "maxLength", where)
    if len({"pattern", "format"} & rules.keys()) + bool(bounds) > 1:
        raise ValueError(f"{where}: of pattern, format and a length only one is supported")
    if "format" in rules:
        if rules["format"] not in _FORMATS:
            raise fields.wrong("format", rules["format"], f"one of {', '.join(_FORMATS)}", where)
        return {"type": "string", "pattern": _FORMATS[rules["format"]]}
    if "pattern" not in rules:
        return {"type": "string", **bounds}
    pattern = unanchored(fields.get(rules, "pattern", str, "", where))
    # Inside a longer expression an anchor would cut its branch off without a word. Conservative: odd nested character
    # classes may be taken for anchors.
    for token in re.findall(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]|.", pattern, flags=re.DOTALL):
        if token in ("^", "$", r"\A", r"\z"):
            raise ValueError(f"{where}: pattern={pattern!r:.80} has {token!r} inside, which is not supported")
    table, _ = byte_automaton(pattern, f"{where}: the pattern {pattern!r:.80}")
    if (table[:, [*range(32), *b'"\\']] >= 0).any():
        raise ValueError(
            f"{where}: pattern={pattern!r:.80} may match quotes, backslashes or control characters, which JSON writes"
            r' differently; exclude them, for example with [^"\\\x00-\x1f] in place of a dot'
        )
    return {"type": "string", "pattern": f"(?:{pattern})"}


def _bounds(rules: dict[str, Any], low: str, high: str, where: str) -> dict[str, int]:
    bounds = {key: fields.get(rules, key, int, 0, where) for key in (low, high) if key in rules}
    if min(bounds.values(), default=0) < 0 or bounds.get(low, 0) > bounds.get(high, bounds.get(low, 0)):
        raise ValueError(f"{where}: {bounds} leaves nothing that could fit")
    return bounds


def _has_type(value: Any, kind: str) -> bool:
    if kind in ("number", "integer"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or float(value).is_integer())
    return isinstance(value, {"string": str, "boolean": bool, "null": type(None)}.get(kind, ()))


def _referenced(document: Any, ref: Any, where: str) -> Any:
    """What a reference inside the document points to: "#" and a JSON pointer (RFC 6901)."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise fields.wrong("$ref", ref, "a reference inside the schema, such as '#/$defs/name'", where)
    found = document
    for step in urllib.parse.unquote(ref).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            raise ValueError(f"{where}: $ref={ref!r:.80} points to nothing")
    return found
