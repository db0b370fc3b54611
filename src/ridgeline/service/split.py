"""One client over engines for prompts and engines for the tokens after the first.

Every engine can do both: what it does is decided here, for each request. So a request whose engine is lost goes on at another one,
with the tokens that it has, and its client sees no error as long as one engine serves.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from ridgeline.core.errors import EngineFailed, Unavailable
from ridgeline.core.ticket import Ticket
from ridgeline.service.roles import PROMPT_STEPS, Load, Roles
from ridgeline.wire.client import MAX_UNREAD, EngineClient, Subscription
from ridgeline.wire.messages import Cancel, Delta, Finish, Loading, Offer, StepStats, Submit, Up

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Engines that a request tries after its first one, before it ends with the error of the last."""
JOULES = {"joules": 0.0, "prompt_joules": 0.0, "output_joules": 0.0, "metered_s": 0.0}
SUMMED = ("running", "waiting", "blocks_used", "blocks_cached", "blocks_total")
"""Fields of StepStats that say what an engine holds now."""
COUNTS = ("free", "used", "total", "cached", "running", "waiting", "forgotten")
"""Numbers in the replies of engines that add up."""
FACTS = ("max_num_seqs", "blocks")
"""Facts of engines that add up over those for the tokens after the first."""


class Observer(Protocol):
    """Counts what happens (metrics.Metrics)."""

    def on_step(self, step: StepStats, engine: int = 0) -> None: ...

    def handed_over(self, seconds: float) -> None: ...

    def pulled(self, size: int) -> None: ...

    def hand_over_failed(self, reason: str) -> None: ...


@dataclass(eq=False)
class Member:
    """One of the engines. prefill: it computes prompts for others. client: of its process, the newest one. gone: why no other
    process replaces a lost one; empty: it is there, or one is started. work: prompt tokens, or choices, that it was given and has
    not finished."""

    number: int
    prefill: bool
    client: EngineClient
    gone: str = ""
    work: int = 0
    shift: float = 0.0
    """Its monotonic clock minus that of the service: not 0 on another host."""
    stats: StepStats | None = None
    tiers: tuple[int, int, int] = (0, 0, 0)
    """Pages exported, pulled and lost by its process so far."""

    @property
    def serves(self) -> bool:
        return self.client.ready.is_set() and self.client.failure is None


