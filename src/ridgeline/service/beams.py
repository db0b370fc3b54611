"""Beam search: the algorithm, and the rounds of one token that it asks the engine for.

A beam is a prompt of its own: the request's prompt and the beam's tokens. In each round the engine draws one token for every beam
and reports the most probable ones. The prefix cache has the blocks that beams share, so the engine knows nothing of beams.

Source: transformers, generation/utils.py (`_beam_search`, without sampling): the meaning of length_penalty and early_stopping, and
when the search ends.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.core.sampling import MAX_LOGPROBS, SamplingParams
from ridgeline.metrics import Spent
from ridgeline.service.call import Beams, Call
from ridgeline.service.state import Service
from ridgeline.wire.client import Subscription
from ridgeline.wire.messages import Delta, Submit


def widest(end_ids: int) -> int:
    """The largest number of beams."""
    return MAX_LOGPROBS - end_ids


@dataclass(frozen=True, slots=True)
class Beam:
    """tokens: of the answer. total: sum of their log-probabilities. score: of a finished beam."""

    tokens: tuple[int, ...] = ()
    total: float = 0.0
    score: float = -math.inf


class BeamSearch:
    """The search of one prompt for an answer of at most `limit` tokens."""

    def __init__(self, beams: Beams, limit: int) -> None:
        self._beams, self._limit = beams, limit
        self.running = [Beam()]
        self.finished: list[Beam] = []
        """The best finished beams, at most `width`, best first."""

    @property
    def over(self) -> bool:
        beams, full = self._beams, len(self.finished) == self._beams.width
        length = len(self.running[0].tokens) if self.running else self._limit
        if not self.running or length >= self._limit or (full and beams.early_stopping is True):
            return True
        if not full:
            return False
        if beams.early_stopping == "never" and beams.length_penalty > 0:
            length = self._limit
        return self.running[0].total / length**beams.length_penalty <= self.finished[-1].score

    def advance(self, tops: Sequence[Mapping[int, float]]) -> None:
        """tops: for each running beam the log-probabilities of its `candidates` most probable next tokens."""
        beams, length = self._beams, len(self.running[0].tokens) + 1
        longer = [
            Beam((*beam.tokens, token), beam.total + logprob)
            for beam, top in zip(self.running, tops, strict=True)
            for token, logprob in top.items()
        ]
        longer.sort(key=lambda beam: -beam.total)
        ends = [length == self._limit or beam.tokens[-1] in beams.end_ids for beam in longer]
        # Only an end among the best `width` finishes a beam: others would displace beams that are better.
        self.finished += [
            replace(beam, score=beam.total / length**beams.length_penalty)
            for beam, end in zip(longer[: beams.width], ends, strict=False)
            if end
        ]
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[: beams.width]
        self.running = [beam for beam, end in zip(longer, ends, strict=True) if not end][: beams.width]


class BeamAnswers:
    """The answers of a call with beams, as a subscription: a delta with the whole answer for each choice."""

    def __init__(self, service: Service, call: Call, beams: Beams) -> None:
        self._service, self._call, self._beams = service, call, beams
        self._rounds: set[Subscription] = set()
        self._task: asyncio.Task[list[list[Delta]]] | None = None
        self.over = False
        self.cut = ""

    async def take(self, timeout: float | None = None) -> list[Delta]:
        """As Subscription.take."""
        if self._task is None:
            self._task = asyncio.create_task(self._searches())
        done, _ = await asyncio.wait({self._task}, timeout=timeout)
        if not done:
            return []
        self.over = True
        return [delta for deltas in self._task.result() for delta in deltas]

    def finish(self, request_id: str, choice: int, reason: str, kept: int) -> None:
        """All choices have ended when the service reads them."""

    def close(self, reason: str = "cancelled") -> None:
        """Stop the search and cancel what the engine computes for it."""
        if self._task is not None:
            self._task.cancel()
        for subscription in tuple(self._rounds):
            subscription.close(reason)

    async def _searches(self) -> list[list[Delta]]:
        searches = [asyncio.create_task(self._search(*prompt)) for prompt in enumerate(self._call.prompts)]
        try:
            return await asyncio.gather(*searches)
        finally:  # after a failure the others go on, unless they are cancelled
            for search in searches:
                search.cancel()

    async def _search(self, number: int, prompt: list[int]) -> list[Delta]:
        call, name = self._call, f"{self._call.id}-{number}"
        room = self._service.limits.request_tokens - len(prompt)
        search = BeamSearch(self._beams, max(1, min(room, call.sampling.max_tokens or room)))
        spent: list[Spent] = []
        cached = rounds = 0
        while not search.over:
            deltas = await self._round(f"{name}-{rounds}", prompt, search.running)
            spent += [Spent.of(delta.times) for delta in deltas if delta.times is not None]
            if failed := next((delta for delta in deltas if delta.finish not in ("stop", "length")), None):
                return [Delta(name, 0, finish=failed.finish, error=failed.error)]
            cached = max(0, deltas[0].cached) if rounds == 0 else cached
            rounds += 1
            search.advance([_tops(delta) for delta in deltas])
        answers = [_answer(Delta(name, choice), beam, self._beams) for choice, beam in enumerate(search.finished)]
        answers[0].cached, answers[0].times = cached, _total(spent)
        return answers[: call.sampling.n]

    async def _round(self, name: str, prompt: list[int], running: Sequence[Beam]) -> list[Delta]:
        """One delta for each beam."""
        call = self._call
        sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=self._beams.candidates)
        submits = [
            Submit(
                f"{name}-{index}",
                [*prompt, *beam.tokens],
                sampling,
                call.began,
                call.priority,
                call.salt,
                client=call.payer.name,
                adapter=call.adapter,
            )
            for index, beam in enumerate(running)
        ]
        subscription = self._service.client.submit(*submits)
        self._rounds.add(subscription)
        try:
            deltas: dict[str, Delta] = {}
            while not subscription.over:
                deltas.update((delta.id, delta) for delta in await subscription.take())
            self.cut = subscription.cut
            return [deltas[submit.id] for submit in submits]
        finally:
            self._rounds.discard(subscription)
            subscription.close()


def _total(rounds: Sequence[Spent]) -> tuple[float, ...] | None:
    """As Delta.times, of all rounds: waits up to the first token, and the time to the end of the last round as decoding."""
    if not rounds:
        return None
    first, since_arrival = rounds[0], max(spent.queue_s + spent.prefill_s for spent in rounds)
    decode_s = since_arrival - first.queue_s - first.prefill_s
    preempted = sum(spent.preempted for spent in rounds)
    return first.queue_s, first.prefill_s, decode_s, preempted, sum(spent.device_s for spent in rounds), 0, 0


def _tops(delta: Delta) -> dict[int, float]:
    assert delta.logprobs
    (record,) = delta.logprobs
    return dict(zip(record.top_ids, record.top_logprobs, strict=True))


def _answer(delta: Delta, beam: Beam, beams: Beams) -> Delta:
    delta.tokens = list(beam.tokens)
    ended = beam.tokens[-1] in beams.end_ids
    delta.finish = "stop" if ended else "length"
    delta.stop_id = beam.tokens[-1] if ended else -1
    return delta
