"""An engine that speaks the wire protocol and computes nothing: deterministic answers, delays and failures at will."""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.ticket import Ticket
from ridgeline.wire.client import SILENCE_S
from ridgeline.wire.frames import encode, read_body, up_decoder
from ridgeline.wire.messages import (
    Cancel,
    Control,
    Delta,
    Deltas,
    Down,
    Failed,
    Finish,
    Heartbeat,
    Loading,
    Offer,
    Ready,
    Reply,
    StepStats,
    Submit,
)

Script = Callable[[Submit, int], list[int]]
"""Output tokens of a choice, end token included where the model would end by itself."""


@dataclass
class Behaviour:
    """script: what is said. delay: seconds per step. per_step: tokens per step. stuck: requests get no answer.
    beat_s: seconds between two beats of an engine that has nothing to do. silence_s: after which the service
    takes it for stuck.

    die_after: tokens after which the engine goes, with a word (`last_word`) or without. cached: prompt tokens that count
    as hits, at most. joules: energy of an output token. fail_after: tokens after which a request ends with an error, fails_as: or
    is refused. pulls: it gets the pages of tickets. offers: parts of a prompt that it
    offers before its first token.
    """

    script: Script
    eos: int
    vocab: int
    max_len: int = 2048
    rows: int = 8
    delay: float = 0.0
    per_step: int = 1
    cached: int = 16
    stuck: bool = False
    beat_s: float = 0.5
    silence_s: float = SILENCE_S
    loading: bool = False
    die_after: int | None = None
    last_word: str = ""
    fail_after: int | None = None
    fails_as: str = "error"
    pulls: bool = True
    offers: int = 0
    skip_frame: bool = False
    joules: float = 0.0
    defaults: dict[str, float] = field(default_factory=dict)


@dataclass
class _Row:
    submit: Submit
    choice: int
    script: list[int]
    drawn: int = 0
    said: int = 0
    tokens: list[int] = field(default_factory=list)


