"""Which linears a GPU has in both forms, and where the memory for the second one is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.cost import WorkMeter, step_work
from ridgeline.core.errors import DoesNotFit
from ridgeline.core.experts import ExpertSpec
from ridgeline.core.fit import Deployment
from ridgeline.core.fit import size as size_of
from ridgeline.core.gpu_blocks import converted, expanded_bytes, kept_bytes, most_rows
from ridgeline.core.sizing import GIB, Memory, MemoryPlan, Planner
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope

LINEARS = 4096 * (6144 + 4096 + 3 * 14_336)
HEAD = 128_256 * 4096


def llama_8b(**changes: object) -> ModelSpec:
    """In Q4_K with a head in Q6_K."""
    layer = LayerSpec(32, 8, 128, 14_336, Rope(500_000.0, 128))
    spec = ModelSpec("LlamaForCausalLM", 128_256, 4096, (layer,) * 32, 8192, quantization="q4_k", head_format="q6_k")
    return replace(spec, **changes)  # type: ignore[arg-type]


def plan(spec: ModelSpec, memory: int, kind: str = "cuda", **options: object) -> MemoryPlan:
    return size_of(Deployment(spec, EngineConfig(**options), Memory(kind, memory)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "sequence", "requested", "kept"),
    [
        (25, 10, None, 25),  # a quarter of 100
        (26, 10, None, 0),
        (25, 75, None, 25),
        (25, 76, None, 0),  # no room for the longest sequence beside it
        (50, 10, 50, 50),  # what the user asks for comes first
        (50, 10, 51, 0),
        (80, 10, 20, 80),  # and a smaller cache leaves more
        (0, 10, None, 0),
    ],
)
def test_both_forms_are_kept_where_the_cache_keeps_three_quarters(
    size: int, sequence: int, requested: int | None, kept: int
):
    assert kept_bytes(size, 100, sequence, requested) == kept


def test_nothing_is_kept_where_the_blocks_alone_do_not_fit():
    assert kept_bytes(50, -10, 10, None) == 0 == kept_bytes(50, -10, 10, 20)


def test_a_linear_reads_its_blocks_for_as_many_rows_as_all_its_formats_allow():
    assert most_rows(["q4_k", "q6_k"]) == min(most_rows(["q4_k"]), most_rows(["q6_k"])) > 0
    assert most_rows(["int4-g64-zp"]) == most_rows(["int4"]) > most_rows(["q4_k", "int8-g32"]) == most_rows(["q4_k"])
    for formats in ([], [""], ["q4_k", ""], ["mxfp4"], ["fp8"], ["w8a8"], ["llm-int8"]):
        assert most_rows(formats) == 0


def test_bytes_are_those_of_the_linears_in_blocks():
    spec = llama_8b()
    assert expanded_bytes(spec) == 2 * (32 * LINEARS + HEAD)
    assert expanded_bytes(replace(spec, tied=True, head_format="")) == 2 * 32 * LINEARS  # the head is the embedding
    assert expanded_bytes(replace(spec, head_format="")) == 2 * 32 * LINEARS
    assert expanded_bytes(replace(spec, quantization="int4-g32")) == expanded_bytes(spec)
    assert expanded_bytes(replace(spec, quantization="fp8", head_format="int8")) == 2 * HEAD
    assert expanded_bytes(replace(spec, quantization="int4-g32", dtype="float32")) == 0
    # Queries, keys and values in several formats: one matrix, which floats keep in one form.
    for name, lost in (("q6_k", 0), ("int8-g32", 0), ("", 6144)):
        formats = ("q4_k", "q4_k", name, *["q4_k"] * 4)
        layers = (replace(spec.layers[0], formats=formats), *spec.layers[1:])
        assert expanded_bytes(replace(spec, layers=layers)) == expanded_bytes(spec) - 2 * 4096 * lost
    layer = replace(spec.layers[0], experts=ExpertSpec(8, 2, 14_336))
    assert expanded_bytes(replace(spec, layers=(layer,) * 32)) == 0


def test_steps_of_many_rows_read_the_dtype():
    """Each linear above the limit of its format: the head from 17 rows on, the layers from 25 on. In a prompt the head and most of
    the last layer run for one token."""
    spec, wide = llama_8b(both_forms=True), llama_8b(quantization="", head_format="")
    blocks = llama_8b()
    assert spec.weight_bytes == blocks.weight_bytes, "the plan counts what lies beside"
    head, layers = wide.head_bytes - blocks.head_bytes, wide.layer_bytes - blocks.layer_bytes
    last = sum(wide.matrix_bytes(matrix) for matrix in wide.matrices(wide.layers[-1])[1:])
    last -= sum(blocks.matrix_bytes(matrix) for matrix in blocks.matrices(blocks.layers[-1])[1:])

    def more(shares: list[tuple[int, int]], logits: int | None = None) -> int:
        work = step_work(spec, shares, logits)
        ends, counts = [start + count for start, count in shares], [count for _, count in shares]
        assert WorkMeter(spec).work(ends, counts, work.logits) == work
        return work.bytes - step_work(blocks, shares, logits).bytes

    decode = [more([(100, 1)] * rows) for rows in (1, 16, 17, 24, 25, 64)]
    assert decode == [0, 0, head, head, head + layers, head + layers]
    assert more([(0, 512)]) == more([(0, 512)], 0) == layers - last
    assert more([(0, 24)]) == 0 and more([(0, 25)], 25) == head + layers
    assert more([(0, 512), *[(100, 1)] * 24]) == layers + head, "25 tokens with logits"
    many = [(100, 1)] * 32
    assert step_work(spec, many).bytes == step_work(wide, many).bytes > 2.6 * step_work(blocks, many).bytes
    assert more([]) == 0


def qwen3_30b_a3b(name: str) -> ModelSpec:
    experts = ExpertSpec(128, 8, 768)
    layer = LayerSpec(32, 4, 128, experts.active_width, Rope(), experts=experts)
    return ModelSpec("", 151_936, 2048, (layer,) * 48, 8192, quantization=name, head_format="int8")


def test_a_gpu_has_scales_of_experts_in_words():
    """Two bytes more for each group of an expert, one with zero points; nothing more in other formats and on a CPU."""
    groups = 48 * 128 * 3 * 768 * 2048 // 128
    for name, more in (("int4", 2), ("int8-g128", 2), ("int4-g128-zp", 1), ("int8", 0), ("fp8-block", 0), ("", 0)):
        spec = qwen3_30b_a3b(name)
        for kind in ("cuda", "hopper"):
            held = converted(spec, kind)
            assert held.weight_bytes - spec.weight_bytes == groups * more
            assert plan(held, 141 * GIB).weight_bytes == held.weight_bytes
            assert replace(held, quantization="").weight_bytes == replace(spec, quantization="").weight_bytes
        assert converted(spec, "cpu") == spec
    assert groups * 2 == pytest.approx(0.45e9, rel=0.01)


def test_a_gpu_has_three_bits_as_four():
    spec = llama_8b(quantization="int3", head_format="int3")
    assert converted(spec, "cuda").weight_bytes == replace(spec, quantization="int4", head_format="int4").weight_bytes


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_counts_its_share(ranks: int):
    spec = llama_8b()
    assert expanded_bytes(spec.on_rank(ranks)) == expanded_bytes(spec) // ranks


def test_the_plan_counts_both_forms():
    spec, memory = llama_8b(), 141 * GIB
    both, blocks = plan(spec, memory), plan(spec, memory, deterministic=True)
    assert both.expanded_bytes == expanded_bytes(spec) and blocks.expanded_bytes == 0
    assert both.weight_bytes == spec.weight_bytes + both.expanded_bytes and blocks.weight_bytes == spec.weight_bytes
    page = both.layout.page_bytes
    assert abs(blocks.kv_bytes - both.kv_bytes - both.expanded_bytes) <= page
    assert both.total_bytes <= both.usable_bytes < both.total_bytes + page
    asked = plan(spec, memory, kv_cache_memory=20 * GIB)
    assert asked.expanded_bytes and 20 * GIB - page < asked.kv_bytes <= 20 * GIB
    assert not plan(spec, memory, kv_cache_memory=blocks.kv_bytes).expanded_bytes
    ranked = plan(spec, memory, tensor_parallel_size=2)
    assert ranked.expanded_bytes == expanded_bytes(spec) // 2
    staged = plan(spec, memory, pipeline_parallel_size=2)
    assert 2 * 16 * LINEARS < staged.expanded_bytes <= 2 * (18 * LINEARS + HEAD)


def test_one_form_where_memory_is_short_or_another_device_computes():
    spec = llama_8b()
    assert not plan(spec, 24 * GIB).expanded_bytes
    assert not plan(spec, 141 * GIB, "cpu").expanded_bytes
    assert not plan(spec, 141 * GIB, gpu_memory_utilization=0.25).expanded_bytes
    assert not plan(replace(spec, host_bytes=1 << 30), 141 * GIB).expanded_bytes
    assert not plan(replace(spec, quantization="", head_format=""), 141 * GIB).expanded_bytes


def test_both_forms_never_make_a_model_too_large():
    """Over all sizes of memory: it fits exactly where it fits without a second form, and then three quarters of the cache stay."""
    spec, counts = llama_8b(), set[int]()
    for gib in range(4, 100, 2):
        planners = [
            Planner(spec, EngineConfig(deterministic=alone), Memory("cuda", gib * GIB)) for alone in (True, False)
        ]
        blocks, both = (planner.plan() for planner in planners)
        assert (blocks[1] <= 0) == (both[1] <= 0)
        if blocks[1] <= 0:
            assert (both[0].kv_bytes + both[0].layout.page_bytes) / 0.75 >= blocks[0].kv_bytes
            assert both[0].sequences >= 1
        counts.add(both[0].expanded_bytes)
    assert counts == {0, expanded_bytes(spec)}
    with pytest.raises(DoesNotFit, match="5.0[0-9] GiB for weights"):
        plan(spec, 6 * GIB)
