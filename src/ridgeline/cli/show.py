"""Output of the command line: progress bars, the resolved configuration, formatted sizes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ridgeline.cli.progress import Lines
from ridgeline.core.plural import counted
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
    """Progress of stages (weights, graphs, ...): a bar for each on a terminal, else a line every few seconds."""

    def __init__(self, console: Console, every_s: float | None = None) -> None:
        """every_s: seconds between two lines; None: progress.LINE_S."""
        say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
        self._lines = None if console.is_terminal else Lines(say, every_s=every_s)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Stages:
        if self._lines is not None:
            self._lines.__enter__()
        else:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lines is not None:
            self._lines.__exit__(kind, error, trace)
        else:
            self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._lines is not None:
            self._lines(stage, done, total)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)


def configuration(resolved: Resolved, facts: Mapping[str, Any]) -> str:
    """Model, device, memory and limits of the engine (facts: what it reports), then the options that were set."""
    rows = [("model", _model(facts)), ("device", _device(resolved, facts)), ("memory", _memory(facts))]
    rows.append(("limits", _limits(facts)))
    for name, value, origin in resolved.rows():
        if origin not in ("default", "model and hardware"):
            rows.append((name, f"{value} ({origin})"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows if text)


def _model(facts: Mapping[str, Any]) -> str:
    if "params" not in facts:
        return ""
    formats = " and ".join(dict.fromkeys(filter(None, (facts.get("quantization"), facts["dtype"]))))
    return f"{facts['architecture']}, {count_text(facts['params'])} parameters in {formats}: {facts['root']}"


def _device(resolved: Resolved, facts: Mapping[str, Any]) -> str:
    """What runs the model, and how many processes share it. Engines of prefill and decode are counted by their options alone."""
    if "device" not in facts:
        return ""
    ranks, threads = resolved.engine.ranks, resolved.engine.threads
    shared = "1 process" if ranks == 1 else f"{ranks} processes on {counted(resolved.engine.nnodes, 'host')}"
    text = f"{facts['device']}, {shared}"
    return text + (f", {counted(threads, 'thread')} each" if threads and facts["device"] == "cpu" else "")


def _memory(facts: Mapping[str, Any]) -> str:
    if "weight_bytes" not in facts:
        return ""
    blocks, page = facts["blocks"], facts["page_tokens"]
    return (
        f"weights {bytes_text(facts['weight_bytes'])}, KV cache {bytes_text(blocks * facts['page_bytes'])} "
        f"({blocks:,} blocks of {page} tokens)"
    )


def _limits(facts: Mapping[str, Any]) -> str:
    if "max_len" not in facts:
        return ""
    return (
        f"{facts['max_len']:,} tokens of prompt plus answer, {facts['max_num_seqs']:,} requests at once, "
        f"{facts['max_num_batched_tokens']:,} query tokens in a step"
    )


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
