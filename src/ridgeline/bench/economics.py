"""Money and energy of a run: per request, and goodput per dollar and per watt.

The run pays for the device from its begin to its end, idle time included. Failed requests and requests that missed the SLO cost as
much as others, so the bill is divided by completed requests, and goodput per dollar counts good ones only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.bench.record import Run
from ridgeline.core.errors import ConfigError
from ridgeline.planner.prices import TokenCosts, Tokens, token_costs

PRICE_REMEDY = "give --usd-hour, the price of the device per hour"
ENERGY_REMEDY = "give --watts, the mean power of the device during the run"
SLO_REMEDY = "give --slo, so that good requests are known"
NO_REQUEST = "no request was completed"
UNKNOWN = "unknown"
_ENERGY_SOURCES = {
    "nvml": "NVML counter of the server's device",
    "rapl": "RAPL counter of the server's processor",
    "estimate": "estimate of the server from the board power",
}


@dataclass(frozen=True, slots=True)
class Economics:
    """Price and energy of a run. None: unknown."""

    seconds: float
    completed: int
    good: int | None
    """Requests that met the SLO. None: no SLO."""
    usd_hour: float | None
    """Price of the device per hour."""
    price_source: str
    """Where the price comes from, or how to give it."""
    joules: float | None
    """Energy of the device, idle power included."""
    energy_source: str
    """Where the energy comes from, or how to give it."""

    @property
    def usd(self) -> float | None:
        """The bill of the run."""
        return None if self.usd_hour is None else self.usd_hour * self.seconds / 3600

    @property
    def watts(self) -> float | None:
        """Mean power."""
        return self.joules / self.seconds if self.joules is not None and self.seconds > 0 else None

    @property
    def usd_per_request(self) -> float | None:
        """Dollars of a completed request."""
        return _divide(self.usd, self.completed)

    @property
    def joules_per_request(self) -> float | None:
        """Energy of a completed request."""
        return _divide(self.joules, self.completed)

    @property
    def good_per_usd(self) -> float | None:
        """Good requests that a dollar buys."""
        return _divide(self.good, self.usd)

    @property
    def goodput_per_watt(self) -> float | None:
        """Good requests per second and watt, which is good requests per joule."""
        return _divide(self.good, self.joules)


@dataclass(frozen=True, slots=True)
class Entry:
    """A figure of `Economics` as tables and comparisons show it. factor: from its unit to `unit`."""

    name: str
    """Attribute of Economics, and key of run.json."""
    label: str
    unit: str
    factor: float
    higher_is_better: bool
    of_money: bool
    """Depends on the price, not on the energy."""

    def value(self, figures: Economics) -> float | None:
        """The figure in `unit`. None: unknown."""
        known: float | None = getattr(figures, self.name)
        return None if known is None else known * self.factor

    def reason(self, figures: Economics) -> str:
        """Why the figure is unknown, and what to do."""
        if self.higher_is_better and figures.good is None:
            return SLO_REMEDY
        known = figures.usd_hour if self.of_money else figures.joules
        if known is not None:
            return NO_REQUEST
        return figures.price_source if self.of_money else figures.energy_source


ENTRIES = (
    Entry("usd_per_request", "cost per 1,000 requests", "$", 1e3, False, True),
    Entry("joules_per_request", "energy per request", "J", 1.0, False, False),
    Entry("good_per_usd", "goodput per dollar", "requests", 1.0, True, True),
    Entry("goodput_per_watt", "goodput per kilowatt", "requests/s", 1e3, True, False),
)


def economics(run: Run) -> Economics:
    """Price and energy of a run: what the options gave, else what the server reported. Records of older versions have less."""
    usd_hour, price_source = _price(run)
    joules, energy_source = _energy(run)
    good = len(run.good) if run.slo else None
    return Economics(run.seconds, len(run.completed), good, usd_hour, price_source, joules, energy_source)


def economics_json(run: Run) -> dict[str, Any]:
    """The figures of `economics` for run.json, with null for unknown ones."""
    figures = economics(run)
    names = ("usd", "watts", *(entry.name for entry in ENTRIES))
    return {**asdict(figures), **{name: getattr(figures, name) for name in names}}


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """What the prices of tokens follow from."""

    usd_hour: float | None
    seconds: float
    busy_share: float
    """Share of the run in which the device ran steps."""
    tokens: Tokens
    """Of the completed requests."""
    costs: TokenCosts


def measured_load(run: Run) -> MeasuredLoad:
    """Tokens of a run and their costs. Raises ConfigError for a run against another server, or of an older version."""
    server, counted = run.facts.get("server") or {}, run.facts.get("counted")
    facts = server.get("facts", {})
    if not counted or not server.get("requests") or not {"blocks", "page_tokens"} <= facts.keys():
        raise ConfigError(
            "The run has no device seconds of its requests: prices need a run of `ridgeline bench run` against a Ridgeline server.",
            param="run",
        )
    rows = run.completed
    # Each group of layers holds a page for the same tokens.
    cache_tokens = facts["blocks"] * facts["page_tokens"] / facts.get("kv_groups", 1)
    n_input, n_cached, n_output = (
        sum(getattr(row, name) for row in rows) for name in ("input_tokens", "cached_tokens", "output_tokens")
    )
    tokens = Tokens(n_input - n_cached, n_cached, n_output)
    costs = token_costs(server["requests"], cache_tokens)
    busy_share = counted["busy_s"] / run.seconds if run.seconds > 0 else 0.0
    return MeasuredLoad(economics(run).usd_hour, run.seconds, busy_share, tokens, costs)


def lines(run: Run) -> list[tuple[str, str]]:
    """(label, text) of each figure, for a table. An unknown figure names its remedy."""
    figures = economics(run)
    rows = []
    for entry in ENTRIES:
        value, source = entry.value(figures), figures.price_source if entry.of_money else figures.energy_source
        text = f"{UNKNOWN}: {entry.reason(figures)}" if value is None else f"{amount(value, entry.unit)} ({source})"
        rows.append((entry.label, text))
    return rows


def columns(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Cost and energy per request as columns of a table over runs, those that any run knows: heading -> a text per run."""
    every = [economics(run) for run in runs]
    shown = {}
    for entry, heading in zip(ENTRIES[:2], ("per 1,000 requests", "per request"), strict=True):
        values = [entry.value(figures) for figures in every]
        if any(value is not None for value in values):
            shown[heading] = [amount(value, entry.unit) for value in values]
    return shown


