"""How often company changes an answer, and what `--deterministic` costs: `python benchmarks/deterministic.py --out FILE`.

Flips: greedy requests are answered alone, then beside 1, 7 and 31 others (`--batches`); a flip is an answer whose tokens
change, and where the first of them is says how soon. With a checkpoint the prompts are the model's own text, sampled at
temperature 1. `--dummy` takes random weights from a config.json alone, with random prompts: their logits are flat, so that
flips are far more frequent than with a trained model, and only that there are none with the switch means something.

Cost: time per output token at batch 1 and 64 and prompt tokens per second, both ways, prefix cache off.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, provenance, timed, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.wire.messages import Submit

PROMPT = (8, 200)
"""Shortest and longest prompt of the flips, in tokens."""
FIRST_TOKENS = 100
"""A prompt's first token is drawn among so many: rare ids lead a small model into loops."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured. requests: of each count of flips; output: tokens of an answer; batches: sizes in which they are
    asked; many: requests of the larger batch whose time per token is taken; prefill: (prompts, tokens of each)."""

    requests: int
    output: int
    batches: tuple[int, ...]
    many: int
    prefill: tuple[int, int]


def answers(engine: LocalEngine, prompts: Sequence[list[int]], work: Work, together: int) -> list[list[int]]:
    """Greedy answers to all prompts, `together` at a time."""
    sampling = SamplingParams(temperature=0.0, max_tokens=work.output, ignore_eos=True)
    return _run(engine, [(prompt, sampling) for prompt in prompts], together)


def _run(engine: LocalEngine, given: Sequence[tuple[list[int], SamplingParams]], together: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in given]
    for first in range(0, len(given), together):
        places = range(first, min(first + together, len(given)))
        for delta in engine.run(Submit(str(at), *given[at], time.monotonic(), cache=False) for at in places):
            if delta.error:
                raise RuntimeError(delta.error)
            answers[int(delta.id)].extend(delta.tokens)
    return answers


def own_text(engine: LocalEngine, requests: int, trained: bool) -> list[list[int]]:
    """Prompts of many lengths: what the model says after one token, or random ids for random weights."""
    chance, vocab = random.Random(5), engine.engine.setup.vocab_size
    sizes = [chance.randint(*PROMPT) for _ in range(requests)]
    if not trained:
        return [[chance.randrange(vocab) for _ in range(size)] for size in sizes]
    given = []
    for seed, size in enumerate(sizes):
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=size, ignore_eos=True)
        given.append(([chance.randrange(min(FIRST_TOKENS, vocab))], sampling))
    return _run(engine, given, requests)


def flips(alone: Sequence[list[int]], beside: Sequence[list[int]]) -> list[int]:
    """Where the answers that changed do so first."""
    pairs = [(answer, other) for answer, other in zip(alone, beside, strict=True) if answer != other]
    return [next(at for at, (a, b) in enumerate(zip(answer, other, strict=True)) if a != b) for answer, other in pairs]


def flip_rows(engine: LocalEngine, work: Work, trained: bool, name: str) -> list[dict[str, Any]]:
    prompts = own_text(engine, work.requests, trained)
    alone = answers(engine, prompts, work, 1)
    rows: list[dict[str, Any]] = []
    for together in work.batches:
        places = flips(alone, answers(engine, prompts, work, together))
        row = {"row": f"{name}-flips-b{together}", "value": len(places) / len(prompts), "unit": "share of requests"}
        rows.append(row | {"requests": len(prompts), "tokens": work.output})
        if places:
            rows[-1]["median_first_place"] = statistics.median(places)
    return rows


def cost_rows(engine: LocalEngine, work: Work, name: str) -> list[dict[str, Any]]:
    vocab = engine.engine.setup.vocab_size

    def seconds(shapes: list[tuple[int, int]]) -> float:
        """Median of three after one that warms up."""
        return statistics.median([timed(engine, shapes, vocab).seconds for _ in range(4)][1:])

    rows = []
    for batch in (1, work.many):
        longer = work.output + 1
        each = (seconds([(128, longer)] * batch) - seconds([(128, 1)] * batch)) / work.output
        rows.append({"row": f"{name}-b{batch}-tpot-ms", "value": round(each * 1e3, 4), "unit": "ms"})
    count, length = work.prefill
    speed = count * length / seconds([(length, 1)] * count)
    return [*rows, {"row": f"{name}-prefill-tok-s", "value": round(speed, 1), "unit": "tok/s"}]


def measure(model: ModelConfig, config: EngineConfig, work: Work, parts: str, name: str) -> list[dict[str, Any]]:
    engine = LocalEngine.start(model, config)
    print(name, engine.engine.setup.facts["ops"], engine.engine.setup.facts["startup_s"], flush=True)
    rows: list[dict[str, Any]] = []
    if "flips" in parts:
        rows += flip_rows(engine, work, model.load_format != "dummy", name)
    if "cost" in parts:
        rows += cost_rows(engine, work, name)
    engine.close()
    for row in rows:
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--model", default="", help="model folder; empty is the shipped model")
    parser.add_argument("--dummy", action="store_true", help="random weights from config.json alone")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="")
    parser.add_argument("--parts", default="flips,cost")
    parser.add_argument("--modes", default="plain,deterministic")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--batches", default="2,8,32")
    parser.add_argument("--many", type=int, default=64)
    parser.add_argument("--prefill", default="8x2048", help="prompts x tokens of each")
    parser.add_argument("--commit", default="", help="what runs, where the tree has no .git to ask")
    given = parser.parse_args()
    count, length = given.prefill.split("x")
    batches = tuple(int(size) for size in given.batches.split(","))
    work = Work(given.requests, given.output, batches, given.many, (int(count), int(length)))
    model = ModelConfig(
        model=given.model,
        dtype=given.dtype,
        quantization=given.quantization,
        load_format="dummy" if given.dummy else "auto",
        max_model_len=max(PROMPT[1] + work.output, 129 + work.output, work.prefill[1] + 1),
    )
    seats = max(work.many, *work.batches, work.prefill[0])
    on_gpu = given.device == "cuda" or (given.device == "auto" and torch.cuda.is_available())
    machine = torch.cuda.get_device_name() if on_gpu else cpu_name()
    about = provenance(machine, given.commit)
    title = f"{Path(given.model).name or 'shipped'}-{given.quantization or given.dtype}-{'gpu' if on_gpu else 'cpu'}"
    for mode in given.modes.split(","):
        config = EngineConfig(
            device=given.device,
            max_num_seqs=seats,
            enable_prefix_caching=False,
            deterministic=mode == "deterministic",
            kv_cache_memory=None if on_gpu else 256 << 20,
        )
        rows = measure(model, config, work, given.parts, f"{title}-{mode}")
        if given.out:
            write_rows(given.out, [row | about for row in rows])


if __name__ == "__main__":
    main()
