"""A trainable EAGLE-1 head: the network of models.eagle, its loss, its acceptance and its published format.

A chain starts after every token of a text at once, from the target's hidden states, and goes on from the head's own state, as a
draft does.
Source: training-time test of EAGLE-3 (Li et al. 2025, section 3.2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ridgeline.compress.acceptance import TEMPERATURE, Text, draw
from ridgeline.compress.decoder import FeedForward, Norm, TrainableDecoder, rotate
from ridgeline.models.eagle_files import read_eagle

DEPTH = 4
"""Places of a chain that are measured."""
WEIGHTS = "model.safetensors"
TRAINED = 2
"""Places of a chain in training."""


class EagleModule(nn.Module):
    """A trainable EAGLE-1 head; see models.eagle for the network.

    gain: the embedding enters `fc` times this power of two, about as large as the hidden state, so that both halves of `fc` learn
    at one rate.
    """

    def __init__(self, teacher: TrainableDecoder) -> None:
        super().__init__()
        spec = teacher.spec
        layer, width = spec.layers[-1], spec.d_model
        self.head_dim, self.scale = layer.head_dim, spec.scale_of(layer)
        ratio = teacher.norm.weight.detach().square().mean() / teacher.embed_tokens.weight.detach().square().mean()
        self.gain = 2.0 ** round(float(ratio.log2()) / 2)
        queries, pairs = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.q_proj, self.o_proj = nn.Linear(width, queries, bias=False), nn.Linear(queries, width, bias=False)
        self.k_proj, self.v_proj = nn.Linear(width, pairs, bias=False), nn.Linear(width, pairs, bias=False)
        self.norm, self.mlp = Norm(width, spec), FeedForward(spec, layer)
        with torch.no_grad():
            self.fc.weight.normal_(
                0, 0.02
            )  # logits near 0; with the identity the head would begin at predicting the known token
            for output in (self.o_proj, self.mlp.down_proj):
                output.weight.zero_()

    def forward(
        self, embedded: Tensor, features: Tensor, rotary: Tensor, before: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The states [rows, n, d_model] after pairs at one place of the chains that start after each of n tokens.

        embedded, features: [rows, n, d_model] of the pairs. rotary: [n, 2, dim / 2], at their positions. before: keys and values of
        the places before, the first those of the target's pairs, to which this place's are added. At place d a pair sees all
        of the target's pairs of its chain, and its own ones at the places after the first.
        """
        stream = self.fc(torch.cat((embedded * self.gain, features), -1))
        q, k, v = (
            linear(stream).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rotary), rotate(k, rotary)
        before.append((k, v))
        shared = q.shape[1] // k.shape[1]
        (first, first_values), *later = [
            (key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)) for key, value in before
        ]
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = [(q @ first.mT * self.scale).masked_fill(future, -torch.inf)]
        scores += [(q * key).sum(-1, keepdim=True) * self.scale for key, _ in later]
        shares = torch.cat(scores, -1).softmax(-1).split([q.shape[2], *[1] * len(later)], -1)
        out = shares[0] @ first_values
        for share, (_, value) in zip(shares[1:], later, strict=True):
            out = out + share * value
        stream = stream + self.o_proj(out.transpose(1, 2).flatten(2))
        return stream + self.mlp(self.norm(stream))


def chains(head: EagleModule, teacher: TrainableDecoder, rows: Tensor, depth: int) -> tuple[Tensor, list[Tensor]]:
    """(hidden states of the teacher, the head's states at each place) for chains after every token of rows int64 [rows, tokens].
    State i of place d predicts token i + d + 1, counted from 1; the last `depth` tokens start no chain."""
    with torch.no_grad():
        hidden = teacher.hidden(rows)
        embedded = teacher.embed_tokens(rows)
    count, rotary = rows.shape[1] - depth, getattr(teacher, f"rotary_{teacher.rope_of[-1]}")
    states, before = [hidden[:, :count]], list[tuple[Tensor, Tensor]]()
    for place in range(depth):
        pairs = embedded[:, place + 1 : place + 1 + count]
        states.append(head(pairs, states[-1], rotary[place : place + count], before))
    return hidden, states[1:]


