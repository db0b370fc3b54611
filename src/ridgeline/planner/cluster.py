"""Devices to plan for, from the text of `--gpus`: number, kind, and the links between them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ridgeline.core.errors import ConfigError
from ridgeline.hardware.table import Accelerator, lookup
from ridgeline.planner.links import Fabric, Level, Link

MAX_DEVICES = 16384
_TEXT = re.compile(r"(?:(\d+)\s*[x*]\s*)?(\S.*)", re.IGNORECASE)
_EXAMPLE = "give a number and a name of the hardware table, as in 8xh100"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices with known links. notes: what is assumed about them, as sentences."""

    device: Accelerator
    count: int
    per_host: int
    fabric: Fabric
    notes: tuple[str, ...] = ()

    @property
    def usd_hour(self) -> float:
        """Rent of all devices; NaN if the table has no price."""
        return self.device.rent.usd * self.count if self.device.rent else math.nan

    def __str__(self) -> str:
        return f"{self.count} x {self.device.name}"


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Rates that the user gives, bytes per second of one device in one direction; 0: as in the table."""

    within: float = 0.0
    between: float = 0.0
    per_host: int = 0


def read_cluster(text: str, rates: LinkRates = LinkRates()) -> Cluster:
    """Read "8xh100". Raises ConfigError that names the part and the remedy."""
    number, name = _split(text)
    device = _device(name, text)
    if not device.flops or not device.bandwidth:
        raise ConfigError(
            f"--gpus {text!r}: the hardware table has no FLOP/s or no memory bandwidth of {device.name}, so no time can be "
            "predicted: give another device.",
            param="gpus",
        )
    per_host = min(number, rates.per_host or (device.links.devices if device.links else number))
    levels, notes = _within(device, per_host, rates)
    if number > per_host:
        between = rates.between or (device.links.network if device.links else 0.0)
        if between:
            levels.append(Level(math.inf, Link("network", between)))
        else:
            notes.append(
                f"The network between hosts of {device.name} is unknown: no layout spans hosts of {per_host}. --network-gb-s "
                "gives its rate for each device."
            )
    if rates.within or rates.between:
        notes.append("Rates of links are those of the options; their latencies are those of NCCL.")
    if device.unverified:
        notes.append(f"Unverified values in the hardware table: {', '.join(device.unverified)}.")
    return Cluster(device, number, per_host, Fabric(tuple(levels)), tuple(notes))


def _split(text: str) -> tuple[int, str]:
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--gpus {text!r} names no device: {_EXAMPLE}.", param="gpus")
    if "," in text or "+" in text:
        raise ConfigError(
            f"--gpus {text!r} names several kinds: a layout is planned for one kind of device, as in 8xh100.",
            param="gpus",
        )
    number = int(match[1] or 1)
    if not 1 <= number <= MAX_DEVICES:
        raise ConfigError(f"--gpus {text!r} is {number} devices: give 1 to {MAX_DEVICES}, as in 8xh100.", param="gpus")
    return number, match[2]


def _device(name: str, text: str) -> Accelerator:
    try:
        return lookup(name)
    except ConfigError as error:
        raise ConfigError(f"--gpus {text!r}: {error.message}", param="gpus") from None


def _within(device: Accelerator, per_host: int, rates: LinkRates) -> tuple[list[Level], list[str]]:
    """Links of the devices of a host, and notes."""
    links, notes = device.links, list[str]()
    if per_host == 1:
        return [], notes
    if rates.within:
        return [Level(per_host, Link("nvlink", rates.within, direct=True))], notes
    if links is not None and links.topology == "switch":
        return [Level(per_host, Link("nvlink", device.link / 2, direct=True))], notes
    pcie = [Level(per_host, Link("pcie", device.host_link))] if device.host_link else []
    if links is not None and links.topology == "pairs" and per_host > 1:
        return [Level(2, Link("nvlink", device.link / 2, direct=True)), *(pcie if per_host > 2 else [])], notes
    if device.kind == "cuda" and pcie:
        if links is None:
            notes.append(
                f"How several {device.name} are connected is unknown: PCIe at {device.host_link / 1e9:g} GB/s in one host is "
                "assumed. --link-gb-s gives another rate."
            )
        return pcie, notes
    notes.append(
        f"The links between several {device.name} are unknown: no layout spans them. --link-gb-s gives the rate of one device."
    )
    return [], notes
