"""Make a model smaller: quantize or prune it, layer by layer, into a folder that other engines read too.

MODEL is a folder or a hub name of an unquantized model. The folder of --out appears when it is complete. It contains a card
with size, memory, speed, perplexity, drift and tasks before and after. An interrupted run continues when the same command is
started again. To measure speed and tasks, both models are served on a port of this machine, one after the other.

--tune FILE trains the compressed model on the output distributions of the original before it is written. This works for
round-to-nearest grids (rtn-int3-g128), pruned weights and smaller shapes. Both models are in memory then, one of them with
the state of an optimizer.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from ridgeline.cli.flags import Given, Parser, check_places, finite, parser_for, whole
from ridgeline.cli.hosted import Hosted, private
from ridgeline.cli.show import Stages, bytes_text
from ridgeline.compress.card import ServedFigures, card, write_card
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.evaluate import Evaluator
from ridgeline.compress.job import Job
from ridgeline.compress.recipes import EXAMPLES, Recipe, read_recipe
from ridgeline.compress.texts import calibration_rows, default_calibration, evaluation_windows, split
from ridgeline.compress.tuned import (
    GRID_RATE,
    MAX_PASSES,
    RATE,
    ROWS,
    STEPS,
    TunedJob,
    Tuning,
    default_rate,
    default_steps,
)
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.core.plural import counted
from ridgeline.core.resolve import resolve
from ridgeline.hardware.probe import probe
from ridgeline.models.hub import resolve_model, shipped_model
from ridgeline.quality.drift import Drift
from ridgeline.quality.served import Endpoint, decode_rate
from ridgeline.quality.tasks import Question, ask, count, read_tasks, shipped_tasks
from ridgeline.quality.texts import read_texts
from ridgeline.text.tokenizer import Tokenizer

LENGTH = 512
TOKENS = 65_536
JUDGED = 16_384
SPEED_TOKENS = 128
SPEED_PROMPT = 64


def parser() -> Parser:
    found = parser_for("compress", __doc__ or "", ())
    found.add_argument("--recipe", metavar="NAME", help="compression recipe; --recipe help lists examples")
    found.add_argument("--out", metavar="FOLDER", help="folder for the compressed model; it must not exist")
    found.add_argument("--device", metavar="NAME", help="device for the computation: auto, cpu or cuda (default: auto)")
    texts = found.add_argument_group("texts")
    texts.add_argument(
        "--calibration",
        dest="sample",
        metavar="FILE",
        help='calibration texts: text file, or JSON lines with the key "text" (default: a shipped sample)',
    )
    texts.add_argument("--calibration-tokens", type=whole, metavar="N", help=f"calibration tokens (default: {TOKENS})")
    texts.add_argument("--length", type=whole, metavar="N", help=f"tokens per row (default: {LENGTH})")
    texts.add_argument(
        "--text", metavar="FILE", help="texts to measure drift on (default: every fourth calibration text)"
    )
    texts.add_argument(
        "--judged-tokens", type=whole, metavar="N", help=f"tokens to measure drift on, 0: none (default: {JUDGED})"
    )
    trained = found.add_argument_group("training")
    trained.add_argument(
        "--tune", metavar="FILE", help="texts for training after the compression (default: no training)"
    )
    trained.add_argument(
        "--tune-steps",
        type=whole,
        metavar="N",
        help=f"training steps (default: {STEPS}, or {MAX_PASSES} passes over the texts)",
    )
    trained.add_argument(
        "--tune-rows", type=whole, metavar="N", help=f"rows of --length tokens per step (default: {ROWS})"
    )
    trained.add_argument(
        "--tune-rate",
        type=finite,
        metavar="X",
        help=f"learning rate (default: {RATE}; {GRID_RATE} for rounded weights)",
    )
    served = found.add_argument_group("measurement")
    served.add_argument(
        "--tasks",
        metavar="FILE",
        help="JSON lines with questions and their answers, or none (default: shipped questions for the shipped model)",
    )
    served.add_argument(
        "--speed-tokens",
        type=whole,
        metavar="N",
        help=f"tokens per answer when speed is measured, 0: no measurement (default: {SPEED_TOKENS})",
    )
    return found


def run(given: Given) -> int:
    rest = vars(given.rest)
    if rest.get("recipe") in (None, "help"):
        return _recipes(asked="recipe" in rest)
    if "out" not in rest:
        raise ConfigError("The folder for the result is missing: give --out FOLDER.", param="out")
    check_places(rest, "out", folder=True)
    out = Path(rest["out"])
    source = Checkpoint(resolve_model(ModelConfig(model=given.flags.get("model", ""))))
    recipe = read_recipe(rest["recipe"])
    device = _device(given.flags.get("device", "auto"))
    _check_counts(rest, source.spec.max_len)
    tokens = rest.get("speed_tokens", SPEED_TOKENS)
    questions = _questions(source, rest.get("tasks"))
    texts = Texts(source, recipe, rest)
    console = Console(stderr=True)
    tuning = _tuning(source, recipe, texts.length, rest)
    job = (
        TunedJob(source, recipe, texts.rows, tuning, out, device)
        if tuning
        else Job(source, recipe, texts.rows, out, device)
    )
    with Stages(console) as stages:
        try:
            folder = job.build(stages)
            pair = source, Checkpoint(folder)
            drift = _judge(pair, texts, stages, device)
            served = _serve(pair, device, _Asked(texts.prompt, tokens, questions), stages)
        except KeyboardInterrupt:
            console.print("stopped; run the same command again to continue", highlight=False)
            raise
        trained = _trained(job, tuning, rest["tune"]) if tuning and isinstance(job, TunedJob) else None
        found = card(recipe, pair, texts.said, drift, served, trained)
        write_card(folder, out.name, source.folder, found)
        job.publish()
    _show(Console(), found, out)
    return 0


def _check_counts(rest: dict[str, Any], longest: int) -> None:
    """Raise ConfigError for a number that cannot be meant. longest: tokens of the model's context."""
    bounds = {
        "calibration_tokens": (1, "1 or more"),
        "judged_tokens": (0, "0 for none, or more"),
        "speed_tokens": (0, "0 for none, or more"),
        "tune_steps": (1, "1 or more"),
        "tune_rows": (1, "1 or more"),
    }
    for name, (least, words) in bounds.items():
        if name in rest and rest[name] < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {rest[name]}: give {words}.", param=name)
    length = rest.get("length", min(LENGTH, longest))
    if length < 64:
        raise ConfigError(
            f"--length is {length}: give 64 or more, because shorter rows calibrate poorly.", param="length"
        )
    if length > longest:
        raise ConfigError(f"--length is {length}: give at most {longest}, the context of the model.", param="length")


