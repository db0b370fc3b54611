"""What each way of drafting gains on the shipped model, on this CPU, request by request beside plain decoding:

    python benchmarks/speculation.py --data FOLDER --out benchmarks/results/speculation.json

and on any model with drafters of its own, in DRAFTERS/draft, DRAFTERS/recurrent, DRAFTERS/medusa and DRAFTERS/eagle:

    python benchmarks/speculation.py --data FOLDER --model MODEL --drafters DRAFTERS --device cuda --writings greedy,sampled

FOLDER holds spec_bench.jsonl and humaneval.jsonl; held-out text is in the repository. Three ways to write: greedy, at temperature
0.8, and forced, where the target says what stands in a real text whatever it computes, since a small model's greedy text
loops and flatters every drafter (the share of greedy answers that loop is a row's `loop_rate`). copy: forced answers that quote
their prompt, some words changed. Plain and drafted runs of a prompt follow each other. tok_s: without steps that read prompts.
accepted_len: tokens gained per row and step, steps without a draft among them, because a drafter that does not pay is off.
answers_changed: of `prompts` answers, those that differ from plain decoding's. In float32 (--dtype float32) there are none.

With --batch 8, say, requests come and go: 24 or more of a kind, 8 at a time, who ends makes room for the next. They are of
different lengths (a quarter to all of 128 tokens), so that plain ones do not end together, and tok_s counts while 8 are open.
Kinds with fewer prompts are left out.
--mixed makes all prompts one kind, because many kinds have fewer prompts than a large batch.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, provenance, write_rows
from drafters import cases, lines

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine import device
from ridgeline.engine.local import LocalEngine
from ridgeline.models.hub import resolve_model, shipped_model
from ridgeline.ops.rows import Int, RowState, Spread
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.wire.messages import StepStats, Submit

ASSETS = shipped_model().parent
OUTPUT = 128
PROMPT = 700
CACHE_BYTES = 1 << 30
"""Of each engine's KV cache on a GPU: 65,000 tokens of the worked path's target (training/README.md)."""
FULL_BATCHES = 3
"""Prompts of a kind for each request of a batch, at least."""
TAIL, PERIOD = 48, 16
"""A text loops if its last TAIL tokens repeat with a period of at most PERIOD."""


def ways(drafters: Path) -> dict[str, str]:
    """The option `speculate` by name of a way of drafting: what needs no weights, and the drafters that the folder has."""
    weighed = ("medusa", "recurrent", "eagle", "draft")
    folders = {name: f"{name}:{drafters / name}" for name in weighed if (drafters / name).is_dir()}
    joined = {f"reference+{name}": f"reference+{folders[name]}" for name in ("recurrent", "draft") if name in folders}
    return {name: name for name in ("reference", "lookahead", "recycling")} | folders | joined | {"auto": "auto"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """work: its kind. answer: the real text behind it, for forced runs; empty where there is none."""

    work: str
    tokens: list[int]
    answer: list[int]


@dataclass(slots=True)
class Sum:
    """Of all prompts of one kind: tokens of steps that read no prompt, their seconds, their rows, and the answers."""

    tokens: int = 0
    seconds: float = 0.0
    rows: int = 0
    answers: list[list[int]] = field(default_factory=list)

    def add(self, other: Sum) -> None:
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.rows += other.rows
        self.answers += other.answers


class Text:
    """What the target is made to say, by row and place; nothing: what it draws."""

    def __init__(self) -> None:
        self.said: dict[int, torch.Tensor] = {}
        self._held: dict[torch.Size, torch.Tensor] = {}

    def say(self, row: int, tokens: Sequence[int]) -> None:
        """From now on, in this row."""
        self.said[row] = torch.tensor(tokens, dtype=torch.int32)
        for held in self._held.values():
            self._write(held[row], self.said[row])

    @staticmethod
    def _write(held: torch.Tensor, tokens: torch.Tensor) -> None:
        """At each place what is to be said behind it, as it goes on at its end."""
        held.fill_(int(tokens[-1]))
        held[: len(tokens) - 1] = tokens[1:]

    def _behind(self, rows: RowState) -> RowState:
        """Rows that hold it, in the same memory for every text, so that recorded steps serve the next one too."""
        shape = rows.tokens.shape
        if shape not in self._held:
            with torch.inference_mode(False):  # what is made within could not be written to outside
                self._held[shape] = torch.zeros(shape, dtype=torch.int32)
            for row, tokens in self.said.items():
                self._write(self._held[shape][row], tokens)
        return replace(rows, tokens=self._held[shape])

    @contextmanager
    def dictate(self) -> Iterator[None]:
        """Draws are made as ever, and then replaced, by the operation that gathers query tokens: an engine can record it as it
        records its own."""
        plain = device.DeviceStep._drawn

        def drawn_of(step: Any, batch: Any, hidden: Any, bound: int, learn: bool | None) -> Any:
            drawn, logprobs = plain(step, batch, hidden, bound, learn)
            if not self.said:
                return drawn, logprobs
            ragged, nodes = batch.ragged, batch.nodes
            if ragged is None or (nodes is not None and batch.shape.tokens == batch.shape.logits):
                spread = None if ragged is None else Spread(ragged.n_query, ragged.row_of, nodes.depth)
                return step.ops.sampler.gather(self._behind(step.rows.state), batch.rows, spread).tokens, logprobs
            # Rows that read a prompt, maybe beside rows that verify: nothing that is recorded.
            place = step.rows.ints[batch.owners, Int.KNOWN] + (0 if nodes is None else nodes.depth)
            held = self._behind(step.rows.state).tokens
            return held[batch.owners, (place - 1).clamp(max=held.shape[1] - 1)], logprobs

        device.DeviceStep._drawn = drawn_of  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            device.DeviceStep._drawn = plain  # type: ignore[method-assign]


def loops(tokens: Sequence[int]) -> bool:
    tail = list(tokens[-TAIL:])
    return len(tail) == TAIL and any(tail[period:] == tail[:-period] for period in range(1, PERIOD + 1))


class Timed:
    """An engine whose steps are counted while `full`, but for those that read prompts."""

    def __init__(self, option: str, args: argparse.Namespace) -> None:
        # Many engines share one GPU, so none may take what is free.
        cache = None if args.device == "cpu" else CACHE_BYTES
        rows = max(16, *args.batch)
        config = EngineConfig(
            speculate=option, device=args.device, threads=args.threads, max_num_seqs=rows, kv_cache_memory=cache
        )
        model = ModelConfig(
            args.model, dtype=args.dtype, max_model_len=None if args.device == "cpu" else PROMPT + 2 * OUTPUT
        )
        self.engine = LocalEngine.start(model, config, on_step=self._step)
        self.full, self.count, self._last = False, Sum(), 0.0

    def _step(self, stats: StepStats) -> None:
        now = time.perf_counter()
        if self.full and stats.steps and not stats.prompt_tokens:
            self.count.tokens += stats.output_tokens
            self.count.seconds += now - self._last
            self.count.rows += stats.output_tokens - stats.accepted  # a row draws one token beyond its accepted drafts
        self._last = now

    def run(self, work: Sequence[Prompt], forced: bool, temperature: float, batch: int, text: Text) -> Sum:
        """Answers to all, `batch` at a time."""
        self.count, said, chance = Sum(), dict[str, list[int]](), random.Random(len(work))
        waiting, scheduler = list(enumerate(work))[::-1], self.engine.engine.loop.scheduler
        text.said.clear()

        def submit() -> None:
            number, request = waiting.pop()
            if forced:  # the row that it will sit in
                text.say(scheduler._free_rows[-1 - len(scheduler.waiting)], request.tokens + request.answer)
            length = min(OUTPUT, len(request.answer)) if forced else OUTPUT
            if batch > 1:
                length = chance.randint(length // 4, length)
            sampling = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=7 + number)
            said[name := f"{time.monotonic_ns()}-{number}"] = []
            self.engine.submit(Submit(name, list(request.tokens), sampling, time.monotonic(), cache=False))

        for _ in range(min(batch, len(waiting))):
            submit()
        self.full = True
        for delta in self.engine.deltas():
            said[delta.id] += delta.tokens
            if delta.finish and waiting:
                submit()
            elif delta.finish:
                self.full = False
        self.full, self.count.answers = False, list(said.values())
        return self.count


def prompts(args: argparse.Namespace, each: int) -> list[Prompt]:
    """`each` prompts of each kind of work, or of all kinds together."""
    data, tokenizer = args.data, Tokenizer.load(resolve_model(ModelConfig(args.model)))
    loaded = [
        Prompt(
            "spec_bench " + line["category"], tokenizer.encode(line["turns"][0], add_special_tokens=False)[-PROMPT:], []
        )
        for line in lines(data / "spec_bench.jsonl")
    ]
    for case in cases(data, tokenizer):
        if len(case.answer) >= OUTPUT // 2 and case.kind not in ("rag", "summarization"):
            answer = case.answer if case.kind != "humaneval" else []
            loaded.append(Prompt(case.kind, case.prompt[-PROMPT:], answer[:OUTPUT]))
    random.Random(3).shuffle(loaded)
    if args.mixed:
        loaded = [replace(prompt, work="mixed") for prompt in loaded if not prompt.work.startswith("copy")]
    kinds = dict.fromkeys(sorted(prompt.work for prompt in loaded))
    return [prompt for kind in kinds for prompt in [prompt for prompt in loaded if prompt.work == kind][:each]]


def writings(prompt: Prompt) -> list[tuple[str, float]]:
    """(how, temperature) of the ways in which a prompt is answered."""
    # Drafts are the likeliest tokens then: noise that a drafter shares with the target says nothing of a text neither drew.
    forced = [("forced", 0.0)] if prompt.answer else []
    if prompt.work.startswith("copy"):
        return forced
    return [("greedy", 0.0), ("sampled", 0.8), *forced]


def measure(
    args: argparse.Namespace, batch: int, engines: dict[str, Timed], text: Text
) -> dict[tuple[str, str, str], Sum]:
    """By (way of drafting, work, writing), `batch` requests at a time."""
    sums: dict[tuple[str, str, str], Sum] = defaultdict(Sum)
    kinds: dict[tuple[str, str, float], list[Prompt]] = defaultdict(list)
    for prompt in prompts(args, args.each if batch == 1 else max(args.each, FULL_BATCHES * batch)):
        for how, temperature in writings(prompt):
            if how not in args.writings.split(","):
                continue
            kinds[prompt.work, how, temperature].append(prompt)
    parts = {kind: [[prompt] for prompt in work] if batch == 1 else [work] for kind, work in kinds.items()}
    groups = [(kind, part) for kind, work in parts.items() for part in work if len(part) >= batch]
    for dictated in (False, True):
        for timed in engines.values():
            timed.engine.engine.loop.runner.executor.forget()  # a recorded step draws, or is dictated to
        for number, ((work, how, temperature), part) in enumerate(groups):
            if (how == "forced") != dictated:
                continue
            names = list(engines)
            # Who comes first changes, so that no way is always measured on a warmer machine.
            for name in names[number % len(names) :] + names[: number % len(names)]:
                # The faster of two runs counts, since whatever disturbs prompt makes it longer.
                runs = [engines[name].run(part, dictated, temperature, batch, text) for _ in range(2)]
                sums[name, work, how].add(min(runs, key=lambda run: run.seconds / max(1, run.tokens)))
    return sums


def added(parts: Sequence[Sum]) -> Sum:
    total = Sum()
    for part in parts:
        total.add(part)
    return total


def name_of(args: argparse.Namespace) -> str:
    """The beginning of a row's name: the device, and model and number type if they are not the shipped ones."""
    parts = [
        "cpu" if args.device == "cpu" else "gpu",
        Path(args.model).name,
        "" if args.dtype == "auto" else args.dtype,
    ]
    return "-".join(part for part in parts if part)