def amount(value: float | None, unit: str) -> str:
    """A figure with its unit: "$0.0123", "17.3 J", "unknown"."""
    if value is None:
        return UNKNOWN
    number = f"{abs(value):,.0f}" if abs(value) >= 1e4 else f"{abs(value):.4g}"
    sign = "-" if value < 0 else ""
    return f"{sign}${number}" if unit == "$" else f"{sign}{number} {unit}"


def _price(run: Run) -> tuple[float | None, str]:
    """Dollars per hour and their source, or None and the remedy."""
    if (given := run.facts.get("usd_hour")) is not None:
        return float(given), f"${given:g} an hour as given"
    if price := _ceilings(run).get("price"):
        return float(price), f"${price:g} an hour as the server reports"
    return None, PRICE_REMEDY


def _energy(run: Run) -> tuple[float | None, str]:
    """Joules of the run and their source, or None and the remedy."""
    if (watts := run.facts.get("watts")) is not None:
        return watts * run.seconds, f"{watts:g} W as given"
    if joules := (run.facts.get("counted") or {}).get("joules"):
        kind = _ceilings(run).get("power", "")
        return float(joules), _ENERGY_SOURCES.get(kind, "counter of the server")
    return None, ENERGY_REMEDY


def _ceilings(run: Run) -> dict[str, Any]:
    """Price and power counter that the server reported."""
    return (run.facts.get("server") or {}).get("ceilings") or {}


def _divide(amount: float | None, count: float | None) -> float | None:
    """amount / count. None if one of them is unknown, or the count is 0."""
    return amount / count if amount is not None and count else None
