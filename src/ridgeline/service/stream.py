"""Converts deltas to text. One generator feeds both server-sent events and single bodies.

If a caller leaves it early, as on a disconnect, it closes the subscription, which cancels the request in the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from ridgeline.core.errors import BadGrammar, EngineFailed, RequestError, RidgelineError, Unavailable
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.slo import NO_SLO, Slo
from ridgeline.service.answer_cache import answer_key
from ridgeline.service.batches.objects import PRICE_FACTOR
from ridgeline.service.beams import BeamAnswers
from ridgeline.service.call import Call, Usage
from ridgeline.service.ledger import Ledger
from ridgeline.service.piece import CONTENT_FILTER, Piece, Scored
from ridgeline.service.state import Service
from ridgeline.text.detokenize import Detokenizer
from ridgeline.text.stops import StopStrings
from ridgeline.wire.messages import Delta


class Answers(Protocol):
    """Deltas of a call. Implemented by wire.client.Subscription and BeamAnswers."""

    cut: str

    @property
    def over(self) -> bool: ...

    async def take(self, timeout: float | None = None) -> list[Delta]: ...

    def finish(self, request_id: str, choice: int, reason: str, kept: int) -> None: ...

    def close(self, reason: str = "cancelled") -> None: ...


class _Choice:
    """One answer while it grows."""

    def __init__(self, service: Service, call: Call, index: int) -> None:
        sampling = call.sampling
        self.index = index
        self._include_stop = sampling.include_stop
        self._stop_ids = sampling.stop_token_ids
        self._detokenizer = Detokenizer(
            service.tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            context=call.prompts[index // sampling.n] if call.continues else (),
        )
        self._stops = StopStrings(sampling.stop, include_stop=sampling.include_stop, min_tokens=sampling.min_tokens)
        self._token_by_token = bool(sampling.stop) or sampling.logprobs is not None
        self._scored: deque[Scored] = deque()
        self._read_characters = 0
        self._released_characters = 0
        self.tokens: list[int] = []
        """Its tokens; kept only for answers that are scored by the reference."""
        self.count = 0
        self.finish = ""
        """How it ended, "" while it runs."""

    def take(self, delta: Delta) -> Piece:
        """The piece for a delta. After a stop string the piece has a finish that the engine does not know yet."""
        piece = Piece(self.index, "", len(delta.tokens), delta.finish)
        hides_stop = delta.stop_id >= 0 and not self._include_stop
        text_tokens = delta.tokens[:-1] if hides_stop else delta.tokens
        if self._token_by_token:
            self._push_tokens(piece, text_tokens, delta.logprobs)
        else:
            piece.text = self._detokenizer.push(text_tokens)
        if piece.finish and piece.stopped_by is None:
            self._finish(piece, delta, hides_stop)
        self._released_characters += len(piece.text)
        self.count += piece.count
        self.finish = piece.finish
        self._release(piece)
        return piece

    def _push_tokens(self, piece: Piece, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Detokenize token by token: stop strings and logprobs need the text of each token."""
        for place, token in enumerate(tokens):
            text = self._detokenizer.push((token,))
            if logprobs is not None:
                self._scored.append(Scored(self._read_characters, logprobs[place]))
            self._read_characters += len(text)
            visible, hit = self._stops.push(text)
            piece.text += visible
            if hit is not None:
                piece.finish, piece.stopped_by, piece.count = "stop", hit, place + 1
                return

    def _finish(self, piece: Piece, delta: Delta, hides_stop: bool) -> None:
        """The engine ended the choice: release the text held back."""
        visible, hit = self._stops.push(self._detokenizer.finish())
        piece.text += visible + self._stops.finish()
        piece.stopped_by = delta.stop_id if delta.stop_id in self._stop_ids else hit
        if hides_stop and delta.logprobs is not None:
            piece.ended_by = Scored(self._released_characters + len(piece.text), delta.logprobs[-1])

    def _release(self, piece: Piece) -> None:
        """Release log-probabilities with their text. Those of a stop string that is cut off are dropped."""
        release_all = bool(self.finish) and not isinstance(piece.stopped_by, str)
        while self._scored and (release_all or self._scored[0].start < self._released_characters):
            piece.scored.append(self._scored.popleft())


