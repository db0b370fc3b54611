"""Checks JSON schemas from callers. Every keyword is enforced, an annotation, or refused by name.

The grammar library refuses known keywords that it does not support, but ignores unknown ones. A misspelled or foreign keyword
must not lead to an unconstrained answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from ridgeline.core.errors import BadGrammar

MAX_DEPTH = 64
MAX_REFERENCE = 1000
"""Maximum characters of a $ref."""
MAX_SCHEMAS = 4096

_SINGLE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = (
    *("type", "enum", "const", "$ref", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_ANNOTATIONS = (
    *("$schema", "$id", "$comment", "title", "description", "default", "examples", "example"),
    *("deprecated", "readOnly", "writeOnly"),
    *("discriminator", "externalDocs", "xml"),  # of OpenAPI 3.1
)
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_LARGEST = (1 << 63) - 1024
"""The largest number below 2^63 that is exact as a float."""
KEYWORDS = frozenset({*_SINGLE, *_LISTS, *_MAPS, *_VALUES, *_ANNOTATIONS})


def read_schema(source: str) -> Any:
    """The value of a JSON text. Raises BadGrammar for text that is not JSON."""
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(f"The schema is not valid JSON: {error}.") from error


def check_schema(schema: Any, *, strict: bool = True, param: str | None = None) -> None:
    """Raises BadGrammar naming the place of a part that is malformed, too large or, if `strict`, not enforceable."""
    waiting: list[tuple[Any, str, int]] = [(schema, "the schema", 0)]
    seen = 0
    while waiting:
        node, where, depth = waiting.pop()
        seen += 1
        if depth > MAX_DEPTH or seen > MAX_SCHEMAS:
            limit = f"{MAX_DEPTH} levels" if depth > MAX_DEPTH else f"{MAX_SCHEMAS} subschemas"
            raise BadGrammar(f"The schema has more than {limit}: make it smaller.", param=param)
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise BadGrammar(f"{where} must be an object, true or false.", param=param)
        if len(str(node.get("$ref", ""))) > MAX_REFERENCE:
            raise BadGrammar(f"{where} has a $ref of more than {MAX_REFERENCE} characters: shorten it.", param=param)
        for key in node if strict else ():
            if key not in KEYWORDS and (not key.startswith("x-") or key == "x-guidance"):
                hint = ' (write {"type": [..., "null"]})' if key == "nullable" else ""
                raise BadGrammar(f"{where} uses {key!r}, which is not supported: remove it{hint}.", param=param)
        waiting.extend((child, f"{where}.{name}", depth + 1) for name, child in _children(node))


def clamp_bounds(schema: Any) -> Any:
    """The schema with number bounds clamped to the range that the grammar library supports: it refuses larger ones.

    Every value that the result allows, the given schema allows. Recursive: check the depth first.
    """
    if not isinstance(schema, dict):
        return schema
    fresh = map_subschemas(schema, clamp_bounds)
    for key in _BOUNDS & fresh.keys():
        bound = fresh[key]
        if isinstance(bound, (int, float)) and not isinstance(bound, bool):
            fresh[key] = max(bound, -_LARGEST) if "inimum" in key else min(bound, _LARGEST)
    return fresh


def prune_schema(schema: Any) -> Any:
    """The schema without annotations and unknown keywords. Recursive: check the depth first."""
    if not isinstance(schema, dict):
        return schema
    return map_subschemas(
        {key: schema[key] for key in schema if key in KEYWORDS and key not in _ANNOTATIONS}, prune_schema
    )


def map_subschemas(node: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy of a schema with `change` applied to each of its direct subschemas."""
    fresh = dict(node)
    for key in _SINGLE:
        if isinstance(fresh.get(key), dict):
            fresh[key] = change(fresh[key])
    for key in _LISTS:
        if isinstance(fresh.get(key), list):
            fresh[key] = [change(child) for child in fresh[key]]
    for key in _MAPS:
        if isinstance(fresh.get(key), dict):
            fresh[key] = {name: change(child) for name, child in fresh[key].items()}
    return fresh


def _children(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _SINGLE:
        if key in node and not isinstance(node[key], list):
            yield key, node[key]
    for key in _LISTS:
        if isinstance(node.get(key), list):
            yield from ((f"{key}[{i}]", child) for i, child in enumerate(node[key]))
    for key in _MAPS:
        if isinstance(node.get(key), dict):
            yield from ((f"{key}.{name}", child) for name, child in node[key].items())
