"""Sampling: temperature, noise and argmax in one pass over the logits, then a check of the limits top_k, top_p and min_p.

The formula is that of ops.sample (Gumbel-max: argmax of z - T log E with E exponential) with the noise of ops.noise. Both draw the
same tokens except for ties within the rounding of the logarithms.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ridgeline.ops.noise import Purpose
from ridgeline.ops.rows import Int, Knob, RowState
from ridgeline.ops.sample import Limits
from ridgeline.ops.triton.launch import await_inputs, overlap
from ridgeline.ops.triton.limits import COLDEST, LOG2_E, NO_TOKEN, RUN, allowed, run_sums, share
from ridgeline.ops.triton.noise import draw_key, score

BLOCK = tl.constexpr(4096)
MARK = tl.constexpr(1 << 30)
"""Bit added to tokens of rows with limits, so that the second kernel need not read the limits of other rows."""
LOOK_WARPS = 8
_SPECIAL = {
    "do_not_specialize": ["position_stride", "top_k_stride", "top_p_stride", "min_p_stride"],
    "do_not_specialize_on_alignment": [
        f"{name}_ptr" for name in ("owner", "temperature", "key", "position", "depth", "ids", "top_k", "top_p", "min_p")
    ],
}


@triton.jit
def _limits(top_k_ptr, top_p_ptr, min_p_ptr, top_k_stride, top_p_stride, min_p_stride, owner):
    """Load top_k, top_p and min_p of a row."""
    top_k = tl.load(top_k_ptr + owner * top_k_stride)
    return top_k, tl.load(top_p_ptr + owner * top_p_stride), tl.load(min_p_ptr + owner * min_p_stride)


@triton.jit
def _place(position_ptr, depth_ptr, row, owner, position_stride, HAS_DEPTH: tl.constexpr):
    """Position in the request of the token that a row of logits draws."""
    position = tl.load(position_ptr + owner * position_stride)
    if HAS_DEPTH:
        position += tl.load(depth_ptr + row)
    return position


@triton.jit(**_SPECIAL)
def _draw_kernel(
    logits_ptr,
    owner_ptr,
    temperature_ptr,
    key_ptr,
    position_ptr,
    depth_ptr,
    ids_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    token_ptr,
    top_ptr,
    sum_ptr,
    logits_stride,
    temperature_stride,
    key_stride,
    position_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    vocab,
    runs,
    purpose: tl.constexpr,
    OWNED: tl.constexpr,
    HAS_DEPTH: tl.constexpr,
    HAS_IDS: tl.constexpr,
    LIMITED: tl.constexpr,
    LIBRARY_LOG: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best token of one block of the vocabulary for one row per program; the grid is [rows, blocks]. For a row with limits also the
    largest logit of each run, and with top_p the run's mass relative to its largest logit.

    OWNED: temperature, key, position and limits are at index owner[row]. HAS_DEPTH: depth is added to the position. HAS_IDS: the
    noise of index i is that of token ids[i].
    """
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    logit = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    at = row * tl.num_programs(1) + tl.program_id(1)
    owner = row
    if OWNED:
        owner = tl.load(owner_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + owner * temperature_stride)
    mark = 0
    if LIMITED:
        top_k, top_p, min_p = _limits(top_k_ptr, top_p_ptr, min_p_ptr, top_k_stride, top_p_stride, min_p_stride, owner)
        if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
            mark = MARK
            runs_of = tl.reshape(logit, [BLOCK // RUN, RUN])
            tops = tl.max(runs_of, 1)
            run = tl.program_id(1) * (BLOCK // RUN) + tl.arange(0, BLOCK // RUN)
            tl.store(top_ptr + row * runs + run, tops, mask=run < runs)
            if top_p < 1.0:
                largest = tl.where(tops > float("-inf"), tops, 0.0)
                shares = share(runs_of, largest[:, None], LOG2_E / tl.maximum(temperature, COLDEST))
                tl.store(sum_ptr + row * runs + run, run_sums(shares), mask=run < runs)
    if temperature > 0.0:
        place = _place(position_ptr, depth_ptr, row, owner, position_stride, HAS_DEPTH)
        first, second = draw_key(key_ptr + owner * key_stride, place, purpose)
        name = token
        if HAS_IDS:
            name = tl.load(ids_ptr + token, mask=inside, other=0)
        logit = score(logit, name, first, second, temperature, LIBRARY_LOG)
    # The index of the maximum is found at the end. Carrying it through all comparisons took a seventh of the time.
    best = tl.max(logit, 0)
    tl.store(best_ptr + at, best)
    tl.store(token_ptr + at, tl.minimum(tl.min(tl.where(logit == best, token, NO_TOKEN), 0), vocab - 1) | mark)


@triton.jit(**_SPECIAL)
def _best_kernel(
    logits_ptr,
    owner_ptr,
    temperature_ptr,
    key_ptr,
    position_ptr,
    depth_ptr,
    ids_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    token_ptr,
    top_ptr,
    sum_ptr,
    list_ptr,
    out_ptr,
    logits_stride,
    temperature_stride,
    key_stride,
    position_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    vocab,
    blocks,
    runs,
    purpose: tl.constexpr,
    OWNED: tl.constexpr,
    HAS_DEPTH: tl.constexpr,
    HAS_IDS: tl.constexpr,
    LIMITED: tl.constexpr,
    LIBRARY_LOG: tl.constexpr,
    PDL: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Best token of one row's blocks per program, or, if limits exclude it, the best of the allowed tokens."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    best = tl.load(best_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))
    drawn = tl.load(token_ptr + row * blocks + block, mask=block < blocks, other=0)
    limited = tl.load(token_ptr + row * blocks) >= MARK
    drawn &= MARK - 1
    # One maximum finds the best score and, of equal scores, the first token: the upper bits order scores as integers, the lower
    # bits order tokens backwards. -0.0 becomes 0.0.
    best = tl.where(best == best, tl.where(best == 0.0, 0.0, best), float("-inf"))
    order = best.to(tl.int32, bitcast=True)
    order = (order ^ ((order >> 31) & NO_TOKEN)).to(tl.int64)
    winner = tl.max(order << 32 | (drawn ^ NO_TOKEN).to(tl.int64), 0)
    token = (winner & NO_TOKEN).to(tl.int32) ^ NO_TOKEN
    # NaN logits must not yield a token id out of range: the next step would read its embedding.
    token = tl.minimum(token, vocab - 1)
    if LIMITED:
        owner = row
        if OWNED:
            owner = tl.load(owner_ptr + row).to(tl.int64)
        temperature = tl.load(temperature_ptr + owner * temperature_stride)
        top_k, top_p, min_p = _limits(top_k_ptr, top_p_ptr, min_p_ptr, top_k_stride, top_p_stride, min_p_stride, owner)
        if limited:
            place = _place(position_ptr, depth_ptr, row, owner, position_stride, HAS_DEPTH)
            first, second = draw_key(key_ptr + owner * key_stride, place, purpose)
            run = tl.arange(0, BLOCKS * (BLOCK // RUN))
            tops = tl.load(top_ptr + row * runs + run, mask=run < runs, other=float("-inf"))
            sums = tl.load(sum_ptr + row * runs + run, mask=run < runs, other=0.0)
            token = allowed(
                token,
                best,
                drawn,
                tops,
                sums,
                logits_ptr + row * logits_stride,
                list_ptr + row * runs,
                first,
                second,
                temperature,
                top_k,
                top_p,
                min_p,
                vocab,
                LIBRARY_LOG,
            )
    if HAS_IDS:
        token = tl.load(ids_ptr + token)
    tl.store(out_ptr + row, token)


@dataclass(frozen=True, slots=True)
class _Draws:
    """Parameters of the draws of logits [N, V]. temperature float32, key int32 [R, 2], position int32 and limits belong to each
    row, or to its owner, int32 [N]. depth: int32 [N], see _draw_kernel. ids: int32 [V], see ops.sample.sample; without limits."""

    temperature: torch.Tensor
    key: torch.Tensor
    position: torch.Tensor
    limits: Limits | None = None
    owner: torch.Tensor | None = None
    depth: torch.Tensor | None = None
    ids: torch.Tensor | None = None

    def tokens(self, logits: torch.Tensor, purpose: int) -> torch.Tensor:
        """Drawn tokens, int32 [N]."""
        rows, vocab = logits.shape
        blocks, runs, device = triton.cdiv(vocab, BLOCK.value), triton.cdiv(vocab, RUN.value), logits.device
        best = torch.empty((rows, blocks), dtype=torch.float32, device=device)
        token = torch.empty((rows, blocks), dtype=torch.int32, device=device)
        out = torch.empty(rows, dtype=torch.int32, device=device)
        if not rows:
            return out
        few = self.limits or Limits(out, out, out)
        tops, sums, listed = out, out, out
        if self.limits is not None:
            tops = torch.empty((rows, runs), dtype=torch.float32, device=device)
            sums, listed = torch.empty_like(tops), torch.empty_like(tops, dtype=torch.int32)
        owner, depth, ids = (out if tensor is None else tensor for tensor in (self.owner, self.depth, self.ids))
        of_rows = (self.temperature, self.key, self.position, depth, ids, few.top_k, few.top_p, few.min_p)
        strides = [
            tensor.stride(0) for tensor in (self.temperature, self.key, self.position, few.top_k, few.top_p, few.min_p)
        ]
        forms = {
            "purpose": int(purpose),
            "OWNED": self.owner is not None,
            "HAS_DEPTH": self.depth is not None,
            "HAS_IDS": self.ids is not None,
            "LIMITED": self.limits is not None,
            "LIBRARY_LOG": device.type != "cuda" or torch.version.cuda is None,
            **overlap(device),
        }
        block_results = (best, token, tops, sums)
        _draw_kernel[(rows, blocks)](
            logits,
            owner,
            *of_rows,
            *block_results,
            logits.stride(0),
            *strides,
            vocab,
            runs,
            num_warps=8,
            **forms,
        )
        _best_kernel[(rows,)](
            logits,
            owner,
            *of_rows,
            *block_results,
            listed,
            out,
            logits.stride(0),
            *strides,
            vocab,
            blocks,
            runs,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=1 if self.limits is None else LOOK_WARPS,
            **forms,
        )
        return out


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    key: torch.Tensor,
    position: torch.Tensor,
    purpose: int,
    limits: Limits | None = None,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """logits [N, V] of any float dtype, -inf where masked; temperature float32 [N], 0 is greedy; key int32 [N, 2]
    (ops.noise.row_key); position int32 [N]; ids int32 [V] or None, see ops.sample.sample -> tokens int32 [N]."""
    return _Draws(temperature, key, position, limits, ids=ids).tokens(logits, purpose)


def draw(
    state: RowState,
    knobs: torch.Tensor,
    rows: torch.Tensor,
    logits: torch.Tensor,
    depth: torch.Tensor | None,
) -> torch.Tensor:
    """See ops.sample.draw_with. The kernels read the rows' columns in place, without a gather kernel."""
    key, known = state.ints[:, Int.KEY : Int.KEY + 2], state.ints[:, Int.KNOWN]
    limits = Limits(state.ints[:, Int.TOP_K], knobs[:, Knob.TOP_P], knobs[:, Knob.MIN_P])
    return _Draws(knobs[:, Knob.TEMPERATURE], key, known, limits, rows, depth).tokens(logits, Purpose.TOKEN)
