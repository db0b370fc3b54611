"""What every benchmark shares: where it ran, one row form, and timed runs on an engine in this process."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.wire.messages import Submit

HERE = Path(__file__).resolve().parent


def provenance(machine: str, commit: str = "") -> dict[str, str]:
    """machine, date, commit and command of this run. commit: what runs, where the tree has no .git to ask; None given,
    the variable BENCHMARK_COMMIT says it, then git."""
    commit = commit or os.environ.get("BENCHMARK_COMMIT", "") or _head()
    arguments, words = [], iter(sys.argv[1:])
    for word in words:
        if word == "--commit":
            next(words, None)
        elif not word.startswith("--commit="):
            arguments.append(word)
    return {
        "machine": machine,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
    }


def _head() -> str:
    """The commit of this tree, "" where there is no git or no repository."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE).stdout.strip()
    except FileNotFoundError:
        return ""


def cpu_name() -> str:
    """Model name and core count of this machine's processor."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores"


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a result file, none if it does not exist."""
    target = Path(path)
    rows: list[dict[str, Any]] = json.loads(target.read_text()) if target.exists() else []
    return rows


def write_rows(path: str | Path, rows: Sequence[dict[str, Any]]) -> None:
    """Merge rows into a result file (a JSON list), replacing those of the same name."""
    target, old = Path(path), read_rows(path)
    names = {row["row"] for row in rows}
    merged = [row for row in old if row["row"] not in names] + list(rows)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in merged) + "\n]\n")


def lens(name: str) -> list[tuple[int, int]]:
    """(input, output) lengths of a workload file."""
    path = Path(name) if Path(name).exists() else HERE / "workloads" / f"{name}.json"
    return [(int(a), int(b)) for a, b in json.loads(path.read_text())["lens"]]


@dataclass(frozen=True, slots=True)
class Timed:
    """One run. ttft_s: seconds from the start of the run to each request's first token, by request."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: tuple[float, ...]


_runs = iter(range(1, 1 << 30))


def timed(
    engine: LocalEngine, shapes: Sequence[tuple[int, int]], vocab: int, *, temperature: float = 1.0, **limits: float
) -> Timed:
    """All requests at once, random token ids, end tokens ignored; seconds until the last token of the last request. limits: top_k,
    top_p, min_p."""
    chance = random.Random(1)
    run = next(_runs)
    first: dict[str, float] = {}
    outputs = 0
    for index, (length, _) in enumerate(shapes):
        ids = [chance.randrange(vocab) for _ in range(length)]
        sampling = SamplingParams(
            temperature=temperature, max_tokens=shapes[index][1], ignore_eos=True, seed=index, **limits
        )
        engine.submit(Submit(f"{run}-{index}", ids, sampling, time.monotonic(), cache=False))
    started = time.perf_counter()
    for delta in engine.deltas():
        if delta.error:
            raise RuntimeError(delta.error)
        outputs += len(delta.tokens)
        if delta.id not in first:
            first[delta.id] = time.perf_counter() - started
    seconds = time.perf_counter() - started
    wanted = sum(out for _, out in shapes)
    if outputs != wanted:
        raise RuntimeError(f"{outputs} tokens instead of {wanted}")
    return Timed(seconds, sum(length for length, _ in shapes), outputs, tuple(first.values()))
