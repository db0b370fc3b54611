"""Limits of one key. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

MINUTE_S = 60.0


class Bucket:
    """A token bucket: it holds what a minute allows, refills evenly, and may be in debt.

    Debt is how a cost is charged that is known only at the end. Until it is refilled nothing else is allowed.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._at = float(per_minute), now

    def resize(self, per_minute: int, now: float) -> None:
        """Change the limit. What is used stays used."""
        self._level = self.level(now) + per_minute - self.per_minute
        self.per_minute = per_minute

    def level(self, now: float) -> float:
        """What is left. The clock may not go back."""
        gained = max(0.0, now - self._at) * self.per_minute / MINUTE_S
        self._level, self._at = min(float(self.per_minute), self._level + gained), max(now, self._at)
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is allowed, 0 if it is now. More than a minute allows needs a full bucket."""
        missing = min(amount, self.per_minute) - self.level(now)
        return max(0.0, missing) * MINUTE_S / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """Charge `amount`, also if it is not there."""
        self._level = self.level(now) - amount

    def full_s(self, now: float) -> float:
        """Seconds until the bucket is full."""
        return (self.per_minute - self.level(now)) * MINUTE_S / self.per_minute


def period_start(period: str, now: float) -> float:
    """Unix seconds at which the present day or month began, in UTC; 0 for `total`."""
    moment = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return moment.timestamp()
    return moment.replace(day=1).timestamp() if period == "month" else 0.0


def period_end(period: str, now: float) -> float | None:
    """Unix seconds at which the present day or month ends, in UTC; None for `total`."""
    if period == "total":
        return None
    start = datetime.fromtimestamp(period_start(period, now), UTC)
    if period == "day":
        return (start + timedelta(days=1)).timestamp()
    return (start + timedelta(days=32)).replace(day=1).timestamp()


class Spending:
    """USD that a key has spent by period. spent: since the start of each period, at `now`."""

    def __init__(self, spent: Mapping[str, float], now: float) -> None:
        self._spent = {period: (period_start(period, now), usd) for period, usd in spent.items()}

    def of(self, period: str, now: float) -> float:
        """USD spent in the present period."""
        start, usd = self._spent.get(period, (0.0, 0.0))
        return usd if start == period_start(period, now) else 0.0

    def add(self, usd: float, now: float) -> None:
        for period in self._spent:
            self._spent[period] = period_start(period, now), self.of(period, now) + usd

    def exhausted(self, budget: Mapping[str, float], now: float) -> str | None:
        """The period whose budget is spent: the one that ends last, or None."""
        spent = [period for period, usd in budget.items() if self.of(period, now) >= usd]
        return max(spent, key=lambda period: period_end(period, now) or float("inf"), default=None)


def duration_text(seconds: float) -> str:
    """A duration as the x-ratelimit-reset headers of OpenAI have it: 12ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < MINUTE_S:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{int(seconds // 60)}m{int(seconds % 60)}s"
