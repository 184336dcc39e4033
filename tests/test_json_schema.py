"""Grammars of JSON schemas, against Python's `json` and a small validator."""

import json
import re

import numpy as np
import pytest
from grammar_cases import TARGETS, accepts, json_grammar, random_walk, smollm2

from spec_jax.grammar import json_schema_grammar

PERSON = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4, "description": "given name"},
        'é"\n': {"enum": ["a", 'q"', "東", 1, -2.5, True, None]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
        "age": {"type": ["integer", "null"]},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"anyOf": [{"const": "x"}, {"$ref": "#/$defs/a~1b"}]}, "a/b": {"type": "boolean"}},
}
SCHEMAS = [
    PERSON,
    {},
    {"type": "object"},
    {"type": "array", "items": {}, "minItems": 2},
    {"type": "array", "maxItems": 0},
    {"properties": {"any": {}, "more": True}, "required": ["more"]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "number"}], "minItems": 2, "maxItems": 2},
    {"type": "string", "pattern": '^a|b[^"\\\\\\x00-\\x1f]{0,2}$'},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "ipv4"},
    {"allOf": [{"minLength": 2, "maxLength": 3}]},
    {"type": "integer", "enum": [1, 2.0]},
    {"type": ["string", "array"], "maxLength": 1, "items": {"const": 0}},
]
KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def is_kind(value, kind):
    if kind in ("number", "integer"):
        return type(value) is int or type(value) is float and (kind == "number" or value == int(value))
    return isinstance(value, KINDS[kind])


def fits(value, schema, root) -> bool:
    """Whether a value is valid, for the keywords that the schemas here use."""
    if schema in (True, {}):
        return True
    checks = [True]
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/").replace("~1", "/")
        checks.append(fits(value, root["$defs"][name], root))
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        checks.append(any(is_kind(value, kind) for kind in kinds))
    for choices in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if choices is not None:
            checks.append(any(value == choice and type(value) is type(choice) for choice in choices))
    if "anyOf" in schema:
        checks.append(any(fits(value, branch, root) for branch in schema["anyOf"]))
    checks += [fits(value, branch, root) for branch in schema.get("allOf", [])]
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        checks += [name in value for name in schema.get("required", [])]
        checks += [fits(item, known[name], root) for name, item in value.items() if name in known]
        checks += [bool(others) and fits(item, others, root) for name, item in value.items() if name not in known]
    if isinstance(value, list):
        checks.append(schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9))
        leading = schema.get("prefixItems", [])
        checks += [fits(item, part, root) for item, part in zip(value, leading, strict=False)]
        checks += [fits(item, schema.get("items", {}), root) for item in value[len(leading) :]]
    if isinstance(value, str):
        checks.append(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9))
        checks.append(re.search(schema.get("pattern", ""), value) is not None)
    return all(checks)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_random_walks_decode_to_valid_json(schema):
    rng = np.random.default_rng(1)
    for name in ("byte-level", "sentencepiece"):
        target = TARGETS[name]
        grammar = json_grammar(json.dumps(schema), target)
        for _ in range(5):
            text = target.tokenizer.decode(random_walk(grammar, rng))
            assert fits(json.loads(text), schema, schema), text


@pytest.mark.parametrize(
    "schema, text, expected",
    [
        (PERSON, '{"name": "é東🙂a", "tags": ["x", true], "age": null}', True),
        (PERSON, '{"name":"","é\\"\\n":"q\\"","tags":[false]}', True),
        (PERSON, '{"name": "12345", "tags": ["x"]}', False),
        (PERSON, '{"tags": ["x"]}', False),
        (PERSON, '{"name": "", "tags": []}', False),
        (PERSON, '{"name": "", "tags": ["x"], "age": 1.5}', False),
        (PERSON, '{"name": "", "tags": ["x"], "age": 1,}', False),
        ({}, '{"a": [1, {"b": null}], "c": -1.5e+3}', True),
        ({}, '{"a": [1, {"b": nil}]}', False),
        ({"const": "a.b"}, '"a.b"', True),
        ({"const": "a.b"}, '"axb"', False),
        ({"type": "string", "maxLength": 60}, '"' + "é" * 60 + '"', True),  # outlines-core alone: time 2**60
        ({"type": "string", "maxLength": 60}, '"' + "é" * 61 + '"', False),
        ({"type": "string"}, '"a\\"b\\nc"', True),
        ({"type": "string"}, '"a\nb"', False),
        ({"type": "string", "pattern": "a|ab"}, '"ab"', True),
        ({"type": "string", "pattern": "^[$]a|b$"}, '"$a"', True),
        ({"type": "string", "format": "date"}, '"2024-02-29"', True),
        ({"type": "string", "format": "date"}, '"2024-13-01"', False),
        ({"type": "string", "format": "time"}, '"23:59:59.25+01:00"', True),
        ({"type": "string", "format": "uuid"}, '"123e4567-e89b-12d3-a456-426614174000"', True),
        ({"type": "string", "format": "ipv4"}, '"192.168.0.255"', True),
        ({"type": "string", "format": "ipv4"}, '"192.168.0.256"', False),
    ],
)
def test_texts_of_json(schema, text, expected):
    target = TARGETS["byte-level"]
    assert accepts(json_grammar(json.dumps(schema), target), target.tokenizer.encode(text)) is expected


