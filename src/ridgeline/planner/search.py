"""Search for the best layouts of a task: arithmetic over all layouts first. Surrogates of replicas then try the best ones at many
rates, with other sizes of chunks and batches, and with prefill apart from decode. The scheduler simulates what is proposed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from ridgeline.core.errors import ConfigError
from ridgeline.planner.cluster import Cluster
from ridgeline.planner.layouts import Layout, layouts, replica
from ridgeline.planner.proposals import JOINT, Offer, Proposal, Task, Unit, apart, confirmed, highest, propose
from ridgeline.planner.ranking import Ranked, Refused, Variant, evaluate, has_experts
from ridgeline.planner.servers import replica_server
from ridgeline.planner.split import RATIOS

FINALISTS = 6
"""Layouts that are simulated."""
VARIED = 2
"""Finalists, the best ones, that are also simulated with other chunks and batches."""
CHUNKS = (512, 2048)
"""Query tokens of a step that are tried beside the default: smaller chunks shorten the waits of running answers."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The answer to a task: proposals, best first, and layouts that cannot be. considered: layouts of the arithmetic."""

    proposals: tuple[Proposal, ...]
    refused: tuple[Refused, ...]
    considered: int


@dataclass(frozen=True, slots=True)
class Scope:
    """What a search looks at. variants: number formats on the devices of an offer. sizes: which layouts of a replica. ratios: try
    prefill apart from decode. finalists: layouts to simulate. say: called with the work that begins."""

    variants: Callable[[Offer], Sequence[Variant]]
    sizes: Callable[[Layout], bool] = lambda layout: True
    ratios: bool = False
    finalists: int = FINALISTS
    say: Callable[[str], None] = lambda text: None


def search(task: Task, offers: Sequence[Offer], scope: Scope) -> SearchResult:
    """Raises ConfigError with a `param` if an option is wrong whatever the layout."""
    if scope.ratios:
        check_split(task, offers)
    entries, refused = coarse(task, offers, scope)
    units = [unit for offer, entry in finalists(task, entries, scope.finalists) if (unit := _unit(task, offer, entry))]
    estimates = [_estimated(task, unit, scope.say) for unit in units]
    best = sorted(estimates, key=rank_key)[:VARIED]
    estimates += [_estimated(task, unit, scope.say) for unit in _variations(task, [each.unit for each in best])]
    if scope.ratios:
        estimates += [_estimated(task, unit, scope.say) for unit in _apart(estimates)]
    proposals = sorted((_simulated(task, each, scope.say) for each in best_sizes(estimates)), key=rank_key)
    return SearchResult(tuple(proposals), tuple(refused), len(entries) + len(refused))


def best_sizes(simulated: Iterable[Proposal]) -> list[Proposal]:
    """Proposals, best first, each layout with the sizes of chunks and batches that serve it best."""
    best: dict[tuple[Any, ...], Proposal] = {}
    for proposal in sorted(simulated, key=rank_key):
        unit = proposal.unit
        key = unit.offer.cluster.device.name, unit.coarse.variant.name, unit.coarse.layout, unit.ratio
        best.setdefault(key, proposal)
    return list(best.values())


def rank_key(proposal: Proposal) -> tuple[Any, ...]:
    """Objectives met; then dollars of the devices that the rate needs, or without a rate per request; then more headroom. Without
    prices devices count instead of dollars."""
    cost = proposal.devices if math.isnan(proposal.usd_hour) else proposal.usd_hour
    if proposal.verdict:
        return True, -proposal.good, cost
    if proposal.task.demand.rate is None:
        return False, cost / proposal.rate, proposal.ttft.p99
    return False, cost, -proposal.headroom


# --- arithmetic ----------------------------------------------------------------------------------------------------------


def coarse(task: Task, offers: Iterable[Offer], scope: Scope) -> tuple[list[tuple[Offer, Ranked]], list[Refused]]:
    """All layouts of one replica on the devices of all offers, by the arithmetic of means, and those that cannot be."""
    made, refused = list[tuple[Offer, Ranked]](), list[Refused]()
    for offer in offers:
        for variant in scope.variants(offer):
            for size in replica_sizes(offer.cluster):
                if size > offer.cluster.per_host and any(
                    entry.variant == variant and not entry.verdict for _, entry in made
                ):
                    break  # a replica that spans hosts is for what no host can serve
                entries, reasons = _of_size(task, offer, variant, size, scope)
                made += [(offer, entry) for entry in entries]
                refused += reasons
    return made, refused


def _of_size(task: Task, offer: Offer, variant: Variant, size: int, scope: Scope) -> tuple[list[Ranked], list[Refused]]:
    """The layouts of one replica on `size` devices."""
    made, refused, demand = list[Ranked](), list[Refused](), replace(task.demand, rate=None)
    cluster = replace(offer.cluster, count=size)
    for layout in filter(scope.sizes, layouts(size, has_experts(variant.spec))):
        if layout.data == 1 and layout.groups == 1:  # one queue of requests is simulated
            try:
                made.append(evaluate(variant, layout, cluster, demand, task.engine))
            except ConfigError as error:
                if error.param:
                    raise
                refused.append(Refused(layout, variant, error.message))
    return made, refused