def _device(wanted: str) -> torch.device:
    """Where layers run: on a GPU if there is one and nothing else was said."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device is {wanted!r}: give auto, cpu or cuda.", param="device")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no GPU: use --device cpu.", param="device")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _questions(source: Checkpoint, named: str | None) -> list[Question]:
    """What is asked of both models: the shipped model is asked what it was trained for, unless something else is named."""
    if named == "none" or (named is None and source.folder.resolve() != shipped_model().resolve()):
        return []
    return read_tasks(shipped_tasks() if named is None else Path(named))


class Texts:
    """Rows to calibrate with, and windows to judge by."""

    def __init__(self, source: Checkpoint, recipe: Recipe, rest: dict[str, Any]) -> None:
        length = self.length = min(rest.get("length", LENGTH), source.spec.max_len)
        tokenizer = Tokenizer.load(source.folder)
        path = Path(rest["sample"]) if "sample" in rest else default_calibration()
        given, judging = split(read_texts(path))
        if "text" in rest:
            given, judging = [*given, *judging], read_texts(Path(rest["text"]))

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=True)

        tokens = rest.get("calibration_tokens", TOKENS) if recipe.needs_texts else 0
        self.rows = calibration_rows(given, encode, length, tokens)
        self.windows = evaluation_windows(judging, encode, length, rest.get("judged_tokens", JUDGED))
        self.prompt = encode(judging[0])[:SPEED_PROMPT]
        name = path.name if "sample" in rest else "the shipped sample"
        self.said = {"texts": name, "tokens": sum(map(len, self.rows)), "length": length}


def _tuning(source: Checkpoint, recipe: Recipe, length: int, rest: dict[str, Any]) -> Tuning | None:
    """What is trained on, if anything is."""
    if "tune" not in rest:
        if odd := next((name for name in ("tune_steps", "tune_rows", "tune_rate") if name in rest), None):
            raise ConfigError(f"--{odd.replace('_', '-')} applies to training: give --tune FILE.", param=odd)
        return None
    tokenizer = Tokenizer.load(source.folder)
    ids = [one for text in read_texts(Path(rest["tune"])) for one in tokenizer.encode(text, add_special_tokens=True)]
    rows = rest.get("tune_rows", ROWS)
    steps = rest["tune_steps"] if "tune_steps" in rest else default_steps(len(ids), max(1, rows), length)
    return Tuning(torch.tensor(ids), length, steps, rows, rest.get("tune_rate", default_rate(recipe)))


def _trained(job: TunedJob, tuning: Tuning, texts: str) -> dict[str, Any]:
    counts = {"unique_tokens": len(tuning.ids), "tokens": tuning.tokens, "steps": tuning.steps}
    return {"texts": Path(texts).name, **counts, "loss": job.loss}


def _judge(pair: tuple[Checkpoint, Checkpoint], texts: Texts, stages: Stages, device: torch.device) -> Drift | None:
    source, result = pair
    if not texts.windows:
        return None
    before, after = len(source.spec.layers), len(result.spec.layers)
    judge = Evaluator(source, texts.windows, lambda done: stages("judging", done, before + after), device)
    return judge.measure(result, lambda done: stages("judging", before + done, before + after))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What both models are asked when they are served. prompt: token ids of a timed answer of so many tokens."""

    prompt: list[int]
    tokens: int
    questions: list[Question]


