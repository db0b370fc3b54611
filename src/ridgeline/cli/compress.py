"""Make a model smaller: quantize or prune it, layer by layer, into a folder that other engines read too.

MODEL is a folder or a hub name in floating point. The folder that --out names appears when it is whole, with a card of size,
memory, perplexity and drift before and after; an interrupted run goes on where it stopped when it is started again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.cli.flags import Given, Parser, parser_for
from ridgeline.cli.show import Stages, bytes_text
from ridgeline.compress.card import card, write_card
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.evaluate import Judge
from ridgeline.compress.job import Job
from ridgeline.compress.recipes import EXAMPLES, Recipe, read_recipe
from ridgeline.compress.texts import calibration_rows, default_calibration, judging_windows, split
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.models.hub import resolve_model
from ridgeline.quality.drift import Drift
from ridgeline.quality.texts import read_texts
from ridgeline.text.tokenizer import Tokenizer

LENGTH = 512
TOKENS = 65_536
JUDGED = 16_384


def parser() -> Parser:
    found = parser_for("compress", __doc__ or "", ())
    found.add_argument("--recipe", metavar="NAME", help="what to do; --recipe help lists them")
    found.add_argument("--out", metavar="FOLDER", help="where the smaller model goes; it must not exist")
    found.add_argument("--device", metavar="NAME", help="where layers run: auto, cpu or cuda (default: auto)")
    texts = found.add_argument_group("texts")
    texts.add_argument(
        "--calibration", metavar="FILE", help='a text, or JSON lines with "text" (default: a sample of ours)'
    )
    texts.add_argument(
        "--calibration-tokens", type=int, metavar="N", help=f"tokens to calibrate with (default: {TOKENS})"
    )
    texts.add_argument("--length", type=int, metavar="N", help=f"tokens of a row (default: {LENGTH})")
    texts.add_argument("--text", metavar="FILE", help="texts to judge by (default: every fourth of the calibration's)")
    texts.add_argument(
        "--judged-tokens", type=int, metavar="N", help=f"tokens to judge by, 0: none (default: {JUDGED})"
    )
    return found


def run(given: Given) -> int:
    rest = vars(given.rest)
    if rest.get("recipe") in (None, "help"):
        return _recipes(asked="recipe" in rest)
    if "out" not in rest:
        raise ConfigError("there is no place for the result: give --out FOLDER.", param="out")
    out = Path(rest["out"])
    source = Checkpoint(resolve_model(ModelConfig(model=given.flags.get("model", ""))))
    recipe = read_recipe(rest["recipe"])
    device = _device(given.flags.get("device", "auto"))
    texts = Texts(source, recipe, rest)
    console = Console(stderr=True)
    with Stages(console) as stages:
        try:
            Job(source, recipe, texts.rows, out, device).run(stages)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on behind the last layer that is done", highlight=False)
            raise
        result = Checkpoint(out)
        found = card(recipe, source, result, texts.said, _judge((source, result), texts, stages, device))
        write_card(out, source.folder, found)
    _show(Console(), found, out)
    return 0


def _device(wanted: str) -> torch.device:
    """Where layers run: on a GPU if there is one and nothing else was said."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device is {wanted!r}: give auto, cpu or cuda.", param="device")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch sees no GPU here: use --device cpu.", param="device")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


class Texts:
    """Rows to calibrate with, and windows to judge by."""

    def __init__(self, source: Checkpoint, recipe: Recipe, rest: dict[str, Any]) -> None:
        length = min(rest.get("length", LENGTH), source.spec.max_len)
        if length < 64:
            raise ConfigError(f"--length is {length}: rows of fewer than 64 tokens say too little.", param="length")
        tokenizer = Tokenizer.load(source.folder)
        path = Path(rest["calibration"]) if "calibration" in rest else default_calibration()
        given, judging = split(read_texts(path))
        if "text" in rest:
            given, judging = [*given, *judging], read_texts(Path(rest["text"]))

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=True)

        tokens = rest.get("calibration_tokens", TOKENS) if recipe.needs_texts else 0
        self.rows = calibration_rows(given, encode, length, tokens)
        self.windows = judging_windows(judging, encode, length, rest.get("judged_tokens", JUDGED))
        name = path.name if "calibration" in rest else "the sample that comes with ridgeline"
        self.said = {"texts": name, "tokens": sum(map(len, self.rows)), "length": length}


def _judge(pair: tuple[Checkpoint, Checkpoint], texts: Texts, stages: Stages, device: torch.device) -> Drift | None:
    source, result = pair
    if not texts.windows:
        return None
    before, after = len(source.spec.layers), len(result.spec.layers)
    judge = Judge(source, texts.windows, lambda done: stages("judging", done, before + after), device)
    return judge.measure(result, lambda done: stages("judging", before + done, before + after))


def _recipes(*, asked: bool) -> int:
    width = max(map(len, EXAMPLES))
    lines = [f"  {name:{width}}  {text}" for name, text in EXAMPLES.items()]
    lines = ["recipes:", *lines, "", "Other bits (3, 4, 8), groups (g32, g64, channel), shares and patterns go alike."]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    if not asked:
        raise ConfigError("there is no recipe: give --recipe NAME.", param="recipe")
    return 0


def _show(console: Console, found: dict[str, Any], out: Path) -> None:
    table = Table("", "before", "after", box=None, pad_edge=False, padding=(0, 2, 0, 0))
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
    console.print(table)
    console.print(f"\n[dim]written to {out}[/dim]", highlight=False)
