"""The service's check of grammars: each one is compiled once, beside the streams, and only the verdict is kept."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from threading import Event
from typing import Any

import pytest

from ridgeline.core.errors import BadGrammar, Overloaded, UnsupportedField
from ridgeline.core.sampling import Grammar
from ridgeline.service.grammar_checks import GrammarChecks


class Compiler:
    """Judges when it may, and refuses what holds an x."""

    def __init__(self) -> None:
        self.asked: list[Grammar] = []
        self.closed = False
        self.may = Event()
        self.may.set()
        self.installed = True

    def judge(self, grammar: Grammar) -> str:
        self.asked.append(grammar)
        assert self.may.wait(10)
        if not self.installed:
            raise UnsupportedField("Structured output needs llguidance.")
        return "This regex is too large." if "x" in grammar.source else ""

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def checks(compiler: Any) -> Any:
    checks = GrammarChecks(compiler)
    yield checks
    compiler.may.set()
    checks.close()


async def test_a_verdict_is_remembered(checks: GrammarChecks, compiler: Compiler) -> None:
    for _ in range(3):
        await checks.check(Grammar("regex", "a"), "guided_regex")
        with pytest.raises(BadGrammar, match="too large") as caught:
            await checks.check(Grammar("regex", "x"), "guided_regex")
        assert caught.value.param == "guided_regex"
    assert [grammar.source for grammar in compiler.asked] == ["a", "x"]


async def test_the_kind_belongs_to_the_key(checks: GrammarChecks, compiler: Compiler) -> None:
    await checks.check(Grammar("regex", "a"), "guided_regex")
    await checks.check(Grammar("lark", "a"), "guided_grammar")
    assert len(compiler.asked) == 2


async def test_one_grammar_of_many_requests_is_compiled_once(checks: GrammarChecks, compiler: Compiler) -> None:
    compiler.may.clear()
    waiting = [asyncio.create_task(checks.check(Grammar("regex", "x"), "guided_regex")) for _ in range(12)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting), "the event loop does not wait"
    compiler.may.set()
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, BadGrammar) for error in errors) and len(compiler.asked) == 1


async def test_a_client_that_goes_does_not_take_the_verdict_from_others(
    checks: GrammarChecks, compiler: Compiler
) -> None:
    compiler.may.clear()
    gone, stays = (asyncio.create_task(checks.check(Grammar("regex", "a"), "guided_regex")) for _ in range(2))
    await asyncio.sleep(0.01)
    gone.cancel()
    compiler.may.set()
    await stays
    assert gone.cancelled() and len(compiler.asked) == 1


async def test_who_waits_too_long_is_told_to_come_back(compiler: Any) -> None:
    checks = GrammarChecks(compiler, deadline_s=0.05)
    compiler.may.clear()
    try:
        with pytest.raises(Overloaded, match="within 0.05 s") as caught:
            await checks.check(Grammar("regex", "a"), "guided_regex")
        assert caught.value.retry_after_s > 0
        compiler.may.set()
        async with asyncio.timeout(10):
            while True:
                with suppress(Overloaded):  # the thread has yet to go on
                    await checks.check(Grammar("regex", "a"), "guided_regex")
                    break
        assert len(compiler.asked) == 1, "the work was not in vain"
    finally:
        compiler.may.set()
        checks.close()


async def test_what_nobody_waits_for_is_not_compiled(checks: GrammarChecks, compiler: Compiler) -> None:
    compiler.may.clear()
    waiting = {
        source: [asyncio.create_task(checks.check(Grammar("regex", source), "guided_regex")) for _ in range(2)]
        for source in "abc"
    }
    await asyncio.sleep(0.01)
    for task in (*waiting["b"], waiting["c"][0]):
        task.cancel()
    await asyncio.sleep(0.01)
    compiler.may.set()
    await asyncio.gather(*waiting["a"], waiting["c"][1])
    assert [grammar.source for grammar in compiler.asked] == ["a", "c"]


async def test_verdicts_are_bounded(compiler: Any) -> None:
    checks = GrammarChecks(compiler, remembered=3)
    for source in ("a", "b", "c", "a", "d", "a", "b"):
        await checks.check(Grammar("regex", source), "guided_regex")
    checks.close()
    assert [grammar.source for grammar in compiler.asked] == ["a", "b", "c", "d", "b"]


async def test_a_missing_library_is_no_verdict(checks: GrammarChecks, compiler: Compiler) -> None:
    compiler.installed = False
    with pytest.raises(UnsupportedField) as caught:
        await checks.check(Grammar("regex", "a"), "guided_regex")
    assert caught.value.param == "guided_regex"
    compiler.installed = True
    await checks.check(Grammar("regex", "a"), "guided_regex")
