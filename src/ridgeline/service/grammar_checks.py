"""Checks whether the engine can enforce a grammar, before the request reaches it."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import Protocol

from ridgeline.core.errors import BadGrammar, Overloaded, UnsupportedField
from ridgeline.core.sampling import Grammar
from ridgeline.text.grammar import COMPILE_S, MAX_SOURCE

REMEMBERED = 4096
"""Maximum cached verdicts; each takes a few hundred bytes."""


class Judge(Protocol):
    """Implemented by text.grammar_worker.GrammarWorker."""

    def judge(self, grammar: Grammar) -> str:
        """Why the grammar is refused; "" if it is accepted. Called from one thread."""

    def close(self) -> None: ...


class GrammarChecks:
    """Compiles each grammar once, one after the other, and caches only the verdict.

    Key: the digest of kind and source. Owner: the service. A verdict is evicted after `remembered` others were used.
    """

    def __init__(self, judge: Judge, *, deadline_s: float = COMPILE_S, remembered: int = REMEMBERED) -> None:
        self._judge = judge
        self._deadline_s, self._remembered = deadline_s, remembered
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._verdicts: OrderedDict[bytes, Future[str]] = OrderedDict()
        self._waiting: Counter[bytes] = Counter()
        """Requests that wait for a verdict."""

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises BadGrammar with the reason for a grammar that cannot be enforced, UnsupportedField if the server has no
        llguidance, Overloaded if too many grammars wait to be compiled. param: the request's field."""
        if len(grammar.source) > MAX_SOURCE:  # refused before the digest is computed
            raise BadGrammar(f"{param} has more than {MAX_SOURCE} characters: shorten it.", param=param)
        key = sha256(f"{grammar.kind}\0{grammar.source}".encode("utf-8", "surrogatepass")).digest()
        verdict = self._verdicts.pop(key, None)
        if verdict is None or (verdict.done() and (verdict.cancelled() or verdict.exception())):
            verdict = self._thread.submit(self._judge.judge, grammar)
        self._verdicts[key] = verdict
        if len(self._verdicts) > self._remembered:
            self._verdicts.popitem(last=False)
        self._waiting[key] += 1
        try:
            reason = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(verdict)), self._deadline_s)
        except UnsupportedField as error:
            raise UnsupportedField(error.message, param=param) from error
        except TimeoutError:
            raise Overloaded(
                f"The grammar was not compiled within {self._deadline_s:g} s, including the wait in the queue: retry later.",
                retry_after_s=self._deadline_s,
            ) from None
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                verdict.cancel()  # no request waits for it; a verdict that is running or done stays
        if reason:
            raise BadGrammar(reason, param=param)

    def close(self) -> None:
        """Cancel waiting compilations and close the judge."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._judge.close()
