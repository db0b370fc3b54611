"""Show what API keys have used on a server: requests, tokens and money by hour, day or month.

A key sees its own use. The key of --admin-api-key sees the use of all keys.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from rich.console import Console
from rich.table import Table

from ridgeline.cli.batch import URL, Server
from ridgeline.cli.client import ChatClient
from ridgeline.cli.flags import Arguments, Parser, parser_for

_FORMATS = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "month": "%Y-%m", "total": "all"}


def parser() -> Parser:
    parser = parser_for("usage", __doc__ or "", (), model=False)
    parser.add_argument("--url", metavar="URL", help=f"address of the server (default {URL})")
    parser.add_argument("--api-key", dest="api_key_sent", metavar="TEXT", help="API key of the server")
    parser.add_argument("--by", choices=tuple(_FORMATS), help="step of the sums (default day)")
    parser.add_argument("--since", metavar="TIME", help="unix seconds, or 2027-01-31 (default: 30 days ago)")
    parser.add_argument("--until", metavar="TIME", help="the same (default: now)")
    parser.add_argument("--key", metavar="NAME", help="only this key")
    parser.add_argument("--json", action="store_true", help="print the answer of /v1/usage")
    return parser


def run(args: Arguments) -> int:
    options = vars(args.options)
    query: dict[str, str] = {name: options[name] for name in ("by", "since", "until", "key") if name in options}
    server = Server(ChatClient(options.get("url", URL), options.get("api_key_sent")))
    answer = server.call("GET", "/v1/usage" + (f"?{urlencode(query)}" if query else ""))
    if options.get("json"):
        print(json.dumps(answer))
    else:
        Console().print(table(answer["data"], options.get("by", "day")))
    return 0


def table(rows: list[dict[str, Any]], by: str) -> Table:
    """The rows of /v1/usage."""
    shown = Table("UTC", "key", box=None)
    for name in ("requests", "prompt tokens", "cached", "output tokens", "USD"):
        shown.add_column(name, justify="right")
    for row in rows:
        counts = (f"{row[name]:,}" for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens"))
        start = datetime.fromtimestamp(row["start"], UTC).strftime(_FORMATS[by])
        shown.add_row(start, row["key"], *counts, f"{row['cost']:.4f}")
    return shown
