"""Readers of JSON values. Each describes what it expects and refuses other values, naming the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ridgeline.core.errors import RequestError, UnsupportedField, shown
from ridgeline.core.sampling import Grammar, GrammarKind
from ridgeline.service.json_values import decode_json
from ridgeline.text.gbnf import looks_like_gbnf
from ridgeline.text.grammar import MAX_SOURCE

UNBOUNDED = 1 << 30
"""A limit beyond the size of any body; messages do not mention it."""


class Reader(Protocol):
    """Checks one value. `expects` completes the sentence "expected ..."."""

    @property
    def expects(self) -> str: ...

    def read(self, name: str, value: Any) -> Any: ...


def wrong(name: str, value: Any, expects: str) -> RequestError:
    """The error for a value of the wrong type or out of range."""
    return RequestError(f"{name} is {shown(value)}: expected {expects}.", param=name)


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float
    above: bool = False

    @property
    def expects(self) -> str:
        return f"a number {'above' if self.above else 'from'} {self.low:g} {'and at most' if self.above else 'to'} {self.high:g}"

    def read(self, name: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (
            not is_number
            or not self.low <= value <= self.high
            or (self.above and value == self.low)
            or math.isnan(value)
        ):
            raise wrong(name, value, self.expects)
        return float(value)


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int

    @property
    def expects(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def read(self, name: str, value: Any) -> int:
        if not _is_integer(value) or not self.low <= value <= self.high:
            raise wrong(name, value, self.expects)
        return int(value)


@dataclass(frozen=True, slots=True)
class Boolean:
    expects: str = "true or false"

    def read(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise wrong(name, value, self.expects)
        return value


@dataclass(frozen=True, slots=True)
class Text:
    max_length: int

    @property
    def expects(self) -> str:
        return "a string" + (f" of at most {self.max_length} characters" if self.max_length < UNBOUNDED else "")

    def read(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > self.max_length:
            raise wrong(name, value, self.expects)
        return value


@dataclass(frozen=True, slots=True)
class OneOf:
    values: tuple[str, ...]

    @property
    def expects(self) -> str:
        return "one of " + ", ".join(f'"{value}"' for value in self.values)

    def read(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.values:
            raise wrong(name, value, self.expects)
        return value


@dataclass(frozen=True, slots=True)
class Texts:
    """A list of non-empty strings. With `single`, a string stands for a list of one."""

    max_items: int
    max_length: int = 1024
    single: bool = True

    @property
    def expects(self) -> str:
        plural = f"a list of at most {self.max_items} strings, none of them empty or above {self.max_length} characters"
        return "a string or " + plural if self.single else plural

    def read(self, name: str, value: Any) -> tuple[str, ...]:
        items = [value] if self.single and isinstance(value, str) else value
        if not isinstance(items, list) or len(items) > self.max_items:
            raise wrong(name, value, self.expects)
        if not all(isinstance(item, str) and 0 < len(item) <= self.max_length for item in items):
            raise wrong(name, value, self.expects)
        return tuple(items)


@dataclass(frozen=True, slots=True)
class TokenIds:
    max_items: int

    @property
    def expects(self) -> str:
        return "a list of " + (f"at most {self.max_items} token ids" if self.max_items < UNBOUNDED else "token ids")

    def read(self, name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > self.max_items:
            raise wrong(name, value, self.expects)
        if not all(_is_integer(item) and 0 <= item < 1 << 31 for item in value):
            raise wrong(name, value, self.expects)
        return tuple(value)


@dataclass(frozen=True, slots=True)
class Biases:
    max_items: int
    expects: str = "an object that maps token ids to numbers from -100 to 100"

    def read(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, dict) or len(value) > self.max_items:
            raise wrong(name, value, f"{self.expects}, with at most {self.max_items} entries")
        pairs = []
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise wrong(f"{name}.{key}"[:80], bias, "a token id as the key")
            pairs.append((int(key), Number(-100, 100).read(f"{name}.{key}", bias)))
        return tuple(pairs)


@dataclass(frozen=True, slots=True)
class Record:
    """An object. known: readers of its members. open: accept other members."""

    known: dict[str, Reader]
    open: bool = False

    @property
    def expects(self) -> str:
        return "an object" + (" with " + ", ".join(self.known) if self.known else "")

    def read(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(name, value, self.expects)
        unknown = [] if self.open else [key for key in value if key not in self.known]
        if unknown:
            raise RequestError(
                f"{name} has the unknown member {unknown[0][:40]!r}: remove it. It may have {', '.join(self.known)}.",
                param=name,
            )
        return {
            key: self.known[key].read(f"{name}.{key}", member) if key in self.known else member
            for key, member in value.items()
            if member is not None
        }


@dataclass(frozen=True, slots=True)
class Items:
    """A list of at most `max_items` values, each read by `item`."""

    item: Reader
    max_items: int
    min_items: int = 0

    @property
    def expects(self) -> str:
        return f"a list of {self.min_items} to {self.max_items} items, each {self.item.expects}"

    def read(self, name: str, value: Any) -> list[Any]:
        if not isinstance(value, list) or not self.min_items <= len(value) <= self.max_items:
            raise wrong(name, value, self.expects)
        return [self.item.read(f"{name}[{index}]", element) for index, element in enumerate(value)]


@dataclass(frozen=True, slots=True)
class Special:
    """A reader made of a function, for a field with a format of its own."""

    expects: str
    function: Callable[[str, Any], Any]

    def read(self, name: str, value: Any) -> Any:
        return self.function(name, value)


@dataclass(frozen=True, slots=True)
class Refused:
    """A field of the API that is not supported. Only values that change nothing are accepted.

    why: the reason; "" if the name is clear enough. neutral: the accepted values.
    """

    why: str = ""
    neutral: tuple[Any, ...] = ()

    @property
    def expects(self) -> str:
        return " or ".join(("no value", *map(json_text, self.neutral)))

    def read(self, name: str, value: Any) -> None:
        if not any(type(value) is type(neutral) and value == neutral for neutral in self.neutral):
            reason = f" ({self.why})" if self.why else ""
            remedy = " or send ".join(("remove it", *map(json_text, self.neutral)))
            raise UnsupportedField(f"`{name}` is not supported{reason}; {remedy}.", param=name)


_FORMAT = Record({"name": Text(256), "description": Text(UNBOUNDED), "strict": Boolean()}, open=True)
"""Members of a JSON schema beside the schema."""


def read_response_format(name: str, value: Any) -> Grammar | None:
    """OpenAI's `response_format`; None for text."""
    if not isinstance(value, dict):
        raise wrong(name, value, "an object with the member type")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object", "")
    if kind != "json_schema":
        raise wrong(f"{name}.type", kind, 'one of "text", "json_object", "json_schema"')
    json_schema = value.get("json_schema")
    if not isinstance(json_schema, dict):
        raise wrong(f"{name}.json_schema", json_schema, "an object with name and schema")
    _FORMAT.read(f"{name}.json_schema", json_schema)
    return read_schema(f"{name}.json_schema.schema", json_schema.get("schema"))


