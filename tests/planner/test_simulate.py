"""Simulated servers: the scheduler's decisions under a workload, with the cost model's times."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ridgeline.core.cost import CostModel
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope, kv_layout
from ridgeline.core.workload import RequestSpec, Workload, synthetic
from ridgeline.engine.policy import Limits
from ridgeline.planner.simulate import Figures, Server, serve, simulate

LAYER = LayerSpec(32, 8, 128, 14336, Rope(500_000.0, 128))
SPEC = ModelSpec("LlamaForCausalLM", 128_256, 4096, (LAYER,) * 32, 131_072)
COST = CostModel(SPEC, 989e12, 4.8e12)
SERVER = Server(COST, kv_layout(SPEC, 64), 8000, Limits(64, 8448, 16_384))


def workload(count: int, input_len: int = 512, output_len: int = 64, prefix: int = 0, apart_s: float = 0.0) -> Workload:
    made = synthetic(count, (str(input_len), str(output_len)), prefix, 0)
    return made.at([index * apart_s for index in range(count)])


def test_a_lone_request_takes_its_predicted_steps() -> None:
    figures = simulate(SERVER, workload(1, 512, 10))
    decode = [COST.decode_s([512 + token]) for token in range(1, 10)]
    assert figures.tpot_s == pytest.approx(sum(decode) / 9, rel=0.02)
    assert figures.e2e_s == pytest.approx(figures.ttft_s + sum(decode), rel=0.02)
    assert figures.tokens_s == pytest.approx(10 / figures.e2e_s)
    outside = simulate(replace(SERVER, outside_s=0.5), workload(1, 512, 10))
    assert outside.ttft_s == pytest.approx(figures.ttft_s + 0.5) and outside.tpot_s == pytest.approx(figures.tpot_s)


def test_steps_in_flight_hide_the_host() -> None:
    quiet = simulate(SERVER, workload(8)).e2e_s
    hidden = simulate(replace(SERVER, host_s=1e-3), workload(8)).e2e_s
    waited = simulate(replace(SERVER, host_s=1e-3, steps_in_flight=0), workload(8)).e2e_s
    assert hidden < quiet * 1.05 and waited > quiet * 1.15


def test_more_rows_shorten_the_queue() -> None:
    few, many = (
        simulate(replace(SERVER, limits=Limits(rows, 8448, 16_384)), workload(32, apart_s=0.01)) for rows in (4, 32)
    )
    assert many.slow_ttft_s < few.slow_ttft_s / 2 and many.tokens_s > 2 * few.tokens_s and many.tpot_s > few.tpot_s


def test_shared_prefixes_are_computed_once() -> None:
    shared = workload(16, 4096, 8, prefix=4032, apart_s=0.5)
    cached, computed = (simulate(replace(SERVER, prefix_cache=cache), shared) for cache in (True, False))
    assert cached.ttft_s < computed.ttft_s / 4
    apart = workload(16, 4096, 8, apart_s=0.5)
    assert simulate(SERVER, apart) == simulate(replace(SERVER, prefix_cache=False), apart)


def test_few_pages_make_requests_wait() -> None:
    full = simulate(replace(SERVER, pages=40), workload(16, 1024, 64))
    assert full.e2e_s > 2 * simulate(SERVER, workload(16, 1024, 64)).e2e_s


def test_a_static_batch_waits_for_its_longest_answer() -> None:
    mixed = Workload("mixed", tuple(RequestSpec(0.0, 64, 8 if index % 4 else 256) for index in range(32)), timed=True)
    small = replace(SERVER, limits=Limits(4, 8448, 16_384))
    assert simulate(small, mixed).e2e_s < 0.8 * simulate(replace(small, batching="static:4"), mixed).e2e_s


def test_small_chunks_shorten_the_longest_wait() -> None:
    long = Workload(
        "long",
        (RequestSpec(0.0, 64, 200), *(RequestSpec(0.1 + index * 0.2, 16_000, 2) for index in range(3))),
        timed=True,
    )
    large, small = (simulate(replace(SERVER, limits=Limits(64, size, 16_384)), long).stall_s for size in (16_384, 512))
    assert small < large / 4


def test_a_closed_loop_keeps_its_requests_running_and_replicas_share_them() -> None:
    single = simulate(SERVER, workload(32), concurrency=1)
    eight = simulate(SERVER, workload(32), concurrency=8)
    assert eight.tokens_s > 5 * single.tokens_s
    two = simulate(replace(SERVER, replicas=2), workload(32), concurrency=8)
    assert two.tpot_s < eight.tpot_s and two.tokens_s > eight.tokens_s
    assert simulate(replace(SERVER, replicas=2), workload(32), concurrency=1) == single


def test_a_pace_of_readers_brings_first_tokens_earlier_and_streams_keep_the_pace() -> None:
    busy = workload(120, 1500, 200, apart_s=0.045)
    paced = replace(SERVER, limits=replace(SERVER.limits, rows=128, step_tokens=512, pace_s=0.1))
    plain, read = (
        simulate(server, busy) for server in (replace(paced, limits=replace(paced.limits, pace_s=0.0)), paced)
    )
    assert read.ttft_s < 0.8 * plain.ttft_s and read.slow_ttft_s < plain.slow_ttft_s
    assert plain.tpot_s < read.tpot_s <= 0.1
    served = serve(paced, busy)
    assert Figures.of(*served) == read and max(outcome.tpot_s for outcome in served.outcomes) <= 0.1
    assert simulate(paced, workload(1)) == simulate(SERVER, workload(1)), "alone a request is not held back"


def test_a_request_that_can_never_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit into 4 blocks"):
        simulate(replace(SERVER, pages=4), workload(1, 1024, 8))


def test_no_requests_have_no_figures() -> None:
    assert math.isnan(simulate(SERVER, Workload("empty", ())).e2e_s)
