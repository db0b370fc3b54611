"""The results of a batch on disk: two files of JSON lines that only grow, and that say by themselves which rows are done.

Each line's id contains its row number. After a crash the files are read again: a torn last line is cut off, and every complete line
is a finished row. So no finished row is lost and none is written twice, and no second record can disagree with the files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ridgeline.service.batches.input import row_of
from ridgeline.service.batches.objects import BatchUsage


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Result(msgspec.Struct):
    id: str
    response: _Response | None = None


class _Body(msgspec.Struct):
    usage: dict[str, Any]


_RESULT = msgspec.json.Decoder(_Result)
_BODY = msgspec.json.Decoder(_Body)


class ResultLog:
    """One file of results. Lines are appended whole or not at all."""

    def __init__(self, path: Path) -> None:
        """Open for appending. A torn last line is cut off."""
        self.path = path
        self._file: BinaryIO = path.open("a+b", buffering=0)
        self.size = 0
        """Bytes of complete lines."""
        self._synced = 0

    def scan(self) -> Iterator[_Result]:
        """The results in the file. What follows the last valid line is cut off."""
        if not self.path.stat().st_size:
            return
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    result = _RESULT.decode(line)
                    row_of(result.id)
                except (msgspec.MsgspecError, ValueError):
                    break  # blocks that a power failure has not written
                self.size += len(line)
                yield result
        self._file.truncate(self.size)

    def append(self, line: bytes) -> None:
        """Add a line. Raises OSError if the disk is full; the file then ends with the line before."""
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            with contextlib.suppress(OSError):  # the error that matters is the one of the write
                self._file.truncate(self.size)
            raise
        self.size += len(line)

    def sync(self) -> None:
        """Wait until the disk has all lines."""
        if self._synced < self.size:
            size = self.size
            os.fsync(self._file.fileno())
            self._synced = size

    def close(self) -> None:
        self._file.close()


@dataclass(slots=True)
class Results:
    """Both files of a batch. done: rows that have a result."""

    output: ResultLog
    errors: ResultLog
    done: set[int]
    usage: BatchUsage
    completed: int = 0
    failed: int = 0

    @classmethod
    def open(cls, output: Path, errors: Path) -> Results:
        """Open the files, and read what they contain. Their time grows with the files: call it in a thread."""
        results = cls(ResultLog(output), ResultLog(errors), set(), BatchUsage())
        for result in results.output.scan():
            assert result.response is not None
            results.done.add(row_of(result.id))
            results.completed += 1
            results.usage.add(_BODY.decode(result.response.body).usage)
        for result in results.errors.scan():
            results.done.add(row_of(result.id))
            results.failed += 1
        return results

    def complete(self, row: int, line: bytes, usage: Mapping[str, Any]) -> None:
        """Add the answer of a row."""
        self.output.append(line)
        self.done.add(row)
        self.completed += 1
        self.usage.add(usage)

    def fail(self, row: int, line: bytes) -> None:
        """Add the error of a row."""
        self.errors.append(line)
        self.done.add(row)
        self.failed += 1

    def sync(self) -> None:
        self.output.sync()
        self.errors.sync()

    def close(self) -> None:
        self.output.close()
        self.errors.close()

    def delete_empty(self) -> None:
        """Delete a file without a result."""
        for log in (self.output, self.errors):
            if not log.size:
                log.path.unlink(missing_ok=True)
