"""JSON schemas (draft 2020-12) of request fields, from their readers, for the API description.

A schema accepts every value that its reader accepts. The reader also refuses values that JSON schema cannot exclude
(a grammar that does not compile, fields that exclude each other).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ridgeline.service.fields import LONG, REQUIRED, TABLE, TTLS, Field, Route
from ridgeline.service.readers import (
    Biases,
    Boolean,
    Integer,
    Items,
    Number,
    OneOf,
    Reader,
    Record,
    Refused,
    Text,
    Texts,
    TokenIds,
)

Schema = dict[str, Any]

GENERATES = (400, 403, 404, 408, 413, 429, 500, 503)
"""Statuses of errors of generating routes."""
READS_BODY = (400, 404, 408, 413, 503)


@dataclass(frozen=True, slots=True)
class Details:
    """What a route takes and answers. query, headers: name -> schema. answers: content type -> schema.

    errors: statuses of error answers, in addition to 401 for a missing key.
    """

    query: Mapping[str, Schema] = field(default_factory=dict)
    headers: Mapping[str, Schema] = field(default_factory=dict)
    body: Schema | None = None
    example: Any = None
    body_type: str = "application/json"
    answers: Mapping[str, Schema] = field(default_factory=dict)
    errors: tuple[int, ...] = ()


def nullable(schema: Schema) -> Schema:
    """The schema, extended by null, which always means "not given"."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None], **({"type": ["string", "null"]} if "type" in schema else {})}
    if isinstance(schema.get("type"), str):
        return schema if schema["type"] == "null" else {**schema, "type": [schema["type"], "null"]}
    if "type" in schema:
        return {**schema, "type": [*schema["type"], "null"]}
    return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]} if "anyOf" in schema else schema


_TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}
_TOKEN_IDS: Schema = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_STRING: Schema = {"type": "string"}
_JSON_SCHEMA: Schema = {
    "type": ["object", "boolean", "string"],
    "description": "A JSON schema as an object, or as the JSON text of an object.",
}
_PATTERN: Schema = {"type": "string", "minLength": 1, "maxLength": 100_000}
_CHOICES: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1000}
_FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _STRING,
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"], "description": "A JSON schema of the arguments."},
        "strict": {"type": ["boolean", "null"]},
    },
}
_PARTS: Schema = {
    "type": "array",
    "items": {"type": "object", "required": ["type"], "properties": {"type": _STRING, "text": _STRING}},
}

SHAPES: Mapping[str, Schema] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": {"anyOf": [_STRING, _PARTS, {"type": "null"}]},
            },
        },
    },
    "prompt": {
        "anyOf": [
            _STRING,
            {"type": "array", "items": _STRING, "minItems": 1},
            _TOKEN_IDS,
            {"type": "array", "items": {"anyOf": [_STRING, _TOKEN_IDS]}, "minItems": 1},
        ]
    },
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "required": ["schema"], "properties": {"schema": _JSON_SCHEMA}},
        },
        "if": {"properties": {"type": {"const": "json_schema"}}},
        "then": {"required": ["json_schema"]},
    },
    "structured_outputs": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "json": nullable(_JSON_SCHEMA),
            "json_object": {"type": ["boolean", "null"]},
            "regex": nullable(_PATTERN),
            "choice": nullable(_CHOICES),
            "grammar": nullable(_PATTERN),
        },
    },
    "dry_sequence_breakers": {"anyOf": [_STRING, {"type": "array", "items": _PATTERN}]},
    "early_stopping": {"enum": [True, False, "never"]},
    "guided_json": _JSON_SCHEMA,
    "guided_regex": _PATTERN,
    "guided_choice": _CHOICES,
    "guided_grammar": _PATTERN,
    "grammar": _PATTERN,
    "cache_control": {
        "type": "object",
        "additionalProperties": False,
        "required": ["type"],
        "properties": {
            "type": {"const": "ephemeral"},
            "ttl": {"enum": [*TTLS, None]},
            "tokens": {"type": ["integer", "null"], "minimum": 0},
            "characters": {"type": ["integer", "null"], "minimum": 0},
        },
    },
    "tools": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["type", "function"],
            "properties": {"type": {"const": "function"}, "function": _FUNCTION},
        },
    },
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {"type": "object", "required": ["name"], "properties": {"name": _STRING}},
                },
            },
        ]
    },
}
"""Schemas of fields that a function reads, or that later code checks in detail."""


def reader_schema(reader: Reader) -> Schema:
    """The values that a reader accepts. For an unknown kind of reader: any value, described by `expects`."""
    match reader:
        case Number(low=low, high=high, above=above):
            return {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}
        case Integer(low=low, high=high):
            return {"type": "integer", "minimum": low, **({"maximum": high} if high != LONG else {})}
        case Boolean():
            return {"type": "boolean"}
        case Text(max_length=max_length):
            return {"type": "string", **({"maxLength": max_length} if max_length != LONG else {})}
        case OneOf(values=values):
            return {"type": "string", "enum": list(values)}
        case Texts(max_items=max_items, max_length=max_length, single=single):
            text = {"type": "string", "minLength": 1, "maxLength": max_length}
            several = {"type": "array", "items": text, "maxItems": max_items}
            return {"anyOf": [text, several]} if single else several
        case TokenIds(max_items=max_items):
            return {"type": "array", "items": _TOKEN_ID, **({"maxItems": max_items} if max_items != LONG else {})}
        case Biases(max_items=max_items):
            bias = {"type": "number", "minimum": -100, "maximum": 100}
            pattern = {"^[0-9]{1,9}$": bias}
            return {
                "type": "object",
                "patternProperties": pattern,
                "additionalProperties": False,
                "maxProperties": max_items,
            }
        case Items(item=item, max_items=max_items, min_items=min_items):
            return {"type": "array", "items": reader_schema(item), "minItems": min_items, "maxItems": max_items}
        case Record(known=known, open=open_):
            members = {name: nullable(reader_schema(member)) for name, member in known.items()}
            return {"type": "object", "properties": members, **({} if open_ else {"additionalProperties": False})}
        case Refused(why=why, neutral=neutral):
            accepted: Schema = {"enum": list(neutral)} if neutral else {"type": "null"}
            return {**accepted, "description": f"Not supported{f': {why}' if why else ''}.", "x-ridgeline-refused": why}
    return {"description": f"Expected {reader.expects}."}


def field_schema(field: Field, route: Route) -> Schema:
    """The schema of one field, with its effect and examples."""
    schema = SHAPES[field.name] if field.name in SHAPES else reader_schema(field.reader)
    if field.name not in REQUIRED[route]:
        schema = nullable(schema)
    words = {"description": _sentence(field.use)} if field.use else {}
    return {**schema, **words, **({"examples": list(field.good)} if field.good else {})}


def body_schema(route: Route) -> Schema:
    """The request body of a generating route. Unknown fields are accepted and named in a response header."""
    fields = [field for field in TABLE if route in field.routes]
    return {
        "type": "object",
        "required": list(REQUIRED[route]),
        "properties": {field.name: field_schema(field, route) for field in fields},
    }


def record_schema(readers: Mapping[str, Reader], words: Mapping[str, str], required: tuple[str, ...] = ()) -> Schema:
    """A body whose members have these readers. words: descriptions. Unknown members are accepted."""
    properties = {
        name: {**nullable(reader_schema(reader)), **({"description": words[name]} if name in words else {})}
        for name, reader in readers.items()
    }
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."
