"""What steps had to do and used, and each request's part of it."""

from __future__ import annotations

import pytest

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import step_work
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.wire.messages import StepStats, Submit


def test_steps_and_requests_are_accounted() -> None:
    steps: list[StepStats] = []
    model = ModelConfig()
    local = LocalEngine.start(model, EngineConfig(device="cpu", steps_in_flight=0), on_step=steps.append)
    spec = read_model(resolve_model(model))[0]
    for index, length in enumerate((40, 25)):
        sampling = SamplingParams(temperature=0.0, max_tokens=6 - index, ignore_eos=True)
        local.submit(Submit(f"r{index}", list(range(100, 100 + length)), sampling, 0.0, cache=False))
    spent = {delta.id: delta.times for delta in local.deltas() if delta.finish}
    cost = local.engine.setup.account.cost
    ran = [step for step in steps if step.steps]
    assert not cost.calibrated, "no file was given"
    expected = [[(0, 40), (0, 25)], *([(39 + turn, 1), (24 + turn, 1)] for turn in range(1, 5)), [(44, 1)]]
    for step, shares in zip(ran, expected, strict=True):
        work = step_work(spec, shares)
        assert (step.flops, step.bytes) == (work.flops, work.bytes)
        assert step.predicted_s == cost.step_s(work) > 0 and step.idle_s >= 0
    assert ran[0].idle_s == 0, "it had waited for requests, not for the host"
    # Every device second belongs to somebody, by query tokens.
    assert sum(times[4] for times in spent.values() if times) == pytest.approx(sum(step.device_s for step in ran))
    ceilings = local.engine.setup.facts["ceilings"]
    local.close()
    assert ceilings["measured_bytes"] > 1e9 and ceilings["measured_flops"] > 1e9