class Route:
    """The way of one request through the engines: the receiver of its deltas, which it gives to the subscription."""

    def __init__(self, split: SplitClient, request: Submit, subscription: Subscription) -> None:
        self._split, self.subscription = split, subscription
        sampling = request.sampling
        if sampling.seed is None:  # all engines draw with the same random numbers
            request = msgspec.structs.replace(request, sampling=replace(sampling, seed=random.getrandbits(63)))
        if not request.cache:  # its pages are found by their keys: nobody else has this salt
            request = msgspec.structs.replace(request, cache=True, salt=secrets.token_hex(16))
        self._request = request
        self._member: Member | None = None
        self._client: EngineClient | None = None
        """Of the member's process that has the request now."""
        self._weight = 0
        self._keeper: EngineClient | None = None
        """Of the process that keeps its pages."""
        self._ticket: Ticket | None = None
        self._offered: tuple[Member, EngineClient] | None = None
        """Where its pages travel while its prompt is computed, which counts there as work."""
        self._began = math.nan
        self._prefills = False
        self._attempts = 0
        self._running = set(range(sampling.n))
        self._waits = set(self._running)
        """Choices that the present engine has not ended."""
        self._drawn: dict[int, list[int]] = {}
        self._closed = self._answered = False
        """_answered: the first delta was given on: cached tokens and scores of the prompt are known."""
        self._spent: dict[int, tuple[float, ...]] = {}
        """Times of each choice at the engine of its prompt."""

    # --- between engines --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Give the request to an engine for prompts if another engine can go on with it."""
        request, split = self._request, self._split
        several = request.sampling.max_tokens != 1 and len(request.tokens) + 1 < split.max_len
        long = len(request.tokens) > split.page_tokens
        member = split.least(prefill=True) if long or not several else None
        if member is None:
            if long and several:
                split.observer.hand_over_failed("no engine")
            self._go_on_or_fail()
            return
        self._prefills = several
        self._keeper = member.client if several else None
        asked = msgspec.structs.replace(request, hand_over=True) if several else request
        self._give(member, asked, len(request.tokens))

    def _go_on(self, without: Member | None = None) -> bool:
        """Give the request, with the tokens that it has, to an engine. False: none serves."""
        request, split = self._request, self._split
        offered = self._withdraw(stays=self._ticket is not None)
        member = offered if offered is not without else None
        member = member or split.least(prefill=False, without=without) or split.least(prefill=True, without=without)
        if member is None:
            return False
        if (
            member.client is self._keeper
        ):  # it finds its own pages without a ticket; a later Cancel would end the request
            self._release()
        sampling, drawn = request.sampling, {choice: self._drawn.get(choice, []) for choice in sorted(self._running)}
        if self._answered and sampling.prompt_logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=None)
        self._prefills, self._waits, self._began = False, set(self._running), split.clock()
        asked = msgspec.structs.replace(
            request, sampling=sampling, drawn=drawn if any(drawn.values()) else {}, ticket=self._ticket
        )
        self._give(member, asked, len(drawn))
        return True

    def _go_on_or_fail(self) -> None:
        if not self._go_on():
            self.subscription.fail(f"No engine is ready: {self._split.trouble}.")

    def _give(self, member: Member, request: Submit, weight: int) -> None:
        self._member, self._client, self._weight = member, member.client, weight
        member.work += weight
        self._client.start(msgspec.structs.replace(request, arrival=request.arrival + member.shift), self)

    def _leave(self) -> None:
        """The present engine is done with the request."""
        if self._member is not None and self._client is not None:
            self._member.work -= self._weight
            self._client.forget(self._request.id)
        self._member = self._client = None

    def _release(self) -> None:
        """No engine pulls the kept pages any more."""
        if self._keeper is not None:
            self._keeper.send(Cancel(self._request.id, "handed over"))
        self._keeper = self._ticket = None

    def _offer(self, ticket: Ticket) -> None:
        """Pages of the prompt, of which more is computed, may travel to the engine that will go on."""
        if self._offered is None and (member := self._split.least(prefill=False)) is not None:
            self._offered = member, member.client
            member.work += 1
        if self._offered is not None:
            self._offered[1].send(Offer(self._request.id, ticket))

    def _withdraw(self, *, stays: bool = False) -> Member | None:
        """No more pages are offered. Returns the engine that has them, if it still serves. stays: it goes on with them."""
        if self._offered is None:
            return None
        (member, client), self._offered = self._offered, None
        member.work -= 1
        if not stays:
            client.send(Cancel(self._request.id, "not handed over"))
        return member if member.serves and member.client is client else None

    # --- from the engines -------------------------------------------------------------------------------------------

    def put(self, delta: Delta) -> None:
        if delta.ticket is not None and not delta.finish:
            self._offer(delta.ticket)
            return
        if delta.finish == "error" and self._retry("prefill" if self._prefills else "decode"):
            return
        if self._prefills:
            self._take_first(delta)
        else:
            self._take(delta)

    def _take_first(self, delta: Delta) -> None:
        """A delta of the engine of the prompt: with the finish "length" another engine goes on."""
        choice = delta.choice
        self._waits.discard(choice)
        if delta.ticket is not None:
            self._ticket, delta.ticket = delta.ticket, None
        if delta.finish == "length":
            delta.finish = ""
            self._drawn[choice] = list(delta.tokens)
            if delta.times is not None:
                self._spent[choice] = delta.times
        else:
            self._running.discard(choice)
        self._answered = True
        if not self._waits:
            self._leave()
        self.subscription.put(delta)
        if not (self._waits or self._closed) and self._running:
            self._go_on_or_fail()

    def _take(self, delta: Delta) -> None:
        if self._ticket is not None:
            self._arrived(delta)
        if self._answered:
            delta.cached, delta.pins = -1, None
        self._answered = True
        if delta.times is not None and delta.choice in self._spent:
            delta.times = _joined(self._spent[delta.choice], delta.times)
        if delta.finish:
            self._running.discard(delta.choice)
            self._waits.discard(delta.choice)
            if not self._waits:
                self._leave()
        else:
            self._drawn.setdefault(delta.choice, []).extend(delta.tokens)
        self.subscription.put(delta)

    def _arrived(self, delta: Delta) -> None:
        """The first delta of the engine that goes on says how much of the prompt it did not compute."""
        assert self._ticket is not None
        if delta.cached >= len(self._ticket.keys) * self._split.page_tokens:
            self._split.observer.handed_over(self._split.clock() - self._began)
        else:
            self._split.observer.hand_over_failed("pages")
        self._release()

    def fail(self, message: str, reason: str = "failed") -> None:
        """The process of the present engine is lost."""
        if not self._retry("prefill" if self._prefills else "decode"):
            self.subscription.fail(message, reason)

    def _retry(self, reason: str) -> bool:
        """Go on at another engine, or at the same one if it is the only one that serves."""
        member, self._attempts = self._member, self._attempts + 1
        if member is None or self._attempts > ATTEMPTS:
            return False
        if self._client is not None:
            self._client.send(Cancel(self._request.id, "moved"))
        self._leave()
        self._release()
        if not (self._go_on(without=member) or self._go_on()):
            return False
        self._split.observer.hand_over_failed(reason)
        return True

    # --- from the subscription --------------------------------------------------------------------------------------

    def send(self, message: Cancel | Finish) -> None:
        if isinstance(message, Finish):
            self._running.discard(message.choice)
            self._waits.discard(message.choice)
        if self._client is not None:
            self._client.send(message)

    def close(self) -> None:
        """The subscription has all deltas, or wants no more."""
        self._closed = True
        self._leave()
        self._withdraw()
        self._release()


