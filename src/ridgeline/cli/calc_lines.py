"""What the calculators share: lines of results, and values of their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.cli.show import bytes_text
from ridgeline.core.errors import ConfigError
from ridgeline.hardware.probe import resolve_accelerator

MINIMUM = {"residual": 0, "upkeep": 0, "pue": 1, "carbon_g_kwh": 0, "usd_kwh": 0}
"""Smallest allowed value, for options whose lower limit is not "above 0"."""
SHARES = ("residual", "utilization", "paid_share", "mfu")
"""Options that are at most 1."""

Option = tuple[Callable[[str], Any], str]
"""Type of an option's value, and its help."""


@dataclass(frozen=True, slots=True)
class Line:
    """One result of a calculator."""

    name: str
    """Key in the JSON output; contains the unit."""
    label: str
    """Description in the table. Empty: only in JSON."""
    value: float
    text: str
    """The value as the table shows it."""


def number(options: Mapping[str, Any], name: str, default: float | None) -> float:
    """Value of an option, or `default`. Raises ConfigError if it is missing or out of range (MINIMUM)."""
    value = options.get(name, default)
    if value is None:
        raise ConfigError(f"{flag(name)} is missing: give a value.", param=name)
    if name in options and (value < MINIMUM[name] if name in MINIMUM else value <= 0):
        minimum = f"of at least {MINIMUM[name]:g}" if name in MINIMUM else "above 0"
        raise ConfigError(f"{flag(name)} is {value:g}: give a number {minimum}.", param=name)
    if name in SHARES and value > 1:
        raise ConfigError(f"{flag(name)} is {value:g}: give a share of at most 1.", param=name)
    return value


def count(options: Mapping[str, Any], name: str, default: int | None) -> int:
    return int(number(options, name, default))


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def gb(count: int) -> str:
    return f"{count / 1e9:,.2f} GB ({bytes_text(count)})"


def usd(name: str, label: str, value: float) -> Line:
    return Line(name, label, value, f"${value:,.3f}" if abs(value) < 1000 else f"${value:,.0f}")


def rent(options: Mapping[str, Any]) -> float:
    """Dollars per hour: given, or of the device in the table of accelerators."""
    if "usd_hour" in options:
        return number(options, "usd_hour", None)
    accelerator = resolve_accelerator(options["on"]) if "on" in options else None
    if accelerator is None or accelerator.rent is None:
        raise ConfigError("The price of an hour is unknown: give --usd-hour.", param="usd_hour")
    return accelerator.rent.usd
