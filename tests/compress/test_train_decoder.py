"""The differentiable decoder computes what transformers computes, whole and token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.compress.decoder import attention_mask, banded_attention, load_decoder, save_decoder
from ridgeline.core.errors import UnsupportedModel
from tests.models.families import FAMILIES, WITH_EXPERTS, save


def ids(rows: int = 2, tokens: int = 40) -> torch.Tensor:
    return torch.randint(0, 320, (rows, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITH_EXPERTS])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = save(name, tmp_path)
    ours = load_decoder(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids()), theirs(ids()).logits, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-window", "gemma2"])
@torch.no_grad()
def test_token_by_token_is_the_same(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    model = load_decoder(tmp_path)
    row = ids()
    whole = model(row)
    cache = model.cache(2, 40)
    parts = [model.logits(model.hidden(row[:, a:b], cache)) for a, b in ((0, 30), (30, 31), (31, 32), (32, 40))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "window"), [(257, 5), (300, 16), (1000, 200)])
def test_bands_are_windows(tokens: int, window: int) -> None:
    """Output and gradients equal those of attention with an explicit mask, where the last block is full and where it is not."""
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, heads, tokens, 8, generator=draw, requires_grad=True) for heads in (4, 2, 2)]
    mask = attention_mask(tokens, tokens, window, torch.device("cpu"))
    attend = torch.nn.functional.scaled_dot_product_attention
    outs = (banded_attention(*parts, window, 0.3), attend(*parts, attn_mask=mask, scale=0.3, enable_gqa=True))
    results = [(out, *torch.autograd.grad(out.square().sum(), parts)) for out in outs]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_every_parameter_gets_a_gradient(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    model = load_decoder(tmp_path)
    model(ids()).square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_saved_and_read_again(tmp_path: Path) -> None:
    save("llama-gqa", tmp_path / "a", torch.bfloat16)
    model = load_decoder(tmp_path / "a")
    save_decoder(model, tmp_path / "b", json.loads((tmp_path / "a" / "config.json").read_text()))
    again = load_decoder(tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_wrong_checkpoints_are_named(tmp_path: Path) -> None:
    save("llama-gqa", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"layers.1.mlp.up_proj.weight.*layers.0.extra.weight"):
        load_decoder(tmp_path)


def test_rows_longer_than_the_context(tmp_path: Path) -> None:
    save("llama-gqa", tmp_path)
    with pytest.raises(ValueError, match="context of 32"):
        load_decoder(tmp_path, context=32)(ids())
