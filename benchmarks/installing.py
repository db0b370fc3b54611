"""Size of the wheel, and seconds from `pip install` to the first token in a fresh environment.

    make wheel && python benchmarks/installing.py --out benchmarks/results/packaging.json

pip takes dependencies from its indexes as it is configured (--pip: more options). --offline: they are those of this environment,
and only the wheel is installed. --uvx: uvx installs and serves with one command (--uv: its options). The server sees no compiler,
and its cache and those of pip and uv are empty.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import venv
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import cpu_name, provenance, write_rows

PROMPT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64, "stream": True}
DEADLINE_S = 120.0
SHELL_PROGRAMS = ("realpath", "dirname")
"""Programs that the scripts call which uv writes for commands."""
INSTALLING_S = 900.0
"""Seconds that a command may take which installs and serves."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds of one installation: pip install, 0 with uvx; then from the start of the command until it is ready and until the
    first token."""

    install_s: float
    first_start_s: float
    first_token_s: float


def environment(folder: Path, offline: bool) -> Path:
    """The interpreter of a new environment. offline: it sees the distributions of this environment, not ridgeline's source tree."""
    venv.create(folder, with_pip=not offline, symlinks=True)
    python = folder / "bin/python"
    if offline:
        (lib,) = (folder / "lib").glob("python*/site-packages")
        # An entry of a .pth file is a folder to search. The .pth files in it, those of editable installs, are not read.
        (lib / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def install(python: Path, wheel: Path, offline: bool, options: list[str]) -> float:
    """Seconds of pip install."""
    begin = time.perf_counter()
    words = ["--no-deps", "--no-index", *options, str(wheel)] if offline else [*options, str(wheel)]
    pip = [sys.executable, "-m", "pip", "--python", str(python)] if offline else [str(python), "-m", "pip"]
    # PYTHONPATH may name a source tree, which pip would take for an installed distribution.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "--quiet", "install", *words], check=True, env=variables)
    return time.perf_counter() - begin


def served(program: Path, scratch: Path) -> tuple[float, float]:
    """first_token of an installed program, which sees nothing but its environment."""
    return first_token([program], {"PATH": str(program.parent), "HOME": str(scratch)}, scratch, DEADLINE_S)


def served_by_uvx(wheel: Path, options: Sequence[str], scratch: Path) -> tuple[float, float]:
    """first_token of uvx, from an empty cache on. Variables that configure uv and its connections are those of this process."""
    programs = {name: shutil.which(name) for name in ("uvx", *SHELL_PROGRAMS)}
    if missing := [name for name, path in programs.items() if path is None]:
        raise SystemExit(f"--uvx: not on PATH: {', '.join(missing)} (`pip install uv` brings uvx)")
    (scratch / "bin").mkdir()
    for name in SHELL_PROGRAMS:
        (scratch / "bin" / name).symlink_to(str(programs[name]))
    variables = {name: value for name, value in os.environ.items() if name.startswith(("UV_", "SSL_"))}
    variables |= {"PATH": str(scratch / "bin"), "HOME": str(scratch), "UV_CACHE_DIR": str(scratch / "uv")}
    command = [str(programs["uvx"]), "--python", sys.executable, *options, "--from", wheel, "ridgeline"]
    return first_token(command, variables, scratch, INSTALLING_S)


def first_token(
    command: Sequence[str | Path], variables: Mapping[str, str], scratch: Path, deadline_s: float
) -> tuple[float, float]:
    """Seconds from `command` serve until it is ready, and until the first token of a streamed answer."""
    begin, log = time.perf_counter(), scratch / "log"
    environ = {**variables, "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, "serve", "--port", "0"], env=environ, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = _ready(server, log, begin + deadline_s)
        ready = time.perf_counter() - begin
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(PROMPT).encode(), headers)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            for line in answer:
                if b'"content":"' in line.replace(b'": "', b'":"') and b'"content":""' not in line:
                    return ready, time.perf_counter() - begin
        raise SystemExit(f"no token came: {log.read_text()[-2000:]}")
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _ready(server: subprocess.Popen[bytes], log: Path, deadline: float) -> str:
    """The server's address, once it is ready. deadline: of time.perf_counter."""
    while server.poll() is None and time.perf_counter() < deadline:
        if match := re.search(r"listening on (http://[^;\s]+)", log.read_text()):
            try:
                with urllib.request.urlopen(f"{match[1]}/health", timeout=5):
                    return match[1]
            except OSError:
                pass
        time.sleep(0.02)
    raise SystemExit(f"the server did not become ready: {log.read_text()[-2000:]}")


def read(wheel: Path, kind: str, options: list[str]) -> Reading:
    """A reading of "uvx", or of pip: in a "fresh" environment, or with dependencies "borrowed" from this one."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if kind == "uvx":
            return Reading(0.0, *served_by_uvx(wheel, options, scratch))
        offline = kind == "borrowed"
        python = environment(scratch / "venv", offline)
        seconds = install(python, wheel, offline, options)
        return Reading(seconds, *served(python.parent / "ridgeline", scratch))


def sizes(wheel: Path) -> list[tuple[str, float, str, float | None]]:
    """Rows of the wheel: what is downloaded, what it takes on disk, what of it are libraries, and the source distribution."""
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    libraries = [entry for entry in entries if entry.filename.endswith(".so")]
    rows: list[tuple[str, float, str, float | None]] = [
        ("wheel", wheel.stat().st_size / 1e6, "MB", None),
        ("installed", sum(entry.file_size for entry in entries) / 1e6, "MB", None),
        ("libraries", float(len(libraries)), "files", None),
        ("libraries-in-the-wheel", sum(entry.compress_size for entry in libraries) / 1e6, "MB", None),
    ]
    rows += [("sdist", path.stat().st_size / 1e6, "MB", None) for path in wheel.parent.glob("*.tar.gz")]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--wheel", type=Path, help="default: the wheel in dist/")
    parser.add_argument("--out", default="benchmarks/results/packaging.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--offline", action="store_true", help="borrow the dependencies of this environment")
    parser.add_argument("--uvx", action="store_true", help="install and serve with uvx")
    parser.add_argument("--pip", default="--no-cache-dir", help="options of pip install, and what it installs besides")
    parser.add_argument("--uv", default="", help="options of uvx, such as '--torch-backend cpu'")
    arguments = parser.parse_args()
    wheel = arguments.wheel or next(Path("dist").glob("*.whl"))
    kind = "uvx" if arguments.uvx else "borrowed" if arguments.offline else "fresh"
    options = shlex.split(arguments.uv if arguments.uvx else arguments.pip)
    readings = [read(wheel.resolve(), kind, options) for _ in range(arguments.rounds)]
    rows = sizes(wheel)
    for name in Reading.__dataclass_fields__ if kind != "uvx" else ("first_start_s",):
        values = [getattr(reading, name) for reading in readings]
        rows.append((f"{kind}-{name.removesuffix('_s').replace('_', '-')}-s", statistics.median(values), "s", None))
    total = statistics.median(reading.install_s + reading.first_token_s for reading in readings)
    rows.append((f"{kind}-install-to-first-token-s", total, "s", 60.0))
    source: dict[str, Any] = provenance(f"{cpu_name()} (load {os.getloadavg()[0]:.0f})")
    made = [
        {"row": name, "value": round(value, 4), "unit": unit, "target": target, **source}
        for name, value, unit, target in rows
    ]
    write_rows(arguments.out, made)
    for row in made:
        print(f"{row['row']:32} {row['value']:10.3f} {row['unit']}")


if __name__ == "__main__":
    main()
