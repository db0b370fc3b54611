"""Progress output of a benchmark."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ridgeline.bench import show
from ridgeline.bench.record import Run


class RunProgress:
    """Progress bar and finished runs of a benchmark, on standard error."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self.console, transient=True, disable=not self.console.is_terminal, auto_refresh=False,
        )  # fmt: skip
        self._task = self._progress.add_task("requests", total=None)
        self._shown = -1

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        # Drawing takes milliseconds of the client's time, so the bar is redrawn once per percent.
        if (part := done * 100 // max(1, total)) != self._shown:
            self._shown = part
            self._progress.update(self._task, completed=done, total=total, refresh=True)

    def print_run(self, run: Run) -> None:
        self.console.print(show.line(run), markup=False, soft_wrap=True)
