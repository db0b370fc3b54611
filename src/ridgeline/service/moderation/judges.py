"""Judges of answers: an HTTP endpoint with OpenAI's moderation API, or a Python function."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import aiohttp

from ridgeline.core.errors import ConfigError, shown

_THREADS = 8
"""Texts that a function judges at once."""
_REMEDY = "give the address of an endpoint (https://HOST/v1/moderations), or module:function"


@dataclass(frozen=True, slots=True)
class Verdict:
    """flagged: the text may not be shown, and `replacement` takes its place."""

    flagged: bool = False
    replacement: str = ""


class Judge(Protocol):
    async def judge(self, text: str) -> Verdict:
        """The verdict on a text. Every exception means that there is none."""

    async def close(self) -> None: ...


class EndpointJudge:
    """An endpoint that takes `{"input": TEXT}` and answers `{"results": [{"flagged": true}]}`, as OpenAI's /v1/moderations does. A
    result may also have the member `replacement`, a string."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def judge(self, text: str) -> Verdict:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None))
        async with self._session.post(self._url, json={"input": text}) as answer:
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            return read_results(await answer.json(content_type=None))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def read_results(body: Any) -> Verdict:
    """The verdict in an endpoint's answer. Raises ValueError if it has none."""
    results = body.get("results") if isinstance(body, dict) else None
    if not isinstance(results, list) or not results:
        raise ValueError("the answer has no results")
    for result in results:
        if not isinstance(result, dict) or not isinstance(result.get("flagged"), bool):
            raise ValueError("a result has no member flagged that is true or false")
        if result["flagged"]:
            replacement = result.get("replacement")
            return Verdict(True, replacement if isinstance(replacement, str) else "")
    return Verdict()


class FunctionJudge:
    """A function that takes a text and returns False (it passes), True (flagged), or a replacement.

    A coroutine function runs in the event loop, another one in threads. They are daemons: a function that never returns does not
    keep the server from ending.
    """

    def __init__(self, function: Callable[[str], Any]) -> None:
        self._function = function
        self._free_threads = asyncio.Semaphore(_THREADS)

    async def judge(self, text: str) -> Verdict:
        answer = await (self._function(text) if inspect.iscoroutinefunction(self._function) else self._in_thread(text))
        if isinstance(answer, bool):
            return Verdict(answer)
        if isinstance(answer, str):
            return Verdict(True, answer)
        raise ValueError(f"the function returned {shown(answer)}: return True, False or a replacement")

    async def _in_thread(self, text: str) -> Any:
        await self._free_threads.acquire()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def end(result: Any, error: Exception | None) -> None:
            self._free_threads.release()
            if not answer.done():
                answer.set_result(result) if error is None else answer.set_exception(error)

        def run() -> None:
            result, error = None, None
            try:
                result = self._function(text)
            except Exception as failure:
                error = failure
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(end, result, error)

        threading.Thread(target=run, name="moderation", daemon=True).start()
        return await answer

    async def close(self) -> None: ...


def make_judge(moderation: str, api_key: str | None) -> Judge:
    """The judge that --moderation names. Raises ConfigError."""
    if moderation.startswith(("http://", "https://")):
        return EndpointJudge(moderation, api_key)
    module, colon, name = moderation.partition(":")
    if not (colon and module and name.isidentifier()):
        raise ConfigError(f"--moderation is {moderation!r}: {_REMEDY}.", param="moderation")
    return FunctionJudge(_function(moderation, module, name))


def _function(moderation: str, module: str, name: str) -> Callable[[str], Any] | Callable[[str], Awaitable[Any]]:
    try:
        function = getattr(import_module(module), name)
    except Exception as error:  # whatever the module raises
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"--moderation {moderation} cannot be imported ({reason}): {_REMEDY}. PYTHONPATH says where modules are.",
            param="moderation",
        ) from error
    if not callable(function):
        raise ConfigError(f"--moderation {moderation} is not a function: {_REMEDY}.", param="moderation")
    return function  # type: ignore[no-any-return]
