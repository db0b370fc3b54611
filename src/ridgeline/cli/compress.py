"""Make a model smaller: quantize or prune it, layer by layer. Other engines can read the resulting folder.

MODEL is a folder or a hub name of an unquantized model. The folder of --out appears when it is complete. It contains a card
with size, memory, speed, perplexity, drift and task accuracy before and after. To continue an interrupted run, start the same
command again. To measure speed and tasks, both models are served on a port of this machine, one after the other.

--tune FILE trains the compressed model on the output distributions of the original before it is written. Training starts from
the result of the recipe and keeps its layout: codes and scales, zeros, or the smaller shape. Both models are in memory during
training, one of them with its optimizer state. The recipe distill trains a model of any shape, and medusa, recurrent and draft
train what `ridgeline serve MODEL --speculate` drafts with.
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

from ridgeline.cli.drafter import train
from ridgeline.cli.flags import Arguments, Parser, check_output_paths, finite_number, parser_for, whole_number
from ridgeline.cli.hosted import Hosted, private
from ridgeline.cli.progress import find_model
from ridgeline.cli.show import Stages, announcer, bytes_text
from ridgeline.cli.students import add_options, check_options, student_of, teacher_of
from ridgeline.compress.card import ServedFigures, card, write_card
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.drafter_job import KINDS
from ridgeline.compress.evaluate import Evaluator
from ridgeline.compress.job import Job
from ridgeline.compress.recipes import DRAFTERS, EXAMPLES, Recipe, read_recipe
from ridgeline.compress.student import check_student
from ridgeline.compress.texts import calibration_rows, default_calibration, evaluation_windows, split
from ridgeline.compress.tuned import (
    FITTED_RATE,
    GRID_RATE,
    INT8_RATE,
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
from ridgeline.models.hub import shipped_model
from ridgeline.quality.drift import Drift
from ridgeline.quality.served import Endpoint, decode_rate
from ridgeline.quality.tasks import Question, ask, count, read_tasks, shipped_tasks
from ridgeline.quality.texts import read_texts
from ridgeline.text.tokenizer import Tokenizer

ROW_TOKENS = 512
CALIBRATION_TOKENS = 65_536
DRIFT_TOKENS = 16_384
SPEED_TOKENS = 128
SPEED_PROMPT = 64
PROBE_TOKENS = 1024
"""Tokens of the training texts that a student's tokenizer must encode alike."""


def parser() -> Parser:
    parser = parser_for("compress", __doc__ or "", ())
    parser.add_argument("--recipe", metavar="NAME", help="compression recipe; --recipe help lists examples")
    parser.add_argument("--out", metavar="FOLDER", help="folder for the compressed model; it must not exist")
    parser.add_argument(
        "--device", metavar="NAME", help="device for the computation: auto, cpu or cuda (default: auto)"
    )
    texts = parser.add_argument_group("texts")
    texts.add_argument(
        "--calibration",
        dest="sample",
        metavar="FILE",
        help='calibration texts: text file, or JSON lines with the key "text" (default: a shipped sample)',
    )
    texts.add_argument(
        "--calibration-tokens",
        type=whole_number,
        metavar="N",
        help=f"calibration tokens (default: {CALIBRATION_TOKENS})",
    )
    texts.add_argument("--length", type=whole_number, metavar="N", help=f"tokens per row (default: {ROW_TOKENS})")
    texts.add_argument(
        "--text", metavar="FILE", help="texts to measure drift on (default: every fourth calibration text)"
    )
    texts.add_argument(
        "--judged-tokens",
        type=whole_number,
        metavar="N",
        help=f"tokens to measure drift on, 0: none (default: {DRIFT_TOKENS})",
    )
    _add_training(parser)
    add_options(parser)
    measurement = parser.add_argument_group("measurement")
    measurement.add_argument(
        "--tasks",
        metavar="FILE",
        help="JSON lines with questions and their answers, or the word none (default: shipped questions for the shipped model)",
    )
    measurement.add_argument(
        "--speed-tokens",
        type=whole_number,
        metavar="N",
        help=f"tokens per answer when speed is measured, 0: no measurement (default: {SPEED_TOKENS})",
    )
    return parser


def _add_training(parser: Parser) -> None:
    training = parser.add_argument_group("training")
    training.add_argument(
        "--tune", metavar="FILE", help="texts for training after the compression (default: no training)"
    )
    training.add_argument(
        "--tune-steps",
        type=whole_number,
        metavar="N",
        help=f"training steps (default: {STEPS}, or {MAX_PASSES} passes over the texts)",
    )
    training.add_argument(
        "--tune-rows", type=whole_number, metavar="N", help=f"rows of --length tokens per step (default: {ROWS})"
    )
    training.add_argument(
        "--tune-rate",
        type=finite_number,
        metavar="X",
        help=f"learning rate (default: {RATE}; {FITTED_RATE} for gqa-N-pca, {GRID_RATE} for rounded weights, {INT8_RATE} for those "
        "of 8 bits)",
    )


