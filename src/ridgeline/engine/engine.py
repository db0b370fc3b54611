"""The engine behind the message protocol: takes messages of the service and returns messages. Owns no socket and no process."""

from __future__ import annotations

import math
import random
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from ridgeline.core.errors import RequestError, RidgelineError, Unavailable
from ridgeline.core.events import StepUpdates, Update
from ridgeline.core.sampling import MAX_STOP_IDS
from ridgeline.engine.adapters import ADAPTER_ORDERS, Adapters
from ridgeline.engine.constraints import start_constraint
from ridgeline.engine.expert_load import ExpertLoad
from ridgeline.engine.handover import HandOvers
from ridgeline.engine.late_compiles import LateCompiles
from ridgeline.engine.loop import Loop
from ridgeline.engine.profiler import PROFILE_ORDERS, Profiler
from ridgeline.engine.request import Request
from ridgeline.engine.sleep import ORDERS, Sleeper
from ridgeline.kv.prefix import chain_root
from ridgeline.metrics.account import Account, Accounted
from ridgeline.text.grammar import COMPILE_S, CompiledGrammar
from ridgeline.text.grammar_cache import GrammarCache
from ridgeline.wire.messages import Cancel, Control, Delta, Deltas, Down, Finish, Offer, Reply, StepStats, Submit, Up

_WASTE_EVERY = 32
"""Steps between two readings of the KV waste, which costs a pass over all running requests."""
_POLL_S = 0.001
"""Seconds between two checks of pending grammar compilations while there is no other work."""


class _Waiting(NamedTuple):
    """A request whose grammar is being compiled. deadline: on the monotonic clock, in seconds."""

    message: Submit
    grammars: GrammarCache
    compiled: Future[CompiledGrammar]
    deadline: float


@dataclass(frozen=True, slots=True)
class Setup:
    """Constants of the served model.

    fingerprint: hash of the weights and the KV format. Engines share prefixes only if their fingerprints are equal.
    seed: seeds the generator of seeds for requests without one. facts: the content of Ready and of the "stats" reply. check: raises
    EngineFailed if another rank is lost; called in every turn. closing: called before the device is released. hand_overs: prompts
    that this engine computes for others, or others for it. sleeper: releases the memory of weights and cache. profiler: records
    profiles. adapters: LoRA adapters that requests may name.
    """

    max_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    fingerprint: str
    seed: int
    facts: dict[str, Any]
    grammars: GrammarCache | None = None
    account: Account = field(default_factory=Account)
    late: LateCompiles = field(default_factory=LateCompiles)
    expert_load: ExpertLoad = field(default_factory=ExpertLoad)
    check: Callable[[], None] = lambda: None
    closing: Callable[[], None] = lambda: None
    hand_overs: HandOvers = field(default_factory=HandOvers)
    sleeper: Sleeper = field(default_factory=Sleeper)
    profiler: Profiler = field(default_factory=Profiler)
    adapters: Adapters = field(default_factory=Adapters)


