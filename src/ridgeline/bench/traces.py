"""Readers of trace files. The format is detected from the content.

Formats: Azure CSV (Patel et al. 2024, Splitwise), Mooncake JSONL (Qin et al. 2025), BurstGPT CSV (Wang et al. 2024), Vidur CSV,
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

from ridgeline.core.errors import ConfigError
from ridgeline.core.workload import RequestSpec, Workload

CHARACTERS_PER_TOKEN = 4.0
"""Estimate for texts of unknown token count. In results the server's count replaces it."""
TEXT_OUTPUT = 256
"""Output tokens of a prompt without an output length."""

_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?")


def read_trace(path: Path) -> Workload:
    """Read a trace file. Raises ConfigError that names the file and the line."""
    text = _text(path)
    try:
        requests, skipped, timed = _read(text)
    except (KeyError, ValueError, TypeError, msgspec.DecodeError) as error:
        raise ConfigError(f"Cannot read the trace {path} ({error}).", param="trace") from None
    if not requests:
        raise ConfigError(f"The trace {path} contains no request.", param="trace")
    start = min(request.at_s for request in requests)
    shifted = [
        replace(request, at_s=request.at_s - start) for request in sorted(requests, key=lambda request: request.at_s)
    ]
    return Workload(path.name, tuple(shifted), timed, skipped)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"Cannot read the trace {path}: {error.strerror}.", param="trace") from None
    try:
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(f"The trace {path} is not UTF-8 text ({error}).", param="trace") from None


def _read(text: str) -> tuple[list[RequestSpec], int, bool]:
    """Return the requests, the number of skipped rows and whether the trace has arrival times."""
    begin = text.lstrip()[:1]
    if begin == "[":
        return _conversations(msgspec.json.decode(text.encode()))
    if begin != "{":
        return _table(text)
    first = text.lstrip().partition("\n")[0]
    if '"lens"' in text[:4096] and not first.rstrip().endswith("}"):
        return _length_pairs(msgspec.json.decode(text.encode()))
    if '"requests"' in text[:4096] and not first.rstrip().endswith("}"):
        return _weka_conversations([msgspec.json.decode(text.encode())])
    first_row = msgspec.json.decode(first.encode())
    if "requests" in first_row:
        return _weka_conversations([msgspec.json.decode(line.encode()) for line in text.split("\n") if line.strip()])
    return _length_pairs(first_row) if "lens" in first_row else _json_lines(text)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Column names of a CSV format."""

    at: str
    input: str
    output: str
    seconds: Callable[[str], float]
    """Parses a time to seconds."""


def _moment(text: str) -> float:
    """Parse a date and time with any number of fractional digits to unix seconds. The default time zone is UTC."""
    match = _MOMENT.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a date and time")
    moment = datetime.fromisoformat(match[1] + (match[3] or "").replace("Z", "+00:00"))
    with_zone = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return with_zone.timestamp() + float(match[2] or 0)


_TABLES: Mapping[str, _Columns] = {
    "Azure": _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", _moment),
    "BurstGPT": _Columns("Timestamp", "Request tokens", "Response tokens", float),
    "Vidur": _Columns("arrived_at", "num_prefill_tokens", "num_decode_tokens", float),
}


def _table(text: str) -> tuple[list[RequestSpec], int, bool]:
    rows = csv.DictReader(io.StringIO(text))
    names = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = names
    columns = next(
        (columns for columns in _TABLES.values() if {columns.at, columns.input, columns.output} <= set(names)), None
    )
    if columns is None:
        known = "; ".join(
            f"{name}: {columns.at}, {columns.input}, {columns.output}" for name, columns in _TABLES.items()
        )
        raise ValueError(f"unknown columns in its first line; known columns are {known}")
    requests, skipped = [], 0
    for row in rows:
        try:
            request = RequestSpec(
                columns.seconds(row[columns.at]), int(float(row[columns.input])), int(float(row[columns.output]))
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {rows.line_num}: {error}") from None
        if request.input > 0 and request.output > 0:
            requests.append(request)
        else:
            skipped += 1
    return requests, skipped, True


def _length_pairs(row: Mapping[str, Any]) -> tuple[list[RequestSpec], int, bool]:
    return [RequestSpec(0.0, int(n_input), int(n_output)) for n_input, n_output in row["lens"]], 0, False


def _json_lines(text: str) -> tuple[list[RequestSpec], int, bool]:
    """Read Mooncake's JSONL, or JSONL with prompts."""
    requests, skipped, timed = [], 0, False
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line.encode())
            timed = timed or "timestamp" in row
            request = _line(row)
        except (KeyError, ValueError, TypeError, msgspec.DecodeError) as error:
            reason = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"line {number}: {reason}") from None
        if request.input > 0 and request.output > 0:
            requests.append(request)
        else:
            skipped += 1
    return requests, skipped, timed


