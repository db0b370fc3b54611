"""Drift in production: a share of live answers is scored again, by this engine and by the reference weights.

Answers wait until nobody else does; then both sides score their tokens, behind the same prompt, and what they think of every
place is compared. The divergence counts the alternatives that both sides told and takes all other tokens as one, so it is a
lower bound (see quality.drift, which measures fixed texts in the same way).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import EngineFailed, RidgelineError
from ridgeline.metrics import Metrics
from ridgeline.service.reference import Reference, Told, scores
from ridgeline.wire.client import EngineClient

WAITING = 64
"""Answers that may wait; a new one then takes the oldest one's place."""
REMEMBERED = 50
"""Answers that the mean behind gauge and warning is taken over."""
LOOK_S = 0.2
PAUSE_S = 30.0
"""Rest after a reference that did not answer."""
_TINY = 1e-9

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compared:
    """One answer. nats: sum of divergences; same: tokens whose most probable alternative is the same on both sides."""

    tokens: int
    nats: float
    same: int


def divergence(ours: Told, theirs: Told) -> float:
    """KL(theirs || ours), in nats, of the tokens both know and of all others as one."""
    shared = ours.keys() & theirs.keys()
    p, q = (sum(math.exp(one[token]) for token in shared) for one in (theirs, ours))
    nats = sum(math.exp(theirs[token]) * (theirs[token] - ours[token]) for token in shared)
    rest_p, rest_q = max(1.0 - p, 0.0), max(1.0 - q, _TINY)
    return max(0.0, nats + (rest_p * math.log(rest_p / rest_q) if rest_p > _TINY else 0.0))


def compare(ours: Sequence[Told], theirs: Sequence[Told]) -> Compared:
    """What both sides said of the same places."""
    pairs = list(zip(ours, theirs, strict=True))
    same = sum(max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in pairs)
    return Compared(len(pairs), sum(divergence(a, b) for a, b in pairs), same)


class Shadow:
    """Answers that wait to be scored, and the task that scores them. most: tokens that a scored answer may have."""

    def __init__(
        self, config: ServiceConfig, client: EngineClient, metrics: Metrics, reference: Reference, most: int
    ) -> None:
        self._config, self._client, self._metrics = config, client, metrics
        self._reference, self._most = reference, most
        self._waiting: deque[tuple[list[int], int]] = deque(maxlen=WAITING)
        self._last: deque[Compared] = deque(maxlen=REMEMBERED)
        self._chance = random.Random()
        self._beyond = False

    def draws(self) -> bool:
        """Whether the next request is one of the share."""
        return self._chance.random() < self._config.shadow_rate

    def offer(self, prompt: list[int], tokens: list[int]) -> None:
        """An answer that has come to its end."""
        if tokens and len(prompt) + len(tokens) < self._most:
            self._waiting.append(([*prompt, *tokens], len(prompt)))

    async def run(self) -> None:
        """Score what waits, one answer at a time, while no request is open. Ends by being cancelled, or at once where the
        reference cannot be opened."""
        try:
            self._most = min(self._most, await self._reference.open(self._client.facts))
            while True:
                await asyncio.sleep(LOOK_S)
                if self._waiting and not self._client.open_choices:
                    await self._score(*self._waiting.popleft())
        except RidgelineError as error:
            self._most = 0
            self._metrics.shadow_failed()
            log.warning("shadow: nothing is scored, as the reference does not start: %s", error.message)
        finally:
            await self._reference.close()

    async def _score(self, ids: list[int], first: int) -> None:
        if len(ids) >= self._most:  # it came before the reference said how much it takes
            return
        try:
            ours = await scores(self._client, ids)
            theirs = await self._reference.score(ids)
            self._tell(compare(ours[first - 1 :], theirs[first - 1 :]))
        except (aiohttp.ClientError, TimeoutError, EngineFailed, ValueError, KeyError, TypeError) as error:
            self._metrics.shadow_failed()
            log.warning("shadow: an answer could not be scored (%s: %s)", type(error).__name__, error)
            await asyncio.sleep(PAUSE_S)

    def _tell(self, found: Compared) -> None:
        """Count an answer, and warn once when the mean goes beyond the limit."""
        self._last.append(found)
        mean = sum(one.nats for one in self._last) / sum(one.tokens for one in self._last)
        self._metrics.shadowed(found.tokens, found.same, found.nats, mean)
        limit = self._config.shadow_limit
        if mean > limit and not self._beyond:
            log.warning(
                "shadow: answers drift from %s: KL %.4f nats per token over the last %d answers, limit %g. "
                "`ridgeline compare` measures it on fixed texts.",
                *(self._reference.name, mean, len(self._last), limit),
            )
        self._beyond = mean > limit