def rows(args: argparse.Namespace, batch: int, sums: dict[tuple[str, str, str], Sum]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[Sum]] = defaultdict(list)
    for (name, work, how), total in sums.items():
        groups[name, work, how].append(total)
        groups[name, "copy" if work.startswith("copy") else "all", how].append(total)
        if not work.startswith("copy"):
            groups[name, "all", "all"].append(total)
    for (name, work, how), parts in groups.items():
        if name == "plain":
            continue
        drafted, plain = added(parts), added(groups["plain", work, how])
        tok_s, plain_tok_s = drafted.tokens / drafted.seconds, plain.tokens / plain.seconds
        yield {
            "row": f"{name_of(args)}-{name}-{work}-{how}-b{batch}",
            "drafter": name,
            "work": f"{work}, {how}",
            "temperature": {"greedy": 0.0, "sampled": 0.8}.get(how),
            "batch": batch,
            "tok_s": round(tok_s, 1),
            "plain_tok_s": round(plain_tok_s, 1),
            "ratio": round(tok_s / plain_tok_s, 3),
            "accepted_len": round(drafted.tokens / max(1, drafted.rows), 3),
            "loop_rate": round(sum(map(loops, drafted.answers)) / len(drafted.answers), 3) if how == "greedy" else None,
            "prompts": len(drafted.answers),
            "answers_changed": sum(
                answer != other for answer, other in zip(drafted.answers, plain.answers, strict=True)
            ),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="", help="model folder; empty is the shipped model")
    parser.add_argument(
        "--drafters", type=Path, default=ASSETS, help="folder with the model's draft, recurrent, medusa and eagle"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's) or float32")
    parser.add_argument("--ways", default="", help="ways of drafting, separated by commas; empty: all that there are")
    parser.add_argument("--writings", default="greedy,sampled,forced", help="forced: real text")
    parser.add_argument("--mixed", action="store_true", help="all prompts but copies are one kind of work")
    parser.add_argument("--each", type=int, default=3, help="prompts of each kind of work")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="requests open at once")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default="benchmarks/results/speculation.json")
    args = parser.parse_args()
    if args.device != "cpu" and "forced" in args.writings:
        parser.error("--writings forced needs --device cpu: the graphs of a GPU are captured before texts are known")
    text, options = Text(), ways(args.drafters)
    names = args.ways.split(",") if args.ways else list(options)
    with text.dictate():
        engines = {
            name: Timed(option, args)
            for name, option in {"plain": "", **{name: options[name] for name in names}}.items()
        }
        measured = {batch: measure(args, batch, engines, text) for batch in args.batch}
    machine = cpu_name() if args.device == "cpu" else torch.cuda.get_device_name()
    model = f"{Path(args.model).name or 'ridgeline-14m'}, {engines['plain'].engine.engine.setup.facts['dtype']}"
    common = {"device": machine, "model": model, **provenance(machine, args.commit)}
    done = [row for batch, sums in measured.items() for row in rows(args, batch, sums)]
    for row in done:
        if row["work"].startswith(("all", "copy,")):
            shown = ("drafter", "work", "batch", "tok_s", "ratio", "accepted_len", "loop_rate", "answers_changed")
            print(*(row[name] for name in shown))
    write_rows(args.out, [row | common for row in done])


if __name__ == "__main__":
    main()
