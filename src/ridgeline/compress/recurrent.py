"""A trainable recurrent draft: the network of speculation.recurrent, its loss, and its folder format.

The draft is trained by distillation from the target model. A chain starts after every token of a text at once, from the target's
hidden state and with its keys and values up to there. It continues with the tokens of the text, as a draft continues after
accepted tokens.
Source: training-time test of EAGLE-3 (Li et al. 2025, section 3.2).
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
from ridgeline.compress.distill import LossWeights
from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import ModelSpec, NumberFormat
from ridgeline.ops.reference import pack_bits
from ridgeline.quant.integer import SMALLEST_SCALE, round_to_nearest
from ridgeline.speculation.recurrent import MATRICES, ROWS, RecurrentWeights

DEPTH = 4
"""Length of the chains in training."""
OFF_PATH_WEIGHT = 0.2
"""Weight of a position after a token of probability 0 under the draft. It is above 0 because draft trees contain less likely
tokens too."""
WEIGHT_FORMAT = NumberFormat(4, 64)
"""Number format of all matrices but the embedding, in training too. On two cores a draft of one token takes 52, 49 and 47 us with
groups of 32, 64 and 128, and 53 us in 8 bits with a scale per output. Right after the target's 28 MB of weights are read it
takes 90, 88, 84 and 130 us."""
MODULES = {"embedding": "embed_tokens", "mix": "mix", "query": "q_proj", "out": "o_proj", "down": "mlp.down_proj"}
"""Matrix in the folder -> module name. The head and gate_up, which is two modules, are handled separately."""


@dataclass(frozen=True, slots=True)
class TeacherTargets:
    """The teacher's outputs for chains that start after each of `tokens` tokens."""

    hidden: Tensor
    """Hidden states of the model, [rows, tokens, d_model]."""
    k: Tensor
    """Keys of the attended layer, [rows, kv_heads, tokens, head_dim]."""
    v: Tensor
    """Values of the attended layer, [rows, kv_heads, tokens, head_dim]."""
    rotary: Tensor
    """Rotary table of all tokens."""
    text: Tensor
    """int64 [rows, tokens + DEPTH]."""
    logits: Tensor
    """Logits of the draft's vocabulary after each token of the text."""
    logsumexp: Tensor
    """log(sum(exp(logit / temperature))) over the model's vocabulary after each token of the text."""
    next_index: Tensor
    """Index of the text's next token in the draft's vocabulary. -1 if it is not in it."""

    def at(self, depth: int) -> TeacherTargets:
        """Return the targets of the chains' positions at `depth`, which starts at 1.

        Each tensor is a copy with the length of `hidden`, so that code compiled for one depth serves all depths.
        """
        positions, tensors = (
            slice(depth, depth + self.hidden.shape[1]),
            (self.text, self.logits, self.logsumexp, self.next_index),
        )
        text, logits, logsumexp, next_index = (tensor[:, positions].contiguous() for tensor in tensors)
        return TeacherTargets(
            self.hidden, self.k, self.v, self.rotary[positions].clone(), text, logits, logsumexp, next_index
        )


