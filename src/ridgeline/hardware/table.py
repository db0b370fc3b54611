"""Published peak figures of accelerators with their sources. Predictions are based on them.

The figures are in accelerators.toml. Dense and sparse rates are separate: data sheets often print the rate with 2:4 sparsity
first (H100 SXM: "1,979 TFLOP/s" in bf16 is 989 for a dense matrix). `hardware.bandwidth` and `planner.calibrate` measure the rates
that a machine reaches.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from ridgeline.core.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the memory hierarchy."""

    kind: str
    """Technology (HBM3, DDR5, SRAM)."""
    bytes: int
    bandwidth: float
    """Read bandwidth in bytes per second; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Links:
    """How the devices of a host, and hosts, are connected in the vendor's reference system."""

    topology: str
    """switch: every device reaches every other one at its full rate. pairs: bridges join two devices, PCIe the others. pcie: PCIe
    alone."""
    devices: int
    """Devices of one host."""
    network: float
    """Bytes per second of one device to other hosts, one direction; 0: not published, as for cards that are sold without a host."""
    date: str
    source: str


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per hour of one device (rent) or for one device (buy), with date and source."""

    usd: float
    date: str
    source: str


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One row of the hardware table."""

    name: str
    kind: str
    """Device type of the software ("cuda", "rocm", "tpu", "cpu", ...)."""
    unit: str
    """Unit that computes matrix products (scalar, vector, tensor, matrix)."""
    software: str
    """Programming platform."""
    memory: Level
    """Memory for weights and KV cache."""
    on_chip: Level | None
    """The largest level on the chip that all its units share (L2, L3, SRAM); None if its size is not published."""
    flops: Mapping[str, float]
    """Dense operations per second by precision, accumulated in float32 (int8: int32). Empty if unknown."""
    source: str
    sparse: Mapping[str, float] = field(default_factory=dict)
    """The same with 2:4 sparsity (or the vendor's own)."""
    link: float = 0.0
    """Bytes per second to peers, sum of both directions; 0: none or not published."""
    host_link: float = 0.0
    """Bytes per second from host memory, one direction; 0: none or not published."""
    links: Links | None = None
    """Connection of several devices; None: not known."""
    watts: float = 0.0
    """Design power (TDP); 0 if not published. Short peaks take 1.1 to 1.5 times as much."""
    rent: Price | None = None
    buy: Price | None = None
    pattern: str = ""
    """Regular expression for the driver's name of the device; "": never matches."""
    unverified: tuple[str, ...] = ()
    """Fields whose values were not checked against a source."""
    measured: tuple[str, ...] = ()
    """Fields ("dense", "memory.gb_s") that were measured on this machine, because their specification is unknown."""

    @property
    def serves(self) -> bool:
        """Whether Ridgeline runs and is tested on this kind of device. All others are in the table for comparison."""
        return self.kind in ("cuda", "cpu")

    @property
    def memory_bytes(self) -> int:
        """Memory that the driver reports, if known. It is less than the nominal size."""
        return self.memory.bytes

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth in bytes per second."""
        return self.memory.bandwidth

    def peak(self, dtype: str) -> float:
        """Dense operations per second in `dtype`, or in the type that replaces it if the device has no unit for it.

        Raises ConfigError if the device supports none of these types.
        """
        for name in (dtype, *_INSTEAD[dtype]):
            if name in self.flops:
                return self.flops[name]
        known = f"use one of {', '.join(self.flops)}" if self.flops else "its peak FLOP/s are unknown"
        raise ConfigError(f"{self.name} does not compute in {dtype}: {known}.", param="dtype")

    def ridge(self, dtype: str) -> float:
        """Operations per byte above which a kernel is compute-bound (Williams et al. 2009)."""
        return self.peak(dtype) / self.bandwidth


_INSTEAD = {
    "fp4": ("float8_e4m3", "bfloat16", "float16", "float32"),
    "float8_e4m3": ("bfloat16", "float16", "float32"),
    "int8": ("bfloat16", "float16", "float32"),
    "bfloat16": ("float32", "float16"),
    "float16": ("bfloat16", "float32"),
    "tf32": ("float32",),
    "float32": (),
}
"""Precision -> replacements in order of preference, for devices without a unit for it."""


def _rows() -> Iterator[Accelerator]:
    text = files("ridgeline.hardware").joinpath("accelerators.toml").read_text(encoding="utf-8")
    for row in tomllib.loads(text)["accelerator"]:
        yield Accelerator(
            name=row["name"],
            kind=row["kind"],
            unit=row["unit"],
            software=row["software"],
            memory=_level(row["memory"]),
            on_chip=_level(row["on_chip"]) if "on_chip" in row else None,
            flops={name: rate * 1e12 for name, rate in row["dense"].items()},
            sparse={name: rate * 1e12 for name, rate in row.get("sparse", {}).items()},
            link=row["link_gb_s"] * 1e9,
            host_link=row["host_gb_s"] * 1e9,
            links=_links(row.get("links")),
            watts=float(row["watts"]),
            rent=_price(row.get("rent"), "usd_hour"),
            buy=_price(row.get("buy"), "usd"),
            pattern=row.get("pattern", ""),
            source=row["source"],
            unverified=tuple(row.get("unverified", ())),
        )


def _level(fields: Mapping[str, Any]) -> Level:
    return Level(fields["kind"], fields["mib"] * MIB, fields.get("gb_s", 0) * 1e9)


def _links(fields: Mapping[str, Any] | None) -> Links | None:
    if fields is None:
        return None
    network = fields.get("network_gb_s", 0) * 1e9
    return Links(fields["topology"], fields["devices"], network, fields["date"], fields["source"])


def _price(fields: Mapping[str, Any] | None, key: str) -> Price | None:
    return None if fields is None else Price(float(fields[key]), fields["date"], fields["source"])


ACCELERATORS: tuple[Accelerator, ...] = tuple(_rows())


def find(name: str) -> Accelerator | None:
    """Accelerator whose pattern matches `name` ("NVIDIA H100 80GB HBM3", "h200"); None if there is none."""
    for accelerator in ACCELERATORS:
        pattern = accelerator.pattern
        if pattern and re.search(rf"(?<![A-Za-z0-9])(?:{pattern})", name, re.IGNORECASE):
            return accelerator
    return None


def lookup(name: str) -> Accelerator:
    """Accelerator by its driver's name, or by words of its name in the table ("4090", "epyc").

    Raises ConfigError that lists all names of the table.
    """
    row = find(name)
    if row is None:
        words = _words(name)
        row = next((accelerator for accelerator in ACCELERATORS if words and words <= _words(accelerator.name)), None)
    if row is None:
        raise ConfigError(
            f"Unknown accelerator {name!r}. The hardware table has {'; '.join(accelerator.name for accelerator in ACCELERATORS)}.",
            param="on",
        )
    return row


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9-]+", name.lower()))
