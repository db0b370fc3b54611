"""From counts of GPUs by pattern to replicas on numbered GPUs.

GPUs of a class are alike, so each gets any pattern of its class. Replicas over several GPUs need GPUs of one host: those that run now
stay where they are, others take the host with the least room that suffices, largest groups first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ridgeline.planner.packing import Chosen, GpuClass, Pattern
from ridgeline.planner.placement import Fleet, Gpu, Replica


def assigned(fleet: Fleet, chosen: Chosen) -> list[Replica]:
    """The replicas of a packing on numbered GPUs."""
    replicas = list[Replica]()
    for gpu in fleet.gpus:
        part = [(entry, pattern, count) for entry, pattern, count in chosen if entry.gpu == gpu]
        kind = _Kind(fleet, gpu, part)
        if not kind.groups_placed(keep=True):  # hosts are too fragmented by what stays: place all groups anew
            everywhere = GpuClass(gpu, {}, tuple(sorted(kind.numbers)), gpu.count)
            kind = _Kind(fleet, gpu, [(everywhere, pattern, count) for _, pattern, count in part])
            kind.groups_placed(keep=False)
        replicas += kind.replicas()
    return replicas


class _Kind:
    """GPUs of one kind while patterns are assigned to them."""

    def __init__(self, fleet: Fleet, gpu: Gpu, part: Chosen) -> None:
        self._fleet, self._gpu = fleet, gpu
        self._left: list[Counter[Pattern]] = []
        self._class_of: dict[int, int] = {}
        self._patterns: dict[int, Pattern] = {}
        self._groups: list[tuple[int, tuple[int, ...]]] = []
        merged: dict[int, tuple[GpuClass, Counter[Pattern]]] = {}
        for entry, pattern, count in part:
            merged.setdefault(id(entry), (entry, Counter()))[1][pattern] += count
        taken = {number for entry, _ in merged.values() for number in entry.devices}
        for number, (entry, left) in enumerate(merged.values()):
            self._left.append(left)
            devices = entry.devices or self._rented(left.total(), taken)
            self._class_of.update(dict.fromkeys(devices, number))
        self.numbers = set(self._class_of)
        self._free = sorted(self.numbers)

    def _rented(self, count: int, taken: set[int]) -> tuple[int, ...]:
        """Numbers of new GPUs: enough hosts that groups find room."""
        hosts = 2 * count + 1
        return tuple(number for number in range(hosts * self._gpu.per_host + len(taken)) if number not in taken)

    def groups_placed(self, keep: bool) -> bool:
        """Assign the patterns with ranks of shared replicas. Returns whether all groups found a host."""
        ranks = Counter[int]()
        for left in self._left:
            for pattern, count in left.items():
                for entry, _ in self._shared(pattern):
                    ranks[entry] += count
        for entry in sorted(ranks, key=lambda item: -self._fleet.entries[item][1].gpus):
            model, foot = self._fleet.entries[entry]
            groups = ranks[entry] // foot.gpus
            if keep:
                name = self._fleet.models[model].name
                groups -= self._stay(entry, (devices for owner, devices in self._running(foot.gpus) if owner == name), groups)
            for _ in range(groups):
                devices = self._host_with_room(entry, foot.gpus)
                if not devices:
                    return False
                self._take(entry, devices)
        return True

    def _shared(self, pattern: Pattern) -> list[tuple[int, int]]:
        return [(entry, copies) for entry, copies in pattern if self._fleet.entries[entry][1].gpus > 1]

    def _running(self, gpus: int) -> Iterable[tuple[str, tuple[int, ...]]]:
        """(Model, numbers of GPUs) of the replicas on so many GPUs of this kind that run now."""
        prefix = f"{self._gpu.name}:"
        for replica in self._fleet.kept:
            if len(replica.devices) == gpus and all(device.startswith(prefix) for device in replica.devices):
                yield replica.model, tuple(int(device.removeprefix(prefix)) for device in replica.devices)

    def _stay(self, entry: int, running: Iterable[tuple[int, ...]], most: int) -> int:
        """Keep groups where they run. Returns how many stay."""
        stayed = 0
        for devices in running:
            if stayed < most and set(devices) <= set(self._free) and self._possible(entry, devices):
                self._take(entry, devices)
                stayed += 1
        return stayed

    def _possible(self, entry: int, devices: Sequence[int]) -> bool:
        """Whether the classes of the GPUs have enough patterns with the entry."""
        wanted = Counter(self._class_of[device] for device in devices)
        return all(self._with(number, entry).total() >= count for number, count in wanted.items())

    def _with(self, number: int, entry: int) -> Counter[Pattern]:
        """The patterns of a class with an entry that are left."""
        left = self._left[number]
        return Counter(
            {pattern: count for pattern, count in left.items() if count and any(item == entry for item, _ in pattern)}
        )

    def _host_with_room(self, entry: int, gpus: int) -> tuple[int, ...]:
        """GPUs of the host with the least free GPUs that suffices; empty if none does."""
        room = {number: self._with(number, entry).total() for number in range(len(self._left))}
        hosts: dict[int, list[int]] = {}
        for device in self._free:
            hosts.setdefault(device // self._gpu.per_host, []).append(device)
        for _, free in sorted(hosts.items(), key=lambda item: (len(item[1]), item[0])):
            used, devices = Counter[int](), list[int]()
            for device in free:
                number = self._class_of[device]
                if used[number] < room[number] and len(devices) < gpus:
                    used[number] += 1
                    devices.append(device)
            if len(devices) == gpus:
                return tuple(devices)
        return ()

    def _take(self, entry: int, devices: Sequence[int]) -> None:
        for device in devices:
            number = self._class_of[device]
            pattern = min(self._with(number, entry))
            self._put(device, pattern)
        self._groups.append((entry, tuple(devices)))

    def _put(self, device: int, pattern: Pattern) -> None:
        left = self._left[self._class_of[device]]
        left[pattern] -= 1
        self._patterns[device] = pattern
        self._free.remove(device)

    def replicas(self) -> list[Replica]:
        """All replicas. Ranks beyond whole groups are dropped."""
        for device in list(self._free):
            left = self._left[self._class_of[device]]
            pattern = min((item for item, count in left.items() if count > 0), default=None)
            if pattern is not None:
                self._put(device, pattern)
        made = [self._replica(entry, devices) for entry, devices in self._groups]
        for device, pattern in self._patterns.items():
            for entry, copies in pattern:
                if self._fleet.entries[entry][1].gpus == 1:
                    made += [self._replica(entry, (device,))] * copies
        return made

    def _replica(self, entry: int, devices: Sequence[int]) -> Replica:
        model, foot = self._fleet.entries[entry]
        names = tuple(f"{self._gpu.name}:{device}" for device in sorted(devices))
        return Replica(self._fleet.models[model].name, names, foot)
