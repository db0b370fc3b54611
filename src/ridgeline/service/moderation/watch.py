"""Holds back, releases and withdraws the text of an answer as a judge says.

Each choice is judged as a whole: its text from the beginning, as the model wrote it, with reasoning and tool calls. A judgement is
due when the text has grown by a window, and when the choice has ended. One judgement of a choice runs at a time, and covers what
there is when it begins. The last piece of a choice, with its finish, always waits for the verdict on all of the text.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from ridgeline.core.config import ServiceConfig
from ridgeline.core.loop_time import LoopTimeout
from ridgeline.service.moderation.judges import Judge, Verdict, make_judge
from ridgeline.service.piece import CONTENT_FILTER, Piece, Withdrawal

Batches = AsyncGenerator[list[Piece], None]
Judgement = Coroutine[Any, Any, Verdict | None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rule:
    """window: characters after which a text is judged again. holds: text is sent only when it has passed."""

    window: float
    holds: bool


class Source(Protocol):
    """An answer while it grows."""

    def batches(self) -> Batches: ...

    def released(self) -> None:
        """Text that was held back is sent now."""

    def withdraw(self, index: int) -> None:
        """Withdraw a choice, and end it if it still runs."""


class Moderation:
    """What an answer passes through. The default lets it pass."""

    def watch(self, source: Source, choices: int) -> Batches:
        """The pieces that may be sent. choices: of the answer."""
        return source.batches()

    async def close(self) -> None: ...


NO_MODERATION = Moderation()


class Moderator(Moderation):
    """A judge and the rule by which it judges.

    timeout_s: after which a judgement has failed. fails_open: a text passes if its judgement fails. keep_alive_s: an empty list is
    released after a silence of so many seconds. on_judgement: called with "passed", "flagged" or "failed".
    """

    def __init__(self, judge: Judge, config: ServiceConfig, on_judgement: Callable[[str], None]) -> None:
        self._judge, self._rule, self._on_judgement = judge, read_rule(config), on_judgement
        self._timeout_s, self._keep_alive_s = config.moderation_timeout_s, config.keep_alive_s
        self._fails_open = config.moderation_failure == "open"

    async def watch(self, source: Source, choices: int) -> Batches:
        answer = _Answer([_Choice(self._rule) for _ in range(choices)], self._verdict, source)
        batches = source.batches()
        reading: asyncio.Task[list[Piece] | None] | None = _start(batches)
        clock = asyncio.get_running_loop().time
        released_at = clock()
        try:
            while answer.open:
                waits = {*answer.judging, *([reading] if reading is not None else [])}
                await asyncio.wait(waits, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
                released = answer.take_verdicts()
                if reading is not None and reading.done():
                    batch = reading.result()
                    reading = None if batch is None else _start(batches)
                    released += answer.take(batch or [])
                if released or clock() - released_at >= self._keep_alive_s:
                    released_at = clock()
                    yield released
        finally:
            tasks = [*answer.judging, *([reading] if reading is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await batches.aclose()

    async def _verdict(self, text: str) -> Verdict | None:
        """None: the judge gave no verdict, and the text may not pass without."""
        try:
            async with LoopTimeout(self._timeout_s):
                verdict = await self._judge.judge(text)
        except Exception as error:  # whatever a judge raises
            reason = f"no verdict after {self._timeout_s:g} s" if isinstance(error, TimeoutError) else repr(error)
            log.warning("the moderation judge failed: %s", reason)
            self._on_judgement("failed")
            return Verdict() if self._fails_open else None
        self._on_judgement("flagged" if verdict.flagged else "passed")
        return verdict

    async def close(self) -> None:
        await self._judge.close()


def _start(batches: Batches) -> asyncio.Task[list[Piece] | None]:
    async def read() -> list[Piece] | None:
        return await anext(batches, None)

    return asyncio.get_running_loop().create_task(read())


class _Choice:
    """One choice: its text, how much of it has passed, and what waits for a verdict."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._held: deque[tuple[int, Piece]] = deque()
        """Each with the length of the text up to its end."""
        self.text = ""
        self._passed = self._asked = 0
        """Characters that have passed, and those of the last judgement."""
        self._finished = False
        self.settled = False
        """Its last piece was released."""

    def take(self, piece: Piece) -> list[Piece]:
        """Take the next piece. Returns what may be sent."""
        if self.settled:
            return []
        self.text += piece.text
        self._finished = bool(piece.finish)
        if self._rule.holds or self._finished:
            self._held.append((len(self.text), piece))
            return self._release()
        return [piece]

    def ask(self) -> str | None:
        """The text to judge now; None: no judgement is due."""
        new = len(self.text) - self._asked
        if self.settled or not new or not (self._finished or new >= self._rule.window):
            return None
        self._asked = len(self.text)
        return self.text

    def passed(self) -> list[Piece]:
        """The text of the last judgement has passed. Returns what may be sent."""
        self._passed = self._asked
        return self._release()

    def withdraw(self) -> None:
        self._held.clear()
        self.settled = True

    def _release(self) -> list[Piece]:
        released = []
        while self._held and self._held[0][0] <= self._passed:
            released.append(self._held.popleft()[1])
        self.settled = self._finished and not self._held
        return released


class _Answer:
    """All choices of a call, and the judgements that run."""

    def __init__(self, choices: list[_Choice], judge: Callable[[str], Judgement], source: Source) -> None:
        self._choices, self._judge, self._source = choices, judge, source
        self.judging: dict[asyncio.Task[Verdict | None], int] = {}
        """Judgements that run, at most one of each choice."""
        self.open = set(range(len(choices)))
        """Choices whose last piece was not released."""

    def take(self, batch: list[Piece]) -> list[Piece]:
        """Take pieces from the engine. Returns what may be sent."""
        released = []
        for piece in batch:
            released += self._choices[piece.index].take(piece)
            self._go_on(piece.index)
        return released

    def take_verdicts(self) -> list[Piece]:
        """Take the judgements that have ended. Returns what may be sent."""
        released = []
        self._source.released()
        for task in [task for task in self.judging if task.done()]:
            index, verdict = self.judging.pop(task), task.result()
            choice = self._choices[index]
            if verdict is not None and not verdict.flagged:
                released += choice.passed()
            else:
                choice.withdraw()
                self._source.withdraw(index)
                withdrawal = Withdrawal("unjudged") if verdict is None else Withdrawal("flagged", verdict.replacement)
                released.append(Piece(index, "", 0, CONTENT_FILTER, withdrawal=withdrawal))
            self._go_on(index)
        return released

    def _go_on(self, index: int) -> None:
        """Start the judgement that is due, or close a choice that is settled."""
        choice = self._choices[index]
        if choice.settled:
            self.open.discard(index)
        elif index not in self.judging.values() and (text := choice.ask()) is not None:
            self.judging[asyncio.get_running_loop().create_task(self._judge(text))] = index


def read_rule(config: ServiceConfig) -> Rule:
    """The rule of --moderation-mode."""
    if config.moderation_mode == "buffer":
        return Rule(math.inf, holds=True)
    return Rule(config.moderation_window, holds=config.moderation_mode == "window")


def make_moderation(config: ServiceConfig, on_judgement: Callable[[str], None]) -> Moderation:
    """What --moderation asks for. Raises ConfigError."""
    if not config.moderation:
        return NO_MODERATION
    return Moderator(make_judge(config.moderation, config.moderation_api_key), config, on_judgement)
