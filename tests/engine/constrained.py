"""An engine with the fake runner, and grammars that do what a test wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

from ridgeline.core.errors import BadGrammar
from ridgeline.core.sampling import Grammar, SamplingParams
from ridgeline.engine.engine import Engine, Setup
from ridgeline.wire.messages import Submit
from tests.engine.helpers import VOCAB, Bench


class OneTwo:
    """A grammar that allows tokens 1 and 2 and is complete after three of them."""

    ready = True

    def __init__(self) -> None:
        self.seen: list[int] = []

    def mask(self) -> bytes:
        return (0b110).to_bytes(16, "little")

    def accept(self, tokens: Sequence[int]) -> None:
        self.seen.extend(tokens)

    @property
    def finished(self) -> bool:
        return len(self.seen) >= 3


class Broken(OneTwo):
    """A grammar that outgrows its bounds after two tokens."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def mask(self) -> bytes:
        if self._where == "mask" and len(self.seen) >= 2:
            raise BadGrammar("the grammar outgrew its bounds")
        return super().mask()

    def accept(self, tokens: Sequence[int]) -> None:
        super().accept(tokens)
        if self._where == "accept" and len(self.seen) >= 2:
            raise BadGrammar("the grammar outgrew its bounds")


class Compiled:
    def __init__(self, start: Callable[[], OneTwo]) -> None:
        self.start = start


class Grammars:
    """Grammars whose compilation ends when the test says so, or at once."""

    def __init__(self, start: Callable[[Grammar], OneTwo] | None = None, *, at_once: bool = True) -> None:
        self._start = start or (lambda grammar: Broken(grammar.source) if grammar.kind == "lark" else OneTwo())
        self._at_once = at_once
        self.compiling: dict[Grammar, Future[Any]] = {}
        self.closed = False

    def compile(self, grammar: Grammar) -> Future[Any]:
        future = self.compiling.setdefault(grammar, Future())
        if self._at_once and not future.done():
            self.finish(grammar)
        return future

    def finish(self, grammar: Grammar) -> None:
        self.compiling[grammar].set_result(Compiled(lambda: self._start(grammar)))

    def shrink(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def make(**options: Any) -> Engine:
    return engine_of(Bench(**options))


def engine_of(bench: Bench) -> Engine:
    setup = Setup(256, VOCAB, (5,), "toy", 7, {"model": "toy"}, cast(Any, Grammars()))
    return Engine(bench.loop, setup)


def submit(name: str, tokens: list[int], **options: Any) -> Submit:
    return Submit(name, tokens, SamplingParams(**options), 0.0)
