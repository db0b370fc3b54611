"""Key/value heads pooled in groups: the weights, what is served, refusals, and the command with training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ridgeline.cli.main import main
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.evaluate import Evaluator
from ridgeline.compress.recipes import read_recipe
from ridgeline.core.errors import ConfigError

from ..cli.conftest import tiny
from ..models.families import save
from .test_compress import logits, made, model, sequences, texts
from .test_tuned import with_tokenizer

__all__ = ["model", "tiny"]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("family", ["llama-mha-bias", "qwen3-mha"])
def test_pooled_heads_are_means_and_computed_as_such(family: str, heads: int, tmp_path: Path) -> None:
    """A model whose heads of a group all equal the group's mean computes the same as the pooled one."""
    reference = save(family, tmp_path / "source")
    source, folder = Checkpoint(tmp_path / "source"), made(tmp_path / "source", f"gqa-{heads}", tmp_path / "out")
    changed = {name for name in folder.config if folder.config[name] != source.config.get(name)}
    assert changed <= {"num_key_value_heads", "head_dim"}
    dim = source.spec.layers[0].head_dim
    state = dict(reference.named_parameters())
    for index in range(len(source.spec.layers)):
        before, after = source.stored_layer(index), folder.stored_layer(index)
        assert before.keys() == after.keys()
        for name in before:
            if "k_proj" not in name and "v_proj" not in name:
                assert torch.equal(after[name], before[name])
                continue
            means = [group.unflatten(0, (-1, dim)).mean(0) for group in before[name].chunk(heads)]
            torch.testing.assert_close(after[name], torch.cat(means))
            with torch.no_grad():
                repeated = [mean for mean in means for _ in range(4 // heads)]
                state[f"model.layers.{index}.{name}"].copy_(torch.cat(repeated))
    ids = texts(1)[0]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(tmp_path / "out", ids), expected, rtol=1e-3, atol=2e-3)


def several(model: Path, folder: Path) -> Path:
    """The model with four key/value heads in place of two, which its queries and its output projection use as the same two.

    Keys differ by a factor and an angle for each rotated pair, values by a matrix.
    """
    draw, dim = torch.Generator().manual_seed(2), 16
    tensors = load_file(model / "model.safetensors")
    for index in range(3):
        q, k, v, o = (f"model.layers.{index}.self_attn.{name}_proj.weight" for name in "qkvo")
        factors = torch.randn(4, dim // 2, dtype=torch.complex64, generator=draw).unsqueeze(-1)
        mixing = torch.eye(dim) + 0.4 * torch.randn(4, dim, dim, generator=draw)

        def turned(weight: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            first, second = weight.unflatten(0, (4, dim)).chunk(2, 1)
            pairs = torch.complex(first, second) * by
            return torch.cat((pairs.real, pairs.imag), 1).flatten(0, 1)

        def repeated(weight: torch.Tensor) -> torch.Tensor:
            return weight.unflatten(0, (2, dim)).repeat_interleave(2, 0).flatten(0, 1)

        tensors[k] = turned(repeated(tensors[k]), factors)
        tensors[q] = turned(tensors[q], 1 / factors.conj())
        tensors[v] = (mixing @ repeated(tensors[v]).unflatten(0, (4, dim))).flatten(0, 1)
        tensors[o] = (
            (tensors[o].unflatten(1, (4, dim)).transpose(0, 1) @ mixing.inverse()).transpose(0, 1).flatten(1, 2)
        )
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    return folder


def test_components_find_heads_that_are_the_same(model: Path, tmp_path: Path) -> None:
    """Heads that are used as one are pooled without any loss, where the mean loses almost everything."""
    source = several(model, tmp_path / "several")
    judge = Evaluator(Checkpoint(source), sequences())
    assert Evaluator(Checkpoint(model), sequences()).measure(Checkpoint(source)).figures["kl"].value < 1e-5
    folder = made(source, "gqa-2-pca", tmp_path / "out")
    assert folder.spec.layers[0].n_kv_heads == 2 and folder.config["num_attention_heads"] == 4
    assert judge.measure(folder).figures["kl"].value < 1e-5
    assert judge.measure(made(source, "gqa-2", tmp_path / "mean")).figures["kl"].value > 0.1


def test_components_lose_less_than_the_mean(model: Path, tmp_path: Path) -> None:
    judge = Evaluator(Checkpoint(model), sequences())
    mean, components = (judge.measure(made(model, name, tmp_path / name)) for name in ("gqa-1", "gqa-1-pca"))
    assert components.figures["kl"].value < 0.8 * mean.figures["kl"].value


def test_transformers_reads_a_model_with_pooled_heads(tmp_path: Path) -> None:
    save("qwen2", tmp_path / "source")
    made(tmp_path / "source", "gqa-1", tmp_path / "out")
    ids = texts(1)[0]
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        expected = other(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(tmp_path / "out", ids), expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("family", "recipe", "said"),
    [
        ("llama-mha-bias", "gqa-4", "already has 4 key/value heads.*give gqa-1 or gqa-2"),
        ("llama-mha-bias", "gqa-3", "has 4 key/value heads.*groups of equal size: give gqa-1 or gqa-2"),
        ("llama-mha-bias", "gqa-8", "give gqa-1 or gqa-2"),
        ("llama-mha-bias", "gqa-0", "give gqa-1 or gqa-2"),
        ("llama-gqa", "gqa-2-pca", "already has 2 key/value heads.*give gqa-1-pca"),
        ("llama-mha-bias", "gqa-2-pca", "without norms and biases. Give gqa-2, and train the result"),
        ("qwen3", "gqa-1-pca", "without norms and biases. Give gqa-1"),
        ("llama-mqa-tied", "gqa-1", "already has 1 key/value head,.*it cannot have fewer"),
    ],
)
def test_heads_that_cannot_be_pooled_are_refused(family: str, recipe: str, said: str, tmp_path: Path) -> None:
    save(family, tmp_path / "source")
    with pytest.raises(ConfigError, match=said):
        made(tmp_path / "source", recipe, tmp_path / "out")
    with pytest.raises(ConfigError, match="did you mean gqa-2"):
        read_recipe("gqa:2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_heads_of_a_quantized_model_are_not_pooled(model: Path, tmp_path: Path) -> None:
    made(model, "rtn-int4-g32", tmp_path / "int4")
    with pytest.raises(ConfigError, match="already compressed: give the original checkpoint"):
        made(tmp_path / "int4", "gqa-1", tmp_path / "out")


@pytest.mark.long
def test_a_model_with_fewer_heads_is_trained_and_served(
    tiny: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out, corpus = with_tokenizer(model, tiny, tmp_path / "source"), tmp_path / "out", tmp_path / "corpus.txt"
    corpus.write_text("One text that is not the package's own. " * 20)
    words = ["compress", str(source), "--recipe", "gqa-1", "--out", str(out), "--device", "cpu", "--length", "64"]
    words += ["--tune", str(corpus), "--tune-steps", "3", "--tune-rows", "2", "--judged-tokens", "200"]
    assert main([*words, "--speed-tokens", "4"]) == 0
    assert "KV cache per token" in capsys.readouterr().out
    card = json.loads((out / "compression.json").read_text())
    spec = Checkpoint(source).spec
    assert card["kv_bytes_per_token"]["before"] == 3 * 2 * 2 * 16 * 4 == spec.kv_bytes_per_token()
    assert card["kv_bytes_per_token"]["after"] == 3 * 2 * 1 * 16 * 4
    assert card["calibration"]["tokens"] == 0 and card["training"]["steps"] == 3
    assert card["speed"]["tok_s"]["after"] > 0 and card["quality"]["kl"]["value"] > 0
    readme = (out / "README.md").read_text()
    assert "| KV cache, bytes per token | 768 | 384 |" in readme and "averaged in groups" not in readme
