"""Checkpoints whose tensors have other names or layouts than Llama's, as they are published."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import load_decoder
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import UnsupportedModel
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops.reference import REFERENCE
from tests.models.families import LONGROPE, MORE, save
from tests.models.paged import PagedRows

TOKENS = list(range(3, 43))
# transformers 5 renames these as it reads a published checkpoint.
EXAONE = {
    r"^model\.layers": "transformer.h",
    r"^model\.embed_tokens": "transformer.wte",
    r"^model\.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    r"self_attn\.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "gate_proj": "c_fc_0",
    "up_proj": "c_fc_1",
    "down_proj": "c_proj",
}
ERRORS = {"int8": 0.1, "fp8": 0.3, "int4-g32": 0.6}
OFTEN = (("cohere2", "int8"), ("gpt2", "int4-g32"), ("phi3", "int8"), ("granite", "fp8"))
EXAONE_KEYS = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}


def run(folder: Path, tokens: list[int] = TOKENS, **options: object) -> torch.Tensor:
    return PagedRows(load(folder, **options)).step([(1, tokens)])


def load(folder: Path, **options: object) -> LoadedModel:
    model = ModelConfig(**options)  # type: ignore[arg-type]
    return build(folder, model=model, ops=REFERENCE, device=torch.device("cpu"))


def rewrite(folder: Path, names: Mapping[str, str], more: Mapping[str, torch.Tensor]) -> None:
    """Rename the tensors by pattern, and add some."""
    tensors = dict(more)
    for name, tensor in load_file(folder / "model.safetensors").items():
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_exaone_as_published(tmp_path: Path) -> None:
    save("exaone", tmp_path)
    expected = run(tmp_path)
    rewrite(tmp_path, EXAONE, {"transformer.rotary.inv_freq": torch.ones(4)})
    config = json.loads((tmp_path / "config.json").read_text())
    config = {EXAONE_KEYS.get(key, key): value for key, value in config.items()}
    config |= {
        "architectures": ["ExaoneForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(run(tmp_path), expected)


@pytest.mark.parametrize(("family", "prefix"), [("gpt2", r"^transformer\."), ("opt", r"^model\.")])
def test_old_names_without_prefix(family: str, prefix: str, tmp_path: Path) -> None:
    """Of the first exports, GPT-2's with its causal masks."""
    save(family, tmp_path)
    expected = run(tmp_path)
    masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    rewrite(tmp_path, {prefix: ""}, masks if family == "gpt2" else {})
    assert torch.equal(run(tmp_path), expected)


def test_longrope_has_short_factors_in_the_original_context(tmp_path: Path) -> None:
    theirs = save("phi4-mini", tmp_path)
    original = LONGROPE["original_max_position_embeddings"]
    assert isinstance(original, int)
    tokens = TOKENS[:original]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(run(tmp_path, tokens, max_model_len=original), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(run(tmp_path, tokens), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("family", "linear"), [("phi3", "self_attn.qkv_proj"), ("cohere2", "self_attn.q_proj")])
def test_integers_that_cannot_be_divided_are_refused(family: str, linear: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    rewrite(tmp_path, {rf"{re.escape(linear)}\.weight": f"{linear}.qweight"}, {})
    with pytest.raises(UnsupportedModel, match=rf"{linear}\.qweight is in a number format .*--quantization int8"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        pytest.param(family, name, marks=() if (family, name) in OFTEN else pytest.mark.long)
        for family in sorted(MORE)
        for name in ERRORS
    ],
)
def test_fewer_bits(family: str, quantization: str, tmp_path: Path) -> None:
    """The weights are quantized while they load, so that the logits are near those of the floats. Unrelated logits have an error of
    about 1.4."""
    save(family, tmp_path)
    exact, model = run(tmp_path), load(tmp_path, quantization=quantization)
    assert model.spec.weight_bytes == sum(tensor.nbytes for tensor in model.decoder.tensors())
    error = (PagedRows(model).step([(1, TOKENS)]) - exact).norm() / exact.norm()
    assert 0 < error < ERRORS[quantization]


@pytest.mark.parametrize("family", ["phi3", "granite", "glm", "gpt2"])
def test_other_families_are_not_compressed_or_trained(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    for read in (Checkpoint, load_decoder):
        with pytest.raises(UnsupportedModel, match="cannot be compressed or trained.*--quantization int8"):
            read(tmp_path)
