"""Places replicas of several models on GPUs of several kinds: the words of the problem and of its answer.

Two questions. "cheapest": the load of every model is given; which GPUs serve it for the fewest dollars per hour? "most": the GPUs
are given; how much load do they serve, weighted by model? `planner.packing` answers exactly or with a bound (HiGHS),
`planner.first_fit` without a solver.

The rules of a GPU: the bytes of its replicas fit into its memory, their shares of its time sum to at most 1, and it holds at most
one rank of a replica that several GPUs share, because two such replicas would wait for each other's collectives. The ranks of a
replica lie in one host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ridgeline.core.errors import ConfigError

GOALS = ("cheapest", "most")
EPSILON = 1e-6
"""Tolerance of sums of shares and of load."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPUs of one kind. memory_bytes: that replicas may use on each. count: None if any number can be rented. usd_hour, watts: of a
    GPU in use. per_host: GPUs of a host, which a replica can share."""

    name: str
    memory_bytes: int
    count: int | None = None
    usd_hour: float = 0.0
    watts: float = 0.0
    per_host: int = 8


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a replica takes on one kind of GPU: bytes of each of `gpus` GPUs (a power of two), and the share of their time. rate:
    load that it serves, in the unit of ModelLoad.load."""

    gpu: str
    bytes: int
    gpus: int = 1
    share: float = 0.0
    rate: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """A model to place. footprints: the ways to run a replica. load: to serve in total, as replicas or requests per second.

    weight: worth of a unit of load, for the goal "most". spread: no two replicas on one GPU. apart: models that may not share a
    GPU with it.
    """

    name: str
    footprints: tuple[Footprint, ...]
    load: float
    weight: float = 1.0
    spread: bool = False
    apart: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Replica:
    """A placed replica. devices: names of GPUs, as in "h100:0"."""

    model: str
    devices: tuple[str, ...]
    footprint: Footprint | None = None
    """None in a previous placement, whose loads are not known."""