def _serve(
    pair: tuple[Checkpoint, Checkpoint], device: torch.device, asked: _Asked, stages: Stages
) -> ServedFigures | None:
    """Speed and tasks of both; None if neither is wanted, or if one of them cannot be served here."""
    if not asked.tokens and not asked.questions:
        return None
    rates, right = [], []
    try:
        for one in pair:
            flags = {"model": str(one.folder), "device": device.type, "quantization": ""}
            with Hosted(private(resolve(flags, environ=os.environ)), stages) as url:
                endpoint = Endpoint(url)
                if asked.tokens:
                    rates.append(decode_rate(endpoint, asked.prompt, asked.tokens))
                right.append(ask(endpoint, asked.questions, stages))
    except RidgelineError as error:
        print(f"ridgeline: Speed and tasks are not measured, because serving failed: {error.message}", file=sys.stderr)
        return None
    speed = (rates[0], rates[1]) if asked.tokens else None
    tally = count(asked.questions, right[1], right[0]) if asked.questions else None
    return ServedFigures(probe().device(device.type).name, speed, tally)


def _recipes(*, asked: bool) -> int:
    width = max(map(len, EXAMPLES))
    lines = [f"  {name:{width}}  {text}" for name, text in EXAMPLES.items()]
    lines = [
        "recipes:",
        *lines,
        "",
        "Other bits (3, 4, 8), groups (g32, g64, channel), shares and patterns are named in the same way.",
    ]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    if not asked:
        raise ConfigError("The recipe is missing: give --recipe NAME.", param="recipe")
    return 0


def _show(console: Console, found: dict[str, Any], out: Path) -> None:
    table = Table(Column("", no_wrap=True), "before", "after", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    sizes, memory, quality = found["size_bytes"], found["memory_bytes"], found["quality"]
    table.add_row("weight files", bytes_text(sizes["before"]), bytes_text(sizes["after"]))
    if memory["before"] is not None and memory["after"] is not None:
        table.add_row("weights in memory", bytes_text(memory["before"]), bytes_text(memory["after"]))
    if quality is not None:
        change = f"{quality['perplexity_change']['value']:+.2%}"
        perplexity = f"{quality['perplexity']['value']:.4f} ({change})"
        table.add_row("perplexity", f"{quality['perplexity_reference']['value']:.4f}", perplexity)
        table.add_row("KL, nats per token", "", f"{quality['kl']['value']:.5f}")
        table.add_row("same most probable token", "", f"{quality['top1']['value']:.2%}")
    if (speed := found["speed"]) is not None:
        before, after = (f"{speed['tok_s'][when]:,.1f}" for when in ("before", "after"))
        table.add_row("tokens/s of one request", before, after)
    if (tasks := found["tasks"]) is not None:
        before, after = (f"{tasks[name]['value']:.1%}" for name in ("task_accuracy_reference", "task_accuracy"))
        table.add_row(f"correct answers to {counted(tasks['questions'], 'question')}", before, after)
    console.print(table)
    console.print(f"\n[dim]written to {out}[/dim]", highlight=False)
