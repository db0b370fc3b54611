"""Structured output: grammars compiled by llguidance (extra `structured`) to masks over the vocabulary.

A separate process first compiles each grammar to check it, before the request goes to the engine (text/grammar_worker.py,
service/grammar_checks.py). The engine keeps compiled grammars in a GrammarCache (text/grammar_cache.py) and starts a state for
each choice.
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
from ridgeline.text.control_tokens import hide_added_tokens
from ridgeline.text.gbnf import gbnf_to_lark
from ridgeline.text.grammar_errors import NOUNS, explain, reason
from ridgeline.text.schema import check_schema, clamp_bounds, read_schema
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.unions import rewrite_unions

try:
    import llguidance
except ImportError:  # an optional dependency
    llguidance = None  # type: ignore[assignment]

MAX_SOURCE = 1 << 16
"""Maximum characters of a grammar."""

COMPILE_S = 10.0
"""Seconds within which a grammar must be compiled, time in the queue included."""

WHITESPACE = r"( |\n {0,64}|\n\t{1,16})"
"""White space between the tokens of JSON: a space, or a line break and indentation. With unlimited white space small models
repeat it (32 tabs around every colon used up an answer's tokens)."""

# Limits of one grammar. The lexer keeps about 170 bytes per expression and up to 2 kB per state, and all states of one
# compiled grammar share a lexer. A schema needs 0.7 expressions per character of its source; a bounded string needs one to
# nine states per character of the output.
_EXPRESSIONS = 50_000
_LEXER_STATES = 50_000
_STEP_FUEL = 20_000
_STEP_ITEMS = 10_000
"""Work of lexer and parser for one mask. Together they bound the time of a mask to some 20 ms."""

SLOW_MASK_S = 0.001
"""Seconds above which a mask counts as slow. After a slow mask, a state computes its next one in a thread."""

_SAMPLED = 16
"""One mask in so many is measured for the memory that it adds to the lexer."""
_UNKNOWN_SIZE = 8 << 20
"""Bytes that a compiled grammar counts for if the C library does not report memory."""


class CompiledGrammar:
    """A grammar over one vocabulary. Its states share one lexer, which grows while they run.

    size: measured bytes of memory. failed: a state exceeded a limit of the shared lexer, so later states would, too. thread:
    computes masks after slow ones; None to compute them in the caller's thread. slow_mask_s: seconds above which a mask is slow.
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
        """A state at the start of an output."""
        return GrammarState(self, self._matcher.deep_copy())


class GrammarState:
    """The position of one output in its grammar. While it is not `ready`, only `finished` may be read."""

    def __init__(self, compiled: CompiledGrammar, matcher: Any) -> None:
        self._compiled = compiled
        self._matcher = matcher
        self._mask: bytes | None = None
        """The mask at the current position, once it is computed."""
        self._pending: Future[bytes] | None = None
        """The mask at the current position, while a thread computes it."""
        self._slow = False
        self._masks = 0
        self.finished = False
        """Only an end token may follow, or one has been accepted."""

    @property
    def ready(self) -> bool:
        """Whether the next mask is computed, or is expected to take less than slow_mask_s."""
        return self._pending is None or self._pending.done()

    def mask(self) -> bytes:
        """Tokens allowed next: little-endian uint32 words, bit t % 32 of word t // 32 for token t of the model's vocabulary.

        End tokens are included where the output may end. Raises BadGrammar when the grammar exceeds its limits: end the request
        with that message.
        """
        if self._mask is None:
            self._mask = self._make_mask() if self._pending is None else self._pending.result()
            self._pending = None
        self._fail_on_error()
        return self._mask

    def masks(self, draft: Draft) -> tuple[Draft, bytes]:
        """The part of a draft that the grammar allows, and the masks after the last token and after each kept node, joined.

        A node that ends the output is left out, because no token is drawn after it. So are nodes after a slow mask. Raises
        BadGrammar.
        """
        tokens, parents = draft.tokens, draft.parents or tuple(range(-1, len(draft.tokens) - 1))
        masks, kept_index = [self.mask()], {-1: -1}
        path: list[int] = []
        for node, token in enumerate(tokens):
            if self._slow:
                break
            if parents[node] not in kept_index:
                continue
            while path and path[-1] != parents[node]:
                path.pop()
                self._matcher.rollback(1)
            parent_mask = masks[kept_index[parents[node]] + 1]
            if token in self._compiled.end_ids or not parent_mask[token // 8] >> token % 8 & 1:
                continue
            self._matcher.consume_token(token)
            if self._matcher.is_stopped():
                self._matcher.rollback(1)
                continue
            path.append(node)
            kept_index[node] = len(kept_index) - 1
            masks.append(self._make_mask())
        if path:
            self._matcher.rollback(len(path))
        self._fail_on_error()
        kept = [node for node in kept_index if node >= 0]
        kept_parents = tuple(kept_index[parents[node]] for node in kept) if draft.parents else ()
        return Draft.of([tokens[node] for node in kept], kept_parents), b"".join(masks)

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by tokens that the masks allowed. Tokens after an end token are ignored. Raises BadGrammar."""
        for token in tokens:
            if self._matcher.is_stopped() and token in self._compiled.end_ids:
                break
            self._matcher.consume_token(token)
        self._fail_on_error()
        self._mask = None
        self.finished = bool(self._matcher.is_stopped())
        if self._slow and self._compiled.thread is not None and not self.finished:
            self._pending = self._compiled.thread.submit(self._make_mask)

    def _make_mask(self) -> bytes:
        """Compute the mask at the matcher's position.

        One mask in _SAMPLED is measured for the memory that it adds, and stands for all others. The measurement includes memory
        of this state, so the estimate tends to be too high.
        """
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
    """Compiles grammars for one model's tokens. Does not keep them."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Sequence[int]) -> None:
        """vocab_size: the model's, with padding. end_ids: tokens that end an output (at least one)."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = [index for index in end_ids if index < vocab_size]  # others are never drawn
        self._vocabulary = lru_cache(1)(self._read_vocabulary)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar and compute its first mask, which is the most expensive one.

        Usually takes a few milliseconds, and 0.2 s at most, mostly without the interpreter lock. Call it from a thread. Raises
        BadGrammar for a grammar that is not accepted, UnsupportedField without llguidance.
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
        content = hide_added_tokens(msgspec.json.decode(self._tokenizer.backend.to_str()))
        return llguidance.LLTokenizer(
            msgspec.json.encode(content).decode(), n_vocab=self._vocab_size, eos_token=self._end_ids
        )


def _translate(grammar: Grammar) -> str:
    """A grammar in the library's own format."""
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
            source = json.dumps(rewrite_unions(clamp_bounds(schema)))
            return matcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": WHITESPACE})
        except (ValueError, RecursionError) as error:
            raise BadGrammar(f"The schema is not valid: {reason(str(error))}.") from error
    if grammar.kind == "regex":
        return matcher.grammar_from_regex(grammar.source)
    if grammar.kind == "choice":
        return matcher.grammar_from_lark("start: " + " | ".join(map(lark_literal, _choices(grammar.source))))
    if grammar.kind == "gbnf":
        return matcher.grammar_from_lark(gbnf_to_lark(grammar.source))
    if "%llguidance" in grammar.source:
        raise BadGrammar("%llguidance sets options of the server's grammar library: remove it.")
    return matcher.grammar_from_lark(grammar.source)


def lark_literal(text: str) -> str:
    """A text as a literal of a Lark grammar, in ASCII: the library's lexer does not accept raw control characters."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _choices(source: str) -> list[str]:
    choices = read_schema(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise BadGrammar("choice must be a list of at least one text, none of them empty.")
    if any("\ud800" <= letter <= "\udfff" for text in choices for letter in text):
        raise BadGrammar("choice holds a lone surrogate: send valid Unicode.")
    return choices
