"""Cost per token and per request, on rented or owned hardware.

All prices are US dollars. Names contain the unit. To compare models, use the cost per request: tokenizers split the same text into
different numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

HOURS_PER_YEAR = 8760.0


@dataclass(frozen=True, slots=True)
class Owned:
    """Cost parameters of a device that was bought."""

    price: float
    """Price of the device, including its share of the server."""
    years: float = 4.0
    """Years of use."""
    residual: float = 0.0
    """Resale value after these years, as a share of the price."""
    upkeep: float = 0.05
    """Yearly cost of repair, space and staff, as a share of the price."""
    watts: float = 700.0
    """Power in use, including its share of the server."""
    pue: float = 1.2
    """Power usage effectiveness: power of the site divided by power of its machines."""
    usd_kwh: float = 0.12
    """Price of electricity per kWh."""

    @property
    def power_usd_hour(self) -> float:
        """Dollars for electricity and cooling per hour of use."""
        return self.watts / 1000 * self.pue * self.usd_kwh

    @property
    def fixed_usd_year(self) -> float:
        """Dollars per year that do not depend on use."""
        return self.price * ((1 - self.residual) / self.years + self.upkeep)

    def usd_hour(self, utilization: float = 1.0) -> float:
        """Dollars per hour of use. utilization: share of all hours in which the device is in use, above 0 and at most 1."""
        return self.fixed_usd_year / (HOURS_PER_YEAR * utilization) + self.power_usd_hour


@dataclass(frozen=True, slots=True)
class Service:
    """Price and speed of one deployment. Each rate assumes that the hardware does nothing else."""

    usd_hour: float
    tokens_s: float
    """Output tokens per second."""
    prefills_min: float = 0.0
    """Prompts per minute; 0: the cost of prompts is left out."""
    output_tokens: float = 1.0
    """Mean tokens per answer."""

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
        """Dollars to process the prompts of a thousand requests."""
        return usd_per_unit(self.usd_hour, self.prefills_min / 60) * 1000 if self.prefills_min else 0.0

    @property
    def usd_thousand_requests(self) -> float:
        """Dollars per thousand requests, prompts and answers together."""
        return self.prefill_usd_thousand + self.decode_usd_thousand


def usd_per_unit(usd_hour: float, units_s: float) -> float:
    """Dollars per unit, for hardware that produces `units_s` units per second."""
    return usd_hour / 3600 / units_s


def tokens_saved(prefix_tokens: float, calls: float) -> float:
    """Prompt tokens that a prefix cache saves if `calls` requests share a prefix."""
    return prefix_tokens * max(0.0, calls - 1)
