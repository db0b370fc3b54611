"""From counts of GPUs by pattern to replicas on numbered GPUs.

GPUs of a class are alike, so each gets any pattern of its class. Replicas over several GPUs need GPUs of one host: those that run
now stay where they are. Others take the host with the least room that suffices, the largest groups first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ridgeline.planner.packing import Chosen, GpuClass, Packing, Pattern
from ridgeline.planner.placement import Fleet, Gpu, Replica, split_device


def assigned(fleet: Fleet, packing: Packing) -> list[Replica]:
    """The replicas of a packing on numbered GPUs."""
    replicas = list[Replica]()
    for gpu in fleet.gpus:
        part = [(entry, pattern, count) for entry, pattern, count in packing.chosen if entry.gpu == gpu]
        kind = _Kind(fleet, gpu, part)
        if not kind.groups_placed(
            packing.groups, keep=True
        ):  # hosts are too fragmented by what stays: place all groups anew
            common = GpuClass(gpu, {}, ())
            kind = _Kind(fleet, gpu, [(common, pattern, count) for _, pattern, count in part])
            kind.groups_placed(packing.groups, keep=False)
        replicas += kind.replicas()
    return replicas


class _Kind:
    """GPUs of one kind while patterns are assigned to them. A GPU takes a pattern of its class, or of the common class."""

    def __init__(self, fleet: Fleet, gpu: Gpu, part: Chosen) -> None:
        self._fleet, self._gpu = fleet, gpu
        self._common = Counter[Pattern]()
        self._of_class: dict[int, Counter[Pattern]] = {}
        self._class_of: dict[int, int] = {}
        for entry, pattern, count in part:
            if entry.held:
                self._of_class.setdefault(id(entry), Counter())[pattern] += count
                self._class_of.update(dict.fromkeys(entry.devices, id(entry)))
            else:
                self._common[pattern] += count
        total = sum(count for _, _, count in part)
        last = max(self._class_of, default=-1) // gpu.per_host + 1
        # Of GPUs to rent, enough hosts that groups find room.
        self._free = list(range((last + 2 * total) * gpu.per_host if gpu.count is None else gpu.count))
        self._patterns: dict[int, Pattern] = {}
        self._groups: list[tuple[int, tuple[int, ...]]] = []

    def groups_placed(self, replicas: Mapping[int, int], keep: bool) -> bool:
        """Place replicas that GPUs share, by number of an entry. Returns whether all found a host."""
        shared = [entry for entry in replicas if self._fleet.entries[entry][1].gpu == self._gpu.name]
        for entry in sorted(shared, key=lambda item: -self._fleet.entries[item][1].gpus):
            stayed = self._stay(entry, replicas[entry]) if keep else 0
            for _ in range(replicas[entry] - stayed):
                devices = self._host_with_room(entry, self._fleet.entries[entry][1].gpus)
                if not devices:
                    return False
                self._take(entry, devices)
        return True

    def _stay(self, entry: int, most: int) -> int:
        """Keep groups of an entry's model where they run. Returns how many stay."""
        number, foot = self._fleet.entries[entry]
        name, prefix, stayed = self._fleet.models[number].name, f"{self._gpu.name}:", 0
        for replica in self._fleet.kept:
            if replica.model != name or len(replica.devices) != foot.gpus or not replica.devices[0].startswith(prefix):
                continue
            devices = [split_device(device)[1] for device in replica.devices]
            if (
                stayed < most
                and set(devices) <= set(self._free)
                and len(self._possible(entry, devices)) == len(devices)
            ):
                self._take(entry, devices)
                stayed += 1
        return stayed

    def _left(self, device: int) -> Counter[Pattern]:
        """The patterns of a GPU's class that are left; none for a GPU that starts in the common class."""
        return self._of_class.get(self._class_of.get(device, 0), Counter())

    def _possible(self, entry: int, devices: Iterable[int]) -> list[int]:
        """Those of the GPUs that can all have patterns with the entry at once."""
        with_entry = {number: _count(left, entry) for number, left in self._of_class.items()}
        common, chosen = _count(self._common, entry), list[int]()
        # GPUs of a class that its patterns leave over can join the common class.
        spare = Counter(self._class_of.get(device, 0) for device in self._free)
        spare.subtract({number: left.total() for number, left in self._of_class.items()})
        for device in devices:
            number = self._class_of.get(device, 0)
            if with_entry.get(number, 0):
                with_entry[number] -= 1
            elif common and spare[number]:
                common, spare[number] = common - 1, spare[number] - 1
            else:
                continue
            chosen.append(device)
        return chosen

    def _host_with_room(self, entry: int, gpus: int) -> list[int]:
        """GPUs of the host with the least free GPUs that suffices; empty if none does."""
        hosts: dict[int, list[int]] = {}
        for device in self._free:
            hosts.setdefault(device // self._gpu.per_host, []).append(device)
        for _, free in sorted(hosts.items(), key=lambda item: (len(item[1]), item[0])):
            devices = self._possible(entry, free) if len(free) >= gpus else []
            if len(devices) >= gpus:
                return devices[:gpus]
        return []

    def _take(self, entry: int, devices: Sequence[int]) -> None:
        for device in devices:
            of_class = self._left(device)
            left = of_class if _count(of_class, entry) else self._common
            self._put(device, left, min(pattern for pattern in left if _has(pattern, entry)))
        self._groups.append((entry, tuple(devices)))

    def _put(self, device: int, left: Counter[Pattern], pattern: Pattern) -> None:
        left[pattern] -= 1
        if not left[pattern]:
            del left[pattern]
        self._patterns[device] = pattern
        self._free.remove(device)

    def replicas(self) -> list[Replica]:
        """All replicas. Ranks beyond whole groups are dropped."""
        for from_class in (True, False):
            for device in list(self._free):
                left = self._left(device) if from_class else self._common
                if left:
                    self._put(device, left, min(left))
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


def _has(pattern: Pattern, entry: int) -> bool:
    return any(item == entry for item, _ in pattern)


def _count(left: Counter[Pattern], entry: int) -> int:
    """Patterns with an entry."""
    return sum(count for pattern, count in left.items() if _has(pattern, entry))
