"""Reads a batch's input file: finds its lines, checks each of them, and puts them into the order in which they run."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ridgeline.core.errors import BodyTooLarge, RequestError
from ridgeline.service.batches.objects import Problem
from ridgeline.service.batches.rows import choices_of
from ridgeline.service.bodies import LARGE, check_cost
from ridgeline.service.json_values import decode_json
from ridgeline.service.readers import Text, wrong

MAX_LINES = 50_000
MAX_BYTES = 200 << 20
"""Limits of a batch's input file."""
MAX_PROBLEMS = 100
"""Problems listed in a batch that failed."""
_CUSTOM_ID = Text(512)
_PREFIX_CHARACTERS = (64, 256, 1024, 4096)
"""Rows are sorted by hashes of their first characters, the shortest first, so that rows with a common prefix are neighbours."""
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Row:
    """A valid line: who sent it, and the body of its request."""

    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that is not valid. custom_id: None if the line has none that can be read."""

    custom_id: str | None
    error: RequestError

    def problem(self, line: int) -> Problem:
        return Problem(self.error.code or "invalid_request", self.error.message, self.error.param, line)


@dataclass(slots=True)
class InputIndex:
    """The lines of an input file, by row number: the line's number from 0. Blank lines are no rows. Bodies stay in the file.

    spans: offset and length of each row. order: row numbers, sorted by model, then by shared prefix. bad: rows that fail without
    being run. models: the model that each row names. choices: of rows that ask for more than one.
    """

    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    bad: dict[int, BadRow] = field(default_factory=dict)
    models: dict[int, str] = field(default_factory=dict)
    choices: dict[int, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    """Why the whole file is not valid; empty if it is."""


def read_row(line: bytes, endpoint: str) -> Row | BadRow:
    """Check one line, apart from the body's fields, which the endpoint checks when the row runs."""
    custom_id = None
    try:
        value = _decode(line)
        if isinstance(value.get("custom_id"), str):
            custom_id = value["custom_id"][: _CUSTOM_ID.max_length]
        for name in ("custom_id", "method", "url", "body"):
            if value.get(name) is None:
                raise RequestError(
                    f'{name} is missing: send {{"custom_id", "method", "url", "body"}} on each line.', param=name
                )
        if not _CUSTOM_ID.read("custom_id", value["custom_id"]):
            raise wrong("custom_id", "", "a string that is not empty")
        if value["method"] != "POST":
            raise wrong("method", value["method"], '"POST"')
        if value["url"] != endpoint:
            raise wrong("url", value["url"], f"the batch's endpoint {endpoint}")
        if not isinstance(value["body"], dict):
            raise wrong("body", value["body"], "an object")
        if value["body"].get("stream"):
            raise RequestError(
                "body.stream is true: rows of a batch cannot be streamed. Leave it out.", param="body.stream"
            )
    except RequestError as error:
        return BadRow(custom_id, error)
    return Row(value["custom_id"], value["body"])


def _decode(line: bytes) -> dict[str, Any]:
    try:
        if len(line) > LARGE:
            check_cost(line)
        value = decode_json(line)
    except RecursionError as error:
        raise RequestError("The line is nested too deeply: send fewer levels.") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"The line is not valid JSON in UTF-8: {error}.") from error
    if not isinstance(value, dict):
        raise RequestError("The line is not a JSON object: send one object per line.")
    return value


def read_span(file: BinaryIO, span: tuple[int, int]) -> bytes:
    """The bytes of a row."""
    file.seek(span[0])
    return file.read(span[1])


