"""Progress of long work where no bar is drawn: a line every few seconds, on pipes and in log files."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ridgeline.core.config import ModelConfig
from ridgeline.models.hub import resolve_model

LINE_S = 5.0
"""Seconds between two lines."""
_COUNTED = 9999
"""Larger totals are bytes or parameters, and are shown as a percentage."""


class Lines:
    """Context manager that says every few seconds what runs and for how long. A thread does it, so work that reports nothing for
    minutes is seen too."""

    def __init__(
        self, say: Callable[[str], None], text: Callable[[], str] = lambda: "starting", every_s: float | None = None
    ) -> None:
        """say: called with each line, in a thread. text: what runs. every_s: seconds between two lines; None: LINE_S."""
        self._say, self._text = say, text
        self._every_s = LINE_S if every_s is None else every_s
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Lines:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No line follows. May be called again."""
        self._ended.set()
        self._thread.join()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """From now on the lines say how much of a stage is done."""
        self._text = partial(_stage_text, stage, done, total)

    def show(self, text: str) -> None:
        """From now on the lines say this text."""
        self._text = lambda: text

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self._say(f"{self._text()}; {time.monotonic() - self._began:.0f} s so far")


def _stage_text(stage: str, done: int, total: int) -> str:
    if done >= total:
        return f"{stage}: done"
    return f"{stage}: {done / total:.0%}" if total > _COUNTED else f"{stage}: {done:,} of {total:,}"


def find_model(
    model: ModelConfig, say: Callable[[str], None], cache: Path | None = None, every_s: float | None = None, **hub: Any
) -> Path:
    """resolve_model. Where the hub draws no bar, lines say how much of a download is on disk.

    Args:
        say: called with each line.
        cache: the hub's cache; None: that of huggingface_hub.
        hub: more arguments of resolve_model.
    """
    if sys.stderr.isatty():
        return resolve_model(model, **hub)
    with Lines(say, partial(_download_text, model.model, cache), every_s):
        return resolve_model(model, **hub)


def _download_text(name: str, cache: Path | None) -> str:
    if not name or Path(name).expanduser().exists():
        return "reading the model folder"
    # Imported here: a local folder does not need it, and the import takes a tenth of a second.
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    blobs = Path(cache or HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "blobs"
    size = sum(_size(path) for path in blobs.glob("*"))
    return f"downloading {name}: {size / 1e6:,.0f} MB on disk"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a part was renamed to the whole file meanwhile
        return 0
