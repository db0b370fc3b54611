"""Renting or owning: from how many hours of use on the bought device is the cheaper one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.planner.cost import HOURS_PER_YEAR, Owned


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A device rented at `rent_usd_hour`, only while it is used, against one that is owned."""

    owned: Owned
    rent_usd_hour: float

    @property
    def margin_usd_hour(self) -> float:
        """What an hour of use on the own device saves, its fixed costs aside."""
        return self.rent_usd_hour - self.owned.power_usd_hour

    @property
    def utilization(self) -> float:
        """Share of all hours in use above which owning is cheaper over the whole life; above 1: never."""
        if self.margin_usd_hour <= 0:
            return math.inf
        return self.owned.fixed_usd_year / (self.margin_usd_hour * HOURS_PER_YEAR)

    def payback_hours(self, utilization: float = 1.0) -> float:
        """Hours of use that give back the price, at this utilization; infinite when the upkeep eats the saving."""
        spent = self.owned.price * self.owned.upkeep / (HOURS_PER_YEAR * utilization)
        saved = self.margin_usd_hour - spent
        return self.owned.price / saved if saved > 0 else math.inf

    def payback_months(self, utilization: float = 1.0) -> float:
        """Calendar months until then."""
        return self.payback_hours(utilization) / utilization / (HOURS_PER_YEAR / 12)

    def saved_usd(self, utilization: float = 1.0) -> float:
        """Dollars that owning saves over the device's life (below 0: what it costs more)."""
        hours = HOURS_PER_YEAR * self.owned.years * utilization
        return (self.rent_usd_hour - self.owned.usd_hour(utilization)) * hours
