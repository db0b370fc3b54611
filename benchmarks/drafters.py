"""What host drafters gain for each verification, and what they cost the host, with no engine around them:

    python benchmarks/drafters.py --data FOLDER [--out FILE] [--nodes 32] [--depth 16] [--lookahead 1,3,3 6,4,6]

FOLDER holds spec_bench.jsonl and humaneval.jsonl; held-out text is in the repository. Text is replayed: the target always
says what stands there, so nothing depends on how well a model writes. copy: the prompt holds a passage, and the answer is
that passage with so many percent of its words replaced, put in or left out. host us: propose and hear of one step, CPU time.
gain: tokens per plain step's time, if each query token costs --query-cost of one (a step of the shipped model on two CPU
cores: 0.05; on a GPU at batch 1 next to nothing).

Lookahead learns from what a model says, so it is measured with the shipped model (transformers, float32), greedy, sampled at
temperature 0.8, and with forced continuations. Each of its shapes is columns,ngram,candidates.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from common import HERE, cpu_name, provenance, write_rows

from ridgeline.core.config import ModelConfig
from ridgeline.core.draft import EMPTY_DRAFT, Draft
from ridgeline.models.hub import resolve_model
from ridgeline.speculation.host import HostDrafter
from ridgeline.speculation.lookahead import DraftShape, Lookahead
from ridgeline.speculation.ngram import NGram
from ridgeline.text.tokenizer import Tokenizer

HELD_OUT = HERE.parent / "tests" / "data" / "heldout.jsonl"
PROMPT = 512
ANSWER = 400
PASSAGE_WORDS = 300
EDITED = (0, 5, 15)
"""Percent of a passage's words."""
MODEL_PROMPT = 256
MODEL_ANSWER = 96
MODEL_KINDS = ("prose", "docs", "code", "math", "humaneval", "rag")


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    prompt: list[int]
    answer: list[int]


@dataclass(slots=True)
class Tally:
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    host_ns: int = 0

    def row(self, query_cost: float) -> dict[str, float]:
        return {
            "tokens_per_step": round(self.tokens / self.steps, 3),
            "drafted_per_step": round(self.drafted / self.steps, 2),
            "gain": round(self.tokens / (self.steps + query_cost * self.drafted), 3),
            "host_us": round(self.host_ns / self.steps / 1000, 1),
        }


class Target(Protocol):
    def say(self, text: Sequence[int], draft: Draft) -> list[int]:
        """The word behind the text and behind each node."""


def parents_of(draft: Draft) -> Sequence[int]:
    return draft.parents or range(-1, len(draft.tokens) - 1)


class Forced:
    """Says what stands in a text; off its path what `other` says, or nothing (-1)."""

    def __init__(self, text: Sequence[int], other: Target | None = None) -> None:
        self._text = text
        self._other = other

    def say(self, text: Sequence[int], draft: Draft) -> list[int]:
        drawn = self._other.say(text, draft) if self._other else [-1] * (1 + len(draft.tokens))
        at, place = -1, len(text)
        drawn[0] = self._text[place]
        for node, (token, parent) in enumerate(zip(draft.tokens, parents_of(draft), strict=True)):
            if parent == at and token == drawn[at + 1]:
                at, place = node, place + 1
                drawn[node + 1] = self._text[place]
        return drawn