def _joined(first: tuple[float, ...], times: tuple[float, ...]) -> tuple[float, ...]:
    """The times of a choice (metrics.records.Spent) over both engines: all time after the first token is decoding."""
    queue, prefill, _, *before = first
    decode = sum(times[:3]) - queue - prefill
    return queue, prefill, decode, *(old + new for old, new in zip(before, times[3:], strict=True))


@dataclass
class SplitClient:
    """The client of several engines (wire.client.Client).

    members: changed by their owner, which replaces clients. observer: counts. page_bytes, page_tokens, max_len: of the engines,
    once they are ready.
    """

    members: list[Member]
    observer: Observer
    clock: Callable[[], float] = time.monotonic
    max_unread: int = MAX_UNREAD
    open_choices: int = 0
    """Submitted choices that have not ended."""
    last_step: int = -1
    stats: StepStats | None = None
    roles: Roles = field(default_factory=Roles)
    rows: int = 1
    step_tokens: int = 1
    """Requests and query tokens of a step of one engine."""
    page_tokens: int = 0
    page_bytes: int = 0
    max_len: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all members are gone."""
    _routes: dict[str, Route] = field(default_factory=dict)
    _facts: dict[str, Any] = field(default_factory=dict)
    _tiers: list[int] = field(default_factory=lambda: [0, 0, 0])
    _closed: bool = False

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, *requests: Submit) -> Subscription:
        """As EngineClient.submit."""
        if self.failure is not None:
            raise Unavailable(f"No engine is ready: {self.failure.rstrip('.')}. Send the request again.")
        for request in requests:
            if request.id in self._routes:
                raise ValueError(f"request id {request.id!r} is in use")
        self._change_roles()
        subscription = Subscription(self, requests)
        self.open_choices += subscription.choices
        for request in requests:
            self._routes[request.id] = route = Route(self, request, subscription)
            route.begin()
        return subscription

    def _change_roles(self) -> None:
        """Let an engine change its kind if one kind is overloaded and the other is idle. What it has begun it ends."""
        sizes = {True: PROMPT_STEPS * self.step_tokens, False: self.rows}
        loads = [
            Load(member.number, member.prefill, member.work / max(1, sizes[member.prefill]))
            for member in self.members
            if member.serves
        ]
        number = self.roles.decide(loads, self.clock())
        if number is not None:
            member = self.members[number]
            member.prefill = not member.prefill
            log.info("Engine %d now %s.", number, "computes prompts" if member.prefill else "goes on with prompts")

    def send(self, message: Up) -> None:
        """A message of a subscription."""
        if isinstance(message, Cancel | Finish) and (route := self._routes.get(message.id)) is not None:
            route.send(message)

    def forget(self, request_id: str) -> None:
        if (route := self._routes.pop(request_id, None)) is not None:
            route.close()

    def end_all(self, message: str, reason: str) -> None:
        """End every open request with an error delta."""
        for subscription in {route.subscription for route in self._routes.values()}:
            subscription.fail(message, reason)

    def least(self, *, prefill: bool, without: Member | None = None) -> Member | None:
        """The member of a kind that serves and has the least work."""
        serving = [
            member for member in self.members if member.prefill == prefill and member.serves and member is not without
        ]
        return min(serving, key=lambda member: (member.work, member.number), default=None)

    # --- engines ----------------------------------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        return self._facts

    @property
    def loading(self) -> Loading | None:
        """Of the first engine that is not ready."""
        loading = (member.client.loading for member in self.members if not member.client.ready.is_set())
        return next(loading, None) or self.members[-1].client.loading

    @property
    def failure(self) -> str | None:
        """Why no request can be answered, or None."""
        if self._closed:
            return "the service is stopping."
        if not self.ready.is_set() or any(member.serves for member in self.members):
            return None
        reasons = [member.gone or member.client.failure for member in self.members]
        return next(filter(None, reasons), "all engines are being restarted")

    @property
    def trouble(self) -> str | None:
        """Why the engines are unhealthy, or None: one that serves is enough."""
        if not self.ready.is_set():
            return next(filter(None, (member.client.trouble for member in self.members)), "the engines are loading")
        if self.failure is not None:
            return self.failure
        troubles = [member.client.trouble for member in self.members if member.serves]
        return None if None in troubles else troubles[0]

    async def wait_ready(self) -> dict[str, Any]:
        """As EngineClient.wait_ready, for all members."""
        all_facts = [await member.client.wait_ready() for member in self.members]
        later = [facts for member, facts in zip(self.members, all_facts, strict=True) if not member.prefill]
        if len({facts.get("fingerprint") for facts in all_facts}) > 1:
            raise EngineFailed("The engines have different models: their files were changed while they started.")
        self._facts = later[0] | {name: sum(facts.get(name, 0) for facts in later) for name in FACTS}
        self._facts["engines"] = {"prefill": len(all_facts) - len(later), "decode": len(later)}
        self.page_tokens, self.max_len = int(later[0].get("page_tokens", 0)), int(later[0]["max_len"])
        self.page_bytes = int(later[0].get("page_bytes", 0))
        self.rows = int(later[0].get("max_num_seqs", 1))
        self.step_tokens = int(later[0].get("max_num_batched_tokens", 1))
        self.ready.set()
        return self._facts

    async def wait_lost(self) -> str:
        """Wait until all members are gone; return the reason."""
        await self.ready.wait()
        await self.lost.wait()
        return self.failure or "all engines have ended"

    async def control(self, order: str, timeout: float = 10.0, argument: str = "") -> dict[str, Any]:
        """Send an order to all engines that serve. Numbers of their replies are added; `engines` has each reply."""
        serving = [member for member in self.members if member.serves]
        if not serving:
            raise EngineFailed(f"No engine is ready: {self.failure}.")
        replies = await asyncio.gather(*(member.client.control(order, timeout, argument) for member in serving))
        sums = {name: sum(reply[name] for reply in replies) for name in COUNTS if name in replies[0]}
        each = [
            {"prefill": member.prefill, **{name: reply[name] for name in (*COUNTS, "tiers") if name in reply}}
            for member, reply in zip(serving, replies, strict=True)
        ]
        return replies[-1] | self._facts | sums | {"engines": each}

    async def close(self) -> None:
        """Close the clients of all members. Their engines stop."""
        self._closed = True
        self.ready.set()
        self.lost.set()
        await asyncio.gather(*(member.client.close() for member in self.members))
        self.end_all("the service is stopping.", "failed")

    def on_step(self, number: int, stats: StepStats) -> None:
        """The record of a step of one member: what engines hold is added over all, the rest is that of the step. Engines on CPUs
        read the same meter, so the first one's energy counts."""
        member = self.members[number]
        member.stats = stats
        held = [other.stats for other in self.members if other.stats is not None]
        sums: dict[str, Any] = {name: sum(getattr(other, name) for other in held) for name in SUMMED}
        if number and self._facts.get("device", "cpu") == "cpu":
            sums |= JOULES
        if stats.tiers:
            sums["tiers"] = [self._tier(member, *tier) for tier in stats.tiers]
        self.last_step += stats.steps
        self.stats = msgspec.structs.replace(stats, step=max(0, self.last_step), **sums)
        self.observer.on_step(self.stats, number)

    def _tier(self, member: Member, name: str, *counts: int) -> tuple[str, int, int, int]:
        """Counts of all engines, from those of one. A new process starts at zero."""
        restarted = any(now < then for now, then in zip(counts, member.tiers, strict=True))
        before = (0, 0, 0) if restarted else member.tiers
        for place, (now, then) in enumerate(zip(counts, before, strict=True)):
            self._tiers[place] += now - then
        self.observer.pulled((counts[1] - before[1]) * self.page_bytes)
        member.tiers = counts[0], counts[1], counts[2]
        stored, loaded, dropped = self._tiers
        return name, stored, loaded, dropped
