"""What `ridgeline plan` prints: proposals with their predicted figures, why they rank so, and what starts them."""

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

from ridgeline.cli.plan_layouts import basis_text
from ridgeline.cli.plan_start import start
from ridgeline.core.config import ModelConfig
from ridgeline.planner.plan_text import HEAD, cells, name, why
from ridgeline.planner.proposals import Proposal, Task
from ridgeline.planner.ranking import NAMES
from ridgeline.planner.search import SearchResult


def show_proposals(console: Console, task: Task, proposals: Sequence[Proposal], model: ModelConfig) -> None:
    """Print the ranking, its reasons, and the commands."""
    demand, say = task.demand, partial(console.print, soft_wrap=True, highlight=False)
    load = f"{demand.rate:.4g} requests/s" if demand.rate else "as many requests as possible"
    slo = f", {demand.slo}" if demand.slo else ""
    say(
        f"[bold]{escape(task.workload.name)}[/bold]: {load} of {demand.input:,} + {demand.output:,} tokens on average{escape(slo)}"
    )
    if not proposals:
        return
    say(basis_text([proposal.unit.coarse.variant.basis for proposal in proposals]))
    Console(width=max(console.width, 230)).print(_table(proposals))
    say(_assumptions(task, proposals))
    say("")
    for better, worse in pairwise(proposals):
        say(escape(why(better, worse)))
    say("\n[bold]what starts it[/bold]")
    for place, proposal in enumerate(proposals, 1):
        made = start(proposal, model)
        say(f"{place}: {escape(made.text) if made.command else f'nothing yet ({made.why})'}")


def _table(proposals: Sequence[Proposal]) -> Table:
    table = Table("", *HEAD, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, proposal in enumerate(proposals, 1):
        table.add_row(str(place), *map(escape, cells(proposal)))
    return table


def _assumptions(task: Task, proposals: Sequence[Proposal]) -> str:
    prices = dict.fromkeys(
        f"{unit.offer.cluster.device.name} ${unit.offer.usd_hour:.4g} an hour ({unit.offer.priced})"
        for unit in (proposal.unit for proposal in proposals)
    )
    site = task.site
    return escape(
        f"\nprices: {', '.join(prices)}. gCO2 at {site.carbon_g_kwh:g} g/kWh and a PUE of {site.pue:g}; J without cooling, "
        "from a power model of an H100."
    )


def proposal_facts(result: SearchResult, task: Task, notes: Sequence[str], model: ModelConfig) -> dict[str, Any]:
    """The plan for JSON, in seconds, dollars, watts, joules and grams."""
    demand = task.demand
    return {
        "demand": {"input": demand.input, "output": demand.output, "rate": demand.rate, "slo": str(demand.slo)},
        "workload": task.workload.name,
        "site": asdict(task.site),
        "considered": result.considered,
        "notes": list(notes),
        "proposals": [_facts(proposal, model) for proposal in result.proposals],
        "why": [why(better, worse) for better, worse in pairwise(result.proposals)],
        "refused": [
            {**asdict(entry.layout), "format": entry.variant.name, "reason": entry.reason} for entry in result.refused
        ],
    }


def _facts(proposal: Proposal, model: ModelConfig) -> dict[str, Any]:
    unit, made = proposal.unit, start(proposal, model)
    limits, offer, coarse = unit.server.limits, unit.offer, unit.coarse
    figures = {
        name: _finite(getattr(proposal, name))
        for name in (
            "devices", "usd_hour", "rate", "capacity", "good", "goodput", "headroom", "lane_share", "lane_tokens_s", "usd_million",
            "usd_thousand", "watts", "joules_token", "carbon_g_request",
        )
    }  # fmt: skip
    return {
        "name": name(proposal), "device": offer.cluster.device.name, "usd_device_hour": _finite(offer.usd_hour),
        "priced": offer.priced,
        "replicas": proposal.copies * unit.ratio.devices,
        **{size: getattr(coarse.layout, size) for size in ("tensor", "pipeline", "context")}, "split": str(unit.ratio),
        "weights": coarse.variant.spec.quantization or coarse.variant.spec.dtype,
        "cache": coarse.variant.spec.kv_format or coarse.variant.spec.dtype,
        "chunk": limits.step_tokens, "batch": limits.rows, "basis": coarse.variant.basis, **figures,
        "ttft_s": asdict(proposal.ttft), "tpot_s": asdict(proposal.tpot), "e2e_s": asdict(proposal.e2e),
        "binds": NAMES[coarse.binds], "arithmetic_capacity": coarse.capacity, "missed": proposal.verdict, "start": made.command,
        "fleet": made.fleet, "cannot_start": made.why,
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
