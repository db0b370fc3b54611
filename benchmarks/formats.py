"""The compression table of a model as the engine serves it: bytes, speed, drift and tasks of every number format and recipe.

    python benchmarks/formats.py --model FOLDER --work FOLDER --device cuda [--tasks FILE] [--out benchmarks/results/FILE.json]

Formats are quantized while loading (`-q`), those of --kv by `--kv-cache-dtype`; recipes are folders that `ridgeline compress` would
write. --work keeps them, and --build-only makes nothing else. Drift is against the unquantized engine on the same texts, over the
most probable tokens of both (quality.drift). tok_s: median of greedy answers, one at a time. tok_s_batch: `batch` requests at once,
prompts included. Rows that the result file has are not measured again. A format that fails is reported at the end, and the others
are measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, provenance, read_rows, timed, write_rows

from ridgeline.cli.hosted import Hosted, private
from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.job import Job
from ridgeline.compress.recipes import read_recipe
from ridgeline.compress.texts import calibration_rows, default_calibration, evaluation_windows
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.resolve import resolve
from ridgeline.core.sampling import MAX_LOGPROBS
from ridgeline.engine.local import LocalEngine
from ridgeline.models.hub import resolve_model
from ridgeline.quality.drift import by_document, measure, token_drift
from ridgeline.quality.ladder import answer
from ridgeline.quality.scores import EngineScorer, Scores
from ridgeline.quality.served import Endpoint
from ridgeline.quality.tasks import ask, count, read_tasks
from ridgeline.quality.texts import read_texts
from ridgeline.text.tokenizer import Tokenizer

TEXTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "heldout.jsonl"
PLAIN = "unquantized"
FORMATS = "fp8,fp8-weight,int8,int4,int3,w8a8,llm-int8"
RECIPES = "awq-int4-g128,gptq-int4-g128,gptq-int3-g128,smoothquant-w8a8,wanda-50,sparsegpt-50,sparsegpt-2:4"
REQUEST = (64, 128)
"""Tokens of a timed request and of its answer."""
CACHE_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody reads."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Scores and speed of an engine."""

    weight_bytes: int
    scores: Sequence[Scores]
    tok_s: float
    tok_s_batch: float