def pieces(service: Service, call: Call, usage: Usage) -> AsyncGenerator[list[Piece], None]:
    """The call's pieces until every choice has ended; an empty list after a silence of keep_alive_s.

    Updates `usage`. Raises RequestError if the engine refuses the request (for example, a grammar that exceeds its limits later),
    EngineFailed if the engine fails.
    """
    usage.prompt = sum(map(len, call.prompts))
    if service.config.token_prices:
        usage.prices = service.metrics.live.token_prices
        usage.price_factor = PRICE_FACTOR if call.batch else 1.0
    answers = service.answers
    key = answer_key(call, answers.generation) if answers.max_bytes else None
    if key is None:
        return _computed(service, call, usage)
    stored = answers.get(key)
    service.metrics.answer_looked_up(stored is not None, answers.bytes)
    return _recorded(service, call, usage, key) if stored is None else _repeated(service, call, usage, stored)


async def _repeated(
    service: Service, call: Call, usage: Usage, stored: list[Piece]
) -> AsyncGenerator[list[Piece], None]:
    """The pieces of a stored answer. The engine does not see the call."""
    ledger = Ledger(call, service.metrics)
    try:
        usage.received, usage.repeated, usage.cached = time.monotonic(), True, usage.prompt
        ledger.repeat(usage.received, [piece.finish for piece in stored if piece.finish])
        for piece in stored:
            usage.completion += piece.count
            yield [piece]
    finally:
        ledger.close(usage)


async def _recorded(service: Service, call: Call, usage: Usage, key: bytes) -> AsyncGenerator[list[Piece], None]:
    """The pieces of an answer that is stored when it is complete and nothing of it was withdrawn."""
    answer: list[Piece] = []
    async with aclosing(_computed(service, call, usage)) as batches:
        async for batch in batches:
            answer += batch
            yield batch
    if not any(piece.withdrawal for piece in answer):
        service.answers.put(key, answer)


def _kept(service: Service, call: Call) -> Slo:
    """The limits that the engine keeps for a request."""
    return service.metrics.live.slo if service.config.keep_slo and not call.batch else NO_SLO


