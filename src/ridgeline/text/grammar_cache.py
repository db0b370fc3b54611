"""Cache of an engine's compiled grammars, bounded in bytes. Compiles in one thread and computes slow masks in another, outside
of the step loop.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from ridgeline.core.memory import return_free_memory
from ridgeline.core.sampling import Grammar
from ridgeline.text.grammar import CompiledGrammar, GrammarCompiler

MAX_BYTES = 64 << 20
"""Maximum bytes of compiled grammars that are kept for later requests."""

_SMALLEST = 64 << 10
"""Minimum bytes that a grammar counts for; its source may be that long."""
_TRIM = 4 << 20
"""Size of a compiled grammar, in bytes, above which freed memory is returned to the system."""
NICENESS = 5
"""Niceness of compiling threads, so that step loop and event loop have precedence. By Linux's weights (335 for 5, 110 for 10,
1,024 for 0), next to four busy threads on two cores a compiling thread gets a seventh; with 10 it would get a twentieth."""


def _compile_thread() -> ThreadPoolExecutor:
    """One thread of low priority. Hostile grammars delay each other, but not the streams."""
    return ThreadPoolExecutor(1, thread_name_prefix="grammar", initializer=_lower_priority)


def _lower_priority() -> None:
    # On Linux this affects the current thread only.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class GrammarCache:
    """Key: the grammar. Owner: the engine. An entry is removed when it failed or has grown beyond a quarter of `max_bytes`. The
    least recently used are removed while all entries exceed `max_bytes`. Running states keep their compiled grammar until they
    end.
    """

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
        """The compiled grammar; the future is done at once on a cache hit. Its result raises as GrammarCompiler.compile does.

        Call it from the step loop's thread only.
        """
        compiled = self._compiled.pop(grammar, None)
        if compiled is None or _failed(compiled) or _size(compiled) > self._max_bytes // 4:
            compiled = self._thread.submit(self._compile, grammar)
        self._compiled[grammar] = compiled
        self.shrink()
        return compiled

    def close(self) -> None:
        """Cancel all pending compilations."""
        for thread in (self._thread, self._masks):
            thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        compiled = self._compiler.compile(grammar)
        compiled.thread = self._masks
        if compiled.size > _TRIM:
            return_free_memory()
        return compiled

    def shrink(self) -> None:
        """Remove failed entries, then the least recently used. The last entry stays, because it was just requested.

        Call it also when a compilation ends, from the thread that calls `compile`.
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
