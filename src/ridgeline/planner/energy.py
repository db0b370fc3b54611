"""Energy of a deployment: joules per token, kilowatt-hours per year, with cooling and carbon as stated factors."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner.cost import HOURS_PER_YEAR

JOULES_PER_KWH = 3.6e6
DRAW_FACTORS = (1.1, 1.5)
"""Short peaks of draw as multiples of the design power (TDP): what supply and cooling must stand."""


@dataclass(frozen=True, slots=True)
class Energy:
    """Power and what it produces. watts: of the device, mean over its use. tokens_s: output tokens per second.
    pue: power of the whole site per power of its machines. carbon_g_kwh: grams of CO2 per kilowatt-hour of the grid."""

    watts: float
    tokens_s: float = 0.0
    pue: float = 1.2
    carbon_g_kwh: float = 450.0
    usd_kwh: float = 0.12

    @property
    def joules_per_token(self) -> float:
        """At the device, without cooling; 0 when no rate is known."""
        return self.watts / self.tokens_s if self.tokens_s else 0.0

    @property
    def kwh_million_tokens(self) -> float:
        """Of the whole site, per million output tokens."""
        return self.joules_per_token * 1e6 * self.pue / JOULES_PER_KWH

    @property
    def usd_million_tokens(self) -> float:
        """Electricity alone."""
        return self.kwh_million_tokens * self.usd_kwh

    @property
    def site_kwh_year(self) -> float:
        """Of the whole site, a year without a pause."""
        return yearly_kwh(self.watts) * self.pue

    @property
    def carbon_kg_year(self) -> float:
        return self.site_kwh_year * self.carbon_g_kwh / 1000

    @property
    def peak_watts(self) -> tuple[float, float]:
        """Least and most that `watts` of design power may draw for a moment."""
        return self.watts * DRAW_FACTORS[0], self.watts * DRAW_FACTORS[1]


def yearly_kwh(watts: float) -> float:
    """Kilowatt-hours of a year at this power, at the chip."""
    return watts * HOURS_PER_YEAR / 1000


def site_factor(quoted_kwh: float, watts: float) -> float:
    """The factor for everything beside the chip that a quoted yearly consumption implies."""
    return quoted_kwh / yearly_kwh(watts)
