"""Paged attention for ragged batches: which kernels attend, in order of preference. How they are launched: attention_launch.

Two kernels serve one step. Rows whose query tokens, packed with the query heads of a KV group, fit a small tile
(decoding, verification of drafts) are split along their keys and combined by log-sum-exp (flash decoding, Dao et al.
2023): SPLIT. Longer chunks are tiled over queries (FlashAttention-2, Dao 2023; on Hopper FlashAttention-3, Shah et al. 2024):
CHUNK. Each kernel skips the other's rows on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import triton

from ridgeline.ops.step import SHORT, KvView, StepInputs
from ridgeline.ops.triton import hopper, tuning
from ridgeline.ops.triton.attention_launch import AttentionLaunch, AttentionShape, Split, chunks, hopper_chunks, split
from ridgeline.ops.triton.launch import is_hopper, processors
from ridgeline.ops.triton.registry import Entry, Registry
from ridgeline.ops.triton.tuning import Tile
from ridgeline.ops.triton.walk_arguments import empty_results

# --- rows of few query tokens -----------------------------------------------------------------------------------------


def _sparse(shape: AttentionShape) -> bool:
    """Whether rows and heads alone leave processors idle; with many queries each, whether they do not fill one wave."""
    least = 1 if shape.small <= tuning.SPLIT_QUERIES else tuning.SPLIT_PROGRAMS_PER_PROCESSOR
    return shape.programs < shape.processors * least


def _own_processor(shape: AttentionShape) -> bool:
    """Whether each program may have a processor for itself."""
    return shape.small <= tuning.SPLIT_QUERIES and _sparse(shape)


def _early(shape: AttentionShape, tile: Tile) -> bool:
    """Whether programs of several rows ask for keys before the wait though others share their processors. Steps that only decode:
    their kernels are compiled before requests come, those of mixed steps for any number of rows."""
    decodes = shape.max_query == 1 and shape.group <= tuning.SPLIT_QUERIES and shape.rows != 1
    return decodes and shape.programs <= tuning.MOST_EARLY_PROGRAMS * shape.processors and tile.registers is not None


def _smallest(shape: AttentionShape, rows_fill_wave: bool) -> int:
    """Slots below which a part of a row is not cut further. Steps that only decode have about as many rows as are said; those
    of a graph of mixed steps may be few, and parts of a few are worth their price. One row alone is cut as finely as rows that
    verify. rows_fill_wave: uncut rows fill a wave."""
    if shape.max_query == 1 and shape.rows > 1:
        return tuning.SMALLEST_OF_MANY if rows_fill_wave else tuning.SMALLEST_SPLIT
    verifies = shape.max_query * shape.group <= shape.small
    return tuning.SMALLEST_VERIFIED_SPLIT if verifies else tuning.SMALLEST_SPLIT


def _split(
    shape: AttentionShape, tiles: Mapping[int, Tile], each: int, combined: bool = False, alone: bool = False
) -> Split:
    """The split kernel with one of `tiles`. each: programs that run at a time on a processor. combined: see Split. alone: the next
    kernel's programs find room beside these, so these ask for keys before the wait."""
    tile = tuning.FLOAT32_SPLIT if shape.dtype == torch.float32 else tiles[shape.width]
    early = not alone and _early(shape, tile)
    # Programs that run at a time. Where all rows would, the longest would end long after the others: so there are more parts.
    wave = each * shape.processors
    units = wave * (1 if shape.programs < wave else tuning.SPLIT_WAVES) // shape.kv_heads
    smallest = _smallest(shape, not combined and shape.programs >= wave)
    return Split(
        tile,
        queries=shape.small // shape.group * shape.group,
        spare=max(1, units - shape.rows if combined else units),
        smallest=smallest if shape.device.type == "cuda" else tile.keys,
        ahead=tile.stages * tile.keys if (alone or early) and shape.in_order else 0,
        registers=tile.registers if early else None,
        combined=combined,
    )


