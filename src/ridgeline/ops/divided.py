"""Layers of which each rank attends for requests of its own (--data-parallel-size).

A rank has the query tokens of its rows and their part of the residual stream. Before a linear that the ranks share, an all-gather
makes the tokens of all; behind it, an exchange makes the sums of its own (models.building). All ranks have equally many places,
a number that the host knows, so that nothing here waits for the device and CUDA graphs can capture it. A place without a token
is computed with, as padding is, and its results are undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ridgeline.ops.division import Division
from ridgeline.ops.gathered import Ranks
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import RunLayers


def split_requests(run: RunLayers, ranks: Ranks) -> RunLayers:
    """`run` over the tokens of this rank's rows. The result has the tokens of all ranks."""

    def split(stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
        division = divide(step, ranks.size)
        part, order = step_of_rank(step, ranks.rank, division), division.order[ranks.rank]
        slots: dict[int, torch.Tensor] = {}
        tokens = order.clamp(min=0)
        for view in views:  # those of a group share their slots
            key = view.slots.data_ptr()
            if key not in slots:
                slots[key] = view.slots.index_select(0, tokens).masked_fill_(order < 0, 0)
        parts = [replace(view, slots=slots[view.slots.data_ptr()]) for view in views]
        return division.joined(ranks.all_gather(run(stream.index_select(0, tokens), parts, part)))

    return split


def divide(step: StepInputs, ranks: int) -> Division:
    """How `ranks` ranks divide the tokens of a step."""
    assert step.ranks is not None
    count = len(step.position)
    share, row = step.share or count, step.rows.index_select(0, step.row_of)
    numbers = torch.arange(max(count, ranks), device=row.device)
    among = step.ranks.index_select(0, row) == numbers[:ranks, None]
    at = among.cumsum(1) - 1 + share * numbers[:ranks, None]
    place, unheld = (at * among).sum(0), ranks * share
    order = place.new_full((unheld + 1,), -1)
    order.index_copy_(0, place.masked_fill(~among.any(0), unheld), numbers[:count])
    return Division(order[:-1].view(ranks, share), place)


def step_of_rank(step: StepInputs, rank: int, division: Division) -> StepInputs:
    """The step of the tokens at this rank's places. A place without a token is padding, which belongs to the scratch row."""
    assert step.ranks is not None
    order = division.order[rank]
    tokens, empty = order.clamp(min=0), order < 0
    row = step.row_of.index_select(0, tokens)
    position = step.position.index_select(0, tokens).masked_fill_(empty, 0)
    if step.decode:
        starts = torch.arange(len(order) + 1, dtype=torch.int32, device=order.device)
        rows, length = (x.index_select(0, row).masked_fill_(empty, at) for x, at in ((step.rows, 0), (step.length, 1)))
        return replace(
            step, rows=rows, q_start=starts, length=length, position=position, row_of=starts[:-1], division=division
        )
    others = step.ranks.index_select(0, step.rows) != rank
    starts = step.q_start.diff().masked_fill_(others, 0).cumsum(0, dtype=torch.int32)
    scratch, begin = step.rows.new_zeros(1), starts.new_zeros(1)
    ancestors = None if step.ancestors is None else step.ancestors.index_select(0, tokens).masked_fill_(empty, -1)
    return replace(
        step,
        rows=torch.cat((step.rows, scratch)),
        q_start=torch.cat((begin, starts, starts[-1:])),
        length=torch.cat((step.length, scratch + 1)),
        position=position,
        row_of=row.masked_fill_(empty, len(step.rows)),
        ancestors=ancestors,
        division=division,
    )
