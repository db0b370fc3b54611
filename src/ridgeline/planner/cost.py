"""What answers cost: rented by the hour or owned, per token and per request, and what a saving is worth.

US dollars throughout; seconds, hours and tokens are spelled out in the names. Costs per request are the ones to compare
models by: their tokenizers cut the same text into different numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

HOURS_PER_YEAR = 8760.0


@dataclass(frozen=True, slots=True)
class Owned:
    """A device that was bought. price: of the device and its share of the server. residual: share of the price that it
    still brings at the end. upkeep: share of the price that repair, room and staff cost in a year. watts: drawn while in
    use, the server's share included. pue: power of the whole site per power of its machines (cooling). usd_kwh: tariff."""

    price: float
    years: float = 4.0
    residual: float = 0.0
    upkeep: float = 0.05
    watts: float = 700.0
    pue: float = 1.2
    usd_kwh: float = 0.12

    @property
    def power_usd_hour(self) -> float:
        """Electricity and cooling of an hour of use."""
        return self.watts / 1000 * self.pue * self.usd_kwh

    @property
    def fixed_usd_year(self) -> float:
        """What a year costs whether the device works or not."""
        return self.price * ((1 - self.residual) / self.years + self.upkeep)

    def usd_hour(self, utilization: float = 1.0) -> float:
        """Dollars of an hour of use, when the device is in use for `utilization` (above 0, up to 1) of all hours."""
        return self.fixed_usd_year / (HOURS_PER_YEAR * utilization) + self.power_usd_hour


@dataclass(frozen=True, slots=True)
class Service:
    """How fast one deployment is, on hardware at `usd_hour`: output tokens per second and prefills per minute, each as if
    the hardware did nothing else (0: not asked for), and tokens of a mean answer."""

    usd_hour: float
    tokens_s: float
    prefills_min: float = 0.0
    output_tokens: float = 1.0

    @property
    def usd_million_tokens(self) -> float:
        """Dollars per million output tokens."""
        return usd_per_unit(self.usd_hour, self.tokens_s) * 1e6

    @property
    def decode_usd_thousand(self) -> float:
        """Dollars to generate the answers of a thousand requests."""
        return usd_per_unit(self.usd_hour, self.tokens_s) * self.output_tokens * 1000

    @property
    def prefill_usd_thousand(self) -> float:
        """Dollars to read the prompts of a thousand requests."""
        return usd_per_unit(self.usd_hour, self.prefills_min / 60) * 1000 if self.prefills_min else 0.0

    @property
    def usd_thousand_requests(self) -> float:
        """Dollars of a thousand requests, prompts and answers."""
        return self.prefill_usd_thousand + self.decode_usd_thousand


def usd_per_unit(usd_hour: float, units_s: float) -> float:
    """Dollars for one of what is produced at `units_s` per second."""
    return usd_hour / 3600 / units_s


def training_pays(training_usd: float, saved_usd: float, requests: float) -> bool:
    """Whether a training of T dollars that saves p dollars a request pays over N requests: T <= p x N."""
    return training_usd <= saved_usd * requests


def tokens_saved(prefix_tokens: float, calls: float) -> float:
    """Prompt tokens that a prompt cache saves when `calls` requests share a prefix that is computed once."""
    return prefix_tokens * max(0.0, calls - 1)
