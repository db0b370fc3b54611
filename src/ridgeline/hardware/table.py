"""Published figures of accelerators, each row with its source: the ceilings that predictions are made from.

The figures stand in accelerators.toml. Dense and sparse rates are kept apart: 2:4 sparsity doubles a rate on paper alone,
and data sheets print that number first (H100 SXM: "1,979 TFLOP/s" in bf16 is 989 for a dense matrix). What a machine
reaches of its ceilings is measured (`hardware.bandwidth`, `planner.calibrate`) and stands beside them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ridgeline.core.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Level:
    """One level of memory. kind: its technology (HBM3, DDR5, SRAM). bandwidth: bytes per second, reading."""

    kind: str
    bytes: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars, and when and where they were asked: per hour of one device (rent), or for one device (buy)."""

    usd: float
    date: str
    source: str


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One kind of device.

    kind: how programs address it ("cuda", "rocm", "tpu", "cpu", ...). unit: what multiplies in it (scalar, vector, tensor,
    matrix). software: what it is programmed with. memory: where weights and cache lie; on_chip: a faster level, if its
    bandwidth is published. flops: dense operations per second by precision, products summed in float32 (int8: int32);
    sparse: the same with 2:4 (or the maker's own) sparsity. link: bytes per second to its peers, both directions summed;
    host_link: bytes per second from the host's memory, one direction; 0 where there is none or nobody says.
    watts: the maker's design power (TDP), 0 where it is not published; short peaks draw 1.1 to 1.5 times as much.
    pattern: how its driver names it. needs: instruction sets of a processor for which the row may stand.
    unverified: figures that stand on memory, without a source that was looked up.
    """

    name: str
    kind: str
    unit: str
    software: str
    memory: Level
    on_chip: Level | None
    flops: Mapping[str, float]
    sparse: Mapping[str, float]
    link: float
    host_link: float
    watts: float
    rent: Price | None
    buy: Price | None
    pattern: str
    needs: frozenset[str]
    source: str
    unverified: tuple[str, ...]

    @property
    def memory_bytes(self) -> int:
        """What the driver reports, where that is known: less than the round number on the box."""
        return self.memory.bytes

    @property
    def bandwidth(self) -> float:
        """Bytes per second of its memory."""
        return self.memory.bandwidth

    def peak(self, dtype: str) -> float:
        """Dense operations per second in `dtype`, or in the fastest type it can be computed in.

        Raises ConfigError where it computes in no such type.
        """
        for name in (dtype, *_INSTEAD[dtype]):
            if name in self.flops:
                return self.flops[name]
        raise ConfigError(
            f"{self.name} does not compute in {dtype}: use one of {', '.join(self.flops)}.", param="dtype"
        )

    def ridge(self, dtype: str) -> float:
        """Operations per byte above which a kernel is bound by arithmetic (Williams et al. 2009)."""
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
"""What a precision is widened to where there is no unit for it. bfloat16 goes to float16 only where that is all there is."""


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
            watts=float(row["watts"]),
            rent=_price(row.get("rent"), "usd_hour"),
            buy=_price(row.get("buy"), "usd"),
            pattern=row["pattern"],
            needs=frozenset(row.get("needs", ())),
            source=row["source"],
            unverified=tuple(row.get("unverified", ())),
        )


def _level(fields: Mapping[str, Any]) -> Level:
    return Level(fields["kind"], fields["mib"] * MIB, fields["gb_s"] * 1e9)


def _price(fields: Mapping[str, Any] | None, key: str) -> Price | None:
    return None if fields is None else Price(float(fields[key]), fields["date"], fields["source"])


ACCELERATORS: tuple[Accelerator, ...] = tuple(_rows())


def find(name: str) -> Accelerator | None:
    """The accelerator a driver or a user means by `name` ("NVIDIA H100 80GB HBM3", "h200"), or None."""
    for one in ACCELERATORS:
        if one.kind != "cpu" and re.search(rf"(?<![A-Za-z0-9])(?:{one.pattern})", name, re.IGNORECASE):
            return one
    return None


def lookup(name: str) -> Accelerator:
    """The accelerator a user means: by its driver's name, or by words of its name here ("4090", "epyc").

    Raises ConfigError with all names of the table.
    """
    row = find(name)
    if row is None:
        wanted = _words(name)
        row = next((one for one in ACCELERATORS if wanted and wanted <= _words(one.name)), None)
    if row is None:
        raise ConfigError(
            f"Unknown accelerator {name!r}. The hardware table has {'; '.join(one.name for one in ACCELERATORS)}.",
            param="on",
        )
    return row


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9-]+", name.lower()))


def cpu(features: Iterable[str] = ()) -> Accelerator:
    """The row that stands for a processor with these instruction sets, which the table does not name."""
    return next(one for one in ACCELERATORS if one.kind == "cpu" and one.needs <= set(features))