def run(args: Arguments) -> int:
    options = vars(args.options)
    if options.get("recipe") in (None, "help"):
        return _recipes(requested="recipe" in options)
    if "out" not in options:
        raise ConfigError("The folder for the result is missing: give --out FOLDER.", param="out")
    check_output_paths(options, "out", folder=True)
    out = Path(options["out"])
    folder = find_model(ModelConfig(model=args.flags.get("model", "")), announcer("text"))
    source = Checkpoint(folder, needs_weights="teacher_url" not in options)
    device = _device(args.flags.get("device", "auto"))
    _check_counts(options, source.spec.max_len)
    for kind in KINDS:
        if options["recipe"] == kind:
            return train(source, kind, options, min(options.get("length", ROW_TOKENS), source.spec.max_len), device)
    recipe = read_recipe(options["recipe"])
    check_options(recipe.name, options)
    tokens = options.get("speed_tokens", SPEED_TOKENS)
    questions = _questions(source, options.get("tasks"))
    texts = Texts(source, recipe, options)
    console = Console(stderr=True)
    tuning = _tuning(source, recipe, texts.length, options)
    job = (
        TunedJob(source, recipe, texts.rows, tuning, out, device)
        if tuning
        else Job(source, recipe, texts.rows, out, device)
    )
    with Stages(console) as stages:
        try:
            folder = job.build(stages)
            pair = source, Checkpoint(folder)
            drift = _measure_drift(pair, texts, stages, device)
            served = _measure_served(pair, device, _Workload(texts.prompt, tokens, questions), stages)
        except KeyboardInterrupt:
            console.print("stopped; run the same command again to continue", highlight=False)
            raise
        trained = _trained(job, tuning, options["tune"]) if tuning and isinstance(job, TunedJob) else None
        contents = card(recipe, pair, texts.summary, drift, served, trained)
        write_card(folder, out.name, source.folder, contents)
        job.publish()
    _show(Console(), contents, out)
    if not source.files:
        print(
            f"To measure the drift from the served original: ridgeline compare {options['teacher_url']} {out} --text FILE"
        )
    return 0


def _check_counts(options: dict[str, Any], max_len: int) -> None:
    """Raise ConfigError for a number that is out of range. max_len: context of the model in tokens."""
    bounds = {
        "calibration_tokens": (1, "1 or more"),
        "judged_tokens": (0, "0 for none, or more"),
        "speed_tokens": (0, "0 for none, or more"),
        "tune_steps": (1, "1 or more"),
        "tune_rows": (1, "1 or more"),
    }
    for name, (minimum, remedy) in bounds.items():
        if name in options and options[name] < minimum:
            raise ConfigError(f"--{name.replace('_', '-')} is {options[name]}: give {remedy}.", param=name)
    length = options.get("length", min(ROW_TOKENS, max_len))
    if length < 64:
        raise ConfigError(
            f"--length is {length}: give 64 or more, because shorter rows calibrate poorly.", param="length"
        )
    if length > max_len:
        raise ConfigError(f"--length is {length}: give at most {max_len}, the context of the model.", param="length")


