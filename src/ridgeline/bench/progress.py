"""Progress output of a benchmark: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ridgeline.bench import show
from ridgeline.bench.record import Run

LINE_S = 5.0
"""Seconds between two lines, where standard error is not a terminal."""


class RunProgress:
    """Progress and finished runs of a benchmark, on standard error."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self.console, transient=True, disable=not self.console.is_terminal, auto_refresh=False,
        )  # fmt: skip
        self._task = self._progress.add_task("requests", total=None)
        self._shown = -1
        self._line_at = time.monotonic() + LINE_S

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        if not self.console.is_terminal:
            if (now := time.monotonic()) >= self._line_at:
                self._line_at = now + LINE_S
                self.console.print(f"{done:,} of {total:,} requests have ended", markup=False, soft_wrap=True)
            return
        # Drawing takes milliseconds of the client's time, so the bar is redrawn once per percent.
        if (part := done * 100 // max(1, total)) != self._shown:
            self._shown = part
            self._progress.update(self._task, completed=done, total=total, refresh=True)

    def print_run(self, run: Run) -> None:
        self.console.print(show.line(run), markup=False, soft_wrap=True)
