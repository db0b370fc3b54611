"""Which weights stay in host memory, what that frees, and what a step pays for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.cost import CostModel, step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.host_weights import BUFFERS, GIB, HostTimes, HostWeights, host_weights, least_host_bytes, streamed_s
from ridgeline.core.sizing import Memory, Planner
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope

LLAMA_8B = ModelSpec(
    "LlamaForCausalLM", 128_256, 4096, (LayerSpec(32, 8, 128, 14336, Rope(500_000.0, 128)),) * 32, 8192
)
SIZES = [LLAMA_8B.matrix_bytes(matrix) for layer in LLAMA_8B.layers for matrix in LLAMA_8B.matrices(layer)]


def split(gib: float, **changes: str) -> HostWeights:
    return host_weights(replace(LLAMA_8B, host_bytes=int(gib * GIB), **changes))


@pytest.mark.parametrize("gib", [1, 2.5, 4, 8, 12, 12.5])
def test_at_least_what_was_asked_for_spread_evenly(gib: float) -> None:
    chosen = split(gib)
    assert chosen.bytes == sum(SIZES[number] for number in chosen.linears)
    assert gib * GIB <= chosen.bytes < gib * GIB + max(SIZES)
    assert 0 in chosen.linears, "copies start with the step"
    assert max(chosen.linears) < len(SIZES) - 4, "the last layer stays on the device"
    share, passed, taken = gib * GIB / sum(SIZES[:-4]), 0, 0
    for number, size in enumerate(SIZES[:-4]):
        passed += size
        taken += size * (number in chosen.linears)
        assert share * passed <= taken < share * passed + max(SIZES), "no stretch has more or less than its share"


def test_fewer_bytes_of_a_format_take_more_linears() -> None:
    assert len(split(2, quantization="int4").linears) > 3 * len(split(2).linears)
    assert split(2, quantization="int4").largest < split(2).largest / 3


def test_what_frees_nothing_or_is_not_there_is_refused() -> None:
    assert host_weights(LLAMA_8B) == HostWeights()
    with pytest.raises(ConfigError, match="all layers but the last have 12.59 GiB. Give less") as caught:
        split(12.7)
    assert caught.value.param == "cpu_offload_gb"
    with pytest.raises(ConfigError, match=r"copies need buffers of 0.4375 GiB on the device. Give more"):
        split(0.2)


def test_the_plan_counts_what_leaves_and_the_buffers() -> None:
    memory, engine = Memory("cuda", 24 * GIB), EngineConfig()
    whole, _ = Planner(LLAMA_8B, engine, memory).plan()
    plan, _ = Planner(replace(LLAMA_8B, host_bytes=4 * GIB), engine, memory).plan()
    chosen = split(4)
    assert plan.host_bytes == chosen.bytes and not whole.host_bytes
    assert plan.weight_bytes == whole.weight_bytes - chosen.bytes + BUFFERS * chosen.largest
    assert plan.kv_bytes == pytest.approx(whole.kv_bytes + chosen.saved_bytes, abs=plan.layout.page_bytes)
    with pytest.raises(ConfigError, match="--cpu-offload-gb needs a GPU"):
        Planner(replace(LLAMA_8B, host_bytes=4 * GIB), engine, Memory("cpu", 24 * GIB))


def test_the_least_that_frees_enough() -> None:
    for missing in (GIB // 2, 3 * GIB, 11 * GIB):
        least = least_host_bytes(LLAMA_8B, missing)
        assert least % GIB == 0 and split(least / GIB).saved_bytes >= missing
        assert least == GIB or split(least / GIB - 1).saved_bytes < missing
    assert least_host_bytes(LLAMA_8B, 13 * GIB) == 0


def test_a_step_takes_as_long_as_the_slower_of_copies_and_work() -> None:
    spec = replace(LLAMA_8B, host_bytes=8 * GIB)
    copies = streamed_s(spec, 50e9)
    assert copies == split(8).bytes / 50e9 and streamed_s(spec, 0.0) == math.inf and streamed_s(LLAMA_8B, 0.0) == 0.0
    resident = CostModel(LLAMA_8B, 989e12, 4.8e12)
    cost = replace(resident, spec=spec, host=HostTimes(copies))
    assert cost.decode_s([2048]) == copies
    long = step_work(spec, [(0, 32_768)])
    assert cost.step_s(long) == resident.step_s(long) > copies
