"""Find the bottleneck of a running server, its distance to the limit of the hardware, and remedies in order of predicted gain.

Reads the last five minutes of a Ridgeline server, which should run under its usual load. Can also read a run of `ridgeline
bench run` against such a server. docs/diagnosis.md shows the decision path.
"""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.bench.figures import invalid_reason
from ridgeline.bench.record import read_run
from ridgeline.bench.target import Address
from ridgeline.cli.flags import Arguments, Parser, parser_for
from ridgeline.core.errors import ConfigError
from ridgeline.core.reach import unreachable
from ridgeline.planner.diagnose import Diagnosis, Observation, diagnose, observe

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 10.0


def parser() -> Parser:
    parser = parser_for("diagnose", __doc__ or "", (), model=False)
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL|RUN",
        help=f"address of the server (default: {DEFAULT_URL}), or result folder of `ridgeline bench run`",
    )
    parser.add_argument("--api-key", dest="key", metavar="TEXT", help="API key of the server")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    return parser


def run(args: Arguments) -> int:
    source = getattr(args.options, "url", DEFAULT_URL)
    is_run = Path(source).exists()
    diagnosis = diagnose(
        _read_run(Path(source)) if is_run else observe(_fetch(source, getattr(args.options, "key", "")))
    )
    if getattr(args.options, "json", False):
        print(json.dumps(_json_value(asdict(diagnosis)), indent=1))
    else:
        _show(diagnosis, Console())
    return 0


def _read_run(folder: Path) -> Observation:
    """Figures of the server during a run. Raises ConfigError for a run against a server other than Ridgeline."""
    run = read_run(folder)
    state = run.facts.get("server")
    if not isinstance(state, dict):
        raise ConfigError(
            f"The run {folder} has no figures of its server: only runs against a Ridgeline server can be diagnosed. Give "
            "such a run, or the address of a Ridgeline server.",
            param="url",
        )
    return observe(state, invalid_reason(run))


def _fetch(url: str, key: str) -> Any:
    """GET /dashboard/data. Raises ConfigError if no Ridgeline server answers at `url`."""
    Address(url)  # raises ConfigError for an invalid address
    address = url if "://" in url else f"http://{url}"
    address = address.rstrip("/").removesuffix("/v1") + "/dashboard/data"
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


def _show(diagnosis: Diagnosis, console: Console) -> None:
    console.print(f"[bold]Bottleneck: {diagnosis.bottleneck}[/bold]")
    for line in (*diagnosis.evidence, *diagnosis.distance):
        console.print(f"  {line}", highlight=False)
    if not diagnosis.advice:
        console.print("\nNo option of this server improves this workload; see docs/diagnosis.md.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    for name in ("predicted", "remedy", "effort", "risk to quality", "disadvantage", "command"):
        table.add_column(name, overflow="fold")
    for advice in diagnosis.advice:
        cure = advice.cure
        gain = "measure it" if math.isnan(advice.gain) else f"-{advice.gain:.0%}"
        table.add_row(gain, cure.name, cure.effort, cure.risk, cure.trade, cure.command)
    console.print("\n[bold]Remedies[/bold] (predicted: change of the time that the bottleneck takes)")
    console.print(table, highlight=False)


def _json_value(value: Any) -> Any:
    """Convert a value for JSON: drop functions, write NaN as null."""
    if isinstance(value, dict):
        return {name: _json_value(item) for name, item in value.items() if not callable(item)}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
