"""Long work says how far it is where no bar is drawn: a line every few seconds."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from ridgeline.cli.progress import Lines, find_model
from ridgeline.cli.serve import LogAnnouncer
from ridgeline.cli.show import Stages
from ridgeline.core.config import ModelConfig

SOON_S = 0.01
WAIT_S = 30.0


class Heard(list[str]):
    """Lines that were said."""

    def wait_for(self, words: str) -> str:
        """The first line with these words. A test fails where none comes."""
        ends = time.monotonic() + WAIT_S
        while time.monotonic() < ends:
            for line in list(self):
                if words in line:
                    return line
            time.sleep(SOON_S)
        raise AssertionError(f"{words!r} is not in {list(self)}")


def test_lines_follow_the_stages_and_end() -> None:
    heard = Heard()
    with Lines(heard.append, every_s=SOON_S) as lines:
        assert heard.wait_for("starting; ").endswith(" s so far")
        lines("weights", 3_000_000, 12_000_000)
        heard.wait_for("weights: 25%; ")
        lines("layers", 3, 28)
        heard.wait_for("layers: 3 of 28; ")
        lines("layers", 28, 28)
        heard.wait_for("layers: done; ")
        lines.show("simulating TP2")
        assert heard.wait_for("simulating TP2; ").endswith(" s so far")
    said = len(heard)
    lines.__exit__(None, None, None)
    time.sleep(5 * SOON_S)
    assert len(heard) == said


def test_short_work_says_nothing() -> None:
    heard = Heard()
    with Lines(heard.append) as lines:
        lines("layers", 1, 2)
    assert heard == []


class Written(io.StringIO):
    """A file whose lines can be waited for."""

    def wait_for(self, words: str) -> None:
        ends = time.monotonic() + WAIT_S
        while words not in self.getvalue():
            assert time.monotonic() < ends, self.getvalue()
            time.sleep(SOON_S)


def test_stages_are_lines_on_a_pipe_and_bars_on_a_terminal() -> None:
    pipe = Written()
    with Stages(Console(file=pipe), every_s=SOON_S) as stages:
        stages("quantizing [a]", 1, 4)
        pipe.wait_for("quantizing [a]: 1 of 4; ")
    terminal = io.StringIO()
    with Stages(Console(file=terminal, force_terminal=True, width=80), every_s=SOON_S) as stages:
        stages("quantizing", 1, 4)
        time.sleep(5 * SOON_S)
    assert "1/4" in terminal.getvalue() and "so far" not in terminal.getvalue()


def test_json_logs_have_the_lines_too() -> None:
    heard = Heard()
    with Lines(heard.append, every_s=SOON_S) as lines:
        announcer = LogAnnouncer(heard.append, lines)
        announcer.loading("weights", 1, 2)
        heard.wait_for("weights: 1 of 2; ")
        announcer.ready("http://x:1", {})
        assert heard[-1] == "ready: http://x:1/v1"


def test_a_download_says_how_much_is_on_disk(tmp_path: Path) -> None:
    heard, blobs = Heard(), tmp_path / "models--org--name" / "blobs"

    def snapshot(name: str, **_: object) -> str:
        heard.wait_for("downloading org/name: 0 MB on disk; ")
        blobs.mkdir(parents=True)
        (blobs / "a.incomplete").write_bytes(bytes(3_000_000))
        heard.wait_for("downloading org/name: 3 MB on disk; ")
        return str(tmp_path)

    model = ModelConfig(model="org/name")
    assert find_model(model, heard.append, cache=tmp_path, every_s=SOON_S, snapshot=snapshot) == tmp_path


def _first_line(words: list[str], wanted: Callable[[str], bool]) -> str:
    """Run a command with its output through pipes until it writes a wanted line, which is returned."""
    code = f"from ridgeline.cli import progress; progress.LINE_S = {SOON_S}; from ridgeline.cli.main import main; import sys; "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}sys.exit(main(sys.argv[1:]))", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    timer = threading.Timer(WAIT_S, process.kill)
    timer.start()
    try:
        return next(filter(wanted, process.stderr), "")
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


@pytest.mark.parametrize("log_format", [pytest.param("text", marks=pytest.mark.long), "json"])
def test_a_server_that_starts_says_so_on_a_pipe(log_format: str, tiny: Path) -> None:
    words = ["serve", str(tiny), "--load-format", "dummy", "--device", "cpu", "--port", "0", "--log-format", log_format]
    line = _first_line(words, lambda line: "so far" in line)
    assert line.startswith("{") == (log_format == "json"), line


def test_fit_says_that_it_measures(tiny: Path) -> None:
    assert "measuring the device; " in _first_line(["fit", str(tiny)], lambda line: "measuring" in line)


def test_compress_says_which_layer_it_quantizes(tmp_path: Path) -> None:
    words = ["--recipe", "rtn-int4-g128", "--out", str(tmp_path / "out"), "--speed-tokens", "0", "--tasks", "none"]
    assert " of 7; " in _first_line(["compress", *words], lambda line: "layers: " in line)
