"""Arguments that all attention kernels share: where queries, keys and values lie, and which slots a query sees."""

from __future__ import annotations

import torch
import triton

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.triton.launch import overlap
from ridgeline.ops.triton.tuning import Tile


def padded_width(head_dim: int) -> int:
    """Elements of a head in a tile: a power of 2, at least the 16 that the matrix unit takes."""
    return max(16, triton.next_power_of_2(head_dim))


def empty_results(q: torch.Tensor, lse_needed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the output [T, Hq, D] and the log-sum-exp float32 [T, Hq]. The kernels do not write tokens of no row: with
    lse_needed these have output 0 and log-sum-exp minus infinity, else whatever the memory held."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if lse_needed:
        out.zero_()
        lse.fill_(float("-inf"))
    return out, lse


def walk_arguments(tile: Tile, q: torch.Tensor, view: KvView, step: StepInputs) -> dict[str, object]:
    """Arguments that the split, the chunk and the invariant kernel take by name. KEYS is that of the tile; QUERIES differs."""
    absent = step.position
    kv_heads, head_dim = view.kv.shape[2], q.shape[2]
    scales = view.kv if view.scales is None else view.scales
    return {
        "q_ptr": q,
        "kv_ptr": view.kv,
        "scales_ptr": scales,
        "table_ptr": view.table,
        "position_ptr": step.position,
        "ancestors_ptr": absent if step.ancestors is None else step.ancestors,
        "key_positions_ptr": absent if step.key_positions is None else step.key_positions,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "page_stride": view.kv.stride(0),
        "kind_stride": view.kv.stride(1),
        "head_stride": view.kv.stride(2),
        "scale_page_stride": scales.stride(0),
        "table_stride": view.table.stride(0),
        "key_positions_stride": 0 if step.key_positions is None else step.key_positions.stride(0),
        "scale": view.scale,
        "cap": 0.0 if view.softcap is None else view.softcap,
        "kv_heads": kv_heads,
        "group": q.shape[1] // kv_heads,
        "head_dim": head_dim,
        "page_tokens": view.page_tokens,
        "window": view.window or 0,
        "BITS": view.bits,
        "SCALES": 1 if view.scales is None else view.scales.shape[4],
        "TREE": step.ancestors is not None,
        "COMPACTED": step.key_positions is not None,
        "CAPPED": view.softcap is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "KEYS": tile.keys,
        "WIDTH": padded_width(head_dim),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **overlap(q.device),
    }