def _words_serves(shape: AttentionShape) -> Split | None:
    """A cache in 8 or 4 bits, on Hopper, where its instructions were timed, and in the interpreter."""
    bits = {torch.uint8: 4}.get(shape.cache, 8 * shape.cache.itemsize)
    if bits > 8 or shape.small > tuning.SPLIT_QUERIES or shape.head_dim % (32 // bits):
        return None
    if shape.device.type == "cuda" and not is_hopper(shape.device):
        return None
    tiles = tuning.WORD_TILES[bits]
    tile = tiles.get(shape.width, tuning.FLOAT32_SPLIT)
    if shape.dtype == torch.float32:
        tile = tuning.FLOAT32_SPLIT
    columns = triton.next_power_of_2(shape.small) * (shape.width // 32 if bits == 4 else 1)
    if tile.warps < tuning.FLOAT32_SPLIT.warps:
        tile = replace(tile, warps=tile.warps * max(1, columns // 16))
    wave = tuning.WORD_PROGRAMS_PER_PROCESSOR[bits]
    made = _split(shape, dict.fromkeys((16, 32, 64, 128, 256, 512), tile), wave, combined=_sparse(shape))
    # Scales are loaded an iteration before their words.
    return made._replace(tile=tile, ahead=made.ahead + tile.keys if made.ahead else 0, words=True)


def _wide_serves(shape: AttentionShape) -> Split | None:
    fills = shape.width in tuning.WIDE_SPLIT_TILES and shape.rows >= tuning.FEWEST_WIDE_ROWS
    serves = fills and _own_processor(shape)
    return _split(shape, tuning.WIDE_SPLIT_TILES, 1, combined=True, alone=True) if serves else None


def _lone_serves(shape: AttentionShape) -> Split | None:
    serves = shape.max_query == 1 and shape.long and _own_processor(shape)
    each = tuning.LONE_PROGRAMS_PER_PROCESSOR
    return _split(shape, tuning.SPLIT_TILES, each, combined=True, alone=True) if serves else None


def _snug_serves(shape: AttentionShape) -> Split | None:
    least, most = tuning.SPLIT_PROGRAMS_PER_PROCESSOR, tuning.SNUG_PROGRAMS_PER_PROCESSOR
    fits = shape.max_query == 1 and shape.group <= tuning.SPLIT_QUERIES and shape.width in tuning.SNUG_SPLIT_TILES
    serves = fits and least * shape.processors <= shape.programs < most * shape.processors
    return _split(shape, tuning.SNUG_SPLIT_TILES, most) if serves else None


def _combined_serves(shape: AttentionShape) -> Split | None:
    each = tuning.SPLIT_PROGRAMS_PER_PROCESSOR
    return _split(shape, tuning.SPLIT_TILES, each, combined=True) if _sparse(shape) else None


Attention = Registry[AttentionShape, AttentionLaunch]

SPLIT: Attention = Registry(
    Entry(
        "words",
        _words_serves,
        split,
        "8 and 4 bits, up to 16 packed queries, Hopper, H200; an 8B at 64 rows of 4,096: step -19 % in fp8, -25 % int8, -33 % int4",
    ),
    Entry(
        "wide",
        _wide_serves,
        split,
        "4 rows and more, less than a program a processor, heads of 256, H200; +2.6 % of a 2B of Gemma at 8 rows, +2.0 % of a 4B",
    ),
    Entry(
        "lone",
        _lone_serves,
        split,
        "long contexts, less than a program a processor, H200; +7.4 % of a 0.6B at 1 row of 4,096, +0.4 % of an 8B at 2",
    ),
    Entry(
        "snug",
        _snug_serves,
        split,
        "3 to 4 programs a processor, heads of 128, H200; +5.7 % of a 0.6B at 64 rows, +0.9 % of an 8B",
    ),
    Entry(
        "combined",
        _combined_serves,
        split,
        "less than a program a processor, H200; with lone +16.5 % of a 0.6B at 1 row of 4,096, but -13.0 % of a 1B at 8 rows",
    ),
    Entry(
        "whole",
        lambda shape: _split(shape, tuning.SPLIT_TILES, tuning.SPLIT_PROGRAMS_PER_PROCESSOR),
        split,
        "any; no other kernel. Keys before the wait (_early), H200: +3.3 % of a 7B in fp8 at 128 rows",
    ),
)


# --- chunks -----------------------------------------------------------------------------------------------------------


def _hopper_serves(shape: AttentionShape) -> Tile | None:
    """Chunks in order of slots, with heads and pages that its copies take. It reads no positions, which say how far from its keys a
    query is where these are a part of a row's."""
    long = shape.max_query >= hopper.SHORTEST_CHUNK.get(shape.head_dim, shape.max_query + 1)
    addressed = shape.aligned and shape.cache == shape.dtype and shape.page_tokens % hopper.SMALLEST_PAGE == 0
    if not (long and addressed and shape.in_order) or shape.lse_needed:
        return None
    form = hopper.form_of(shape.window, shape.softcap, shape.dtype)
    if hopper.kernel(shape.device, shape.head_dim, shape.dtype, form) is None:
        return None
    return Tile(hopper.QUERIES, hopper.KEYS[shape.head_dim], 4 * hopper.GROUPS, hopper.STAGES)


def _chunk_tile(shape: AttentionShape) -> Tile:
    if shape.dtype == torch.float32:
        return tuning.FLOAT32_CHUNK
    if shape.max_query <= tuning.LONGEST_SHORT_CHUNK:
        return tuning.SHORT_CHUNK_TILES[shape.width]
    tile = tuning.CHUNK_TILES[shape.width]
    return tuning.WIDE_CHUNK_TILES.get(shape.width, tile) if is_hopper(shape.device) else tile


CHUNK: Attention = Registry(
    Entry(
        "hopper",
        _hopper_serves,
        hopper_chunks,
        "chunks of 64 to 256 tokens and more, by head size, Hopper; +7.9 % of prompts of an 8B, +13.6 % in fp8",
    ),
    Entry("any", _chunk_tile, chunks, "any; no other kernel"),
)


# --- the operation ----------------------------------------------------------------------------------------------------


def shape_of(q: torch.Tensor, view: KvView, step: StepInputs, lse_needed: bool = False) -> AttentionShape:
    """What the choice depends on."""
    kv, device = view.kv, q.device
    (_, heads, head_dim), (kv_heads, page_tokens) = q.shape, kv.shape[2:4]
    max_query = step.max_query
    chunked = max_query * (heads // kv_heads) > tuning.LARGER_SPLIT_QUERIES[-1]
    return AttentionShape(
        step.rows.shape[0],
        max_query,
        step.max_length > SHORT,
        heads,
        kv_heads,
        head_dim,
        page_tokens,
        q.dtype,
        kv.dtype,
        device,
        processors(device),
        view.window,
        view.softcap,
        step.ancestors is None and step.key_positions is None,
        chunked and hopper.addresses(q, kv),
        lse_needed,
    )


def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    view: KvView,
    step: StepInputs,
    lse_needed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See AttentionOps. Query tokens of no row are left as they come unless lse_needed; head sizes up to 256."""
    out, lse = empty_results(q, lse_needed)
    if q.shape[0]:
        shape = shape_of(q, view, step, lse_needed)
        for registry in (SPLIT,) if shape.few else (SPLIT, CHUNK):
            launch, config = registry.choices(shape)[0]
            launch(config, shape, q, view, step, (out, lse))
    return out, lse