def read_schema(name: str, value: Any) -> Grammar:
    """A JSON schema, given as an object or as JSON text."""
    if isinstance(value, str):
        if len(value) > MAX_SOURCE:
            raise RequestError(f"{name} has {len(value)} characters, more than {MAX_SOURCE}: shorten it.", param=name)
        try:
            value = decode_json(value)
        except RecursionError:
            raise RequestError(f"{name} is nested too deeply: use fewer levels.", param=name) from None
        except msgspec.DecodeError as error:
            raise RequestError(f"{name} is not valid JSON: {error}.", param=name) from None
    if not isinstance(value, (dict, bool)):
        raise wrong(name, value, "a JSON schema (an object)")
    return Grammar("json_schema", json_text(value))


def read_pattern(kind: GrammarKind) -> Callable[[str, Any], Grammar]:
    """A regex or Lark grammar given as a string."""

    def read(name: str, value: Any) -> Grammar:
        text = Text(100_000).read(name, value)
        if not text:
            raise wrong(name, value, "a string that is not empty")
        return Grammar(kind, text)

    return read


def read_grammar(name: str, value: Any) -> Grammar:
    """A grammar in GBNF or Lark, given as a string."""
    text = read_pattern("lark")(name, value)
    return Grammar("gbnf", text.source) if looks_like_gbnf(text.source) else text


def read_choices(name: str, value: Any) -> Grammar:
    choices = Texts(max_items=1000, single=False).read(name, value)
    if not choices:
        raise wrong(name, value, "at least one choice")
    return Grammar("choice", json_text(choices))


def read_breakers(name: str, value: Any) -> tuple[str, ...]:
    """`dry_sequence_breakers`: a list of strings, or, as text-generation-webui sends it, the JSON text of one, with or without its
    brackets."""
    if isinstance(value, str):
        try:
            value = decode_json(value if value.lstrip().startswith("[") else f"[{value}]")
        except (RecursionError, msgspec.DecodeError):
            raise wrong(name, value, "a list of strings, or such a list as JSON text") from None
    return Texts(max_items=64, max_length=64, single=False).read(name, value)


_CONSTRAINTS: dict[str, Callable[[str, Any], Grammar]] = {
    "json": read_schema,
    "regex": read_pattern("regex"),
    "grammar": read_grammar,
    "choice": read_choices,
}


def read_structured_outputs(name: str, value: Any) -> Grammar | None:
    """vLLM's `structured_outputs`: one of json, json_object, regex, choice, grammar (GBNF or Lark)."""
    known = (*_CONSTRAINTS, "json_object")
    if not isinstance(value, dict) or not set(value) <= set(known):
        raise wrong(name, value, "an object with one of " + ", ".join(known))
    present = [key for key in value if value[key] is not None]
    if len(present) > 1:
        raise RequestError(f"{name} has {' and '.join(present)}: send only one of them.", param=name)
    for key in present:
        if key == "json_object":
            return Grammar("json_object", "") if Boolean().read(f"{name}.{key}", value[key]) else None
        return _CONSTRAINTS[key](f"{name}.{key}", value[key])
    return None
