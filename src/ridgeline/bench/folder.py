"""Writing of results: run.json, requests.jsonl and report.html. Several runs get one folder each."""

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


def default_folder() -> str:
    """The default folder for results."""
    return f"bench-{datetime.now():%Y%m%d-%H%M%S}"


def save(outcome: Outcome, out: str) -> Path:
    """Write an outcome into the folder `out`, by default `default_folder`. Raises ConfigError if that fails."""
    folder = Path(out or default_folder())
    try:
        if outcome.single:
            write_run(outcome.runs[0], folder, _with_whys(run_json(outcome.runs[0]), outcome))
        else:
            for number, run in enumerate(outcome.runs, 1):
                write_run(run, folder / f"{number:02}", run_json(run))
            (folder / SUMMARY_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(summary(outcome)), indent=1))
        (folder / REPORT_FILE).write_text(html(outcome), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"Cannot write the results to --out {folder} ({error.strerror}): give another folder.", param="out"
        ) from None
    return folder


def summary(outcome: Outcome) -> dict[str, Any]:
    """Build summary.json of several runs: run.json of each, points of the curve, differences."""
    changes = [
        {
            "measure": difference.measure.name,
            "unit": difference.measure.unit,
            "first": difference.first,
            "second": difference.second,
            "difference": asdict(difference.change),
            "second_is": difference.verdict,
        }
        for difference in outcome.differences
    ]
    runs = [{"name": run.name, **run_json(run)} for run in outcome.runs]
    points = [asdict(difference) for difference in outcome.points]
    return {"title": outcome.title, "note": outcome.note, "runs": runs, "points": points, "differences": changes}


def _with_whys(figures: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    if outcome.whys:
        figures["ridgeline"]["whys"] = list(outcome.whys)
    return figures