async def _computed(service: Service, call: Call, usage: Usage) -> AsyncGenerator[list[Piece], None]:
    """The pieces of an answer that the engine computes."""
    subscription: Answers
    if call.beams is None:
        subscription = service.client.submit(*call.submits(_kept(service, call)))
    else:
        subscription = BeamAnswers(service, call, call.beams)
    ledger = Ledger(call, service.metrics)
    if not call.batch:
        service.gate.began(call.engine_choices, call.payer.name)
    try:
        run = _Run(service, call, subscription, ledger, usage)
        async with aclosing(service.moderation.watch(run, call.choices)) as watched:
            async for batch in watched:
                yield batch
    finally:
        if not call.batch:
            service.gate.ended(call.engine_choices, call.payer.name)
        subscription.close()
        ledger.close(usage)


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Merge consecutive deltas of one choice: a slow client gets fewer, larger events."""
    merged = deltas[:1]
    for delta in deltas[1:]:
        last = merged[-1]
        if (last.id, last.choice) != (delta.id, delta.choice) or delta.finish not in ("", "stop", "length"):
            merged.append(delta)
            continue
        last.tokens = last.tokens + delta.tokens
        last.finish, last.stop_id, last.times = delta.finish, delta.stop_id, delta.times or last.times
        if delta.logprobs is not None:
            last.logprobs = (last.logprobs or []) + delta.logprobs
    return merged


class _Run:
    """One call while it is answered."""

    def __init__(self, service: Service, call: Call, subscription: Answers, ledger: Ledger, usage: Usage) -> None:
        self._service = service
        self._call = call
        self._subscription = subscription
        self._ledger = ledger
        self._usage = usage
        self._keep_alive_s = service.config.keep_alive_s
        shadow = None if call.batch or call.sampling.pooling or call.adapter or call.beams else service.shadow
        self._shadow = shadow if shadow is not None and shadow.draws() else None
        self._choices = [_Choice(service, call, index) for index in range(call.choices)]
        self._places = {f"{call.id}-{index}": index for index in range(len(call.prompts))}

    async def batches(self) -> AsyncGenerator[list[Piece], None]:
        """The pieces of the engine's updates, as `pieces` yields them."""
        subscription, keep_alive_s = self._subscription, self._keep_alive_s
        while not subscription.over:
            batch: list[Piece] = []
            failed: RidgelineError | None = None
            deltas = await subscription.take(keep_alive_s)
            self.released()
            for delta in _merged(deltas) if len(deltas) > 1 else deltas:
                failed = failed or self.failure(delta)
                if failed is None and (piece := self.take(delta)) is not None:
                    batch.append(piece)
            if batch or not deltas:
                yield batch
            if failed is not None:
                raise failed

    def released(self) -> None:
        """The newest tokens may be sent now."""
        self._usage.received = time.monotonic()

    def withdraw(self, index: int) -> None:
        """Withdraw a choice, and end it if it still runs."""
        choice, n = self._choices[index], self._call.sampling.n
        if choice.finish:
            self._ledger.withdrawn(choice.finish)
        else:
            delta = Delta(f"{self._call.id}-{index // n}", index % n)
            self._ledger.ended(CONTENT_FILTER, delta)
            self._subscription.finish(delta.id, delta.choice, "stop", choice.count)
        choice.finish = CONTENT_FILTER

    def failure(self, delta: Delta) -> RidgelineError | None:
        """The error for a choice that ended early: a bad request, a shutdown, or a failure of the server."""
        if delta.finish in ("", "stop", "length"):
            return None
        if delta.finish == "refused":
            constrained = self._call.sampling.grammar is not None
            self._ledger.cut = "refused"
            self._ledger.cut_reason = "invalid grammar" if constrained else "invalid request"
            kind = BadGrammar if constrained else RequestError
            return kind(delta.error, param=self._call.constrained_by or None)
        if delta.finish == "unavailable":
            self._ledger.cut = "refused"
            return Unavailable(delta.error)
        self._ledger.cut = self._subscription.cut or "error"
        if self._ledger.cut == "drain":
            return Unavailable(delta.error)
        return EngineFailed(delta.error or f"The request was ended by the server ({delta.finish}).")

    def take(self, delta: Delta) -> Piece | None:
        """The piece for a delta; None if the service has already ended the choice."""
        call, usage = self._call, self._usage
        choice = self._choices[self._places[delta.id] * call.sampling.n + delta.choice]
        if choice.finish:
            return None
        if delta.choice == 0 and delta.cached > 0:
            usage.cached += delta.cached
        if delta.pins is not None:
            usage.pin(call.breakpoints, self._service.pin_book.read(call, delta.pins, usage.received))
        self._ledger.observe(delta, usage.received)
        if call.max_tokens == 0:
            piece = Piece(choice.index, "", 0, "length")
            choice.finish = piece.finish
        else:
            piece = choice.take(delta)
        piece.prompt_logprobs = delta.prompt_logprobs if delta.choice == 0 else None
        piece.pooled = delta.pooled
        usage.completion += piece.count
        if self._shadow is not None:
            choice.tokens += delta.tokens[: piece.count]
            if piece.finish:
                self._shadow.offer(call.prompts[choice.index // call.sampling.n], choice.tokens)
        if piece.finish:
            self._ledger.ended(piece.finish, delta)
            if not delta.finish:
                self._subscription.finish(delta.id, delta.choice, piece.finish, choice.count)
        return piece
