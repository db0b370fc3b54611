"""A recurrent draft as a module that can be trained: the network of speculation.recurrent, its loss, and the folder it is saved in.

It learns from the model it drafts for: chains begin behind every token of a text at once, each from the model's hidden state there
and with the keys and values that the model has written up to there, and go on through the text's own tokens, as a draft goes on
through tokens that were kept (the unrolled training of EAGLE-3, Li et al. 2025, section 3.2).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from ridgeline.compress.decoder import FeedForward, Norm, TrainableDecoder, rotate
from ridgeline.compress.distill import Recipe
from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import ModelSpec, NumberFormat
from ridgeline.ops.reference import pack_bits
from ridgeline.quant.integer import SMALLEST_SCALE, round_to_nearest
from ridgeline.speculation.recurrent import MATRICES, ROWS, RecurrentWeights

DEPTH = 4
"""Tokens of the chains that it is trained on."""
BEYOND = 0.2
"""Weight of a place behind a token that a draft would never have said: its likeliest other draws are drafted too."""
FORM = NumberFormat(4, 64)
"""In which all matrices but the embedding are multiplied with, while they are trained too. On two cores a draft of one token
takes 52, 49 and 47 us with groups of 32, 64 and 128, and 53 in 8 bits with a scale per output; behind the target's 28 MB 90, 88,
84 and 130."""
MODULES = {"embedding": "embed_tokens", "mix": "mix", "query": "q_proj", "out": "o_proj", "down": "mlp.down_proj"}
"""Where a folder's matrices stand in the module, but for gate_up, which are two there, and the head."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What chains that begin behind each of `tokens` tokens learn from. hidden: the model's states there, [rows, tokens, d_model].
    k, v: its keys and values there, of the layer that is attended to, [rows, kv_heads, tokens, head_dim].
    turn: rotary table of all tokens. text int64 [rows, tokens + DEPTH]; for each of its tokens what the model says behind it:
    possible, the logits of tokens that a draft may say, and total, the logarithm of the sum of exp(logit / temperature) over all;
    and behind, which of those tokens the text has there, -1 for none.
    """

    hidden: Tensor
    k: Tensor
    v: Tensor
    turn: Tensor
    text: Tensor
    possible: Tensor
    total: Tensor
    behind: Tensor

    def at(self, depth: int) -> Lesson:
        """Of the chains' places at `depth` from 1 alone, each tensor as long as `hidden`, and copied, so that code that is compiled
        for one depth is for all."""
        here, texts = slice(depth, depth + self.hidden.shape[1]), (self.text, self.possible, self.total, self.behind)
        text, possible, total, behind = (one[:, here].contiguous() for one in texts)
        return Lesson(self.hidden, self.k, self.v, self.turn[here].clone(), text, possible, total, behind)


class Snapped(nn.Linear):
    """A linear that multiplies with its weights as `round_to_nearest` leaves them in FORM; gradients pass as if it were not there
    (the straight-through estimator, see compress.tune)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def snapped(self) -> Tensor:
        """The weights that it multiplies with. Without a look at any value, which a compiled form could not have."""
        half, whole = 1 << FORM.bits - 1, F.pad(self.weight.detach(), (0, -self.in_features % FORM.group))
        groups = whole.unflatten(1, (-1, FORM.group))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scales = torch.where(high > -low, high, low) / -half
        # As float16 holds them, by their bits: a compiled form leaves a cast there and back out. Below 2^-14 float16 is coarser.
        bits = torch.where(scales.abs() < SMALLEST_SCALE, SMALLEST_SCALE, scales).view(torch.int32)
        scales = ((bits + 0x0FFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)
        near = (groups / scales).round().clamp(-half, half - 1) * scales
        return self.weight + (near.flatten(1)[:, : self.in_features] - self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.snapped())


class RecurrentModule(nn.Module):
    """A recurrent draft to be trained; see speculation.recurrent for what it computes. spec: of the model it drafts for, of
    which it takes width, norms and activation. ids int64 [outputs]: the tokens it may say. attended: the layer of the model whose
    keys and values it reads. Its linears round their weights as they will be stored."""

    ids: Tensor

    def __init__(self, spec: ModelSpec, ids: Tensor, attended: int) -> None:
        super().__init__()
        width, layer = spec.d_model, spec.layers[attended]
        self.attended, self.head_dim, self.scale = attended, layer.head_dim, spec.scale_of(layer)
        queries = layer.n_heads * layer.head_dim
        self.embed_tokens = nn.Embedding(spec.vocab_size, width)
        self.mix = Snapped(width, width)
        self.attn_norm, self.mlp_norm, self.norm = (Norm(width, spec) for _ in range(3))
        self.q_proj, self.o_proj = Snapped(width, queries), Snapped(queries, width)
        self.mlp, inner = FeedForward(spec, spec.layers[0]), spec.layers[0].d_ff
        self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj = (
            Snapped(*sizes) for sizes in ((width, inner), (width, inner), (inner, width))
        )
        self.lm_head = Snapped(width, len(ids))
        self.register_buffer("ids", ids)
        for last in (self.o_proj, self.mlp.down_proj):
            nn.init.zeros_(last.weight)

    def start(self, teacher: TrainableDecoder, hidden: Tensor) -> None:
        """Take the model's embedding, queries, norm and head. hidden: some of its hidden states, of which a state takes as much as
        of the embedding."""
        embedding = teacher.embed_tokens.weight
        with torch.no_grad():
            self.embed_tokens.weight.copy_(embedding)
            self.norm.weight.copy_(teacher.norm.weight)
            self.lm_head.weight.copy_(teacher.unembedding[self.ids])
            nn.init.eye_(self.mix.weight).mul_(embedding.square().mean().sqrt() / hidden.float().square().mean().sqrt())
            layer = teacher.get_submodule(f"layers.{self.attended}")
            self.attn_norm.weight.copy_(layer.get_parameter("input_layernorm.weight"))
            self.q_proj.weight.copy_(layer.get_parameter("self_attn.q_proj.weight"))

    def take(self, weights: RecurrentWeights) -> None:
        """Take what a folder holds, a draft that attends to the same layer: of its head what this one says too."""
        held = {name: weights.plain(name, torch.float32, torch.device("cpu")) for name in ("gate_up", "head", *MODULES)}
        gate, up = held.pop("gate_up").chunk(2)
        head, place = (
            self.lm_head.weight.detach().cpu().clone(),
            {one: at for at, one in enumerate(weights.ids.tolist())},
        )
        both = [(at, place[one]) for at, one in enumerate(self.ids.tolist()) if one in place]
        here, there = torch.tensor(both, dtype=torch.int64).view(-1, 2).unbind(1)
        head[here] = held.pop("head")[there]
        state = {MODULES[name]: tensor for name, tensor in held.items()}
        state |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "lm_head": head}
        state |= {
            "attn_norm": weights.norms["query_norm"],
            "mlp_norm": weights.norms["inner_norm"],
            "norm": weights.norms["norm"],
        }
        self.load_state_dict({f"{name}.weight": tensor for name, tensor in state.items()} | {"ids": self.ids})

    def forward(self, state: Tensor, tokens: Tensor, k: Tensor, v: Tensor, turn: Tensor) -> Tensor:
        """state [rows, n, d_model] and the next token int64 [rows, n] -> the next state, normed as the model's hidden states are.

        k, v: what the model has written [rows, kv_heads, n, head_dim], of which the chain at i sees the first i + 1. turn: the
        rotary table of the tokens' positions [n, 2, dim / 2].
        """
        mixed = self.mix(state) + self.embed_tokens(tokens)
        q = self.q_proj(self.attn_norm(mixed)).view(*tokens.shape, -1, self.head_dim).transpose(1, 2)
        read = F.scaled_dot_product_attention(
            rotate(q, turn).type_as(v), k, v, is_causal=True, scale=self.scale, enable_gqa=True
        )
        mixed = mixed + self.o_proj(read.transpose(1, 2).flatten(2))
        return self.norm(mixed + self.mlp(self.mlp_norm(mixed)))


