"""Losses by which a student learns from a teacher's distributions (Hinton et al. 2015, "Distilling the knowledge in a neural
network"), and by which Medusa heads learn from the model they sit on (Cai et al. 2024, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.core.errors import ConfigError


def kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean over places of KL(teacher || student) in nats, of logits [..., vocab] divided by `temperature`; times temperature^2,
    so that gradients keep their size (Hinton et al. 2015, section 2.1)."""
    said = F.log_softmax(student.float() / temperature, -1)
    wanted = F.log_softmax(teacher.float() / temperature, -1)
    return (wanted.exp() * (wanted - said)).sum(-1).mean() * temperature**2


def refused(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean over places of 1 - sum(min(p, q)), the total variation distance: the chance that the rejection rule refuses a draft
    drawn from q, the student's distribution, when the teacher's is p (Leviathan et al. 2023, corollary 3.6)."""
    q = F.softmax(student.float() / temperature, -1)
    p = F.softmax(teacher.float() / temperature, -1)
    return 1 - torch.minimum(p, q).sum(-1).mean()


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the student is asked for: weights of the terms of its loss, at a softmax temperature.

    logits: KL to the teacher. overlap: `refused`. text: cross entropy on the tokens of the text themselves. states: mean
    squared error of the listed pairs (stream of the student, stream of the teacher) of hidden states, 0 being what comes
    out of the embedding; widths must be equal.
    """

    logits: float = 1.0
    overlap: float = 0.0
    text: float = 0.0
    states: float = 0.0
    pairs: tuple[tuple[int, int], ...] = ()
    temperature: float = 1.0


class Distillation:
    """Loss of a student on rows [rows, tokens] int64 read by both. The teacher takes no gradient."""

    def __init__(self, student: TrainableDecoder, teacher: TrainableDecoder, recipe: Recipe = Recipe()) -> None:
        if student.spec.vocab_size != teacher.spec.vocab_size:
            raise ConfigError(
                f"The vocabulary of the student has {student.spec.vocab_size} tokens and that of the teacher "
                f"{teacher.spec.vocab_size}: distillation needs models with the same tokenizer."
            )
        if recipe.states and student.spec.d_model != teacher.spec.d_model:
            raise ConfigError(
                f"Hidden states of widths {student.spec.d_model} and {teacher.spec.d_model} cannot be compared: set `states` to 0."
            )
        self.student, self.teacher, self.recipe = student, teacher.requires_grad_(False).eval(), recipe

    def __call__(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            streams = self.teacher.streams(rows)
            wanted = self.teacher.logits(self.teacher.norm(streams[-1]))
        return self.compare(rows, wanted, streams)

    def compare(self, rows: Tensor, wanted: Tensor, streams: Sequence[Tensor] = ()) -> Tensor:
        """The loss given the teacher's logits [rows, tokens, vocab] and, where states count, its streams."""
        recipe = self.recipe
        ours = self.student.streams(rows)
        said = self.student.logits(self.student.norm(ours[-1]))
        total = said.new_zeros((), dtype=torch.float32)
        if recipe.logits:
            total = total + recipe.logits * kl(said, wanted, recipe.temperature)
        if recipe.overlap:
            total = total + recipe.overlap * refused(said, wanted, recipe.temperature)
        if recipe.text:
            text = F.cross_entropy(said[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())
            total = total + recipe.text * text
        for mine, theirs in recipe.pairs if recipe.states else ():
            error = F.mse_loss(ours[mine].float(), streams[theirs].float())
            total = total + recipe.states * error / len(recipe.pairs)
        return total


class MedusaBlock(nn.Module):
    """h + SiLU(W h + b), the identity at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.silu(self.linear(hidden))


class MedusaModule(nn.ModuleList):
    """Heads to be trained; names of the parameters are those of published heads, "{head}.{layer}.linear.weight"."""

    def __init__(self, width: int, heads: int = 4, layers: int = 1) -> None:
        super().__init__(nn.Sequential(*(MedusaBlock(width) for _ in range(layers))) for _ in range(heads))


def medusa_loss(
    heads: MedusaModule, hidden: Tensor, wanted: Tensor, unembed: Callable[[Tensor], Tensor], stride: int = 1
) -> Tensor:
    """Weighted mean of the heads' KL to what the model says later, weights 0.8^k as in Cai et al. 2024 (section 2.2.1).

    hidden [rows, tokens, d_model]: the model's final states; wanted [rows, tokens, vocab]: its logits. At place t the model
    predicts token t + 1 and head k = 1, 2, .. token t + k + 1, for which the model's own distribution at place t + k is the
    teacher. unembed: hidden states to logits. stride: every so many places count.
    """
    tokens = hidden.shape[1] - len(heads)
    terms = []
    for index, head in enumerate(heads):
        said = unembed(head(hidden[:, :tokens:stride]))
        terms.append(0.8 ** (index + 1) * kl(said, wanted[:, index + 1 : index + 1 + tokens : stride]))
    return torch.stack(terms).sum() / sum(0.8 ** (index + 1) for index in range(len(heads)))
