"""The decision path: which bottleneck is named for what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.planner.diagnose import Observation, diagnose, observe

# An 8B in bf16 on an H200, 64 requests of 2,000 tokens: 16.1 GB of weights (15.0 a step), 16.8 GB of KV.
DECODING = Observation(
    running=64.0, waiting=0.0, max_running=512.0, kv_used=0.2, kv_tokens=128_000.0, busy=0.98, bubble=0.01,
    prompt_share=0.1, mfu=0.1, mbu=0.85, step_s=8.9e-3, step_bytes=31.8e9, weight_bytes=15.0e9,
    kv_bytes_per_token=131_072.0, bandwidth=4.26e12, e2e_s=3.0, queue_s=0.0, prefill_s=0.1, outside_s=0.01,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "decode bandwidth"),
        ({"prompt_share": 0.8, "mfu": 0.8}, "prefill compute"),
        ({"waiting": 20.0, "kv_used": 0.97}, "KV capacity"),
        ({"queue_s": 2.0, "kv_used": 0.97}, "KV capacity"),
        ({"waiting": 20.0, "running": 512.0, "kv_tokens": 1_000_000.0, "kv_used": 0.8}, "queue"),
        ({"waiting": 20.0, "running": 8.0, "options": {"batching": "static:64"}}, "queue"),
        ({"waiting": 20.0, "running": 8.0, "max_running": 8.0, "kv_tokens": 16_000.0, "kv_used": 0.03}, "small batch"),
        ({"bubble": 0.4}, "host"),
        ({"outside_s": 2.0}, "client"),
        ({"busy": 0.2}, "none"),
        ({"saved": -0.2}, "drafts"),
        ({"prompt_share": 0.6, "shared": 0.9, "cached": 0.0}, "prefix misses"),
        ({"prompt_share": 0.6, "shared": 0.9, "cached": 0.8}, "prefill compute"),
        ({"prompt_share": 0.4, "blocked": 0.5, "prompt_step_s": 0.3}, "prompts delay decoding"),
        ({"prompt_share": 0.4, "blocked": 0.5, "prompt_step_s": 0.02}, "decode bandwidth"),
        ({"prompt_share": 0.9, "blocked": 0.5, "prompt_step_s": 0.3, "prefill_s": 2.0}, "prefill compute"),
        ({"step_s": 0.03, "options": {"enforce_eager": True}}, "host"),
        ({"waiting": 9.0, "running": 4.0, "kv_used": 0.5}, "KV capacity"),
    ],
)
def test_the_bottleneck_is_named_with_its_evidence(changes: dict[str, float], name: str) -> None:
    diagnosis = diagnose(replace(DECODING, **changes))  # type: ignore[arg-type]
    assert diagnosis.bottleneck == name and diagnosis.evidence


def test_decode_steps_far_below_the_bandwidth_are_said_to_be_so() -> None:
    assert len(diagnose(DECODING).evidence) == 1
    (_, but) = diagnose(replace(DECODING, step_s=0.03)).evidence
    assert "these steps reach 25% of the bandwidth: arithmetic, small kernels, or other processes" in but


def test_a_snapshot_with_unknown_figures_is_read() -> None:
    snapshot = {
        "now": {}, "figures": {}, "facts": {}, "ceilings": {"measured_bytes": 0.0, "bytes": 0.0}, "latencies": {},
    }  # fmt: skip
    assert diagnose(observe(snapshot)).bottleneck == "none"
    failed = {"arrived_at": 1.0, "ttft_s": None, "prompt_tokens": 8, "cached_tokens": 0}
    assert diagnose(observe(snapshot, [failed])).bottleneck == "none", "no request got a token"


@pytest.mark.parametrize(("running", "weights"), [(24.0, 5e9), (25.0, 15e9)])
def test_many_requests_share_the_bytes_of_the_dtype(running: float, weights: float) -> None:
    """Where linears are in both forms, steps of many rows read more than what is stored."""
    facts = {"weight_bytes": 5e9, "expanded_bytes": 15e9, "quantization": "q4_k"}
    snapshot = {"now": {"running": running}, "figures": {}, "facts": facts, "ceilings": {}, "latencies": {}}
    assert observe(snapshot).weight_bytes == weights


def test_the_distance_of_the_system_stands_before_that_of_busy_time() -> None:
    distance = diagnose(replace(DECODING, busy=0.5, mfu=0.2, mbu=0.8)).distance
    assert any("Over all time, the device reaches 10% of its peak FLOP/s (MFU) and 40%" in line for line in distance)
    assert any("while busy, 20% and 80%" in line for line in distance)


BUSY_START = {"step_s": 2.25e-3, "step_bytes": 0.0287e9, "bandwidth": 5.24e9, "mfu": 0.2, "mbu": float("nan")}
"""Of a server that started while other processes used the machine: 28.7 MB take 5.48 ms at the bandwidth that it measured."""


def test_a_bandwidth_that_steps_exceed_is_no_limit() -> None:
    observation = replace(DECODING, **BUSY_START)
    text = " ".join(diagnose(observation).distance)
    assert "takes 2.25 ms and moves 0.0287 GB, 12.8 GB/s. That is more than the 5.24 GB/s measured when" in text
    assert "at least" not in text and "(MBU)" not in text and "20% of its peak FLOP/s (MFU); while busy, 20%." in text
    assert "restart the server while the machine is idle" in text
    known = " ".join(diagnose(replace(observation, published=64e9)).distance)
    assert "By the published 64 GB/s it takes at least 0.45 ms: it reaches 20% of the bandwidth." in known
    assert "restart" not in known
    cached = diagnose(replace(observation, bandwidth=float("nan"), published=1e9)).distance[0]
    assert cached.endswith("12.8 GB/s. The distance to the limit is not known.")


def test_no_share_of_a_limit_is_above_one() -> None:
    figures = {
        "mbu_measured": 1.0,
        "mfu_measured": 2.4,
        "mbu": 0.4,
        "decode_step_seconds": 1.0,
        "decode_step_bytes": 2e9,
    }
    ceilings = {"measured_bytes": 1e9, "bytes": 4e9}
    snapshot = {"now": {}, "figures": figures, "facts": {}, "ceilings": ceilings, "latencies": {}}
    observation = observe(snapshot)
    assert observation.mbu == 0.4 and observation.mfu != observation.mfu and observation.bandwidth_share == 0.5


def test_the_cache_of_a_step_is_that_of_the_last_minutes() -> None:
    """Not that of the moment in which the server is asked, when all requests may have ended."""
    facts = {"weight_bytes": 6e9, "blocks": 100, "page_tokens": 10, "kv_bytes_per_token": 1e7}
    snapshot = {
        "now": {"kv_used": 0.0}, "figures": {"mean_kv_used": 0.2}, "facts": facts, "ceilings": {}, "latencies": {},
    }  # fmt: skip
    assert "75% of these bytes are weights, which all running requests share, and 25% are KV cache." in " ".join(
        diagnose(observe(snapshot)).distance
    )
