"""JSON schemas from a caller: every keyword is honoured, an annotation, or refused by name.

The grammar library refuses what it knows and lacks, but ignores what it does not know; a misspelt or foreign keyword
must not turn into an unconstrained answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from ridgeline.core.errors import BadGrammar

MAX_DEPTH = 64
MAX_REFERENCE = 1000
"""Characters of a $ref."""
MAX_SCHEMAS = 4096

_ONE = ("items", "additionalProperties", "additionalItems")
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
_WIDEST = (1 << 63) - 1024
"""The last number before 2^63 that is a float too."""
KEYWORDS = frozenset({*_ONE, *_LISTS, *_MAPS, *_VALUES, *_ANNOTATIONS})


def read_schema(source: str) -> Any:
    """The value of a JSON text. Raises BadGrammar for text that is not JSON."""
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(f"The schema is not valid JSON: {error}.") from error


def check_schema(schema: Any, *, strict: bool = True, param: str | None = None) -> None:
    """Raises BadGrammar naming the place of what is malformed, too large or, when `strict`, not enforceable."""
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


def draw_in(schema: Any) -> Any:
    """The schema with bounds of numbers beyond 64 bits (int64's least, the largest float) drawn in to what the grammar library
    can count to: it refuses those. Whatever is allowed then was allowed before. Recursive: check its depth first."""
    if not isinstance(schema, dict):
        return schema
    fresh = mapped(schema, draw_in)
    for key in _BOUNDS & fresh.keys():
        bound = fresh[key]
        if isinstance(bound, (int, float)) and not isinstance(bound, bool):
            fresh[key] = max(bound, -_WIDEST) if "inimum" in key else min(bound, _WIDEST)
    return fresh


def prune_schema(schema: Any) -> Any:
    """The schema without annotations and without keywords we do not know. Recursive: check its depth first."""
    if not isinstance(schema, dict):
        return schema
    return mapped({key: schema[key] for key in schema if key in KEYWORDS and key not in _ANNOTATIONS}, prune_schema)


def mapped(node: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy of a schema with what `change` makes of each subschema right in it."""
    fresh = dict(node)
    for key in _ONE:
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
    for key in _ONE:
        if key in node and not isinstance(node[key], list):
            yield key, node[key]
    for key in _LISTS:
        if isinstance(node.get(key), list):
            yield from ((f"{key}[{i}]", child) for i, child in enumerate(node[key]))
    for key in _MAPS:
        if isinstance(node.get(key), dict):
            yield from ((f"{key}.{name}", child) for name, child in node[key].items())
