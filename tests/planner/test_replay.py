"""Recorded requests replayed with other options: the direction and the size of changes, and intervals."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.workload import RequestSpec, Workload, arrivals
from ridgeline.engine.policy import Limits
from ridgeline.planner.replay import Case, Estimate, changed, replay, resampled
from ridgeline.planner.situation import Situation

from .test_remedies import SERVER, situation

LOAD = Workload("recorded", tuple(RequestSpec(0.0, 1500 + 37 * n % 900, 60 + n % 50) for n in range(120)), timed=True)
BUSY = situation(LOAD.at(arrivals(120, 30.0, 1.0, 0)))


def estimates(now: Situation, resamples: int = 0, replicas: int = 1, **options: Any) -> dict[str, Estimate]:
    """The record is what the simulation of the server as it was says, 10 % slower."""
    slower = [
        outcome._replace(ttft_s=1.1 * outcome.ttft_s, tpot_s=1.1 * outcome.tpot_s)
        for outcome in Case(now).outcomes(now.workload)
    ]
    made = replay(Case(now), Case(changed(now, options), replicas), slower, resamples)
    return {estimate.name: estimate for estimate in made}


def test_without_a_change_the_estimate_is_the_record() -> None:
    for estimate in estimates(BUSY).values():
        assert estimate.expected.value == pytest.approx(estimate.recorded.value) and estimate.change == 0
    assert estimates(BUSY)["TTFT p99"].recorded.value == pytest.approx(1.1 * estimates(BUSY)["TTFT p99"].as_recorded)


def test_two_replicas_shorten_the_tail_and_intervals_contain_the_estimates() -> None:
    made = estimates(BUSY, resamples=4, replicas=2)
    for estimate in made.values():
        assert estimate.simulated.low <= estimate.simulated.value <= estimate.simulated.high and estimate.change < 0
        assert estimate.expected.value == pytest.approx(estimate.recorded.value * (1 + estimate.change))
    tail = made["TTFT p99"]
    assert tail.change < -0.2 and tail.recorded.low < tail.recorded.high and tail.expected.high < tail.recorded.high


def test_smaller_chunks_trade_first_tokens_for_steady_streams() -> None:
    long = Workload("long", tuple(RequestSpec(0.4 * n, 12_000, 60) for n in range(20)), timed=True)
    now = situation(long, limits=Limits(256, 16_896, 16_896))
    after = changed(now, {"max_num_batched_tokens": 512})
    assert after.server.limits.step_tokens == 512 and after.engine.max_num_batched_tokens == 512
    assert estimates(now, max_num_batched_tokens=512)["TTFT p50"].change > 0


def test_formats_change_bytes_and_room() -> None:
    after = changed(BUSY, {"kv_cache_dtype": "fp8"})
    assert after.server.pages == pytest.approx(2 * BUSY.server.pages, rel=0.05) and after.spec.kv_format == "fp8"
    smaller = changed(BUSY, {"quantization": "fp8"})
    assert smaller.server.pages > BUSY.server.pages and smaller.model.quantization == "fp8"
    assert estimates(BUSY, quantization="fp8")["TPOT p50"].change < -0.2


def test_other_options_reach_the_server() -> None:
    after = changed(
        BUSY, {"enable_prefix_caching": False, "max_num_seqs": 8, "steps_in_flight": 0, "batching": "static:4"}
    )
    server = after.server
    assert (server.prefix_cache, server.limits.rows, server.steps_in_flight, server.batching) == (
        False,
        8,
        0,
        "static:4",
    )
    assert after.engine == EngineConfig(
        enable_prefix_caching=False, max_num_seqs=8, steps_in_flight=0, batching="static:4"
    )


def test_a_closed_loop_stays_one() -> None:
    now = replace(BUSY, concurrency=16)
    assert estimates(now, max_num_seqs=2)["whole answer p50"].change > 1


def test_samples_keep_neighbours_together() -> None:
    sample = resampled(BUSY.workload, random.Random(1))
    assert len(sample.requests) == 120
    lengths = [request.input for request in BUSY.workload.requests]
    places = [lengths.index(request.input) for request in sample.requests]
    assert sum(later == place + 1 for place, later in pairwise(places)) >= 110
    assert all(a.at_s <= b.at_s for a, b in pairwise(sample.requests))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 4}, "--threads cannot be replayed: give some of --quantization"),
        ({"kv_cache_dtype": "fp5"}, "--kv-cache-dtype is 'fp5': give one of"),
        ({"batching": "wild"}, "--batching"),
        ({"max_num_batched_tokens": 128}, "--max-num-batched-tokens is 128, below the 256 requests at once"),
    ],
)
def test_what_cannot_be_replayed_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(BUSY, options)


def test_weights_that_are_quantized_stay() -> None:
    with pytest.raises(ConfigError, match="weights in fp8 already"):
        changed(replace(BUSY, spec=replace(BUSY.spec, quantization="fp8")), {"quantization": "int8"})
    assert SERVER.limits.rows == 256
