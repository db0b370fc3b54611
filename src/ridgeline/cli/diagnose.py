"""Find the bottleneck of a running server, its distance to the hardware's limit, and cures in order of predicted gain.

Reads the last five minutes of a Ridgeline server; give it its usual load meanwhile. Or reads a run that `ridgeline bench
run` made against such a server. docs/diagnosis.md shows the whole decision path.
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
from ridgeline.cli.flags import Given, Parser, parser_for
from ridgeline.core.errors import ConfigError
from ridgeline.core.reach import unreachable
from ridgeline.planner.diagnose import Diagnosis, Observation, diagnose, observe

DEFAULT_URL = "http://127.0.0.1:8000"
_PATIENCE_S = 10.0


def parser() -> Parser:
    found = parser_for("diagnose", __doc__ or "", (), model=False)
    found.add_argument(
        "url",
        nargs="?",
        metavar="URL|RUN",
        help=f"the server (default: {DEFAULT_URL}), or a folder of `ridgeline bench run`",
    )
    found.add_argument("--api-key", dest="key", metavar="TEXT", help="its key")
    found.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    return found


def run(given: Given) -> int:
    place = getattr(given.rest, "url", DEFAULT_URL)
    known = Path(place).exists()
    found = diagnose(_of_run(Path(place)) if known else observe(_ask(place, getattr(given.rest, "key", ""))))
    if getattr(given.rest, "json", False):
        print(json.dumps(_plain(asdict(found)), indent=1))
    else:
        _show(found, Console())
    return 0


def _of_run(folder: Path) -> Observation:
    """The server's figures while it was measured. Raises ConfigError for a run of another server."""
    run = read_run(folder)
    state = run.facts.get("server")
    if not isinstance(state, dict):
        raise ConfigError(
            f"The run {folder} has no figures of its server: only runs against a Ridgeline server can be diagnosed. Give "
            "such a run, or the address of a Ridgeline server.",
            param="url",
        )
    return observe(state, invalid_reason(run))


def _ask(url: str, key: str) -> Any:
    """GET /dashboard/data. Raises ConfigError when there is no such server."""
    Address(url)  # refuses what is not an address
    place = url if "://" in url else f"http://{url}"
    place = place.rstrip("/").removesuffix("/v1") + "/dashboard/data"
    request = urllib.request.Request(place, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        remedy = "give --api-key" if error.code == 401 else "is it a Ridgeline server?"
        raise ConfigError(f"{place} answered {error.code}: {remedy}.", param="url") from error
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(place, error) from error
    except ValueError as error:
        raise ConfigError(f"{place} did not answer with JSON: is it a Ridgeline server?", param="url") from error


def _show(found: Diagnosis, console: Console) -> None:
    console.print(f"[bold]Bottleneck: {found.bottleneck}[/bold]")
    for line in (*found.evidence, *found.distance):
        console.print(f"  {line}", highlight=False)
    if not found.advice:
        console.print("\nNo option of this server improves this workload; see docs/diagnosis.md.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    for name in ("predicted", "cure", "effort", "risk to quality", "price", "command"):
        table.add_column(name, overflow="fold")
    for one in found.advice:
        cure = one.cure
        gain = "measure it" if math.isnan(one.gain) else f"-{one.gain:.0%}"
        table.add_row(gain, cure.name, cure.effort, cure.risk, cure.trade, cure.command)
    console.print("\n[bold]What to do[/bold] (predicted: the share of the slow time that it saves)")
    console.print(table, highlight=False)


def _plain(value: Any) -> Any:
    """For JSON: no functions, NaN as null."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if not callable(one)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value
