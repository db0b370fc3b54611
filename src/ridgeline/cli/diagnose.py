"""Find the bottleneck of a running server, and predict what each technique would gain on its recorded load.

Reads the last five minutes of a Ridgeline server, which should run under its usual load, or a run of `ridgeline bench run` against
such a server. Each prediction is a simulation of the recorded requests. `--apply N` starts a copy of the server with and without
remedy N, replays the requests on both, and prints predicted beside measured. docs/diagnosis.md explains the rules.
"""

from __future__ import annotations

import http.client
import json
import math
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.bench.figures import invalid_reason
from ridgeline.bench.record import Run, read_run
from ridgeline.bench.replay import measured, replay
from ridgeline.bench.target import Address
from ridgeline.cli.flags import Arguments, Parser, parser_for
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.fit import flags
from ridgeline.core.reach import unreachable
from ridgeline.hardware.serving import kind_on
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.planner.diagnose import Diagnosis, diagnose, observe
from ridgeline.planner.remedies import OBJECTIVES, Outlook, Remedy, objective_of, predict
from ridgeline.planner.simulate import Figures
from ridgeline.planner.situation import MAX_REQUESTS, Situation, read_situation
from ridgeline.planner.techniques import NOT_PREDICTED, Effort

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 10.0
_SHOWN = 8
"""Predicted remedies that are printed. --json has all."""


def parser() -> Parser:
    parser = parser_for("diagnose", __doc__ or "", (), model=False)
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL|RUN",
        help=f"address of the server (default: {DEFAULT_URL}), or result folder of `ridgeline bench run`",
    )
    parser.add_argument("--api-key", dest="key", metavar="TEXT", help="API key of the server")
    parser.add_argument(
        "--improve",
        choices=tuple(OBJECTIVES),
        help="what the remedies shall reduce (default: what shows the bottleneck): "
        + ", ".join(f"{name} ({words})" for name, (words, _) in OBJECTIVES.items()),
    )
    parser.add_argument(
        "--model-folder", metavar="FOLDER", help="folder or hub name of the served model, if it is elsewhere here"
    )
    parser.add_argument("--apply", type=int, metavar="N", help="measure remedy N on a copy of the server")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    return parser


@dataclass(frozen=True, slots=True)
class Record:
    """What a server or a run tells: GET /dashboard/data, GET /requests, and the load generator's view."""

    snapshot: Mapping[str, Any]
    rows: list[dict[str, Any]]
    concurrency: int | None = None
    client: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What the command prints.

    unpredicted: why there are no predictions, or "": then situation and outlook are given. applied: the remedy that was measured.
    measurements: figures of the recorded load without and with it.
    """

    diagnosis: Diagnosis
    situation: Situation | None = None
    outlook: Outlook | None = None
    unpredicted: str = ""
    applied: Remedy | None = None
    measurements: tuple[Figures, ...] = ()


def run(args: Arguments) -> int:
    options = args.options
    source = getattr(options, "url", DEFAULT_URL)
    record = read_record(source, getattr(options, "key", ""))
    result = _examine(record, getattr(options, "model_folder", ""), getattr(options, "improve", ""))
    if hasattr(options, "apply"):
        result = _apply(result, options.apply)
    if getattr(options, "json", False):
        print(json.dumps(_json_value(_content(result)), indent=1))
    else:
        _show(result, Console())
    return 0


def _examine(record: Record, folder: str, objective: str) -> Result:
    diagnosis = diagnose(observe(record.snapshot, record.rows, record.client))
    try:
        situation = situation_of(record, folder)
        return Result(diagnosis, situation, predict(situation, objective or objective_of(diagnosis.bottleneck)))
    except ConfigError as error:  # the bottleneck is known all the same
        return Result(diagnosis, unpredicted=error.message)


# --- reading -------------------------------------------------------------------------------------------------------------


def read_record(source: str, key: str) -> Record:
    """The record of a run's folder, or of a running server."""
    return _read_run(Path(source)) if Path(source).exists() else read_server(source, key)


def _read_run(folder: Path) -> Record:
    record = record_of(read_run(folder))
    if record is None:
        raise ConfigError(
            f"The run {folder} has no figures of its server: only runs of this version against a Ridgeline server can be "
            "diagnosed. Give such a run, or the address of a Ridgeline server.",
            param="url",
        )
    return record


def record_of(run: Run) -> Record | None:
    """The record of a run. None for a run against a server other than Ridgeline, or of an older version."""
    state = run.facts.get("server")
    if not isinstance(state, dict) or "requests" not in state:
        return None
    concurrency = run.facts.get("concurrency") if run.facts.get("rate") is None else None
    return Record(state, state["requests"], concurrency, invalid_reason(run))


