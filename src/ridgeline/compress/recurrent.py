"""A recurrent draft as a module that can be trained: the network of decoding.recurrent, its loss, and the folder it is saved in.

It learns from the model it drafts for: chains begin behind many tokens of a text at once, each from the model's hidden state there,
and go on through the text's own tokens, as a draft goes on through tokens that were kept (the unrolled training of EAGLE-3, Li et
al. 2025, section 3.2).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from ridgeline.compress.decoder import FeedForward, Norm, TrainableDecoder
from ridgeline.compress.distill import Recipe
from ridgeline.core.spec import ModelSpec, NumberFormat
from ridgeline.decoding.recurrent import BITS
from ridgeline.quant.integer import round_to_nearest

DEPTH = 4
"""Tokens of the chains that it is trained on."""


class RecurrentModule(nn.Module):
    """A recurrent draft to be trained; see decoding.recurrent for what it computes. spec: of the model it drafts for, of which it
    takes width, norms and activation. ids int64 [outputs]: the tokens it may say."""

    ids: Tensor

    def __init__(self, spec: ModelSpec, ids: Tensor) -> None:
        super().__init__()
        width = spec.d_model
        self.embed_tokens = nn.Embedding(spec.vocab_size, width)
        self.mix = nn.Linear(width, width, bias=False)
        self.mlp_norm, self.norm = Norm(width, spec), Norm(width, spec)
        self.mlp = FeedForward(spec, spec.layers[0])
        self.lm_head = nn.Linear(width, len(ids), bias=False)
        self.register_buffer("ids", ids)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def start(self, teacher: TrainableDecoder, hidden: Tensor) -> None:
        """Take the model's embedding, norm and head. hidden: some of its hidden states, of which a state takes as much as of the
        embedding."""
        embedding = teacher.embed_tokens.weight
        with torch.no_grad():
            self.embed_tokens.weight.copy_(embedding)
            self.norm.weight.copy_(teacher.norm.weight)
            self.lm_head.weight.copy_(teacher.unembedding[self.ids])
            nn.init.eye_(self.mix.weight).mul_(embedding.square().mean().sqrt() / hidden.float().square().mean().sqrt())

    def forward(self, state: Tensor, tokens: Tensor) -> Tensor:
        """state [..., d_model] and the next token int64 [...] -> the next state, normed as the model's hidden states are."""
        mixed = self.mix(state) + self.embed_tokens(tokens)
        return self.norm(mixed + self.mlp(self.mlp_norm(mixed)))


def recurrent_losses(
    draft: RecurrentModule, teacher: TrainableDecoder, rows: Tensor, recipe: Recipe, stride: int = 1
) -> Tensor:
    """The loss at each of DEPTH places of a chain, float32 [DEPTH], of chains that begin at every `stride`-th token of rows
    [rows, tokens] int64: KL to what the teacher says there, among the tokens that the draft may say, and `refused` among all.
    """
    heat, tokens = recipe.temperature, rows.shape[1] - DEPTH
    with torch.no_grad():
        hidden = teacher.hidden(rows)
        total = (teacher.logits(hidden).float() / heat).logsumexp(-1, keepdim=True)
        possible = F.linear(hidden, teacher.unembedding[draft.ids])
    state, terms = hidden[:, :tokens:stride], []
    for depth in range(1, DEPTH + 1):
        here = slice(depth, depth + tokens, stride)
        state = draft(state, rows[:, here])
        said = F.log_softmax(draft.lm_head(state).float() / heat, -1)
        wanted = possible[:, here].float() / heat - total[:, here]
        among = wanted - wanted.logsumexp(-1, keepdim=True)
        diverges = (among.exp() * (among - said)).sum(-1).mean() * heat**2
        kept = torch.minimum(wanted.exp(), said.exp()).sum(-1).mean()
        terms.append(recipe.logits * diverges + recipe.overlap * (1 - kept))
    return torch.stack(terms)


def save_recurrent(draft: RecurrentModule, folder: Path, spec: ModelSpec) -> None:
    """Write the draft for a model of `spec`, its matrices in 8 bits; see decoding.recurrent. The folder is made."""
    mlp = draft.mlp
    matrices = {
        "embedding": draft.embed_tokens.weight,
        "mix": draft.mix.weight,
        "gate_up": torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
        "down": mlp.down_proj.weight,
        "head": draft.lm_head.weight,
    }
    tensors = {
        "inner_norm": draft.mlp_norm.weight.detach().bfloat16(),
        "norm": draft.norm.weight.detach().bfloat16(),
        "ids": draft.ids.int(),
    }
    for name, weight in matrices.items():
        codes, scales, _ = round_to_nearest(weight.detach(), NumberFormat(BITS))
        tensors |= {f"{name}.codes": codes, f"{name}.scales": scales.flatten().half()}
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: one.cpu().contiguous() for name, one in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["RecurrentDraft"],
        "hidden_size": spec.d_model,
        "intermediate_size": spec.layers[0].d_ff,
        "vocab_size": spec.vocab_size,
        "draft_vocabulary_size": len(draft.ids),
        "hidden_act": spec.activation,
        "rms_norm_eps": spec.norm_eps,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
