"""Attention to keys that several ranks hold together (context parallelism), around the attention of any device.

Each page is divided into runs of equal length, one for each rank, so a request's slots lie on the ranks in turn: rank r holds slots
r L .. (r + 1) L - 1 of every N L, if a page has L slots on each of N ranks. A page has the same number on all ranks. Each rank
attends to its own keys, and the results are merged by their log-sum-exp (ops.merge; Yang et al. 2024, arXiv:2411.01783, section
3.5: ranks pass queries and results instead of keys). Keys of a query are divided equally whatever its position, so no reordering of
a prompt is needed to balance the causal triangle.

Keys of prompts travel if the prompts are long enough, see ops.gathered. What follows is for decode steps and all other steps.

A query token is a row of its own with as many slots as this rank holds of those that it sees: in a chunk, later tokens see more.
Nodes of a draft tree see no run of slots. They attend to the slots before the draft in this way, and to nodes in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ridgeline.ops import stored
from ridgeline.ops.capture import Uncaptured
from ridgeline.ops.gathered import Division, Gathering, Ranks
from ridgeline.ops.merge import merge_attention
from ridgeline.ops.reference import TREE_BITS, row_attention
from ridgeline.ops.rows import RowState, Runs, moved_slots
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import AttentionOps, Heads, Ops, Programs, QkvShape, RunLayers

LEAST_SHARE = 8
"""Fewest tokens of a rank that are multiplied apart from others'. Fewer take as long as the weights take to be read."""
MOST_ROWS = 512
"""Most rows of an attention call. More would compile the kernel that plans a step's work for many rows, which takes minutes."""

Part = tuple[torch.Tensor, torch.Tensor]
"""Result of attention over a part of the keys: out [T, Hq, d] and lse float32 [T, Hq]."""


