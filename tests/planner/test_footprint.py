"""What a replica takes on a GPU: the mission's oracle, the memory of `fit`, and shares of a GPU's time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.sizing import Memory, Planner
from ridgeline.core.slo import Slo
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.hardware.table import lookup
from ridgeline.planner.footprint import ReplicaNeed, footprints, replica_bytes
from ridgeline.planner.place import place
from ridgeline.planner.placement import Fleet, Gpu, ModelLoad
from ridgeline.planner.ranking import Demand

ENGINE = EngineConfig()


def model(layers: int, width: int, heads: int, kv_heads: int, d_ff: int) -> ModelSpec:
    layer = LayerSpec(heads, kv_heads, width // heads, d_ff, Rope(dim=width // heads))
    return ModelSpec("Llama", 32000, width, (layer,) * layers, 4096, quantization="int8")


M8, M13, M34 = model(32, 4096, 32, 8, 14336), model(40, 5120, 40, 40, 13824), model(48, 8192, 64, 8, 22016)
M70 = model(80, 8192, 64, 8, 28672)
ROW = lookup("a100 sxm 40gb")
GPU = Gpu("a100", int(ROW.memory_bytes * 0.9), 1, 1.0)


@pytest.mark.parametrize("solver", [True, False])
def test_three_13b_fill_40_gb_and_leave_no_room_and_one_34b_serves(solver: bool) -> None:
    """The mission's oracle, section 7."""
    if solver:
        pytest.importorskip("highspy")
    assert 39e9 < 3 * M13.weight_bytes < ROW.memory_bytes < 3 * replica_bytes(M13, 1, 1, 2048, ENGINE)
    need = ReplicaNeed(Demand(1792, 256))
    served = {}
    for spec, replicas in ((M13, 3), (M34, 1)):
        feet, _ = footprints(spec, need, GPU, None, ENGINE)
        answer = place(Fleet((GPU,), (ModelLoad("model", tuple(feet), replicas),), "most"), solver=solver)
        served[replicas] = len(answer.replicas)
    assert served == {3: 2, 1: 1}


def test_the_memory_of_a_replica_is_what_the_engine_plans() -> None:
    taken = replica_bytes(M8, 1, 16, 2048, ENGINE)
    engine = replace(ENGINE, max_num_seqs=16, max_num_batched_tokens=2048, gpu_memory_utilization=1.0)
    plan, missing = Planner(M8, engine, Memory("cuda", taken)).plan(2048)
    assert missing <= 0 and plan.concurrency(2048) == 16
    assert Planner(M8, engine, Memory("cuda", taken - plan.layout.page_bytes)).plan(2048)[0].concurrency(2048) == 15


def test_weights_are_those_that_a_gpu_holds() -> None:
    three_bits, four_bits = (
        footprints(replace(M8, quantization=name), ReplicaNeed(Demand(1024, 256)), GPU, None, ENGINE)[0]
        for name in ("int3", "int4")
    )
    assert three_bits == four_bits


def test_a_smaller_share_of_a_gpu_takes_more_memory() -> None:
    gpu, row = Gpu("h100", 70 * 10**9), lookup("h100")
    feet, _ = footprints(M8, ReplicaNeed(Demand(1024, 256, 2.0)), gpu, row, ENGINE)
    assert len(feet) > 2 and {foot.rate for foot in feet} == {2.0}
    for more, less in pairwise(feet):
        assert more.share > less.share and more.bytes < less.bytes <= gpu.memory_bytes
    strict, _ = footprints(M8, ReplicaNeed(Demand(1024, 256, 2.0, Slo.parse("tpot=15ms"))), gpu, row, ENGINE)
    assert 0 < len(strict) < len(feet)  # a quarter of a GPU is too slow


def test_a_rate_above_one_replica_is_divided_evenly() -> None:
    gpu, row = Gpu("h100", 70 * 10**9), lookup("h100")
    feet, _ = footprints(M8, ReplicaNeed(Demand(1024, 256, 50.0)), gpu, row, ENGINE)
    replicas = round(50.0 / feet[0].rate)
    assert replicas > 1 and feet[0].rate * replicas == pytest.approx(50.0)
    fixed, _ = footprints(M8, ReplicaNeed(Demand(1024, 256, 50.0), replicas=2 * replicas), gpu, row, ENGINE)
    assert {foot.rate for foot in fixed} == {1.0}
    _, reason = footprints(M8, ReplicaNeed(Demand(1024, 256, 50.0), replicas=1), gpu, row, ENGINE)
    assert reason.startswith("rate: a replica on")


def test_a_large_model_is_divided_and_what_cannot_be_has_a_reason() -> None:
    gpu = Gpu("l4", int(lookup("l4").memory_bytes * 0.9))
    feet, _ = footprints(M70, ReplicaNeed(Demand()), gpu, None, ENGINE)
    assert [foot.gpus for foot in feet] == [4]
    _, reason = footprints(M70, ReplicaNeed(Demand(), tensor=(1, 2)), gpu, None, ENGINE)
    assert reason.startswith("memory: a replica with room for 1 request") and "l4 offers" in reason
    every, _ = footprints(M8, ReplicaNeed(Demand(), every=True), gpu, None, ENGINE)
    assert [foot.gpus for foot in every] == [1, 2, 4, 8]
