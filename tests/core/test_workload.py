"""Arrivals, lengths and prompts: rules and repeatability."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise

import msgspec
import pytest

from ridgeline.bench.options import LoadConfig, WorkloadConfig, schedule, source
from ridgeline.bench.prompts import Prompts, Vocabulary
from ridgeline.bench.target import Dialect
from ridgeline.core.errors import ConfigError
from ridgeline.core.workload import RequestSpec, Workload, arrivals, describe, synthetic


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_gaps_have_the_rate_and_the_variation(burstiness: float, variation: float) -> None:
    times = arrivals(20_001, 10.0, burstiness, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, abs=0.06)


def test_the_same_seed_gives_the_same_times_and_lengths() -> None:
    assert arrivals(50, 3.0, 1.0, 7) == arrivals(50, 3.0, 1.0, 7) != arrivals(50, 3.0, 1.0, 8)
    first, again, other = (synthetic(20, ("10-90", "5-50"), 0, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert arrivals(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("lengths", ["0", "-5", "9-3", "many", ""])
def test_lengths_that_cannot_be_meant(lengths: str) -> None:
    with pytest.raises(ConfigError, match="--input-len is"):
        synthetic(1, (lengths, "5"), 0, 0)


def test_what_exceeds_the_context_is_dropped_and_counted() -> None:
    asks = tuple(RequestSpec(float(at), size, 10) for at, size in enumerate([50, 95, 90, 200, 20]))
    scheduled, dropped = schedule(
        Workload("w", asks, True), 100, WorkloadConfig(max_requests=2), LoadConfig(time_scale=0.5)
    )
    assert [ask.input for ask in scheduled.requests] == [50, 90]
    assert [ask.at_s for ask in scheduled.requests] == [0.0, 1.0]
    assert dropped == 1
    with pytest.raises(ConfigError, match="No request fits into the context of 20 tokens .5 requests dropped."):
        schedule(Workload("w", asks, True), 20, WorkloadConfig(), LoadConfig())


def test_a_conversation_ends_before_the_turn_that_does_not_fit() -> None:
    sizes, sessions = (50, 60, 95, 70, 40), (1, -1, 1, 1, 2)
    asks = tuple(RequestSpec(0.0, size, 10, session=session) for size, session in zip(sizes, sessions, strict=True))
    scheduled, dropped = schedule(Workload("w", asks), 100, WorkloadConfig(), LoadConfig(concurrency=2))
    assert [ask.input for ask in scheduled.requests] == [50, 60, 40] and dropped == 2
    assert Workload("w", asks).within(100).requests == scheduled.requests
    assert describe(scheduled)["conversations"] == 2


def test_a_conversation_is_asked_with_its_roles_or_as_one_text() -> None:
    prompt = Prompts(Vocabulary(), 1).make(RequestSpec(0.0, 5, 5, text="Why?", history=("Hi.", "Hello.")), 0)
    assert prompt == ("Hi.", "Hello.", "Why?")
    chat = json.loads(Dialect("m", chat=True).body(prompt, 5))
    assert [(message["role"], message["content"]) for message in chat["messages"]] == [
        ("user", "Hi."), ("assistant", "Hello."), ("user", "Why?"),
    ]  # fmt: skip
    assert json.loads(Dialect("m").body(prompt, 5))["prompt"] == "Hi.\n\nHello.\n\nWhy?"
    assert json.loads(Dialect("m", chat=True).body("Hi.", 5))["messages"] == [{"role": "user", "content": "Hi."}]


def test_a_rate_scales_a_trace_and_keeps_its_burstiness() -> None:
    asks = tuple(RequestSpec(at, 5, 5) for at in (0.0, 0.0, 3.0, 3.0, 8.0))
    scheduled, _ = schedule(Workload("w", asks, True), None, WorkloadConfig(), LoadConfig(rate=4.0))
    assert [ask.at_s for ask in scheduled.requests] == pytest.approx([0.0, 0.0, 0.375, 0.375, 1.0])
    assert scheduled.rate == pytest.approx(4.0)
    poisson, _ = schedule(Workload("w", asks, True), None, WorkloadConfig(), LoadConfig(rate=4.0, burstiness=1.0))
    assert [ask.at_s for ask in poisson.requests] == arrivals(5, 4.0, 1.0, 0)
    closed, _ = schedule(Workload("w", asks, True), None, WorkloadConfig(), LoadConfig(concurrency=2))
    assert not closed.timed


def test_a_duration_draws_enough_requests() -> None:
    config, load = WorkloadConfig(), LoadConfig(rate=50.0, duration=10.0)
    scheduled, _ = schedule(source(config, load), None, config, load)
    assert 400 < len(scheduled.requests) < 600
    assert scheduled.requests[-1].at_s <= 10.0


def test_equal_blocks_are_equal_tokens_and_the_rest_is_its_own() -> None:
    words = Vocabulary(tuple(range(100, 200)))
    prompts = Prompts(words, 1)
    first, second, third = (
        json.loads(msgspec.json.encode(prompts.make(RequestSpec(0, size, 5, blocks, 8), index)))
        for index, (size, blocks) in enumerate([(20, (1, 2, 3)), (16, (1, 2)), (20, (1, 5, 6))])
    )
    assert [len(first), len(second), len(third)] == [20, 16, 20]
    assert first[:16] == second
    assert first[:8] == third[:8] and first[8:] != third[8:]
    assert set(first) <= set(words.ids)
    assert json.loads(msgspec.json.encode(Prompts(words, 1).make(RequestSpec(0, 20, 5, (1, 2, 3), 8), 0))) == first
    bodies = [msgspec.json.encode(prompts.make(RequestSpec(0, 20, 5), index)) for index in (0, 1)]
    assert bodies[0] != bodies[1]


def test_text_has_the_words_that_the_server_counts_as_the_wanted_tokens() -> None:
    prompts = Prompts(Vocabulary((), tokens_per_word=1.25, overhead=10.0), 1)
    text = prompts.make(RequestSpec(0, 110, 5), 0)
    assert isinstance(text, str) and len(text.split()) == 80
    assert prompts.make(RequestSpec(0, 110, 5, text="as it is"), 0) == "as it is"


def test_describe_finds_what_an_endless_cache_would_hit() -> None:
    asks = (RequestSpec(0, 1000, 5, (0, 1)), RequestSpec(1, 1100, 5, (0, 1, 2)), RequestSpec(3, 600, 5, (0, 9)))
    description = describe(Workload("w", asks, True))
    assert description["endless_cache_blocks"] == pytest.approx(3 / 7)
    assert description["endless_cache_tokens"] == pytest.approx((1024 + 512) / 2700)
    assert description["rate"] == pytest.approx(2 / 3)
    assert description["input_p50"] == 1000
