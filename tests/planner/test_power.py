"""The power model against measured joules per token (ML.ENERGY leaderboard v3)."""

from __future__ import annotations

import pytest

from ridgeline.core.cost import step_work
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.planner.power import Use, watts

SMALL = ModelSpec(
    "LlamaForCausalLM", 128_256, 4096, (LayerSpec(32, 8, 128, 14336, Rope(500_000.0, 128)),) * 32, 131_072
)
LARGE = ModelSpec(
    "LlamaForCausalLM", 128_256, 8192, (LayerSpec(64, 8, 128, 28672, Rope(500_000.0, 128)),) * 80, 131_072
)


@pytest.mark.parametrize(
    ("spec", "devices", "batch", "joules", "measured"),
    [
        (SMALL, 1, 8, 0.455, 486),
        (SMALL, 1, 32, 0.165, 560),
        (SMALL, 1, 128, 0.095, 669),
        (SMALL, 1, 256, 0.077, 691),
        (LARGE, 4, 8, 3.76, 1765),
    ],
)
def test_the_power_of_an_h100(spec: ModelSpec, devices: int, batch: int, joules: float, measured: float) -> None:
    """At the measured tokens per second, with contexts of 768 tokens. The 70B model was not part of the fit."""
    steps = measured / joules / batch
    work = step_work(spec, [(768, 1)] * batch)
    use = Use(work.flops * steps / devices / 989.4e12, work.bytes * steps / devices / 3.35e12)
    error = 0.05 if spec is SMALL else 0.15
    assert watts(700, use) * devices == pytest.approx(measured, rel=error)


def test_power_is_bounded() -> None:
    assert watts(700, Use(0, 0)) == pytest.approx(98) and watts(700, Use(0.9, 0.9)) == 700
