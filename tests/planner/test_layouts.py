"""Layouts: one device is the identity, small cases by brute force, and properties that hold for every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.config import EngineConfig
from ridgeline.core.cost import CostModel, step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.experts import ExpertSpec
from ridgeline.core.sizing import Memory, Planner
from ridgeline.core.slo import Slo
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.hardware.serving import cost_model
from ridgeline.planner.cluster import read_cluster
from ridgeline.planner.layout_times import Parts, Times, stage_parts
from ridgeline.planner.layouts import Layout, layouts, rank_spec, replica, stage_sizes, stages, with_context
from ridgeline.planner.ranking import Demand, Ranked, Variant, evaluate, rank, why
from ridgeline.planner.servers import replica_server

LAYER = LayerSpec(32, 8, 128, 14336, Rope(dim=128))
MODEL = ModelSpec("Llama", 128256, 4096, (LAYER,) * 32, 131072)
LOCAL = replace(LAYER, window=1024)
MIXED = replace(MODEL, layers=(LOCAL, LOCAL, LAYER) * 4, tied=True)
ENGINE = EngineConfig()


def times(text: str, layout: Layout, spec: ModelSpec = MODEL, length: int = 2048) -> Times:
    cluster = read_cluster(text)
    return Times(replica(spec, layout, cluster, length, ENGINE), cost_model(cluster.device, spec))


@pytest.mark.parametrize("spec", [MODEL, MIXED, replace(MODEL, quantization="fp8", kv_format="fp8")])
def test_one_device_is_the_identity(spec: ModelSpec) -> None:
    """Memory is the engine's plan (`fit`), and times are the cost model's (`roofline`)."""
    cluster = read_cluster("h100")
    cost = cost_model(cluster.device, spec)
    made = replica(spec, Layout(), cluster, 2048, ENGINE)
    plan = Planner(spec, ENGINE, Memory("cuda", cluster.device.memory_bytes)).plan()[0]
    assert made.memory.weight_bytes == plan.weight_bytes == spec.weight_bytes
    assert made.memory.workspace_bytes == plan.workspace_bytes + plan.graph_bytes
    assert made.memory.cache_bytes == plan.kv_bytes
    assert made.memory.requests == plan.n_pages // plan.layout.pages_for(2048, plan.max_step_tokens)
    single = Times(made, cost)
    assert single.prefill(2048)[0] == pytest.approx(cost.step_s(step_work(spec, [(0, 2048)])), rel=1e-9)
    assert single.prefill(2048)[1].total == pytest.approx(single.prefill(2048)[0])
    assert single.decode(16, 1024).total == pytest.approx(cost.decode_s([1024] * 16), rel=1e-9)
    assert single.decode(16, 1024).links == single.decode(16, 1024).bubbles == 0


def test_steps_of_linears_in_both_forms_take_the_time_of_what_they_read() -> None:
    """Where a device has the memory: then 64 requests read as much as without blocks, and 8 read blocks."""
    blocks, cluster = replace(MODEL, quantization="q4_k", head_format="q6_k", max_len=8192), read_cluster("2xh200")
    cost = cost_model(cluster.device, blocks)
    both = replica(blocks, Layout(), cluster, 2048, ENGINE)
    blocks_only = replica(blocks, Layout(), cluster, 2048, replace(ENGINE, deterministic=True))
    assert both.memory.expanded_bytes and both.spec.both_forms and not blocks_only.spec.both_forms
    server = replica_server(both, cost, ENGINE, 512)
    few, many = ([1024] * rows for rows in (8, 64))
    for made in (Times(both, cost), Times(replica(blocks, Layout(pipeline=2), cluster, 2048, ENGINE), cost)):
        assert all(stage.spec.both_forms for stage in made.replica.stages)
    assert server.cost.decode_s(few) == cost.decode_s(few)
    assert server.cost.decode_s(many) == replace(cost, spec=replace(MODEL, max_len=8192)).decode_s(many)
    assert Times(both, cost).decode(64, 1024).total == pytest.approx(server.cost.decode_s(many), rel=1e-9)


def test_the_ranks_of_a_layout_hold_the_model_together() -> None:
    vectors = MODEL.stream_norms() * MODEL.d_model * len(MODEL.layers) + MODEL.d_model  # norms, which each rank holds
    for tensor, pipeline in ((1, 4), (2, 2), (8, 1)):
        parts = stages(MODEL, Layout(tensor, pipeline))
        held = sum(part.spec.layer_bytes + part.embedding_bytes for part in parts) * tensor
        held += parts[-1].spec.embedding_params * 2 * tensor * (1 if pipeline > 1 else 2)
        copies = (tensor - 1) * (vectors - MODEL.d_model) * 2
        assert held == MODEL.weight_bytes - MODEL.d_model * 2 + copies
        assert sum(len(part.spec.layers) for part in parts) == 32
        assert [part.first for part in parts] == [True] + [False] * (pipeline - 1) and parts[-1].last


def test_stages_are_as_even_as_they_can_be() -> None:
    """Against all divisions of eight layers into three stages."""
    spec = replace(MODEL, layers=(LAYER,) * 6 + (replace(LAYER, d_ff=28672),) * 2, vocab_size=32000)
    sizes = [sum(spec.matrix_bytes(matrix) for matrix in spec.matrices(layer)) for layer in spec.layers]
    sizes[-1] += spec.embedding_params * 2
    best = min(
        max(sum(sizes[:first]), sum(sizes[first:second]), sum(sizes[second:]))
        for first in range(1, 7)
        for second in range(first + 1, 8)
    )
    first, second, _ = stage_sizes(spec, 3)
    assert max(sum(sizes[:first]), sum(sizes[first : first + second]), sum(sizes[first + second :])) == best
    assert stage_sizes(MODEL, 32) == [1] * 32


def test_tensor_parallel_times_by_hand() -> None:
    """A decode step on two devices: half of the work of each layer, and two sums per layer plus one of the embedding."""
    cluster, spec = read_cluster("2xh100"), rank_spec(MODEL, 2)
    cost = cost_model(cluster.device, MODEL)
    decode = times("2xh100", Layout(tensor=2)).decode(16, 1024)
    draw = cluster.fabric.all_gather(2, 16 * 2 * 8)
    links = 65 * cluster.fabric.all_reduce(2, 16 * 4096 * 2) + draw
    assert decode.links == pytest.approx(links)
    assert decode.total == pytest.approx(cost.step_s(step_work(spec, [(1024, 1)] * 16)) + links)
    norms = times("2xh100", Layout(tensor=2), replace(MODEL, qk_norm="all")).decode(16, 1024).links
    assert norms == pytest.approx(links + 32 * cluster.fabric.all_reduce(2, 16 * 8))  # a float32 of queries and of keys


def test_pipeline_times_by_hand() -> None:
    """Two stages, two micro-batches in flight: the slower stage runs both between two tokens."""
    piped = times("2xh100", Layout(pipeline=2))
    cost, cluster = cost_model(piped.replica.cluster.device, MODEL), piped.replica.cluster
    first, last = piped.replica.stages
    rows = [(1024, 1)] * 8
    # The first stage computes no logits, so none of its layers leaves tokens out.
    first_s = cost.step_s(step_work(first.spec, rows, 8)._replace(logits=0))
    last_s = cost.step_s(step_work(last.spec, rows))
    send = cluster.fabric.send(0, 1, 8 * 4096 * 2)
    assert piped.decode(16, 1024).total == pytest.approx(max(first_s + last_s + send, 2 * max(first_s, last_s)))
    assert (
        piped.decode(1, 1024).bubbles > 0.4 * piped.decode(1, 1024).total
    )  # one request leaves each stage idle half of the time


def test_chunks_of_a_prompt_overlap_in_the_stages() -> None:
    """A prompt of three chunks: simulated chunk by chunk."""
    engine = EngineConfig(max_num_batched_tokens=1024, max_num_seqs=64)
    cluster = read_cluster("4xh100")
    made = replica(MODEL, Layout(pipeline=4), cluster, 4096, engine)
    piped = Times(made, cost_model(cluster.device, MODEL))
    cost = cost_model(cluster.device, MODEL)
    ended = [0.0] * 4
    for chunk in range(3):
        ready = 0.0
        for index, part in enumerate(made.stages):
            logits = (1 if chunk == 2 else 0) if part.last else 1024
            work = step_work(part.spec, [(chunk * 1024, 1024)], logits)
            ended[index] = ready = max(ready, ended[index]) + cost.step_s(
                work._replace(logits=logits if part.last else 0)
            )
            ready += cluster.fabric.send(index, index + 1, 1024 * 4096 * 2) if index < 3 else 0.0
    latency, busy = piped.prefill(3072)
    assert latency == pytest.approx(ended[-1], rel=1e-6)
    assert busy.total < latency  # the replica takes the next prompt before this one has ended


def test_context_parallel_ranks_share_a_long_prompt() -> None:
    """At 128k and 1M tokens arithmetic binds, and twice the ranks take little more than half of the time."""
    for length in (131072, 1000000):
        spec, seconds = with_context(MODEL, length + 1), list[float]()
        for ranks in (2, 4, 8):
            seconds.append(times("8xh200", Layout(context=ranks), spec, length).prefill(length)[0])
        assert all(1.75 < before / after < 2.05 for before, after in pairwise(seconds))


def test_what_cannot_be_names_its_reason() -> None:
    shared = replace(MODEL, layers=(LAYER, replace(LAYER, share_from=0)) * 2)
    cases = [
        (Layout(tensor=3), MODEL, "3xh100", "32 heads and a feed-forward width of 14336 cannot be split over 3 devices"),
        (Layout(pipeline=4), replace(MODEL, layers=(LAYER,) * 2), "4xh100", "2 layers cannot fill 4 stages"),
        (Layout(tensor=16), MODEL, "16xl40s", "links between 16 devices are unknown"),
        (Layout(), replace(MODEL, layers=(LAYER,) * 400), "h100", "memory: weights and workspace take"),
        (Layout(tensor=32), replace(MODEL, quantization="int4-g256"), "32xh100", "no multiple of the 256 that share a scale"),
        (Layout(tensor=32), replace(MODEL, quantization="q4_k"), "32xh100", "no multiple of the 256 that share a scale in q4_k"),
        (Layout(pipeline=4), shared, "4xh100", "reads the keys of layer 0, which is in another of 4 stages"),
        (Layout(tensor=12), replace(MODEL, layers=(replace(LAYER, n_heads=48, n_kv_heads=8, d_ff=12288),) * 2), "12xh100",
         "8 heads or blocks cannot be split over 12 devices"),
    ]  # fmt: skip
    for layout, spec, text, reason in cases:
        with pytest.raises(ConfigError) as error:
            replica(spec, layout, read_cluster(text), 2048, ENGINE)
        assert reason in error.value.message


def mixture(experts: ExpertSpec, **model: object) -> ModelSpec:
    layer = replace(LAYER, d_ff=experts.active_width, experts=experts)
    return replace(MODEL, layers=(layer,) * 4, **model)  # type: ignore[arg-type]


def test_the_width_of_an_expert_is_divided_not_that_of_all_that_a_token_uses() -> None:
    """4 x 192 is 6 groups of 128, but a rank of two holds 96 inputs of each expert. Whole experts keep their width."""
    odd = ExpertSpec(8, 4, 192)
    with pytest.raises(ConfigError, match="96 inputs on each of 2 devices are no multiple of the 128"):
        rank_spec(mixture(odd, quantization="int4-g128"), 2)
    shared = ExpertSpec(8, 1, 256, shared_width=320)  # together 576 on two ranks are 288
    with pytest.raises(ConfigError, match="160 inputs on each of 2 devices are no multiple of the 128"):
        rank_spec(mixture(shared, quantization="int4-g128"), 2)
    whole = rank_spec(mixture(ExpertSpec(8, 1, 192, whole=True), quantization="int4-g128"), 2)
    assert [matrix.inputs for matrix in whole.matrices(whole.layers[0])] == [4096, 2048, 4096, 4096, 192]
    assert rank_spec(mixture(ExpertSpec(8, 3, 128), quantization="int4-g64"), 2).layers[0].d_ff == 192


sizes = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, sizes, st.integers(1, 256), st.integers(64, 4096), st.integers(1, 512))
def test_more_work_takes_no_less_time(
    tensor: int, pipeline: int, context: int, batch: int, length: int, more: int
) -> None:
    layout = Layout(tensor, pipeline, context)
    made = times(f"{layout.replica}xh100", layout)
    assert made.prefill(length + more)[0] >= made.prefill(length)[0] * (1 - 1e-9)
    assert made.decode(batch, length + more).total >= made.decode(batch, length).total * (1 - 1e-9)
    assert made.decode(batch + more, length).total >= made.decode(batch, length).total * (1 - 1e-9)
    parts = made.decode(batch, length)
    assert min(parts.compute, parts.memory, parts.links, parts.bubbles, parts.overhead) >= -1e-12


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, sizes)
def test_more_devices_hold_more(tensor: int, pipeline: int, context: int) -> None:
    layout = Layout(tensor, pipeline, context)
    memory = times(f"{layout.replica}xh100", layout).replica.memory
    alone = times("h100", Layout()).replica.memory
    assert memory.weight_bytes <= alone.weight_bytes and memory.requests >= alone.requests
    assert memory.tokens >= alone.tokens


def test_layouts_are_all_divisions() -> None:
    for count in (1, 6, 8, 12):
        made = list(layouts(count))
        wanted = {
            (a, b, c, d)
            for a in range(1, count + 1)
            for b in range(1, count + 1)
            for c in range(1, count + 1)
            for d in range(1, count + 1)
            if a * b * c * d == count
        }
        assert {(entry.tensor, entry.pipeline, entry.context, entry.data) for entry in made} == wanted
        assert len(made) == len(wanted) and all(entry.devices == count for entry in made)
    assert str(Layout(4, 2, 1, 2)) == "TP4 x PP2 x DP2" and str(Layout()) == "1 device"


def ranking(text: str, demand: Demand, spec: ModelSpec = MODEL) -> list[Ranked]:
    cluster = read_cluster(text)
    return rank([Variant(spec, cost_model(cluster.device, spec))], cluster, demand, ENGINE, lambda layout: True)[0]


def test_a_small_model_is_replicated_and_a_large_one_divided() -> None:
    large = replace(MODEL, d_model=8192, layers=(replace(LAYER, n_heads=64, d_ff=28672),) * 80, quantization="fp8")
    assert str(ranking("8xh100", Demand(1024, 1024))[0].layout) == "DP8"
    best = ranking("8xh100", Demand(1024, 1024), large)
    assert all(entry.layout.replica >= 2 for entry in best) and best[0].layout.tensor > 1
    cards = ranking("8xl40s", Demand(1024, 1024), large)
    assert cards[0].layout.pipeline > cards[0].layout.tensor  # without NVLink, sums over devices cost more than bubbles


def test_objectives_come_first() -> None:
    free = ranking("8xh100", Demand(2048, 256))
    strict = ranking("8xh100", Demand(2048, 256, slo=Slo.parse("ttft=20ms,tpot=20ms")))
    assert not any(entry.verdict for entry in free)
    assert strict[0].layout != free[0].layout and not strict[0].verdict
    met = [not entry.verdict for entry in strict]
    assert met == sorted(met, reverse=True) and not met[-1]
    assert all(entry.ttft_s <= 0.02 and entry.tpot_s <= 0.02 for entry in strict if not entry.verdict)
    assert "keeps the objectives, the other misses ttft" in why(strict[met.index(False) - 1], strict[met.index(False)])
    slow = ranking("8xh100", Demand(2048, 256, slo=Slo.parse("e2e=2s")))
    assert all(entry.e2e_s <= 2 for entry in slow if not entry.verdict) and not slow[0].verdict


def test_a_rate_is_served_with_the_smallest_batch() -> None:
    full = ranking("8xh100", Demand(1024, 256))[0]
    half = ranking("8xh100", Demand(1024, 256, rate=full.capacity / 2))[0]
    assert half.requests_s == pytest.approx(full.capacity / 2) and half.batch < full.batch
    assert half.tpot_s < full.tpot_s and half.usd_million == pytest.approx(2 * full.usd_million)
    # Little's law: requests in flight = rate x seconds of an answer. A batch is a whole number.
    in_flight = half.requests_s / half.layout.data * half.tpot_s * 256
    assert half.batch == pytest.approx(in_flight, rel=0.05)
    over = ranking("8xh100", Demand(1024, 256, rate=full.capacity * 2))[0]
    assert "requests/s <" in over.verdict


def test_the_figures_of_a_layout_agree() -> None:
    for entry in ranking("8xh100", Demand(1024, 256)):
        replicas = entry.layout.data
        assert entry.requests_s == pytest.approx(replicas / entry.parts.total)
        assert entry.tpot_s * 256 == pytest.approx(entry.batch / (entry.requests_s / replicas), rel=1e-6)
        assert entry.tokens_s_device == pytest.approx(entry.requests_s * 256 / 8)
        assert entry.usd_million == pytest.approx(8 * 2.95 / 3600 / entry.tokens_s * 1e6)
        assert sum(
            entry.share(name) for name in ("compute", "memory", "links", "bubbles", "overhead")
        ) == pytest.approx(1)


def test_a_thousand_devices_are_planned() -> None:
    cluster, demand = read_cluster("1024xh100"), Demand(2048, 256, slo=Slo.parse("ttft=500ms,tpot=20ms"))
    variant = Variant(MODEL, cost_model(cluster.device, MODEL))
    entry = evaluate(variant, Layout(8, 4, 2, 16), cluster, demand, ENGINE)
    assert entry.layout.devices == 1024 and entry.tokens_s > 0 and math.isfinite(entry.usd_million)


def test_parts_of_a_step_are_its_time() -> None:
    cost = CostModel(MODEL, 1e15, 3e12, row_s=1e-5, token_s=1e-7, launch_s=1e-4, ramp_tokens=8, overlap=3.0)
    for shares in ([(0, 4096)], [(1024, 1)] * 64, [(100, 1), (0, 500)]):
        work = step_work(MODEL, shares)
        parts = stage_parts(cost, work)
        assert parts.total == pytest.approx(cost.step_s(work)) and isinstance(parts, Parts)
