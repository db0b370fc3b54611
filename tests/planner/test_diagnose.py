"""The decision path: which bottleneck is named for what was measured, and which cures, with what predicted gain."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ridgeline.planner.diagnose import CURES, Observation, diagnose, observe

# An 8B in bf16 on an H200, 64 requests of 2,000 tokens: 16.1 GB of weights (15.0 a step), 16.8 GB of KV.
DECODING = Observation(
    running=64.0, waiting=0.0, max_running=512.0, kv_used=0.2, kv_tokens=128_000.0, busy=0.98, bubble=0.01,
    prompt_share=0.1, hit_rate=0.1, mfu=0.1, mbu=0.85, step_s=8.9e-3, step_bytes=31.8e9, weight_bytes=15.0e9,
    kv_bytes_per_token=131_072.0, bandwidth=4.26e12, e2e_s=3.0, queue_s=0.0, prefill_s=0.1, tpot_s=9e-3, outside_s=0.01,
    device="NVIDIA H200",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "decode bandwidth"),
        ({"prompt_share": 0.8, "mfu": 0.8}, "prefill compute"),
        ({"waiting": 20.0, "kv_used": 0.97}, "KV capacity"),
        ({"waiting": 20.0, "running": 512.0}, "queue"),
        ({"bubble": 0.4}, "host"),
        ({"outside_s": 2.0}, "client"),
        ({"busy": 0.2}, "none"),
    ],
)
def test_the_bottleneck_is_named_with_its_evidence(changes: dict[str, float], name: str) -> None:
    diagnosis = diagnose(replace(DECODING, **changes))  # type: ignore[arg-type]
    assert diagnosis.bottleneck == name and diagnosis.evidence
    assert all(name in item.cure.helps for item in diagnosis.advice)


def test_gains_follow_from_bytes() -> None:
    few = replace(DECODING, kv_tokens=2_000.0, running=1.0, step_s=4.03e-3, step_bytes=15.3e9)
    gains = {item.cure.name: item.gain for item in diagnose(few).advice}
    # Of 15.3 GB nearly all are weights; halving them takes away just under half of what bandwidth explains.
    assert gains["8-bit weights"] == pytest.approx(0.5 * few.weight_share * few.bandwidth_share)
    assert 0.4 < gains["8-bit weights"] < 0.5
    crowded = {item.cure.name: item.gain for item in diagnose(DECODING).advice}
    assert crowded["8-bit weights"] < gains["8-bit weights"] * 0.6
    assert crowded["a second replica"] == pytest.approx(0.5 * (1 - DECODING.weight_share))


def test_cures_that_are_in_place_are_not_advised() -> None:
    names = [item.cure.name for item in diagnose(replace(DECODING, quantization="fp8")).advice]
    assert "8-bit weights" not in names
    waiting = replace(DECODING, waiting=5.0, kv_used=0.99, options={"enable_prefix_caching": False})
    overlapped = replace(DECODING, bubble=0.4, options={"steps_in_flight": 1})
    assert not diagnose(overlapped).advice
    alone = diagnose(replace(overlapped, options={"steps_in_flight": 0})).advice
    assert [(item.cure.name, item.gain) for item in alone] == [("plan while the device runs", 0.4)]
    advice = diagnose(waiting).advice
    assert math.isnan(next(item.gain for item in advice if item.cure.name == "prefix cache"))
    assert [item.gain for item in advice if item.gain == item.gain] == sorted(
        (item.gain for item in advice if item.gain == item.gain), reverse=True
    )


def test_every_cure_says_what_it_costs_and_how_to_apply_it() -> None:
    for cure in CURES:
        assert cure.helps and cure.effort and cure.risk and cure.trade and "ridgeline" in cure.command


def test_a_snapshot_with_unknown_figures_is_read() -> None:
    snapshot = {
        "now": {}, "figures": {}, "facts": {}, "ceilings": {"measured_bytes": 0.0, "bytes": 0.0}, "latencies": {},
    }  # fmt: skip
    assert diagnose(observe(snapshot)).bottleneck == "none"


def test_the_distance_of_the_system_stands_before_that_of_busy_time() -> None:
    distance = diagnose(replace(DECODING, busy=0.5, mfu=0.2, mbu=0.8)).distance
    assert any("Over all time, the device reaches 10% of its peak FLOP/s (MFU) and 40%" in line for line in distance)
    assert any("while busy, 20% and 80%" in line for line in distance)
