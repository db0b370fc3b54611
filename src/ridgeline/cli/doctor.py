"""Check this machine, a model and a running server: each finding with its remedy. The exit status is 1 if one of them is a failure.

URL is the address of a server to check, beside this machine. docs/operations.md lists the checks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from ridgeline.cli.doctor_machine import Check, check_machine
from ridgeline.cli.doctor_model import check_model
from ridgeline.cli.doctor_server import check_server
from ridgeline.cli.flags import Arguments, Parser, parser_for
from ridgeline.core.resolve import ENVIRONMENT

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def parser() -> Parser:
    parser = parser_for("doctor", __doc__ or "", (), model=False)
    parser.add_argument("url", nargs="?", metavar="URL", help="address of a server, as in http://127.0.0.1:8000")
    parser.add_argument(
        "--model", dest="checked_model", metavar="TEXT", help="also check this model folder or hub name"
    )
    parser.add_argument("--api-key", dest="api_key_sent", metavar="TEXT", help="API key of the server")
    parser.add_argument("--json", action="store_true", help="print a list of objects: name, state, detail, remedy")
    return parser


def run(args: Arguments) -> int:
    options = vars(args.options)
    checks = check_machine()
    if "checked_model" in options:
        checks += check_model(options["checked_model"])
    if "url" in options:
        key = options.get("api_key_sent") or os.environ.get(f"{ENVIRONMENT}API_KEY", "")
        checks += check_server(options["url"], key)
    if options.get("json"):
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        show(checks, Console(file=sys.stdout))
    return int(any(check.state == "fail" for check in checks))


def show(checks: Sequence[Check], console: Console) -> None:
    """One line for each check, and one for the remedy of what is not ok."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = Text(f"{check.state:4}", style=_STYLES[check.state])
        console.print(line.append(f"  {check.name:{width}}  {check.detail}", style="default"), soft_wrap=True)
        if check.remedy:
            console.print(Text(f"{'':{width + 8}}{check.remedy}", style="dim"), soft_wrap=True)
