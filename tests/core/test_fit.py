"""The search for options with which a model fits, and its ranking."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import DoesNotFit
from ridgeline.core.fit import WORTH, Candidate, Deployment, Risk, Space, alternatives, command, format_risk, size
from ridgeline.core.host_weights import LINK_SHARE
from ridgeline.core.sizing import GIB, DrafterMemory, Memory
from ridgeline.core.spec import KV_FORMATS, NUMBER_FORMATS, LayerSpec, ModelSpec, Rope
from ridgeline.hardware.probe import Device
from ridgeline.hardware.serving import search_space
from ridgeline.hardware.table import lookup


def llama(layers: int, width: int, heads: int, d_ff: int, max_len: int = 131_072) -> ModelSpec:
    layer = LayerSpec(heads, 8, 128, d_ff, Rope(500_000.0, 128))
    return ModelSpec("LlamaForCausalLM", 128_256, width, (layer,) * layers, max_len)


LLAMA_8B, LLAMA_70B = llama(32, 4096, 32, 14336), llama(80, 8192, 64, 28672)
LLAMA_405B = llama(126, 16384, 128, 53248)


def deployment(spec: ModelSpec, on: str, stored: str = "", **options: int) -> Deployment:
    row = lookup(on)
    device = Device("cuda", row.name, row.memory_bytes, row.memory_bytes)
    memory = Memory("cuda", row.memory_bytes)
    model = ModelConfig("model", max_model_len=options.get("max_model_len"))
    served = replace(spec, max_len=options.get("max_model_len", spec.max_len))
    return Deployment(
        served, EngineConfig(), memory, model, space=search_space(device, replace(spec, quantization=stored))
    )


def refusal(case: Deployment) -> str:
    with pytest.raises(DoesNotFit) as caught:
        size(case)
    return caught.value.message


def by_format(candidates: tuple[Candidate, ...]) -> dict[object, Candidate]:
    return {candidate.change.get("quantization", ""): candidate for candidate in candidates}


def test_70b_fits_an_a100_in_4_bits() -> None:
    """131 GiB in bfloat16, 35 GiB in int4."""
    case = deployment(LLAMA_70B, "a100")
    message = refusal(case)
    assert "It fits with weights in int4 (medium risk to quality), a context of " in message
    assert "This command works: ridgeline serve model --quantization int4 --max-model-len " in message
    candidates = by_format(alternatives(case))
    assert {"int4", "int8", "int3"} == {*candidates}, "an A100 has no unit for fp8"
    assert candidates["int4"].tokens_s > 3 * candidates["int8"].tokens_s, "int8 leaves room for few requests"
    eight = candidates["int8"].change
    assert eight["max_num_seqs"] == 16 and eight["gpu_memory_utilization"] == 0.95
    short = by_format(alternatives(deployment(LLAMA_70B, "a100", max_model_len=32_768)))
    assert short["int4"].change == {"quantization": "int4"}


@pytest.mark.parametrize("on", ["l4", "4090"])
def test_8b_on_24_gib_is_served_in_fp8(on: str) -> None:
    """Twice the context, the speed and the requests of bfloat16, at a small risk. bfloat16 is an alternative without risk."""
    case = deployment(LLAMA_8B, on)
    best, *others = alternatives(case)
    assert best.change["quantization"] == "fp8" and best.risk is Risk.SMALL
    same = next(candidate for candidate in others if candidate.risk is Risk.NONE)
    assert "quantization" not in same.change and same.plan.max_len * 2 < best.plan.max_len < LLAMA_8B.max_len
    assert best.tokens_s > 2 * same.tokens_s and best.request_s < same.request_s / 1.7
    assert [candidate.grade for candidate in (best, *others)] == sorted(
        (candidate.grade for candidate in (best, *others)), reverse=True
    )


def test_what_nothing_helps_names_the_smallest_device_and_how_to_use_several() -> None:
    message = refusal(deployment(LLAMA_405B, "h100"))
    assert (
        "No option makes it fit: use a smaller model, NVIDIA B200 SXM (179.06 GiB), which holds it with weights in "
        in message
    )
    assert message.endswith("or more GPUs with --tensor-parallel-size; `ridgeline plan` compares layouts.")
    larger = refusal(deployment(replace(LLAMA_405B, layers=LLAMA_405B.layers * 2), "h200"))
    assert "use a smaller model, a device with more than" in larger
    on_cpu = refusal(replace(deployment(LLAMA_70B, "h200"), memory=Memory("cpu", 20 * GIB)))
    assert "NVIDIA A100 SXM 40GB (40.00 GiB), which holds it with weights in int3" in on_cpu
    assert "or several hosts with --nnodes" in on_cpu and "Offload" not in on_cpu


def test_what_fits_in_no_format_is_split_between_device_and_host_memory() -> None:
    """As many whole GiB as are missing, with the time of a token that the copies take."""
    case = deployment(LLAMA_405B, "h200", max_model_len=8192)
    message = refusal(case)
    split = r"It fits with weights in int4 \(medium risk to quality\), 85\.\d\d GiB of weights in host memory \(1\.\d s per token\)"
    assert re.search(split, message)
    assert re.search(
        r"This command works: ridgeline serve model --max-model-len 8192 --quantization int4 --cpu-offload-gb 85\.0$",
        message,
    )
    best = alternatives(case)[0]
    assert best.plan.host_bytes >= best.spec.host_bytes and best.request_s == best.plan.host_bytes / (64e9 * LINK_SHARE)
    less = replace(case, spec=replace(best.spec, host_bytes=best.spec.host_bytes - GIB))
    with pytest.raises(DoesNotFit):
        size(less)
    unknown = replace(case, space=replace(case.space, cost=None))
    assert not alternatives(unknown), "without a known link there is no speed"


def test_other_formats_are_tried_without_weights_in_host_memory() -> None:
    case = deployment(LLAMA_70B, "h100")
    split = replace(case, model=replace(case.model, cpu_offload_gb=8.0), spec=replace(case.spec, host_bytes=8 * GIB))
    best = alternatives(split)[0]
    assert best.change == {**alternatives(case)[0].change, "cpu_offload_gb": None} and not best.plan.host_bytes
    assert "--cpu-offload-gb" not in command(split, best.change) and "--cpu-offload-gb 8.0" in command(split, {})


def test_a_context_that_the_user_set_is_kept_where_a_format_keeps_it() -> None:
    case = deployment(LLAMA_8B, "l4", max_model_len=100_000)
    best = alternatives(case)[0]
    assert best.plan.max_len == 100_000 and best.change["quantization"] == "int4" and "max_model_len" not in best.change
    free = alternatives(replace(case, model=ModelConfig("model")))[0]
    assert free.change["quantization"] == "fp8" and free.plan.max_len < 100_000


def test_a_quantized_checkpoint_is_served_as_it_is() -> None:
    stored = replace(LLAMA_70B, quantization="int8")
    assert "--quantization" not in refusal(deployment(stored, "4090", "int8"))
    assert "--quantization int4" in refusal(deployment(stored, "a100"))  # quantized while loading, by option


def test_formats_of_the_cache_are_tried_as_a_device_names_them() -> None:
    case = deployment(LLAMA_8B, "l4")
    eight_bits = replace(case, space=replace(case.space, kv_formats=("fp8",)))
    before, after = alternatives(case)[0], alternatives(eight_bits)[0]
    assert after.change["kv_cache_dtype"] == "fp8" and after.spec.kv is KV_FORMATS["fp8"]
    assert after.plan.max_len > 1.5 * before.plan.max_len
    assert "KV cache in fp8" in str(after) and "--kv-cache-dtype fp8" in command(case, after.change)


def test_each_candidate_fits_by_the_plan_that_refused() -> None:
    for case in (deployment(LLAMA_70B, "a100"), deployment(LLAMA_8B, "l4")):
        for candidate in alternatives(case):
            options = {name: value for name, value in candidate.change.items() if hasattr(case.engine, name)}
            engine = replace(case.engine, **options)  # type: ignore[arg-type]
            assert size(replace(case, spec=candidate.spec, engine=engine)) == candidate.plan


def test_the_memory_of_a_draft_counts_in_the_search() -> None:
    case = deployment(LLAMA_8B, "4090")
    drafted = replace(case, drafters=DrafterMemory(LLAMA_8B.layers[:16], 4 * GIB, 1024))
    assert alternatives(drafted)[0].plan.max_len < 0.8 * alternatives(case)[0].plan.max_len


def test_an_unknown_device_is_ranked_by_bytes() -> None:
    case = deployment(LLAMA_8B, "l4")
    unknown = replace(case, space=replace(case.space, cost=None))
    assert alternatives(unknown)[0].change == alternatives(case)[0].change


def test_risk_grows_with_fewer_bits() -> None:
    assert format_risk("fp8") == format_risk("int8") == Risk.SMALL
    assert format_risk("int4") == format_risk("w8a8") == Risk.MEDIUM
    assert format_risk("int3") == format_risk("int4-channel") == Risk.LARGE
    assert all(format_risk(name) > Risk.NONE for name in NUMBER_FORMATS)


def test_the_page_states_what_a_risk_is_worth() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
    for risk, worth in WORTH.items():
        assert re.search(rf"^\| {risk.name.lower()} \| .* \| {worth:g} \|$", page, re.MULTILINE), risk


def test_float32_is_served_in_bfloat16_before_it_is_quantized() -> None:
    case = deployment(replace(LLAMA_8B, dtype="float32", max_len=32_768), "l40s")
    best = alternatives(replace(case, memory=Memory("cuda", 30 * GIB), space=Space()))[0]
    assert best.change == {"dtype": "bfloat16"} and best.risk is Risk.MINIMAL
