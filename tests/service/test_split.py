"""One client over engines for prompts and engines for the other tokens: what each of them is asked, and what becomes of a request
whose engine is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError, Unavailable
from ridgeline.core.sampling import SamplingParams
from ridgeline.service.launch import check_engines
from ridgeline.service.roles import Load, Roles
from ridgeline.service.split import Member, SplitClient
from ridgeline.wire.client import EngineClient, Subscription
from ridgeline.wire.messages import Delta, StepStats, Submit

from .fake_engine import Behaviour, FakeEngine

EOS = 9
JOINED = {
    "remote_engines": "prefill",
    "prefill_engines": 1,
    "decode_engines": 1,
    "hand_over": "tcp",
    "engine_address": "10.0.0.1:7000",
    "engine_secret": "s",
}
PROMPT = list(range(100, 150))


def counts(submit: Submit, choice: int) -> list[int]:
    """A script without end, other for each choice and each first token of a prompt."""
    return [submit.tokens[0] + choice + 10 * place for place in range(200)]


@dataclass
class Counted:
    """An observer."""

    seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    failures: list[str] = field(default_factory=list)
    steps: list[StepStats] = field(default_factory=list)

    def on_step(self, step: StepStats, engine: int = 0) -> None:
        self.steps.append(step)

    def handed_over(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def pulled(self, size: int) -> None:
        self.bytes += size

    def hand_over_failed(self, reason: str) -> None:
        self.failures.append(reason)


class Cluster:
    """Fake engines behind one client: first those for prompts."""

    def __init__(self, client: SplitClient, engines: list[FakeEngine], counted: Counted) -> None:
        self.client, self.engines, self.counted = client, engines, counted

    @classmethod
    async def start(cls, prefill: int = 1, decode: int = 1, **behaviours: dict[str, Any]) -> Cluster:
        """behaviours: of all engines, or of those named p0, p1, .., d0, d1, .."""
        counted, members, engines = Counted(), list[Member](), list[FakeEngine]()
        client = SplitClient(members, counted)
        common = {"script": counts, "eos": EOS, "vocab": 4000, **behaviours.pop("all", {})}
        names = [f"p{number}" for number in range(prefill)] + [f"d{number}" for number in range(decode)]
        for number, name in enumerate(names):
            plan = Behaviour(**{**common, **behaviours.get(name, {})})
            engine, reader, writer = await FakeEngine.connect(plan)
            engines.append(engine)
            inner = EngineClient(reader, writer, on_step=partial(client.on_step, number))
            members.append(Member(number, number < prefill, inner))
        await client.wait_ready()
        return cls(client, engines, counted)

    def submit(self, name: str = "a", prompt: list[int] = PROMPT, **options: Any) -> Subscription:
        extra = {key: options.pop(key) for key in ("cache", "salt") if key in options}
        sampling = SamplingParams(**{"max_tokens": 8, **options})
        return self.client.submit(Submit(name, prompt, sampling, arrival=0.0, **extra))

    async def settled(self) -> None:
        """Wait until every message of the client has arrived."""
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not self.client._routes and self.client.open_choices == 0
        assert [member.work for member in self.client.members] == [0] * len(self.client.members)

    async def stop(self) -> None:
        await self.client.close()
        for engine in self.engines:
            await engine.die()


def run(test: Callable[[Cluster], Awaitable[None]], *sizes: int, **behaviours: dict[str, Any]) -> None:
    async def whole() -> None:
        cluster = await Cluster.start(*sizes, **behaviours)
        try:
            async with asyncio.timeout(20):
                await test(cluster)
        finally:
            await cluster.stop()

    asyncio.run(whole())


async def heard(subscription: Subscription) -> list[Delta]:
    deltas: list[Delta] = []
    while not subscription.over:
        deltas += await subscription.take()
    return deltas


def tokens_of(deltas: list[Delta], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.choice == choice for token in delta.tokens]


def expected(prompt: list[int] = PROMPT, choice: int = 0, count: int = 8) -> list[int]:
    return [prompt[0] + choice + 10 * place for place in range(count)]


def test_a_prompt_is_handed_over() -> None:
    async def test(cluster: Cluster) -> None:
        prefill, decode = cluster.engines
        prefill.queued, decode.queued = 0.25, 1.0
        deltas = await heard(cluster.submit(prompt_logprobs=1, logprobs=2))
        assert tokens_of(deltas) == expected()
        assert [delta.finish for delta in deltas] == [""] * 7 + ["length"]
        assert [delta.cached for delta in deltas] == [16] + [-1] * 7, "usage is that of the engine of the prompt"
        assert all(delta.logprobs for delta in deltas) and deltas[0].prompt_logprobs
        assert deltas[0].times == (0.25, 0.0, 0.0, 0) and deltas[-1].times == (0.25, 0.0, 0.75, 0)
        assert all(delta.ticket is None for delta in deltas)
        ((asked,), (other,)) = prefill.submits, decode.submits
        assert asked.hand_over and not asked.drawn and asked.ticket is None
        assert other.drawn == {0: expected(count=1)} and other.ticket is not None and not other.hand_over
        assert asked.sampling.seed is not None and asked.sampling.seed == other.sampling.seed
        assert other.sampling.prompt_logprobs is None and other.sampling.logprobs == 2
        await cluster.settled()
        assert [cancel.id for cancel in prefill.cancels] == ["a"], "its pages are released"
        assert len(cluster.counted.seconds) == 1 and not cluster.counted.failures

    run(test)


def test_who_is_asked() -> None:
    async def test(cluster: Cluster) -> None:
        (prefill, decode), counted = cluster.engines, cluster.counted
        assert tokens_of(await heard(cluster.submit(prompt=PROMPT[:16]))) == expected()
        assert (len(prefill.submits), len(decode.submits)) == (0, 1), "no full block to hand over"
        assert tokens_of(await heard(cluster.submit(max_tokens=1))) == expected(count=1)
        assert (len(prefill.submits), len(decode.submits)) == (1, 1) and not prefill.submits[0].hand_over
        deltas = await heard(cluster.submit(stop_token_ids=(PROMPT[0],)))
        assert [delta.finish for delta in deltas] == ["stop"] and len(decode.submits) == 1
        deltas = await heard(cluster.submit(n=3, stop_token_ids=(PROMPT[0] + 1,)))
        assert decode.submits[-1].drawn == {0: [100], 2: [102]}
        assert tokens_of(deltas, 2) == expected(choice=2) and tokens_of(deltas, 1) == [101]
        await heard(cluster.submit(cache=False))
        asked, other = prefill.submits[-1], decode.submits[-1]
        assert asked.cache and asked.salt == other.salt and len(asked.salt) == 32, "a salt that nobody knows"
        await cluster.settled()
        assert not counted.failures and len(counted.seconds) == 2

    run(test)


@pytest.mark.parametrize(
    ("behaviours", "reason"),
    [
        ({"p0": {"fail_after": 1}}, "prefill"),
        ({"d0": {"pulls": False}}, "pages"),
        ({"d0": {"fail_after": 3}}, "decode"),
        ({"d0": {"die_after": 3}}, "decode"),
        ({"d0": {"die_after": 3, "last_word": "out of memory"}}, "decode"),
    ],
)
def test_a_failure_of_either_side_is_no_error(behaviours: dict[str, dict[str, Any]], reason: str) -> None:
    async def test(cluster: Cluster) -> None:
        deltas = await heard(cluster.submit(n=2, prompt_logprobs=1))
        for choice in range(2):
            assert tokens_of(deltas, choice) == expected(choice=choice)
        assert sorted(delta.finish for delta in deltas if delta.finish) == ["length"] * 2
        assert sum(delta.prompt_logprobs is not None for delta in deltas) == 1
        await cluster.settled()
        assert cluster.counted.failures == [reason]

    run(test, **behaviours)


def test_the_engine_of_a_prompt_dies_before_its_first_token() -> None:
    async def test(cluster: Cluster) -> None:
        prefill, decode = cluster.engines
        subscription = cluster.submit()
        while not prefill.submits:
            await asyncio.sleep(0.001)
        await prefill.die()
        assert tokens_of(await heard(subscription)) == expected()
        assert not decode.submits[0].drawn and decode.submits[0].ticket is None
        await cluster.settled()
        assert cluster.counted.failures == ["prefill"]

    run(test, p0={"stuck": True})


def test_an_engine_of_prompts_that_is_alone_goes_on_itself() -> None:
    """It has the pages: the release of what it kept does not end the request."""

    async def test(cluster: Cluster) -> None:
        prefill, decode = cluster.engines
        await decode.die()
        while cluster.client.members[1].serves:
            await asyncio.sleep(0.001)
        deltas = await heard(cluster.submit())
        assert tokens_of(deltas) == expected() and deltas[-1].finish == "length"
        assert [submit.ticket for submit in prefill.submits] == [None, None] and prefill.submits[1].drawn
        await cluster.settled()

    run(test)


def test_what_the_client_did_wrong_is_not_tried_again() -> None:
    async def test(cluster: Cluster) -> None:
        deltas = await heard(cluster.submit())
        assert [delta.finish for delta in deltas] == ["refused"] and not cluster.engines[1].submits
        await cluster.settled()

    run(test, p0={"fail_after": 1, "fails_as": "refused"})


def test_an_engine_that_always_fails_ends_the_request_with_its_error() -> None:
    async def test(cluster: Cluster) -> None:
        deltas = await heard(cluster.submit())
        assert deltas[-1].finish == "error" and "as it was told to" in deltas[-1].error
        await cluster.settled()

    run(test, all={"fail_after": 1})


def test_engines_that_are_lost() -> None:
    async def test(cluster: Cluster) -> None:
        prefill, decode = cluster.engines
        await prefill.die()
        while cluster.client.members[0].serves:
            await asyncio.sleep(0.001)
        assert tokens_of(await heard(cluster.submit())) == expected()
        assert cluster.counted.failures == ["no engine"] and cluster.client.trouble is None
        subscription = cluster.submit(max_tokens=2000)
        await subscription.take()
        await decode.die()
        assert (await heard(subscription))[-1].finish == "error"
        with pytest.raises(Unavailable, match="No engine is ready"):
            cluster.submit()
        assert cluster.client.trouble is not None
        await cluster.settled()

    run(test, all={"delay": 0.001})


@pytest.mark.parametrize("deltas_taken", range(4))
def test_cancel_reaches_both_engines(deltas_taken: int) -> None:
    async def test(cluster: Cluster) -> None:
        subscription = cluster.submit(max_tokens=100)
        for _ in range(deltas_taken):
            await subscription.take()
        subscription.close()
        await cluster.settled()
        prefill, decode = cluster.engines
        assert prefill.cancels and prefill.open == decode.open == 0
        assert bool(decode.submits) == bool(decode.cancels)

    run(test, all={"delay": 0.002})


def test_a_choice_that_a_stop_string_ends() -> None:
    async def test(cluster: Cluster) -> None:
        subscription = cluster.submit(n=2, max_tokens=100)
        await subscription.take()
        subscription.finish("a", 1, "stop", 1)
        deltas = await heard(subscription)
        assert tokens_of(deltas) == expected(count=100)[-len(tokens_of(deltas)) :]
        await cluster.settled()
        assert cluster.engines[1].open == 0

    run(test)


def test_an_idle_engine_takes_the_role_that_lacks_one() -> None:
    async def test(cluster: Cluster) -> None:
        client, now = cluster.client, 0.0
        client.clock, client.step_tokens, client.rows = lambda: now, 50, 8
        asked = [cluster.submit(name) for name in "abc"]
        assert [member.prefill for member in client.members] == [True, False, False]
        now = 4.9
        asked.append(cluster.submit("d"))
        assert [member.prefill for member in client.members] == [True, False, False], "a burst changes nothing"
        now = 5.1
        asked.append(cluster.submit("e"))
        assert [member.prefill for member in client.members] == [True, True, False]
        cluster.engines[0].behaviour.stuck = False
        for subscription in asked:
            assert tokens_of(await heard(subscription)) == expected()
        assert [submit.id for submit in cluster.engines[1].submits] == ["e"]
        await cluster.settled()

    run(test, 1, 2, p0={"stuck": True, "beat_s": 0.005})


def loads(*pairs: tuple[bool, float]) -> list[Load]:
    return [Load(number, prefill, load) for number, (prefill, load) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("state", "number"),
    [
        (loads((True, 1.0), (False, 0.5), (False, 0.4)), 2),
        (loads((True, 0.1), (True, 0.0), (False, 1.0)), 1),
        (loads((True, 2.0), (False, 0.0)), None),
        (loads((True, 2.0), (False, 0.6), (False, 0.6)), None),
        (loads((True, 0.9), (False, 0.0), (False, 0.0)), None),
        (loads((False, 2.0), (False, 0.0)), None),
    ],
)
def test_which_engine_changes_its_role(state: list[Load], number: int | None) -> None:
    roles = Roles(patience_s=5.0)
    assert roles.decide(state, 100.0) is None and roles.decide(state, 104.9) is None
    assert roles.decide(state, 105.0) == number
    assert roles.decide(state, 106.0) is None, "the next one again after some time"


def test_a_pause_of_the_overload_starts_the_time_again() -> None:
    busy, quiet = loads((True, 1.0), (False, 0.0), (False, 0.0)), loads((True, 0.0), (False, 0.0), (False, 0.0))
    roles = Roles(patience_s=5.0)
    for now, state in ((0.0, busy), (4.0, quiet), (5.0, busy), (9.0, busy)):
        assert roles.decide(state, now) is None
    assert roles.decide(busy, 10.0) == 1


@pytest.mark.parametrize("seed", range(6))
def test_random_deaths(seed: int) -> None:
    """Whatever dies, as long as one engine lives, every answer is whole."""

    async def test(cluster: Cluster) -> None:
        draw = random.Random(seed)
        prompts = {name: [draw.randrange(100, 900), *PROMPT] for name in "abcdefgh"}
        asked = {name: cluster.submit(name, prompt, max_tokens=30, n=2) for name, prompt in prompts.items()}

        async def kill() -> None:
            for engine in draw.sample(cluster.engines, 3):
                await asyncio.sleep(draw.random() * 0.04)
                await engine.die()

        *answers, _ = await asyncio.gather(*map(heard, asked.values()), kill())
        for prompt, deltas in zip(prompts.values(), answers, strict=True):
            for choice in range(2):
                assert tokens_of(deltas, choice) == expected(prompt, choice, 30)
        await cluster.settled()

    run(test, 2, 2, all={"delay": 0.002, "rows": 4})


def test_numbers_are_those_of_all_engines() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        assert client.facts["max_num_seqs"] == 16 and client.facts["engines"] == {"prefill": 1, "decode": 2}
        stats = await client.control("stats")
        assert stats["free"] == 30 and [each["prefill"] for each in stats["engines"]] == [True, False, False]
        assert (await client.control("reset_prefix_cache"))["forgotten"] == 9
        for engine, (loaded, joules) in enumerate(((0, 2.0), (3, 2.0), (4, 2.0))):
            record = StepStats(1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 5, 0, 10, 0.0, 0.0, 0.0, 0.0, joules=joules)
            record.tiers = [("hand-over", 1, loaded, 0)]
            client.on_step(engine, record)
        assert client.stats is not None
        assert (client.stats.running, client.stats.waiting, client.stats.blocks_total) == (6, 3, 30)
        assert client.stats.tiers == [("hand-over", 3, 7, 0)]
        assert sum(step.joules for step in cluster.counted.steps) == 2.0, "all read the same meter"
        record.tiers = [("hand-over", 0, 1, 0)]
        client.on_step(2, record)
        assert client.stats.tiers == [("hand-over", 3, 8, 0)], "a new process starts at zero"

    run(test, 1, 2)


def test_parts_of_a_prompt_go_to_the_engine_that_goes_on() -> None:
    async def test(cluster: Cluster) -> None:
        decodes = cluster.engines[1:]
        deltas = await heard(cluster.submit(n=2))
        assert [tokens_of(deltas, choice) for choice in range(2)] == [expected(choice=choice) for choice in range(2)]
        assert sorted(engine.order for engine in decodes) == [[], ["Offer", "Offer", "Offer", "Submit"]]
        await cluster.settled()
        assert len(cluster.counted.seconds) == 1 and not cluster.counted.failures

    run(test, 1, 2, p0={"offers": 3})


def test_parts_of_a_prompt_are_withdrawn() -> None:
    """The engine of the prompt fails, or the first token ends the answer: the other engine keeps nothing."""

    async def test(cluster: Cluster) -> None:
        prefill, decode = cluster.engines
        assert tokens_of(await heard(cluster.submit())) == expected()
        assert decode.order == ["Offer", "Offer", "Cancel", "Submit"] and decode.submits[0].ticket is None
        await cluster.settled()
        assert cluster.counted.failures == ["prefill"]
        prefill.behaviour.fail_after = None
        await heard(cluster.submit("b", stop_token_ids=(PROMPT[0],)))
        await cluster.settled()
        assert decode.order[4:] == ["Offer", "Offer", "Cancel"]

    run(test, p0={"offers": 2, "fail_after": 1})


def test_the_engine_that_was_offered_parts_is_lost() -> None:
    async def test(cluster: Cluster) -> None:
        decodes = cluster.engines[1:]
        subscription = cluster.submit()
        while not any(engine.offered for engine in decodes):
            await asyncio.sleep(0.001)
        (lost,) = [engine for engine in decodes if engine.offered]
        await lost.die()
        assert tokens_of(await heard(subscription)) == expected()
        await cluster.settled()
        assert not lost.submits and not cluster.counted.failures

    run(test, 1, 2, p0={"offers": 2, "delay": 0.05})


@pytest.mark.parametrize(
    ("service", "words"),
    [
        ({"prefill_engines": 1}, "--prefill-engines is 1 without --decode-engines"),
        ({"decode_engines": 2}, "--decode-engines is 2 without --prefill-engines"),
        ({"join": "10.0.0.1:7000"}, "--join needs --engine-secret"),
        ({**JOINED, "models": "models.yaml"}, "--models runs engines of this host only"),
        ({"join": "10.0.0.1", "engine_secret": "s"}, "give HOST:PORT"),
        ({"remote_engines": "prefill"}, "--remote-engines needs --engine-address"),
        ({**JOINED, "engine_secret": None}, "--remote-engines needs --engine-secret"),
        ({**JOINED, "prefill_engines": 0, "decode_engines": 0}, "--hand-over tcp needs --prefill-engines"),
        ({**JOINED, "remote_engines": ""}, "--engine-address needs --remote-engines"),
        ({**JOINED, "hand_over": "local"}, "--remote-engines needs --hand-over tcp"),
        ({**JOINED, "engine_address": "10.0.0.1:0"}, "give HOST:PORT"),
    ],
)
def test_numbers_of_engines_that_do_not_hold(service: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_engines(ServiceConfig(**service))
