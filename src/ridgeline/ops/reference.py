"""Every operation in PyTorch, on any device and in any floating dtype. It defines correct results.

Statistics and attention are computed in float32, or in float64 if the inputs are float64. Results are rounded once, to the input's
dtype. Speed is not a goal here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from ridgeline.core.spec import QUANTIZED_KV
from ridgeline.ops import stored
from ridgeline.ops.adapters import host_adapters
from ridgeline.ops.blocks import Blocks, parts_of
from ridgeline.ops.columns import norm_then_place
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import (
    Activation,
    AttentionOps,
    FloatInput,
    FloatOps,
    Fp8Matrix,
    Fp8Ops,
    Heads,
    IntMatrix,
    IntOps,
    MatmulOps,
    Ops,
    QkvShape,
    Scaled,
    TokenwiseOps,
    apply_norm,
    norm_then_add,
    split_heads,
)

TREE_BITS = 64
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_AMAX = 1e-12
"""Rows of smaller magnitude quantize as if they had this one, so that nothing is divided by zero."""


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool) -> torch.Tensor:
    """x [..., D] / sqrt(mean(x^2) + eps) * (weight + 1 if offset), along the last dimension (Zhang and Sennrich 2019)."""
    upcast = _upcast(x)
    scale = _upcast(weight) + (1.0 if offset else 0.0)
    return (upcast * torch.rsqrt(upcast.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, H, d] at position [T]: the first 2 * cos_sin.shape[2] elements rotate, with paired halves."""
    half = cos_sin.shape[2]
    upcast = _upcast(x)
    turn = cos_sin[position.long()].to(upcast.dtype)
    cos, sin = turn[:, 0].unsqueeze(1), turn[:, 1].unsqueeze(1)
    first, second = upcast[..., :half], upcast[..., half : 2 * half]
    parts = (first * cos - second * sin, second * cos + first * sin, upcast[..., 2 * half :])
    return torch.cat(parts, dim=-1).to(x.dtype)


def write_kv(k: torch.Tensor, v: torch.Tensor, view: KvView) -> None:
    """Store k, v [T, Hkv, d] at view.slots."""
    stored.put(k, 0, view)
    stored.put(v, 1, view)


def qkv_write(qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs) -> Heads:
    """Split qkv [T, (Hq + 2 Hkv) * d], apply norms and rotary embedding to q and k, and write k and v to the cache. See Ops."""
    q, k, v = split_heads(qkv, shape)
    if shape.q_norm is not None:
        q = rms_norm(q, shape.q_norm, shape.norm_eps, shape.norm_offset)
    q = rotate(q, shape.cos_sin, step.position)
    if k is None or v is None:
        return q, None, None
    if shape.k_norm is not None:
        k = rms_norm(k, shape.k_norm, shape.norm_eps, shape.norm_offset)
    k = rotate(k, shape.cos_sin, step.position)
    write_kv(k, v, view)
    return q, k, v.contiguous()


def row_mask(query: slice, start: int, row: int, window: int | None, step: StepInputs) -> torch.Tensor:
    """Visibility of slots 0 .. start + n - 1 for a row's n query tokens, bool [n, start + n].

    A query sees every earlier slot and its own. ancestors restrict this among the row's first 64 query tokens (all bits set: plain
    causal order; a token always sees itself). The window is by position.
    """
    n = query.stop - query.start
    device = step.position.device
    slot = torch.arange(start + n, device=device)
    place = torch.arange(n, device=device).unsqueeze(1)
    seen = slot <= start + place
    if step.ancestors is not None:
        among = slot - start
        bit = (step.ancestors[query].unsqueeze(1) >> among.clamp(0, TREE_BITS - 1)) & 1
        seen = seen & ((among < 0) | (among >= TREE_BITS) | (among == place) | (bit == 1))
    if window is not None:
        past = slot if step.key_positions is None else step.key_positions[row, : start + n].long()
        key_positions = torch.cat((past[:start], step.position[query].long()))
        seen = seen & (step.position[query].long().unsqueeze(1) - key_positions < window)
    return seen


