"""EAGLE heads in training: chains are those of the published network, and what is saved can be served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.compress.acceptance import Text, draw
from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.eagle import DEPTH, EagleModule, chains, eagle_figures, eagle_loss, load_eagle, save_eagle
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.models.eagle_files import read_eagle
from tests.speculation.published import eagle_states

LAYER = LayerSpec(4, 2, 16, 48, Rope(dim=16))
SPEC = ModelSpec("LlamaForCausalLM", 60, 64, (LAYER, LAYER), 128, norm_eps=1e-5, tied=True)
CONFIG = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
ROWS = torch.randint(60, (2, 14), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def trained() -> tuple[TrainableDecoder, EagleModule]:
    torch.manual_seed(0)
    teacher = TrainableDecoder(SPEC, 128).requires_grad_(False)
    teacher.reset()
    head = EagleModule(teacher)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.copy_(parameter.bfloat16())
    return teacher, head


def test_chains_are_those_of_the_saved_head(trained: tuple[TrainableDecoder, EagleModule], tmp_path: Path) -> None:
    """The states at two places, against the published network over each chain alone."""
    teacher, head = trained
    save_eagle(head, tmp_path, CONFIG)
    files = read_eagle(tmp_path, SPEC)
    assert files.form == "eagle" and json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 1
    oracle = eagle_states(load_file(tmp_path / "model.safetensors"), (16, 10_000.0, 1e-5))
    with torch.inference_mode():
        hidden, (first, second) = chains(head, teacher, ROWS, 2)
        for row, (ids, states) in enumerate(zip(ROWS, hidden, strict=True)):
            embedded = teacher.embed_tokens(ids).double()
            for start in range(len(ids) - 2):
                features = states[: start + 1].double()
                first_state = oracle(embedded[1 : start + 2], features)[-1:]
                second_state = oracle(embedded[1 : start + 3], torch.cat((features, first_state)))[-1]
                torch.testing.assert_close(first[row, start].double(), first_state[0], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(second[row, start].double(), second_state, atol=1e-4, rtol=1e-4)


def test_a_saved_head_is_read_again(trained: tuple[TrainableDecoder, EagleModule], tmp_path: Path) -> None:
    teacher, head = trained
    save_eagle(head, tmp_path, CONFIG)
    read = load_eagle(tmp_path, teacher)
    for name, parameter in head.named_parameters():
        assert torch.equal(parameter, read.get_parameter(name)), name
    save_eagle(head, tmp_path, CONFIG | {"hidden_size": 72})
    with pytest.raises(ConfigError, match="hidden_size is 72, but 64 in the served model"):
        load_eagle(tmp_path, teacher)


def test_a_head_learns(trained: tuple[TrainableDecoder, EagleModule]) -> None:
    teacher, head = trained
    optimizer, losses = torch.optim.AdamW(head.parameters(), lr=3e-3), []
    for _ in range(40):
        loss = eagle_loss(head, teacher, ROWS, torch.arange(60))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_figures_count_what_a_chain_would_have_kept(
    trained: tuple[TrainableDecoder, EagleModule], temperature: float
) -> None:
    """A text that the head itself wrote is kept at the first place, and first_state of other tokens is not."""
    teacher, head = trained
    keys, prompt, rows = torch.tensor([[3, 4], [5, 6]], dtype=torch.int32), 5, ROWS.clone()
    with torch.inference_mode():
        for place in range(prompt, rows.shape[1]):
            _, [state] = chains(head, teacher, rows[:, :place], 1)
            rows[:, place] = draw(teacher.logits(state[:, -1:]).float(), place, temperature, keys)[:, 0]
        text = Text("code", "sampled", rows, prompt, temperature, keys)
        assert eagle_figures(head, teacher, text)["kept"][0] == 1.0
        other = Text("code", "sampled", (rows + 1) % 60, prompt, temperature, keys)
        assert eagle_figures(head, teacher, other)[f"kept_of_{DEPTH}"] < 0.5
