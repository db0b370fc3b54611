"""Words for proposals: names, cells of a table, and why one comes before another."""

from __future__ import annotations

import math

from ridgeline.planner.proposals import Proposal, Tail
from ridgeline.planner.ranking import NAMES, seconds_text

HEAD = (
    "layout", "weights", "chunk", "batch", "TTFT p50/p99", "TPOT p50/p99", "goodput", "headroom", "batch lane", "$/hour",
    "$/1M tokens", "$/1K requests", "J/token", "gCO2/request", "binds", "rests on", "objectives",
)  # fmt: skip


def name(proposal: Proposal) -> str:
    """What runs: "3 x TP2 of NVIDIA H100 SXM"."""
    unit = proposal.unit
    layout = "" if unit.coarse.layout.replica == 1 else f"{unit.coarse.layout} of "
    ratio = f"{unit.ratio} prefill:decode of " if unit.ratio.decode else ""
    return f"{proposal.copies} x {ratio}{layout}{unit.offer.cluster.device.name}"


def cells(proposal: Proposal) -> tuple[str, ...]:
    """Cells of HEAD."""
    unit = proposal.unit
    limits, coarse = unit.server.limits, unit.coarse
    return (
        name(proposal),
        coarse.variant.name,
        f"{limits.step_tokens:,}",
        f"{limits.rows:,}",
        _tail(proposal.ttft),
        _tail(proposal.tpot),
        f"{proposal.goodput:.3g}/s",
        f"{proposal.headroom:+.0%}",
        f"{proposal.lane_share:.0%} ({proposal.lane_tokens_s:,.0f} tokens/s)",
        money(proposal.usd_hour),
        money(proposal.usd_million),
        money(proposal.usd_thousand),
        f"{proposal.joules_token:.3g}" if proposal.watts else "unknown",
        f"{proposal.carbon_g_request:.3g}" if proposal.watts else "unknown",
        f"{NAMES[coarse.binds]} {coarse.share(coarse.binds):.0%}",
        coarse.variant.basis,
        proposal.verdict or "met",
    )


def _tail(tail: Tail) -> str:
    return f"{seconds_text(tail.p50)} / {seconds_text(tail.p99)}" if tail.p50 == tail.p50 else ""


def money(usd: float) -> str:
    return "unknown" if math.isnan(usd) else f"${usd:.3g}" if usd < 1000 else f"${usd:,.0f}"


def why(better: Proposal, worse: Proposal) -> str:
    """A sentence that says what puts one proposal before another."""
    names = f"{_long(better)} before {_long(worse)}:"
    if worse.verdict and not better.verdict:
        return f"{names} it meets objectives and limits, the other does not: {worse.verdict}."
    if worse.verdict:
        return f"{names} it misses by less: {better.good:.0%} of requests are within the limits instead of {worse.good:.0%}."
    each = [proposal.capacity / proposal.devices for proposal in (better, worse)]
    device = f"a device serves {each[0]:.3g} instead of {each[1]:.3g} requests/s within the objectives"
    if better.usd_thousand != better.usd_thousand or worse.usd_thousand != worse.usd_thousand:
        return f"{names} {better.devices} instead of {worse.devices} devices, because {device}."
    if math.isclose(better.usd_thousand, worse.usd_thousand, rel_tol=0.005):
        return f"{names} the price is the same, and it has more headroom ({better.headroom:+.0%} instead of {worse.headroom:+.0%})."
    paid = f"{money(better.usd_thousand)} instead of {money(worse.usd_thousand)} per 1K requests"
    hourly = [proposal.unit.offer.usd_hour for proposal in (better, worse)]
    prices = f", and costs {money(hourly[0])} instead of {money(hourly[1])} an hour" if hourly[0] != hourly[1] else ""
    return f"{names} {paid}; {device}{prices}."


def _long(proposal: Proposal) -> str:
    return f"{name(proposal)} ({proposal.unit.coarse.variant.name})"