def _line(row: Mapping[str, Any]) -> RequestSpec:
    at = float(row.get("timestamp", 0.0)) / 1000
    text = row.get("prompt") or row.get("text_input") or _turn(row.get("turns"))
    if text:
        n_output = row.get("output_length") or row.get("output_tokens") or row.get("max_tokens") or TEXT_OUTPUT
        return RequestSpec(at, row.get("input_length") or _estimate_tokens(text), int(n_output), text=text)
    return RequestSpec(at, int(row["input_length"]), int(row["output_length"]), tuple(row.get("hash_ids", ())))


def _turn(turns: Sequence[str] | None) -> str:
    return turns[0] if turns else ""


def _conversations(rows: Sequence[Mapping[str, Any]]) -> tuple[list[RequestSpec], int, bool]:
    """Read ShareGPT: one request per user message, with the previous messages as history and the length of the recorded answer.

    The history contains the recorded answers, so that every server gets the same requests.
    """
    requests: list[RequestSpec] = []
    skipped = 0
    for number, row in enumerate(rows):
        turns = list(_turns(row.get("conversations") or row.get("conversation") or (), number))
        requests += turns if len(turns) != 1 else [replace(turns[0], session=-1)]
        skipped += not turns
    return requests, skipped, False


def _turns(turns: Sequence[Mapping[str, Any]], session: int) -> Iterator[RequestSpec]:
    """Yield the answered user messages of a conversation, up to the first message after them without an answer."""
    messages = [
        (turn.get("from") or turn.get("role"), turn.get("value") or turn.get("content") or "") for turn in turns
    ]
    history: tuple[str, ...] = ()
    for (role, prompt), (next_role, answer) in pairwise(messages):
        if role not in ("human", "user"):
            continue
        if next_role not in ("gpt", "assistant", "chatgpt") or not prompt or not answer:
            if history:
                return
            continue
        history_tokens = sum(map(_estimate_tokens, history))
        yield RequestSpec(
            0.0,
            history_tokens + _estimate_tokens(prompt),
            _estimate_tokens(answer),
            text=prompt,
            session=session,
            history=history,
        )
        history += (prompt, answer)


def _weka_conversations(rows: Sequence[Mapping[str, Any]]) -> tuple[list[RequestSpec], int, bool]:
    """Read WEKA's conversations.

    `t` is in seconds after the start of the conversation. Block ids are valid within one conversation only. Nested requests of an
    agent become turns of the same conversation in the order of their times.
    """
    requests: list[RequestSpec] = []
    skipped = 0
    numbers: dict[tuple[int, int], int] = {}
    for session, row in enumerate(rows):
        block = int(row.get("block_size", 64))
        for at, turn in sorted(_nested(row["requests"], 0.0), key=lambda each: each[0]):
            ids = tuple(numbers.setdefault((session, name), len(numbers)) for name in turn.get("hash_ids", ()))
            request = RequestSpec(at, int(turn.get("in", 0)), int(turn.get("out", 0)), ids, block, session=session)
            if request.input > 0 and request.output > 0:
                requests.append(request)
            else:
                skipped += 1
    return requests, skipped, True


def _nested(requests: Sequence[Mapping[str, Any]], start: float) -> Iterator[tuple[float, Mapping[str, Any]]]:
    for request in requests:
        at = start + float(request["t"])
        if "in" in request:
            yield at, request
        yield from _nested(request.get("requests", ()), at)


def _estimate_tokens(text: str) -> int:
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))
