"""Prefill apart from decode in virtual time: who waits for whom, and which ratio a workload wants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.cost import CostModel
from ridgeline.core.slo import Slo
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope, kv_layout
from ridgeline.core.workload import RequestSpec, Workload, arrivals, synthetic
from ridgeline.engine.policy import Limits
from ridgeline.planner.simulate import Server, serve
from ridgeline.planner.split import Ratio, compare_ratios, good_share, goodput, serve_split

LAYER = LayerSpec(32, 8, 128, 14336, Rope(500_000.0, 128))
SPEC = ModelSpec("LlamaForCausalLM", 128_256, 4096, (LAYER,) * 32, 131_072)
COST = CostModel(SPEC, 100e12, 0.8e12)
SERVER = Server(COST, kv_layout(SPEC, 64), 4000, Limits(64, 2048, 16_384), link=20e9)
ONE = Ratio(1, 1)


def lone(tokens: int = 1024, output: int = 8) -> Workload:
    return Workload("one", (RequestSpec(0.0, tokens, output),), timed=True)


def test_a_lone_request_takes_its_prompt_its_pages_and_its_steps() -> None:
    (outcome,) = serve_split(SERVER, lone(), ONE).outcomes
    (joint,) = serve(SERVER, lone()).outcomes
    assert outcome.ttft_s == pytest.approx(joint.ttft_s) and outcome.output == 8
    copy = 16 * SERVER.layout.page_bytes / 20e9
    assert outcome.stall_s == pytest.approx(copy + COST.decode_s([1025]), rel=0.1)
    (slow,) = serve_split(replace(SERVER, link=2e9), lone(), ONE).outcomes
    assert slow.e2e_s - outcome.e2e_s == pytest.approx(9 * copy, rel=0.05)
    assert slow.ttft_s == outcome.ttft_s


def test_no_link_is_as_slow_as_computing_nothing_again() -> None:
    """What is pulled is not computed: only the tokens after the last full block are."""
    served = serve_split(SERVER, lone(4096 + 5), ONE)
    assert served.device_s == pytest.approx(serve(SERVER, lone(4096 + 5)).device_s, rel=0.1)


def test_one_token_needs_no_second_engine() -> None:
    requests = (RequestSpec(0.0, 500, 1), RequestSpec(0.1, 500, 4), RequestSpec(0.2, 500, 1))
    served = serve_split(SERVER, Workload("mixed", requests, timed=True), Ratio(2, 2))
    assert [outcome.output for outcome in served.outcomes] == [1, 4, 1]


def test_prompts_do_not_stall_running_answers() -> None:
    story = RequestSpec(0.0, 64, 60)
    prompts = [RequestSpec(0.05 + 0.2 * index, 3000, 2) for index in range(4)]
    workload = Workload("mixed", (story, *prompts), timed=True)
    together, apart = serve(SERVER, workload).outcomes, serve_split(SERVER, workload, ONE).outcomes
    stall = max(outcome.stall_s for outcome in together if outcome.output == 60)
    assert apart[0].stall_s < stall / 3


def test_the_ratio_follows_the_workload() -> None:
    """Long prompts want engines for prompts, long answers want engines for the other tokens."""
    slo = Slo.parse("ttft=4s,tpot=35ms")
    for lengths, rate, count, wanted in (
        (("3000-4000", "20-30"), 2.4, 40, (2, 1)),
        (("50-100", "100-120"), 45.0, 180, (1, 2)),
    ):
        workload = synthetic(count, lengths, 0, 0).at(arrivals(count, rate, 1.0, 0))
        good, bad = (
            good_share(slo, serve_split(SERVER, workload, Ratio(*ratio)).outcomes) for ratio in (wanted, wanted[::-1])
        )
        assert good > 0.9 and bad < 0.7, (lengths, good, bad)


def test_goodput_is_the_highest_rate_that_meets_the_objective() -> None:
    workload = synthetic(100, ("1500-2500", "6-8"), 0, 0).at(arrivals(100, 1.0, 1.0, 0))
    slo = Slo.parse("ttft=1s,tpot=60ms")
    result, worse = compare_ratios(SERVER, workload, slo, (Ratio(1, 2), ONE))
    assert result.ratio == ONE and result.per_device > worse.per_device, "a second engine for so few tokens is idle"
    shares = [
        good_share(slo, serve_split(SERVER, workload.first(60).at_rate(rate), ONE).outcomes)
        for rate in (result.rate, 2 * result.rate)
    ]
    assert shares[0] >= 0.9 > shares[1]
    assert goodput(SERVER, workload, Slo.parse("ttft=1ms"), ONE).rate == 0
