"""Drift in production: a share of live answers is scored again, by this engine and by a server of the reference weights.

Answers wait until nobody else does; then both sides score their tokens, behind the same prompt, and what they think of every
place is compared. The divergence counts the alternatives that both sides told and takes all other tokens as one, so it is a
lower bound (see quality.drift, which measures fixed texts in the same way).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.sampling import SamplingParams
from ridgeline.metrics import Metrics
from ridgeline.wire.client import EngineClient
from ridgeline.wire.messages import Submit

TOP = 20
"""Alternatives per token that both sides are asked for."""
WAITING = 64
"""Answers that may wait; a new one then takes the oldest one's place."""
REMEMBERED = 50
"""Answers that the mean behind gauge and warning is taken over."""
LAST = 1 << 20
"""Priority behind every request of a user."""
LOOK_S = 0.2
PAUSE_S = 30.0
"""Rest after a reference that did not answer."""
_TIMEOUT_S = 120.0
_TINY = 1e-9

Told = Mapping[int, float]
"""Token -> log-probability, of one place: the alternatives that were told."""

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


def check(config: ServiceConfig) -> None:
    """Raises ConfigError for a share that is none, or that has nobody to ask."""
    if not 0.0 <= config.shadow_rate <= 1.0:
        raise ConfigError(f"shadow_rate is {config.shadow_rate:g}: give a share from 0 to 1.", param="shadow_rate")
    if config.shadow_rate and not config.shadow_url.startswith(("http://", "https://")):
        raise ConfigError(
            "shadow_rate needs a server of the reference weights: give its address (http://...) as shadow_url.",
            param="shadow_url",
        )


class Shadow:
    """Answers that wait to be scored, and the task that scores them. most: tokens that a scored answer may have."""

    def __init__(self, config: ServiceConfig, client: EngineClient, metrics: Metrics, most: int) -> None:
        self._config, self._client, self._metrics, self._most = config, client, metrics, most
        self._waiting: deque[tuple[list[int], int]] = deque(maxlen=WAITING)
        self._last: deque[Compared] = deque(maxlen=REMEMBERED)
        self._chance = random.Random()
        self._count = 0
        self._beyond = False

    def draws(self) -> bool:
        """Whether the next request is one of the share."""
        return self._chance.random() < self._config.shadow_rate

    def offer(self, prompt: list[int], tokens: list[int]) -> None:
        """An answer that has come to its end."""
        if tokens and len(prompt) + len(tokens) < self._most:
            self._waiting.append(([*prompt, *tokens], len(prompt)))

    async def run(self) -> None:
        """Score what waits, one answer at a time, while no request is open. Ends by being cancelled."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await asyncio.sleep(LOOK_S)
                if not self._waiting or self._client.open_choices:
                    continue
                ids, first = self._waiting.popleft()
                try:
                    ours = await self._ours(ids)
                    theirs = await self._theirs(session, ids)
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
                *(self._config.shadow_url, mean, len(self._last), limit),
            )
        self._beyond = mean > limit

    async def _ours(self, ids: list[int]) -> list[Told]:
        """What this engine says of tokens 1.., asked behind everybody else."""
        self._count += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP)
        request = Submit(f"shadow-{self._count}", ids, sampling, time.time(), LAST, cache=False)
        subscription, found = self._client.submit(request), None
        try:
            while not subscription.over:
                for delta in await subscription.take():
                    if delta.finish not in ("", "stop", "length"):
                        raise EngineFailed(delta.error or delta.finish)
                    found = found or delta.prompt_logprobs
        finally:
            subscription.close()
        if found is None or len(found) != len(ids) - 1:
            raise EngineFailed("the engine gave no scores.")
        return [_told(one) for one in found]

    async def _theirs(self, session: aiohttp.ClientSession, ids: list[int]) -> list[Told]:
        """What the reference says of tokens 1... Raises ValueError for one that does not score prompts."""
        config = self._config
        body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": TOP}
        if config.shadow_model:
            body["model"] = config.shadow_model
        url = config.shadow_url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        async with session.post(url, json=body) as answer:
            if answer.status != 200:
                raise ValueError(f"{url} answers {answer.status}")
            told = (await answer.json())["choices"][0].get("prompt_logprobs") or []
        if len(told) != len(ids):
            raise ValueError(f"{url} does not honour prompt_logprobs")
        return [{int(token): float(one["logprob"]) for token, one in place.items()} for place in told[1:]]


def _told(one: TokenLogprobs) -> Told:
    return {one.token: one.logprob, **dict(zip(one.top_ids, one.top_logprobs, strict=True))}
