"""Energy of a deployment: joules per token, kWh and CO2 per year. PUE and carbon intensity are inputs."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planner.cost import HOURS_PER_YEAR

JOULES_PER_KWH = 3.6e6
DRAW_FACTORS = (1.1, 1.5)
"""Short power peaks as multiples of the design power (TDP), for sizing supply and cooling."""


@dataclass(frozen=True, slots=True)
class Energy:
    """Power of a device and its token rate."""

    watts: float
    """Mean power of the device in use."""
    tokens_s: float = 0.0
    """Output tokens per second; 0: unknown."""
    pue: float = 1.2
    """Power usage effectiveness: power of the site divided by power of its machines."""
    carbon_g_kwh: float = 450.0
    """Grams of CO2 per kWh of the grid."""
    usd_kwh: float = 0.12
    """Price of electricity per kWh."""

    @property
    def joules_per_token(self) -> float:
        """Energy of the device per output token, without cooling; 0 if the rate is unknown."""
        return self.watts / self.tokens_s if self.tokens_s else 0.0

    @property
    def kwh_million_tokens(self) -> float:
        """Energy of the site per million output tokens."""
        return self.joules_per_token * 1e6 * self.pue / JOULES_PER_KWH

    @property
    def usd_million_tokens(self) -> float:
        """Dollars for electricity per million output tokens."""
        return self.kwh_million_tokens * self.usd_kwh

    @property
    def site_kwh_year(self) -> float:
        """Energy of the site in a year of continuous use."""
        return yearly_kwh(self.watts) * self.pue

    @property
    def carbon_kg_year(self) -> float:
        return self.site_kwh_year * self.carbon_g_kwh / 1000

    @property
    def peak_watts(self) -> tuple[float, float]:
        """Range of short power peaks for a design power of `watts`."""
        return self.watts * DRAW_FACTORS[0], self.watts * DRAW_FACTORS[1]


def yearly_kwh(watts: float) -> float:
    """Energy of a year of continuous use, without cooling."""
    return watts * HOURS_PER_YEAR / 1000


def site_factor(quoted_kwh: float, watts: float) -> float:
    """Published yearly consumption divided by the consumption of the device alone."""
    return quoted_kwh / yearly_kwh(watts)
