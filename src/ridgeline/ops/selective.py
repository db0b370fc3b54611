"""Attention that reads only the pages that matter (Quest, Tang et al. 2024), around the attention of any device.

All pages stay in the cache. For each full page and KV head the cache holds the minimum and maximum of each element of the page's
keys, so that no key of the page scores above sum(max(q * minimum, q * maximum)), up to their rounding to bfloat16. A query reads
the pages with the largest of these bounds, the first page and the two newest ones. The query heads of a KV head read the same
pages.

Only steps with one query token per row select. A step that also runs a prompt reads everything.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ridgeline.ops import stored
from ridgeline.ops.capture import Uncaptured
from ridgeline.ops.step import KvView, Selection, StepInputs
from ridgeline.ops.table import AttentionOps, Heads, Ops, Programs, QkvShape

NEWEST = 2
"""Newest pages that are always read: the one that is being filled, and the one before."""

PART = 256
"""Pages of a row whose bounds are read together, so that their copies in float32 stay in a cache."""


def selecting(ops: Ops) -> Ops:
    """Operations whose attention selects pages in layers with KvView.selection. Without programs of whole layers and without
    capture, because the shapes of a step depend on the data. A GPU has kernels of its own, whose shapes do not."""
    if ops.attention.selecting is not None:
        return replace(ops, attention=ops.attention.selecting(ops.attention), programs=Programs())
    return replace(ops, attention=_attention(ops.attention), programs=Programs(), capture=Uncaptured)


def _attention(whole: AttentionOps) -> AttentionOps:
    def qkv_write(qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs) -> Heads:
        heads = whole.qkv_write(qkv, shape, view, step)
        if view.selection is not None and shape.n_kv_heads:
            write_bounds(view, view.selection)
        return heads

    def attend(
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        view: KvView,
        step: StepInputs,
        lse_needed: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        selection = view.selection
        if selection is None or not step.decode or step.max_length <= selection.budget:
            return whole.attend(q, k, v, view, step, lse_needed)
        tables, narrowed = choose_pages(q, view, selection, step)
        kv_heads = view.kv.shape[2]
        group, parts = q.shape[1] // kv_heads, []
        for head in range(kv_heads):
            part = slice(head, head + 1)
            scales = None if view.scales is None else view.scales[:, :, part]
            of_head = replace(view, kv=view.kv[:, :, part], table=tables[head], scales=scales, selection=None)
            queries = q[:, head * group : (head + 1) * group].contiguous()
            own_k, own_v = (None if tensor is None else tensor[:, part] for tensor in (k, v))
            parts.append(whole.attend(queries, own_k, own_v, of_head, narrowed, lse_needed))
        lses = [lse for _, lse in parts if lse is not None]
        return torch.cat([out for out, _ in parts], 1), torch.cat(lses, 1) if lses else None

    return replace(whole, qkv_write=qkv_write, attend=attend)


def write_bounds(view: KvView, selection: Selection) -> None:
    """Write the bounds of the pages that this step's keys complete."""
    size = view.page_tokens
    pages = view.slots[view.slots % size == size - 1] // size
    if len(pages):
        keys = stored.pages_of(view, pages)[:, 0]
        selection.bounds[pages] = torch.stack((keys.amin(2), keys.amax(2)), 1).to(selection.bounds.dtype)


def choose_pages(
    q: torch.Tensor, view: KvView, selection: Selection, step: StepInputs
) -> tuple[torch.Tensor, StepInputs]:
    """The pages that each row reads for each KV head, int32 [kv_heads, B, pages of the budget] in the order of slots, and the step
    with the slots that they hold. Rows within the budget read all their pages."""
    size, rows = view.page_tokens, len(step.rows)
    most = selection.budget // size
    pages = view.table[step.rows.long(), : -(-step.max_length // size)].long()
    held = ((step.length + size - 1) // size).unsqueeze(1)
    place = torch.arange(pages.shape[1], device=q.device)
    scores = torch.cat([_bounds(q, selection.bounds[part]) for part in pages.split(PART, 1)], 2)
    always = (place < 1) | (place >= held - NEWEST)
    scores = scores.masked_fill(always.unsqueeze(1), float("inf"))
    scores = scores.masked_fill((place >= held).unsqueeze(1), float("-inf"))
    chosen = scores.topk(most, dim=-1).indices.sort().values
    tables = pages.unsqueeze(1).expand_as(scores).gather(2, chosen).transpose(0, 1).int().contiguous()
    unread = (held[:, 0] - most).clamp(min=0) * size
    count = torch.arange(rows, dtype=torch.int32, device=q.device)
    length = (step.length - unread).int()
    return tables, StepInputs(count, step.q_start, length, step.position, step.row_of, 1, most * size)


def _bounds(q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Upper bounds of the scores of q [B, Hq, d] with the keys of pages, for bounds [B, P, 2, Hkv, d]: float32 [B, Hkv, P], the
    largest of the query heads of a KV head."""
    queries = q.float().unflatten(1, (bounds.shape[3], -1))
    signed = torch.cat((queries.clamp(max=0.0), queries.clamp(min=0.0)), -1)
    # In this order copies read whole vectors.
    both = bounds.permute(0, 3, 1, 2, 4).float().flatten(3)
    return torch.matmul(both, signed.transpose(2, 3)).amax(3)
