"""Translates errors of the grammar library to messages that name the cause and the remedy."""

from __future__ import annotations

import re

from ridgeline.core.sampling import Grammar

NOUNS = {
    "json_object": "JSON grammar",
    "json_schema": "schema",
    "regex": "regex",
    "choice": "list of choices",
    "lark": "grammar",
    "gbnf": "grammar",
}
"""Noun for each kind of grammar, for messages."""

_SMALLER = {
    "regex": "reduce its nested repetitions",
    "lark": "reduce its nested repetitions and ambiguous rules",
    "gbnf": "reduce its nested repetitions and ambiguous rules",
    "choice": "shorten it",
}
_LIMIT = re.compile(r"too (many|big|complex)|grammar too large|max is \d+|\(limit|limit for|fuel", re.IGNORECASE)
"""Messages of the library when a grammar exceeds a limit."""

_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_LISTING = re.compile(r"\n\s*\d+ \| ")
"""Start of the grammar listing in a message. The listing may differ from the caller's text."""

_REASONS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (r'invalid regex "(.{0,80}).*" \(in regex\): regex parse error:.*error: (.+)', r'the regex "\1" is not valid: \2'),
        (r"regex parse error:.*error: (.+)", r"a pattern is not valid: \1"),
        (r"Unable to determine if regex is empty", "its patterns are too complex together: simplify or remove some"),
        (r"coerce_one_of", "oneOf is supported only if its branches obviously exclude each other: write anyOf, or give "
         "each a required property with a const of its own"),  # the library names an internal option that callers cannot set
        (r"Resource '(.+?)' is not present", r"$ref '\1' points outside of the schema: move the definition to $defs"),
        (r"Pointer '(.+?)' does not exist", r"a $ref points to '\1', which does not exist: add it or correct the reference"),
        (r"anyOf is empty", "an enum or anyOf has no values: add one"),
        (r"incompatible types", "its parts ask for incompatible types: change one of them"),
        (r"invalid multiple of", "multipleOf must be greater than 0"),
        (r"Invalid type: (.+)", r"the type '\1' is unknown: use string, number, integer, boolean, object, array or null"),
        (r"Unknown format: (.+)", r"the format '\1' is not supported: remove it, or write a pattern"),
        (r"Expecting object schema", "it must be an object schema, not true or false"),
        (r'unknown special token: "(.+?)"', r"the special token '\1' is unknown: use one of the model's, or <[ID]> with its id"),
        (r'unknown name: "(.+?)"', r'the rule "\1" is not defined: define it'),
    )
)  # fmt: skip
"""Messages that name internals of the library or lack the remedy, and their replacements."""


def explain(grammar: Grammar, message: str) -> str:
    """The message for the caller: cause and remedy."""
    noun = NOUNS[grammar.kind]
    if "satisfy the grammar" in message:  # masks allow only such tokens, so other filters removed all of them
        return f"No token that the {noun} allows was left to draw: check allowed_token_ids and logit_bias."
    if message.startswith("NoExtension"):
        if grammar.kind in ("lark", "gbnf"):
            return "The grammar matches nothing: a rule refers only to itself."
        return f"The {noun} matches nothing: change it so that at least one output fits."
    if _LIMIT.search(_within(message)[0]):
        return too_large(grammar)
    cause = reason(message)
    if grammar.kind == "regex":  # the message would repeat the only regex
        cause = re.sub(r'^the regex ".*" is not valid: ', "", cause)
    return f"The {noun} does not compile: {cause}."


def too_large(grammar: Grammar) -> str:
    """The message for a grammar that needs too much time or memory."""
    remedy = _SMALLER.get(grammar.kind, "shorten its patterns, enums and limits, and combine fewer of them")
    return f"This {NOUNS[grammar.kind]} is too large: {remedy}."


def reason(message: str) -> str:
    """The cause in at most 300 characters, without a full stop."""
    outer, schema = _within(message)
    text = _LISTING.split(_PLACE.sub("", schema or outer))[0]
    for pattern, words in _REASONS:
        if (match := pattern.search(text)) is not None:
            text = match.expand(words)
            break
    return " ".join(text.split())[:300].rstrip(".")


def _within(message: str) -> tuple[str, str]:
    """The message up to the error of the JSON schema, and that error."""
    outer, _, schema = message.partition("failed to compile JSON schema: ")
    return outer, schema
