"""Grammars made to hang, crash or reach out of the server."""

from __future__ import annotations

from typing import Any


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: dict[str, tuple[Any, ...]] = {
    "guided_regex": (
        *("(a+)+$", "(a|aa)+b", "((a*)*)*b", "a{100000}", "(?=a)", r"(a)\1", "(", "[", "\0", "*", ".*.*.*.*.*=.*"),
        *(
            r"\p{L}{1000}",
            r"[^\x00-\x{10ffff}]",
            "[a-z]*a[a-z]{20}",
            r"(.|\n)*a(.|\n){50}",
            "%llguidance",
            "(a?){60}a{60}",
        ),
    ),
    "guided_grammar": (
        *("start: start", "start: x", "%llguidance {}", '  %llguidance {"no_forcing": true}\nstart: "a"', "start: /(/"),
        *(
            'start: "a"\n%llguidance {}',
            "start: a\na: a | a a",
            'start: ""',
            "start: <[99999999]>",
            "start: <|im_end|>",
        ),
        *(
            '%import os\nstart: "a"',
            'start: %json {"type": 7}',
            'start: "\\ud800"',
            "start[max_tokens=0]: /a/",
            "x" * 60_000,
        ),
        *('start: ("a"?)*', "start: " + "(" * 5000 + '"a"' + ")" * 5000, 'start: %json {"$ref": "http://127.0.0.1/x"}'),
    ),
    "guided_json": (
        *(
            nested(300),
            nested(50),
            {"$ref": "#"},
            {"$ref": "#/x"},
            {"$ref": "http://127.0.0.1/x"},
            {"type": 7},
            {"enum": []},
        ),
        *({"allOf": [{"type": "string"}, {"type": "integer"}]}, {"not": {}}, {"type": "string", "minLength": 10**30}),
        *(
            {"type": "array", "minItems": 10**9},
            {"type": "string", "pattern": "("},
            {"type": "string", "pattern": "(?=a)"},
        ),
        *(
            {"type": "integer", "multipleOf": 0},
            {"type": "number", "minimum": 1e308, "maximum": -1e308},
            {"properties": 7},
        ),
        *({"type": "integer", "minimum": "a"}, {"x-guidance": {"lenient": True}}, {"type": "object", "required": "x"}),
        *(
            {"x-guidance": {"item_separator": "%llguidance"}},
            {"enum": ["\0", "<|im_end|>"]},
            {"type": "array", "items": 7},
        ),
        {"type": "object", "properties": {f"a{index}": {"type": "string"} for index in range(5000)}},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"%llguidance": {"const": "%llguidance {}"}}, "required": ["%llguidance"]},
        {"anyOf": [{"const": index} for index in range(3000)]},
    ),
    "guided_choice": (["\0"], ["a" * 1000] * 100, ["%llguidance {}"], ['"', "\\", "\x7f", "\u2028"]),
}

LATE: tuple[tuple[str, Any], ...] = (
    ("guided_regex", "((a{100}){100}){100}"),
    ("guided_grammar", 'start: "a"{1000000}'),
    ("guided_grammar", "start: r1\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(1, 60)) + '\nr60: "a"?'),
)
"""Grammars that compile, and outgrow the library's limits while they are followed."""