def read_server(url: str, key: str) -> Record:
    """The record of a running server, with its newest requests."""
    return Record(_fetch(url, "/dashboard/data", key), _fetch(url, "/requests?limit=1000", key)["data"])


def _fetch(url: str, path: str, key: str) -> Any:
    """GET a path of the server. Raises ConfigError if no Ridgeline server answers at `url`."""
    Address(url)  # raises ConfigError for an invalid address
    address = url if "://" in url else f"http://{url}"
    address = address.rstrip("/").removesuffix("/v1") + path
    request = urllib.request.Request(address, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        remedy = "give --api-key" if error.code == 401 else "is it a Ridgeline server?"
        raise ConfigError(f"{address} answered {error.code}: {remedy}.", param="url") from error
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(address, error) from error
    except ValueError as error:
        raise ConfigError(f"{address} did not answer with JSON: is it a Ridgeline server?", param="url") from error


def situation_of(record: Record, folder: str, most: int = MAX_REQUESTS) -> Situation:
    """The situation, with the model's config.json from its folder. most: requests, the newest ones. Raises ConfigError if it is not
    on this machine."""
    facts = record.snapshot["facts"]
    named = folder or facts.get("root", "")
    try:
        checkpoint, _ = read_model(resolve_model(ModelConfig(model=named, load_format="dummy")))
    except ConfigError as error:
        raise ConfigError(
            f"The predictions need config.json of the served model ({error.message}): give its folder with --model-folder.",
            param="model_folder",
        ) from None
    options = facts.get("model_options", {})
    device = facts.get("device", "")
    spec = served_spec(checkpoint, ModelConfig(**options), "cpu" if device == "cpu" else kind_on(device, "cuda"))
    return read_situation(record.snapshot, record.rows, spec, record.concurrency, most)


# --- applying ------------------------------------------------------------------------------------------------------------


def _numbered(outlook: Outlook, number: int) -> Remedy:
    """Remedy `number`, counted from 1. Raises ConfigError if there is none, or if options of a server do not apply it."""
    offered = outlook.offered
    if not 1 <= number <= len(offered):
        known = f"1 to {len(offered)}" if offered else "nothing: no technique helps"
        raise ConfigError(f"--apply is {number}: give the number of a remedy, {known}.", param="apply")
    remedy = offered[number - 1]
    if remedy.technique.effort is not Effort.RESTART:
        able = [str(place) for place, other in enumerate(offered, 1) if other.technique.effort is Effort.RESTART]
        raise ConfigError(
            f"--apply {number} ({remedy.name}) takes {remedy.technique.effort}, which this command cannot make: give "
            f"{', '.join(able) or 'another objective with --improve'}.",
            param="apply",
        )
    return remedy


def _apply(result: Result, number: int) -> Result:
    """Measure remedy `number`: replay the recorded load on copies of the server, without and with it."""
    now, outlook = result.situation, result.outlook
    if now is None or outlook is None:
        raise ConfigError(f"--apply {number}: there are no remedies. {result.unpredicted}", param="apply")
    remedy, measurements = _numbered(outlook, number), []
    for situation in (now, remedy.change.after):
        words = situation.flags()
        requests = len(now.workload.requests)
        print(f"Replaying {requests} requests on: ridgeline serve {shlex.join(words)}", file=sys.stderr)
        measurements.append(measured(replay(words, situation.workload, situation.concurrency)))
    return replace(result, applied=remedy, measurements=tuple(measurements))


# --- showing -------------------------------------------------------------------------------------------------------------


def _show(result: Result, console: Console) -> None:
    console.print(f"[bold]Bottleneck: {result.diagnosis.bottleneck}[/bold]")
    for line in (*result.diagnosis.evidence, *result.diagnosis.distance):
        console.print(f"  {line}", highlight=False)
    if result.situation is None or result.outlook is None:
        console.print(f"\nNo predictions: {result.unpredicted}", highlight=False, markup=False)
        return
    _show_outlook(result.outlook, result.situation, console)
    if result.applied is not None:
        _compare(result.applied, result.outlook, result.measurements, console)


def _show_outlook(outlook: Outlook, situation: Situation, console: Console) -> None:
    words, value = OBJECTIVES[outlook.objective]
    requests = len(situation.workload.requests)
    console.print(
        f"\n[bold]Remedies[/bold] for the {words}, predicted by simulating the last {requests} requests. Now: simulated "
        f"{_time(value(outlook.simulated))}, recorded {_time(value(outlook.recorded))}.",
        highlight=False,
    )
    for line in _doubts(outlook, situation):
        console.print(f"[bold]Warning:[/bold] {escape(line)}", highlight=False)
    known = list(enumerate(outlook.remedies, 1))
    for number, remedy in [*known[:_SHOWN], *enumerate(outlook.unknown, len(known) + 1)]:
        console.print(_describe(number, remedy, outlook, situation), highlight=False)
    if not outlook.offered:
        console.print("No technique improves this workload; see docs/diagnosis.md.")
    if len(known) > _SHOWN:
        console.print(f"{len(known) - _SHOWN} more with --json.")
    if outlook.useless:
        console.print(f"\nConsidered, no gain here: {', '.join(outlook.useless)}.", highlight=False)
    console.print(f"Not judged yet: {', '.join(NOT_PREDICTED)}.", highlight=False)


def _doubts(outlook: Outlook, situation: Situation) -> list[str]:
    words, value = OBJECTIVES[outlook.objective]
    return situation.doubts({words: (value(outlook.recorded), value(outlook.simulated))})


def _describe(number: int, remedy: Remedy, outlook: Outlook, situation: Situation) -> str:
    """A remedy in three lines: its prediction, how to apply it, and what it costs."""
    now, after, technique = outlook.simulated, remedy.figures, remedy.technique
    predicted, details = "    ?", f"cannot be predicted: {remedy.change.unknown}"
    if after is not None:
        changes = {
            "first token": _change(now.ttft_s, after.ttft_s),
            "per token": _change(now.tpot_s, after.tpot_s),
            "tokens/s": _change(now.tokens_s, after.tokens_s),
        }
        predicted, details = f"{-remedy.gain:5.0%}", ", ".join(f"{name} {change}" for name, change in changes.items())
    how = technique.command or _how(remedy.change.after.changes(situation), situation.options())
    costs = f"effort: {technique.effort}; risk to quality: {remedy.change.risk.name.lower()}; price: {technique.price}"
    lines = f"[bold]{number:3} {predicted}  {escape(remedy.name)}[/bold]", details, escape(how), costs
    return "\n           ".join(lines)


def _how(changes: Mapping[str, object], options: Mapping[str, object]) -> str:
    """Flags that apply changes, and flags to leave out."""
    words = [*flags(changes)]
    words += [
        f"without {flag}" for flag in flags({name: options[name] for name, new in changes.items() if new is None})
    ]
    return " ".join(words)


def _compare(remedy: Remedy, outlook: Outlook, measurements: tuple[Figures, ...], console: Console) -> None:
    """Print predicted beside measured."""
    before, after = measurements
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    head = ("simulated now", "measured now", "predicted", "measured", "predicted change", "measured change")
    for name in (f"after {remedy.name}", *head):
        table.add_column(name, overflow="fold")
    for words, value in OBJECTIVES.values():
        simulated = value(outlook.simulated)
        predicted = math.nan if remedy.figures is None else value(remedy.figures)
        times = (_time(number) for number in (simulated, value(before), predicted, value(after)))
        table.add_row(words, *times, _change(simulated, predicted), _change(value(before), value(after)))
    console.print()
    console.print(table, highlight=False)


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.0%}" if before and math.isfinite(after / before) else "?"


