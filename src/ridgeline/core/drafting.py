"""FLOPs and bytes of drafters that run on the device, for MFU and MBU of all executed work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.core.cost import WorkMeter
from ridgeline.core.plan import StepPlan
from ridgeline.core.spec import LayerSpec, ModelSpec


class DraftWork:
    """The interface, with a default for drafters without matrix products."""

    def of(self, plan: StepPlan, ends: Sequence[int]) -> tuple[int, int]:
        """(FLOPs, bytes moved) of drafting in a step. ends: tokens of each row of the plan after it."""
        return 0, 0


NO_DRAFT_WORK = DraftWork()


class ModelDrafts(DraftWork):
    """A draft model. It reads the tokens of a step with a prompt chunk and those that rows gained while drafting was off. To draft,
    it reads the last `tail` tokens of a row, then one token for each further node."""

    def __init__(self, spec: ModelSpec, tail: int) -> None:
        self._meter, self._tail = WorkMeter(spec), tail

    def of(self, plan: StepPlan, ends: Sequence[int]) -> tuple[int, int]:
        work, tail, passes = self._meter.work, self._tail, []
        if sum(plan.n_query) - sum(plan.n_draft) > len(plan.n_query):
            passes.append(work(ends, plan.n_query, 0))
        if plan.ahead:
            rows = drawing(plan, ends)
            pairs = zip(rows, plan.unread, strict=True) if plan.unread else ()
            behind = [(end, unread - tail) for end, unread in pairs if unread > tail]
            passes.append(work([end for end, _ in behind], [count for _, count in behind], 0))
            passes.append(work(rows, [tail] * len(rows), len(rows)))
            passes += [work(rows, [1] * len(rows), len(rows))] * (plan.ahead - 1)
        return sum(step.flops for step in passes), sum(step.bytes for step in passes)


@dataclass(frozen=True, slots=True)
class NetworkDrafts(DraftWork):
    """A network without a cache that drafts a tree: Medusa heads, a recurrent draft.

    runs: runs of the network for each row, by number of nodes (from 0). levels: how often its weights are read, likewise. elements:
    of the matrices that a run multiplies with. stored_bytes: of the weights that a level reads. layer: layer of the target whose
    keys and values each run attends to, with their bytes per token; None: no attention.
    """

    runs: Sequence[int]
    levels: Sequence[int]
    elements: int
    stored_bytes: int
    layer: LayerSpec | None = None
    slot_bytes: int = 0

    def of(self, plan: StepPlan, ends: Sequence[int]) -> tuple[int, int]:
        if not plan.ahead:
            return 0, 0
        runs, rows, layer = self.runs[plan.ahead], drawing(plan, ends), self.layer
        flops, slots = layer.attention([(end - 1, 1) for end in rows]) if layer else (0, 0)
        read = self.levels[plan.ahead] * self.stored_bytes + runs * slots * self.slot_bytes
        return runs * (2 * len(rows) * self.elements + flops), read


@dataclass(frozen=True, slots=True)
class FollowingDrafts(DraftWork):
    """A layer with a cache of its own that reads every query token of the target, and drafts chains.

    node, reads: elements of the matrices that a node and a read token are multiplied by. width: bytes of an element. layer: the
    layer, with the bytes per token of its keys and values.
    """

    node: int
    reads: int
    width: int
    layer: LayerSpec
    slot_bytes: int

    def of(self, plan: StepPlan, ends: Sequence[int]) -> tuple[int, int]:
        rows = drawing(plan, ends)
        flops, slots = self.layer.attention([(end - 1, 1) for end in rows]) if plan.ahead else (0, 0)
        products = 2 * self.reads * sum(plan.n_query) + 2 * self.node * len(rows) * plan.ahead
        moved = (self.reads + self.node * plan.ahead) * self.width + plan.ahead * slots * self.slot_bytes
        return products + plan.ahead * flops, moved


def drawing(plan: StepPlan, ends: Sequence[int]) -> list[int]:
    """The ends of rows that draw, after which drafts follow."""
    return [end for end, samples in zip(ends, plan.samples, strict=True) if samples]


def counts_by_nodes(keys: Sequence[int]) -> tuple[int, ...]:
    """Number of distinct keys among the first n nodes of a tree, for n from 0. keys: of each node, such as its parent."""
    return tuple(len(set(keys[:count])) for count in range(len(keys) + 1))
