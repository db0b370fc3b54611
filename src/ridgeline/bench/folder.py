"""Where an outcome is written: run.json, requests.jsonl and report.html; several runs get a folder each."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.bench.figures import run_json
from ridgeline.bench.record import write_run
from ridgeline.bench.report import Outcome, html
from ridgeline.core.errors import ConfigError

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"


def unnamed() -> str:
    """The folder for results that were given none."""
    return f"bench-{datetime.now():%Y%m%d-%H%M%S}"


def save(outcome: Outcome, given: str) -> Path:
    """Write an outcome into the folder `given`, or into one named by the time. Raises ConfigError where that fails."""
    folder = Path(given or unnamed())
    try:
        if len(outcome.runs) == 1:
            write_run(outcome.runs[0], folder, _with_whys(run_json(outcome.runs[0]), outcome))
        else:
            for number, run in enumerate(outcome.runs, 1):
                write_run(run, folder / f"{number:02}", run_json(run))
            (folder / SUMMARY_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(summary(outcome)), indent=1))
        (folder / REPORT_FILE).write_text(html(outcome), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write the results to --out {folder}: {error.strerror}.", param="out") from None
    return folder


def summary(outcome: Outcome) -> dict[str, Any]:
    """What several runs came to: each one's run.json, the curve's points, the differences."""
    changes = [
        {
            "measure": one.measure.name,
            "unit": one.measure.unit,
            "first": one.first,
            "second": one.second,
            "difference": asdict(one.change),
            "second_is": one.verdict,
        }
        for one in outcome.differences
    ]
    runs = [{"name": run.name, **run_json(run)} for run in outcome.runs]
    points = [asdict(one) for one in outcome.points]
    return {"title": outcome.title, "note": outcome.note, "runs": runs, "points": points, "differences": changes}


def _with_whys(figures: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    if outcome.whys:
        figures["ridgeline"]["whys"] = list(outcome.whys)
    return figures
