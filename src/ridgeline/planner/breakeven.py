"""Renting or buying a device: break-even utilization, payback time and savings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.planner.cost import HOURS_PER_YEAR, Owned


@dataclass(frozen=True, slots=True)
class BreakEven:
    """An owned device, compared with one that is rented at `rent_usd_hour` only while it is in use."""

    owned: Owned
    rent_usd_hour: float

    @property
    def margin_usd_hour(self) -> float:
        """Dollars that an hour of use on the owned device saves, without its fixed costs."""
        return self.rent_usd_hour - self.owned.power_usd_hour

    @property
    def utilization(self) -> float:
        """Utilization above which owning is cheaper over the life of the device. A value above 1 means never."""
        if self.margin_usd_hour <= 0:
            return math.inf
        return self.owned.fixed_usd_year / (self.margin_usd_hour * HOURS_PER_YEAR)

    def payback_hours(self, utilization: float = 1.0) -> float:
        """Hours of use until the savings equal the price; infinite if upkeep exceeds the savings."""
        upkeep_usd_hour = self.owned.price * self.owned.upkeep / (HOURS_PER_YEAR * utilization)
        saving_usd_hour = self.margin_usd_hour - upkeep_usd_hour
        return self.owned.price / saving_usd_hour if saving_usd_hour > 0 else math.inf

    def payback_months(self, utilization: float = 1.0) -> float:
        """Calendar months until the savings equal the price."""
        return self.payback_hours(utilization) / utilization / (HOURS_PER_YEAR / 12)

    def saved_usd(self, utilization: float = 1.0) -> float:
        """Dollars that owning saves over the life of the device. Negative if owning costs more."""
        hours = HOURS_PER_YEAR * self.owned.years * utilization
        return (self.rent_usd_hour - self.owned.usd_hour(utilization)) * hours
