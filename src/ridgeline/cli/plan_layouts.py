"""What `ridgeline plan --arithmetic` prints: the ranking of all layouts by the arithmetic of means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.cli.show import bytes_text
from ridgeline.core.plural import counted
from ridgeline.planner.cluster import Cluster
from ridgeline.planner.ranking import NAMES, Demand, Ranked, Refused, reasons, seconds_text, why


def basis_text(bases: Sequence[str]) -> str:
    """What predictions rest on, in words."""
    remedy = {"calibrated": "", "uncalibrated": ": `ridgeline calibrate` measures a device"}
    remedy["transferred"] = " from the calibration of another model or number format"
    return "predicted, " + "; ".join(f"{basis}{remedy[basis]}" for basis in dict.fromkeys(bases)) + "\n"


def show_layouts(
    console: Console, place: tuple[Cluster, Demand], ranked: Sequence[Ranked], commands: Sequence[str]
) -> None:
    """Print the ranking, its reasons, and which of the layouts start today."""
    cluster, demand = place
    wide, say = Console(width=max(console.width, 200)), partial(console.print, soft_wrap=True, highlight=False)
    load = f"{demand.rate:g} requests/s" if demand.rate else "as many requests as fit"
    slo = f", {demand.slo}" if demand.slo else ""
    say(f"[bold]{cluster}[/bold], {load} of {demand.input:,} + {demand.output:,} tokens{slo}")
    if not ranked:
        return
    say(basis_text([entry.variant.basis for entry in ranked]))
    wide.print(_table(ranked))
    say("")
    for better, worse in pairwise(ranked):
        say(escape(why(better, worse)))
    say("\n[bold]what starts today[/bold]")
    for entry, words in zip(ranked, commands, strict=True):
        each = (
            f"  ({entry.layout.data} times, each with its device and --port, behind a router)"
            if entry.layout.data > 1
            else ""
        )
        if words:
            say(f"{entry.layout}: {escape(words)}{each}")
    if not any(commands):
        say(
            "None of these: no Ridgeline for the devices, unequal numbers of them on a replica's hosts, or too small a cache."
        )
    if any("--nnodes" in words for words in commands):
        say("HOST0 is the address of a replica's first host; K is the number of each host, from 0.")


def say_rest(console: Console, refused: Sequence[Refused], notes: Sequence[str]) -> None:
    """Print the layouts that cannot be, by reason, and what was assumed."""
    say = partial(console.print, soft_wrap=True, highlight=False)
    if refused:
        say("\n[bold]what cannot be[/bold]")
    for reason, entries in reasons(refused):
        names = ", ".join(str(entry.layout) for entry in entries[:4]) + (" ..." if len(entries) > 4 else "")
        say(f"{counted(len(entries), 'layout')} ({names}): {escape(reason)}")
    if notes:
        say("")
    for note in notes:
        say(escape(note))


def _table(ranked: Sequence[Ranked]) -> Table:
    head = (
        "",
        "layout",
        "weights",
        "workspace",
        "cache",
        "requests",
        "prefill",
        "TTFT",
        "TPOT",
        "tokens/s/device",
        "$/1M tokens",
    )
    table = Table(*head, "binds", "objectives", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    several = len({entry.variant.name for entry in ranked}) > 1
    for place, entry in enumerate(ranked, 1):
        memory = entry.memory
        price = f"{entry.usd_million:.3g}" if math.isfinite(entry.usd_million) else "unknown"
        table.add_row(
            str(place),
            f"{entry.layout} ({entry.variant.name})" if several else str(entry.layout),
            *(bytes_text(size) for size in (memory.weight_bytes, memory.workspace_bytes, memory.cache_bytes)),
            f"{entry.batch:,} of {memory.requests:,}",
            seconds_text(entry.prefill_s),
            seconds_text(entry.ttft_s),
            seconds_text(entry.tpot_s),
            f"{entry.tokens_s_device:,.4g}",
            price,
            f"{NAMES[entry.binds]} {entry.share(entry.binds):.0%}",
            entry.verdict or "met",
        )
    return table


def layout_facts(
    cluster: Cluster, demand: Demand, ranked: Sequence[Ranked], refused: Sequence[Refused], notes: Sequence[str]
) -> dict[str, Any]:
    """The plan for JSON, in bytes, seconds and dollars."""
    return {
        "devices": {"name": cluster.device.name, "count": cluster.count, "per_host": cluster.per_host},
        "demand": {"input": demand.input, "output": demand.output, "rate": demand.rate, "slo": str(demand.slo)},
        "calibrated": bool(ranked) and ranked[0].variant.cost.calibrated,
        "notes": list(notes),
        "ranking": [
            {
                **asdict(entry.layout), "format": entry.variant.name, "memory": asdict(entry.memory), "batch": entry.batch,
                "prefill_s": entry.prefill_s, "ttft_s": entry.ttft_s, "tpot_s": entry.tpot_s, "e2e_s": entry.e2e_s,
                "requests_s": entry.requests_s, "capacity_requests_s": entry.capacity, "tokens_s": entry.tokens_s,
                "tokens_s_device": entry.tokens_s_device, "device_s_per_request": asdict(entry.parts),
                "binds": NAMES[entry.binds], "missed": entry.verdict, "imbalance": entry.imbalance,
                "usd_million_tokens": entry.usd_million if math.isfinite(entry.usd_million) else None,
            }
            for entry in ranked
        ],
        "why": [why(better, worse) for better, worse in pairwise(ranked)],
        "refused": [{**asdict(entry.layout), "format": entry.variant.name, "reason": entry.reason} for entry in refused],
    }  # fmt: skip
