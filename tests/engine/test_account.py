"""What steps had to do and used, and each request's part of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import step_work
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine import assemble
from ridgeline.engine.local import LocalEngine
from ridgeline.engine.rank import RankPlan
from ridgeline.hardware.ceilings import read_ceilings
from ridgeline.hardware.probe import Device, Machine
from ridgeline.hardware.table import lookup
from ridgeline.metrics.account import DeviceAccount
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


@pytest.mark.parametrize("expanded_bytes", [0, 1])
def test_work_and_predictions_know_linears_in_both_forms(expanded_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the plan of memory, which decides that a GPU has them."""
    plan_rank = assemble.plan_rank

    def planned(*given: Any) -> RankPlan:
        rank = plan_rank(*given)
        return replace(rank, plan=replace(rank.plan, expanded_bytes=expanded_bytes))

    monkeypatch.setattr(assemble, "plan_rank", planned)
    local = LocalEngine.start(ModelConfig(), EngineConfig(device="cpu", kv_cache_memory=1 << 24, threads=1))
    account = local.engine.setup.account
    local.close()
    assert isinstance(account, DeviceAccount) and account.cost.spec.both_forms == bool(expanded_bytes)


def test_an_unknown_specification_gives_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of a specification exist only where it is known; measured ceilings always do. Unknown power is not estimated."""
    known = lookup("epyc")
    hidden = replace(known, flops={}, watts=0.0, memory=replace(known.memory, bandwidth=0.0))
    spec = read_model(resolve_model(ModelConfig()))[0]
    monkeypatch.setattr("ridgeline.hardware.ceilings.measured_rates", lambda device, dtype: (9e11, 5e10))
    monkeypatch.setattr("ridgeline.hardware.power._rapl", lambda packages: None)
    facts = {}
    for name, row in (("known", known), ("hidden", hidden)):
        machine = Machine("x", 2, (), Device("cpu", "x", 1 << 40, 1 << 40, row), ())
        monkeypatch.setattr("ridgeline.hardware.ceilings.probe", lambda machine=machine: machine)
        cost, _, facts[name] = read_ceilings(spec, torch.device("cpu"))
        assert (facts[name]["measured_flops"], facts[name]["measured_bytes"]) == (9e11, 5e10)
    assert (facts["known"]["flops"], facts["known"]["bytes"]) == (known.peak(spec.dtype), 460.8e9)
    assert (facts["hidden"]["flops"], facts["hidden"]["bytes"], facts["hidden"]["power"]) == (0.0, 0.0, "")
    assert (cost.flops_per_s, cost.bytes_per_s) == (9e11, 5e10)  # predictions use them