def _device(name: str) -> torch.device:
    """Device that the layers run on. "auto" is the GPU if there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device is {name!r}: give auto, cpu or cuda.", param="device")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no GPU: use --device cpu.", param="device")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _questions(source: Checkpoint, option: str | None) -> list[Question]:
    """Questions for both models: those of --tasks. The default is the shipped questions for the shipped model, else none."""
    if option == "none" or (option is None and source.folder.resolve() != shipped_model().resolve()):
        return []
    return read_tasks(shipped_tasks() if option is None else Path(option))


class Texts:
    """Token rows for calibration, and windows for measuring drift."""

    def __init__(self, source: Checkpoint, recipe: Recipe, options: dict[str, Any]) -> None:
        length = self.length = min(options.get("length", ROW_TOKENS), source.spec.max_len)
        tokenizer = Tokenizer.load(source.folder)
        path = Path(options["sample"]) if "sample" in options else default_calibration()
        texts, drift_texts = split(read_texts(path))
        if "text" in options:
            texts, drift_texts = [*texts, *drift_texts], read_texts(Path(options["text"]))

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=True)

        tokens = options.get("calibration_tokens", CALIBRATION_TOKENS) if recipe.needs_texts else 0
        self.rows = calibration_rows(texts, encode, length, tokens)
        self.windows = evaluation_windows(drift_texts, encode, length, options.get("judged_tokens", DRIFT_TOKENS))
        self.prompt = encode(drift_texts[0])[:SPEED_PROMPT]
        name = path.name if "sample" in options else "the shipped sample"
        self.summary = {"texts": name, "tokens": sum(map(len, self.rows)), "length": length}


def _tuning(source: Checkpoint, recipe: Recipe, length: int, options: dict[str, Any]) -> Tuning | None:
    """Training configuration, or None without --tune."""
    if "tune" not in options:
        if unused := next((name for name in ("tune_steps", "tune_rows", "tune_rate") if name in options), None):
            raise ConfigError(f"--{unused.replace('_', '-')} applies to training: give --tune FILE.", param=unused)
        return None
    tokenizer = Tokenizer.load(source.folder)
    ids = [
        token for text in read_texts(Path(options["tune"])) for token in tokenizer.encode(text, add_special_tokens=True)
    ]
    rows = options.get("tune_rows", ROWS)
    steps = options["tune_steps"] if "tune_steps" in options else default_steps(len(ids), max(1, rows), length)
    student = student_of(options)
    if student is not None:
        check_student(student, source, length, tokenizer.decode(ids[:PROBE_TOKENS], skip_special_tokens=True))
    rate = options.get("tune_rate", default_rate(recipe))
    return Tuning(torch.tensor(ids), length, steps, rows, rate, student, teacher_of(options))


def _trained(job: TunedJob, tuning: Tuning, texts: str) -> dict[str, Any]:
    counts = {"unique_tokens": len(tuning.ids), "tokens": tuning.tokens, "steps": tuning.steps}
    return {"texts": Path(texts).name, **counts, "loss": job.loss}


def _measure_drift(
    pair: tuple[Checkpoint, Checkpoint], texts: Texts, stages: Stages, device: torch.device
) -> Drift | None:
    source, result = pair
    if not texts.windows or not source.files:
        return None
    before, after = len(source.spec.layers), len(result.spec.layers)
    judge = Evaluator(source, texts.windows, lambda done: stages("judging", done, before + after), device)
    return judge.measure(result, lambda done: stages("judging", before + done, before + after))


@dataclass(frozen=True, slots=True)
class _Workload:
    """Requests that are sent to both models while they are served."""

    prompt: list[int]
    """Token ids of the timed request."""
    tokens: int
    """Output tokens of the timed request; 0: speed is not measured."""
    questions: list[Question]


def _measure_served(
    pair: tuple[Checkpoint, Checkpoint], device: torch.device, workload: _Workload, stages: Stages
) -> ServedFigures | None:
    """Measure speed and task accuracy of both models. None if neither is requested, or if a model cannot be served."""
    if not pair[0].files or (not workload.tokens and not workload.questions):
        return None
    rates, correct = [], []
    try:
        for checkpoint in pair:
            flags = {"model": str(checkpoint.folder), "device": device.type, "quantization": ""}
            with Hosted(private(resolve(flags, environ=os.environ)), stages) as url:
                endpoint = Endpoint(url)
                if workload.tokens:
                    rates.append(decode_rate(endpoint, workload.prompt, workload.tokens))
                correct.append(ask(endpoint, workload.questions, stages))
    except RidgelineError as error:
        print(f"ridgeline: Speed and tasks are not measured, because serving failed: {error.message}", file=sys.stderr)
        return None
    speed = (rates[0], rates[1]) if workload.tokens else None
    tally = count(workload.questions, correct[1], correct[0]) if workload.questions else None
    return ServedFigures(probe().device(device.type).name, speed, tally)


def _recipes(*, requested: bool) -> int:
    listed = EXAMPLES | DRAFTERS
    width = max(map(len, listed))
    lines = [f"  {name:{width}}  {text}" for name, text in listed.items()]
    lines = [
        "recipes:",
        *lines,
        "",
        "Names for other bits (3, 4, 8), groups (g32, g64, channel), shares, patterns and counts follow the same scheme.",
    ]
    print("\n".join(lines), file=sys.stdout if requested else sys.stderr)
    if not requested:
        raise ConfigError("The recipe is missing: give --recipe NAME.", param="recipe")
    return 0


def _show(console: Console, contents: dict[str, Any], out: Path) -> None:
    table = Table(Column("", no_wrap=True), "before", "after", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    sizes, memory, quality = contents["size_bytes"], contents["memory_bytes"], contents["quality"]
    before = "" if sizes["before"] is None else bytes_text(sizes["before"])
    table.add_row("weight files", before, bytes_text(sizes["after"]))
    if memory["before"] is not None and memory["after"] is not None:
        table.add_row("weights in memory", bytes_text(memory["before"]), bytes_text(memory["after"]))
    cache = contents["kv_bytes_per_token"]
    if cache["before"] != cache["after"]:
        table.add_row("KV cache per token", bytes_text(cache["before"]), bytes_text(cache["after"]))
    if quality is not None:
        change = f"{quality['perplexity_change']['value']:+.2%}"
        perplexity = f"{quality['perplexity']['value']:.4f} ({change})"
        table.add_row("perplexity", f"{quality['perplexity_reference']['value']:.4f}", perplexity)
        table.add_row("KL, nats per token", "", f"{quality['kl']['value']:.5f}")
        table.add_row("same most probable token", "", f"{quality['top1']['value']:.2%}")
    if (speed := contents["speed"]) is not None:
        before, after = (f"{speed['tok_s'][when]:,.1f}" for when in ("before", "after"))
        table.add_row("tokens/s of one request", before, after)
    if (tasks := contents["tasks"]) is not None:
        before, after = (f"{tasks[name]['value']:.1%}" for name in ("task_accuracy_reference", "task_accuracy"))
        table.add_row(f"correct answers to {counted(tasks['questions'], 'question')}", before, after)
    console.print(table)
    console.print(f"\n[dim]written to {out}[/dim]", highlight=False)
