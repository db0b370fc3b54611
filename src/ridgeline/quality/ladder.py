"""The optimization ladder: speed, memory and drift of one model, one optimization after the other.

Every rung keeps the optimizations of the rung below. Speed is the decode rate of one greedy request at a time. Drift is
measured against the lowest rung on fixed texts. Speculation does not change the distribution, so its answers are also
compared with those of the rung below. They differ only where two tokens are equally likely up to rounding.
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
    """One configuration that serves the model."""

    name: str
    model: ModelConfig
    engine: EngineConfig


@dataclass(frozen=True, slots=True)
class RungWorkload:
    """The requests that every rung serves."""

    prompts: Sequence[Answer]
    tokens: int
    """Tokens of each greedy answer."""
    repeats: int
    """Answers per prompt."""
    windows: Sequence[Window]
    """Texts that are scored."""
    top: int
    """Alternatives per scored token."""


@dataclass(frozen=True, slots=True)
class RungResult:
    """The measurements of one rung."""

    rung: Rung
    facts: Mapping[str, Any]
    """Facts that the engine reports about itself."""
    rates: tuple[float, ...]
    """Tokens per second of each answer."""
    answers: tuple[Answer, ...]
    """One per prompt."""
    scores: tuple[Scores, ...]


def rungs(model: ModelConfig, engine: EngineConfig, formats: Sequence[str], compiled: str) -> list[Rung]:
    """List the rungs from eager operations in the model's dtype to speculation. compiled: name of the second rung."""
    speculate = engine.speculate or "auto"
    engine = replace(engine, speculate="", enforce_eager=False)
    ladder = [Rung("eager", model, replace(engine, enforce_eager=True)), Rung(compiled, model, engine)]
    ladder += [Rung(name, replace(model, quantization=name), engine) for name in formats]
    return [*ladder, Rung("speculation", ladder[-1].model, replace(engine, speculate=speculate))]


def measure_rung(rung: Rung, workload: RungWorkload, progress: Progress) -> RungResult:
    """Start an engine, measure one rung and close the engine. Raises EngineFailed, or the error of the engine's start."""
    engine = LocalEngine.start(rung.model, rung.engine, lambda stage, done, total: None)
    try:
        scores = EngineScorer(rung.name, engine).score(workload.windows, workload.top, progress)
        answer(engine, workload.prompts[0], workload.tokens)  # warms up drafters and caches; not counted
        timed = [
            answer(engine, prompt, workload.tokens) for _ in range(workload.repeats) for prompt in workload.prompts
        ]
        answers = tuple(ids for ids, _ in timed[: len(workload.prompts)])
        return RungResult(rung, engine.engine.setup.facts, tuple(rate for _, rate in timed), answers, tuple(scores))
    finally:
        engine.close()


def answer(engine: LocalEngine, prompt: Answer, tokens: int) -> tuple[Answer, float]:
    """Return a greedy answer of `tokens` tokens, and the tokens per second after the first delta."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    engine.submit(Submit("ladder", list(prompt), sampling, time.monotonic(), cache=False))
    ids: list[int] = []
    first_s, first_tokens = 0.0, 0
    for delta in engine.deltas():
        if delta.error:
            raise EngineFailed(delta.error)
        ids += delta.tokens
        if ids and not first_tokens:
            first_s, first_tokens = time.perf_counter(), len(ids)
    return tuple(ids), (len(ids) - first_tokens) / max(time.perf_counter() - first_s, 1e-9)


def flips(below: Sequence[Answer], above: Sequence[Answer]) -> tuple[int, int]:
    """Return (answers that differ, tokens compared). Tokens after the first difference have another context and do not count."""
    differing = compared = 0
    for below_answer, above_answer in zip(below, above, strict=True):
        divergence = next(
            (index for index, pair in enumerate(zip(below_answer, above_answer, strict=True)) if pair[0] != pair[1]),
            None,
        )
        differing += divergence is not None
        compared += len(below_answer) if divergence is None else divergence + 1
    return differing, compared


def rows(results: Sequence[RungResult], workload: RungWorkload) -> list[dict[str, Any]]:
    """Return one row per rung. tok_s is the median, tok_s_low and tok_s_high the quartiles. weight_bytes excludes drafters."""
    table: list[dict[str, Any]] = []
    documents = [window.document for window in workload.windows]
    for index, result in enumerate(results):
        parts = [token_drift(*pair) for pair in zip(results[0].scores, result.scores, strict=True)]
        drift = measure(by_document(parts, documents))
        low, middle, high = statistics.quantiles(result.rates, n=4) if len(result.rates) > 1 else 3 * result.rates
        row: dict[str, Any] = {
            "rung": result.rung.name,
            "dtype": result.facts["dtype"],
            "quantization": result.facts["quantization"],
            "speculate": "+".join(map(str, result.facts["speculate"])),
            "ops": result.facts["ops"],
            "device": result.facts["device"],
            "tok_s": round(middle, 2),
            "tok_s_low": round(low, 2),
            "tok_s_high": round(high, 2),
            "weight_bytes": result.facts["weight_bytes"],
        }
        row["speedup"] = round(row["tok_s"] / table[0]["tok_s"], 3) if table else 1.0
        for name in ("perplexity", "perplexity_change", "kl", "top1"):
            row[name] = round(drift.figures[name].value, 6) + 0.0  # never -0.0
        if result.rung.engine.speculate:
            differing, compared = flips(results[index - 1].answers, result.answers)
            row |= {"answers": len(result.answers), "answers_changed": differing, "tokens_compared": compared}
        table.append(row | {"scored_tokens": drift.tokens})
    return table


def chart(table: Sequence[Mapping[str, Any]], title: str) -> Chart:
    """Plot speed against weight bytes, one point per rung. Labels state the KL divergence."""
    points = [
        (row["weight_bytes"] / 1e6, row["tok_s"], f"{row['rung']}: {row['tok_s']:.4g} tok/s, KL {row['kl']:.2g}")
        for row in table
    ]
    line = Line("", tuple((x, y) for x, y, _ in points), dashed=True)
    return Chart(
        title,
        Axis.around((x for x, _, _ in points), "weights, MB"),
        Axis.around((y for _, y, _ in points), "tokens per second, one request"),
        (Guide("eager", y=points[0][1]), line, Points("rungs", tuple(points))),
    )
