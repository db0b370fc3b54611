"""What breakpoints save in three published cases: time to first token, tokens computed, and the bill:

    python benchmarks/cache_contract.py --only book --scale 0.038 --out benchmarks/results/cache_contract.json
    python benchmarks/cache_contract.py --model benchmarks/models/llama-3.1-8b --device cuda --dummy \\
        --machine "1x NVIDIA H200" --out benchmarks/results/cache_contract.json

    book       questions about a prompt of 100,000 tokens, each on its own
    manyshot   questions after 10,000 tokens of examples
    chat       a conversation of ten turns with a long system prompt

The cases are those of Anthropic's "Prompt caching" (2024), which publishes -90, -86 and -53 % of the cost; lengths of questions and
answers are not published and are assumed here. --scale multiplies all lengths. Prompts are random token ids, and each request runs
twice in turn: with a breakpoint of five minutes at the end of its shared part, and without the prefix cache. Rows of each case:

    cache-CASE-ttft-ratio    median time to first token of the requests after the first, over that without
    cache-CASE-tokens-ratio  prompt tokens computed for all requests, over those without
    cache-CASE-cost-ratio    the bill of all requests by --prices, with the write and its storage, over that without; `read` is the
                             same for the requests after the first
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import cpu_name, provenance, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import kv_layout
from ridgeline.core.token_prices import TokenPrices
from ridgeline.engine.local import LocalEngine
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.service.breakpoints import Breakpoint
from ridgeline.service.call import Usage
from ridgeline.wire.messages import Submit

TARGETS = {"book": 0.03, "manyshot": 0.10, "chat": 0.15}
"""Of the ratios of times to first token."""
PUBLISHED = {"book": 0.10, "manyshot": 0.14, "chat": 0.47}
"""Ratios of the bill."""


@dataclass(frozen=True, slots=True)
class Case:
    """Requests with one beginning. grows: each prompt continues the last one and its answer, else each has another question."""

    prefix: int
    question: int
    answer: int
    requests: int
    grows: bool = False

    def scaled(self, scale: float) -> Case:
        sizes = (max(1, round(length * scale)) for length in (self.prefix, self.question, self.answer))
        return Case(*sizes, self.requests, self.grows)

    @property
    def longest(self) -> int:
        return self.prefix + (self.requests if self.grows else 1) * (self.question + self.answer)


CASES = {
    "book": Case(100_000, 100, 250, 10),
    "manyshot": Case(10_000, 100, 64, 10),
    "chat": Case(2_000, 60, 200, 10, grows=True),
}


@dataclass(frozen=True, slots=True)
class Answered:
    ttft_s: float
    usage: Usage
    tokens: list[int]

    @property
    def computed(self) -> int:
        return self.usage.prompt - self.usage.cached


def ask(engine: LocalEngine, name: str, prompt: list[int], answer: int, kept: int) -> Answered:
    """Send a prompt; its first `kept` tokens stay for five minutes. 0: without the prefix cache."""
    points = (Breakpoint(kept, "5m"),) if kept else ()
    sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    breakpoints = [(point.tokens, point.ttl_s) for point in points]
    usage, tokens, first = Usage(prompt=len(prompt)), list[int](), 0.0
    started = time.perf_counter()
    engine.submit(Submit(name, prompt, sampling, time.monotonic(), cache=bool(kept), breakpoints=breakpoints))
    for delta in engine.deltas():
        if delta.error:
            raise RuntimeError(delta.error)
        first = first or time.perf_counter() - started
        usage.cached += max(0, delta.cached)
        if delta.pins is not None:
            usage.pin(points, delta.pins)
            if any(pin.reason not in ("", "short") for pin in delta.pins):
                raise RuntimeError(f"The breakpoint was refused: {delta.pins}.")
        tokens += delta.tokens
    usage.completion = len(tokens)
    return Answered(first, usage, tokens)


def prompts(case: Case, vocab: int, seed: int) -> Iterator[tuple[list[int], int, list[int]]]:
    """Each request's prompt, the length of its shared part, and a list that takes the answer."""
    chance = random.Random(seed)
    shared = [chance.randrange(vocab) for _ in range(case.prefix)]
    for _ in range(case.requests):
        prompt = shared + [chance.randrange(vocab) for _ in range(case.question)]
        answer: list[int] = []
        yield prompt, len(prompt) if case.grows else case.prefix, answer
        if case.grows:
            shared = prompt + answer


