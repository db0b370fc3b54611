"""Sampling parameters of a request: one immutable value, checked when it is made."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal

from ridgeline.core.dry import Dry
from ridgeline.core.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_IDS = 16
"""Maximum stop ids of a device row, the model's end tokens included. A request with more is refused."""

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]
Pooling = Literal["last", "mean", "cls"]
"""Tokens whose hidden states make an embedding: the last one, all (their mean), or the first one."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output. `source` is the schema (JSON text), pattern, JSON list of choices, Lark text, or GBNF text."""

    kind: GrammarKind
    source: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a request ends.

    Temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. Penalties follow OpenAI
    (presence, frequency: subtracted once, or per occurrence, of tokens in the *output*) and CTRL (repetition: divides
    positive and multiplies negative logits of tokens in prompt or output; Keskar et al. 2019, section 4.1).
    `logprobs` / `prompt_logprobs`: None, or the number of alternatives per token (0..20) in addition to the token itself.
    `seed` None draws one per request. `max_tokens` None means up to the context's end. `stop` may be given as one
    string, `logit_bias` as a dict of token id to number, every tuple as a list. `bad_word_ids`: the tokens of words that are not
    drawn (text.words.bad_word_ids). With `pooling` no token is drawn: the request ends
    with the sum of the hidden states of these prompt tokens. Raises RequestError naming the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    dry: Dry | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # otherwise each letter would become a stop string
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, dict):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        for name, noun, item_type in _LISTS:
            object.__setattr__(self, name, _tuple(name, getattr(self, name), noun, item_type))
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}: give True or False.", param=name)
        if not isinstance(self.grammar, (Grammar, NoneType)):
            raise RequestError(f"grammar is {self.grammar!r}: give a Grammar(kind, source).", param="grammar")
        if not isinstance(self.dry, (Dry, NoneType)):
            raise RequestError(f"dry is {self.dry!r}: give a Dry(multiplier).", param="dry")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty, so no token can be drawn: add token ids, or leave the field out.",
                param="allowed_token_ids",
            )
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, exclusive_low=True)
        _integer("top_k", self.top_k, -1, 1 << 20)
        _integer("n", self.n, 1, 128)
        _integer("min_tokens", self.min_tokens, 0, 1 << 30)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 1 << 30)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}: lower min_tokens.",
                    param="min_tokens",
                )
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        for word in self.bad_word_ids:
            if not word or not all(_is(token, int) for token in word):
                raise RequestError(f"bad_word_ids has {word!r}: give token ids, at least one.", param="bad_word_ids")
        for token, bias in self.logit_bias:
            _integer("logit_bias", token, 0, 1 << 30)
            _number("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def fused(self) -> bool:
        """The draw needs only temperature, top_k, top_p and min_p: no logits processor (a grammar is one too, but `grammar` is not
        read here) and no log-probabilities."""
        biased = self.penalized or self.logit_bias or self.min_tokens or self.allowed_token_ids is not None
        return not biased and self.logprobs is None


_LISTS: tuple[tuple[str, str, type], ...] = (
    ("stop", "strings", str),
    ("stop_token_ids", "token ids", int),
    ("allowed_token_ids", "token ids", int),
    ("logit_bias", "pairs of a token id and a number", tuple),
    ("bad_word_ids", "lists of token ids", tuple),
)
"""Fields with several values: name, noun of the values for messages, type of the values."""


def _tuple(name: str, value: Any, noun: str, item_type: type) -> tuple[Any, ...] | None:
    """The values of such a field as a tuple. Checks types only, because a request may have thousands of token ids."""
    if value is None:
        return None if name == "allowed_token_ids" else ()
    items = (
        tuple(tuple(item) if isinstance(item, list) else item for item in value)
        if isinstance(value, (tuple, list))
        else None
    )
    wrong_types = (
        items is not None and set(map(type, items)) - {item_type} and not all(_is(item, item_type) for item in items)
    )
    if items is None or wrong_types or (name == "logit_bias" and set(map(len, items)) - {2}):
        raise RequestError(f"{name} is {reprlib.repr(value)}: give a list of {noun}.", param=name)
    return items


def _is(value: Any, expected: type) -> bool:
    return isinstance(value, expected) and not isinstance(value, bool)


def _number(name: str, value: float, low: float, high: float, *, exclusive_low: bool = False) -> None:
    finite = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not finite or not low <= value <= high or (exclusive_low and value == low):
        bound = "above" if exclusive_low else "at least"
        raise RequestError(f"{name} is {value!r}: give a number {bound} {low:g} and at most {high:g}.", param=name)


def _integer(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}: give a whole number from {low} to {high}.", param=name)