def row_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, view: KvView
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [n, Hq, d] over keys, values [Hkv, S, d]: (out [n, Hq, d], lse [n, Hq]). Without visible keys: 0 and -inf."""
    group = q.shape[1] // keys.shape[0]
    q = _upcast(q)
    keys, values = (tensor.to(q.dtype).repeat_interleave(group, 0) for tensor in (keys, values))
    scores = torch.einsum("nhd,hsd->hns", q, keys) * view.scale
    if view.softcap is not None:
        scores = view.softcap * torch.tanh(scores / view.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1).masked_fill(lse.unsqueeze(-1) == float("-inf"), 0.0))
    # A masked slot may hold anything, NaN included (stale pages behind a window).
    values = values.masked_fill(~mask.any(0).unsqueeze(-1), 0.0)
    return torch.einsum("hns,hsd->nhd", weights, values), lse.transpose(0, 1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    view: KvView,
    step: StepInputs,
    lse_needed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal attention of each row's query tokens over the slots it holds. Tokens without a row get 0 and -inf. Always returns the
    log-sum-exp."""
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=_upcast(q).dtype, device=q.device)
    starts = step.q_start.tolist()
    for index, (row, length) in enumerate(zip(step.rows.tolist(), step.length.tolist(), strict=True)):
        query = slice(starts[index], starts[index + 1])
        start = length - (query.stop - query.start)
        if query.stop == query.start or start < 0:
            continue
        pages = view.table[row, : -(-length // view.page_tokens)].long()
        keys, values = stored.pages_of(view, pages).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        mask = row_mask(query, start, row, view.window, step)
        part, part_lse = row_attention(q[query], keys, values, mask, view)
        out[query], lse[query] = part.to(q.dtype), part_lse
    return out, lse


def activate(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """act(gate) * up of gate_up [T, 2 F]; kind is silu or gelu_tanh."""
    gate, up = _upcast(gate_up).chunk(2, dim=-1)
    act = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
    return (act * up).to(gate_up.dtype)


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 F] -> gate * sigmoid(1.702 gate) * (up + 1) [T, F], gate at most 7 and up within 7 (gpt-oss)."""
    gate, up = _upcast(gate_up).chunk(2, -1)
    gate = gate.clamp(max=7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)).to(gate_up.dtype)


def pack(weight: torch.Tensor) -> torch.Tensor:
    return weight


def linear(x: FloatInput, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in], after its norm if it is Normed -> x packed^T + bias [T, out]."""
    return F.linear(apply_norm(x, rms_norm), packed, bias)


def linear_add(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """stream [T, out] + linear(x)."""
    return stream + linear(x, packed, bias)


def linear_activate(x: FloatInput, packed: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """activate(linear(x)) of a merged gate and up."""
    return activate(linear(x, packed, bias), kind)


# --- 8-bit linears ----------------------------------------------------------------------------------------------------


def quantize(x: torch.Tensor) -> Scaled:
    """Quantize each row of x [N, D] to e4m3 with its own scale; see Fp8Ops. Weights and activations use this formula."""
    x_f32 = x.float()
    amax = x_f32.abs().amax(-1).clamp(min=SMALLEST_AMAX)
    # A tensor, because PyTorch rounds once more when it divides by a Python number or divides one.
    largest = torch.full_like(amax, FP8_MAX)
    return Scaled((x_f32 * (largest / amax).unsqueeze(-1)).to(FP8), amax / largest)


def fp8_activate(gate_up: torch.Tensor, kind: str) -> Scaled:
    """quantize(activate(gate_up))."""
    return quantize(activate(gate_up, kind))


def fp8_pack(values: torch.Tensor, scales: torch.Tensor) -> Fp8Matrix:
    return Fp8Matrix(values, scales, scales.new_empty(0, dtype=torch.int32))


def fp8_linear(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See Fp8Ops. Weights are dequantized at each use, which saves memory, not time."""
    scaled = x if isinstance(x, Scaled) else quantize(apply_norm(x, rms_norm))
    out = F.linear(scaled.values.float(), matrix.values.float())
    out = out * (scaled.scales.unsqueeze(-1) * matrix.scales)
    return (out if bias is None else out + bias.float()).to(dtype)


def fp8_linear_add(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """stream [T, out] + fp8_linear(x)."""
    return stream + fp8_linear(x, matrix, bias, stream.dtype)


def fp8_linear_activate(
    x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype, kind: str
) -> Scaled:
    """fp8_activate(fp8_linear(x)) of a merged gate and up."""
    return fp8_activate(fp8_linear(x, matrix, bias, dtype), kind)


FP8_REFERENCE = Fp8Ops(fp8_pack, fp8_linear, fp8_linear_add, fp8_linear_activate)


def fp8_weight_linear(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """fp8_linear with unquantized x: only weights are in 8 bits. Their scales may be of groups of inputs."""
    assert not isinstance(x, Scaled)
    x_f32, weight = apply_norm(x, rms_norm).float(), matrix.values.float()
    if matrix.group:
        groups = torch.arange(weight.shape[1], device=weight.device) // matrix.group
        out = F.linear(x_f32, weight * matrix.scales[:, groups])
    else:
        out = F.linear(x_f32, weight) * matrix.scales
    return (out if bias is None else out + bias.float()).to(dtype)


def fp8_weight_linear_add(
    x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, stream: torch.Tensor
) -> torch.Tensor:
    """stream [T, out] + fp8_weight_linear(x)."""
    return stream + fp8_weight_linear(x, matrix, bias, stream.dtype)


def fp8_weight_linear_activate(
    x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype, kind: str
) -> torch.Tensor:
    """activate(fp8_weight_linear(x)) of a merged gate and up."""
    return activate(fp8_weight_linear(x, matrix, bias, dtype), kind)


FP8_WEIGHT_REFERENCE = Fp8Ops(fp8_pack, fp8_weight_linear, fp8_weight_linear_add, fp8_weight_linear_activate)

# --- integer linears --------------------------------------------------------------------------------------------------

ROW_CODES = 32
"""Rows of codes are padded to multiples of this, which are complete bytes for any number of bits."""
DEQUANTIZED = 1024
"""Outputs whose weights the reference dequantizes together."""


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes uint8 [N, K], each below 2^bits -> uint8 [N, ceil(K / 32) * 4 * bits]: a bit string per row, lowest bit first."""
    if pad := -codes.shape[1] % ROW_CODES:
        codes = F.pad(codes, (0, pad))
    if bits == 8:
        return codes.contiguous()
    each = codes.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8, device=codes.device) & 1
    byte = each.reshape(codes.shape[0], -1, 8) << torch.arange(8, dtype=torch.uint8, device=codes.device)
    return byte.sum(-1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, bits: int, inputs: int) -> torch.Tensor:
    """Inverse of pack_bits -> codes uint8 [N, inputs]."""
    if bits == 8:
        return packed[:, :inputs]
    each = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    codes = each.reshape(packed.shape[0], -1, bits) << torch.arange(bits, dtype=torch.uint8, device=packed.device)
    return codes.sum(-1, dtype=torch.uint8)[:, :inputs]


def int_pack(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, group: int) -> IntMatrix:
    return IntMatrix(pack_bits(codes, bits), scales.half(), zeros, bits, group, *codes.shape)


def int_unpack(matrix: IntMatrix) -> torch.Tensor:
    """Inverse of int_pack: codes uint8 [out, in]."""
    return unpack_bits(matrix.codes, matrix.bits, matrix.d_in)


def int_dequantized(matrix: IntMatrix) -> torch.Tensor:
    """The weights of an int_pack result, float32 [out, in]."""
    return dequantized(int_unpack(matrix), matrix.scales, matrix.zeros, matrix.bits, matrix.group)


def dequantized(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, group: int
) -> torch.Tensor:
    """(code - zero) * scale, float32 [N, K]; codes uint8 [N, K], scales and zeros [N, groups], zeros None: 2^(bits - 1)."""
    groups = torch.arange(codes.shape[1], device=codes.device) // group
    zero = float(1 << bits - 1) if zeros is None else zeros.float()[:, groups]
    return (codes.float() - zero) * scales.float()[:, groups]


def int_linear(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """See IntOps. Weights are dequantized at each use, some outputs at a time, which saves memory, not time."""
    source = apply_norm(x, rms_norm)
    x_f32, parts = source.float(), []
    for first in range(0, matrix.out, DEQUANTIZED):
        rows = slice(first, first + DEQUANTIZED)
        codes = unpack_bits(matrix.codes[rows], matrix.bits, matrix.d_in)
        zeros = None if matrix.zeros is None else matrix.zeros[rows]
        parts.append(x_f32 @ dequantized(codes, matrix.scales[rows], zeros, matrix.bits, matrix.group).t())
    out = torch.cat(parts, 1)
    return (out if bias is None else out + bias.float()).to(source.dtype)


def int_linear_add(x: torch.Tensor, matrix: IntMatrix, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """stream [T, out] + int_linear(x)."""
    return stream + int_linear(x, matrix, bias)


def int_linear_activate(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """activate(int_linear(x)) of a merged gate and up."""
    return activate(int_linear(x, matrix, bias), kind)


def int_weights(matrix: IntMatrix) -> Iterator[torch.Tensor]:
    """See IntOps.weights."""
    yield int_dequantized(matrix)


INT_REFERENCE = IntOps(int_pack, int_linear, int_linear_add, int_linear_activate, int_weights)


def block_pack(blocks: Blocks) -> IntMatrix:
    """See MatmulOps.blocks. Codes are packed as in int_pack, other arrays stay."""
    (outputs, inputs), codes = blocks.codes.shape, pack_bits(blocks.codes, blocks.bits)
    matrix = IntMatrix(codes, blocks.scales, None, blocks.bits, blocks.group, outputs, inputs)
    return replace(matrix, scaling=blocks.scaling, extra=blocks.extra)


def block_unpack(matrix: IntMatrix) -> Blocks:
    """Inverse of block_pack."""
    return Blocks(int_unpack(matrix), matrix.scales, matrix.bits, matrix.group, matrix.scaling, matrix.extra)


def block_linear(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """See MatmulOps.blocks. Weights are dequantized at each use, which saves memory, not time."""
    source = apply_norm(x, rms_norm)
    weights = [block_unpack(part).dequantized() for part in parts_of(matrix)]
    out = torch.cat([source.float() @ weight.t() for weight in weights], 1)
    return (out if bias is None else out + bias.float()).to(source.dtype)


def block_linear_add(
    x: torch.Tensor, matrix: IntMatrix, bias: torch.Tensor | None, stream: torch.Tensor
) -> torch.Tensor:
    """stream [T, out] + block_linear(x)."""
    return stream + block_linear(x, matrix, bias)


def block_linear_activate(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """activate(block_linear(x)) of a merged gate and up."""
    return activate(block_linear(x, matrix, bias), kind)


def block_weights(matrix: IntMatrix) -> Iterator[torch.Tensor]:
    """See IntOps.weights: a piece for each matrix of a chain."""
    return (block_unpack(part).dequantized() for part in parts_of(matrix))


BLOCK_REFERENCE = IntOps(block_pack, block_linear, block_linear_add, block_linear_activate, block_weights)

OUTLIER = 6.0
"""Magnitude from which LLM.int8() leaves an input in floating point (Dettmers et al. 2022, section 3.2)."""


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    """Round x [T, D] to integers of -127..127 times a scale per token, in x's dtype: the inputs of W8A8."""
    x_f32 = x.float()
    steps = x_f32.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127.0
    return ((x_f32 / steps).round() * steps).to(x.dtype)


def round_inliers(x: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """Round x [T, D] as LLM.int8() does: 0 where `empty`, bool [D]; inputs of magnitude OUTLIER and above unchanged, others to 8
    bits.

    Each token has its own outliers, whereas the paper selects columns for all tokens of a batch. A token's result therefore does
    not depend on other tokens. The two products of the paper are one, because both use the same weights.
    """
    x = x.masked_fill(empty, 0.0)
    outlier = x.abs() >= OUTLIER
    return torch.where(outlier, x, in_8_bits(x.masked_fill(outlier, 0.0)))


def rounding_inputs(ops: IntOps) -> IntOps:
    """MatmulOps.w8a8 for devices without a kernel that rounds inputs as it reads them."""

    def rounded(x: FloatInput) -> torch.Tensor:
        return in_8_bits(apply_norm(x, rms_norm))

    return IntOps(
        pack=ops.pack,
        linear=lambda x, matrix, bias: ops.linear(rounded(x), matrix, bias),
        linear_add=lambda x, matrix, bias, stream: ops.linear_add(rounded(x), matrix, bias, stream),
        linear_activate=lambda x, matrix, bias, kind: ops.linear_activate(rounded(x), matrix, bias, kind),
    )


def mixed_inputs(
    integer: IntOps,
    unquantized: FloatOps,
    tokenwise: TokenwiseOps,
    inliers: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> IntOps:
    """MatmulOps.mixed as two products, of rounded inputs and of kept inputs. inliers: as round_inliers."""

    def linear(
        x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None, stream: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert matrix.kept is not None
        kept, columns, is_kept = matrix.kept
        x = apply_norm(x, tokenwise.rms_norm)
        rest = inliers(x, is_kept)
        product = (
            integer.linear(rest, matrix, bias) if stream is None else integer.linear_add(rest, matrix, bias, stream)
        )
        return unquantized.linear_add(x.index_select(1, kept), columns, None, product)

    def linear_activate(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        return tokenwise.activate(linear(x, matrix, bias), kind)

    return IntOps(integer.pack, linear, linear, linear_activate)


TOKENWISE_REFERENCE = TokenwiseOps(rms_norm, norm_then_add(rms_norm), activate, norm_then_place(rms_norm))
FLOAT_REFERENCE = FloatOps(pack, linear, linear_add, linear_activate)
REFERENCE = Ops(
    name="reference",
    tokenwise=TOKENWISE_REFERENCE,
    attention=AttentionOps(qkv_write, attention, frozenset(QUANTIZED_KV)),
    matmul=MatmulOps(
        unquantized=FLOAT_REFERENCE,
        fp8=FP8_REFERENCE,
        fp8_weight=FP8_WEIGHT_REFERENCE,
        integer=INT_REFERENCE,
        w8a8=rounding_inputs(INT_REFERENCE),
        mixed=mixed_inputs(INT_REFERENCE, FLOAT_REFERENCE, TOKENWISE_REFERENCE, round_inliers),
        blocks=BLOCK_REFERENCE,
    ),
    adapters=host_adapters(activate),
)
