"""Output of the command line: progress bars, the resolved configuration, formatted sizes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ridgeline.core.resolve import Resolved

_FACTS = {
    "max_model_len": "max_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "block_size": "page_tokens",
    "steps_in_flight": "steps_in_flight",
    "dtype": "dtype",
}


def engine_options(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration fields that the engine chose, from the facts that it reports."""
    return {name: facts[fact] for name, fact in _FACTS.items() if fact in facts}


class LossyStream:
    """Writes to a stream as long as that works. A server outlives a log that cannot be written, because the disk is full or because
    the reader of a pipe has ended: those lines are lost.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def server_console() -> Console:
    """Standard error of a server."""
    return Console(file=cast(TextIO, LossyStream(sys.stderr)))


def announcer(log_format: str) -> Callable[[str], None]:
    """What says to the user that a server listens: a line on standard error, or with --log-format json a log line."""
    if log_format == "json":
        log = logging.getLogger("ridgeline")
        return lambda text: log.handle(log.makeRecord(log.name, logging.INFO, "", 0, text, (), None))
    console = server_console()
    return lambda text: console.print(text, highlight=False, soft_wrap=True, markup=False)


class Stages:
    """Progress bars, one per stage of a start-up (weights, graphs, ...). Draws on a terminal only."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Stages:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)


def configuration(resolved: Resolved) -> Group:
    """Table of options with value and origin, then one paragraph with all defaults."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    defaults = []
    for name, value, origin in resolved.rows():
        if origin == "default":
            defaults.append(f"{name} {value}")
        else:
            table.add_row(name, Text(value), Text(origin, style="dim"))
    return Group(table, Text(f"defaults: {', '.join(defaults)}", style="dim"))


def stages_text(seconds: Mapping[str, float]) -> str:
    """Durations of the start-up stages, without stages below 0.05 s: "weights 3.1 s, kernels 0.8 s"."""
    return ", ".join(f"{name} {duration:.1f} s" for name, duration in seconds.items() if duration >= 0.05)


def bytes_text(count: float) -> str:
    """1536 -> "1.50 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError


def count_text(count: float) -> str:
    """8030261248 -> "8.03 G"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:g}"
