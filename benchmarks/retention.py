"""What retention policies cost and gain on a CPU: slots kept, quality of what follows a compressed prompt, and tokens per second.

    python benchmarks/retention.py [--policies window,adaptive] [--ratios 2,4,8] [--out benchmarks/results/kv.json]

Quality: prompts of 512 tokens are computed in full and compressed to a half, a quarter and an eighth; the 128 tokens after each are
forced, one per step, and scored (KL and perplexity against the engine that keeps everything; tests/data/heldout.jsonl). Recall:
lists of pairs at the beginning of --recall-tokens, asked for at their end (quality.recall) and compressed before the questions;
the questions are forced. Speed: output tokens per second of processor time (one thread, so that a busy machine disturbs little) of
16 requests of 512 + 192 random tokens in a cache that holds 4 of them with all their keys.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import cpu_name, provenance, timed, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.draft import Draft
from ridgeline.core.plan import TokenLogprobs
from ridgeline.core.sampling import MAX_LOGPROBS, SamplingParams
from ridgeline.decoding.masks import pack_allowed
from ridgeline.engine.local import LocalEngine
from ridgeline.engine.request import Request
from ridgeline.kv.prefix import chain_root
from ridgeline.models.hub import resolve_model
from ridgeline.quality.drift import Estimate, by_document, measure, token_drift
from ridgeline.quality.recall import measure_recall, recall_windows
from ridgeline.quality.scores import Scores, gather
from ridgeline.quality.texts import Window, read_texts
from ridgeline.text.tokenizer import Tokenizer

TEXTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "heldout.jsonl"
PROMPT, ANSWER = 512, 128
"""Tokens of a compressed prompt, and of what is scored after it."""
POLICIES = {"window": "window:sinks=4,keep={}", "snap": "snap:window=32,keep={}", "heavy": "heavy:window=32,keep={}"}
SHARES = {2: 0.56, 4: 0.29, 8: 0.15}
"""Shares of attention with which `adaptive` keeps about as many slots of these texts as `snap` does at a ratio."""
SPEED = (16, 512, 192, 4)
"""Requests, tokens of a prompt and of an answer, requests that the cache holds with all their keys."""


class Forced:
    """A constraint that allows one text."""

    ready = True

    def __init__(self, tokens: Sequence[int], vocab: int) -> None:
        self._left, self._vocab = list(tokens), vocab

    def mask(self) -> bytes:
        return pack_allowed(self._left[:1], self._vocab)

    def masks(self, draft: Draft) -> tuple[Draft, bytes]:
        raise NotImplementedError("nothing drafts here")

    def accept(self, tokens: Sequence[int]) -> None:
        del self._left[: len(tokens)]

    @property
    def finished(self) -> bool:
        return not self._left


def start(retention: str, blocks_for: int = 0) -> LocalEngine:
    """An engine with a policy. blocks_for: tokens that its cache holds; 0: as many as it likes."""
    token_bytes = 3584
    memory = token_bytes * 16 * (-(-blocks_for // 16) + 2) if blocks_for else 256 << 20
    config = EngineConfig(device="cpu", threads=1, kv_retention=retention, kv_cache_memory=memory, max_num_seqs=64)
    return LocalEngine.start(ModelConfig(max_model_len=1024), config)


def forced(engine: LocalEngine, windows: Sequence[Window]) -> tuple[list[Scores], float]:
    """Scores of the tokens from `first` on, each drawn in a step of its own after the tokens before; and the mean of the slots that
    a request holds at its end."""
    loop, vocab = engine.engine.loop, engine.engine.setup.vocab_size
    records: dict[str, list[TokenLogprobs]] = {}
    requests = []
    for number, window in enumerate(windows):
        sampling = SamplingParams(temperature=0.0, max_tokens=window.tokens, logprobs=MAX_LOGPROBS)
        request = Request(
            id=str(number),
            choice=0,
            tokens=array("i", window.ids[: window.first]),
            prompt_len=window.first,
            sampling=sampling,
            limit=len(window.ids),
            stop_ids=(),
            seed=0,
            order=(0, number),
            arrival=0.0,
            root=chain_root("", "forced"),
            cache=False,
            constraint=Forced(window.ids[window.first :], vocab),
        )
        records[request.id] = []
        requests.append(request)
        loop.scheduler.add(request)
    held: dict[str, int] = {}
    while not loop.scheduler.idle:
        for request in loop.scheduler.running:
            held[request.id] = request.planned - request.dropped
        for update in loop.turn().each():
            records[update.id] += update.logprobs or []
            if update.error:
                raise RuntimeError(update.error)
    scores = [
        gather(records[str(number)], Window(window.ids[window.first - 1 :], 1, window.document), MAX_LOGPROBS)
        for number, window in enumerate(windows)
    ]
    return scores, statistics.mean(held.values())


def interval(estimate: Estimate, digits: int = 4) -> list[float]:
    return [round(estimate.low or 0.0, digits), round(estimate.high or 0.0, digits)]


class Measurement:
    def __init__(self, pairs: int, lists: int, recall_tokens: int) -> None:
        tokenizer = Tokenizer.load(resolve_model(ModelConfig()))
        length = PROMPT + ANSWER
        self.windows = [
            Window(tuple(ids[begin : begin + length]), PROMPT, document)
            for document, text in enumerate(read_texts(TEXTS))
            if (ids := tokenizer.encode(text, add_special_tokens=True))
            for begin in range(0, len(ids) - length + 1, length)
        ]
        self.recall = recall_windows(tokenizer, pairs, [recall_tokens] * lists)
        self.plain, self.plain_recall, self.plain_slots = self.scores("all")
        self.plain_rate = self.rate("all")

    def scores(self, retention: str) -> tuple[list[Scores], list[Scores], float]:
        engine = start(retention)
        try:
            scores, slots = forced(engine, self.windows)
            return scores, forced(engine, [window.window for window in self.recall])[0], slots
        finally:
            engine.close()

    def rate(self, retention: str) -> float:
        """Output tokens per second of processor time."""
        requests, prompt, answer, held = SPEED
        engine = start(retention, held * (prompt + answer))
        try:
            shapes, vocab = [(prompt, answer)] * requests, engine.engine.setup.vocab_size
            timed(engine, [(64, 32)] * 4, vocab)
            begin = time.process_time()
            run = timed(engine, shapes, vocab)
            return run.output_tokens / (time.process_time() - begin)
        finally:
            engine.close()

    def row(self, name: str, ratio: int) -> dict[str, Any]:
        retention = f"adaptive:{SHARES[ratio]}" if name == "adaptive" else POLICIES[name].format(PROMPT // ratio)
        scores, recall_scores, slots = self.scores(retention)
        documents = [window.document for window in self.windows]
        parts = [token_drift(*pair) for pair in zip(self.plain, scores, strict=True)]
        drift = measure(by_document(parts, documents))
        recall, before = measure_recall(self.recall, recall_scores), measure_recall(self.recall, self.plain_recall)
        figures, rate = drift.figures, self.rate(retention)
        return {
            "row": f"retention-{name}-{ratio}x", "value": round(figures["kl"].value, 5), "unit": "KL, nats per token",
            "interval": interval(figures["kl"], 5), "retention": retention, "prompt_tokens": PROMPT,
            "slots": round(slots, 1), "slots_all": round(self.plain_slots, 1), "bytes_kept": round(slots / self.plain_slots, 4),
            "perplexity": round(figures["perplexity"].value, 4),
            "perplexity_reference": round(figures["perplexity_reference"].value, 4),
            "perplexity_change": round(figures["perplexity_change"].value, 4),
            "perplexity_change_interval": interval(figures["perplexity_change"]),
            "top1": round(figures["top1"].value, 4), "tokens": drift.tokens, "documents": drift.documents,
            "recall": round(recall.accuracy.value, 4), "recall_interval": interval(recall.accuracy),
            "recall_reference": round(before.accuracy.value, 4),
            "recall_probability": round(recall.probability.value, 4),
            "recall_probability_reference": round(before.probability.value, 4), "answers": recall.answers,
            "tok_s": round(rate, 1), "tok_s_all": round(self.plain_rate, 1), "speedup": round(rate / self.plain_rate, 3),
        }  # fmt: skip


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    measurement = Measurement(args.pairs, args.lists, args.recall_tokens)
    for name in args.policies.split(","):
        for ratio in args.ratios.split(","):
            yield measurement.row(name, int(ratio)) | {"model": "ridgeline-14m"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ",".join([*POLICIES, "adaptive"])
    parser.add_argument("--policies", default=names, help=f"of {names}")
    parser.add_argument("--ratios", default="2,4,8")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of a recall list")
    parser.add_argument("--lists", type=int, default=40)
    parser.add_argument("--recall-tokens", type=int, default=PROMPT, help="of a list with its questions")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    args = parser.parse_args()
    facts = provenance(cpu_name(), args.commit)
    for row in rows(args):
        print(row, flush=True)
        if args.out:
            write_rows(args.out, [row | facts])


if __name__ == "__main__":
    main()