def split_tokens(
    run: RunLayers, ranks: Ranks, select: Callable[[StepInputs, torch.Tensor], StepInputs] | None = None
) -> RunLayers:
    """`run` over this rank's part of the residual stream, if it has many tokens.

    select: the step of these tokens, consecutive ones. None: the ranks hold keys and values together; their tokens are early and
    late ones of the step (ops.gathered.Division), and linears run for them only (StepInputs.select).
    """
    if ranks.size == 1:
        return run

    def split(stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
        division = Division(len(stream), ranks.size, select is None)
        if -(-len(stream) // ranks.size) < LEAST_SHARE:
            return run(stream, views, step)
        tokens = division.tokens(ranks.rank, stream.device)
        chosen = step.select(tokens) if select is None else select(step, tokens)
        return division.joined(ranks.all_gather(run(stream.index_select(0, tokens), views, chosen)))

    return split


def striped(ops: Ops, ranks: Ranks) -> Ops:
    """Operations of a rank that holds its part of each page. Without programs of whole layers and without capture, because a
    collective is part of attention."""
    stripes = Stripes(ranks.rank, ranks.size)
    attention, sampler = _attention(ops.attention, stripes, ranks), replace(ops.sampler, keep=_keep(stripes, ranks))
    return replace(ops, attention=attention, sampler=sampler, programs=Programs(), capture=Uncaptured)


@dataclass(frozen=True, slots=True)
class Stripes:
    """Which slots this rank holds."""

    rank: int
    ranks: int

    def count(self, slots: torch.Tensor, size: int) -> torch.Tensor:
        """How many of a row's first `slots` this rank holds. size: slots of a page on this rank."""
        whole = size * self.ranks
        return slots // whole * size + (slots % whole - self.rank * size).clamp(0, size)

    def held(self, slots: torch.Tensor, size: int) -> torch.Tensor:
        """Slots of the cache (KvView.slots) on this rank; those that other ranks hold are in the scratch page."""
        whole = size * self.ranks
        place = slots % whole - self.rank * size
        return torch.where((place >= 0) & (place < size), slots // whole * size + place, slots % size)

    def view(self, view: KvView, step: StepInputs) -> KvView:
        """The view with slots on this rank."""
        key = ("striped slots", view.slots.data_ptr())
        if (slots := step.derived.get(key)) is None:
            step.derived[key] = slots = self.held(view.slots, view.page_tokens)
        return replace(view, slots=slots)

    def rows(self, view: KvView, step: StepInputs) -> StepInputs:
        """Each query token as a row that sees what this rank holds of the slots that the token sees; without nodes of trees."""
        key = ("striped rows", view.window, view.page_tokens)
        if (rows := step.derived.get(key)) is not None:
            return rows  # type: ignore[no-any-return]
        size, row, count = view.page_tokens, step.row_of, len(step.row_of)
        place = torch.arange(count + 1, dtype=torch.int32, device=row.device)
        first = place[:count] if step.ancestors is None else step.q_start.index_select(0, row) - 1
        whole = step.length.index_select(0, row)
        seen = (whole - step.q_start.index_select(0, row + 1) + 1 + first).clamp(min=0)
        seen = torch.minimum(seen, whole)  # padding is behind its row
        length, behind = self.count(seen, size), torch.zeros_like(seen)
        if view.window is not None:
            behind = self.count((step.position - view.window + 1).clamp(min=0), size)
            length = torch.where(length > behind, length, 0)
        # A window begins as many slots before this position as before the token among the slots of all ranks.
        position = behind + (view.window or 1) - 1
        longest = -(-step.max_length // (size * self.ranks)) * size
        device_rows = step.rows.index_select(0, row)
        step.derived[key] = rows = StepInputs(device_rows, place, length, position, place[:count], 1, longest)
        return rows


def _attention(whole: AttentionOps, stripes: Stripes, ranks: Ranks) -> AttentionOps:
    gathering = Gathering(whole, ranks, stripes.held)

    def qkv_write(qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs) -> Heads:
        if gathering.serves(view, step):
            return gathering.qkv_write(qkv, shape, view, step)
        if step.selected is not None:
            qkv = Division(len(step.position), ranks.size, True).joined(ranks.all_gather(qkv))
        return whole.qkv_write(qkv, shape, stripes.view(view, step), step)

    def attend(
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        view: KvView,
        step: StepInputs,
        lse_needed: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if gathering.serves(view, step):
            return gathering.attend(q, view, step, lse_needed)
        parts = [_by_token(whole, q, view, stripes.rows(view, step))]
        if step.ancestors is not None:
            parts.append(_attend_nodes(q, stripes.view(view, step), step))
        sent = torch.stack([torch.cat((out.float(), lse.float().unsqueeze(-1)), -1) for out, lse in parts], 1)
        received = ranks.all_gather(sent) if step.selected is None else ranks.exchange(_shares(sent, ranks.size))
        merged, lse = _merged(received.transpose(0, 1).flatten(1, 2))
        return merged.to(q.dtype), lse

    return replace(whole, qkv_write=qkv_write, attend=attend)


def _by_token(whole: AttentionOps, q: torch.Tensor, view: KvView, rows: StepInputs) -> Part:
    """Attention of query tokens that are rows of their own, at most MOST_ROWS at a time."""
    parts = []
    for first in range(0, len(q), MOST_ROWS):
        part = rows
        if len(q) > MOST_ROWS:
            tokens = slice(first, first + MOST_ROWS)
            count = len(q[tokens])
            row, length, position = rows.rows[tokens], rows.length[tokens], rows.position[tokens]
            part = StepInputs(row, rows.q_start[: count + 1], length, position, rows.row_of[:count], 1, rows.max_length)
        out, lse = whole.attend(q[first : first + MOST_ROWS], None, None, view, part, True)
        assert lse is not None
        parts.append((out, lse))
    outs, lses = zip(*parts, strict=True)
    return parts[0] if len(parts) == 1 else (torch.cat(outs), torch.cat(lses))


def _shares(sent: torch.Tensor, ranks: int) -> torch.Tensor:
    """sent [T, ...] as [ranks, tokens of each, ...], as split_tokens divides tokens."""
    division = Division(len(sent), ranks, True)
    order = division.order(sent.device).clamp(max=division.count - 1)
    return sent.index_select(0, order.flatten()).unflatten(0, order.shape)


def _merged(parts: torch.Tensor) -> Part:
    """Merge parts [T, P, Hq, d + 1], out beside its lse."""
    return merge_attention([(part[..., :-1], part[..., -1]) for part in parts.unbind(1)])


def _attend_nodes(q: torch.Tensor, view: KvView, step: StepInputs) -> Part:
    """Attention of query tokens to the ancestors among their own row's query tokens that this rank holds (reference.row_mask)."""
    size, tokens = view.page_tokens, torch.arange(len(q), device=q.device)
    among = tokens - step.q_start.index_select(0, step.row_of)
    assert step.ancestors is not None
    bits = (step.ancestors.unsqueeze(1) >> among.clamp(max=TREE_BITS - 1)) & 1
    later, same_row = tokens.unsqueeze(1) < tokens, step.row_of.unsqueeze(1) == step.row_of
    seen = ((bits == 1) | (among >= TREE_BITS) | (tokens.unsqueeze(1) == tokens)) & same_row & ~later
    if view.window is not None:
        seen &= step.position.unsqueeze(1) - step.position < view.window
    seen &= view.slots >= size  # page 0 is scratch
    vectors = stored.pages_of(view, view.slots // size)[tokens, :, :, view.slots % size]
    keys, values = vectors.permute(1, 2, 0, 3)
    return row_attention(q, keys, values, seen, view)


def _keep(
    stripes: Stripes, ranks: Ranks
) -> Callable[[RowState, torch.Tensor, torch.Tensor, torch.Tensor, Runs, int], None]:
    def keep(
        state: RowState, rows: torch.Tensor, packed: torch.Tensor, path: torch.Tensor, runs: Runs, depth: int
    ) -> None:
        """See ops.rows.keep. A slot may move to another rank."""
        size = state.page_tokens // stripes.ranks
        for moved, group in zip(moved_slots(state, rows, packed, path, depth), runs, strict=True):
            if not moved.any():
                continue
            holder = moved[0] % state.page_tokens // size
            source, target = stripes.held(moved, size)
            for run in group:
                stored_run = run.view(torch.uint8)  # PyTorch does not index tensors of e4m3 on every device
                vectors = ranks.all_gather(stored_run[source // size, :, source % size])
                stored_run[target // size, :, target % size] = vectors[holder, torch.arange(len(holder))]

    return keep
