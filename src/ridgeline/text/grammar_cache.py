"""Compiled grammars of an engine: made in a thread beside the step loop, as are masks that take long, and kept up to a number
of bytes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from ridgeline.core.memory import return_free_memory
from ridgeline.core.sampling import Grammar
from ridgeline.text.grammar import CompiledGrammar, GrammarCompiler

MAX_BYTES = 64 << 20
"""Bytes of compiled grammars that are kept for later requests."""

_SMALLEST = 64 << 10
"""Bytes that every grammar counts for at least; its source may be as long."""
_TRIM = 4 << 20
"""Bytes of a compiled grammar from which freed memory is given back to the system."""
NICENESS = 5
"""The system prefers the step loop and the event loop to what compiles. By Linux's weights (335 for 5, 110 for 10, 1,024 for 0)
that gets a seventh of two cores which four other threads want, where 10 would leave it a twentieth."""


def _compile_thread() -> ThreadPoolExecutor:
    """One thread of low priority, so that hostile grammars wait for each other and not the streams for them."""
    return ThreadPoolExecutor(1, thread_name_prefix="grammar", initializer=_lower_priority)


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # on Linux it holds for this thread alone


class GrammarCache:
    """Key: the grammar. Owner: the engine. A compiled grammar leaves when it failed, when it has grown beyond a quarter of
    `max_bytes`, or when all of them take more than `max_bytes` and it was used the longest ago. States that run keep theirs
    until they end."""

    def __init__(self, compiler: GrammarCompiler, max_bytes: int = MAX_BYTES) -> None:
        self._compiler = compiler
        self._max_bytes = max_bytes
        self._thread, self._masks = _compile_thread(), _compile_thread()
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes of the compiled grammars that are kept."""
        return sum(map(_size, self._compiled.values()))

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The compiled grammar, done at once when it is kept. Its result raises as GrammarCompiler.compile does.

        Called by one thread only, the step loop's.
        """
        compiled = self._compiled.pop(grammar, None)
        if compiled is None or _failed(compiled) or _size(compiled) > self._max_bytes // 4:
            compiled = self._thread.submit(self._compile, grammar)
        self._compiled[grammar] = compiled
        self.shrink()
        return compiled

    def close(self) -> None:
        """Compile nothing more."""
        for thread in (self._thread, self._masks):
            thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        compiled = self._compiler.compile(grammar)
        compiled.thread = self._masks
        if compiled.size > _TRIM:
            return_free_memory()
        return compiled

    def shrink(self) -> None:
        """Drop what failed, and then what was used the longest ago; the last one stays, as somebody has just asked for it.

        To be called when a grammar has been compiled too, by the thread that calls `compile`.
        """
        for grammar in [grammar for grammar, compiled in self._compiled.items() if _failed(compiled)]:
            del self._compiled[grammar]
        size = self.size
        while size > self._max_bytes and len(self._compiled) > 1:
            _, oldest = self._compiled.popitem(last=False)
            size -= _size(oldest)


def _failed(compiled: Future[CompiledGrammar]) -> bool:
    return compiled.done() and (compiled.exception() is not None or compiled.result().failed)


def _size(compiled: Future[CompiledGrammar]) -> int:
    return max(_SMALLEST, compiled.result().size if compiled.done() and not compiled.exception() else 0)
