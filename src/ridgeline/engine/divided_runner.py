"""The runner of a rank that attends for requests of its own (--data-parallel-size).

All ranks have the rows of all requests and draw the same tokens, so a plan is the same for each. Only blocks differ: a plan numbers
those of all ranks (engine.divided_leases), and a rank's tables have the scratch page in place of the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ridgeline.core.plan import StepPlan
from ridgeline.core.spec import KvLayout
from ridgeline.engine.runner import Runner
from ridgeline.engine.shape import Sizes
from ridgeline.models.build import LoadedModel
from ridgeline.speculation.device import DeviceDrafter


def plan_of_rank(plan: StepPlan, rank: int, blocks: int) -> StepPlan:
    """The plan with the pages of a rank of `blocks` blocks, and with copies between these only."""
    if not (plan.pages or plan.copies):
        return plan
    pages = np.frombuffer(plan.pages, dtype=np.int32).reshape(-1, 4).copy()
    pages[:, 3] = _local(pages[:, 3], rank, blocks)
    copies = _local(np.frombuffer(plan.copies, dtype=np.int32), rank, blocks).reshape(-1, 2)
    kept = copies[copies.all(axis=1)]
    return replace(plan, pages=array("i", pages.tobytes()), copies=array("i", kept.tobytes()))


def _local(numbers: np.ndarray, rank: int, blocks: int) -> np.ndarray:
    """Numbers of blocks on a rank; 0, the scratch page, for those of other ranks."""
    local = numbers - rank * blocks
    return np.where((local > 0) & (local <= blocks), local, 0).astype(np.int32)


def share_of(ranks: np.ndarray, n_query: Sequence[int]) -> int:
    """Most query tokens of a rank. ranks: int32 [B], of each row of a step; n_query: its query tokens."""
    return int(np.bincount(ranks, n_query).max()) if len(ranks) else 0


class DividedRunner(Runner):
    """Runs plans of which this rank reads its own blocks."""

    def __init__(self, model: LoadedModel, layout: KvLayout, sizes: Sizes, drafter: DeviceDrafter) -> None:
        super().__init__(model, layout, sizes, drafter)
        self._ranks = np.zeros(sizes.rows + 1, dtype=np.int32)
        """The rank of each device row."""

    def launch(self, plan: StepPlan) -> None:
        # Rows out of range are clipped; the runner refuses them.
        self._ranks.put([join.row for join in plan.joins], [join.rank for join in plan.joins], mode="clip")
        share = share_of(self._ranks.take(plan.rows, mode="clip"), plan.n_query)
        super().launch(replace(plan_of_rank(plan, self._step.mesh.rank, self._sizes.blocks), share=share))
