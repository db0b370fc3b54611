"""A teacher behind the OpenAI API, for distillation without its weights.

A server that scores prompts (`prompt_logprobs`, or `echo` with `logprobs`) gives the most probable tokens after each token of the
texts. The student then minimizes the KL over these tokens, with all others as one outcome. Any other server writes continuations
of pieces of the texts, and the student learns to continue them in the same way.
Sources: Hinton et al. 2015; Kim and Rush 2016, "Sequence-level knowledge distillation".
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.job import Progress
from ridgeline.core.errors import EngineFailed
from ridgeline.quality.served import CONCURRENT_REQUESTS, Endpoint, ServerScorer
from ridgeline.quality.texts import Window
from ridgeline.text.tokenizer import Tokenizer

PROMPT_SHARE = 0.25
"""Share of a row that is the prompt of a sampled continuation."""
CHUNK = 128
"""Rows per file of the working folder. An interrupted run asks only for the missing files."""
STAGE = "asking the teacher"


@dataclass(frozen=True, slots=True)
class ServedTeacher:
    """The server and what it is asked for."""

    endpoint: Endpoint
    top: int
    """Alternatives per token. 0: continuations that the server samples at temperature 1."""


@dataclass(frozen=True, slots=True)
class Lessons:
    """What the teacher answered for rows of tokens, and the loss of a student on it."""

    ids: Tensor
    """int32 [n, length]. Rows of sampled text end early if the answer did; the rest is 0."""
    lengths: Tensor
    """int64 [n], tokens of each row."""
    first: int
    """Index of the first token that the student must predict."""
    top_ids: Tensor
    """int32 [n, length - 1, top], the teacher's most probable tokens after each token; -1: none. top is 0 for sampled text."""
    top_logprobs: Tensor
    """float32 [n, length - 1, top]."""

    def to(self, device: torch.device) -> Lessons:
        """Copy the answers to another device."""
        tensors = (self.ids, self.lengths, self.top_ids, self.top_logprobs)
        ids, lengths, top_ids, top_logprobs = (tensor.to(device) for tensor in tensors)
        return Lessons(ids, lengths, self.first, top_ids, top_logprobs)

    def loss(self, student: TrainableDecoder, rows: Tensor) -> Tensor:
        """Return the mean loss of rows int64 [batch], nats per token."""
        ids = self.ids[rows].long()
        logits = student(ids)[:, self.first - 1 : -1]
        if self.top_ids.shape[2]:
            return top_kl(logits, self.top_ids[rows].long(), self.top_logprobs[rows])
        counted = torch.arange(self.first, ids.shape[1], device=ids.device) < self.lengths[rows].unsqueeze(1)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, self.first :].flatten(), reduction="none")
        return (losses * counted.flatten()).sum() / counted.sum().clamp(min=1)


def top_kl(student: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
    """Return the mean of KL(teacher || student) over positions, with all tokens but the teacher's most probable as one outcome.

    Args:
        student: logits [..., vocab].
        top_ids: int64 [..., top]; -1: no token.
        top_logprobs: float32 [..., top].
    """
    listed = top_ids >= 0
    logprobs = F.log_softmax(student.float(), -1).gather(-1, top_ids.clamp(min=0))
    p = top_logprobs.exp() * listed
    terms = torch.where(listed, p * (top_logprobs.masked_fill(~listed, 0.0) - logprobs), 0.0).sum(-1)
    p_rest = (1 - p.sum(-1)).clamp(min=0.0)
    q_rest = (1 - (logprobs.exp() * listed).sum(-1)).clamp(min=1e-7)
    return (terms + torch.xlogy(p_rest, p_rest) - p_rest * q_rest.log()).mean()


def ask(
    teacher: ServedTeacher, tokenizer: Tokenizer, rows: Sequence[Sequence[int]], folder: Path, progress: Progress
) -> Lessons:
    """Ask the server for all rows, token ids of equal length. The answers are kept in `folder`, where asking again finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    chunks = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
    scorer = ServerScorer(teacher.endpoint, tokenizer) if teacher.top else None
    parts = []
    for number, chunk in enumerate(chunks):
        path = folder / f"teacher-{number:05d}.pt"
        progress(STAGE, number, len(chunks))
        if not path.is_file():
            try:
                if scorer is None:
                    answer = _sampled(teacher, tokenizer, chunk, number * CHUNK)
                else:
                    answer = _scored(scorer, chunk, teacher.top)
            except EngineFailed as error:
                remedy = " A server that cannot score prompts can teach by sampled texts: give --teacher-logprobs 0."
                raise EngineFailed(error.message + (remedy if scorer is not None else "")) from None
            torch.save(answer, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
        parts.append(torch.load(path, weights_only=True))
    progress(STAGE, len(chunks), len(chunks))
    first = _prompt_tokens(len(rows[0])) if scorer is None else 1
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Lessons(first=first, **joined)


def _scored(scorer: ServerScorer, rows: Sequence[Sequence[int]], top: int) -> dict[str, Tensor]:
    windows = [Window(tuple(row), 1, index) for index, row in enumerate(rows)]
    scores = scorer.score(windows, top, lambda stage, done, total: None)
    return {
        "ids": torch.tensor(rows, dtype=torch.int32),
        "lengths": torch.tensor([len(row) for row in rows]),
        "top_ids": torch.stack([torch.from_numpy(score.top_ids) for score in scores]),
        "top_logprobs": torch.stack([torch.from_numpy(score.top_logprobs) for score in scores]),
    }


def _sampled(
    teacher: ServedTeacher, tokenizer: Tokenizer, rows: Sequence[Sequence[int]], seed: int
) -> dict[str, Tensor]:
    """Let the server continue the first tokens of each row. The seed of a row is `seed` plus its number."""
    length = len(rows[0])
    prompt = _prompt_tokens(length)
    model = teacher.endpoint.model or teacher.endpoint.first_model()

    def answer(index: int) -> list[int]:
        """Return the prompt and the continuation, whose text is tokenized again."""
        given = list(rows[index][:prompt])
        body = {
            "model": model,
            "prompt": given,
            "max_tokens": length - prompt,
            "temperature": 1.0,
            "seed": seed + index,
        }
        response: Any = teacher.endpoint.call("/v1/completions", body)
        try:
            choice = response["choices"][0]
            ids = [*given, *tokenizer.encode(choice["text"], add_special_tokens=False)]
        except (KeyError, IndexError, TypeError):
            raise EngineFailed(
                f"{teacher.endpoint.url} does not complete prompts: give a server with /v1/completions."
            ) from None
        if choice.get("finish_reason") == "stop" and tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
        return ids[:length]

    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        answers = list(pool.map(answer, range(len(rows))))
    lengths = torch.tensor([len(ids) for ids in answers])
    nothing = torch.empty(len(rows), length - 1, 0)
    return {
        "ids": torch.tensor([ids + [0] * (length - len(ids)) for ids in answers], dtype=torch.int32),
        "lengths": lengths,
        "top_ids": nothing.int(),
        "top_logprobs": nothing,
    }


def _prompt_tokens(length: int) -> int:
    return max(1, round(PROMPT_SHARE * length))
