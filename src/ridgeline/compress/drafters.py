"""Training of what drafts for a model: a recurrent draft and Medusa heads, which read its hidden states, and a draft model.

A draft learns most from text that it will draft, so the model (the teacher) first writes continuations of pieces of the texts. Most
of a batch is such text. All students of a run train on the same batches, and share no parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ridgeline.compress.acceptance import RANKS, Text, chain_rates, draft_hits, head_hits, mean_rates, recurrent_figures
from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.distill import Distillation, LossWeights, MedusaModule, medusa_loss
from ridgeline.compress.generate import generate, noise_keys
from ridgeline.compress.recurrent import (
    CompiledParts,
    RecurrentModule,
    depth_loss,
    recurrent_losses,
    save_recurrent,
    teacher_targets,
)
from ridgeline.compress.train import Loss, TokenRows
from ridgeline.core.spec import ModelSpec

HEADS = 4
"""Medusa heads."""
WRITTEN = 3
"""Rows that the teacher wrote, for each row of the texts."""
STRIDE = 2
"""Every STRIDE-th position trains Medusa heads."""
PROMPT_SHARES = (1 / 32, 3 / 32, 1 / 4)
"""Share of a written piece that is its prompt, batch by batch."""
TEMPERATURES = (0.7, 0.9)
"""Lowest and highest temperature of written text, around that of DRAFT_LOSS."""
DRAFT_LOSS = LossWeights(logits=0.3, overlap=1.0, temperature=0.8)
OUTPUTS = 4096
"""The most frequent tokens, to which a recurrent draft is limited."""


@dataclass(frozen=True, slots=True)
class MixedRows:
    """Batches [rows, tokens]: rows of the texts, and WRITTEN times as many of the teacher's text."""

    corpus: TokenRows
    written: Tensor
    """Pieces [n, length] that the teacher wrote. `tokens` is a multiple of length or divides it."""
    seed: int = 0

    def __call__(self, number: int) -> Tensor:
        read = self.corpus(number)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        pieces = WRITTEN * read.numel() // self.written.shape[1]
        chosen = torch.randint(len(self.written), (pieces,), generator=generator)
        return torch.cat((read, self.written[chosen.to(read.device)].view(-1, read.shape[1]).long()))


@dataclass(frozen=True, slots=True)
class Stream:
    """The training texts one after the other."""

    ids: Tensor
    """Token ids [n] of any integer type."""
    starts: Tensor
    """Positions of the first tokens of documents, int64 [documents]."""


def teacher_writes(
    teacher: TrainableDecoder, stream: Stream, batch: int, rows: int, length: int, seed: int = 0
) -> Tensor:
    """Write a batch of pieces, int32 [rows, length]: prompts from the stream and the teacher's continuations.

    Every other prompt starts where a document starts. A quarter of the continuations is greedy, the others have temperatures
    between TEMPERATURES. batch: number of the batch, which selects the prompts and their length.
    """
    device, number = stream.ids.device, seed * 1000 + batch
    temperature = torch.linspace(*TEMPERATURES, rows, device=device)
    temperature[::4] = 0
    prompt = max(1, round(length * PROMPT_SHARES[batch % len(PROMPT_SHARES)]))
    generator = torch.Generator().manual_seed(number)
    last = len(stream.ids) - prompt
    at = torch.randint(last, (rows,), generator=generator).to(device)
    documents = stream.starts[torch.randint(len(stream.starts), (rows,), generator=generator).to(device)]
    at = torch.where(torch.arange(rows, device=device) % 2 == 0, documents.clamp(max=last), at)
    prompts = stream.ids[at[:, None] + torch.arange(prompt, device=device)].long()
    shuffled = temperature[torch.randperm(rows, generator=generator).to(device)]
    return generate(teacher, prompts, length - prompt, shuffled, noise_keys(1000 + number, rows, device)).int()