Parts = tuple[Callable[..., Lesson], Callable[..., tuple[Tensor, Tensor, Tensor]]]


@torch.no_grad()
def lesson(teacher: TrainableDecoder, draft: RecurrentModule, rows: Tensor, temperature: float) -> Lesson:
    """What the teacher teaches about rows [rows, tokens] int64."""
    layer = teacher.spec.layers[draft.attended]
    if layer.window is not None or layer.softcap is not None:
        raise UnsupportedModel(
            f"The draft cannot attend to layer {draft.attended}, which has a window or a softcap: choose another layer."
        )
    tokens, cache = rows.shape[1] - DEPTH, teacher.cache(*rows.shape)
    hidden = teacher.hidden(rows, cache)
    total = (teacher.logits(hidden).float() / temperature).logsumexp(-1, keepdim=True)
    possible = F.linear(hidden, teacher.unembedding[draft.ids])
    k, v = (one[:, :, :tokens] for one in (cache[draft.attended].k, cache[draft.attended].v))
    turn = getattr(teacher, f"turn_{teacher.rope_of[draft.attended]}")
    number = rows.new_full((teacher.spec.vocab_size,), -1)
    number[draft.ids] = torch.arange(len(draft.ids), device=rows.device)
    behind = F.pad(number[rows[:, 1:]], (0, 1), value=-1)
    return Lesson(hidden[:, :tokens], k, v, turn, rows, possible, total, behind)


