"""Structured output: a grammar compiled once to masks over the vocabulary, by llguidance (extra `structured`).

A process of its own compiles a grammar first, to check it before the request goes to the engine (text/grammar_worker.py,
service/grammar_checks.py). The engine keeps compiled grammars in a GrammarCache (text/grammar_cache.py) and starts a state for
every choice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from functools import lru_cache
from typing import Any

import msgspec

from ridgeline.core.draft import Draft
from ridgeline.core.errors import BadGrammar, UnsupportedField
from ridgeline.core.memory import allocated_bytes
from ridgeline.core.sampling import Grammar
from ridgeline.text.control_tokens import nameless
from ridgeline.text.grammar_errors import NOUNS, explain, reason
from ridgeline.text.schema import check_schema, draw_in, read_schema
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.unions import settle_unions

try:
    import llguidance
except ImportError:  # an optional dependency
    llguidance = None  # type: ignore[assignment]

MAX_SOURCE = 1 << 16
"""Most characters of a grammar."""

COMPILE_S = 10.0
"""Seconds within which a grammar must be compiled, those in front of it included."""

WHITESPACE = r"( |\n {0,64}|\n\t{1,16})"
"""Between the tokens of JSON: a space, or a line's end and its indentation. With any blanks small models lose themselves in
them (32 tabs around every colon spent an answer's tokens)."""

# What one grammar may use. The lexer keeps about 170 bytes per expression and up to 2 kB per state, and all states of one
# compiled grammar share a lexer. A schema needs 0.7 expressions per character of its source; a bounded string needs one to
# nine states per character of the output.
_EXPRESSIONS = 50_000
_LEXER_STATES = 50_000
_STEP_FUEL = 20_000
_STEP_ITEMS = 10_000
"""Work of lexer and parser for one mask: together they bound the time that a mask takes to some 20 ms."""

SLOW_MASK_S = 0.001
"""Seconds from which on a state's next mask is made beside the step loop."""

_SAMPLED = 16
"""One mask in so many is measured for what it adds to the lexer."""
_UNKNOWN_SIZE = 8 << 20
"""Bytes that a compiled grammar counts for where the C library does not tell."""


class CompiledGrammar:
    """A grammar over one vocabulary. Its states share one lexer, which grows while they run.

    size: bytes of memory it takes, as measured. failed: a state of it ran into a limit of the shared lexer, so the next one
    would too. thread: where masks that take long are made; None for the thread that asks for them. slow_mask_s: seconds from
    which on a mask takes long.
    """

    def __init__(self, grammar: Grammar, matcher: Any, mask_bytes: int, end_ids: frozenset[int]) -> None:
        self.grammar = grammar
        self.mask_bytes = mask_bytes
        self.end_ids = end_ids
        self.size = 0
        self.failed = False
        self.thread: Executor | None = None
        self.slow_mask_s = SLOW_MASK_S
        self._matcher = matcher

    def start(self) -> GrammarState:
        """A state at the beginning of an output."""
        return GrammarState(self, self._matcher.deep_copy())


class GrammarState:
    """Where one output stands in its grammar. While it is not `ready`, nothing may be asked of it but `finished`."""

    def __init__(self, compiled: CompiledGrammar, matcher: Any) -> None:
        self._compiled = compiled
        self._matcher = matcher
        self._mask: bytes | None = None
        """The mask at the present place, once it is made."""
        self._coming: Future[bytes] | None = None
        """The mask at the present place, while it is made in the grammars' thread."""
        self._slow = False
        self._masks = 0
        self.finished = False
        """Nothing but an end token may follow, or one has come."""

    @property
    def ready(self) -> bool:
        """Whether the next mask is there, or is expected to take less than slow_mask_s."""
        return self._coming is None or self._coming.done()

    def mask(self) -> bytes:
        """Tokens allowed next: little-endian uint32 words, bit t % 32 of word t // 32 for token t of the model's
        vocabulary. End tokens are among them where the output may end. Raises BadGrammar when the grammar outgrew its
        limits: end the request with that message."""
        if self._mask is None:
            self._mask = self._make_mask() if self._coming is None else self._coming.result()
            self._coming = None
        self._fail_on_error()
        return self._mask

    def masks(self, draft: Draft) -> tuple[Draft, bytes]:
        """What of a draft the grammar allows, and the masks behind the last token and behind each node kept, one after the
        other. A node that ends the output is left out, since nothing may be drawn behind it, and so is what follows a mask
        that took long. Raises BadGrammar."""
        tokens, parents = draft.tokens, draft.parents or tuple(range(-1, len(draft.tokens) - 1))
        masks, place = [self.mask()], {-1: -1}
        path: list[int] = []
        for node, token in enumerate(tokens):
            if self._slow:
                break
            if parents[node] not in place:
                continue
            while path and path[-1] != parents[node]:
                path.pop()
                self._matcher.rollback(1)
            above = masks[place[parents[node]] + 1]
            if token in self._compiled.end_ids or not above[token // 8] >> token % 8 & 1:
                continue
            self._matcher.consume_token(token)
            if self._matcher.is_stopped():
                self._matcher.rollback(1)
                continue
            path.append(node)
            place[node] = len(place) - 1
            masks.append(self._make_mask())
        if path:
            self._matcher.rollback(len(path))
        self._fail_on_error()
        kept = [node for node in place if node >= 0]
        above_of = tuple(place[parents[node]] for node in kept) if draft.parents else ()
        return Draft.of([tokens[node] for node in kept], above_of), b"".join(masks)

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that the masks allowed; what follows an end token is not looked at. Raises BadGrammar."""
        for token in tokens:
            if self._matcher.is_stopped() and token in self._compiled.end_ids:
                break
            self._matcher.consume_token(token)
        self._fail_on_error()
        self._mask = None
        self.finished = bool(self._matcher.is_stopped())
        if self._slow and self._compiled.thread is not None and not self.finished:
            self._coming = self._compiled.thread.submit(self._make_mask)

    def _make_mask(self) -> bytes:
        """Make the mask at the matcher's place. One mask in _SAMPLED is measured for the memory it adds, and counts for those
        that are not. Memory of the state alone is among it, so the estimate is too high rather than too low."""
        self._masks += 1
        before = allocated_bytes() if self._masks % _SAMPLED == 0 else None
        started = time.perf_counter()
        mask: bytes = self._matcher.compute_bitmask()
        self._slow = time.perf_counter() - started > self._compiled.slow_mask_s
        if before is not None:
            self._compiled.size += _SAMPLED * max(0, (allocated_bytes() or 0) - before)
        return mask[: self._compiled.mask_bytes]

    def _fail_on_error(self) -> None:
        if self._matcher.is_error():
            self._compiled.failed = True
            raise BadGrammar(explain(self._compiled.grammar, self._matcher.get_error()))


class GrammarCompiler:
    """Compiles grammars over one model's tokens. Keeps none of them."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Sequence[int]) -> None:
        """vocab_size: the model's, padding included. end_ids: tokens that end an output (at least one)."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = [index for index in end_ids if index < vocab_size]  # others are never drawn
        self._vocabulary = lru_cache(1)(self._read_vocabulary)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile, and make the first mask, which is the most expensive one. Takes a few milliseconds as a rule and 0.2 s at
        most, mostly without the interpreter lock: call it from a thread.

        Raises BadGrammar for a grammar that cannot be followed, UnsupportedField without llguidance.
        """
        if len(grammar.source) > MAX_SOURCE:
            raise BadGrammar(
                f"The {NOUNS[grammar.kind]} has {len(grammar.source)} characters, more than {MAX_SOURCE}: shorten it."
            )
        vocabulary = self._vocabulary()
        source = _translate(grammar)
        limits = llguidance.LLParserLimits(
            max_lexer_states=_LEXER_STATES,
            initial_lexer_fuel=_EXPRESSIONS + len(grammar.source),
            step_lexer_fuel=_STEP_FUEL,
            step_max_items=_STEP_ITEMS,
            verbose_errors=False,
        )
        before = allocated_bytes()
        matcher = llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that allows nothing fails only now
        if matcher.is_error():
            raise BadGrammar(explain(grammar, matcher.get_error()))
        compiled = CompiledGrammar(grammar, matcher, (self._vocab_size + 31) // 32 * 4, frozenset(self._end_ids))
        after = allocated_bytes()
        compiled.size = _UNKNOWN_SIZE if before is None or after is None else max(0, after - before)
        return compiled

    def _read_vocabulary(self) -> Any:
        if llguidance is None:
            raise UnsupportedField(
                "Structured output needs llguidance on the server: pip install 'ridgeline[structured]'."
            )
        if not self._end_ids:
            raise UnsupportedField("Structured output needs an end token, and this model's vocabulary has none.")
        content = nameless(msgspec.json.decode(self._tokenizer.backend.to_str()))
        return llguidance.LLTokenizer(
            msgspec.json.encode(content).decode(), n_vocab=self._vocab_size, eos_token=self._end_ids
        )


def _translate(grammar: Grammar) -> str:
    """The library's own form of a grammar."""
    matcher = llguidance.LLMatcher
    try:
        grammar.source.encode()
    except UnicodeEncodeError as error:
        raise BadGrammar(f"The {NOUNS[grammar.kind]} holds a lone surrogate: send valid Unicode.") from error
    if grammar.kind == "json_object":
        return matcher.grammar_from_json_schema('{"type": "object"}', overrides={"whitespace_pattern": WHITESPACE})
    if grammar.kind == "json_schema":
        check_schema(schema := read_schema(grammar.source))
        try:
            source = json.dumps(settle_unions(draw_in(schema)))
            return matcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": WHITESPACE})
        except (ValueError, RecursionError) as error:
            raise BadGrammar(f"The schema is not valid: {reason(str(error))}.") from error
    if grammar.kind == "regex":
        return matcher.grammar_from_regex(grammar.source)
    if grammar.kind == "choice":
        return matcher.grammar_from_lark("start: " + " | ".join(map(quoted, _choices(grammar.source))))
    if "%llguidance" in grammar.source:
        raise BadGrammar("%llguidance sets options of the server's grammar library: remove it.")
    return matcher.grammar_from_lark(grammar.source)


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar, in ASCII (the library's lexer takes no raw control characters)."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _choices(source: str) -> list[str]:
    choices = read_schema(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise BadGrammar("choice must be a list of at least one text, none of them empty.")
    if any("\ud800" <= letter <= "\udfff" for text in choices for letter in text):
        raise BadGrammar("choice holds a lone surrogate: send valid Unicode.")
    return choices
