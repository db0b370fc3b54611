"""Placement without a solver: first fit decreasing, and a bound by volume.

Replicas that run now stay while they are needed. Others follow by size, the largest first. Each takes the first GPUs in use with
room, and otherwise the unused GPUs that cost least for its load (first fit decreasing, Johnson 1973).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from ridgeline.planner.placement import EPSILON, Fleet, Footprint, Gpu, Replica, split_device

MIXES = (0.0, 0.5, 1.0)
"""Shares of memory, against time, in a volume. Each gives a bound."""


def first_fit(fleet: Fleet) -> list[Replica]:
    """Replicas that fit. Where GPUs do not suffice, some load is not served."""
    return _FirstFit(fleet).replicas()


class _FirstFit:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._held: dict[str, Counter[int]] = {}
        self._memory = Counter[str]()
        self._used: dict[str, list[str]] = {gpu.name: [] for gpu in fleet.gpus}
        self._prices = {
            number: sorted(
                (entry for entry, (other, _) in enumerate(fleet.entries) if other == number),
                key=lambda entry: _price(fleet, fleet.entries[entry][1]),
            )
            for number in range(len(fleet.models))
        }
        """Entries of each model, those first that cost least for their load."""
        self._made: list[Replica] = []
        self._left = [model.load for model in fleet.models]

    def replicas(self) -> list[Replica]:
        fleet = self._fleet
        for replica in fleet.kept:
            number, kind = fleet.numbers[replica.model], split_device(replica.devices[0])[0]
            for entry in self._prices[number]:
                foot = fleet.entries[entry][1]
                if (foot.gpu, foot.gpus) == (kind, len(replica.devices)) and self._put(entry, replica.devices):
                    break
        for number in sorted(range(len(fleet.models)), key=self._order):
            while self._left[number] > EPSILON and self._place(number):
                pass
        return self._made

    def _order(self, number: int) -> tuple[float, float]:
        """By worth for the GPUs that it takes, if that is the goal; otherwise the largest first."""
        model, fleet = self._fleet.models[number], self._fleet
        if fleet.goal == "most" and model.footprints:
            size = min(_price(fleet, foot)[1] for foot in model.footprints)
            return (-model.weight / size if size else -math.inf), 0.0
        return 0.0, -max((volume(fleet, foot, 0.5) for foot in model.footprints), default=0.0)

    def _place(self, number: int) -> bool:
        """Place a replica of a model. Returns whether it fits."""
        entries = self._prices[number]
        feet = [(entry, self._fleet.entries[entry][1]) for entry in entries]
        return any(
            self._put(entry, devices)
            for devices_of in (lambda foot: self._used[foot.gpu], self._all)
            for entry, foot in feet
            for devices in self._groups(foot, devices_of(foot))
        )

    def _all(self, foot: Footprint) -> list[str]:
        """GPUs of a kind: all, or those in use and those of two hosts more. A replica on one GPU needs only the first unused."""
        gpu = self._fleet.by_name[foot.gpu]
        last = max((split_device(device)[1] for device in self._used[gpu.name]), default=-1) // gpu.per_host + 3
        devices = [f"{gpu.name}:{number}" for number in range(last * gpu.per_host if gpu.count is None else gpu.count)]
        return devices if foot.gpus > 1 else [device for device in devices if device not in self._held][:1]

    def _groups(self, foot: Footprint, devices: Sequence[str]) -> Iterable[tuple[str, ...]]:
        """Groups of GPUs of one host that may have room."""
        most = self._fleet.by_name[foot.gpu].memory_bytes - foot.bytes
        devices = [device for device in devices if self._memory[device] <= most]
        if foot.gpus == 1:
            yield from ((device,) for device in devices)
            return
        hosts: dict[int, list[str]] = {}
        for device in devices:
            if not any(self._fleet.entries[entry][1].gpus > 1 for entry in self._held.get(device, ())):
                hosts.setdefault(split_device(device)[1] // self._fleet.by_name[foot.gpu].per_host, []).append(device)
        for members in hosts.values():
            yield from (tuple(members[first : first + foot.gpus]) for first in range(len(members) - foot.gpus + 1))

    def _put(self, entry: int, devices: Sequence[str]) -> bool:
        """Place a replica if its model needs it, and its GPUs and the limits have room."""
        fleet, (number, foot) = self._fleet, self._fleet.entries[entry]
        gpu, new = fleet.by_name[foot.gpu], [device for device in devices if device not in self._held]
        if self._left[number] <= EPSILON or not self._within_limits(gpu, len(new)):
            return False
        held = [Counter(self._held.get(device, {})) + Counter([entry]) for device in devices]
        if not all(fleet.fits(gpu, content) for content in held):
            return False
        self._held.update(zip(devices, held, strict=True))
        self._memory.update(dict.fromkeys(devices, foot.bytes))
        self._used[gpu.name] = sorted({*self._used[gpu.name], *new}, key=split_device) if new else self._used[gpu.name]
        self._left[number] -= foot.rate
        self._made.append(Replica(fleet.models[number].name, tuple(devices), foot))
        return True

    def _within_limits(self, gpu: Gpu, new: int) -> bool:
        """Whether the limits of the fleet allow so many more GPUs of a kind."""
        used = {name: len(devices) + (new if name == gpu.name else 0) for name, devices in self._used.items()}
        for name, limit in (("usd_hour", self._fleet.usd_hour), ("watts", self._fleet.watts)):
            total = sum(count * getattr(self._fleet.by_name[kind], name) for kind, count in used.items())
            if limit is not None and total > limit + EPSILON:
                return False
        return True


def _price(fleet: Fleet, foot: Footprint) -> tuple[float, float]:
    """Dollars per hour, and GPUs, for a unit of load."""
    size = max(volume(fleet, foot, mix) for mix in MIXES) / foot.rate
    return fleet.by_name[foot.gpu].usd_hour * size, size


def volume(fleet: Fleet, foot: Footprint, mix: float) -> float:
    """GPUs that a replica takes, counted by its memory and its time. A GPU has volume 1, whatever the mix."""
    return foot.gpus * (mix * foot.bytes / fleet.by_name[foot.gpu].memory_bytes + (1 - mix) * foot.share)


def volume_bound(fleet: Fleet) -> float:
    """A bound of the objective: replicas may be cut into pieces, and only their volume counts."""
    if fleet.goal == "cheapest":
        return max(_least_cost(fleet, mix) for mix in MIXES)
    bounds = [sum(model.weight * model.load for model in fleet.models)]
    if all(gpu.count is not None for gpu in fleet.gpus):
        gpus = float(sum(gpu.count or 0 for gpu in fleet.gpus))
        bounds += [_most_load(fleet, mix, lambda gpu: 1.0, gpus) for mix in MIXES]
    for name, limit in (("usd_hour", fleet.usd_hour), ("watts", fleet.watts)):
        if limit is not None:
            bounds += [_most_load(fleet, mix, attrgetter(name), limit) for mix in MIXES]
    return min(bounds)


def _least_cost(fleet: Fleet, mix: float) -> float:
    return sum(
        model.load
        * min(
            (fleet.by_name[foot.gpu].usd_hour * volume(fleet, foot, mix) / foot.rate for foot in model.footprints),
            default=0.0,
        )
        for model in fleet.models
    )


def _most_load(fleet: Fleet, mix: float, price: Callable[[Gpu], float], capacity: float) -> float:
    """The dual of a knapsack: at a price of capacity, what it costs and what every model's load is worth beyond its price. The
    least over all prices is a bound; it is at the worth of a model for its capacity."""
    needs = [
        min(
            (price(fleet.by_name[foot.gpu]) * volume(fleet, foot, mix) / foot.rate for foot in model.footprints),
            default=math.inf,
        )
        for model in fleet.models
    ]
    pairs = [(model, need) for model, need in zip(fleet.models, needs, strict=True) if need < math.inf]
    prices = [0.0] + [model.weight / need for model, need in pairs if need > 0]
    return min(
        at * capacity + sum(model.load * max(0.0, model.weight - at * need) for model, need in pairs) for at in prices
    )
