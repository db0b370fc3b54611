"""CPU operations in PyTorch: few calls per layer (each costs 1 to 5 us) and weights packed for oneDNN.

Index tensors and masks are equal for all layers of a group, so they are computed once and kept in step.derived. Attention packs the
query heads that share a KV head as extra queries, so keys and values are never expanded. The block pool must be zeroed at creation:
slots past a row's end are read with weight zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ridgeline.ops.adapters import host_adapters
from ridgeline.ops.columns import norm_then_place
from ridgeline.ops.reference import INT_REFERENCE, REFERENCE, TREE_BITS, mixed_inputs, round_inliers
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import (
    AttentionOps,
    FloatInput,
    FloatOps,
    Heads,
    Ops,
    QkvShape,
    TokenwiseOps,
    apply_norm,
    norm_then_add,
    split_heads,
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool) -> torch.Tensor:
    """See reference.rms_norm. PyTorch's kernel computes in float32 internally."""
    if offset:
        return F.rms_norm(x.float(), weight.shape, weight.float() + 1.0, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


# --- rotary embedding and cache write ---------------------------------------------------------------------------------


def _rope_factors(shape: QkvShape, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors (of x, of x with swapped halves), float32 [T, Hq + 2 Hkv, d]; 1 and 0 for elements without rotation (values)."""
    key = ("rope", shape.cos_sin.data_ptr(), shape.n_heads, shape.n_kv_heads, shape.head_dim)
    if (cached := step.derived.get(key)) is not None:
        return cached  # type: ignore[no-any-return]
    turn = shape.cos_sin.index_select(0, step.position)
    half, turned = turn.shape[2], shape.n_heads + shape.n_kv_heads
    same = torch.ones(turn.shape[0], turned + shape.n_kv_heads, shape.head_dim)
    swapped = torch.zeros_like(same)
    same[:, :turned, : 2 * half] = turn[:, :1].repeat(1, 1, 2)
    swapped[:, :turned, :half] = -turn[:, 1:]
    swapped[:, :turned, half : 2 * half] = turn[:, 1:]
    step.derived[key] = same, swapped
    return same, swapped


def _swap_halves(x: torch.Tensor, half: int) -> torch.Tensor:
    if 2 * half == x.shape[-1]:
        return torch.roll(x, half, -1)
    return torch.cat((x[..., half : 2 * half], x[..., :half], x[..., 2 * half :]), -1)


def _write_index(view: KvView, step: StepInputs) -> torch.Tensor:
    """Destination of each token's k and v, int64 [T * 2 * Hkv], in vectors of head_dim from the start of view.kv."""
    page, kind, head, place, _ = view.kv.stride()
    key = ("write", view.slots.data_ptr(), view.kv.shape[2], page, kind, head)
    if (cached := step.derived.get(key)) is not None:
        return cached  # type: ignore[no-any-return]
    token = view.slots // view.page_tokens * (page // place) + view.slots % view.page_tokens
    kinds = torch.arange(2).view(2, 1) * (kind // place) + torch.arange(view.kv.shape[2]) * (head // place)
    index = (token.view(-1, 1, 1) + kinds).flatten()
    step.derived[key] = index
    return index


def _vectors(kv: torch.Tensor, width: int) -> torch.Tensor:
    """One layer's cache as rows of `width` contiguous elements, from its first to its last element."""
    pages, kinds, heads, places, size = kv.shape
    page, kind, head, _, _ = kv.stride()
    last = (pages - 1) * page + (kinds - 1) * kind + (heads - 1) * head + places * size
    return kv.as_strided((last // width, width), (width, 1))


def qkv_write(qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs) -> Heads:
    """See AttentionOps. Values pass through the rotation with factors 1 and 0, so that one call serves q, k and v."""
    if view.scales is not None:
        return REFERENCE.attention.qkv_write(qkv, shape, view, step)
    sizes = (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
    heads = qkv.view(qkv.shape[0], sum(sizes), shape.head_dim)
    if shape.q_norm is not None or shape.k_norm is not None:
        parts = list(heads.split(sizes, 1))
        for place, weight in enumerate((shape.q_norm, shape.k_norm)):
            if weight is not None:
                parts[place] = rms_norm(parts[place], weight, shape.norm_eps, shape.norm_offset)
        heads = torch.cat(parts, 1)
    same, swapped = _rope_factors(shape, step)
    heads = torch.addcmul(heads * same, _swap_halves(heads, shape.cos_sin.shape[2]), swapped).to(qkv.dtype)
    if shape.n_kv_heads:
        keys_values = heads[:, shape.n_heads :].reshape(-1, shape.head_dim)
        _vectors(view.kv, shape.head_dim).index_copy_(0, _write_index(view, step), keys_values)
    return split_heads(heads.flatten(1), shape)


# --- attention --------------------------------------------------------------------------------------------------------

BATCHED_QUERIES = TREE_BITS
"""Rows with the same number of query tokens, up to this many, share a call. Longer rows get a separate call."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows computed by one call: each has `n` query tokens and, after padding, `keys` slots.

    tokens: indices of their query tokens. gather: int64 [2 * rows * Hkv * pages], runs of page_tokens * head_dim in the cache.
    mask: [rows, 1, n * G, keys], added to the scores.
    """

    tokens: torch.Tensor
    rows: int
    n: int
    keys: int
    gather: torch.Tensor
    mask: torch.Tensor


def _parts(view: KvView, step: StepInputs, group: int, dtype: torch.dtype, gathers: bool) -> list[_Part | slice]:
    """The attention calls of a step. A slice holds the query tokens of a row whose first token is in this step: its keys and values
    are all inputs of the step, so none are gathered. gathers: there are no slices, for _explicit_attention and for layers that
    read another layer's keys."""
    key = ("parts", view.table.data_ptr(), view.kv.shape[2], view.kv.stride(), view.window, gathers, group)
    if (cached := step.derived.get(key)) is not None:
        return cached  # type: ignore[no-any-return]
    starts, lengths = step.q_start.tolist(), step.length.tolist()
    batches: dict[int, list[int]] = {}
    parts: list[_Part | slice] = []
    for row in range(len(lengths)):
        n = starts[row + 1] - starts[row]
        if n == 0 or lengths[row] < n:
            continue
        window_covers_row = view.window is None or n <= view.window
        if n > 1 and n == lengths[row] and window_covers_row and step.ancestors is None and not gathers:
            parts.append(slice(starts[row], starts[row + 1]))
        elif n > BATCHED_QUERIES:
            parts.append(_gathered([row], n, view, step, (group, dtype)))
        else:
            batches.setdefault(n, []).append(row)
    parts += [_gathered(rows, n, view, step, (group, dtype)) for n, rows in batches.items()]
    step.derived[key] = parts
    return parts


def _gathered(rows: list[int], n: int, view: KvView, step: StepInputs, packed: tuple[int, torch.dtype]) -> _Part:
    """Page indices and mask of `rows` (indices in the step), for the pages that the window reaches."""
    group, dtype = packed
    place = torch.tensor(rows)
    tokens = (step.q_start[place].long().unsqueeze(1) + torch.arange(n)).flatten()
    length, device_row = step.length[place].long(), step.rows[place].long()
    first = torch.zeros_like(length)
    if view.window is not None and step.key_positions is None:
        # A draft's position is at most its slot. The smallest position of a row has the window that starts first.
        first_position = step.position[tokens].view(-1, n).min(1).values
        first = (first_position - view.window + 1).clamp(min=0) // view.page_tokens
    last = (length - 1).clamp(min=0) // view.page_tokens
    width = int((last - first).max()) + 1
    # Past its last page a row reads that page again, masked. It never reads a page of another row.
    pages = torch.minimum(first.unsqueeze(1) + torch.arange(width), last.unsqueeze(1))
    slots = (first.unsqueeze(1) + torch.arange(width)).unsqueeze(2) * view.page_tokens + torch.arange(view.page_tokens)
    seen = _seen(slots.flatten(1), tokens.view(-1, n), length, device_row, (view, step))
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
    mask = mask.repeat_interleave(group, 1).unsqueeze(1)
    return _Part(
        tokens,
        len(rows),
        n,
        width * view.page_tokens,
        _page_index(view, view.table[device_row.unsqueeze(1), pages].long()),
        mask,
    )


def _page_index(view: KvView, pages: torch.Tensor) -> torch.Tensor:
    """pages [rows, P] -> int64 [2 * rows * Hkv * P], in runs of page_tokens * head_dim from the start of view.kv."""
    page, kind, head, place, _ = view.kv.stride()
    run = view.page_tokens * place
    kinds = torch.arange(2).view(2, 1, 1, 1) * (kind // run)
    heads = torch.arange(view.kv.shape[2]).view(1, 1, -1, 1) * (head // run)
    return (pages.unsqueeze(1).unsqueeze(0) * (page // run) + kinds + heads).flatten()


def _seen(
    slots: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    row: torch.Tensor,
    context: tuple[KvView, StepInputs],
) -> torch.Tensor:
    """reference.row_mask for several rows: slots [rows, S], tokens [rows, n] -> bool [rows, n, S]."""
    view, step = context
    n = tokens.shape[1]
    among = slots.unsqueeze(1) - (length - n).view(-1, 1, 1)
    place = torch.arange(n).view(1, -1, 1)
    seen = among <= place
    if step.ancestors is not None:
        bit = (step.ancestors[tokens].unsqueeze(2) >> among.clamp(0, TREE_BITS - 1)) & 1
        seen = seen & ((among < 0) | (among >= TREE_BITS) | (among == place) | (bit == 1))
    if view.window is not None:
        key_positions = slots
        if step.key_positions is not None:
            inside = slots.clamp(max=step.key_positions.shape[1] - 1)
            key_positions = step.key_positions[row.unsqueeze(1), inside].long()
        positions = step.position[tokens].long()
        query_positions = torch.gather(positions, 1, among[:, 0].clamp(0, n - 1))
        key_positions = torch.where(among[:, 0] >= 0, query_positions, key_positions)
        seen = seen & (positions.unsqueeze(2) - key_positions.unsqueeze(1) < view.window)
    return seen


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of a row's first tokens among themselves: q [n, Hq, d] over k, v [n, Hkv, d] -> [n, Hq, d]."""
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def _explicit_attention(
    q: torch.Tensor, keys_values: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor, view: KvView, lse_needed: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of q [rows, Hkv, n, d] with capped scores or a log-sum-exp [rows, Hkv, n], which
    scaled_dot_product_attention does not support. Materializes all scores."""
    k, v = keys_values
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
    if view.softcap is None:
        scores.mul_(view.scale)
    else:
        scores.mul_(view.scale / view.softcap).tanh_().mul_(view.softcap)
    out = torch.matmul(torch.softmax(scores.add_(mask), -1), v.float()).to(q.dtype)
    if not lse_needed:
        return out, None
    lse = torch.logsumexp(scores, -1)
    # The softmax over no keys is NaN.
    return out.masked_fill_((lse == float("-inf")).unsqueeze(-1), 0.0), lse


def _packed(part: _Part, q: torch.Tensor, view: KvView, lse_needed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of a part's queries [rows * n, Hq, d] over its gathered pages: query heads of a group as queries."""
    _, heads, size = q.shape
    rows, n, kv_heads = part.rows, part.n, view.kv.shape[2]
    keys, values = (
        _vectors(view.kv, view.page_tokens * size)
        .index_select(0, part.gather)
        .view(2, rows, kv_heads, part.keys, size)
        .unbind(0)
    )
    queries = heads // kv_heads * n
    if n > 1:
        q = q.reshape(rows, n, kv_heads, -1, size).transpose(1, 2)
    q = q.reshape(rows, kv_heads, queries, size)
    lse = None
    if lse_needed or view.softcap is not None:
        out, lse = _explicit_attention(q, (keys, values), part.mask, view, lse_needed)
    else:
        out = F.scaled_dot_product_attention(q, keys, values, part.mask, scale=view.scale)
    if n > 1:
        out = out.view(rows, kv_heads, n, -1, size).transpose(1, 2)
        lse = None if lse is None else lse.view(rows, kv_heads, n, -1).transpose(1, 2)
    return out.reshape(rows * n, heads, size), None if lse is None else lse.reshape(rows * n, heads)


def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    view: KvView,
    step: StepInputs,
    lse_needed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See AttentionOps."""
    if view.scales is not None:
        return REFERENCE.attention.attend(q, k, v, view, step, lse_needed)
    gathers = lse_needed or view.softcap is not None or k is None
    parts = _parts(view, step, q.shape[1] // view.kv.shape[2], q.dtype, gathers)
    if len(parts) == 1 and isinstance(parts[0], _Part) and len(parts[0].tokens) == len(q):
        return _packed(parts[0], q, view, lse_needed)
    out = q.new_zeros(q.shape)
    lse = torch.full(q.shape[:2], float("-inf")) if lse_needed else None
    for part in parts:
        if isinstance(part, _Part):
            out[part.tokens], part_lse = _packed(part, q[part.tokens], view, lse_needed)
            if lse is not None and part_lse is not None:
                lse[part.tokens] = part_lse
        else:
            assert k is not None and v is not None
            out[part] = _causal(q[part], k[part], v[part], view.scale)
    return out, lse


# --- feed-forward and products ---------------------------------------------------------------------------------------


def activate(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """See reference.activate; the product is rounded twice in bf16."""
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Reorder a bf16 weight [out, in] into oneDNN's blocks, for any number of tokens (1.5 times F.linear at one)."""
    if weight.dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)  # type: ignore[no-any-return]


def linear(x: FloatInput, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See reference.linear."""
    x = apply_norm(x, rms_norm)
    if packed.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, packed, bias)


def linear_add(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """See reference.linear_add."""
    return linear(x, packed, bias).add_(stream)


def linear_activate(x: FloatInput, packed: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """See reference.linear_activate."""
    return activate(linear(x, packed, bias), kind)


_TOKENWISE = TokenwiseOps(rms_norm, norm_then_add(rms_norm), activate, norm_then_place(rms_norm))
_UNQUANTIZED = FloatOps(pack, linear, linear_add, linear_activate)
CPU = Ops(
    name="cpu",
    tokenwise=_TOKENWISE,
    attention=AttentionOps(qkv_write, attention, REFERENCE.attention.kv_formats),
    matmul=replace(
        REFERENCE.matmul,
        unquantized=_UNQUANTIZED,
        mixed=mixed_inputs(INT_REFERENCE, _UNQUANTIZED, _TOKENWISE, round_inliers),
        without_kernel=frozenset({"fp8", "fp8-weight", "fp8-block", "integer"}),
    ),
    adapters=host_adapters(activate),
)
