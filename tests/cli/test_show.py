"""How things are shown."""

from __future__ import annotations

import io
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console

from ridgeline.cli.flags import read_flags
from ridgeline.cli.serve import Announcer, parser
from ridgeline.cli.show import LossyStream, Stages, stages_text


def test_only_stages_that_can_be_seen_are_named() -> None:
    assert stages_text({"imports": 2.04, "device": 0.01, "weights": 0.06}) == "imports 2.0 s, weights 0.1 s"
    assert stages_text({}) == ""


def test_the_time_until_ready_is_what_the_user_waited(tiny: Path) -> None:
    """No less than what the engine says it took, as the clock of a service that was still being imported said."""
    said = io.StringIO()
    console = Console(file=said, width=200)
    with Stages(console) as stages:
        started = time.perf_counter() - 7.5
        announcer = Announcer(read_flags(parser(), [str(tiny)]), tiny, console, stages, started)
        announcer.ready("http://x:1", {"startup_s": {"imports": 7.4}})
    ready = re.search(r"ready in (\S+) s", said.getvalue())
    assert ready is not None and 7.5 <= float(ready.group(1)) < 20 and "imports 7.4 s" in said.getvalue()


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    """A disk that is full, and a pipe without a reader."""
    with Path("/dev/full").open("w") as full:
        Console(file=cast(TextIO, LossyStream(full))).print("a line")
        with suppress(OSError):  # what its buffer holds still cannot be written
            full.close()
    theirs, ours = os.pipe()
    os.close(theirs)
    with open(ours, "w") as pipe:
        Console(file=cast(TextIO, LossyStream(pipe))).print("a line")
        with suppress(OSError):
            pipe.close()