class FakeQuantizedLinear(nn.Linear):
    """A linear that multiplies with its weights rounded to WEIGHT_FORMAT as by `round_to_nearest`.

    Gradients pass the rounding unchanged (straight-through estimator, see compress.tune).
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def quantized_weight(self) -> Tensor:
        """Return the rounded weights. No branch depends on a value, so that the function can be compiled."""
        half_range, padded = (
            1 << WEIGHT_FORMAT.bits - 1,
            F.pad(self.weight.detach(), (0, -self.in_features % WEIGHT_FORMAT.group)),
        )
        groups = padded.unflatten(1, (-1, WEIGHT_FORMAT.group))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scales = torch.where(high > -low, high, low) / -half_range
        # Round to float16 by the bits, because a compiler removes a cast to float16 and back. Below 2^-14 float16 is coarser.
        bits = torch.where(scales.abs() < SMALLEST_SCALE, SMALLEST_SCALE, scales).view(torch.int32)
        scales = ((bits + 0x0FFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)
        rounded = (groups / scales).round().clamp(-half_range, half_range - 1) * scales
        return self.weight + (rounded.flatten(1)[:, : self.in_features] - self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.quantized_weight())


class RecurrentModule(nn.Module):
    """A trainable recurrent draft; see speculation.recurrent for the network. Its linears round weights as they are stored.

    Args:
        spec: the target model, which defines width, norms and activation.
        ids: int64 [outputs], the draft's vocabulary.
        attended: the target's layer whose keys and values the draft reads.
    """

    ids: Tensor

    def __init__(self, spec: ModelSpec, ids: Tensor, attended: int) -> None:
        super().__init__()
        width, layer = spec.d_model, spec.layers[attended]
        self.attended, self.head_dim, self.scale = attended, layer.head_dim, spec.scale_of(layer)
        queries = layer.n_heads * layer.head_dim
        self.embed_tokens = nn.Embedding(spec.vocab_size, width)
        self.mix = FakeQuantizedLinear(width, width)
        self.attn_norm, self.mlp_norm, self.norm = (Norm(width, spec) for _ in range(3))
        self.q_proj, self.o_proj = FakeQuantizedLinear(width, queries), FakeQuantizedLinear(queries, width)
        self.mlp, inner = FeedForward(spec, spec.layers[0]), spec.layers[0].d_ff
        self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj = (
            FakeQuantizedLinear(*sizes) for sizes in ((width, inner), (width, inner), (inner, width))
        )
        self.lm_head = FakeQuantizedLinear(width, len(ids))
        self.register_buffer("ids", ids)
        for output in (self.o_proj, self.mlp.down_proj):
            nn.init.zeros_(output.weight)

    def init_from_teacher(self, teacher: TrainableDecoder, hidden: Tensor) -> None:
        """Initialize embedding, query projection, norms and head from the target model.

        hidden: sample of its hidden states. They are scaled to the size of the embedding.
        """
        embedding = teacher.embed_tokens.weight
        with torch.no_grad():
            self.embed_tokens.weight.copy_(embedding)
            self.norm.weight.copy_(teacher.norm.weight)
            self.lm_head.weight.copy_(teacher.unembedding[self.ids])
            nn.init.eye_(self.mix.weight).mul_(embedding.square().mean().sqrt() / hidden.float().square().mean().sqrt())
            layer = teacher.get_submodule(f"layers.{self.attended}")
            self.attn_norm.weight.copy_(layer.get_parameter("input_layernorm.weight"))
            self.q_proj.weight.copy_(layer.get_parameter("self_attn.q_proj.weight"))

    def load(self, weights: RecurrentWeights) -> None:
        """Load the weights of a saved draft that attends to the same layer. Of its head only the common vocabulary is loaded."""
        matrices = {
            name: weights.dense(name, torch.float32, torch.device("cpu")) for name in ("gate_up", "head", *MODULES)
        }
        gate, up = matrices.pop("gate_up").chunk(2)
        head, row_of_id = (
            self.lm_head.weight.detach().cpu().clone(),
            {token_id: row for row, token_id in enumerate(weights.ids.tolist())},
        )
        rows = [(row, row_of_id[token_id]) for row, token_id in enumerate(self.ids.tolist()) if token_id in row_of_id]
        own_rows, weights_rows = torch.tensor(rows, dtype=torch.int64).view(-1, 2).unbind(1)
        head[own_rows] = matrices.pop("head")[weights_rows]
        state = {MODULES[name]: tensor for name, tensor in matrices.items()}
        state |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "lm_head": head}
        state |= {
            "attn_norm": weights.norms["query_norm"],
            "mlp_norm": weights.norms["inner_norm"],
            "norm": weights.norms["norm"],
        }
        self.load_state_dict({f"{name}.weight": tensor for name, tensor in state.items()} | {"ids": self.ids})

    def forward(self, state: Tensor, tokens: Tensor, k: Tensor, v: Tensor, rotary: Tensor) -> Tensor:
        """Compute the next state, normalized like the model's final hidden states.

        Args:
            state: [rows, n, d_model].
            tokens: int64 [rows, n], the next tokens.
            k, v: [rows, kv_heads, n, head_dim], from the model. The chain at index i attends to the first i + 1.
            rotary: [n, 2, dim / 2], at the positions of the tokens.
        """
        mixed = self.mix(state) + self.embed_tokens(tokens)
        q = self.q_proj(self.attn_norm(mixed)).view(*tokens.shape, -1, self.head_dim).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            rotate(q, rotary).type_as(v), k, v, is_causal=True, scale=self.scale, enable_gqa=True
        )
        mixed = mixed + self.o_proj(attended.transpose(1, 2).flatten(2))
        return self.norm(mixed + self.mlp(self.mlp_norm(mixed)))


CompiledParts = tuple[Callable[..., TeacherTargets], Callable[..., tuple[Tensor, Tensor, Tensor]]]


@torch.no_grad()
def teacher_targets(
    teacher: TrainableDecoder, draft: RecurrentModule, rows: Tensor, temperature: float
) -> TeacherTargets:
    """Compute the teacher's targets for rows int64 [rows, tokens]."""
    layer = teacher.spec.layers[draft.attended]
    if layer.window is not None or layer.softcap is not None:
        raise UnsupportedModel(
            f"The draft cannot attend to layer {draft.attended}, which has a window or a softcap: choose another layer."
        )
    tokens, cache = rows.shape[1] - DEPTH, teacher.cache(*rows.shape)
    hidden = teacher.hidden(rows, cache)
    logsumexp = (teacher.logits(hidden).float() / temperature).logsumexp(-1, keepdim=True)
    logits = F.linear(hidden, teacher.unembedding[draft.ids])
    k, v = (tensor[:, :, :tokens] for tensor in (cache[draft.attended].k, cache[draft.attended].v))
    rotary = getattr(teacher, f"rotary_{teacher.rope_of[draft.attended]}")
    index_of_id = rows.new_full((teacher.spec.vocab_size,), -1)
    index_of_id[draft.ids] = torch.arange(len(draft.ids), device=rows.device)
    next_index = F.pad(index_of_id[rows[:, 1:]], (0, 1), value=-1)
    return TeacherTargets(hidden[:, :tokens], k, v, rotary, rows, logits, logsumexp, next_index)