class Table:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = resolve_model(ModelConfig(args.model))
        tokenizer = Tokenizer.load(self.folder)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=True)

        texts = read_texts(args.texts)
        self.windows = evaluation_windows(texts, encode, args.length, args.tokens)
        self.rows = calibration_rows(read_texts(default_calibration()), encode, args.length, args.calibration_tokens)
        beginnings = [tuple(encode(text)[: REQUEST[0]]) for text in texts]
        self.prompts = [ids for ids in beginnings if len(ids) == REQUEST[0]][: args.prompts]
        self.name = Path(args.model).name or "ridgeline-14m"
        self.questions = read_tasks(args.tasks) if args.tasks else []

    def place(self, recipe: str) -> Path:
        return self.args.work / recipe.replace(":", "-")

    def build(self) -> None:
        """Compress by every recipe whose folder is missing."""
        source = Checkpoint(self.folder)
        for recipe in names(self.args.recipes):
            if not self.place(recipe).exists():
                Job(source, read_recipe(recipe), self.rows, self.place(recipe), torch.device(self.args.device)).run(
                    silent
                )
                print(f"built {recipe}", flush=True)

    @cached_property
    def entries(self) -> Mapping[str, ModelConfig]:
        """The models of the table by name, the reference first."""
        kept = str(self.folder)
        models = {PLAIN: ModelConfig(kept)}
        models |= {name: ModelConfig(kept, quantization=name) for name in names(self.args.formats)}
        models |= {f"kv-{name}": ModelConfig(kept, kv_cache_dtype=name) for name in names(self.args.kv)}
        return models | {name: ModelConfig(str(self.place(name))) for name in names(self.args.recipes)}

    def measure(self, model: ModelConfig) -> Measured:
        args = self.args
        cache, rows = CACHE_BYTES[args.device], max(16, args.batch)
        config = EngineConfig(device=args.device, threads=args.threads, kv_cache_memory=cache, max_num_seqs=rows)
        engine = LocalEngine.start(model, config)
        try:
            scores = EngineScorer(model.model, engine).score(self.windows, MAX_LOGPROBS, silent)
            answer(engine, self.prompts[0], REQUEST[1])  # warm-up
            rates = [answer(engine, prompt, REQUEST[1])[1] for prompt in self.prompts for _ in range(args.repeats)]
            vocab, shapes = engine.engine.setup.vocab_size, [REQUEST] * args.batch
            runs = [timed(engine, shapes, vocab) for _ in range(args.repeats + 1)][1:]
            batch = max(run.output_tokens / run.seconds for run in runs)
            weights = engine.engine.setup.facts["weight_bytes"]
            return Measured(weights, scores, statistics.median(rates), batch)
        finally:
            engine.close()

    def tasks(self, model: ModelConfig) -> list[bool]:
        """Which questions a server of the model answers correctly."""
        flags = {"model": model.model, "quantization": model.quantization, "kv_cache_dtype": model.kv_cache_dtype}
        flags["device"] = self.args.device
        flags |= {"kv_cache_memory": str(CACHE_BYTES[self.args.device]), "max_num_seqs": "16"}
        with Hosted(private(resolve(flags, environ=os.environ)), silent) as url:
            return ask(Endpoint(url), self.questions, silent)

    def answered(self, chosen: Sequence[str]) -> dict[str, list[bool]]:
        """Correct answers by name of the model, several servers at a time."""
        if not self.questions:
            return {}
        with ThreadPoolExecutor(self.args.servers) as pool:
            futures = {name: pool.submit(self.tasks, self.entries[name]) for name in chosen}
        for name, future in futures.items():
            if error := future.exception():
                print(f"{name}: no tasks, {error}", file=sys.stderr)
        return {name: future.result() for name, future in futures.items() if future.exception() is None}

    def row(self, name: str, here: Measured, plain: Measured) -> dict[str, Any]:
        parts = [token_drift(*pair) for pair in zip(plain.scores, here.scores, strict=True)]
        drift = measure(by_document(parts, [window.document for window in self.windows]))
        figures = {name: round(estimate.value, 6) + 0.0 for name, estimate in drift.figures.items()}
        intervals = {
            f"{name}_interval": [round(estimate.low, 6) + 0.0, round(estimate.high, 6) + 0.0]
            for name in ("kl", "top1", "perplexity_change")
            if (estimate := drift.figures[name]).low is not None and estimate.high is not None
        }
        shown = ("perplexity", "perplexity_reference", "perplexity_change", "kl", "kl_p99", "top1")
        return {
            "row": f"formats-{self.name}-{name}",
            "model": self.name,
            "method": name,
            "weight_bytes": here.weight_bytes,
            **{key: figures[key] for key in shown},
            **intervals,
            "tok_s": round(here.tok_s, 1),
            "speedup": round(here.tok_s / plain.tok_s, 3),
            "tok_s_batch": round(here.tok_s_batch, 1),
            "speedup_batch": round(here.tok_s_batch / plain.tok_s_batch, 3),
            "batch": self.args.batch,
            "tokens": drift.tokens,
            "documents": drift.documents,
        }

    def tallied(self, right: Mapping[str, list[bool]]) -> Iterator[tuple[str, dict[str, Any]]]:
        """What the tasks add to each row."""
        for name, answers in right.items():
            tally = count(self.questions, answers, right.get(PLAIN))
            figures: dict[str, Any] = {"questions": tally.questions}
            for key, estimate in tally.figures.items():
                figures |= {
                    key: round(estimate.value, 4),
                    f"{key}_interval": [round(estimate.low or 0, 4), round(estimate.high or 0, 4)],
                }
            yield name, figures


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def show(row: Mapping[str, Any]) -> None:
    print(
        f"{row['method']:22}{row['weight_bytes'] / 1e6:8.1f} MB  perplexity {row['perplexity']:8.4f} "
        f"({row['perplexity_change']:+8.2%})  KL {row['kl']:.5f}  top-1 {row['top1']:.4f}  {row['tok_s']:8.1f} tok/s "
        f"({row['speedup']:.2f}), {row['batch']} at once {row['tok_s_batch']:9.1f} ({row['speedup_batch']:.2f})",
        flush=True,
    )


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file (JSON list); without it rows are printed only")
    parser.add_argument("--model", default="", help="model folder; empty is the shipped model")
    parser.add_argument("--work", type=Path, required=True, help="folder for the compressed models")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--formats", default=FORMATS, help="separated by commas")
    parser.add_argument("--recipes", default=RECIPES, help="separated by commas")
    parser.add_argument("--kv", default="", help="formats of the KV cache, separated by commas: rows kv-NAME")
    parser.add_argument("--build-only", action="store_true", help="compress, and measure nothing")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="texts to judge by")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens to judge by")
    parser.add_argument("--calibration-tokens", type=int, default=32_768)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--tasks", type=Path, help="questions with their answers (quality.tasks)")
    parser.add_argument("--servers", type=int, default=4, help="servers that answer questions at the same time")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--commit", default="")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    args = options(words)
    args.work.mkdir(parents=True, exist_ok=True)
    table = Table(args)
    table.build()
    if args.build_only:
        return 0
    machine = cpu_name() if args.device == "cpu" else torch.cuda.get_device_name()
    facts = provenance(machine, args.commit)
    kept = read_rows(args.out) if args.out else []
    done = {row["method"] for row in kept if "questions" in row or not table.questions}
    plain, rows, failed = table.measure(table.entries[PLAIN]), dict[str, dict[str, Any]](), []
    for name, model in table.entries.items():
        if name in done:
            continue
        try:
            rows[name] = table.row(name, plain if name == PLAIN else table.measure(model), plain) | facts
        except Exception as error:
            failed.append(name)
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        show(rows[name])
        if args.out:
            write_rows(args.out, [rows[name]])
    for name, figures in table.tallied(table.answered(list(dict.fromkeys([PLAIN, *rows])))):
        if name in rows:
            rows[name] |= figures
            print(f"{name:22}{figures['task_accuracy']:.1%} of {figures['questions']} questions", flush=True)
    if args.out:
        write_rows(args.out, list(rows.values()))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
