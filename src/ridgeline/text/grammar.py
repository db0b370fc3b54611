"""Structured output: a constraint compiled once to masks over the vocabulary, by llguidance (extra `structured`).

The service checks a grammar before the request goes to the engine; the engine starts a state of it for every choice.
Compiling takes a millisecond as a rule and tens of them for large schemas, without the interpreter lock: call `check`
from a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from ridgeline.core.draft import Draft
from ridgeline.core.errors import BadGrammar, UnsupportedField
from ridgeline.core.sampling import Grammar
from ridgeline.text.schema import check_schema, draw_in, read_schema
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.unions import settle_unions

try:
    import llguidance
except ImportError:  # an optional dependency
    llguidance = None  # type: ignore[assignment]

MAX_SOURCE = 1 << 16
"""Characters of a grammar: bounds the time to compile one (about a second for the worst we found)."""

WHITESPACE = r"( |\n {0,64}|\n\t{1,16})"
"""Between the tokens of JSON: a space, or a line's end and its indentation. With any blanks small models lose themselves in
them (32 tabs around every colon spent an answer's tokens)."""

_LISTING = re.compile(r"\n\s*\d+ \| ")
_COMPILED = 64
_PRIVATE = "\ue000"
"""A character of names that no text holds."""
_LEXER_STATES = 50_000
"""A state takes 1 to 2 kB, so a grammar stays below 100 MB."""


class GrammarState:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: Any, mask_bytes: int, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._end_ids = end_ids

    @property
    def finished(self) -> bool:
        """Nothing but an end token may follow, or one has come."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> bytes:
        """Tokens allowed next: little-endian uint32 words, bit t % 32 of word t // 32 for token t of the model's
        vocabulary. End tokens are among them where the output may end. Raises BadGrammar when the grammar outgrew its
        limits: end the request with that message."""
        mask: bytes = self._matcher.compute_bitmask()
        self._fail_on_error()
        return mask[: self._mask_bytes]

    def masks(self, draft: Draft) -> tuple[Draft, bytes]:
        """What of a draft the grammar allows, and the masks behind the last token and behind each node kept, one after the
        other. A node that ends the output is left out, since nothing may be drawn behind it. Raises BadGrammar."""
        tokens, parents = draft.tokens, draft.parents or tuple(range(-1, len(draft.tokens) - 1))
        masks, place = [self.mask()], {-1: -1}
        path: list[int] = []
        for node, token in enumerate(tokens):
            if parents[node] not in place:
                continue
            while path and path[-1] != parents[node]:
                path.pop()
                self._matcher.rollback(1)
            above = masks[place[parents[node]] + 1]
            if token in self._end_ids or not above[token // 8] >> token % 8 & 1:
                continue
            self._matcher.consume_token(token)
            if self.finished:
                self._matcher.rollback(1)
                continue
            path.append(node)
            place[node] = len(place) - 1
            masks.append(self.mask())
        if path:
            self._matcher.rollback(len(path))
        self._fail_on_error()
        kept = [node for node in place if node >= 0]
        above_of = tuple(place[parents[node]] for node in kept) if draft.parents else ()
        return Draft.of([tokens[node] for node in kept], above_of), b"".join(masks)

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that the masks allowed; what follows an end token is not looked at. Raises BadGrammar."""
        for token in tokens:
            if self.finished and token in self._end_ids:
                break
            self._matcher.consume_token(token)
        self._fail_on_error()

    def _fail_on_error(self) -> None:
        if self._matcher.is_error():
            raise BadGrammar(f"The output left its grammar: {_reason(self._matcher.get_error())}")


class GrammarCompiler:
    """Grammars over one model's tokens. Keeps the last 64 compiled ones."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Sequence[int]) -> None:
        """vocab_size: the model's, padding included. end_ids: tokens that end an output (at least one)."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = [index for index in end_ids if index < vocab_size]  # others are never drawn
        self._vocabulary = lru_cache(1)(self._read_vocabulary)
        self._compiled = lru_cache(_COMPILED)(self._compile)

    def check(self, grammar: Grammar, *, param: str = "response_format") -> None:
        """Raises BadGrammar with the reason for a grammar that the engine could not follow, UnsupportedField when the
        server was installed without llguidance. `param`: the request's field."""
        try:
            self._compiled(grammar)
        except (BadGrammar, UnsupportedField) as error:
            raise type(error)(error.message, param=param) from error

    def first_bad(self, grammars: Sequence[Grammar]) -> tuple[int, str] | None:
        """The first of some grammars that the engine could not follow, and why. None of them is kept."""
        for place, grammar in enumerate(grammars):
            try:
                self._compile(grammar)
            except BadGrammar as error:
                return place, error.message
        return None

    def start(self, grammar: Grammar) -> GrammarState:
        """A fresh state. Raises as `check` does."""
        return GrammarState(
            self._compiled(grammar).deep_copy(), (self._vocab_size + 31) // 32 * 4, frozenset(self._end_ids)
        )

    def _read_vocabulary(self) -> Any:
        if llguidance is None:
            raise UnsupportedField(
                "Structured output needs llguidance on the server: pip install 'ridgeline[structured]'."
            )
        if not self._end_ids:
            raise UnsupportedField("Structured output needs an end token, and this model's vocabulary has none.")
        content = _nameless(msgspec.json.decode(self._tokenizer.backend.to_str()))
        return llguidance.LLTokenizer(
            msgspec.json.encode(content).decode(), n_vocab=self._vocab_size, eos_token=self._end_ids
        )

    def _compile(self, grammar: Grammar) -> Any:
        if len(grammar.source) > MAX_SOURCE:
            raise BadGrammar(f"The grammar has {len(grammar.source)} characters, more than {MAX_SOURCE}: shorten it.")
        vocabulary = self._vocabulary()
        limits = llguidance.LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
        matcher = llguidance.LLMatcher(vocabulary, _translate(grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that allows nothing fails only now
        if matcher.is_error():
            raise BadGrammar(f"The {grammar.kind} does not compile: {_reason(matcher.get_error())}")
        return matcher


def _translate(grammar: Grammar) -> str:
    """The library's own form of a grammar."""
    matcher = llguidance.LLMatcher
    try:
        grammar.source.encode()
    except UnicodeEncodeError as error:
        raise BadGrammar(f"The {grammar.kind} holds a lone surrogate: send valid Unicode.") from error
    if grammar.kind == "json_object":
        return matcher.grammar_from_json_schema('{"type": "object"}', overrides={"whitespace_pattern": WHITESPACE})
    if grammar.kind == "json_schema":
        check_schema(schema := read_schema(grammar.source))
        try:
            source = json.dumps(settle_unions(draw_in(schema)))
            return matcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": WHITESPACE})
        except (ValueError, RecursionError) as error:
            raise BadGrammar(f"The schema is not valid: {_reason(str(error))}") from error
    if grammar.kind == "regex":
        return matcher.grammar_from_regex(grammar.source)
    if grammar.kind == "choice":
        return matcher.grammar_from_lark("start: " + " | ".join(map(quoted, _choices(grammar.source))))
    if "%llguidance" in grammar.source:
        raise BadGrammar("%llguidance sets options of the server's grammar library: remove it.")
    return matcher.grammar_from_lark(grammar.source)


def _nameless(content: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json whose added tokens have names that no text holds; grammars and masks know them by their ids.

    Where a grammar leaves one text (a constant, say), the library tokenizes it and allows that token alone: of the text of an
    added token it would allow the added token, and then refuse it, as the grammar asks for letters.
    """
    model, tokens = content["model"], content["added_tokens"]
    names = {
        token["content"]: f"{token['content'][:1]}{_PRIVATE}{token['content'][1:]}" for token in tokens if _tag(token)
    }
    names.pop(model.get("unk_token"), None)  # the model itself looks for it by its name
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): index for name, index in model["vocab"].items()}
    else:  # of pieces with their scores
        model["vocab"] = [[names.get(name, name), *rest] for name, *rest in model["vocab"]]
    if "merges" in model:  # some make an added token of its letters
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    for token in tokens:
        token["content"] = names.get(token["content"], token["content"])
    return content


def _tag(token: dict[str, Any]) -> bool:
    """Whether the library takes an added token for more than its text."""
    name: str = token["content"]
    return token["special"] or (name.startswith("<") and name.endswith(">"))


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar, in ASCII (the library's lexer takes no raw control characters)."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _choices(source: str) -> list[str]:
    choices = read_schema(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise BadGrammar("choice must be a list of at least one text, none of them empty.")
    return choices


def _reason(message: str) -> str:
    if message.startswith("NoExtension"):
        return "it matches no text"
    if "satisfy the grammar" in message:  # masks allow nothing else, so nothing was left to draw
        return "no token that it allows was left to draw; allowed_token_ids may exclude them all"
    if "coerce_one_of" in message:  # an option of the library's that no caller can reach
        return (
            "oneOf is supported only where it is plain that its branches exclude each other: write anyOf, or give each a "
            "required property with a const of its own"
        )
    _, within, schema = message.partition("failed to compile JSON schema: ")
    if within:  # behind it the library lists the grammar, which need not be the caller's
        return " ".join(_LISTING.split(schema)[0].split())[:300]
    return " ".join(message.split())[:300]
