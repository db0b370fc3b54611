"""Experts in every layout and number format: equal to the dense formula of their dequantized weights, and end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.quantization import check_experts
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.expert_load import EVERY
from ridgeline.engine.local import LocalEngine
from ridgeline.models.build import LoadedModel, build, served_spec
from ridgeline.models.experts import Experts
from ridgeline.models.weights import short_name
from ridgeline.ops.reference import REFERENCE
from ridgeline.quant.format import Weight
from ridgeline.wire.messages import Submit
from tests.models.families import save
from tests.models.paged import PagedRows

CPU = torch.device("cpu")
TOKENS = list(range(3, 40))
PROMPTS = [
    [5, 9, 2, 77, 41, 200, 13, 8, 300, 11, 6, 17, 18, 19, 20, 21, 22, *range(30, 30 + more)] for more in (1, 6, 25)
]
WEIGHT_ONLY = ["int8", "int4", "int4-g32-zp", "int3", "fp8-weight"]


def load(folder: Path, **options: object) -> LoadedModel:
    return build(folder, model=ModelConfig(**options), ops=REFERENCE, device=CPU)  # type: ignore[arg-type]


def run(model: LoadedModel) -> torch.Tensor:
    return PagedRows(model).step([(1, TOKENS)])


def test_one_tensor_of_all_experts_equals_a_tensor_each(tmp_path: Path) -> None:
    """New versions of transformers can save a layer's experts as one tensor; Mixtral has names of its own."""
    save("mixtral", tmp_path)
    expected = run(load(tmp_path))
    tensors = {short_name(name): value for name, value in load_file(tmp_path / "model.safetensors").items()}
    assert "layers.2.mlp.experts.4.up_proj.weight" in tensors
    for layer in range(3):
        block = f"layers.{layer}.mlp.experts"
        parts = {
            name: torch.stack([tensors.pop(f"{block}.{expert}.{name}.weight") for expert in range(5)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{block}.gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), 1)
        tensors[f"{block}.down_proj"] = parts["down_proj"]
    save_file({f"model.{name}" if "lm_head" not in name else name: value for name, value in tensors.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    assert torch.equal(run(load(tmp_path)), expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
@pytest.mark.parametrize("quantization", WEIGHT_ONLY)
def test_quantized_experts_equal_their_dequantized_weights(family: str, quantization: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    model, plain = load(tmp_path, quantization=quantization), load(tmp_path)
    assert model.spec.weight_bytes == sum(tensor.nbytes for tensor in model.decoder.tensors()) < plain.spec.weight_bytes
    for layer, target in zip(model.decoder.layers, plain.decoder.layers, strict=True):
        ours, theirs = layer.feed_forward, target.feed_forward
        assert isinstance(ours, Experts) and isinstance(theirs, Experts)
        pairs = [*zip(ours.experts, theirs.experts, strict=True)]
        pairs += [(ours.shared, theirs.shared)] if ours.shared and theirs.shared else []
        for quantized, floating in pairs:
            _copy(quantized.gate_up, floating.gate_up)
            _copy(quantized.down, floating.down)
        for name in ("qkv", "out"):
            _copy(getattr(layer.attention, name).weight, getattr(target.attention, name).weight)
    plain.decoder.head = model.decoder.head
    torch.testing.assert_close(run(model), run(plain), rtol=2e-3, atol=2e-3)


def _copy(quantized: Weight, floating: Weight) -> None:
    """Load the dequantized weights. Biases, in the last of the tensors, are equal already."""
    matrix, *bias = floating.tensors()
    matrix.copy_((quantized.apply(torch.eye(matrix.shape[1])) - sum(bias)).T)


def answers(
    folder: Path, prompts: list[list[int]], engine: dict[str, object], model: dict[str, object]
) -> list[list[int]]:
    room = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_memory": 4 << 20, "block_size": 8, **engine}
    local = LocalEngine.start(ModelConfig(str(folder), **model), EngineConfig(**room))  # type: ignore[arg-type]
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    try:
        for _ in range(2):  # the second time from cached prefixes
            tokens.clear()
            for delta in local.run([Submit(str(n), prompt, sampling, arrival=0.0) for n, prompt in enumerate(prompts)]):
                tokens.setdefault(delta.id, []).extend(delta.tokens)
    finally:
        local.close()
    return [tokens[str(number)] for number in range(len(prompts))]


EXACT: dict[str, object] = {"deterministic": True}


@pytest.mark.parametrize(
    ("quantization", "more"),
    [
        ("", {"speculate": "reference"}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                *((name, EXACT) for name in ("", "int8", "int4-g32", "fp8", "w8a8", "llm-int8")),
                ("", {"speculate": "reference+lookahead"}),
                ("int8", {"speculate": "draft:"}),
            )
        ),
    ],
)
def test_chunks_drafts_and_cached_prefixes_change_no_token(
    quantization: str, more: dict[str, object], tmp_path: Path
) -> None:
    """Alone, in one chunk and without drafts, against together, in chunks and with drafts. draft: the model drafts for itself."""
    save("qwen3-moe", tmp_path)
    model: dict[str, object] = {"dtype": "float32", "quantization": quantization}
    if more.get("speculate") == "draft:":
        more = {"speculate": f"draft:{tmp_path}"}
    together = answers(tmp_path, PROMPTS, more, model)
    plain = {"deterministic": more.get("deterministic", False), "max_num_batched_tokens": 64}
    assert together == [answers(tmp_path, [prompt], plain, model)[0] for prompt in PROMPTS]


def test_the_load_of_experts_is_reported(tmp_path: Path) -> None:
    save("qwen3-moe-mixed", tmp_path)
    config = EngineConfig(max_num_seqs=2, kv_cache_memory=4 << 20, block_size=8)
    engine = LocalEngine.start(ModelConfig(str(tmp_path), dtype="float32"), config)
    sampling = SamplingParams(temperature=0.0, max_tokens=EVERY + 4, ignore_eos=True)
    engine.submit(Submit("one", PROMPTS[0], sampling, arrival=0.0))
    readings = []
    while not engine.engine.idle:
        frame = engine.engine.turn()
        if frame is not None and frame.stats is not None and frame.stats.expert_tokens:
            readings.append(frame.stats)
    engine._open.clear()
    engine.close()
    (stats,) = readings
    spec = load(tmp_path).spec
    layers = [layer.experts for layer in spec.layers if layer.experts]
    assert [len(tokens) for tokens in stats.expert_tokens] == [experts.count for experts in layers]
    run_tokens = len(PROMPTS[0]) + stats.step - 1
    assert [sum(tokens) for tokens in stats.expert_tokens[:-1]] == [3 * run_tokens] * (len(layers) - 1)


def test_an_int8_cache_serves_experts(tmp_path: Path) -> None:
    save("olmoe", tmp_path)
    model: dict[str, object] = {"dtype": "float32", "kv_cache_dtype": "int8"}
    assert [len(tokens) for tokens in answers(tmp_path, PROMPTS, {}, model)] == [16, 16, 16]


def test_compression_refuses_experts(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    with pytest.raises(ConfigError, match="a model with experts, which compression does not support: serve it with"):
        Checkpoint(tmp_path)


def test_a_gpu_refuses_formats_without_products_for_experts(tmp_path: Path) -> None:
    """Before any weight is read, and where plans are made."""
    save("mixtral", tmp_path)
    spec = load(tmp_path).spec
    known = "fp8, fp8-block, fp8-weight, int3, int4, int8, mxfp4"
    for form in ("w8a8", "llm-int8"):
        asked = ModelConfig(quantization=form)
        with pytest.raises(
            ConfigError, match=f"no products for experts in {form}, only in {known}: serve the model in"
        ):
            served_spec(spec, asked, "hopper")
        assert served_spec(spec, asked, "cpu").quantization == form
    with pytest.raises(ConfigError, match="int4-g32-ordered"):
        check_experts(replace(spec, quantization="int4-g32-ordered"), "cuda")
    for form in ("", "int4-g32-zp", "fp8", "fp8-block", "mxfp4"):
        check_experts(replace(spec, quantization=form), "cuda")
