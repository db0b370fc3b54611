"""The record of a run: one row per request and the run's facts, stored as requests.jsonl and run.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import Latencies, Slo

RUN_FILE = "run.json"
ROWS_FILE = "requests.jsonl"


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times are seconds after the run's start; None if the event did not happen.

    An arrival is the data of one read of the socket that contains new output.
    """

    id: str
    index: int
    scheduled_s: float
    """When the request was due. All latencies count from here."""
    held_s: float
    """Wait for a concurrency limit."""
    issued_s: float
    """When the load generator began to send it."""
    sent_s: float
    """When its bytes were written, after connecting."""
    ended_s: float
    """End of the answer, or of the failed attempt."""
    asked_input: int
    """Requested prompt tokens."""
    asked_output: int
    """Requested output tokens."""
    input_tokens: int
    """By the server's count, else `asked_input`."""
    first_s: float | None = None
    """First token."""
    answered_s: float | None = None
    """First visible content: text that is not hidden reasoning, or part of a tool call."""
    last_s: float | None = None
    """Last token."""
    gaps_s: tuple[float, ...] = ()
    """Seconds between arrivals."""
    counts: tuple[int, ...] = ()
    """Tokens of each arrival, the first one included."""
    counted: str = ""
    """How tokens were assigned to arrivals: "server" (its counts), "one" (one token per event), "characters" (by length)."""
    output_tokens: int = 0
    """By the server's count, else the number of events."""
    cached_tokens: int = 0
    input_characters: int = 0
    characters: int = 0
    hidden_characters: int = 0
    """Characters of reasoning."""
    answer_id: str = ""
    """The id of the answer in the server's ledger."""
    run_id: str = ""
    """The agent run that the request belongs to, or ""."""
    finish: str = ""
    status: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def publish_s(self) -> float | None:
        """Time to publish: until the first visible content. Later than TTFT if the model reasons first.

        It equals TTFT for a complete answer without any text, which hides nothing.
        """
        if self.answered_s is None:
            return None if self.error or self.hidden_characters else self.ttft_s
        return self.answered_s - self.scheduled_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first arrival, which may contain several tokens. None without a second arrival."""
        if self.first_s is None or self.last_s is None or not self.gaps_s:
            return None
        after = sum(self.counts[1:])
        return (self.last_s - self.first_s) / after if after > 0 else None

    @property
    def latencies(self) -> Latencies:
        return Latencies(self.ttft_s, self.publish_s, self.tpot_s, self.e2e_s)

    @property
    def lag_s(self) -> float:
        """Delay caused by the load generator."""
        return self.issued_s - self.scheduled_s - self.held_s

    def missed(self, slo: Slo) -> str:
        """Return why the request is not good, or ""."""
        return f"error: {self.error}" if self.error else slo.verdict(self.latencies)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a benchmark."""

    facts: dict[str, Any]
    """Settings as JSON values: url, model, workload, seed, rate, ..."""
    rows: tuple[Row, ...]
    seconds: float
    """From the start to the end of the last request."""
    dropped: int = 0
    """Requests that were not sent, because they exceed the model's context."""
    loop_lag_s: tuple[float, ...] = ()
    """Lag of the client's event loop at each probe."""
    cpu_s: float = 0.0
    """CPU time of the client."""
    slo: Slo = field(default_factory=Slo)

    @property
    def interrupted(self) -> bool:
        """Ended by Ctrl-C, with the requests that had ended."""
        return bool(self.facts.get("interrupted"))

    @property
    def good(self) -> list[Row]:
        return [row for row in self.rows if not row.missed(self.slo)]

    @property
    def completed(self) -> list[Row]:
        return [row for row in self.rows if not row.error]

    @property
    def attainment(self) -> float:
        """Share of offered requests that are good: no error and no missed limit."""
        return len(self.good) / len(self.rows) if self.rows else math.nan

    @property
    def broken(self) -> tuple[str, ...]:
        """Describe the percentiles and the share of the SLO that the run misses. A failed request meets no limit."""
        rows, slo = self.rows, self.slo
        objectives_met = [slo.within(row.latencies) for row in rows if not row.error]
        shares = [sum(met[index] for met in objectives_met) / max(1, len(rows)) for index in range(len(slo.objectives))]
        return slo.broken(shares, self.attainment)

    @property
    def name(self) -> str:
        """A short name that distinguishes this run from others."""
        facts = self.facts
        load = f"{facts['rate']:g}/s" if facts.get("rate") is not None else f"concurrency {facts.get('concurrency')}"
        return str(facts.get("label") or f"{facts.get('model', '')} {load}")


class _Saved(msgspec.Struct):
    """The part of run.json that `read_run` needs."""

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
            latencies = {f"{name}_s": value for name, value in row.latencies._asdict().items()} | {"lag_s": row.lag_s}
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
    """Encode as indented JSON. Values that are not finite become null."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
