"""Layouts that divide whole experts: what a rank holds, its work, the exchange of tokens and the busiest rank, all by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.experts import ExpertSpec
from ridgeline.core.fit import Deployment
from ridgeline.core.sizing import Memory
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.hardware.serving import cost_model
from ridgeline.planner.cluster import read_cluster
from ridgeline.planner.expert_times import SKEW, imbalance, read_imbalance
from ridgeline.planner.layout_times import Times
from ridgeline.planner.layouts import Layout, layouts, replica, stages
from ridgeline.planner.ranking import Demand, Ranked, Variant, rank, why
from ridgeline.planner.servers import divided_cost

EXPERTS = ExpertSpec(8, 2, 14336)
LAYER = LayerSpec(32, 8, 128, EXPERTS.active_width, Rope(dim=128), experts=EXPERTS)
MODEL = ModelSpec("Mixtral", 32000, 4096, (LAYER,) * 32, 32768)
EXPERT_BYTES = 3 * 4096 * 14336 * 2
ENGINE = EngineConfig()
ALONE, TOGETHER = Layout(experts=8), Layout(tensor=8, experts=8)


def times(layout: Layout, spec: ModelSpec = MODEL) -> Times:
    cluster = read_cluster("8xh100")
    return Times(replica(spec, layout, cluster, 2048, ENGINE), cost_model(cluster.device, spec))


def test_layouts_with_experts_by_hand() -> None:
    dense = ["DP4", "CP2 x DP2", "CP4", "PP2 x DP2", "PP2 x CP2", "PP4", "TP2 x DP2", "TP2 x CP2", "TP2 x PP2", "TP4"]
    mixture = ["EP2 x DP2", "EP4", "EP2 x PP2", "TP2+EP x DP2", "TP2+EP x CP2", "TP2+EP x PP2", "TP4+EP"]
    assert sorted(map(str, layouts(4))) == sorted(dense)
    assert sorted(map(str, layouts(4, experts=True))) == sorted(dense + mixture)
    assert all(layout.devices == 4 for layout in layouts(4, experts=True))


def test_what_a_rank_holds_by_hand() -> None:
    """Experts alone: attention is whole, all else is as with tensor ranks: an eighth of all but norms and routers."""
    others = MODEL.weight_bytes - 32 * 8 * EXPERT_BYTES
    kept = (32 * 2 + 1) * 4096 * 2 + 32 * 8 * 4096 * 2
    (alone,), (together,) = stages(MODEL, ALONE), stages(MODEL, TOGETHER)
    attention = 32 * (2 * 32 + 2 * 8) * 128 * 4096 * 2
    assert alone.spec.weight_bytes == (others - kept - attention) // 8 + attention + kept + 32 * EXPERT_BYTES
    assert together.spec.weight_bytes == (others - kept) // 8 + kept + 32 * EXPERT_BYTES
    assert [stage.spec.layers[0].n_heads for stage in (alone, together)] == [32, 4]
    shared = replace(MODEL, layers=(replace(LAYER, experts=replace(EXPERTS, shared_width=4096)),) * 2)
    widths = [stages(shared, layout)[0].spec.layers[0].experts for layout in (ALONE, TOGETHER)]
    assert [experts.shared_width for experts in widths if experts] == [512, 512]


def test_memory_counts_the_requests_of_all_ranks() -> None:
    """Each rank of experts alone has a cache for its own requests."""
    made = times(ALONE).replica
    pages = made.memory.cache_bytes // made.plan.layout.page_bytes - 1
    each = pages // made.plan.layout.pages_for(2048, made.plan.max_step_tokens)
    assert made.memory.requests == 8 * each > 0 and made.rows == 8 * made.plan.max_rows
    assert made.memory.tokens == 8 * pages * made.plan.layout.page_tokens
    assert made.memory.weight_bytes == stages(MODEL, ALONE)[0].spec.weight_bytes


def test_memory_is_that_of_the_engine() -> None:
    """A rank of --data-parallel-size 8 --expert-parallel."""
    whole = replace(MODEL, layers=(replace(LAYER, experts=replace(EXPERTS, whole=True)),) * 32)
    engine, memory = EngineConfig(device="cuda", data_parallel_size=8), Memory("cuda", 80 << 30)
    planner = Deployment(whole, engine, memory, ModelConfig("", expert_parallel=True)).planner(whole, {})
    assert planner.plan()[0].weight_bytes == stages(MODEL, ALONE)[0].spec.weight_bytes


def test_the_busiest_rank_by_hand() -> None:
    """64 tokens with 2 choices are 16 on each of 8 ranks. The largest of 8 is 1.434 deviations above the mean: 1 + 1.434 / 4."""
    assert imbalance(64, EXPERTS, 8) == pytest.approx(1.3586, abs=1e-4)
    assert imbalance(8192, EXPERTS, 8) == SKEW, "by chance it would be 1 + 1.434 / sqrt(2048) = 1.03"
    assert imbalance(64, EXPERTS, 1) == 1


def test_the_rank_that_reads_most_by_hand() -> None:
    """Qwen3's 8 choices of 128 on two ranks: one token reads 4 of 64 in the mean; the larger of two numbers is 0.589 deviations
    of sqrt(4 x 60 / 64) above it. Of 2 x 4 choices, 1.27 by all 256 outcomes."""
    experts = ExpertSpec(128, 8, 768, whole=True, ranks=2)
    assert read_imbalance(1, experts) == pytest.approx(1 + 0.589 * math.sqrt(4 * 60 / 64) / 4, abs=1e-3)
    exact = sum(max(n, 8 - n) * math.comb(8, n) for n in range(9)) / 256 / 4
    assert read_imbalance(1, experts) == pytest.approx(exact, rel=0.02)
    assert read_imbalance(10_000, experts) == pytest.approx(1), "all are read"
    assert read_imbalance(1, ExpertSpec(8, 7, 8, whole=True, ranks=8)) == pytest.approx(8 / 7), "at most all"


def test_experts_alone_by_hand() -> None:
    """A decode step of 64 requests on 8 ranks: 8 rows each, whole attention, experts for 16 of the 128 choices of all rows.

    All rows are 64 x 4096 x 2 bytes, of which 7/8 come from other ranks, one hop over NVLink: NCCL's Simple takes 8.4 + 3.4 us and
    370 GB/s, LL 6.6 + 0.6 us and a quarter of the rate. A gather and an exchange in 32 layers, a gather, and a sum of embeddings.
    """
    made = times(ALONE)
    size = 64 * 4096 * 2
    sent = size * 7 / 8
    once = min(8.4e-6 + 3.4e-6 + sent / 370e9, 6.6e-6 + 0.6e-6 + sent / (370e9 / 4))
    decode = made.decode(64, 1024)
    added = made.replica.cluster.fabric.all_reduce(8, size)
    assert decode.links == pytest.approx((32 * 2 + 1) * once + added)
    rows = [(1024, 1)] * 8
    whole = replace(MODEL, layers=(replace(LAYER, experts=replace(EXPERTS, whole=True)),) * 32)
    spec = whole.on_rank(8, 1)
    work = step_work(spec, rows)
    # step_work counts 8 rows, so 2 choices on the rank; there are 16 times the imbalance of the busiest one.
    choice = 2 * 3 * 4096 * 14336
    flops = work.flops + 32 * int(choice * (16 * imbalance(64, EXPERTS, 8) - 2))
    # The rank's expert is read if any of 64 rows uses it, not any of 8. Of eight ranks with one expert, one surely reads it.
    read = work.bytes + 32 * EXPERT_BYTES * (0.75**8 - 0.75**64 + 0.75**64)
    cost = cost_model(made.replica.cluster.device, MODEL)
    expected = cost.step_s(work._replace(flops=flops, bytes=int(read)))
    assert decode.total - decode.links == pytest.approx(expected, rel=1e-6)


def test_a_prompt_of_each_rank_at_a_time() -> None:
    made = times(ALONE)
    seconds, busy = made.prefill(2048)
    assert busy.total == pytest.approx(seconds / 8), "eight prompts take the replica this long"
    fabric, size = made.replica.cluster.fabric, 8 * 2048 * 4096 * 2
    links = 33 * fabric.all_gather(8, size) + 32 * fabric.all_to_all(8, size) + fabric.all_reduce(8, size)
    assert busy.links == pytest.approx(links / 8)


def test_with_tensor_ranks_nothing_is_exchanged() -> None:
    """The sums of tensor parallelism stay; only the busiest rank's arithmetic is added."""
    divided, whole = times(Layout(tensor=8)), times(TOGETHER)
    assert whole.decode(64, 1024).links == pytest.approx(divided.decode(64, 1024).links)
    before, after = divided.prefill(2048)[1], whole.prefill(2048)[1]
    assert after.links == pytest.approx(before.links)
    cost = cost_model(whole.replica.cluster.device, MODEL)
    # 2,048 tokens of a chunk: 512 choices on a rank, 1.1 times as many on the busiest one. Arithmetic binds.
    more = 32 * 2 * 3 * 4096 * 14336 * 512 * 0.1 / (cost.flops_per_s * cost.compute_share)
    assert after.total - before.total == pytest.approx(more, rel=0.05)


