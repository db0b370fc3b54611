"""The number of replicas by load. Times are arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from ridgeline.service.autoscale import Autoscaler, Decision, Load, Scaling, share_ttft

SCALING = Scaling(
    least=1, most=10, prefill_tokens_s=10_000, limit=100, ttft_s=1.0, cold_start_s=60, calm_s=300, idle_s=600
)


def decisions(
    scaler: Autoscaler, seconds: int, load: Callable[[int], dict[str, float]], start: int = 0
) -> Iterator[Decision]:
    """One decision every ten seconds; each is carried out at once."""
    replicas = scaler.scaling.least
    for now in range(start, start + seconds, 10):
        values = {
            "requests_s": 0.0,
            "prompt_tokens_s": 0.0,
            "running": 0,
            "waiting": 0,
            "waiting_tokens": 0,
            **load(now),
        }
        decision = scaler.decide(Load(now=float(now), replicas=replicas, **values))
        replicas = decision.wanted
        yield decision


def steady(tokens_s: float, running: int = 0) -> Callable[[int], dict[str, float]]:
    return lambda now: {"requests_s": tokens_s / 1000, "prompt_tokens_s": tokens_s, "running": running}


def test_the_share_follows_from_the_queue() -> None:
    assert share_ttft(0.1, 1.0, 0.95) == pytest.approx(1 - 0.1 * 2.9957, rel=1e-3)
    assert share_ttft(5.0, 1.0, 0.95) == 0.1


def test_a_steady_load_gets_what_the_formula_says() -> None:
    """25,000 tokens/s at 10,000 * 0.70 for each replica, and 255 requests in flight at 85 of 100: 3.57 + 3 = 6.57."""
    last = list(decisions(Autoscaler(SCALING), 600, steady(25_000, 255)))[-1]
    assert last.wanted == 7
    assert last.inputs["needed_prefill"] == pytest.approx(3.57, abs=0.02)
    assert last.inputs["needed_decode"] == pytest.approx(3.0, abs=0.01)


def test_measured_speed_counts() -> None:
    load = Load(0.0, 25, 25_000, 0, 0, 0, 1, speed=2.0)
    assert (
        Autoscaler(SCALING).decide(load).wanted < Autoscaler(SCALING).decide(Load(0.0, 25, 25_000, 0, 0, 0, 1)).wanted
    )


def test_it_grows_before_the_load_arrives() -> None:
    """A load that rises by 100 tokens/s each second is met with the replicas of a minute later."""
    rising = list(decisions(Autoscaler(SCALING), 400, lambda now: steady(100.0 * now)(now)))
    at_300 = rising[30]
    assert at_300.inputs["offered_tokens_s"] == pytest.approx(36_000, rel=0.1)


def test_it_grows_at_once_and_shrinks_after_the_calm() -> None:
    def load(now: int) -> dict[str, float]:
        return steady(50_000 if 100 <= now < 200 else 1_000)(now)

    wanted = [decision.wanted for decision in decisions(Autoscaler(SCALING), 1200, load)]
    assert max(wanted[10:20]) >= 7 and wanted[30] == max(wanted), "100 s after the peak"
    assert wanted[-1] == 1
    falls = sum(later < earlier for earlier, later in pairwise(wanted))
    rises = [index for index in range(1, 120) if wanted[index] > wanted[index - 1]]
    assert falls and max(rises) < 60, "it does not go up and down"


def test_waiting_prompts_need_replicas_too() -> None:
    load = {"requests_s": 0.1, "prompt_tokens_s": 100.0, "waiting": 50, "waiting_tokens": 3_000_000}
    (decision,) = decisions(Autoscaler(SCALING), 10, lambda now: load)
    assert decision.wanted >= 5 and decision.inputs["needed_backlog"] == 5.0


def test_to_zero_and_back() -> None:
    scaler = Autoscaler(Scaling(least=0, most=3, idle_s=600, calm_s=100))

    def load(now: int) -> dict[str, float]:
        return steady(500, 1)(now) if now < 100 or now >= 1500 else {}

    wanted = [decision.wanted for decision in decisions(scaler, 1600, load)]
    assert wanted[1] == 1 and wanted[60] == 1, "idle for less than idle_s"
    assert wanted[100] == 0 and wanted[149] == 0 and wanted[150] == 1


def test_a_request_starts_the_first_replica_however_small_it_is() -> None:
    scaler = Autoscaler(Scaling(least=0, most=3))
    decision = scaler.decide(Load(0.0, 0.0, 0.0, 0, 1, 5, 0))
    assert decision.wanted == 1


def test_limits_and_hours() -> None:
    scaling = Scaling(least=2, most=4, off_peak_least=0, off_peak_most=1)
    huge = Load(0.0, 100, 1e6, 0, 0, 0, 2)
    assert Autoscaler(scaling).decide(huge).wanted == 4
    decision = Autoscaler(scaling).decide(Load(0.0, 100, 1e6, 0, 0, 0, 2, off_peak=True))
    assert decision.wanted == 1 and "the limits are 0 and 1" in decision.reason
    assert Autoscaler(scaling).decide(Load(0.0, 0, 0, 0, 0, 0, 2)).wanted == 2


def test_a_decision_has_all_its_inputs() -> None:
    decision = Autoscaler(SCALING).decide(Load(5.0, 1.0, 500.0, 3, 0, 0, 2))
    assert {
        "now",
        "prompt_tokens_s",
        "running",
        "replicas",
        "share_ttft",
        "needed_prefill",
        "cold_start_s",
        "most",
    } <= set(decision.inputs)


def test_rows_of_batches_keep_one_replica() -> None:
    scaler = Autoscaler(replace(SCALING, least=0))
    idle = Load(0.0, 0.0, 0.0, 0, 0, 0, 0)
    assert scaler.decide(replace(idle, rows=500)).wanted == 1
    assert scaler.decide(replace(idle, now=2000.0, rows=500, replicas=1)).wanted == 1
    assert scaler.decide(replace(idle, now=4000.0, replicas=1)).wanted == 0