def frequent(ids: Tensor, count: int, vocab: int) -> Tensor:
    """Return the `count` most frequent of token ids [...], ascending, int64 [count]."""
    counts = ids.flatten().int().bincount(minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


class Students(nn.Module):
    """The trained networks of a run; None: not trained.

    Args:
        names: of "recurrent" and "medusa".
        ids: vocabulary of a recurrent draft.
        attended: layer that a recurrent draft attends to.
        draft: draft model.
    """

    def __init__(
        self,
        teacher: TrainableDecoder,
        names: Sequence[str],
        ids: Tensor,
        attended: int,
        draft: TrainableDecoder | None = None,
    ) -> None:
        super().__init__()
        self.recurrent = RecurrentModule(teacher.spec, ids, attended) if "recurrent" in names else None
        self.heads = MedusaModule(teacher.spec.d_model, HEADS) if "medusa" in names else None
        self.draft = draft

    def loss(self, teacher: TrainableDecoder) -> Loss:
        """Return the function that computes the sum of all students' losses."""
        distillation = None if self.draft is None else Distillation(self.draft, teacher, DRAFT_LOSS)

        def logits_loss(rows: Tensor) -> Tensor:
            """The loss of heads and draft model, which share the teacher's logits."""
            with torch.no_grad():
                hidden = teacher.hidden(rows)
                teacher_logits = teacher.logits(hidden)
            loss = torch.zeros((), device=rows.device)
            if self.heads is not None:
                loss = loss + medusa_loss(self.heads, hidden, teacher_logits, teacher.logits, STRIDE)
            return loss if distillation is None else loss + distillation.compare(rows, teacher_logits)

        by_logits: Loss = logits_loss
        parts: CompiledParts = (teacher_targets, depth_loss)
        if teacher.norm.weight.is_cuda:
            by_logits = torch.compile(logits_loss, dynamic=False)
            parts = torch.compile(teacher_targets, dynamic=False), torch.compile(depth_loss, dynamic=False)

        def total(rows: Tensor) -> Tensor:
            loss = torch.zeros((), device=rows.device)
            if self.heads is not None or self.draft is not None:
                loss = by_logits(rows)
            if self.recurrent is not None:
                loss = loss + recurrent_losses(self.recurrent, teacher, rows, DRAFT_LOSS, parts).sum()
            return loss

        return total


def save_heads(heads: MedusaModule, folder: Path, spec: ModelSpec, accuracies: list[list[float]]) -> None:
    """Write Medusa heads as a folder for `--speculate medusa:FOLDER`. accuracies: see speculation.heads.tree."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in heads.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.layers,
        "hidden_size": spec.d_model,
        "vocab_size": spec.vocab_size,
        "shares_unembedding": True,
        "torch_dtype": "bfloat16",
        "accuracies": accuracies,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_calibrated_heads(
    heads: MedusaModule, teacher: TrainableDecoder, folder: Path, held_out: Iterable[Text]
) -> list[list[float]]:
    """Write Medusa heads with the accuracies that determine their tree, measured on held-out texts, and return these."""
    placed = heads.to(teacher.norm.weight.dtype)
    accuracies = mean_rates([head_hits(teacher, placed, text)[:, :RANKS] for text in held_out])
    save_heads(placed, folder, teacher.spec, accuracies)
    return accuracies


def save_calibrated_recurrent(
    draft: RecurrentModule, teacher: TrainableDecoder, folder: Path, held_out: Iterable[Text]
) -> list[list[float]]:
    """Write a recurrent draft with the accuracies that determine its tree, measured on held-out texts, and return these."""
    save_recurrent(draft, folder, teacher.spec)
    accuracies = mean_rates([torch.tensor(recurrent_figures(teacher, draft, text)["ranks"]) for text in held_out])
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"accuracies": accuracies}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return accuracies


def draft_rates(draft: TrainableDecoder, held_out: Iterable[Text], depth: int = HEADS) -> list[list[float]]:
    """Return how often each of `depth` drafted tokens is kept if those before it were, [depth][1], the mean over texts."""
    return mean_rates([torch.tensor(chain_rates(draft_hits(draft, text), depth)).unsqueeze(1) for text in held_out])