def place_loss(draft: RecurrentModule, state: Tensor, here: Lesson, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """States of the chains, and the lesson at their next place (`Lesson.at`) -> the states one token on, and of each chain the loss
    there and the chance that the draft's token is the text's where the text is drawn from the model, both [rows, tokens]."""
    heat = recipe.temperature
    state = draft(state, here.text, here.k, here.v, here.turn)
    said = F.log_softmax(draft.lm_head(state).float() / heat, -1)
    wanted = here.possible.float() / heat - here.total
    among = wanted - wanted.logsumexp(-1, keepdim=True)
    diverges = (among.exp() * (among - said)).sum(-1) * heat**2
    kept = torch.minimum(wanted.exp(), said.exp()).sum(-1)
    behind = here.behind.clamp(min=0).unsqueeze(-1)
    right = (said.detach() - wanted).gather(-1, behind).squeeze(-1).clamp(max=0).exp() * (here.behind >= 0)
    return state, recipe.logits * diverges + recipe.overlap * (1 - kept), right


def recurrent_losses(
    draft: RecurrentModule, teacher: TrainableDecoder, rows: Tensor, recipe: Recipe, parts: Parts = (lesson, place_loss)
) -> Tensor:
    """The loss at each of DEPTH places of a chain, float32 [DEPTH], of chains that begin at every token of rows [rows, tokens]
    int64: KL to what the teacher says there, among the tokens that the draft may say, and `refused` among all. A place counts as
    much as it is likely to be reached, its chain's tokens being kept. parts: the two functions, compiled.
    """
    learn, place = parts
    given = learn(teacher, draft, rows, recipe.temperature)
    # As the states of all later places are, for which one compiled form serves then.
    state = given.hidden.float().requires_grad_(torch.is_grad_enabled())
    reached, terms = torch.ones_like(given.hidden[..., 0], dtype=torch.float32), []
    for depth in range(1, DEPTH + 1):
        state, loss, right = place(draft, state, given.at(depth), recipe)
        terms.append((loss * reached).mean())
        reached = reached * (BEYOND + (1 - BEYOND) * right)
    return torch.stack(terms)


def save_recurrent(draft: RecurrentModule, folder: Path, spec: ModelSpec) -> None:
    """Write the draft for a model of `spec`, matrices in FORM and the embedding in 8 bits; see speculation.recurrent. The folder is
    made."""
    mlp = draft.mlp
    matrices = {
        "embedding": draft.embed_tokens.weight,
        "mix": draft.mix.weight,
        "query": draft.q_proj.weight,
        "out": draft.o_proj.weight,
        "gate_up": torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
        "down": mlp.down_proj.weight,
        "head": draft.lm_head.weight,
    }
    tensors = {
        "query_norm": draft.attn_norm.weight.detach().bfloat16(),
        "inner_norm": draft.mlp_norm.weight.detach().bfloat16(),
        "norm": draft.norm.weight.detach().bfloat16(),
        "ids": draft.ids.int(),
    }
    for name, weight in matrices.items():
        form = FORM if name in MATRICES else NumberFormat(ROWS[0])
        codes, scales, _ = round_to_nearest(weight.detach(), form)
        tensors |= {f"{name}.codes": pack_bits(codes, form.bits), f"{name}.scales": scales.squeeze(1).half()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: one.cpu().contiguous() for name, one in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = {
        "architectures": ["RecurrentDraft"],
        "hidden_size": spec.d_model,
        "intermediate_size": spec.layers[0].d_ff,
        "vocab_size": spec.vocab_size,
        "draft_vocabulary_size": len(draft.ids),
        "hidden_act": spec.activation,
        "rms_norm_eps": spec.norm_eps,
        "attended_layer": draft.attended,
        "formats": {name: [FORM.bits, FORM.group] for name in MATRICES},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