def test_references_may_be_many():
    """outlines-core by itself drops a property behind more than three references."""
    names = "abcdef"
    chain = {name: {"$ref": f"#/$defs/{following}"} for name, following in zip(names, names[1:], strict=False)}
    schema = {"properties": {"p": {"$ref": "#/$defs/a"}}, "required": ["p"], "$defs": chain | {"f": {"type": "null"}}}
    target = TARGETS["byte-level"]
    grammar = json_schema_grammar(schema, target)
    assert accepts(grammar, target.tokenizer.encode('{"p": null}'))
    assert not accepts(grammar, target.tokenizer.encode("{}"))


def deep(depth):
    return {"items": deep(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    "schema, reason",
    [
        ("{", r"the JSON schema '\{' cannot be used: Expecting property name"),
        ("[" * 10000, "cannot be used|nests too deeply"),
        (deep(200), "cannot be used|nests too deeply"),
        (deep(900), "cannot be used|nests too deeply"),
        (None, "# is None, not a schema"),
        (False, "# is False, not a schema"),
        ({"const": float("nan")}, "Out of range float"),
        ('{"const": 1e400}', "Out of range float"),
        ({"const": {1}}, "not JSON serializable"),
        ({"type": "integer", "minimum": 3}, "#: minimum=3 is not supported here"),
        ({"minimum": 3}, "#: minimum=3 is not supported here"),
        (
            {"properties": {"a": {"items": {"type": "text"}}}},
            "#/properties/a/items: type='text' must be one or several",
        ),
        ({"type": []}, "type=.* must be one or several of object"),
        ({"type": "object", "minProperties": 1}, "minProperties=1 is not supported here"),
        ({"type": "object", "requird": ["a"]}, "requird="),
        ({"type": "string", "items": {}}, "items="),
        ({"properties": [1]}, "properties=.* must be an object"),
        ({"properties": {"a": {}}, "required": ["b"]}, "required has 'b'"),
        ({"properties": {"a": {}}, "required": "a"}, "required='a' must be a list of strings"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems.*leaves nothing"),
        ({"type": "array", "minItems": -1}, "minItems.*leaves nothing"),
        ({"type": "array", "minItems": "1"}, "minItems='1' must be an integer"),
        ({"prefixItems": [{}], "minItems": 2}, "the 1 prefixItems"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems=True is not supported"),
        ({"enum": []}, r"enum=\[\] must be made of"),
        ({"const": [1]}, r"const=\[1\] must be made of"),
        ({"enum": ["a", 1], "type": "string"}, "enum has 1, which is not of type 'string'"),
        ({"const": True, "type": "integer"}, "const has True"),
        ({"anyOf": []}, "anyOf of 0 schemas"),
        ({"allOf": [{}, {}]}, "allOf of 2 schemas"),
        ({"anyOf": [{}], "type": "string"}, "type='string' is not supported here"),
        ({"oneOf": [{}]}, "oneOf=.* is not supported here"),
        ({"not": {}}, "not=.* is not supported here"),
        ({"type": "string", "format": "email"}, "format='email' must be one of date"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "only one is supported"),
        ({"type": "string", "pattern": "a.b"}, "may match quotes"),
        ({"type": "string", "pattern": r"a\\"}, "may match quotes"),
        ({"type": "string", "pattern": "(a$|ab)"}, "has '\\$' inside"),
        ({"type": "string", "pattern": "a("}, "#: the pattern .* cannot be compiled"),
        ({"$ref": "#"}, "#: .ref='#' is recursive"),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "recursive"),
        ({"$ref": "#/$defs/a"}, "points to nothing"),
        ({"$ref": "other.json"}, "must be a reference inside the schema"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"const": "\ud800"}}}, "cannot be used"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_schemas_that_cannot_be_used(schema, reason):
    with pytest.raises(ValueError, match=reason):
        json_schema_grammar(schema, TARGETS["byte-level"])


@pytest.mark.slow
def test_smollm2_json():
    target, rng = smollm2(), np.random.default_rng(3)
    grammar = json_schema_grammar(PERSON, target)
    assert grammar.next_state.nbytes < 2**20
    assert accepts(grammar, target.tokenizer.encode('{"name": "東🙂é", "tags": ["x", false], "age": 42}'))
    for _ in range(20):
        text = target.tokenizer.decode(random_walk(grammar, rng))
        assert fits(json.loads(text), PERSON, PERSON), text