def eagle_loss(head: EagleModule, teacher: TrainableDecoder, rows: Tensor, ids: Tensor) -> Tensor:
    """KL divergence to the teacher over tokens `ids` at every place, and the distance of states, which the next place reads."""
    hidden, states = chains(head, teacher, rows, TRAINED)
    total, unembedding = torch.zeros((), device=rows.device), teacher.unembedding[ids]
    for place, state in enumerate(states, 1):
        wanted = hidden[:, place : place + state.shape[1]]
        with torch.no_grad():
            logprobs = (F.linear(wanted, unembedding).float() / TEMPERATURE).log_softmax(-1)
        mine = (F.linear(state, unembedding).float() / TEMPERATURE).log_softmax(-1)
        total = total + F.kl_div(mine, logprobs, log_target=True, reduction="none").sum(-1).mean()
        total = total + 0.1 * F.smooth_l1_loss(state, wanted)
    return total


@torch.no_grad()
def eagle_figures(head: EagleModule, teacher: TrainableDecoder, text: Text) -> dict[str, Any]:
    """kept, kept_of_N: as of compress.acceptance.recurrent_figures."""
    hits = []
    for rows, keys in text.parts():
        _, states = chains(head, teacher, rows, DEPTH)
        begin = text.prompt - 2  # the pair of the last token of the prompt
        right = []
        for place, state in enumerate(states, 1):
            at = text.prompt + place - 1
            logits = teacher.logits(state[:, begin:-1]).float()  # the last chain reaches behind the text
            drawn = draw(logits, at, text.temperature or 0.0, keys)
            right.append(drawn == rows[:, at : at + drawn.shape[1]])
        hits.append(torch.stack(right, -1).flatten(0, 1))
    every, alive, kept = torch.cat(hits), None, []
    for place in range(DEPTH):
        reached = every[:, place] if alive is None else every[alive, place]
        kept.append(float(reached.double().sum()) / max(1, len(reached)))
        alive = every[:, : place + 1].all(1)
    return {"kept": kept, f"kept_of_{DEPTH}": float(every.int().cumprod(1).sum(1).double().mean())}


def _names(head: EagleModule) -> dict[str, str]:
    """Published name of each parameter by its name in the module, but for fc.weight."""
    others = (name for name, _ in head.named_parameters() if name not in ("fc.weight", "norm.weight"))
    layer = {name: f"layers.0.{name if name.startswith('mlp.') else f'self_attn.{name}'}" for name in others}
    return layer | {"norm.weight": "layers.0.post_attention_layernorm.weight"}


def save_eagle(head: EagleModule, folder: Path, config: Mapping[str, Any]) -> None:
    """Write the head in the published format of EAGLE-1, in bfloat16. config: the target's config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {published: head.get_parameter(name) for name, published in _names(head).items()}
    embedded, features = head.fc.weight.chunk(2, 1)
    tensors["fc.weight"] = torch.cat((embedded * head.gain, features), 1)
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    keys = {**config, "num_hidden_layers": 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")


def load_eagle(folder: Path, teacher: TrainableDecoder) -> EagleModule:
    """A head that `save_eagle` wrote. Raises RuntimeError for tensors of another head, ConfigError for another model's."""
    read_eagle(folder, teacher.spec)
    head, stored = EagleModule(teacher), load_file(folder / WEIGHTS)
    tensors = {name: stored.pop(published) for name, published in _names(head).items() if published in stored}
    embedded, features = stored.pop("fc.weight").chunk(2, 1)
    head.load_state_dict({**stored, **tensors, "fc.weight": torch.cat((embedded / head.gain, features), 1)})
    return head.requires_grad_(False)
