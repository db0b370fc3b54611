"""Medusa heads (Cai et al. 2024): predict several future tokens from one hidden state.

At place t the model's own head predicts token t + 1. Head k = 1, 2, .. predicts token t + k + 1 without the tokens between.
Each head is a stack of residual blocks h + SiLU(W h + b) before an unembedding, which is the model's own or one of the head.
The first blocks of all heads are one matrix product.

A static tree (`tree`) selects the combinations of candidates that are most often correct.
"""

from __future__ import annotations

import heapq
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from ridgeline.core.drafting import NetworkDrafts, counts_by_nodes
from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.spec import DTYPE_BYTES, ModelSpec
from ridgeline.ops.table import Ops

PUBLISHED = "medusa_lm_head.pt"
"""File name of published heads."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One node of a static tree. parent: index of the parent node, -1 for the last drawn token. head, rank: the node is the
    candidate of this rank of this head, both counted from 0. head is also the depth of the node."""

    parent: int
    head: int
    rank: int


def tree(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[Candidate, ...]:
    """The tree of at most `nodes` nodes with the highest expected number of accepted tokens.

    Nodes are in descending order of gain, so every prefix is the best tree of its size. The gain of a node is the probability that
    its path is accepted, estimated as the product of the accuracies of its nodes.

    Args:
        accuracies: [head][rank], how often the candidate equals the target's token; descending in rank.
    Source: Cai et al. 2024, section 2.3.3.
    """
    chosen: list[Candidate] = []
    # (negative gain, order of insertion, node): ties go to the earlier node. A chosen node adds its next sibling and first child.
    open_nodes: list[tuple[float, int, Candidate]] = []
    count = 0

    def push(above: float, parent: int, head: int, rank: int) -> None:
        nonlocal count
        if head < len(accuracies) and rank < len(accuracies[head]):
            heapq.heappush(open_nodes, (-above * accuracies[head][rank], count, Candidate(parent, head, rank)))
            count += 1

    gains = {-1: 1.0}
    push(1.0, -1, 0, 0)
    while open_nodes and len(chosen) < nodes:
        negative_gain, _, node = heapq.heappop(open_nodes)
        index = len(chosen)
        chosen.append(node)
        gains[index] = -negative_gain
        push(gains[node.parent], node.parent, node.head, node.rank + 1)
        push(gains[index], index, node.head + 1, 0)
    return tuple(chosen)


class MedusaHeads:
    """Heads on a device. heads: their number. layers: blocks per head. width: of the hidden states. accuracies: see `tree`,
    measured when the heads were trained; empty if the folder does not have them."""

    __slots__ = ("accuracies", "heads", "layers", "width", "_bias", "_first", "_linear", "_unembed", "_weight")

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], ops: Ops, accuracies: Sequence[Sequence[float]] = ()
    ) -> None:
        """tensors: by their published names, "{head}.{layer}.linear.weight" [D, D], "{head}.{layer}.linear.bias" [D] and, for
        heads with unembeddings of their own, "{head}.{layers}.weight" [V, D]; all in one dtype and on one device."""
        self.heads, self.layers = _counts(tensors)
        self.width = tensors["0.0.linear.weight"].shape[1]
        self.accuracies = tuple(tuple(row) for row in accuracies)
        self._linear = ops.matmul.unquantized.linear

        def stacked(suffix: str) -> torch.Tensor:
            return torch.stack([tensors[f"{head}.{suffix}"] for head in range(self.heads)])

        self._weight = [stacked(f"{layer}.linear.weight") for layer in range(self.layers)]
        self._bias = [stacked(f"{layer}.linear.bias") for layer in range(self.layers)]
        self._first = ops.matmul.unquantized.pack(self._weight[0].flatten(0, 1).contiguous())
        has_unembeddings = f"0.{self.layers}.weight" in tensors
        self._unembed = stacked(f"{self.layers}.weight") if has_unembeddings else None

    def work(self, of_nodes: Sequence[int], spec: ModelSpec) -> NetworkDrafts:
        """Counts their FLOPs and bytes. of_nodes: the head of each node of the tree. spec: of the target, whose unembedding heads
        share that have none. All heads run at once."""
        blocks, unembedding = self.width**2 * self.layers, spec.embedding_params
        stored = self.heads * blocks + (1 if self._unembed is None else self.heads) * unembedding
        once = [min(1, count) for count in range(len(of_nodes) + 1)]
        return NetworkDrafts(counts_by_nodes(of_nodes), once, blocks + unembedding, stored * DTYPE_BYTES[spec.dtype])

    def states(self, hidden: torch.Tensor, heads: int) -> torch.Tensor:
        """hidden [S, D] -> states of the first `heads` heads before their unembedding, [S, heads, D]."""
        rows = hidden.shape[0]
        inner = self._linear(hidden, self._first, self._bias[0].flatten()).view(rows, self.heads, self.width)
        out = hidden.unsqueeze(1) + F.silu(inner[:, :heads])
        for weight, bias in zip(self._weight[1:], self._bias[1:], strict=True):
            inner = torch.baddbmm(bias[:heads].unsqueeze(1), out.transpose(0, 1), weight[:heads].mT)
            out = out + F.silu(inner.transpose(0, 1))
        return out

    def candidates(
        self, hidden: torch.Tensor, top: Sequence[int], logits_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The most probable tokens of the first len(top) heads, int32 [S, len(top), max(top)], the most probable first.

        Args:
            hidden: [S, D], final states after the norm, from which the last known tokens were drawn.
            top: number of candidates needed of each head; every head returns max(top).
            logits_of: hidden [N, D] -> logits [N, V], the model's head.
        """
        states = self.states(hidden, len(top))
        if self._unembed is None:
            logits = logits_of(states.flatten(0, 1)).view(hidden.shape[0], len(top), -1)
        else:
            logits = (states.transpose(0, 1) @ self._unembed[: len(top)].mT).transpose(0, 1)
        return logits.topk(max(top), dim=-1).indices.int()


def load_heads(folder: Path, spec: ModelSpec, ops: Ops, dtype: torch.dtype, device: torch.device) -> MedusaHeads:
    """The heads in `folder` for the target `spec`: config.json, and weights in safetensors or in the published PUBLISHED.

    Raises ConfigError where files are missing, broken or fit another model, UnsupportedModel for an unknown layout.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {path} ({error}): give a folder with Medusa heads.") from None
    tensors = {name.removeprefix("medusa_head."): tensor for name, tensor in _read(folder).items()}
    heads, layers = _counts(tensors)
    for key, count in (("medusa_num_heads", heads), ("medusa_num_layers", layers)):
        if config.get(key, count) != count:
            raise ConfigError(f"{path}: {key} is {config[key]}, but the weights have {count}: correct the value.")
    for key, size in (("hidden_size", spec.d_model), ("vocab_size", spec.vocab_size)):
        if config.get(key, size) != size:
            raise ConfigError(
                f"{path}: {key} is {config[key]}, but {size} in the served model: use heads that were trained for this model."
            )
    for name, shape in _expected(heads, layers, spec, f"0.{layers}.weight" in tensors).items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            actual = list(tensors[name].shape) if name in tensors else "missing"
            raise ConfigError(
                f"{folder}: tensor {name} is {actual}, but the served model needs {list(shape)}: use heads that were "
                "trained for this model."
            )
    moved = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    accuracies = read_accuracies(folder, config)
    if len(accuracies) not in (0, heads):
        raise ConfigError(f"{path}: accuracies must have one row for each of the {heads} heads.")
    return MedusaHeads(moved, ops, accuracies)


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of the folder from the file that it has."""
    stored = folder / "model.safetensors"
    if not stored.is_file() and (folder / "medusa_lm_head.safetensors").is_file():
        stored = folder / "medusa_lm_head.safetensors"
    try:
        if stored.is_file():
            return load_file(stored)
        if (folder / PUBLISHED).is_file():
            tensors: dict[str, torch.Tensor] = torch.load(folder / PUBLISHED, map_location="cpu", weights_only=True)
            return tensors
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ConfigError(
            f"Cannot read the weights of the Medusa heads in {folder} ({error}): download them again."
        ) from None
    raise ConfigError(f"{folder} has neither model.safetensors nor {PUBLISHED}: give a folder with Medusa heads.")


def _counts(tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """(number of heads, blocks per head), from the names of the tensors."""
    parts = [name.split(".") for name in tensors]
    blocks = [(int(part[0]), int(part[1])) for part in parts if part[2:] == ["linear", "weight"] and part[0].isdigit()]
    if not blocks or any(len(part) not in (3, 4) or not part[0].isdigit() for part in parts):
        odd = sorted(tensors)[:4]
        raise UnsupportedModel(f"The tensors {odd} are not Medusa heads, which have names such as 0.0.linear.weight.")
    return 1 + max(head for head, _ in blocks), 1 + max(layer for _, layer in blocks)


def _expected(heads: int, layers: int, spec: ModelSpec, has_unembeddings: bool) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor. has_unembeddings: the heads have their own unembeddings."""
    width = spec.d_model
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            shapes[f"{head}.{layer}.linear.weight"] = (width, width)
            shapes[f"{head}.{layer}.linear.bias"] = (width,)
        if has_unembeddings:
            shapes[f"{head}.{layers}.weight"] = (spec.vocab_size, width)
    return shapes


def read_accuracies(folder: Path, config: Mapping[str, Any]) -> tuple[tuple[float, ...], ...]:
    """The accuracies of config.json in `folder`, see `tree`; empty if there are none. Raises ConfigError."""
    rows = config.get("accuracies", [])
    valid = isinstance(rows, list) and all(isinstance(row, list) and row for row in rows)
    if not valid or not all(isinstance(rate, int | float) and 0 <= rate <= 1 for row in rows for rate in row):
        raise ConfigError(f"{folder / 'config.json'}: accuracies must be a list of lists of numbers from 0 to 1.")
    return tuple(tuple(row) for row in rows)