def test_experts_that_cannot_be_divided_are_named() -> None:
    dense = replace(MODEL, layers=(replace(LAYER, experts=None),) * 2)
    for spec, layout, reason in (
        (MODEL, Layout(experts=16), "8 experts cannot be divided among 16 devices"),
        (dense, TOGETHER, "the model has no experts to divide"),
    ):
        with pytest.raises(ConfigError, match=reason) as error:
            stages(spec, layout)
        assert not error.value.param, "other layouts are ranked"


def ranking(spec: ModelSpec) -> tuple[list[Ranked], list[str]]:
    cluster = read_cluster("8xh100")
    variant = Variant(spec, cost_model(cluster.device, spec))
    ranked, refused = rank(
        [variant], cluster, Demand(1024, 256), ENGINE, lambda layout: layout.context == layout.pipeline == 1
    )
    return ranked, [f"{entry.layout}: {entry.reason}" for entry in refused]


def test_the_ranking_has_experts_and_says_why() -> None:
    ranked, refused = ranking(MODEL)
    names = [str(entry.layout) for entry in ranked]
    assert {"EP8", "TP8+EP", "TP8", "EP2 x DP4"} - set(names) == set(), refused
    by_name = {str(entry.layout): entry for entry in ranked}
    assert by_name["TP8"].imbalance == 1 < by_name["TP8+EP"].imbalance
    assert by_name["EP8"].batch > by_name["TP8+EP"].batch, "each rank has rows of its own"
    sentence = why(by_name["TP8"], replace(by_name["EP2 x DP4"], capacity=by_name["TP8"].capacity / 2))
    assert "the busiest rank of EP2 x DP4 has 1.10 times the mean tokens of experts" in sentence
    dense = replace(MODEL, layers=(replace(LAYER, experts=None),) * 32)
    assert not any("EP" in str(entry.layout) for entry in ranking(dense)[0])
    wide = replace(MODEL, layers=(replace(LAYER, experts=replace(EXPERTS, count=4)),) * 32)
    assert any("EP8: 4 experts cannot be divided among 8 devices" in entry for entry in ranking(wide)[1])


def test_a_simulated_replica_with_whole_experts_is_close_to_its_times() -> None:
    """The same step from the cost model of the simulation, which does not know the busiest rank."""
    made = times(TOGETHER)
    cost = divided_cost(made.replica, cost_model(made.replica.cluster.device, MODEL))
    step = cost.step_s(step_work(made.replica.spec, [(1024, 1)] * 64))
    assert step == pytest.approx(made.decode(64, 1024).total, rel=0.1)
