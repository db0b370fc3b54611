"""The record of a call: its device seconds before and after the first token, and the power of the device meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.sampling import SamplingParams
from ridgeline.metrics import Metrics
from ridgeline.service.call import Call, Usage
from ridgeline.service.ledger import Ledger
from ridgeline.wire.messages import Delta

from ..metrics.test_live import step


def times(device_s: float) -> tuple[float, ...]:
    return 0.0, 0.1, 0.2, 0.0, device_s, 0.0, 0.0


def test_prompt_and_output_joules_of_a_call() -> None:
    """Two choices of 0.3 and 0.1 device seconds until their first tokens, at 200 W; then 0.2 and 0.4 at 500 W."""
    metrics = Metrics("m")
    metrics.on_step(step(prompt_joules=9.0, metered_s=1.0))  # of earlier requests
    call = Call("cmpl-1", 0.0, ([1],), SamplingParams(n=2), 4)
    ledger = Ledger(call, metrics)
    metrics.on_step(step(prompt_joules=80.0, metered_s=0.4))
    ledger.observe(Delta("cmpl-1", 0, [5], times=times(0.3)), 1.0)
    ledger.observe(Delta("cmpl-1", 1, [5], times=times(0.1)), 1.0)
    metrics.on_step(step(output_joules=300.0, metered_s=0.6))
    for choice, device_s in ((0, 0.5), (1, 0.5)):
        last = Delta("cmpl-1", choice, [6], finish="stop", times=times(device_s))
        ledger.observe(last, 2.0)
        ledger.ended("stop", last)
    ledger.close(Usage(prompt=10, completion=4))
    (record,) = metrics.live.rows()
    assert record.spent.device_s == pytest.approx(1.0) and record.spent.prompt_device_s == pytest.approx(0.4)
    assert record.prefilling.watts == pytest.approx(200.0) and record.decoding.watts == pytest.approx(500.0)
    shares = metrics.live.why(record)
    assert shares["prompt_joules"] == pytest.approx(80.0) and shares["output_joules"] == pytest.approx(300.0)
    assert metrics.live.shares(replace(record, spent=replace(record.spent, device_s=0.4)))["output_joules"] == 0
