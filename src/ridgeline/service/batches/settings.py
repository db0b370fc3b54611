"""Options of the batch lane: when its rows run, how much they may slow online requests, and where its files are."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError

OFF = "off"
DAY_MINUTES = 24 * 60
_SPAN = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]):([0-5]\d)")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")


@dataclass(frozen=True, slots=True)
class DayWindow:
    """Hours of the day in which rows run, in minutes after midnight, local time. It may cross midnight."""

    start: int = 0
    end: int = DAY_MINUTES

    @classmethod
    def parse(cls, text: str, option: str = "--batch-window") -> DayWindow:
        """Read 22:00-06:00; empty: the whole day. option: as errors name it. Raises ConfigError."""
        if not text:
            return cls()
        match = _SPAN.fullmatch(text.strip())
        if match is None or match[1] + match[2] == match[3] + match[4]:
            raise ConfigError(
                f"{option} is {text!r}: give two different times of the day, as in 22:00-06:00, or leave it out.",
                param="batch_window",
            )
        hours = [int(part) for part in match.groups()]
        return cls(60 * hours[0] + hours[1], 60 * hours[2] + hours[3])

    def open(self, minute: int) -> bool:
        """Whether rows may run at a minute of the day."""
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end


def read_impact(text: str) -> float | None:
    """Read 10% as 0.1; empty: None. Raises ConfigError."""
    if not text:
        return None
    match = _SHARE.fullmatch(text.strip())
    if match is None or float(match[1]) > 1000:
        raise ConfigError(
            f"--batch-impact is {text!r}: give the percentage by which p99 latencies may rise, as in 10%, or leave it out.",
            param="batch_impact",
        )
    return float(match[1]) / 100


def batch_folder(config: ServiceConfig, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of files and batches; None: the server has none.

    The default is a folder of the user's state for each port, because two servers cannot share one. A server on a port that the
    system picks has no folder that a later one could find again, so it has none unless --batch-dir names it.
    """
    if config.batch_dir == OFF:
        return None
    if config.batch_dir:
        return Path(config.batch_dir).expanduser()
    folder = state_folder(environ)
    return None if folder is None or config.port == 0 else folder / f"batches-{config.port}"


def state_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder of the user's state; None in a container without a home."""
    state, home = environ.get("XDG_STATE_HOME"), environ.get("HOME")
    if not state and not home:
        return None
    return (Path(state) if state else Path(home or "") / ".local" / "state") / "ridgeline"
