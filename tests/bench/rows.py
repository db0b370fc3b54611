"""Runs made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.bench.record import Row, Run
from ridgeline.core.slo import Slo


def row(
    index: int = 0, *, at: float = 0.0, ttft: float = 0.1, tpot: float = 0.01, tokens: int = 11, **more: Any
) -> Row:
    """A request that was sent on time and got a token per arrival."""
    first = at + ttft
    last = first + tpot * (tokens - 1)
    values = {
        "id": f"r-{index}", "index": index, "scheduled_s": at, "held_s": 0.0, "issued_s": at, "sent_s": at, "ended_s": last,
        "asked_input": 100, "asked_output": tokens, "input_tokens": 100, "first_s": first, "answered_s": first,
        "last_s": last, "gaps_s": (tpot,) * (tokens - 1), "counts": (1,) * tokens, "counted": "server",
        "output_tokens": tokens, "characters": 4 * tokens, "finish": "length", "status": 200,
    }  # fmt: skip
    return Row(**{**values, **more})


def failed(index: int = 0, *, at: float = 0.0, error: str = "HTTP 500: no") -> Row:
    return Row(f"r-{index}", index, at, 0.0, at, at, at + 0.01, 100, 10, 100, error=error, status=500)


def make_run(rows: Sequence[Row], slo: str = "", seconds: float | None = None, **facts: Any) -> Run:
    settings = {"model": "m", "rate": 1.0, "concurrency": None, "fingerprint": "same", **facts}
    ended = max((row.ended_s for row in rows), default=0.0)
    return Run(settings, tuple(rows), ended if seconds is None else seconds, slo=Slo.parse(slo))
