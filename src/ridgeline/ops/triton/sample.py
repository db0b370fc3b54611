"""Drawing tokens in one pass over the logits: temperature, noise and argmax fused.

The formula is that of ops.sample (Gumbel-max, argmax of z - T log E with E exponential) and the noise that of
ops.noise, a hash of (row key, position, purpose, token) in wrapping 32-bit arithmetic, so both draw the same
tokens but for ties within the rounding of the logarithms.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ridgeline.ops.noise import Purpose
from ridgeline.ops.rows import Int, RowState
from ridgeline.ops.triton.launch import await_inputs, overlap

BLOCK = 4096
FIRST = tl.constexpr(0x21F0AAAD)
SECOND = tl.constexpr(0x735A2D97)
GOLDEN = tl.constexpr(0x9E3779B9)
PURPOSE = tl.constexpr(0x85EBCA6B)
LARGEST = tl.constexpr(1.0 - 2.0**-24)
NOBODY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _mix(word, key):
    word = word ^ (word >> 16)
    word = word * FIRST
    word = word ^ key
    word = word ^ (word >> 15)
    word = word * SECOND
    return word ^ (word >> 15)


@triton.jit
def _log(x, PLAIN: tl.constexpr):
    """Natural logarithm of float32: the hardware's, within 2^-22 (of the result, or absolutely next to one; PTX ISA, lg2.approx),
    where a library's takes twenty instructions. PLAIN: the library's, where there is no such hardware."""
    if PLAIN:
        return tl.log(x)
    two = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return two * 0.6931471805599453


@triton.jit
def _log_exponential(word, PLAIN: tl.constexpr):
    """log(-log(1 - u)) of u = (word / 2 + 1/2) / 2^31, rounded once; where 1 - u would lose digits, by the series of
    -log(1 - u)."""
    u = tl.minimum((word | 1).to(tl.float32) * 2.3283064365386963e-10, LARGEST)
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return _log(tl.where(u < 0.06, series, -_log(1.0 - u, PLAIN)), PLAIN)


@triton.jit(
    do_not_specialize=["position_stride", "wide"],
    do_not_specialize_on_alignment=["temperature_ptr", "key_ptr", "position_ptr", "owner_ptr", "depth_ptr"],
)
def _draw_kernel(
    logits_ptr,
    owner_ptr,
    temperature_ptr,
    key_ptr,
    position_ptr,
    depth_ptr,
    best_ptr,
    token_ptr,
    logits_stride,
    temperature_stride,
    key_stride,
    position_stride,
    wide,
    vocab,
    purpose: tl.constexpr,
    OWNED: tl.constexpr,
    DEEP: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of one row's block of the vocabulary.

    OWNED: `wide` rows of logits in turn belong to one of `owner`, whose temperature, key and position count; the position is
    moved by depth if DEEP, else by the row's place among them.
    """
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    score = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    owner = row
    if OWNED:
        owner = tl.load(owner_ptr + row // wide).to(tl.int64)
    temperature = tl.load(temperature_ptr + owner * temperature_stride)
    if temperature > 0.0:
        first = tl.load(key_ptr + owner * key_stride).to(tl.uint32, bitcast=True)
        second = tl.load(key_ptr + owner * key_stride + 1).to(tl.uint32, bitcast=True)
        position = tl.load(position_ptr + owner * position_stride)
        if DEEP:
            position += tl.load(depth_ptr + row)
        elif OWNED:
            position += (row % wide).to(tl.int32)
        where = position.to(tl.uint32, bitcast=True) * GOLDEN
        for _ in tl.static_range(purpose + 1):
            where = where + PURPOSE
        one = _mix(where + first, second)
        two = _mix(where + second, one)
        word = _mix(token.to(tl.uint32) * GOLDEN + one, two)
        score = score - temperature * _log_exponential(word, PLAIN)
    at = row * tl.num_programs(1) + tl.program_id(1)
    # Whose it is is asked once, at the end: to carry that through all comparisons took a seventh of the time.
    best = tl.max(score, 0)
    tl.store(best_ptr + at, best)
    tl.store(token_ptr + at, tl.min(tl.where(score == best, token, NOBODY), 0))


@triton.jit
def _best_kernel(best_ptr, token_ptr, out_ptr, blocks, vocab, PDL: tl.constexpr, BLOCKS: tl.constexpr):
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    best = tl.load(best_ptr + row * blocks + at, mask=at < blocks, other=float("-inf"))
    place = tl.minimum(tl.argmax(best, 0), blocks - 1)
    # Logits that are not numbers must not name a token that does not exist: the next step would read its embedding.
    tl.store(out_ptr + row, tl.minimum(tl.load(token_ptr + row * blocks + place), vocab - 1))


@dataclass(frozen=True, slots=True)
class _Draws:
    """Whose draws rows of logits [N, V] are. temperature float32, key int32 [R, 2], position int32: of each row, or of each
    owner int32 [N / wide], whose `wide` rows lie behind each other; depth int32 [N]: see _draw_kernel."""

    temperature: torch.Tensor
    key: torch.Tensor
    position: torch.Tensor
    owner: torch.Tensor | None = None
    depth: torch.Tensor | None = None

    def tokens(self, logits: torch.Tensor, purpose: int) -> torch.Tensor:
        """int32 [N]."""
        rows, vocab = logits.shape
        blocks, device = triton.cdiv(vocab, BLOCK), logits.device
        best = torch.empty((rows, blocks), dtype=torch.float32, device=device)
        token = torch.empty((rows, blocks), dtype=torch.int32, device=device)
        out = torch.empty(rows, dtype=torch.int32, device=device)
        if not rows:
            return out
        _draw_kernel[(rows, blocks)](
            logits,
            out if self.owner is None else self.owner,
            self.temperature,
            self.key,
            self.position,
            out if self.depth is None else self.depth,
            best,
            token,
            logits.stride(0),
            self.temperature.stride(0),
            self.key.stride(0),
            self.position.stride(0),
            1 if self.owner is None else rows // len(self.owner),
            vocab,
            purpose=int(purpose),
            OWNED=self.owner is not None,
            DEEP=self.depth is not None,
            PLAIN=device.type != "cuda" or torch.version.cuda is None,
            BLOCK=BLOCK,
            num_warps=8,
            **overlap(device),
        )
        most = triton.next_power_of_2(blocks)
        _best_kernel[(rows,)](best, token, out, blocks, vocab, BLOCKS=most, num_warps=1, **overlap(device))
        return out


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, key: torch.Tensor, position: torch.Tensor, purpose: int
) -> torch.Tensor:
    """logits [N, V] of any float type, -inf where not allowed; temperature float32 [N], 0 is greedy; key int32 [N, 2]
    (ops.noise.row_key); position int32 [N] -> tokens int32 [N]."""
    return _Draws(temperature, key, position).tokens(logits, purpose)


def draw(
    state: RowState,
    heat: torch.Tensor,
    rows: torch.Tensor,
    logits: torch.Tensor,
    depth: torch.Tensor | None,
    source: torch.Tensor | None,
) -> torch.Tensor:
    """See Ops.draw: the rows' columns are read where they are, without a kernel that gathers them."""
    if source is not None:
        logits = logits.index_select(0, source)
    key, known = state.ints[:, Int.KEY : Int.KEY + 2], state.ints[:, Int.KNOWN]
    return _Draws(heat, key, known, rows, depth).tokens(logits, Purpose.TOKEN)
