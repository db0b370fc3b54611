"""What came of a run: one ledger row per request, and the run around them; written and read as run.json and
requests.jsonl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import Slo

RUN_FILE = "run.json"
ROWS_FILE = "requests.jsonl"


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times in seconds after the run's start, None where it never came to that.

    scheduled_s: when it was due, which all latencies count from. held_s: how long a limit on concurrency kept it back.
    issued_s: when the load generator turned to it; sent_s: when its bytes were written, after connecting. first_s: first
    token; answered_s: first text that is no thought; last_s: last token; ended_s: end of the answer or of the attempt.
    gaps_s: time between arrivals, and counts: tokens of each arrival, the first one included. counted: how tokens were
    divided among arrivals: "server" (it says), "one" (as many events as tokens), "characters" (a guess by length).
    answer_id: the server's own name of the answer, which its ledger has.
    Tokens are the server's count of them where it gives one, else what was asked (input) and the events (output).
    """

    id: str
    index: int
    scheduled_s: float
    held_s: float
    issued_s: float
    sent_s: float
    ended_s: float
    asked_input: int
    asked_output: int
    input_tokens: int
    first_s: float | None = None
    answered_s: float | None = None
    last_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    counted: str = ""
    output_tokens: int = 0
    cached_tokens: int = 0
    input_characters: int = 0
    characters: int = 0
    hidden_characters: int = 0
    answer_id: str = ""
    finish: str = ""
    status: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def publish_s(self) -> float | None:
        """Until the first text that a user sees: later than the first token by the model's thoughts."""
        return None if self.answered_s is None else self.answered_s - self.scheduled_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first arrival, which may have brought several; None when nothing came after it."""
        if self.first_s is None or self.last_s is None or not self.gaps_s:
            return None
        after = sum(self.counts[1:])
        return (self.last_s - self.first_s) / after if after > 0 else None

    @property
    def lag_s(self) -> float:
        """How late the load generator was."""
        return self.issued_s - self.scheduled_s - self.held_s

    def missed(self, slo: Slo) -> str:
        """Why the request is not good, "" if it is."""
        return f"error: {self.error}" if self.error else slo.verdict(self.ttft_s, self.tpot_s, self.e2e_s)


@dataclass(frozen=True, slots=True)
class Run:
    """One run. facts: what was run against what (url, model, workload, seed, rate, ...), as JSON values.

    seconds: from the start to the end of the last request. dropped: requests that could not fit the model's context, and
    were not sent. loop_lag_s: how late the event loop was, each time it was looked at. cpu_s: processor time of this
    process.
    """

    facts: dict[str, Any]
    rows: tuple[Row, ...]
    seconds: float
    dropped: int = 0
    loop_lag_s: tuple[float, ...] = ()
    cpu_s: float = 0.0
    slo: Slo = field(default_factory=Slo)

    @property
    def good(self) -> list[Row]:
        return [row for row in self.rows if not row.missed(self.slo)]

    @property
    def completed(self) -> list[Row]:
        return [row for row in self.rows if not row.error]

    @property
    def attainment(self) -> float:
        """Share of all offered requests that are good: no error, no limit missed."""
        return len(self.good) / len(self.rows) if self.rows else math.nan

    @property
    def broken(self) -> tuple[str, ...]:
        """What of the SLO's percentiles and its share the run misses, in words. Failed requests are within nothing."""
        rows, slo = self.rows, self.slo
        kept = [slo.within(row.ttft_s, row.tpot_s, row.e2e_s) for row in rows if not row.error]
        shares = [sum(one[place] for one in kept) / max(1, len(rows)) for place in range(len(slo.objectives))]
        return slo.broken(shares, self.attainment)

    @property
    def name(self) -> str:
        """A few words that tell this run from others."""
        facts = self.facts
        load = f"{facts['rate']:g}/s" if facts.get("rate") is not None else f"concurrency {facts.get('concurrency')}"
        return str(facts.get("label") or f"{facts.get('model', '')} {load}")


class _Saved(msgspec.Struct):
    """Our own part of run.json."""

    facts: dict[str, Any]
    seconds: float
    dropped: int
    loop_lag_s: tuple[float, ...]
    cpu_s: float
    slo: Slo


class _File(msgspec.Struct):
    ridgeline: _Saved


def write_run(run: Run, folder: Path, figures: dict[str, Any]) -> None:
    """Write run.json (`figures` and what `read_run` needs) and requests.jsonl into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = _Saved(run.facts, run.seconds, run.dropped, run.loop_lag_s, run.cpu_s, run.slo)
    ours = {**figures.get("ridgeline", {}), **msgspec.to_builtins(saved)}
    (folder / RUN_FILE).write_bytes(_json({**figures, "ridgeline": ours}))
    with (folder / ROWS_FILE).open("wb") as file:
        for row in run.rows:
            latencies = {"ttft_s": row.ttft_s, "tpot_s": row.tpot_s, "e2e_s": row.e2e_s, "lag_s": row.lag_s}
            file.write(msgspec.json.encode({**msgspec.to_builtins(row), **latencies, "missed": row.missed(run.slo)}))
            file.write(b"\n")


def read_run(path: Path) -> Run:
    """Read a run's folder (or its run.json). Raises ConfigError."""
    folder = path.parent if path.name == RUN_FILE else path
    try:
        saved = msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=_File).ridgeline
        rows = _rows((folder / ROWS_FILE).read_bytes().splitlines())
    except OSError as error:
        remedy = f"give a folder that `ridgeline bench run --out` wrote, with {RUN_FILE} and {ROWS_FILE}"
        raise ConfigError(f"Cannot read the run {path} ({error.strerror}): {remedy}.") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"Cannot read the run {path}: {error}.") from None
    return Run(saved.facts, rows, saved.seconds, saved.dropped, saved.loop_lag_s, saved.cpu_s, saved.slo)


def _rows(lines: Sequence[bytes]) -> tuple[Row, ...]:
    return tuple(msgspec.json.decode(line, type=Row) for line in lines if line)


def _json(value: Any) -> bytes:
    """Indented JSON; what is not finite becomes null, because JSON has no word for it."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