def _content(result: Result) -> dict[str, Any]:
    """The result as plain data."""
    content: dict[str, Any] = asdict(result.diagnosis)
    situation, outlook = result.situation, result.outlook
    if situation is None or outlook is None:
        return content | {"no_predictions": result.unpredicted}
    content |= {
        "objective": outlook.objective,
        "requests": len(situation.workload.requests),
        "recorded": asdict(outlook.recorded),
        "simulated": asdict(outlook.simulated),
        "warnings": _doubts(outlook, situation),
        "remedies": [_remedy(number, remedy, situation) for number, remedy in enumerate(outlook.offered, 1)],
        "no_gain": outlook.useless,
        "not_predicted": NOT_PREDICTED,
    }
    if result.applied is not None:
        before, after = (asdict(figures) for figures in result.measurements)
        content["applied"] = {"name": result.applied.name, "measured_before": before, "measured_after": after}
    return content


def _remedy(number: int, remedy: Remedy, situation: Situation) -> dict[str, Any]:
    return {
        "number": number,
        "name": remedy.name,
        "gain": remedy.gain,
        "predicted": None if remedy.figures is None else asdict(remedy.figures),
        "unknown": remedy.change.unknown,
        "effort": str(remedy.technique.effort),
        "risk": remedy.change.risk.name.lower(),
        "price": remedy.technique.price,
        "options": remedy.change.after.changes(situation),
    }


def _json_value(value: Any) -> Any:
    """Convert a value for JSON: NaN becomes null."""
    if isinstance(value, dict):
        return {name: _json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