class FakeEngine:
    """One engine for one connection."""

    def __init__(self, behaviour: Behaviour, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.behaviour = behaviour
        self._reader, self.writer = reader, writer
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.offered: list[Offer] = []
        self.order: list[str] = []
        """What was asked of it, in order."""
        self.finishes: list[Finish] = []
        self.orders: list[str] = []
        self.said = 0
        self.queued = 0.0
        """Seconds that every request is said to have waited."""
        self.prefill_s = self.decode_s = 0.0
        """Seconds that every choice is said to have taken for its prompt, and after it."""
        self._rows: list[_Row] = []
        self._waiting: list[_Row] = []
        self._sequence = 0
        self._step = 0
        self._wake = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._listen()), loop.create_task(self._run())]

    @classmethod
    async def connect(cls, behaviour: Behaviour) -> tuple[FakeEngine, asyncio.StreamReader, asyncio.StreamWriter]:
        """The engine, and the service's end of the stream."""
        ours, theirs = socket.socketpair()
        engine = cls(behaviour, *await asyncio.open_connection(sock=theirs))
        service_reader, service_writer = await asyncio.open_connection(sock=ours)
        return engine, service_reader, service_writer

    def send(self, message: Down) -> None:
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    def ready(self) -> None:
        b = self.behaviour
        facts = {"max_len": b.max_len, "vocab_size": b.vocab, "max_num_seqs": b.rows, "eos_ids": [b.eos]}
        facts |= {
            "generation_defaults": b.defaults,
            "page_tokens": 16,
            "blocks": 100,
            "d_model": 4,
            "kv_bytes_per_token": 64,
        }
        self.send(Ready(facts))

    async def die(self) -> None:
        """End as a process does that was killed, or with a last word."""
        if self.behaviour.last_word and not self.writer.is_closing():
            self.send(Failed(self.behaviour.last_word))
            await self.writer.drain()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self.writer.close()

    @property
    def open(self) -> int:
        return len(self._rows) + len(self._waiting)

    async def _listen(self) -> None:
        decoder = up_decoder()
        if self.behaviour.loading:
            self.send(Loading("weights", 1, 3))
        else:
            self.ready()
        while (body := await read_body(self._reader)) is not None:
            self._take(decoder.decode(body))
        await self.die()

    def _take(self, message: Submit | Offer | Cancel | Finish | Control) -> None:
        self.order.append(type(message).__name__)
        if isinstance(message, Offer):
            self.offered.append(message)
        elif isinstance(message, Submit):
            self.submits.append(message)
            for choice in message.drawn or range(message.sampling.n):
                drawn = message.drawn.get(choice, [])
                script = self.behaviour.script(message, choice)
                assert script[: len(drawn)] == drawn, "another engine said something else"
                self._waiting.append(_Row(message, choice, script[len(drawn) :], len(drawn)))
        elif isinstance(message, Cancel):
            self.cancels.append(message)
            self._drop(lambda row: row.submit.id == message.id)
        elif isinstance(message, Finish):
            self.finishes.append(message)
            self._drop(lambda row: row.submit.id == message.id and row.choice == message.choice)
        else:
            self.orders.append(message.order)
            held = {"free": 10, "used": self.open, "total": 10 + self.open}
            self.send(
                Reply(
                    message.id,
                    held
                    if message.order == "stats"
                    else {"adapters": []}
                    if "adapter" in message.order
                    else {"forgotten": 3},
                )
            )
        self._wake.set()

    def _drop(self, ends: Callable[[_Row], bool]) -> None:
        self._rows = [row for row in self._rows if not ends(row)]
        self._waiting = [row for row in self._waiting if not ends(row)]

    async def _run(self) -> None:
        while True:
            if (not self._rows and not self._waiting) or self.behaviour.stuck:
                self._wake.clear()
                await self._rest()
                if self.behaviour.stuck:
                    continue
            await asyncio.sleep(self.behaviour.delay)
            while self._waiting and len(self._rows) < self.behaviour.rows:
                self._rows.append(self._waiting.pop(0))
            await self._offer()
            deltas = [self._advance(row) for row in self._rows]
            self._rows = [row for row, delta in zip(self._rows, deltas, strict=True) if not delta.finish]
            self._step += 1
            self._sequence += 2 if self.behaviour.skip_frame and self._step == 2 else 1
            self.send(Deltas(self._sequence, deltas, self._stats(sum(len(delta.tokens) for delta in deltas))))
            await self.writer.drain()
            if self.behaviour.die_after is not None and self.said >= self.behaviour.die_after:
                await self.die()
                return

    async def _offer(self) -> None:
        """Parts of new prompts, each with a block."""
        for row in self._rows:
            if row.submit.hand_over and not row.said and not row.choice:
                for _ in range(self.behaviour.offers):
                    self._sequence += 1
                    part = Ticket(0, (b"key",), ((1,),), ((2,),))
                    self.send(Deltas(self._sequence, [Delta(row.submit.id, 0, ticket=part)]))
                    await asyncio.sleep(self.behaviour.delay)

    async def _rest(self) -> None:
        """Heartbeat until a message comes."""
        while not self._wake.is_set():
            self.send(Heartbeat(self._step, bool(self._waiting)))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self.behaviour.beat_s)

    def _advance(self, row: _Row) -> Delta:
        sampling, b = row.submit.sampling, self.behaviour
        if sampling.pooling is not None:
            tokens, times = row.submit.tokens, (self.queued, 0.0, 0.0, 0)
            return Delta(row.submit.id, row.choice, finish="length", cached=0, times=times, pooled=pooled(tokens))
        limit = min(sampling.max_tokens or b.max_len, b.max_len - len(row.submit.tokens)) - row.drawn
        limit = 1 if row.submit.hand_over else limit
        tokens = row.script[row.said : min(row.said + b.per_step, limit)]
        first = row.said == 0
        row.said += len(tokens)
        self.said += len(tokens)
        delta = Delta(row.submit.id, row.choice, tokens)
        if b.fail_after is not None and row.said >= b.fail_after:
            return replace_delta(delta, finish=b.fails_as, error="The step failed: as it was told to.")
        ends = {b.eos, *sampling.stop_token_ids} if not sampling.ignore_eos else set(sampling.stop_token_ids)
        if tokens and tokens[-1] in ends:
            delta.finish, delta.stop_id = "stop", tokens[-1]
        elif row.said >= limit or row.said >= len(row.script):
            delta.finish = "length"
            if row.submit.hand_over:
                blocks = len(row.submit.tokens) // 16
                delta.ticket = Ticket(0, (b"key",) * blocks, ((1,),) * blocks, ((2,),) * blocks)
        if first and row.submit.ticket is not None:
            delta.cached = 16 * len(row.submit.ticket.keys) if b.pulls else 0
        elif first:
            delta.cached = min(b.cached, len(row.submit.tokens) // 16 * 16) if row.submit.cache else 0
            if sampling.prompt_logprobs is not None and row.choice == 0:
                delta.prompt_logprobs = [score(token, sampling.prompt_logprobs) for token in row.submit.tokens[1:]]
        if sampling.logprobs is not None:
            delta.logprobs = [score(token, sampling.logprobs) for token in tokens]
        if first or delta.finish:
            delta.times = (self.queued, self.prefill_s, self.decode_s, 0)
        return delta

    def _stats(self, tokens: int) -> StepStats:
        stats = StepStats(
            self._step, len(self._rows), len(self._waiting), 0, tokens, 0, 0, 0, 0, 0, 0, 0, 10, 0.0, 0.0, 0.0, 0.0
        )
        stats.joules = self.behaviour.joules * tokens
        return stats


def pooled(tokens: list[int]) -> list[bytes]:
    """Two made-up sums of hidden states. Together: number of tokens, the first and the last token, 3."""
    return [array("d", [len(tokens), tokens[0], 0, 1]).tobytes(), array("d", [0, 0, tokens[-1], 2]).tobytes()]


def replace_delta(delta: Delta, **changes: object) -> Delta:
    for name, value in changes.items():
        setattr(delta, name, value)
    return delta


def score(token: int, top: int) -> TokenLogprobs:
    """A token's made-up scores: it is the most probable one, its successors follow."""
    ids = tuple((token + place) % 256 for place in range(top))
    return TokenLogprobs(
        token, -0.25 - token / 1024, 1, ids, tuple(-0.25 - token / 1024 - place for place in range(top)), 3.0
    )


__all__ = ["Behaviour", "FakeEngine", "Script", "replace", "score"]
