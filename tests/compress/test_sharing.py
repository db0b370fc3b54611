"""Models whose layers share keys and values: they train, and recipes that run one layer at a time refuse them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import load_decoder, save_decoder
from ridgeline.compress.layerwise import LayerwiseRunner
from ridgeline.compress.tune import linears
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import UnsupportedModel
from ridgeline.models.build import build
from ridgeline.ops.reference import REFERENCE
from tests.models.families import SHARING, save
from tests.models.paged import PagedRows

IDS = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", sorted(SHARING))
def test_the_trained_decoder_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    theirs = save(name, tmp_path)
    decoder = load_decoder(tmp_path)
    with torch.inference_mode():
        want = theirs(IDS).logits
        got = decoder(IDS)
        cache = decoder.cache(2, 40)
        steps = [decoder.logits(decoder.hidden(part, cache)) for part in IDS.split([17, 1, 1, 21], 1)]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))
    torch.testing.assert_close(torch.cat(steps, 1), want, rtol=0, atol=1e-4 * float(want.abs().max()))


def test_keys_learn_from_every_layer_that_reads_them(tmp_path: Path) -> None:
    """The gradient of the source's keys has a part of each reader; readers have no weights of keys."""
    save("yoco", tmp_path)
    decoder = load_decoder(tmp_path)
    streams = decoder.streams(IDS)
    keys = decoder.get_parameter("layers.1.self_attn.k_proj.weight")
    parts = [torch.autograd.grad(streams[at].square().sum(), keys, retain_graph=True)[0].norm() for at in (2, 3, 4)]
    assert 0 < parts[0] != parts[1] != parts[2]
    assert not any("layers.2.self_attn.k_proj" in name for name, _ in decoder.named_parameters())
    assert len(linears(decoder)) == 4 * 7 - 2 * 2


def test_a_trained_model_is_served(tmp_path: Path) -> None:
    """save_decoder writes what the engine's decoder loads."""
    save("windows-shared", tmp_path / "start")
    decoder = load_decoder(tmp_path / "start")
    config = json.loads((tmp_path / "start" / "config.json").read_text())
    save_decoder(decoder, tmp_path / "saved", config)
    model = build(tmp_path / "saved", model=ModelConfig(), ops=REFERENCE, device=torch.device("cpu"))
    assert model.spec == decoder.spec
    out = PagedRows(model).step([(1, IDS[0].tolist())])
    with torch.inference_mode():
        want = load_decoder(tmp_path / "saved")(IDS[:1])[0]
    torch.testing.assert_close(out, want, rtol=0, atol=1e-4 * float(want.abs().max()))


def test_recipes_that_run_one_layer_at_a_time_refuse(tmp_path: Path) -> None:
    save("cla", tmp_path)
    with pytest.raises(UnsupportedModel, match="share keys and values.*--quantization instead"):
        LayerwiseRunner(Checkpoint(tmp_path).spec, 8)


@pytest.mark.parametrize(("quantization", "alike"), [("int8", 0.97), ("fp8", 0.9), ("int4-g32", 0.7)])
def test_weights_are_quantized_at_load(tmp_path: Path, quantization: str, alike: float) -> None:
    """Predicted bytes are those of the tensors. alike: least cosine of logits with the model's, whose weights are random."""
    theirs = save("cla", tmp_path)
    config = ModelConfig(quantization=quantization)
    model = build(tmp_path, model=config, ops=REFERENCE, device=torch.device("cpu"))
    assert model.spec.weight_bytes == sum(tensor.nbytes for tensor in model.decoder.tensors())
    with torch.inference_mode():
        want = theirs(IDS[:1]).logits[0]
    out = PagedRows(model).step([(1, IDS[0].tolist())])
    assert torch.cosine_similarity(out.flatten(), want.flatten(), 0) > alike
