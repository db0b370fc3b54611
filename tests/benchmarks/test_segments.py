"""Segments at other positions: what is computed again in full equals the prompt computed in full."""

from __future__ import annotations

import pytest
import torch
from segments import Model, Prompt, answer_logits, drift, reused

from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope

LAYER = LayerSpec(4, 2, 16, 48, Rope(dim=16))
SPEC = ModelSpec(architecture="LlamaForCausalLM", vocab_size=64, d_model=32, layers=(LAYER,) * 3, max_len=64, tied=True)
PROMPT = Prompt((torch.arange(30) * 7 + 3) % 64, (0, 8, 16), 24)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    decoder = TrainableDecoder(SPEC)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return Model(decoder)


@torch.inference_mode()
def test_the_first_layer_is_exact_at_any_position(model: Model) -> None:
    """Its keys and values depend on their token alone, and rotations add up."""
    whole, parts, unmoved = model.alone(PROMPT.ids[:24]), reused(model, PROMPT), reused(model, PROMPT, moves=False)
    torch.testing.assert_close(parts[0][0][:, :, :24], whole[0][0])
    torch.testing.assert_close(parts[0][1][:, :, :24], whole[0][1])
    assert not torch.allclose(unmoved[0][0][:, :, :24], whole[0][0])
    assert not torch.allclose(parts[1][0][:, :, :24], whole[1][0]), "later layers see the segments before"


@torch.inference_mode()
def test_all_tokens_give_the_logits_of_the_prompt_in_full(model: Model) -> None:
    full = model.decoder(PROMPT.ids[None, :-1])[0, 23:]
    errors = {}
    for method in ("first", "deviation"):
        logits, computed = answer_logits(model, PROMPT, method, 1.0)
        torch.testing.assert_close(logits, full, rtol=1e-4, atol=1e-4)
        assert computed == pytest.approx(15 / 16)  # the last token of the prompt counts as part of the answer
        errors[method] = drift(full, answer_logits(model, PROMPT, method, 0.25)[0], PROMPT.ids[24:]).kl.mean()
    unmoved = drift(full, answer_logits(model, PROMPT, "unmoved", 0.0)[0], PROMPT.ids[24:]).kl.mean()
    assert all(0 < error < unmoved for error in errors.values())


@torch.inference_mode()
def test_a_share_is_what_it_computes(model: Model) -> None:
    assert answer_logits(model, PROMPT, "first", 0.25)[1] == pytest.approx(4 / 16)
    assert answer_logits(model, PROMPT, "first", 0.0)[1] == 0
    deviation = answer_logits(model, PROMPT, "deviation", 0.25)[1]
    assert 4 / 16 < deviation <= (15 + 2 * 4) / (3 * 16)
