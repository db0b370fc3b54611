"""The ladder: one model made faster step by step, with speed, memory and drift at each rung.

Every rung keeps what the one below it has. Speed is that of one request at a time, greedy, from its first token on; drift is
held against the lowest rung, on fixed texts. A draft changes no distribution, so the rung of speculation is held against the
one below it by its answers as well: they are the same but where two tokens are equally likely up to rounding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import EngineFailed
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.planner.svg import Axis, Chart, Guide, Line, Points
from ridgeline.quality.drift import by_document, measure, token_drift
from ridgeline.quality.scores import EngineScorer, Progress, Scores
from ridgeline.quality.texts import Window
from ridgeline.wire.messages import Submit

Answer = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to serve the model."""

    name: str
    model: ModelConfig
    engine: EngineConfig


@dataclass(frozen=True, slots=True)
class Task:
    """What every rung is asked. prompts: answered greedily with `tokens` tokens each, `repeats` times. windows: scored, with
    `top` alternatives per token."""

    prompts: Sequence[Answer]
    tokens: int
    repeats: int
    windows: Sequence[Window]
    top: int


@dataclass(frozen=True, slots=True)
class Climbed:
    """A rung with its engine's facts. rates: tokens per second of each answer; answers: one for each prompt."""

    rung: Rung
    facts: Mapping[str, Any]
    rates: tuple[float, ...]
    answers: tuple[Answer, ...]
    scores: tuple[Scores, ...]


def rungs(model: ModelConfig, engine: EngineConfig, formats: Sequence[str], compiled: str) -> list[Rung]:
    """From eager operations in the model's dtype up. compiled: what the second rung has more than the first."""
    speculate = engine.speculate or "auto"
    engine = replace(engine, speculate="", enforce_eager=False)
    found = [Rung("eager", model, replace(engine, enforce_eager=True)), Rung(compiled, model, engine)]
    found += [Rung(name, replace(model, quantization=name), engine) for name in formats]
    return [*found, Rung("speculation", found[-1].model, replace(engine, speculate=speculate))]


def climb(rung: Rung, task: Task, progress: Progress) -> Climbed:
    """Serve and measure one rung; its engine is gone afterwards. Raises EngineFailed, or what the start of an engine raises."""
    engine = LocalEngine.start(rung.model, rung.engine, lambda stage, done, total: None)
    try:
        scores = EngineScorer(rung.name, engine).score(task.windows, task.top, progress)
        answer(engine, task.prompts[0], task.tokens)  # drafters and caches begin somewhere: not counted
        found = [answer(engine, one, task.tokens) for _ in range(task.repeats) for one in task.prompts]
        answers = tuple(ids for ids, _ in found[: len(task.prompts)])
        return Climbed(rung, engine.engine.setup.facts, tuple(rate for _, rate in found), answers, tuple(scores))
    finally:
        engine.close()


def answer(engine: LocalEngine, prompt: Answer, tokens: int) -> tuple[Answer, float]:
    """A greedy answer of `tokens` tokens, and the tokens per second behind those that came first."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    engine.submit(Submit("ladder", list(prompt), sampling, time.time(), cache=False))
    ids: list[int] = []
    first_s, first = 0.0, 0
    for delta in engine.news():
        if delta.error:
            raise EngineFailed(delta.error)
        ids += delta.tokens
        if ids and not first:
            first_s, first = time.perf_counter(), len(ids)
    return tuple(ids), (len(ids) - first) / max(time.perf_counter() - first_s, 1e-9)


def flips(below: Sequence[Answer], above: Sequence[Answer]) -> tuple[int, int]:
    """(answers that differ, tokens compared). Tokens behind the first difference answer another text and do not count."""
    differing = compared = 0
    for ours, theirs in zip(below, above, strict=True):
        same = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        differing += same is not None
        compared += len(ours) if same is None else same + 1
    return differing, compared


def rows(climbed: Sequence[Climbed], task: Task) -> list[dict[str, Any]]:
    """A row per rung as plain data. tok_s is the median, tok_s_low and tok_s_high quartiles; weight_bytes without drafters."""
    found: list[dict[str, Any]] = []
    documents = [one.document for one in task.windows]
    for place, one in enumerate(climbed):
        parts = [token_drift(*pair) for pair in zip(climbed[0].scores, one.scores, strict=True)]
        drift = measure(by_document(parts, documents))
        low, middle, high = statistics.quantiles(one.rates, n=4) if len(one.rates) > 1 else 3 * one.rates
        row: dict[str, Any] = {
            "rung": one.rung.name,
            "dtype": one.facts["dtype"],
            "quantization": one.facts["quantization"],
            "speculate": "+".join(map(str, one.facts["speculate"])),
            "ops": one.facts["ops"],
            "device": one.facts["device"],
            "tok_s": round(middle, 2),
            "tok_s_low": round(low, 2),
            "tok_s_high": round(high, 2),
            "weight_bytes": one.facts["weight_bytes"],
        }
        row["speedup"] = round(row["tok_s"] / found[0]["tok_s"], 3) if found else 1.0
        for name in ("perplexity", "perplexity_change", "kl", "top1"):
            row[name] = round(drift.figures[name].value, 6) + 0.0  # never -0.0
        if one.rung.engine.speculate:
            differing, compared = flips(climbed[place - 1].answers, one.answers)
            row |= {"answers": len(one.answers), "answers_changed": differing, "tokens_compared": compared}
        found.append(row | {"scored_tokens": drift.tokens})
    return found


def chart(found: Sequence[Mapping[str, Any]], title: str) -> Chart:
    """Speed over the weights' bytes, rung by rung, each with what it did to the answers."""
    points = [
        (row["weight_bytes"] / 1e6, row["tok_s"], f"{row['rung']}: {row['tok_s']:.4g} tok/s, KL {row['kl']:.2g}")
        for row in found
    ]
    line = Line("", tuple((x, y) for x, y, _ in points), dashed=True)
    return Chart(
        title,
        Axis.around((x for x, _, _ in points), "weights, MB"),
        Axis.around((y for _, y, _ in points), "tokens per second, one request"),
        (Guide("eager", y=points[0][1]), line, Points("rungs", tuple(points))),
    )