def scan(path: Path, endpoint: str, max_row_bytes: int) -> InputIndex:
    """Index an input file. Its time grows with the file: call it in a thread."""
    index = InputIndex()
    prefixes: list[tuple[str, bytes, int, int]] = []
    names: dict[str, str] = {}
    first_lines: dict[bytes, int] = {}
    with path.open("rb") as file:
        for number, offset, length in _lines(file):
            row = number - 1
            if len(index.spans) == MAX_LINES:
                index.problems = [_too_many()]
                return index
            index.spans[row] = offset, length
            time.sleep(0)  # let the event loop run between two lines
            if length > max_row_bytes:
                index.bad[row] = BadRow(None, _row_too_large(max_row_bytes))
                continue
            value = read_row(read_span(file, (offset, length)), endpoint)
            if isinstance(value, Row):
                key = hashlib.blake2b(value.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if (first := first_lines.setdefault(key, number)) != number:
                    value = BadRow(value.custom_id, _repeated(value.custom_id, first))
            if isinstance(value, BadRow):
                index.bad[row] = value
                continue
            if isinstance(model := value.body.get("model"), str):
                index.models[row] = names.setdefault(model, model)
            if (choices := choices_of(value.body)) > 1:
                index.choices[row] = choices
            prefixes.append((index.models.get(row, ""), prefix_key(value.body), length, row))
    index.order = [row for *_, row in sorted(prefixes)]
    index.problems = _problems(index)
    return index


def prefix_key(body: dict[str, Any]) -> bytes:
    """Hashes of the body's first characters. Equal beginnings of two keys mean equal beginnings of two prompts."""
    prompt = [body.get("tools"), body.get("messages"), body.get("prompt"), body.get("input")]
    text = msgspec.json.encode([part for part in prompt if part is not None])
    hashes = (hashlib.blake2b(text[:size], digest_size=_HASH_BYTES).digest() for size in _PREFIX_CHARACTERS)
    return b"".join(hashes)


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """(line number from 1, offset, length without the line end) of each line that is not blank. Long lines are not held."""
    offset = 0
    number = 0
    while True:
        number += 1
        length, blank, ended = 0, True, False
        while not ended:
            part = file.readline(1 << 20)
            if not part:
                break
            ended = part.endswith(b"\n")
            length += len(part)
            blank = blank and not part.strip()
        if not length:
            return
        position = file.tell()
        if not blank:
            yield number, offset, length - int(ended)
        offset = position
        file.seek(position)


def _problems(index: InputIndex) -> list[Problem]:
    """Why the whole file fails: it has no row, or no valid one."""
    if not index.spans:
        return [Problem("empty_file", "The input file has no lines: send one request per line.", "input_file_id")]
    if len(index.bad) < len(index.spans):
        return []
    return [bad.problem(row + 1) for row, bad in list(index.bad.items())[:MAX_PROBLEMS]]


def _too_many() -> Problem:
    return Problem(
        "too_many_lines",
        f"The input file has more than {MAX_LINES} lines: split it into several batches.",
        "input_file_id",
    )


def _row_too_large(limit: int) -> RequestError:
    return BodyTooLarge(f"The line is larger than {limit / (1 << 20):g} MiB: send less, or raise --max-body-mb.")


def _repeated(custom_id: str, first: int) -> RequestError:
    return RequestError(
        f"custom_id {custom_id[:80]!r} is already used on line {first}: give every line another one.", param="custom_id"
    )


def row_id(batch_id: str, row: int) -> str:
    """The id of a row's result. It ends with the row number, so that results say which rows are done."""
    return f"batch_req_{batch_id.removeprefix('batch_')}{row:08x}"


def row_of(result_id: str) -> int:
    """The row number in the id of a result."""
    return int(result_id[-8:], 16)


def answered(result_id: str, custom_id: str | None, status: int, body: bytes, request_id: str) -> bytes:
    """The result of a row that has an HTTP answer, as a line. body: its JSON."""
    head = msgspec.json.encode({"id": result_id, "custom_id": custom_id})[:-1]
    response = msgspec.json.encode({"status_code": status, "request_id": request_id})[:-1]
    return head + b',"response":' + response + b',"body":' + body + b'},"error":null}\n'


def not_run(result_id: str, custom_id: str | None, code: str, message: str) -> bytes:
    """The result of a row that was never run, as a line."""
    error = {"code": code, "message": message}
    return msgspec.json.encode({"id": result_id, "custom_id": custom_id, "response": None, "error": error}) + b"\n"