@dataclass(frozen=True)
class Fleet:
    """The problem. usd_hour, watts: limits of all GPUs in use; None: no limit. previous: what runs now. move_cost: what it
    costs, in the unit of the goal (dollars per hour, or weighted load), that a GPU loads the weights of a replica."""

    gpus: tuple[Gpu, ...]
    models: tuple[ModelLoad, ...]
    goal: str = "cheapest"
    usd_hour: float | None = None
    watts: float | None = None
    previous: tuple[Replica, ...] = ()
    move_cost: float = 0.0

    @cached_property
    def by_name(self) -> Mapping[str, Gpu]:
        return {gpu.name: gpu for gpu in self.gpus}

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Numbers of the models by name."""
        return {model.name: number for number, model in enumerate(self.models)}

    @property
    def cost_of_move(self) -> float:
        """0 where nothing runs yet."""
        return self.move_cost if self.previous else 0.0

    @cached_property
    def entries(self) -> tuple[tuple[int, Footprint], ...]:
        """(Number of a model, footprint) of every way to run a replica."""
        return tuple((number, foot) for number, model in enumerate(self.models) for foot in model.footprints)

    @cached_property
    def kept(self) -> tuple[Replica, ...]:
        """Replicas of the previous placement whose model and GPUs still exist."""
        return tuple(
            replica
            for replica in self.previous
            if replica.model in self.numbers and all(self.exists(device) for device in replica.devices)
        )

    def exists(self, device: str) -> bool:
        kind, number = split_device(device)
        gpu = self.by_name.get(kind)
        return gpu is not None and (gpu.count is None or number < gpu.count)

    def fits(self, gpu: Gpu, held: Mapping[int, int]) -> bool:
        """Whether a GPU may hold copies of entries. held: copies by number of entry, of this kind of GPU."""
        memory, share, ranks, models = 0, 0.0, 0, Counter[int]()
        for entry, copies in held.items():
            number, foot = self.entries[entry]
            memory, share = memory + copies * foot.bytes, share + copies * foot.share
            ranks += copies if foot.gpus > 1 else 0
            models[number] += copies
        if memory > gpu.memory_bytes or share > 1 + EPSILON or ranks > 1:
            return False
        if any(copies > 1 and self.models[number].spread for number, copies in models.items()):
            return False
        names = {self.models[number].name for number in models}
        return not any(self.models[number].apart & names for number in models)


@dataclass(frozen=True)
class Placement:
    """The answer. objective: dollars per hour, or weighted load, with the cost of moves. bound: no placement has a better objective
    than this. method: how it was made."""

    fleet: Fleet
    replicas: tuple[Replica, ...]
    bound: float
    method: str

    @cached_property
    def devices(self) -> Mapping[str, list[Replica]]:
        """Replicas by GPU in use, in the order of the GPUs."""
        held: dict[str, list[Replica]] = {}
        for replica in self.replicas:
            for device in replica.devices:
                held.setdefault(device, []).append(replica)
        order = list(self.fleet.by_name)

        def place(device: str) -> tuple[int, int]:
            kind, number = split_device(device)
            return order.index(kind), number

        return {device: held[device] for device in sorted(held, key=place)}

    def usage(self, device: str) -> tuple[int, float]:
        """(Bytes, share of the time) of a GPU that its replicas take."""
        feet = [replica.footprint for replica in self.devices[device] if replica.footprint is not None]
        return sum(foot.bytes for foot in feet), sum(foot.share for foot in feet)

    @property
    def used(self) -> Counter[str]:
        """GPUs in use by kind."""
        return Counter(split_device(device)[0] for device in self.devices)

    @property
    def usd_hour(self) -> float:
        return sum(self.fleet.by_name[kind].usd_hour * count for kind, count in self.used.items())

    @property
    def watts(self) -> float:
        return sum(self.fleet.by_name[kind].watts * count for kind, count in self.used.items())

    @cached_property
    def served(self) -> Mapping[str, float]:
        """Load that each model's replicas can serve."""
        total = dict.fromkeys((model.name for model in self.fleet.models), 0.0)
        for replica in self.replicas:
            total[replica.model] += _rate(replica)
        return total

    @property
    def short(self) -> Mapping[str, float]:
        """Load that is not served, by model."""
        missing = {model.name: model.load - self.served[model.name] for model in self.fleet.models}
        return {name: load for name, load in missing.items() if load > EPSILON}

    @cached_property
    def moves(self) -> Sequence[tuple[str, tuple[str, ...]]]:
        """(Model, GPUs) of every replica that loads its weights: it did not run on exactly these GPUs."""
        return tuple((Counter(map(_place, self.replicas)) - Counter(map(_place, self.fleet.kept))).elements())

    @property
    def objective(self) -> float:
        moves = self.fleet.cost_of_move * sum(len(devices) for _, devices in self.moves)
        if self.fleet.goal == "cheapest":
            return self.usd_hour + moves
        return sum(model.weight * min(model.load, self.served[model.name]) for model in self.fleet.models) - moves

    @property
    def gap(self) -> float:
        """How much better than the answer the bound is, as a share of the answer."""
        return abs(self.objective - self.bound) / max(abs(self.objective), EPSILON)


def _place(replica: Replica) -> tuple[str, tuple[str, ...]]:
    return replica.model, tuple(sorted(replica.devices, key=split_device))


def _rate(replica: Replica) -> float:
    return replica.footprint.rate if replica.footprint is not None else 0.0


def trimmed(fleet: Fleet, replicas: Iterable[Replica]) -> tuple[Replica, ...]:
    """The replicas without those that no load needs: first those that would have to move, then those that are alone on a GPU."""
    kept = Counter(map(_place, fleet.kept))
    left = list(replicas)
    crowd = Counter(device for replica in left for device in replica.devices)
    spare = {model.name: -model.load for model in fleet.models}
    for replica in left:
        spare[replica.model] += _rate(replica)
    order = sorted(left, key=lambda item: (_place(item) in kept, crowd[item.devices[0]]))
    for replica in order:
        if _rate(replica) <= spare[replica.model] + EPSILON:
            spare[replica.model] -= _rate(replica)
            left.remove(replica)
    return tuple(left)


def split_device(device: str) -> tuple[str, int]:
    """("h100", 3) of "h100:3". Raises ConfigError for another form."""
    kind, colon, number = device.rpartition(":")
    if not colon or not number.isdecimal():
        raise ConfigError(f"{device!r} is not a GPU: write kind and number, as in h100:0.")
    return kind, int(number)
