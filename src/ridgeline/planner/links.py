"""Times of collectives between devices: latency of each hop plus bytes over the rate of a link (the alpha-beta model).

Algorithms and their volumes: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
Latencies: NCCL's own model of itself (github.com/NVIDIA/nccl, src/graph/tuning.cc at b647562, read 2026-11-27). Times are those of
an idle link and of equal ranks; no collective overlaps with arithmetic unless its caller says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Protocol(NamedTuple):
    """A way to move data: seconds to start, seconds per hop, and the share of the link's rate that it reaches."""

    start_s: float
    hop_s: float
    share: float


LINE_SHARES: Mapping[str, float] = {"nvlink": 370 / 450, "pcie": 20 / 32, "network": 370 / 450}
"""Share of the line rate that data gets. NVLink 4: 370 of 450 GB/s (github.com/NVIDIA/nccl-tests issue 212, a maintainer of NCCL).
PCIe 4: 20 of 32 GB/s (issue 178 there, three A100 without NVLink between them). Networks: assumed to be as NVLink."""
PROTOCOLS: Mapping[str, tuple[Protocol, ...]] = {
    "nvlink": (Protocol(6.6e-6, 0.6e-6, 0.25), Protocol(8.4e-6, 3.4e-6, 1.0)),
    "pcie": (Protocol(6.6e-6, 1.0e-6, 0.25), Protocol(8.4e-6, 5.7e-6, 1.0)),
    "network": (Protocol(6.6e-6, 2.7e-6, 0.25), Protocol(8.4e-6, 14.0e-6, 1.0)),
}
"""NCCL's LL (flags beside the data: a quarter of the rate) and Simple, with the constants of its rings. The quicker one counts."""


@dataclass(frozen=True, slots=True)
class Link:
    """The connection of one device to others. kind: a name of PROTOCOLS. bytes_per_s: line rate of one direction. direct: the
    device reaches all others at once, so that a collective needs one hop instead of a ring."""

    kind: str
    bytes_per_s: float
    direct: bool = False

    def _seconds(self, ways: Iterable[tuple[int, float]]) -> float:
        """The quickest of (hops, bytes that a device sends), over all protocols."""
        rate = self.bytes_per_s * LINE_SHARES[self.kind]
        return min(
            protocol.start_s + hops * protocol.hop_s + volume / (rate * protocol.share)
            for hops, volume in ways
            for protocol in PROTOCOLS[self.kind]
        )

    def all_reduce(self, ranks: int, size: float) -> float:
        """Seconds to sum `size` bytes over the ranks. Ring, tree, and on direct links one shot (each rank reads all) and two shots
        (each rank sums a part, then all gather the parts)."""
        part = 2 * size * (ranks - 1) / ranks
        ways = [(2 * (ranks - 1), part), (2 * math.ceil(math.log2(ranks)), 2 * size)]
        return self._seconds([*ways, (1, size * (ranks - 1)), (2, part)] if self.direct else ways)

    def all_gather(self, ranks: int, size: float) -> float:
        """Seconds after which each rank has all parts, `size` bytes together. A reduce-scatter takes as long."""
        hops = 1 if self.direct else math.ceil(math.log2(ranks))
        return self._seconds([(ranks - 1, size * (ranks - 1) / ranks), (hops, size * (ranks - 1) / ranks)])

    def all_to_all(self, ranks: int, size: float) -> float:
        """Seconds to exchange `size` bytes of each rank evenly with all ranks."""
        return self._seconds([(1 if self.direct else ranks - 1, size * (ranks - 1) / ranks)])

    def send(self, size: float) -> float:
        """Seconds to send `size` bytes to one other device."""
        return self._seconds([(1, size)])


class Level(NamedTuple):
    """Devices of one group, counted from the innermost level, and the link between them."""

    devices: float
    link: Link


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links between devices from the innermost group outwards: NVLink within a host, the network between hosts.

    The devices of a group have neighbouring numbers. A collective over several levels reduces (or gathers) inside each group first,
    so that a link further out carries only the share of one device.
    """

    levels: tuple[Level, ...]

    def reaches(self, devices: int) -> bool:
        """Whether links between so many devices are known."""
        return devices == 1 or (bool(self.levels) and self.levels[-1].devices >= devices)

    def strided(self, stride: int) -> Fabric:
        """The links between every `stride`-th device."""
        levels: list[Level] = []
        for level in self.levels:
            devices = level.devices if level.devices == math.inf else level.devices // stride
            if devices > (levels[-1].devices if levels else 1):
                levels.append(Level(devices, level.link))
        return Fabric(tuple(levels))

    def _rounds(self, ranks: int) -> Iterable[tuple[Link, int, float]]:
        """(link, ranks that it connects, share of the data that it carries) of each level, from the innermost outwards."""
        inner, share = 1.0, 1.0
        for level in self.levels:
            if ranks <= 1:
                return
            fan = min(ranks, level.devices / inner)
            yield level.link, int(fan), share
            share, inner, ranks = share / fan, level.devices, math.ceil(ranks / fan)

    def all_reduce(self, ranks: int, size: float) -> float:
        rounds = list(self._rounds(ranks))
        if not rounds:
            return 0.0
        link, fan, share = rounds[-1]
        inner = sum(2 * link.all_gather(fan, size * share) for link, fan, share in rounds[:-1])
        return inner + link.all_reduce(fan, size * share)

    def all_gather(self, ranks: int, size: float) -> float:
        """Seconds after which each rank has all parts, `size` bytes together."""
        rounds = list(self._rounds(ranks))
        # Parts travel outwards first: between hosts a device gathers the parts of its peers, then the host shares them.
        return sum(link.all_gather(fan, size * share) for link, fan, share in rounds)

    def all_to_all(self, ranks: int, size: float) -> float:
        """Seconds to exchange `size` bytes of each rank evenly with all ranks."""
        total = 0.0
        for link, fan, _ in self._rounds(ranks):
            total += link.all_to_all(fan, size)
        return total

    def send(self, source: int, target: int, size: float) -> float:
        """Seconds to send between two devices by number. Raises ValueError where no link connects them."""
        for level in self.levels:
            if level.devices == math.inf or source // level.devices == target // level.devices:
                return level.link.send(size)
        raise ValueError(f"No known link connects device {source} and device {target}.")
