"""Measure a model in steps (rungs), each faster than the one before: eager operations, compiled operations (CUDA graphs on a GPU),
int8, int4, speculation. Reports tokens per second of one request, bytes of weights, and drift from the first rung on fixed texts.

The rungs run one after the other in this process. Run nothing else on the machine. On a CPU, eager means PyTorch operations.
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
from ridgeline.cli.flags import Arguments, Parser, check_output_paths, parser_for, whole_number
from ridgeline.cli.progress import find_model
from ridgeline.cli.serve import resolve_arguments
from ridgeline.cli.show import Stages, announcer, bytes_text
from ridgeline.compress.texts import default_calibration, evaluation_windows, split
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.core.sampling import MAX_LOGPROBS
from ridgeline.hardware.probe import probe
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.planner.svg import document
from ridgeline.quality.ladder import RungWorkload, chart, measure_rung, rows, rungs
from ridgeline.quality.texts import read_texts
from ridgeline.speculation.build import memory_of_drafters
from ridgeline.text.tokenizer import Tokenizer

TOKENS = {"prompts": 8, "prompt-tokens": 128, "answer-tokens": 128, "repeats": 3, "judged-tokens": 8192}
_HELP = {
    "prompts": "number of prompts; each prompt is the beginning of a text",
    "prompt-tokens": "tokens per prompt",
    "answer-tokens": "tokens per answer",
    "repeats": "answers to each prompt",
    "judged-tokens": "tokens to measure drift on",
}
FORMATS = "int8,int4"
WINDOW = 512
ROWS = 16
"""Requests that fit into the KV cache. The texts for measuring drift are scored concurrently."""


def parser() -> Parser:
    parser = parser_for("ladder", __doc__ or "", (EngineConfig,))
    parser.add_argument(
        "--dtype", metavar="NAME", help="dtype of the unquantized rungs: auto, bfloat16, float16 or float32"
    )
    parser.add_argument(
        "--formats", metavar="NAMES", help=f"number formats of the quantized rungs (default: {FORMATS})"
    )
    parser.add_argument("--text", metavar="FILE", help="texts for prompts and drift (default: shipped texts)")
    for name, default in TOKENS.items():
        parser.add_argument(f"--{name}", type=whole_number, metavar="N", help=f"{_HELP[name]} (default: {default})")
    parser.add_argument("--json", action="store_true", default=False, help="print a JSON list instead of a table")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON to a file")
    parser.add_argument("--plot", metavar="FILE", help="write a chart of speed over size as SVG")
    return parser


def run(args: Arguments) -> int:
    options, resolved = vars(args.options), resolve_arguments(args)
    check_output_paths(options, "out", "plot")
    if "enforce_eager" in args.flags:
        raise ConfigError("The first rung is always eager: leave --enforce-eager out.", param="enforce_eager")
    counts = {name: _count(name, options.get(name.replace("-", "_"), default)) for name, default in TOKENS.items()}
    folder = find_model(resolved.model, announcer("text"))
    checkpoint = read_model(folder)[0]
    if checkpoint.quantization:
        raise ConfigError(
            f"The checkpoint {folder} is already quantized ({checkpoint.quantization}): give the unquantized model."
        )
    task = _task(folder, Path(options["text"]) if "text" in options else None, counts, checkpoint.max_len)
    if "prompts" in options and len(task.prompts) < counts["prompts"]:
        few = f"The texts give {counted(len(task.prompts), 'prompt')} of {counted(counts['prompt-tokens'], 'token')}"
        raise ConfigError(f"{few}: lower --prompts, or give another --text.", param="prompts")
    needed_len = max(len(task.prompts[0]) + task.tokens, *(len(window.ids) for window in task.windows)) + 1
    model = replace(resolved.model, max_model_len=min(needed_len, checkpoint.max_len), quantization="")
    spec = served_spec(checkpoint, model)
    cache_bytes = ROWS * spec.kv_bytes(spec.max_len) * 2
    engine = replace(resolved.engine, kv_cache_memory=resolved.engine.kv_cache_memory or cache_bytes)
    device = "cuda" if engine.device == "cuda" or (engine.device == "auto" and torch.cuda.is_available()) else "cpu"
    formats = [number_format for number_format in options.get("formats", FORMATS).split(",") if number_format]
    for number_format in formats:
        # Raises for an unknown name before anything is measured.
        served_spec(checkpoint, replace(model, quantization=number_format))
    ladder = rungs(model, engine, formats, "graphs" if device == "cuda" else "compiled")
    last = served_spec(checkpoint, ladder[-1].model)
    drafters = memory_of_drafters(ladder[-1].engine, last, folder, device)[1].bytes
    with Stages(Console(stderr=True)) as stages:
        climbed = [measure_rung(rung, task, stages) for rung in ladder]
    results = rows(climbed, task)
    results[-1]["drafter_bytes"] = drafters
    name = Path(resolved.model.model).name or "ridgeline-14m"
    _report(results, name, args)
    return 0


def _count(name: str, value: int) -> int:
    minimum = 2 if name == "answer-tokens" else 1
    if value < minimum:
        raise ConfigError(f"--{name} is {value}: give {minimum} or more.", param=name)
    return value


def _task(folder: Path, path: Path | None, counts: dict[str, int], max_len: int) -> RungWorkload:
    """Prompts and texts to score. Prompts are the beginnings of texts that are long enough."""
    tokenizer = Tokenizer.load(folder)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=True)

    texts = split(read_texts(default_calibration()))[1] if path is None else read_texts(path)
    prompt_tokens, answer_tokens = counts["prompt-tokens"], counts["answer-tokens"]
    if prompt_tokens + answer_tokens >= max_len:
        raise ConfigError(
            f"{prompt_tokens} prompt tokens and {answer_tokens} answer tokens exceed the context of {max_len}: "
            "lower --prompt-tokens."
        )
    beginnings = (tuple(encode(text)[:prompt_tokens]) for text in texts)
    prompts = [prompt for prompt in beginnings if len(prompt) == prompt_tokens][: counts["prompts"]]
    if not prompts:
        raise ConfigError(
            f"No text has {counted(prompt_tokens, 'token')}: lower --prompt-tokens, or give another --text.",
            param="text",
        )
    windows = evaluation_windows(texts, encode, min(WINDOW, max_len - 1), counts["judged-tokens"])
    return RungWorkload(prompts, answer_tokens, counts["repeats"], windows, MAX_LOGPROBS)


def _report(results: list[dict[str, Any]], name: str, args: Arguments) -> None:
    """Add machine, date and version to the results; write and print them."""
    options = vars(args.options)
    machine = probe().device("cpu" if results[0]["device"] == "cpu" else "auto").name
    facts = {"machine": machine, "date": f"{datetime.now(UTC):%Y-%m-%d}", "version": ridgeline.__version__}
    records = [{"row": f"ladder-{name}-{row['rung']}", "model": name} | row | facts for row in results]
    text = json.dumps(records, indent=1)
    if "out" in options:
        Path(options["out"]).write_text(text + "\n", encoding="utf-8")
    if "plot" in options:
        Path(options["plot"]).write_text(document(chart(results, f"{name} on {machine}")), encoding="utf-8")
    if options["json"]:
        print(text)
    else:
        _show(Console(), results)


def _show(console: Console, results: Sequence[dict[str, Any]]) -> None:
    head = ("rung", "tok/s", "speed-up", "weights", "perplexity", "change", "KL", "same token")
    table = Table(*head, box=None, pad_edge=False)
    for row in results:
        size, change = bytes_text(row["weight_bytes"]), f"{row['perplexity_change']:+.2%}"
        cells = (f"{row['tok_s']:.1f}", f"{row['speedup']:.2f}", size, f"{row['perplexity']:.3f}", change)
        table.add_row(row["rung"], *cells, f"{row['kl']:.5f}", f"{row['top1']:.2%}")
    console.print(table)
    last = results[-1]
    console.print(
        f"[dim]Speculation ({last['speculate']}) does not change the distribution of tokens: {last['answers_changed']} of "
        f"{last['answers']} answers differ from those of the previous rung ({counted(last['tokens_compared'], 'token')} compared). "
        f"Its drafters take {bytes_text(last['drafter_bytes'])} more.[/dim]",
        highlight=False,
    )