class Model:
    """The shipped model, one request at a time. temperature 0 is greedy; noise is a function of seed and position."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.start(0.0, 0)

    def start(self, temperature: float, seed: int) -> None:
        from transformers import DynamicCache

        self._cache, self._computed = DynamicCache(), 0
        self._temperature, self._seed = temperature, seed

    @torch.no_grad()
    def say(self, text: Sequence[int], draft: Draft) -> list[int]:
        new, nodes, start = list(text[self._computed :]), len(draft.tokens), self._computed
        count = len(new)
        sees = torch.ones(count + nodes, start + count + nodes, dtype=torch.bool).tril(start)
        sees[count:, start + count :] = False
        positions = list(range(start, start + count))
        for node, parent in enumerate(parents_of(draft)):
            sees[count + node] |= sees[count + parent]
            sees[count + node, start + count + node] = True
            positions.append(positions[count + parent] + 1)
        logits = self._model(
            input_ids=torch.tensor([new + list(draft.tokens)]),
            position_ids=torch.tensor([positions]),
            attention_mask=torch.zeros(sees.shape).masked_fill(~sees, -1e9)[None, None],
            past_key_values=self._cache,
            logits_to_keep=nodes + 1,
        ).logits[0]
        if nodes:
            self._cache.crop(-nodes)
        self._computed += count
        return [self._draw(row, place) for row, place in zip(logits, positions[count - 1 :], strict=True)]

    def _draw(self, logits: torch.Tensor, position: int) -> int:
        if self._temperature:
            chance = torch.Generator().manual_seed(self._seed * 100_003 + position)
            noise = torch.rand(logits.shape, generator=chance)
            logits = logits / self._temperature - (-noise.log()).log()
        return int(logits.argmax())


def gained(draft: Draft, drawn: Sequence[int]) -> list[int]:
    """The words of the path that agrees, and the one behind it."""
    at, tokens = -1, [drawn[0]]
    for node, (token, parent) in enumerate(zip(draft.tokens, parents_of(draft), strict=True)):
        if parent == at and token == tokens[-1]:
            at = node
            tokens.append(drawn[node + 1])
    return tokens


def answer(drafter: HostDrafter, target: Target, case: Case, size: tuple[int, int], tally: Tally) -> None:
    """Speculate on one answer. size: nodes and depth of a draft at most."""
    nodes, depth = size
    text, end = list(case.prompt), len(case.prompt) + len(case.answer)
    guess = drafter.start(case.prompt)
    while len(text) < end:
        began = time.thread_time_ns()
        room = min(depth, end - len(text) - 1)
        draft = guess.propose(nodes, room) if room else EMPTY_DRAFT
        proposed = time.thread_time_ns()
        drawn = target.say(text, draft)
        words = gained(draft, drawn)
        text += words
        said = time.thread_time_ns()
        guess.observe(words, draft, drawn)
        tally.host_ns += time.thread_time_ns() - said + proposed - began
        tally.tokens += len(words)
        tally.steps += 1
        tally.drafted += len(draft.tokens)


def edited(words: Sequence[str], percent: int, chance: random.Random) -> list[str]:
    """Some words replaced by others of the passage, some put in, some left out."""
    names: list[str] = []
    for word in words:
        if chance.random() * 100 >= percent:
            names.append(word)
            continue
        names.extend(chance.choice([[chance.choice(words)], [word, chance.choice(words)], []]))
    return names


def lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def cases(data: Path, tokenizer: Tokenizer) -> list[Case]:
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def halves(kind: str, text: str) -> Iterator[Case]:
        tokens = ids(text)
        half = min(len(tokens) // 2, PROMPT)
        if half >= 32:
            yield Case(kind, tokens[:half], tokens[half : half + ANSWER])

    collected: list[Case] = []
    chance = random.Random(1)
    for line in lines(HELD_OUT):
        collected.extend(halves(line["kind"], line["text"]))
        words = line["text"].split(" ")[:PASSAGE_WORDS]
        for percent in EDITED if len(words) >= PASSAGE_WORDS // 4 else ():
            prompt = ids("Text:\n" + " ".join(words) + "\n\nThe text, corrected:\n")
            collected.append(Case(f"copy, {percent} % edited", prompt, ids(" ".join(edited(words, percent, chance)))))
    problems = lines(data / "humaneval.jsonl")
    collected += [Case("humaneval", ids(problem["prompt"]), ids(problem["canonical_solution"])) for problem in problems]
    for line in lines(data / "spec_bench.jsonl"):
        if line["category"] in ("rag", "summarization"):
            collected.extend(halves(line["category"], line["turns"][0]))
    return collected


def reference(work: Sequence[Case], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for kind in dict.fromkeys(case.kind for case in work):
        tally = Tally()
        for case in [case for case in work if case.kind == kind][: arguments.cases]:
            target = Forced(case.prompt + case.answer)
            answer(NGram(), target, case, (arguments.nodes, arguments.depth), tally)
        yield {"row": f"reference, {kind}", "drafter": "reference", "work": kind} | tally.row(arguments.query_cost)


def lookahead(work: Sequence[Case], model: Model, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chosen: list[Case] = []
    for kind in MODEL_KINDS:
        long = [case for case in work if case.kind == kind and len(case.answer) >= MODEL_ANSWER]
        chosen += long[: arguments.prompts]
    for shape in arguments.lookahead:
        for way, temperature in (("greedy", 0.0), ("temperature 0.8", 0.8), ("forced", 0.0)):
            tally = Tally()
            for seed, case in enumerate(chosen):
                prompt, said = case.prompt[-MODEL_PROMPT:], case.answer[:MODEL_ANSWER]
                model.start(temperature, seed)
                target = Forced(prompt + said, model) if way == "forced" else model
                answer(
                    Lookahead(DraftShape(*shape)), target, Case(case.kind, prompt, said), (64, arguments.depth), tally
                )
            name = "lookahead " + ",".join(map(str, shape))
            row = {"row": f"{name}, {way}", "drafter": name, "work": way}
            yield row | tally.row(arguments.query_cost)


def shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--query-cost", type=float, default=0.05)
    parser.add_argument("--cases", type=int, default=30, help="texts of each kind")
    parser.add_argument("--lookahead", type=shape, nargs="*", default=[], metavar="W,N,G")
    parser.add_argument("--prompts", type=int, default=1, help="of each kind, for the model")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    folder = Path(resolve_model(ModelConfig()))
    work = cases(arguments.data, Tokenizer.load(folder))
    rows: list[dict[str, Any]] = []
    about = provenance(cpu_name(), arguments.commit)

    def show(lines: Iterator[dict[str, Any]]) -> None:
        for row in lines:
            rows.append(row | about)
            figures = "  ".join(f"{name} {value:>7}" for name, value in row.items() if isinstance(value, float))
            print(f"{row['row']:<36}{figures}", flush=True)

    show(reference(work, arguments))
    if arguments.lookahead:
        show(lookahead(work, Model(folder), arguments))
    if arguments.out:
        write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