def run(engine: LocalEngine, case: Case, vocab: int, name: str) -> tuple[list[Answered], list[Answered]]:
    """Every request with a breakpoint and without the cache, in turn."""
    kept, bare = list[Answered](), list[Answered]()
    for index, (prompt, shared, answer) in enumerate(prompts(case, vocab, len(name))):
        kept.append(ask(engine, f"{name} {index} kept", prompt, case.answer, shared))
        bare.append(ask(engine, f"{name} {index} bare", prompt, case.answer, 0))
        answer += kept[-1].tokens
    return kept, bare


def rows_of(name: str, kept: list[Answered], bare: list[Answered], args: argparse.Namespace) -> list[dict[str, Any]]:
    case, price = CASES[name].scaled(args.scale), TokenPrices.parse(args.prices)
    end = "-cpu" if args.device == "cpu" else ""
    shared = {
        "model": args.model.name if args.model else "shipped",
        "prefix": case.prefix,
        "question": case.question,
        "answer": case.answer,
        "requests": case.requests,
        **provenance(args.machine or (cpu_name() if args.device == "cpu" else "")),
    }

    def bill(answers: list[Answered]) -> float:
        return float(sum(price.bill(answered.usage.billable)["usd"] for answered in answers))

    ttft = [statistics.median(answered.ttft_s for answered in answers[1:]) for answers in (kept, bare)]
    computed = [sum(answered.computed for answered in answers) for answers in (kept, bare)]
    return [
        {
            "row": f"cache-{name}-ttft-ratio{end}",
            "value": round(ttft[0] / ttft[1], 4),
            "unit": "of the time without",
            "target": TARGETS[name],
            "seconds": [round(seconds, 5) for seconds in ttft],
            **shared,
        },
        {
            "row": f"cache-{name}-tokens-ratio{end}",
            "value": round(computed[0] / computed[1], 4),
            "unit": "of the tokens without",
            "tokens": computed,
            **shared,
        },
        {
            "row": f"cache-{name}-cost-ratio{end}",
            "value": round(bill(kept) / bill(bare), 4),
            "unit": "of the bill without",
            "read": round(bill(kept[1:]) / bill(bare[1:]), 4),
            "published": PUBLISHED[name],
            "token_hours": round(sum(answered.usage.token_s for answered in kept) / 3600, 2),
            "prices": args.prices,
            **shared,
        },
    ]


def start(args: argparse.Namespace, cases: dict[str, Case], folder: Path) -> tuple[LocalEngine, int]:
    """An engine whose cache holds the longest case three times, and its vocabulary."""
    shape = resolve_model(ModelConfig(str(args.model) if args.model else ""))
    longest = max(case.longest for case in cases.values()) + 64
    if args.dummy:
        config = json.loads((shape / "config.json").read_text())
        config["max_position_embeddings"] = max(longest, config["max_position_embeddings"])
        (folder / "config.json").write_text(json.dumps(config))
        shape = folder
    model = ModelConfig(str(shape), load_format="dummy" if args.dummy else "auto", max_model_len=longest)
    spec = served_spec(read_model(shape)[0], model)
    block = 64 if args.device == "cuda" else 16
    layout = kv_layout(spec, block)
    pages = 3 * layout.pages_for(longest, longest)
    engine = EngineConfig(
        device=args.device,
        threads=args.threads,
        block_size=block,
        kv_cache_memory=(pages + 1) * layout.page_bytes,
        cache_pin_share=0.7,
    )
    return LocalEngine.start(model, engine), spec.vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder (default: the shipped model)")
    parser.add_argument("--dummy", action="store_true", help="random weights, and a context as long as the cases need")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--only", choices=tuple(CASES), action="append", help="a case; repeat for several")
    parser.add_argument("--prices", default="input=3,output=15", help="as --token-prices (default: USD of the cases)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--machine", default="")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    cases = {name: CASES[name].scaled(args.scale) for name in args.only or CASES}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        engine, vocab = start(args, cases, Path(folder))
        ask(engine, "warm up", list(range(5, 69)), 2, 0)
        for name, case in cases.items():
            rows += rows_of(name, *run(engine, case, vocab, name), args)
        engine.close()
    for row in rows:
        print(row["row"], row["value"], row["unit"])
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
