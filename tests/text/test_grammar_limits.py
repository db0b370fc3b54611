"""What one grammar may take: memory, time, and the words for a grammar that wants more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from threading import Event, get_ident
from typing import Any

import pytest

from ridgeline.core.draft import Draft
from ridgeline.core.errors import BadGrammar
from ridgeline.core.sampling import Grammar, GrammarKind
from ridgeline.text.grammar import CompiledGrammar, GrammarCompiler, GrammarState
from ridgeline.text.grammar_cache import GrammarCache
from ridgeline.text.tokenizer import Tokenizer
from tests.text.walk import allowed

BOMB = "(((a{50}){50}){50}){50}"
"""6 million repetitions in 23 characters: it used to take 170 MB."""
WIDE = {"type": "object", "properties": {f"a{index}": {"type": "string"} for index in range(1500)}}
DOUBLING = "start: r1\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(1, 60)) + '\nr60: "a"?'
GROWING = r"(.|\n)*a(.|\n){50}"
"""Its lexer has 2^50 states; outputs make them one after the other."""


@pytest.fixture(scope="module")
def compiler(byte_level: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_level, vocab_size=byte_level.vocab_size, end_ids=[2])


@pytest.fixture
def cache(compiler: GrammarCompiler) -> Iterator[GrammarCache]:
    cache = GrammarCache(compiler)
    yield cache
    cache.close()


def follow(state: GrammarState, tokens: int) -> int:
    """Accept allowed tokens, drawn at random; returns how many there were."""
    draw = Random(0)
    for step in range(tokens):
        choices = [token for token in allowed(state) if token != 2]
        if not choices:
            return step
        state.accept([draw.choice(choices)])
    return tokens


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", BOMB, "This regex is too large: reduce its nested repetitions."),
        ("regex", BOMB.replace("50", "90"), "This regex is too large: reduce its nested repetitions."),
        ("lark", f"start: /{BOMB}/", "This grammar is too large: reduce its nested repetitions and ambiguous rules."),
        (
            "lark",
            'start: "a"{1000000}',
            "This grammar is too large: reduce its nested repetitions and ambiguous rules.",
        ),
        ("lark", "start: start", "The grammar matches nothing: a rule refers only to itself."),
        ("regex", r"[^\s\S]", "The regex matches nothing: change it so that at least one output fits."),
        (
            "json_schema",
            json.dumps(WIDE),
            "This schema is too large: shorten its patterns, enums and limits, and combine fewer of them.",
        ),
        ("lark", DOUBLING, "This grammar is too large: reduce its nested repetitions and ambiguous rules."),
    ],
)
def test_a_grammar_that_is_too_large_is_refused_in_words(
    compiler: GrammarCompiler, kind: GrammarKind, source: str, message: str
) -> None:
    """At once, or when an output has come to the place where it is."""
    with pytest.raises(BadGrammar) as caught:
        follow(compiler.compile(Grammar(kind, source)).start(), 100)
    assert caught.value.message == message


def test_what_a_grammar_takes_is_measured_and_bounded(compiler: GrammarCompiler) -> None:
    small = compiler.compile(Grammar("regex", "[a-z]+")).size
    large = compiler.compile(Grammar("regex", "((a{50}){50}){15}")).size
    assert 0 <= small < 1 << 20 < large < 20 << 20


def test_what_outputs_add_is_counted(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(Grammar("regex", GROWING))
    before = compiled.size
    follow(compiled.start(), 400)
    assert compiled.size - before > 1 << 18


def test_a_grammar_that_fails_while_it_runs_leaves_the_cache(cache: GrammarCache) -> None:
    grammar = Grammar("lark", DOUBLING)
    compiled = cache.compile(grammar).result()
    assert cache.compile(grammar).result() is compiled
    with pytest.raises(BadGrammar):
        follow(compiled.start(), 100)
    assert cache.compile(grammar).result() is not compiled


def test_a_refused_grammar_is_not_kept(cache: GrammarCache) -> None:
    grammar = Grammar("regex", "(")
    assert cache.compile(grammar).exception() is not None
    other = cache.compile(Grammar("regex", "a")).result()
    alone = cache.size
    other.size = alone + 1
    assert cache.size == alone + 1, "nothing counts but the other one"


def compiled_of(cache: GrammarCache, *sources: str) -> list[CompiledGrammar]:
    return [cache.compile(Grammar("regex", source)).result() for source in sources]


def test_the_cache_is_bounded_by_bytes_and_keeps_what_was_used_last(compiler: GrammarCompiler) -> None:
    cache = GrammarCache(compiler, max_bytes=8 << 20)
    try:
        first, second, third = compiled_of(cache, "a+", "b+", "c+")
        assert compiled_of(cache, "a+") == [first]
        for compiled in (first, second, third):
            compiled.size = 2 << 20
        assert compiled_of(cache, "d+", "a+")[1] is first
        third.size = 7 << 20  # states of it have made it grow
        compiled_of(cache, "e+")
        assert cache.size <= 8 << 20
        assert compiled_of(cache, "a+", "d+")[0] is first
        assert compiled_of(cache, "b+", "c+") != [second, third]
    finally:
        cache.close()


def test_a_grammar_that_has_grown_is_compiled_anew(cache: GrammarCache) -> None:
    """Its lexer has collected what all its outputs needed."""
    (compiled,) = compiled_of(cache, "a+")
    compiled.size = 1 << 30
    (fresh,) = compiled_of(cache, "a+")
    assert fresh is not compiled and fresh.size < 1 << 20
    assert follow(compiled.start(), 3) == 3, "states that run go on"


def test_compilation_goes_on_beside_the_caller(byte_level: Tokenizer) -> None:
    going, threads = Event(), []

    class Later(GrammarCompiler):
        def compile(self, grammar: Grammar) -> CompiledGrammar:
            threads.append(get_ident())
            assert going.wait(10)
            return super().compile(grammar)

    cache = GrammarCache(Later(byte_level, vocab_size=byte_level.vocab_size, end_ids=[2]))
    try:
        first = cache.compile(Grammar("regex", "a"))
        assert not first.done() and cache.compile(Grammar("regex", "a")) is first
        going.set()
        first.result(10)
        assert cache.compile(Grammar("regex", "a")) is first and threads != [get_ident()] and len(threads) == 1
    finally:
        going.set()
        cache.close()


class Watched(ThreadPoolExecutor):
    """A thread, and what it was asked for."""

    def __init__(self) -> None:
        super().__init__(1)
        self.asked: list[Future[Any]] = []

    def submit(self, *given: Any, **named: Any) -> Future[Any]:
        self.asked.append(super().submit(*given, **named))
        return self.asked[-1]


@pytest.fixture
def thread() -> Iterator[Watched]:
    with Watched() as made:
        yield made


def compiled_by(compiler: GrammarCompiler, thread: Watched, slow_mask_s: float) -> CompiledGrammar:
    compiled = compiler.compile(Grammar("regex", "[ab]{6}"))
    compiled.thread, compiled.slow_mask_s = thread, slow_mask_s
    return compiled


def test_masks_that_take_long_are_made_beside_the_step_loop(compiler: GrammarCompiler, thread: Watched) -> None:
    """The tokens allowed are the same ones; only who makes the mask differs."""
    alone, beside = (compiled_by(compiler, thread, slow_s).start() for slow_s in (60.0, -1.0))
    asked = thread.asked
    for step in range(5):
        choices = allowed(alone)
        alone.accept([choices[step % 2]])
        assert allowed(beside) == choices
        beside.accept([choices[step % 2]])
        assert len(asked) == step + 1
        asked[-1].result(10)
        assert beside.ready
    assert alone.masks(Draft.of([5, 6], ()))[1] == beside.masks(Draft.of([5, 6], ()))[1][: len(alone.mask())]


def test_a_state_is_not_ready_while_its_mask_is_made(compiler: GrammarCompiler, thread: Watched) -> None:
    busy = Event()
    thread.submit(busy.wait, 10)
    state = compiled_by(compiler, thread, -1.0).start()
    assert state.ready
    state.accept(allowed(state)[:1])
    assert not state.ready and not state.finished
    busy.set()
    assert allowed(state) and state.ready


def test_no_draft_is_followed_behind_a_mask_that_took_long(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(Grammar("regex", "[ab]{6}"))
    compiled.slow_mask_s = 60.0
    state = compiled.start()
    tokens = allowed(state)[:1] * 4
    assert len(state.masks(Draft.of(tokens, ()))[0].tokens) == 4
    compiled.slow_mask_s = -1.0
    state.accept(tokens[:1])
    draft, masks = state.masks(Draft.of(tokens, ()))
    assert not draft.tokens and masks == state.mask()


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "(", "The regex does not compile: unclosed group."),
        ("regex", "(?=a)", "look-around, including look-ahead and look-behind, is not supported."),
        ("lark", "start: /(/", 'the regex "(" is not valid: unclosed group.'),
        ("lark", "start: x", 'the rule "x" is not defined: define it.'),
        (
            "lark",
            "start: <foo>",
            "the special token '<foo>' is unknown: use one of the model's, or <[ID]> with its id.",
        ),
        ("json_schema", "false", "it must be an object schema, not true or false."),
        ("json_schema", '{"enum": []}', "an enum or anyOf has no values: add one."),
        (
            "json_schema",
            '{"$ref": "http://x/y"}',
            "$ref 'http://x/y' points outside of the schema: move the definition to $defs.",
        ),
        (
            "json_schema",
            '{"$ref": "#/x"}',
            "a $ref points to '/x', which does not exist: add it or correct the reference.",
        ),
        ("json_schema", '{"type": "text"}', "use string, number, integer, boolean, object, array or null."),
        (
            "json_schema",
            '{"type": "string", "format": "x"}',
            "the format 'x' is not supported: remove it, or write a pattern.",
        ),
        ("json_schema", '{"type": "integer", "multipleOf": 0}', "multipleOf must be greater than 0."),
        ("choice", '["\\ud800"]', "choice holds a lone surrogate: send valid Unicode."),
    ],
)
def test_an_error_names_the_cause_and_the_remedy(
    compiler: GrammarCompiler, kind: GrammarKind, source: str, message: str
) -> None:
    """Not the library's own words for them, nor its listing of a grammar that the caller did not write."""
    with pytest.raises(BadGrammar) as caught:
        compiler.compile(Grammar(kind, source))
    assert caught.value.message.endswith(message), caught.value.message
