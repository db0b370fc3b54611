"""Medusa heads: the published layout, candidates, the static tree."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.models.config import read_model
from ridgeline.ops.reference import REFERENCE
from ridgeline.speculation.heads import Candidate, MedusaHeads, load_heads, tree

WIDTH, VOCAB = 16, 40
SPEC = ModelSpec("LlamaForCausalLM", VOCAB, WIDTH, (LayerSpec(2, 1, 8, 32, Rope(dim=8)),), 64)
CPU = torch.device("cpu")


def tensors(heads: int = 3, layers: int = 2, with_head: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weights = {}
    for head, layer in itertools.product(range(heads), range(layers)):
        weights[f"{head}.{layer}.linear.weight"] = made(WIDTH, WIDTH)
        weights[f"{head}.{layer}.linear.bias"] = made(WIDTH)
    if with_head:
        weights |= {f"{head}.{layers}.weight": made(VOCAB, WIDTH) for head in range(heads)}
    return weights


def save(folder: Path, weights: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> MedusaHeads:
    return load_heads(folder, SPEC, REFERENCE, torch.float32, CPU)


def logits_one_by_one(weights: dict[str, torch.Tensor], hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """[S, heads, V] as the paper writes it, one head after the other."""
    every = []
    for index in range(1 + max(int(name.split(".")[0]) for name in weights)):
        state, layer = hidden, 0
        while f"{index}.{layer}.linear.weight" in weights:
            name = f"{index}.{layer}.linear"
            state, layer = (
                state + F.silu(F.linear(state, weights[f"{name}.weight"], weights[f"{name}.bias"])),
                layer + 1,
            )
        every.append(F.linear(state, weights.get(f"{index}.{layer}.weight", head)))
    return torch.stack(every, 1)


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_candidates_are_the_likeliest_of_each_head(with_head: bool, layers: int, tmp_path: Path) -> None:
    weights = tensors(layers=layers, with_head=with_head)
    heads = load(save(tmp_path, weights, medusa_num_heads=3, medusa_num_layers=layers))
    hidden, head = torch.randn(5, WIDTH), torch.randn(VOCAB, WIDTH)
    wanted = logits_one_by_one(weights, hidden, head).topk(4, -1).indices.int()
    assert torch.equal(heads.candidates(hidden, (4, 2, 1), lambda x: F.linear(x, head)), wanted)
    assert torch.equal(heads.candidates(hidden, (4,), lambda x: F.linear(x, head)), wanted[:, :1])
    assert (heads.heads, heads.layers, heads.width) == (3, layers, WIDTH)


def test_published_file(tmp_path: Path) -> None:
    """As the authors saved them: torch.save, no sizes in config.json, with or without the name of the module."""
    weights, hidden, head = tensors(), torch.randn(2, WIDTH), torch.randn(VOCAB, WIDTH)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2, "version": "2"}))
    wanted = logits_one_by_one(weights, hidden, head).argmax(-1).int()
    for prefix in ("", "medusa_head."):
        torch.save({prefix + name: tensor for name, tensor in weights.items()}, tmp_path / "medusa_lm_head.pt")
        got = load(tmp_path).candidates(hidden, (1, 1, 1), lambda x: F.linear(x, head))
        assert torch.equal(got[..., 0], wanted)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, but 16 in the served model"),
        ({"vocab_size": 50}, "vocab_size is 50, but 40 in the served model"),
        ({"medusa_num_heads": 5}, "medusa_num_heads is 5, but the weights have 3"),
        ({"accuracies": [[0.5], [0.4]]}, "accuracies must have one row for each of the 3 heads"),
        ({"accuracies": [[0.5], [0.4], [1.5]]}, "lists of numbers from 0 to 1"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(config: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load(save(tmp_path, tensors(), **config))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save(tmp_path, tensors(with_head=True))
    for spec, said in ((replace(SPEC, d_model=24), "0.0.linear.weight"), (replace(SPEC, vocab_size=41), "0.2.weight")):
        with pytest.raises(ConfigError, match=rf"{said} is .* use heads that were trained for this model"):
            load_heads(tmp_path, spec, REFERENCE, torch.float32, CPU)
    lost = tensors()
    del lost["1.0.linear.bias"]
    with pytest.raises(ConfigError, match=r"1.0.linear.bias is missing"):
        load(save(tmp_path, lost))


def test_no_heads_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read .*config.json.*: give a folder with Medusa heads"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither model.safetensors nor medusa_lm_head.pt"):
        load(tmp_path)
    with pytest.raises(UnsupportedModel, match="are not Medusa heads"):
        load(save(tmp_path, {"model.norm.weight": torch.ones(4)}))


def test_the_shipped_heads_fit_the_shipped_model() -> None:
    assets = Path(str(files("ridgeline"))) / "assets"
    spec, _ = read_model(assets / "model")
    heads = load_heads(assets / "medusa", spec, REFERENCE, torch.bfloat16, CPU)
    nodes = tree(heads.accuracies, 16)
    assert (heads.heads, len(nodes)) == (4, 16)
    assert heads.candidates(torch.randn(2, spec.d_model).bfloat16(), (3, 2), lambda x: x[:, :9]).shape == (2, 2, 3)


ACCURACIES = ((0.6, 0.2, 0.1), (0.4, 0.15, 0.1), (0.3, 0.1))


def expected(nodes: tuple[Candidate, ...] | list[Candidate]) -> float:
    """The expected number of accepted nodes."""
    gains: list[float] = []
    for node in nodes:
        gains.append((gains[node.parent] if node.parent >= 0 else 1.0) * ACCURACIES[node.head][node.rank])
    return sum(gains)


def every_tree(nodes: int) -> list[list[Candidate]]:
    """All trees of so many nodes, each written in some order of parents before children."""
    trees: list[list[Candidate]] = [[]]
    for _ in range(nodes):
        grown = []
        for partial in trees:
            for parent in range(-1, len(partial)):
                head = partial[parent].head + 1 if parent >= 0 else 0
                if head == len(ACCURACIES):
                    continue
                taken = {node.rank for node in partial if node.parent == parent}
                grown += [
                    [*partial, Candidate(parent, head, r)] for r in range(len(ACCURACIES[head])) if r not in taken
                ]
        trees = grown
    return trees


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_no_tree_of_that_size_is_better(nodes: int) -> None:
    best = max(expected(candidates) for candidates in every_tree(nodes))
    assert expected(tree(ACCURACIES, nodes)) == pytest.approx(best)


def test_every_prefix_is_a_tree_with_different_siblings() -> None:
    nodes = tree(ACCURACIES, 1000)
    assert len(nodes) == 3 + 3 * 3 + 3 * 3 * 2
    assert tree(ACCURACIES, 7) == nodes[:7]
    assert all(node.parent < index for index, node in enumerate(nodes))
    assert all(node.head == (nodes[node.parent].head + 1 if node.parent >= 0 else 0) for node in nodes)
    assert len({(node.parent, node.rank) for node in nodes}) == len(nodes)


def test_no_accuracies_no_tree() -> None:
    assert tree((), 5) == ()
    assert tree(ACCURACIES, 0) == ()
