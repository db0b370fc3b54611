"""Measures drift in production: this engine and the reference weights both score a share of the live answers.

Answers wait until no request is open. Then both models score the answer's tokens after the same prompt, and their distributions
at each position are compared. The divergence counts alternatives that both models returned, and merges all other tokens into
one outcome, so it is a lower bound (quality.drift measures fixed texts in the same way).
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

from ridgeline.core.errors import EngineFailed, RidgelineError
from ridgeline.metrics import Metrics
from ridgeline.service.reference import Reference, TopLogprobs, scores
from ridgeline.service.sleep import Sleep
from ridgeline.wire.client import Client

MAX_WAITING = 64
"""Maximum waiting answers. A further answer replaces the oldest."""
MEAN_WINDOW = 50
"""Number of recent answers in the mean of gauge and warning."""
LOOK_S = 0.2
PAUSE_S = 30.0
"""Pause after the reference failed to answer, in seconds."""
_TINY = 1e-9

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of one answer. nats: sum of divergences. same: positions where both models have the same most probable token."""

    tokens: int
    nats: float
    same: int


def divergence(served: TopLogprobs, reference: TopLogprobs) -> float:
    """KL(reference || served), in nats, over the tokens that both returned and one outcome for all others."""
    shared = served.keys() & reference.keys()
    p, q = (sum(math.exp(logprobs[token]) for token in shared) for logprobs in (reference, served))
    nats = sum(math.exp(reference[token]) * (reference[token] - served[token]) for token in shared)
    other_p, other_q = max(1.0 - p, 0.0), max(1.0 - q, _TINY)
    return max(0.0, nats + (other_p * math.log(other_p / other_q) if other_p > _TINY else 0.0))


def compare(served: Sequence[TopLogprobs], reference: Sequence[TopLogprobs]) -> Comparison:
    """Compare the log-probabilities of both models at the same positions."""
    pairs = list(zip(served, reference, strict=True))
    same = sum(max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in pairs)
    return Comparison(len(pairs), sum(divergence(a, b) for a, b in pairs), same)


class Shadow:
    """Queue of answers to be scored, and the task that scores them.

    sleep: of the engine; answers wait while it sleeps. max_tokens: maximum length of a scored answer, prompt included.
    """

    def __init__(self, client: Client, metrics: Metrics, sleep: Sleep, reference: Reference, max_tokens: int) -> None:
        self._config, self._client, self._metrics = sleep.config, client, metrics
        self._sleep, self._reference, self._max_tokens = sleep, reference, max_tokens
        self._waiting: deque[tuple[list[int], int]] = deque(maxlen=MAX_WAITING)
        self._recent: deque[Comparison] = deque(maxlen=MEAN_WINDOW)
        self._random = random.Random()
        self._above_limit = False

    def draws(self) -> bool:
        """Whether the next request belongs to the share."""
        return self._random.random() < self._config.shadow_rate

    def offer(self, prompt: list[int], tokens: list[int]) -> None:
        """Queue an answer that has ended."""
        if tokens and len(prompt) + len(tokens) < self._max_tokens:
            self._waiting.append(([*prompt, *tokens], len(prompt)))

    async def run(self) -> None:
        """Score queued answers, one at a time, while no request is open.

        Ends when it is cancelled, or at once if the reference cannot be opened.
        """
        try:
            self._max_tokens = min(self._max_tokens, await self._reference.open(self._client.facts))
            while True:
                await asyncio.sleep(LOOK_S)
                if self._waiting and not self._client.open_choices and not self._sleep.away:
                    await self._score(*self._waiting.popleft())
        except RidgelineError as error:
            self._max_tokens = 0
            self._metrics.shadow_failed()
            log.warning("shadow: nothing is scored, because the reference does not start: %s", error.message)
        finally:
            await self._reference.close()

    async def _score(self, ids: list[int], first: int) -> None:
        if len(ids) >= self._max_tokens:  # it was queued before the reference reported its maximum
            return
        try:
            served = await scores(self._client, ids)
            reference = await self._reference.score(ids)
            self._record(compare(served[first - 1 :], reference[first - 1 :]))
        except (aiohttp.ClientError, TimeoutError, EngineFailed, ValueError, KeyError, TypeError) as error:
            self._metrics.shadow_failed()
            log.warning("shadow: an answer could not be scored (%s: %s)", type(error).__name__, error)
            await asyncio.sleep(PAUSE_S)

    def _record(self, comparison: Comparison) -> None:
        """Count an answer. Warn when the mean rises above the limit."""
        self._recent.append(comparison)
        mean = sum(answer.nats for answer in self._recent) / sum(answer.tokens for answer in self._recent)
        self._metrics.shadowed(comparison.tokens, comparison.same, comparison.nats, mean)
        limit = self._config.shadow_limit
        if mean > limit and not self._above_limit:
            log.warning(
                "shadow: answers drift from %s: KL %.4f nats per token over the last %d answers, limit %g. "
                "`ridgeline compare` measures it on fixed texts.",
                *(self._reference.name, mean, len(self._recent), limit),
            )
        self._above_limit = mean > limit
