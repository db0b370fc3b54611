"""The recipes of `ridgeline compress` that train a drafter: texts, training, and what to do with the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from ridgeline.cli.show import Stages
from ridgeline.cli.students import check_options, student_of
from ridgeline.compress.acceptance import LENGTH, PROMPT
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.drafter_job import HELD_OUT_ROWS, RATE, DrafterJob, DrafterTraining, Kind
from ridgeline.compress.student import check_student
from ridgeline.compress.texts import split
from ridgeline.compress.tuned import ROWS, default_steps
from ridgeline.core.errors import ConfigError
from ridgeline.quality.texts import read_texts
from ridgeline.text.tokenizer import Tokenizer

SHOWN_RANKS = 3


def train(source: Checkpoint, kind: Kind, options: dict[str, Any], length: int, device: torch.device) -> int:
    """Train a drafter for the model `source` as the options say, in rows of `length` tokens. Returns the exit status."""
    check_options(kind, options)
    out, console = Path(options["out"]), Console(stderr=True)
    job = DrafterJob(source, _training(source, kind, options, length), out, device)
    with Stages(console) as stages:
        try:
            job.run(stages)
        except KeyboardInterrupt:
            console.print("stopped; run the same command again to continue", highlight=False)
            raise
    _show(Console(), job, kind, source, out)
    return 0


def _training(source: Checkpoint, kind: Kind, options: dict[str, Any], length: int) -> DrafterTraining:
    tokenizer = Tokenizer.load(source.folder)
    texts, held_out = split(read_texts(Path(options["tune"])))
    if "text" in options:
        texts, held_out = [*texts, *held_out], read_texts(Path(options["text"]))
    student = student_of(options)
    if student is not None:
        check_student(student, source, length, texts[0])
    documents = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    tokens = sum(map(len, documents))
    if tokens < length:
        raise ConfigError(
            f"The texts of --tune have {tokens} tokens to train on, fewer than the {length} of a row: give more text, or lower "
            "--length.",
            param="tune",
        )
    rows = options.get("tune_rows", ROWS)
    steps = options.get("tune_steps", default_steps(tokens, max(1, rows), length))
    measured = _rows([token for text in held_out for token in tokenizer.encode(text, add_special_tokens=True)], length)
    rate = options.get("tune_rate", RATE)
    return DrafterTraining(kind, documents, measured, length, steps, rows, rate, student)


def _rows(ids: list[int], length: int) -> Tensor:
    """Return rows at even distances of held-out text, int64 [at most HELD_OUT_ROWS, tokens]."""
    tokens = min(PROMPT + LENGTH, length)
    count = len(ids) // tokens
    if not count:
        raise ConfigError(
            f"The held-out texts have {len(ids)} tokens, fewer than the {tokens} of a row: give more text with --tune, or other "
            "text with --text.",
            param="text",
        )
    rows = torch.tensor(ids[: count * tokens]).view(count, tokens)
    return rows[:: max(1, count // HELD_OUT_ROWS)][:HELD_OUT_ROWS]


def _show(console: Console, job: DrafterJob, kind: Kind, source: Checkpoint, out: Path) -> None:
    places = {"medusa": "head", "recurrent": "place", "draft": "place"}[kind]
    table = Table(Column(places), "first candidate right", "", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    if kind != "draft":
        table.columns[2].header, table.columns[3].header = "second", "third"
    for place, rates in enumerate(job.accuracies, 1):
        shown = [f"{rate:.1%}" for rate in rates[:SHOWN_RANKS]]
        table.add_row(str(place), *shown, *[""] * (SHOWN_RANKS - len(shown)))
    console.print(table)
    console.print(f"\nloss of the last steps: {job.loss:.4f}; shares are means over held-out, sampled and greedy text")
    console.print(f"[dim]written to {out}; use it with:[/dim]", highlight=False, soft_wrap=True)
    print(f"ridgeline serve {source.folder} --speculate {kind}:{out}")