class Engine:
    """handle(message) applies one message; turn() runs one turn of the loop and returns the frame to send."""

    def __init__(self, loop: Loop, setup: Setup) -> None:
        self.loop = loop
        self.setup = setup
        self._scheduler = loop.scheduler
        self._arrivals = 0
        self._seeds = random.Random(setup.seed)
        self._sequence = 0
        self._waste_inside, self._waste_between = 0.0, loop.scheduler.layout.padding
        self._reported_counts = (0, 0)
        """Numbers of running and waiting requests in the last StepStats."""
        self.reply_s = 0.0
        """Host seconds to build the last frame. The sender adds the time to send it."""
        self._waiting: list[_Waiting] = []
        self._refused: list[Update] = []
        """Updates of requests that were refused before they reached the scheduler."""
        self._draining = False
        self.stopped = False

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not (self._waiting or self._refused)

    def wait_seconds(self) -> float:
        """Seconds until the next turn can make progress, unless a message arrives earlier."""
        return 0.0 if self._refused else min(self.loop.wait_seconds(), _POLL_S if self._waiting else math.inf)

    def close(self) -> None:
        """Release the device memory and stop grammar compilation."""
        self.setup.closing()
        self.loop.runner.close()
        if self.setup.grammars is not None:
            self.setup.grammars.close()

    # --- orders -----------------------------------------------------------------------------------------------------

    def handle(self, message: Up) -> list[Down]:
        """Apply one message and return the replies. An invalid request is refused; other requests are not affected."""
        if isinstance(message, Submit):
            self.setup.hand_overs.submitted(message)
            self._submit(message)
        elif isinstance(message, Cancel):
            self._waiting = [waiting for waiting in self._waiting if waiting.message.id != message.id]
            self._scheduler.cancel(message.id, message.reason)
            self.setup.hand_overs.cancelled(message.id)
        elif isinstance(message, Offer):
            self.setup.hand_overs.offered(message)
        elif isinstance(message, Finish):
            self._scheduler.end_choice(message.id, message.choice, message.reason, message.kept)
        else:
            return [Reply(message.id, self._control(message))]
        return []

    def _submit(self, message: Submit) -> None:
        """Add the request to the scheduler, at once or when its grammar is compiled."""
        grammar, grammars = message.sampling.grammar, self.setup.grammars
        if grammar is None:
            self._add(message, None)
        elif grammars is None:
            self._refuse(message, "This server has no grammar support: install ridgeline[structured].")
        else:
            deadline = time.monotonic() + COMPILE_S
            self._waiting.append(_Waiting(message, grammars, grammars.compile(grammar), deadline))
            self._take_compiled()

    def _take_compiled(self) -> None:
        """Add the requests whose grammars are compiled, in order of arrival; refuse those past their deadline."""
        now = time.monotonic()
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if request.compiled.done():
                self._add(request.message, request.compiled)
                request.grammars.shrink()
            elif now < request.deadline:
                self._waiting.append(request)
            else:
                waited = f"The grammar was not compiled within {COMPILE_S:g} s, those in front of it included"
                self._refuse(request.message, f"{waited}: send it again later.", "unavailable")

    def _add(self, message: Submit, compiled: Future[CompiledGrammar] | None) -> None:
        try:
            for request in self._requests(message, None if compiled is None else compiled.result()):
                self._scheduler.add(request)
        except RidgelineError as error:
            self._refuse(message, error.message, "unavailable" if isinstance(error, Unavailable) else "refused")

    def _refuse(self, message: Submit, reason: str, finish: str = "refused") -> None:
        self._refused += [
            Update(message.id, choice, [], finish=finish, error=reason) for choice in range(message.sampling.n)
        ]

    def _requests(self, message: Submit, compiled: CompiledGrammar | None) -> list[Request]:
        """One request per choice. Raises RequestError for a request that can never run (the service refuses these first)."""
        sampling, setup, length = message.sampling, self.setup, len(message.tokens)
        if self._draining or setup.sleeper.level:
            raise Unavailable("The engine sleeps or is shutting down: wake it up, or use another replica.")
        if not 1 <= length < setup.max_len:
            raise RequestError(f"The prompt has {length} tokens: give 1 to {setup.max_len - 1}.", param="prompt")
        if min(message.tokens) < 0 or max(message.tokens) >= setup.vocab_size:
            raise RequestError(f"The prompt has a token id outside 0..{setup.vocab_size - 1}.", param="prompt")
        if not all(0 <= token < setup.vocab_size for token in sampling.stop_token_ids):
            raise RequestError(f"A stop token id is outside 0..{setup.vocab_size - 1}.", param="stop_token_ids")
        stop_ids = tuple(dict.fromkeys((() if sampling.ignore_eos else setup.eos_ids) + sampling.stop_token_ids))
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"stop_token_ids and the end tokens of the model are {len(stop_ids)} ids, more than {MAX_STOP_IDS}: send "
                "fewer stop_token_ids.",
                param="stop_token_ids",
            )
        drawn_tokens = 1 if message.hand_over else sampling.max_tokens or setup.max_len
        limit = length if sampling.pooling else min(setup.max_len, length + drawn_tokens)
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        adapter, adapter_hash = setup.adapters.find(message.adapter)
        requests = []
        for choice in message.drawn or range(sampling.n):
            self._arrivals += 1
            drawn = message.drawn.get(choice, [])
            if length + len(drawn) >= limit and sampling.pooling is None:
                raise RequestError(f"{len(drawn)} drawn tokens leave none of {limit} to draw.", param="max_tokens")
            constraint = start_constraint(message, compiled)
            if constraint is not None and drawn:
                constraint.accept(drawn)
            requests.append(
                Request(
                    id=message.id,
                    choice=choice,
                    tokens=array("i", message.tokens + drawn),
                    prompt_len=length,
                    sampling=sampling,
                    limit=limit,
                    stop_ids=stop_ids,
                    seed=seed,
                    order=(message.priority, self._arrivals),
                    arrival=message.arrival,
                    root=chain_root(message.salt, setup.fingerprint + adapter_hash),
                    cache=message.cache,
                    breakpoints=() if choice else message.breakpoints,
                    has_reader=message.has_reader,
                    deadline=message.deadline,
                    client=message.client,
                    adapter=adapter,
                    constraint=constraint,
                )
            )
        if not self._scheduler.fits(requests[0]):
            raise RequestError(
                f"{length} prompt tokens and up to {limit - length} answer tokens do not fit into the KV cache of this server: "
                f"shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )
        return requests

    def _control(self, message: Control) -> dict[str, Any]:
        leases = self._scheduler.leases
        if message.order == "stats":
            pool = leases.pool
            return {
                **self.setup.facts,
                "free": pool.free,
                "used": pool.used,
                "total": pool.total,
                "cached": pool.cached,
                "pinned": leases.pins.blocks,
                "running": len(self._scheduler.running),
                "waiting": self._scheduler.queued,
                "step": self._scheduler.last_step,
                "tiers": [asdict(tier) for tier in leases.source.tiers()],
            }
        if message.order == "reset_prefix_cache":
            return {"forgotten": leases.reset_prefix_cache()}
        if message.order in ORDERS:
            if not self.idle:
                return {"busy": True}
            reply, changes = self.setup.sleeper.obey(message.order, message.argument, leases)
            self.setup = replace(self.setup, **changes)
            return reply
        if message.order in PROFILE_ORDERS:
            return self.setup.profiler.obey(message.order, message.argument)
        if message.order in ADAPTER_ORDERS:
            return self.setup.adapters.obey(message.order, message.argument, self._scheduler.adapters)
        if message.order == "drain":
            self._draining = True
            return {}
        if message.order == "stop":
            self.stopped = True
            return {}
        return {"error": f"The order {message.order!r} is unknown."}

    # --- work -------------------------------------------------------------------------------------------------------

    def turn(self) -> Deltas | None:
        """Run one turn of the loop. Returns None if there is nothing to report."""
        self.setup.check()
        self.setup.profiler.check()
        self.setup.hand_overs.check()
        scheduler, before = self._scheduler, self._scheduler.last_step
        if self._waiting:
            self._take_compiled()
        updates = self.loop.turn()
        if self._refused:
            updates.others, self._refused = self._refused + updates.others, []
        steps = int(scheduler.last_step != before)
        # Without a step in flight, no step record will report arrivals and departures.
        queue_changed = not (steps or scheduler.steps_in_flight) and self._reported_counts != (
            len(scheduler.running),
            scheduler.queued,
        )
        if not (updates or steps or queue_changed):
            return None
        started = time.perf_counter()
        frame = self._frame(updates, self._stats(steps) if steps or queue_changed else None)
        self.reply_s = time.perf_counter() - started
        return frame

    def _frame(self, updates: StepUpdates, stats: StepStats | None) -> Deltas:
        self._sequence += 1
        deltas = [_delta(update) for update in updates.others]
        self.setup.hand_overs.add_tickets(deltas)
        return Deltas(self._sequence, deltas, stats, updates.ids, updates.choices, updates.tokens)

    def _stats(self, steps: int) -> StepStats:
        scheduler, loop, counts = self._scheduler, self.loop, self.loop.take_counts()
        pool = scheduler.leases.pool
        step = scheduler.last_step
        if step % _WASTE_EVERY == 0 or not scheduler.running:
            self._waste_inside = scheduler.leases.waste_inside(scheduler.running)
        self._reported_counts = running, waiting = len(scheduler.running), scheduler.queued
        account = (
            self.setup.account.step(scheduler.committed, counts.prompt_tokens, loop.device_s) if steps else Accounted()
        )
        flops, bytes_moved, predicted, joules = account[:4]
        token_counts = counts.prompt_tokens, counts.output_tokens, counts.drafted, counts.accepted, counts.preempted
        cache = counts.prefix_queries, counts.prefix_hits, pool.used, pool.cached, pool.total
        waste = self._waste_inside, self._waste_between
        host = loop.plan_s + loop.commit_s + self.reply_s
        parts = loop.plan_s, loop.commit_s, self.reply_s
        idle, drafts = loop.idle_s if steps else 0.0, (counts.drafts, counts.accepted_at, counts.saved_s)
        # Positional, in field order: keyword arguments take three times as long, and this runs in every step.
        work = steps, counts.failed, *parts, counts.dropped, flops, bytes_moved, predicted, idle, joules
        late = self.setup.late.take()
        record = step, running, waiting, *token_counts, *cache, *waste, host, loop.device_s, *work, *drafts, late
        stats = StepStats(*record, *account[4:])
        if steps and (tokens := self.setup.expert_load.take(step)):
            stats.expert_tokens, stats.rank_tokens = tokens, self.setup.expert_load.by_rank(tokens)
        if step % _WASTE_EVERY == 0 or not scheduler.running:
            stats.tiers = [
                (tier.name, tier.stored, tier.loaded, tier.dropped) for tier in scheduler.leases.source.tiers()
            ]
            pins = scheduler.leases.pins
            stats.pins = pins.readings()
        return stats


def _delta(update: Update) -> Delta:
    return Delta(
        update.id,
        update.choice,
        update.tokens,
        update.finish,
        update.stop_id,
        update.cached,
        update.error,
        update.logprobs,
        update.prompt_logprobs,
        update.times,
        update.pins,
        update.pooled,
    )