def depth_loss(
    draft: RecurrentModule, state: Tensor, targets: TeacherTargets, weights: LossWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Advance the chains by one token.

    Args:
        state: states of the chains.
        targets: from `TeacherTargets.at`, at the next depth.
    Returns:
        The next states; the loss of each chain [rows, tokens]; the probability of each chain [rows, tokens] that the draft
        proposes the text's token if the text is drawn from the model.
    """
    temperature = weights.temperature
    state = draft(state, targets.text, targets.k, targets.v, targets.rotary)
    draft_logprobs = F.log_softmax(draft.lm_head(state).float() / temperature, -1)
    teacher_logprobs = targets.logits.float() / temperature - targets.logsumexp
    renormalized = teacher_logprobs - teacher_logprobs.logsumexp(-1, keepdim=True)
    kl = (renormalized.exp() * (renormalized - draft_logprobs)).sum(-1) * temperature**2
    overlap = torch.minimum(teacher_logprobs.exp(), draft_logprobs.exp()).sum(-1)
    next_index = targets.next_index.clamp(min=0).unsqueeze(-1)
    kept_probability = (draft_logprobs.detach() - teacher_logprobs).gather(-1, next_index).squeeze(-1).clamp(
        max=0
    ).exp() * (targets.next_index >= 0)
    return state, weights.logits * kl + weights.overlap * (1 - overlap), kept_probability


def recurrent_losses(
    draft: RecurrentModule,
    teacher: TrainableDecoder,
    rows: Tensor,
    weights: LossWeights,
    parts: CompiledParts = (teacher_targets, depth_loss),
) -> Tensor:
    """Compute the loss at each depth of chains that start at every token, float32 [DEPTH].

    The loss is the KL to the teacher over the draft's vocabulary, plus the rejection rate over the whole vocabulary. A position is
    weighted by the probability that the chain reaches it, that is, that its tokens are accepted.

    Args:
        rows: int64 [rows, tokens].
        parts: `teacher_targets` and `depth_loss`, or their compiled versions.
    """
    targets_of, loss_at = parts
    targets = targets_of(teacher, draft, rows, weights.temperature)
    # Same type and gradient flag as the states of later depths, so that one compiled version serves all depths.
    state = targets.hidden.float().requires_grad_(torch.is_grad_enabled())
    reach, terms = torch.ones_like(targets.hidden[..., 0], dtype=torch.float32), []
    for depth in range(1, DEPTH + 1):
        state, loss, kept_probability = loss_at(draft, state, targets.at(depth), weights)
        terms.append((loss * reach).mean())
        reach = reach * (OFF_PATH_WEIGHT + (1 - OFF_PATH_WEIGHT) * kept_probability)
    return torch.stack(terms)


def save_recurrent(draft: RecurrentModule, folder: Path, spec: ModelSpec) -> None:
    """Write the draft of a model with `spec`: matrices in WEIGHT_FORMAT, the embedding in 8 bits. The folder is created.

    See speculation.recurrent for the format.
    """
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
        number_format = WEIGHT_FORMAT if name in MATRICES else NumberFormat(ROWS[0])
        codes, scales, _ = round_to_nearest(weight.detach(), number_format)
        tensors |= {f"{name}.codes": pack_bits(codes, number_format.bits), f"{name}.scales": scales.squeeze(1).half()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
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
        "formats": {name: [WEIGHT_FORMAT.bits, WEIGHT_FORMAT.group] for name in MATRICES},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
