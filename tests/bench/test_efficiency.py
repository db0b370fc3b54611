"""MFU and MBU of a run are relative to the specification, or say that they are relative to measured rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.bench.efficiency import Limits, point, work
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.hardware.bandwidth import with_measured_rates
from ridgeline.hardware.table import lookup
from tests.bench.rows import make_run, row


def test_shares_of_measured_rates_are_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.hardware.bandwidth.measured_rates", lambda device, dtype: (9e11, 5e10))
    spec = ModelSpec("LlamaForCausalLM", 32_000, 512, (LayerSpec(8, 8, 64, 2048, Rope(1e4, 64)),) * 2, 4096)
    run = make_run([row(0), row(1)], concurrency=2)
    known = lookup("epyc")
    hidden = replace(known, flops={}, memory=replace(known.memory, bandwidth=0.0))
    total = work(run, spec, sum(request.output_tokens for request in run.completed) / 2)
    specified = point(run, Limits(spec, known))
    measured = point(run, Limits(spec, with_measured_rates(hidden, spec.dtype)))
    assert specified.mfu == pytest.approx(total.flops / run.seconds / known.peak(spec.dtype))
    assert measured.mfu == pytest.approx(total.flops / run.seconds / 9e11)
    assert measured.mbu == pytest.approx(total.bytes / run.seconds / 5e10)
    assert "relative to rates measured on that machine" in measured.note and "measured" not in specified.note
