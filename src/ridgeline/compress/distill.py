"""Distillation losses of a student, and the training loss of Medusa heads.

Sources: Hinton et al. 2015, "Distilling the knowledge in a neural network"; Cai et al. 2024 (Medusa), section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.core.errors import ConfigError


def kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the mean of KL(teacher || student) over positions, in nats.

    Logits [..., vocab] are divided by `temperature`. The result is multiplied by temperature^2, so that the size of the
    gradients does not depend on it.
    Source: Hinton et al. 2015, section 2.1.
    """
    student_logprobs = F.log_softmax(student.float() / temperature, -1)
    teacher_logprobs = F.log_softmax(teacher.float() / temperature, -1)
    return (teacher_logprobs.exp() * (teacher_logprobs - student_logprobs)).sum(-1).mean() * temperature**2


def rejection_rate(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the mean over positions of 1 - sum(min(p, q)), the total variation distance.

    It is the probability that speculative sampling rejects a draft from the student's distribution q if the target's
    distribution is p.
    Source: Leviathan et al. 2023, corollary 3.6.
    """
    q = F.softmax(student.float() / temperature, -1)
    p = F.softmax(teacher.float() / temperature, -1)
    return 1 - torch.minimum(p, q).sum(-1).mean()


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Weights of the terms of the student's loss, and the softmax temperature."""

    logits: float = 1.0
    """KL to the teacher."""
    overlap: float = 0.0
    """`rejection_rate`."""
    text: float = 0.0
    """Cross entropy on the tokens of the text."""
    states: float = 0.0
    """Mean squared error of the hidden states listed in `pairs`. Both models must have the same width."""
    pairs: tuple[tuple[int, int], ...] = ()
    """(index in the student's streams, index in the teacher's streams). 0 is the output of the embedding."""
    temperature: float = 1.0


class Distillation:
    """The loss of a student on rows int64 [rows, tokens]. The teacher has no gradient."""

    def __init__(
        self, student: TrainableDecoder, teacher: TrainableDecoder, weights: LossWeights = LossWeights()
    ) -> None:
        if student.spec.vocab_size != teacher.spec.vocab_size:
            raise ConfigError(
                f"The vocabulary of the student has {student.spec.vocab_size} tokens and that of the teacher "
                f"{teacher.spec.vocab_size}: distillation needs models with the same tokenizer."
            )
        if weights.states and student.spec.d_model != teacher.spec.d_model:
            raise ConfigError(
                f"Hidden states of widths {student.spec.d_model} and {teacher.spec.d_model} cannot be compared: set `states` to 0."
            )
        self.student, self.teacher, self.weights = student, teacher.requires_grad_(False).eval(), weights

    def __call__(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            streams = self.teacher.streams(rows)
            teacher_logits = self.teacher.logits(self.teacher.norm(streams[-1]))
        return self.compare(rows, teacher_logits, streams)

    def compare(self, rows: Tensor, teacher_logits: Tensor, teacher_streams: Sequence[Tensor] = ()) -> Tensor:
        """Return the loss, given the teacher's logits [rows, tokens, vocab] and its streams if hidden states count."""
        weights = self.weights
        student_streams = self.student.streams(rows)
        student_logits = self.student.logits(self.student.norm(student_streams[-1]))
        total = student_logits.new_zeros((), dtype=torch.float32)
        if weights.logits:
            total = total + weights.logits * kl(student_logits, teacher_logits, weights.temperature)
        if weights.overlap:
            total = total + weights.overlap * rejection_rate(student_logits, teacher_logits, weights.temperature)
        if weights.text:
            text_loss = F.cross_entropy(student_logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())
            total = total + weights.text * text_loss
        for student_layer, teacher_layer in weights.pairs if weights.states else ():
            error = F.mse_loss(student_streams[student_layer].float(), teacher_streams[teacher_layer].float())
            total = total + weights.states * error / len(weights.pairs)
        return total


class MedusaBlock(nn.Module):
    """h + SiLU(W h + b), initialized as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.silu(self.linear(hidden))


class MedusaModule(nn.ModuleList):
    """Trainable Medusa heads. Parameters have the names of published heads, "{head}.{layer}.linear.weight"."""

    def __init__(self, width: int, heads: int = 4, layers: int = 1) -> None:
        super().__init__(nn.Sequential(*(MedusaBlock(width) for _ in range(layers))) for _ in range(heads))
        self.layers = layers


def medusa_loss(
    heads: MedusaModule, hidden: Tensor, teacher_logits: Tensor, unembed: Callable[[Tensor], Tensor], stride: int = 1
) -> Tensor:
    """Return the weighted mean of the heads' KL to the model's later distributions, with weights 0.8^k.

    At position t the model predicts token t + 1, and head k = 1, 2, .. predicts token t + k + 1. The teacher of head k is the
    model's distribution at position t + k.

    Args:
        hidden: [rows, tokens, d_model], final hidden states of the model.
        teacher_logits: [rows, tokens, vocab].
        unembed: maps hidden states to logits.
        stride: every `stride`-th position counts.
    Source: Cai et al. 2024, section 2.2.1.
    """
    tokens = hidden.shape[1] - len(heads)
    terms = []
    for index, head in enumerate(heads):
        head_logits = unembed(head(hidden[:, :tokens:stride]))
        terms.append(0.8 ** (index + 1) * kl(head_logits, teacher_logits[:, index + 1 : index + 1 + tokens : stride]))
    return torch.stack(terms).sum() / sum(0.8 ** (index + 1) for index in range(len(heads)))