def replica_sizes(cluster: Cluster) -> list[int]:
    """Devices of one replica: as many as divide those of a host, and whole hosts by powers of 2."""
    count, host = cluster.count, cluster.per_host
    sizes = {size for size in range(1, host + 1) if host % size == 0} | {
        count,
        *(host * 2**power for power in range(1, 12)),
    }
    return sorted(size for size in sizes if size <= count)


def finalists(task: Task, entries: Sequence[tuple[Offer, Ranked]], most: int) -> list[tuple[Offer, Ranked]]:
    """The best entry of each kind of device and number format by what the rate costs, then the second of each, and so on."""
    ordered = sorted(entries, key=lambda item: _price(task, *item))
    alike: dict[tuple[str, str], list[tuple[Offer, Ranked]]] = {}
    for offer, entry in ordered:
        alike.setdefault((offer.cluster.device.name, entry.variant.name), []).append((offer, entry))
    rounds = zip_longest(*alike.values())
    return [item for each in rounds for item in each if item is not None][:most]


def _price(task: Task, offer: Offer, entry: Ranked) -> tuple[bool, float, float, int]:
    """Smaller is better: dollars, or devices, for the rate, and for each request per second of a replica."""
    each = (1.0 if math.isnan(offer.usd_hour) else offer.usd_hour) * entry.layout.replica
    rate = task.demand.rate
    whole = each * math.ceil(rate / entry.capacity) if rate is not None else 0.0
    return bool(entry.verdict), whole, each / entry.capacity, entry.layout.replica


# --- simulation ----------------------------------------------------------------------------------------------------------


def _unit(task: Task, offer: Offer, entry: Ranked) -> Unit | None:
    """The simulated replica of an entry; None if its chunks and batches do not fit."""
    cluster = replace(offer.cluster, count=entry.layout.replica)
    try:
        made = replica(entry.variant.spec, entry.layout, cluster, task.demand.length, task.engine)
    except ConfigError:
        return None
    server = replica_server(made, entry.variant.cost, task.engine, task.demand.input)
    longest = max(request.input + request.output for request in task.workload.requests)
    return Unit(offer, entry, task.engine, server) if longest <= server.limits.max_len else None


def _variations(task: Task, units: Sequence[Unit]) -> Iterator[Unit]:
    """Each unit with smaller chunks, and with batches as large as the arithmetic wants, unless options fix them."""
    for unit in units:
        limits, engine, wanted = unit.server.limits, task.engine, unit.coarse.batch
        chunks = [size for size in CHUNKS if size < limits.step_tokens] if not engine.max_num_batched_tokens else []
        rows = 1 << max(3, math.ceil(math.log2(wanted)))
        changes: list[dict[str, Any]] = [{"max_num_batched_tokens": size} for size in chunks]
        if not engine.max_num_seqs and rows != limits.rows:
            changes.append({"max_num_seqs": rows})
        for change in changes:
            changed = _unit(replace(task, engine=replace(engine, **change)), unit.offer, unit.coarse)
            if changed is not None:
                yield changed


def check_split(task: Task, offers: Sequence[Offer]) -> None:
    """Raises ConfigError, with the remedy, where engines cannot hand prompts over."""
    if not task.demand.slo:
        raise ConfigError(
            "--split compares goodput, which --slo defines: add it, as in ttft=500ms,tpot=50ms.", param="split"
        )
    if not any(offer.cluster.count > 1 and offer.cluster.fabric.reaches(2) for offer in offers):
        names = ", ".join(str(offer.cluster) for offer in offers)
        reason = "engines hand over from device to device over a known link"
        raise ConfigError(f"--split, and {names} have none: {reason}. Give 2 or more, and --link-gb-s.", param="split")


def _apart(simulated: Sequence[Proposal]) -> Iterator[Unit]:
    """The ratios of prefill to decode of the best unit of one device."""
    joint = (each.unit for each in sorted(simulated, key=rank_key))
    alone = [unit for unit in joint if unit.devices == 1 and unit.offer.cluster.fabric.reaches(2)]
    if not alone:
        raise ConfigError(
            "--split simulates engines of one device, and the model does not fit on one: give a smaller --quantization or larger "
            "devices.",
            param="split",
        )
    for ratio in RATIOS:
        if ratio != JOINT and ratio.devices <= alone[0].offer.cluster.count:
            yield apart(alone[0], ratio)


def _estimated(task: Task, unit: Unit, say: Callable[[str], None]) -> Proposal:
    """The proposal of a unit by surrogates."""
    say(f"searching the highest rate of {_name(unit)}")
    return propose(task, unit, highest(task, unit), fast=True)


def _simulated(task: Task, estimate: Proposal, say: Callable[[str], None]) -> Proposal:
    """The proposal by the scheduler, with the highest rate of the surrogates. Without a rate the scheduler confirms it."""
    unit, capacity = estimate.unit, estimate.capacity / estimate.copies
    say(f"simulating {_name(unit)}")
    if task.demand.rate is None:
        capacity = confirmed(task, unit, capacity)
    return propose(task, unit, capacity)


def _name(unit: Unit) -> str:
    return f"{unit.coarse.layout} of {unit.offer.cluster.device.name}, {unit.coarse.variant.name}"
