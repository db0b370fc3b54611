"""Readers of traces: one per format, chosen by what the file says. All give a Workload.

Azure CSV (Patel et al. 2024, Splitwise), Mooncake JSONL (Qin et al. 2025), BurstGPT CSV (Wang et al. 2024), Vidur CSV,
ShareGPT JSON, WEKA's conversations (kv-cache-tester), prompts as JSONL, and {"name", "lens": [[input, output], ...]}. A file
may be gzipped.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.bench.workload import Ask, Workload
from ridgeline.core.errors import ConfigError

CHARACTERS_PER_TOKEN = 4.0
"""Guess for texts whose tokens nobody has counted; the server's own count replaces it in every result."""
TEXT_OUTPUT = 256
"""Output tokens of a prompt that says nothing of its answer."""

_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?")


def read_trace(path: Path) -> Workload:
    """Read a trace of any known format. Raises ConfigError that names the file, the line and the remedy."""
    text = _text(path)
    try:
        asks, skipped, timed = _read(text)
    except (KeyError, ValueError, TypeError, msgspec.DecodeError) as error:
        raise ConfigError(f"Cannot read the trace {path} ({error}).", param="trace") from None
    if not asks:
        raise ConfigError(f"The trace {path} contains no request.", param="trace")
    start = min(ask.at_s for ask in asks)
    moved = [replace(ask, at_s=ask.at_s - start) for ask in sorted(asks, key=lambda one: one.at_s)]
    return Workload(path.name, tuple(moved), timed, skipped)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"Cannot read the trace {path}: {error.strerror}.", param="trace") from None
    try:
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(f"The trace {path} is not UTF-8 text ({error}).", param="trace") from None


def _read(text: str) -> tuple[list[Ask], int, bool]:
    """(requests, rows that are none, whether times mean something)."""
    begin = text.lstrip()[:1]
    if begin == "[":
        return _conversations(msgspec.json.decode(text.encode()))
    if begin != "{":
        return _table(text)
    first = text.lstrip().partition("\n")[0]
    if '"lens"' in text[:4096] and not first.rstrip().endswith("}"):
        return _lens(msgspec.json.decode(text.encode()))
    if '"requests"' in text[:4096] and not first.rstrip().endswith("}"):
        return _agents([msgspec.json.decode(text.encode())])
    one = msgspec.json.decode(first.encode())
    if "requests" in one:
        return _agents([msgspec.json.decode(line.encode()) for line in text.split("\n") if line.strip()])
    return _lens(one) if "lens" in one else _lines(text)


@dataclass(frozen=True, slots=True)
class _Columns:
    """How a CSV names what we need, and how it writes a time."""

    at: str
    input: str
    output: str
    seconds: Callable[[str], float]


def _moment(text: str) -> float:
    """Unix seconds of a date and time with any number of fractional digits; without a zone it is UTC."""
    match = _MOMENT.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a date and time")
    whole = datetime.fromisoformat(match[1] + (match[3] or "").replace("Z", "+00:00"))
    zoned = whole if whole.tzinfo else whole.replace(tzinfo=UTC)
    return zoned.timestamp() + float(match[2] or 0)


_TABLES: Mapping[str, _Columns] = {
    "Azure": _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", _moment),
    "BurstGPT": _Columns("Timestamp", "Request tokens", "Response tokens", float),
    "Vidur": _Columns("arrived_at", "num_prefill_tokens", "num_decode_tokens", float),
}


def _table(text: str) -> tuple[list[Ask], int, bool]:
    rows = csv.DictReader(io.StringIO(text))
    names = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = names
    form = next((one for one in _TABLES.values() if {one.at, one.input, one.output} <= set(names)), None)
    if form is None:
        known = "; ".join(f"{name}: {one.at}, {one.input}, {one.output}" for name, one in _TABLES.items())
        raise ValueError(f"unknown columns in its first line; known columns are {known}")
    asks, skipped = [], 0
    for row in rows:
        try:
            ask = Ask(form.seconds(row[form.at]), int(float(row[form.input])), int(float(row[form.output])))
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {rows.line_num}: {error}") from None
        if ask.input > 0 and ask.output > 0:
            asks.append(ask)
        else:
            skipped += 1
    return asks, skipped, True


