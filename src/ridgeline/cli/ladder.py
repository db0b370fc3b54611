"""Measure a model in steps (rungs), each faster than the last: eager operations, compiled ones (CUDA graphs on a GPU), int8,
int4, speculation. Reports tokens per second of one request, bytes of weights, and drift from the first rung on the same texts.

Each rung runs alone in this process; run nothing else on the machine. On a CPU, eager means plain PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import ridgeline
from ridgeline.cli.flags import Given, Parser, check_places, parser_for, whole
from ridgeline.cli.serve import read
from ridgeline.cli.show import Stages, bytes_text
from ridgeline.compress.texts import default_calibration, evaluation_windows, split
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.core.sampling import MAX_LOGPROBS
from ridgeline.hardware.probe import probe
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.planner.svg import document
from ridgeline.quality.ladder import RungWorkload, chart, measure_rung, rows, rungs
from ridgeline.quality.texts import read_texts
from ridgeline.speculation.build import memory_of_drafters
from ridgeline.text.tokenizer import Tokenizer

TOKENS = {"prompts": 8, "prompt-tokens": 128, "answer-tokens": 128, "repeats": 3, "judged-tokens": 8192}
_WORDS = {
    "prompts": "number of prompts, each the beginning of a text",
    "prompt-tokens": "tokens per prompt",
    "answer-tokens": "tokens per answer",
    "repeats": "answers to each prompt",
    "judged-tokens": "tokens to measure drift on",
}
FORMATS = "int8,int4"
LONGEST = 512
ROWS = 16
"""Requests that the cache has room for: the texts that drift is measured on are scored side by side."""


def parser() -> Parser:
    found = parser_for("ladder", __doc__ or "", (EngineConfig,))
    found.add_argument(
        "--dtype", metavar="NAME", help="dtype of the unquantized rungs: auto, bfloat16, float16 or float32"
    )
    found.add_argument("--formats", metavar="NAMES", help=f"number formats of the quantized rungs (default: {FORMATS})")
    found.add_argument("--text", metavar="FILE", help="texts for prompts and drift (default: shipped texts)")
    for name, default in TOKENS.items():
        found.add_argument(f"--{name}", type=whole, metavar="N", help=f"{_WORDS[name]} (default: {default})")
    found.add_argument("--json", action="store_true", default=False, help="print a JSON list instead of a table")
    found.add_argument("--out", metavar="FILE", help="also write the JSON to a file")
    found.add_argument("--plot", metavar="FILE", help="write a chart of speed over size as SVG")
    return found


def run(given: Given) -> int:
    rest, resolved = vars(given.rest), read(given)
    check_places(rest, "out", "plot")
    if "enforce_eager" in given.flags:
        raise ConfigError("The first rung is always eager: leave --enforce-eager out.", param="enforce_eager")
    counts = {name: _count(name, rest.get(name.replace("-", "_"), default)) for name, default in TOKENS.items()}
    folder = resolve_model(resolved.model)
    checkpoint = read_model(folder)[0]
    if checkpoint.quantization:
        raise ConfigError(
            f"The checkpoint {folder} is already quantized ({checkpoint.quantization}): give the unquantized model."
        )
    task = _task(folder, Path(rest["text"]) if "text" in rest else None, counts, checkpoint.max_len)
    if "prompts" in rest and len(task.prompts) < counts["prompts"]:
        few = f"The texts give {counted(len(task.prompts), 'prompt')} of {counted(counts['prompt-tokens'], 'token')}"
        raise ConfigError(f"{few}: lower --prompts, or give another --text.", param="prompts")
    longest = max(len(task.prompts[0]) + task.tokens, *(len(one.ids) for one in task.windows)) + 1
    model = replace(resolved.model, max_model_len=min(longest, checkpoint.max_len), quantization="")
    spec = served_spec(checkpoint, model)
    room = ROWS * spec.kv_bytes(spec.max_len) * 2
    engine = replace(resolved.engine, kv_cache_memory=resolved.engine.kv_cache_memory or room)
    place = "cuda" if engine.device == "cuda" or (engine.device == "auto" and torch.cuda.is_available()) else "cpu"
    formats = [one for one in rest.get("formats", FORMATS).split(",") if one]
    for one in formats:
        served_spec(checkpoint, replace(model, quantization=one))  # refuses names before anything is measured
    ladder = rungs(model, engine, formats, "graphs" if place == "cuda" else "compiled")
    last = served_spec(checkpoint, ladder[-1].model)
    drafters = memory_of_drafters(ladder[-1].engine, last, folder, place)[1].bytes
    with Stages(Console(stderr=True)) as stages:
        climbed = [measure_rung(rung, task, stages) for rung in ladder]
    found = rows(climbed, task)
    found[-1]["drafter_bytes"] = drafters
    name = Path(resolved.model.model).name or "ridgeline-14m"
    _end(found, name, given)
    return 0


def _count(name: str, value: int) -> int:
    least = 2 if name == "answer-tokens" else 1
    if value < least:
        raise ConfigError(f"--{name} is {value}: give {least} or more.", param=name)
    return value


def _task(folder: Path, path: Path | None, counts: dict[str, int], max_len: int) -> RungWorkload:
    """Texts to score, and their beginnings as prompts: those that are long enough."""
    tokenizer = Tokenizer.load(folder)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=True)

    texts = split(read_texts(default_calibration()))[1] if path is None else read_texts(path)
    given, answered = counts["prompt-tokens"], counts["answer-tokens"]
    if given + answered >= max_len:
        raise ConfigError(
            f"{given} prompt tokens and {answered} answer tokens exceed the context of {max_len}: lower --prompt-tokens."
        )
    begun = (tuple(encode(text)[:given]) for text in texts)
    prompts = [one for one in begun if len(one) == given][: counts["prompts"]]
    if not prompts:
        raise ConfigError(
            f"No text has {counted(given, 'token')}: lower --prompt-tokens, or give another --text.", param="text"
        )
    windows = evaluation_windows(texts, encode, min(LONGEST, max_len - 1), counts["judged-tokens"])
    return RungWorkload(prompts, answered, counts["repeats"], windows, MAX_LOGPROBS)


def _end(found: list[dict[str, Any]], name: str, given: Given) -> None:
    """Say who, where and when, and show it all."""
    rest = vars(given.rest)
    machine = probe().device("cpu" if found[0]["device"] == "cpu" else "auto").name
    facts = {"machine": machine, "date": f"{datetime.now(UTC):%Y-%m-%d}", "version": ridgeline.__version__}
    told = [{"row": f"ladder-{name}-{row['rung']}", "model": name} | row | facts for row in found]
    text = json.dumps(told, indent=1)
    if "out" in rest:
        Path(rest["out"]).write_text(text + "\n", encoding="utf-8")
    if "plot" in rest:
        Path(rest["plot"]).write_text(document(chart(found, f"{name} on {machine}")), encoding="utf-8")
    if rest["json"]:
        print(text)
    else:
        _show(Console(), found)


def _show(console: Console, found: Sequence[dict[str, Any]]) -> None:
    head = ("rung", "tok/s", "speed-up", "weights", "perplexity", "change", "KL", "same token")
    table = Table(*head, box=None, pad_edge=False)
    for row in found:
        size, change = bytes_text(row["weight_bytes"]), f"{row['perplexity_change']:+.2%}"
        cells = (f"{row['tok_s']:.1f}", f"{row['speedup']:.2f}", size, f"{row['perplexity']:.3f}", change)
        table.add_row(row["rung"], *cells, f"{row['kl']:.5f}", f"{row['top1']:.2%}")
    console.print(table)
    last = found[-1]
    console.print(
        f"[dim]Speculation ({last['speculate']}) does not change the distribution of tokens: {last['answers_changed']} of "
        f"{last['answers']} answers differ from those of the previous rung ({counted(last['tokens_compared'], 'token')} compared). "
        f"Its drafters take {bytes_text(last['drafter_bytes'])} more.[/dim]",
        highlight=False,
    )
