"""What rules of single tokens, grammars and beams cost on a CPU, with the shipped model in this process:

    python benchmarks/sampling_rules.py --out benchmarks/results/sampling_rules.json
    python benchmarks/sampling_rules.py --before COMMIT --out benchmarks/results/sampling_rules.json

Eight requests of 128 random prompt tokens and 64 answer tokens, each way in turn. Times are those of the processor, so they leave
out what other programs of the machine take. Rows `sampling-rules-WAY`: milliseconds per step, the median over --rounds rounds, and
the median of the ratios to `plain` of the same round. Row `sampling-rules-beams`: a search with four beams and 64 tokens against
four choices of 64 tokens, per token of an answer. With --before only row `sampling-rules-default`: processes of this package and of
that of COMMIT in turn; its value is the median of the ratios of `plain`.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import cpu_name, provenance, write_rows

from ridgeline import LLM, SamplingParams
from ridgeline.core.sampling import Grammar

REQUESTS, PROMPT, ANSWER, WIDTH = 8, 128, 64, 4
TEXT = "[a-z ,.]{400,}"


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(4, 8000) for _ in range(PROMPT)] for _ in range(REQUESTS)]


def opened() -> LLM:
    return LLM(dtype="float32", max_model_len=512, max_num_seqs=8, kv_cache_memory=40_000_000, threads=1)


def seconds(work: Callable[[], object]) -> float:
    """Processor time of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def answer(llm: LLM, **options: Any) -> None:
    limits = {"temperature": 1.0, "seed": 1, "max_tokens": ANSWER, "ignore_eos": True}
    llm.generate(prompts(), SamplingParams(**{**limits, **options}))


def ways(llm: LLM) -> dict[str, Callable[[], None]]:
    from ridgeline.core.dry import Dry
    from ridgeline.text.words import bad_word_ids

    words = bad_word_ids(llm.tokenizer, ["lighthouse", "sea", "once upon a time", "the"])
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "logit-bias": {"logit_bias": ((5, 1.0),)},
        "bad-words": {"bad_word_ids": words},
        "dry": {"dry": Dry(0.8)},
        "regex": {"grammar": Grammar("regex", TEXT)},
        "gbnf": {"grammar": Grammar("gbnf", "root ::= [a-z ,.]{400,}")},
        "gbnf-recursive": {"grammar": Grammar("gbnf", f'root ::= "(" root ")" | {TEXT}')},
    }
    return {name: lambda option=option: answer(llm, **option) for name, option in options.items()}


def beams(llm: LLM) -> None:
    from ridgeline.service.beams import BeamSearch
    from ridgeline.service.call import Beams

    search, prompt = BeamSearch(Beams(WIDTH, frozenset(), 1.0), ANSWER), prompts()[0]
    step = SamplingParams(temperature=0, max_tokens=1, logprobs=WIDTH)
    while not search.over:
        answers = llm.generate([[*prompt, *beam.tokens] for beam in search.running], step)
        tops = [done.choices[0].logprobs[0] for done in answers if done.choices[0].logprobs]
        search.advance([dict(zip(top.top_ids, top.top_logprobs, strict=True)) for top in tops])


def choices(llm: LLM) -> None:
    llm.generate(prompts()[:1], SamplingParams(temperature=0, n=WIDTH, max_tokens=ANSWER, ignore_eos=True))


def compared(before: str, rounds: int) -> tuple[float, float]:
    """Milliseconds of a processor per step of this package, and the ratio to the package of the commit `before`."""
    times: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, commit in (("now", "HEAD"), ("then", before)):
            packed = subprocess.run(["git", "archive", commit, "src"], capture_output=True, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(Path(folder) / name, filter="data")
        for _ in range(rounds):
            now, then = (plain(Path(folder) / name / "src") for name in ("now", "then"))
            times.append((now, then))
    return statistics.median(now for now, _ in times), statistics.median(now / then for now, then in times)


def plain(source: Path) -> float:
    """What a process of the package in `source` prints with --plain."""
    command = [sys.executable, __file__, "--plain"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def row(name: str, value: float, args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    return {"row": f"sampling-rules-{name}", "value": round(value, 3), **more, "target": None, "dtype": "float32", "threads": 1,
            "rounds": args.rounds, **provenance(args.machine or cpu_name())}  # fmt: skip


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    llm = opened()
    named = ways(llm)
    rounds = [{name: seconds(run) for name, run in named.items()} for _ in range(args.rounds + 1)][1:]
    rows = []
    for name in named:
        value = 1e3 * statistics.median(times[name] for times in rounds) / ANSWER
        ratio = statistics.median(times[name] / times["plain"] for times in rounds)
        rows.append(row(name, value, args, unit="ms of a processor per step", ratio=round(ratio, 3)))
    pairs = [(seconds(lambda: beams(llm)), seconds(lambda: choices(llm))) for _ in range(args.rounds)]
    per_token = 1e3 / (WIDTH * ANSWER)
    value = per_token * statistics.median(search for search, _ in pairs)
    of_choices = round(per_token * statistics.median(others for _, others in pairs), 3)
    ratio = round(statistics.median(search / others for search, others in pairs), 2)
    return [*rows, row("beams", value, args, unit="ms of a processor per token", choices=of_choices, ratio=ratio)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="")
    parser.add_argument("--before", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default="")
    parser.add_argument("--plain", action="store_true", help="print the milliseconds of `plain` and end")
    args = parser.parse_args()
    if args.plain:
        llm = opened()
        times = [seconds(lambda: answer(llm)) for _ in range(6)]
        print(1e3 * statistics.median(times[1:]) / ANSWER)
        return
    if args.before:
        value, ratio = compared(args.before, args.rounds)
        rows = [row("default", ratio, args, unit="ratio to the package before", ms_per_step=round(value, 3))]
    else:
        rows = measured(args)
    for made in rows:
        print(made)
    if args.out:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