def _lens(found: Mapping[str, Any]) -> tuple[list[Ask], int, bool]:
    return [Ask(0.0, int(asked), int(wanted)) for asked, wanted in found["lens"]], 0, False


def _lines(text: str) -> tuple[list[Ask], int, bool]:
    """Mooncake's lines, or prompts with or without a time."""
    asks, skipped, timed = [], 0, False
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line.encode())
            timed = timed or "timestamp" in row
            ask = _line(row)
        except (KeyError, ValueError, TypeError, msgspec.DecodeError) as error:
            what = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"line {number}: {what}") from None
        if ask.input > 0 and ask.output > 0:
            asks.append(ask)
        else:
            skipped += 1
    return asks, skipped, timed


def _line(row: Mapping[str, Any]) -> Ask:
    at = float(row.get("timestamp", 0.0)) / 1000
    text = row.get("prompt") or row.get("text_input") or _turn(row.get("turns"))
    if text:
        wanted = row.get("output_length") or row.get("output_tokens") or row.get("max_tokens") or TEXT_OUTPUT
        return Ask(at, row.get("input_length") or _guess(text), int(wanted), text=text)
    return Ask(at, int(row["input_length"]), int(row["output_length"]), tuple(row.get("hash_ids", ())))


def _turn(turns: Sequence[str] | None) -> str:
    return turns[0] if turns else ""


def _conversations(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Ask], int, bool]:
    """ShareGPT: each thing a human says, behind all that was said before, and as long an answer as the one it got.

    What was said before is the trace's own, answers too, so that every server is asked the same.
    """
    asks: list[Ask] = []
    skipped = 0
    for number, row in enumerate(rows):
        found = list(_turns(row.get("conversations") or row.get("conversation") or (), number))
        asks += found if len(found) != 1 else [replace(found[0], session=-1)]
        skipped += not found
    return asks, skipped, False


def _turns(turns: Sequence[Mapping[str, Any]], session: int) -> Iterator[Ask]:
    """Questions that have an answer, from the first one on until one has none."""
    said = [(turn.get("from") or turn.get("role"), turn.get("value") or turn.get("content") or "") for turn in turns]
    history: tuple[str, ...] = ()
    for (who, prompt), (other, answer) in pairwise(said):
        if who not in ("human", "user"):
            continue
        if other not in ("gpt", "assistant", "chatgpt") or not prompt or not answer:
            if history:
                return
            continue
        known = sum(map(_guess, history))
        yield Ask(0.0, known + _guess(prompt), _guess(answer), text=prompt, session=session, history=history)
        history += (prompt, answer)


def _agents(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Ask], int, bool]:
    """WEKA's conversations: `t` is seconds after the conversation's begin, block ids mean something within it alone. What an
    agent's helpers ask (requests within a request) comes in the order of time, as turns of the same conversation."""
    asks: list[Ask] = []
    skipped = 0
    numbers: dict[tuple[int, int], int] = {}
    for session, row in enumerate(rows):
        block = int(row.get("block_size", 64))
        for at, one in sorted(_nested(row["requests"], 0.0), key=lambda each: each[0]):
            ids = tuple(numbers.setdefault((session, name), len(numbers)) for name in one.get("hash_ids", ()))
            ask = Ask(at, int(one.get("in", 0)), int(one.get("out", 0)), ids, block, session=session)
            if ask.input > 0 and ask.output > 0:
                asks.append(ask)
            else:
                skipped += 1
    return asks, skipped, True


def _nested(requests: Sequence[Mapping[str, Any]], start: float) -> Iterator[tuple[float, Mapping[str, Any]]]:
    for one in requests:
        at = start + float(one["t"])
        if "in" in one:
            yield at, one
        yield from _nested(one.get("requests", ()), at)


def _guess(text: str) -> int:
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))
