"""CPU operations of the compiled library (ops.native). Unsupported inputs go to ops.cpu.

A call has 2 to 4 us of overhead: shapes, pointers, one allocation, one foreign call. Pointers of a step's tensors
are gathered once per group of layers and cached in step.derived.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ridgeline.ops import cpu, cpu_invariant
from ridgeline.ops.columns import norm_then_place
from ridgeline.ops.native.arena import LANES, Arena
from ridgeline.ops.native.binding import GATES, KV_FORMATS, Kernels, Library, View, open_library
from ridgeline.ops.native.capture import CallListCapture
from ridgeline.ops.native.files import find_library, unsupported
from ridgeline.ops.native_adapters import adapters_of
from ridgeline.ops.native_chain import NativeChain
from ridgeline.ops.native_fp8 import fp8_ops
from ridgeline.ops.native_integer import block_ops, int_ops
from ridgeline.ops.native_layers import SPARSE, NativeLayers, outputs_of
from ridgeline.ops.native_recurrent import NativeRecurrent
from ridgeline.ops.native_rows import NativeRows
from ridgeline.ops.noise import Purpose
from ridgeline.ops.reference import int_unpack
from ridgeline.ops.sample import Limits
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import (
    AttentionOps,
    ChainParts,
    FloatInput,
    FloatOps,
    Fp8Matrix,
    Heads,
    IntOps,
    LayerParts,
    MatmulOps,
    Normed,
    Ops,
    Programs,
    QkvShape,
    RecurrentParts,
    RunChain,
    RunLayers,
    RunRecurrent,
    SamplerOps,
    TokenwiseOps,
    apply_norm,
    embedded,
    norm_then_add,
    split_heads,
)

PAD_INPUTS = {torch.bfloat16: 32, torch.float32: 1}
MAX_HEAD_DIM = 256
MOST_NONZERO = 0.6
"""Share of non-zero weights up to which pruned weights stay packed (benchmarks/pruned.py)."""


class NativeOps:
    """The operation table over one opened library. Its only mutable state is the weight arena. fixed: a token's sums are
    added in one order, independent of the other tokens of the call (batch-invariant)."""

    __slots__ = ("_arena", "_fixed", "_kernels", "_library", "_sample", "_view")

    def __init__(self, library: Library, arena: Arena, fixed: bool = False) -> None:
        self._fixed, self._view, self._library = fixed, partial(_view, fixed=fixed), library
        self._kernels, self._arena, self._sample = library.kernels, arena, library.sample

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool) -> torch.Tensor:
        """See reference.rms_norm."""
        kernels = self._kernels.get(x.dtype)
        if kernels is None or weight.dtype is not x.dtype:
            return cpu.rms_norm(x, weight, eps, offset)
        x = x if x.is_contiguous() else x.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        kernels.norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps, offset)
        return out

    def place(self, x: FloatInput, out: torch.Tensor) -> None:
        """See TokenwiseOps."""
        norm, source = (x, x.x) if isinstance(x, Normed) else (None, x)
        kernels, (rows, size) = self._kernels.get(source.dtype), source.shape
        weight = None if norm is None else norm.weight
        tensors = [tensor for tensor in (source, out, weight) if tensor is not None]
        if kernels is None or any(tensor.dtype is not out.dtype or tensor.stride(-1) != 1 for tensor in tensors):
            return norm_then_place(self.rms_norm)(x, out)
        kernels.place(
            source.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            source.stride(0),
            out.stride(0),
            0.0 if norm is None else norm.eps,
            norm is not None and norm.offset,
        )
        return None

    def embed(self, table: torch.Tensor, ids: torch.Tensor, scale: float) -> torch.Tensor:
        """See TokenwiseOps."""
        kernels = self._kernels.get(table.dtype)
        if kernels is None or ids.dtype is not torch.int32 or not (table.is_contiguous() and ids.is_contiguous()):
            return embedded(table, ids, scale)
        rows, size = ids.shape[0], table.shape[1]
        out = table.new_empty((rows, size))
        kernels.embed(table.data_ptr(), ids.data_ptr(), out.data_ptr(), rows, size, scale)
        return out

    def activate(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        """See reference.activate."""
        kernels = self._kernels.get(gate_up.dtype)
        if kernels is None:
            return cpu.activate(gate_up, kind)
        gate_up = gate_up if gate_up.is_contiguous() else gate_up.contiguous()
        rows, both = gate_up.shape
        out = gate_up.new_empty((rows, both // 2))
        kernels.activate(gate_up.data_ptr(), out.data_ptr(), rows, both // 2, GATES[kind])
        return out

    def qkv_write(self, qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs) -> Heads:
        """See reference.qkv_write; q, k and v are parts of one tensor."""
        kernels = self._of(qkv, view)
        if kernels is None:
            return cpu.qkv_write(qkv, shape, view, step)
        qkv = qkv if qkv.is_contiguous() else qkv.contiguous()
        out = torch.empty_like(qkv)
        kernels.qkv_write(
            self._view(view, step),
            qkv.data_ptr(),
            out.data_ptr(),
            view.kv.data_ptr(),
            shape.cos_sin.data_ptr(),
            0 if shape.q_norm is None else shape.q_norm.data_ptr(),
            0 if shape.k_norm is None else shape.k_norm.data_ptr(),
            shape.n_heads,
            shape.n_kv_heads,
            shape.cos_sin.shape[2],
            shape.norm_eps,
            shape.norm_offset,
        )
        return split_heads(out, shape)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        view: KvView,
        step: StepInputs,
        lse_needed: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See AttentionOps."""
        kernels = self._of(q, view)
        if kernels is None or not _known_size(q.shape[2]):
            return (cpu_invariant if self._fixed else cpu).attention(q, k, v, view, step, lse_needed)
        tokens, heads, dim = q.shape
        stride, *inner = q.stride()
        if inner != [dim, 1]:
            q, stride = q.contiguous(), heads * dim
        out = q.new_empty((tokens, heads, dim))
        lse = torch.empty((tokens, heads)) if lse_needed else None
        kernels.attention(
            self._view(view, step),
            q.data_ptr(),
            out.data_ptr(),
            view.kv.data_ptr(),
            heads,
            stride,
            0 if lse is None else lse.data_ptr(),
        )
        return out, lse

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [out, in] -> a tensor of `out` rows whose memory holds blocks of 16 outputs; see linear.cpp."""
        kernels = self._kernels.get(weight.dtype)
        if weight.device.type != "cpu":  # the meta device: only sizes are needed
            return weight
        if kernels is None:
            return cpu.pack(weight)
        outputs, inputs = weight.shape
        pad = PAD_INPUTS[weight.dtype]
        packed = self._arena.take(-(-outputs // LANES) * LANES, -(-inputs // pad) * pad, weight.dtype)
        weight = weight.contiguous()
        kernels.pack(weight.data_ptr(), packed.data_ptr(), outputs, inputs)
        return packed[:outputs]

    def memory(self, packed: torch.Tensor) -> torch.Tensor:
        """See FloatOps."""
        if packed.dtype not in self._kernels or packed.device.type != "cpu":
            return packed
        outputs, inputs = packed.shape
        return packed.as_strided((-(-outputs // LANES) * LANES, inputs), packed.stride())

    def pack_pruned(self, weight: torch.Tensor) -> torch.Tensor:
        """As pack, or in the layout of native/sparse.h if enough bfloat16 weights are 0. That is a tensor of dtype SPARSE, whose
        rows have no meaning of their own."""
        if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16 or not self._library.expands:
            return self.pack(weight)
        if int(weight.count_nonzero()) > MOST_NONZERO * weight.numel():
            return self.pack(weight)
        return self.pack_sparse(weight)

    def pack_sparse(self, weight: torch.Tensor) -> torch.Tensor:
        """weight bfloat16 [out, in] in the layout of native/sparse.h; see pack_pruned."""
        (outputs, inputs), weight = weight.shape, weight.contiguous()
        size = self._library.sparse_pack(weight.data_ptr(), 0, outputs, inputs)
        packed = self._arena.take(outputs, -(-size // outputs), SPARSE)
        self._library.sparse_pack(weight.data_ptr(), packed.data_ptr(), outputs, inputs)
        return packed

    def linear(self, x: FloatInput, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See reference.linear."""
        return self._product(x, packed, bias)

    def linear_add(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, stream: torch.Tensor
    ) -> torch.Tensor:
        """See reference.linear_add. Writes into the stream's memory if that is contiguous and of x's dtype."""
        if stream.dtype is not x.dtype or not stream.is_contiguous():
            return self.linear(x, packed, bias).add_(stream)
        return self._product(x, packed, bias, stream)

    def linear_activate(
        self, x: FloatInput, packed: torch.Tensor, bias: torch.Tensor | None, kind: str
    ) -> torch.Tensor:
        """See reference.linear_activate. Fuses the activation if each half consists of whole blocks of outputs."""
        if packed.shape[0] % (2 * LANES):
            return self.activate(self.linear(x, packed, bias), kind)
        return self._product(x, packed, bias, None, kind)

    def _product(
        self,
        x: FloatInput,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        stream: torch.Tensor | None = None,
        kind: str | None = None,
    ) -> torch.Tensor:
        """Run the norm before a product, the product and its epilogue in one call."""
        norm = x if isinstance(x, Normed) else None
        source = x.x if isinstance(x, Normed) else x
        kernels = self._kernels.get(source.dtype)
        if kernels is None or (norm is not None and norm.weight.dtype is not source.dtype):
            return self._unfused(apply_norm(x, self.rms_norm), packed, bias, stream, kind)
        source = source if source.is_contiguous() else source.contiguous()
        rows, inputs = source.shape
        outputs = packed.shape[0]
        out = source.new_empty((rows, outputs if kind is None else outputs // 2)) if stream is None else stream
        (self._library.sparse_linear if packed.dtype is SPARSE else kernels.linear)(
            source.data_ptr(),
            packed.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if stream is None else stream.data_ptr(),
            out.data_ptr(),
            rows,
            outputs,
            inputs,
            0 if kind is None else GATES[kind],
            0 if norm is None else norm.weight.data_ptr(),
            0.0 if norm is None else norm.eps,
            norm is not None and norm.offset,
            self._fixed,
        )
        return out

    def _unfused(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        stream: torch.Tensor | None,
        kind: str | None,
    ) -> torch.Tensor:
        if x.dtype in self._kernels:
            return self._product(x, packed, bias, stream, kind)
        if stream is not None:
            return cpu.linear_add(x, packed, bias, stream)
        return cpu.linear(x, packed, bias) if kind is None else cpu.linear_activate(x, packed, bias, kind)

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        key: torch.Tensor,
        position: torch.Tensor,
        purpose: Purpose = Purpose.TOKEN,
        limits: Limits | None = None,
    ) -> torch.Tensor:
        """See ops.sample.sample."""
        return self._drawn(logits, (temperature, key, position), purpose, limits, None)

    def sample_among(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        temperature: torch.Tensor,
        key: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor:
        """See ops.sample.sample_among."""
        return self._drawn(logits, (temperature, key, position), Purpose.TOKEN, None, ids)

    def _drawn(
        self,
        logits: torch.Tensor,
        rows_noise: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        purpose: Purpose,
        limits: Limits | None,
        ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """rows_noise: temperature, key, position."""
        temperature, key, position = rows_noise
        logits = logits.float()
        if logits.stride(1) != 1 or key.stride(1) != 1:
            logits, key = logits.contiguous(), key.contiguous()
        rows, vocab = logits.shape
        tokens = torch.empty(rows, dtype=torch.int32)
        limit_tensors = (None, None, None) if limits is None else (limits.top_k, limits.top_p, limits.min_p)
        tensors = (logits, temperature, key, position, *limit_tensors)
        strides = (ctypes.c_int64 * len(tensors))(*(0 if tensor is None else tensor.stride(0) for tensor in tensors))
        pointers = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        names = 0 if ids is None else ids.data_ptr()
        self._sample(*pointers, tokens.data_ptr(), rows, vocab, strides, int(purpose), names)
        return tokens

    def layers(self, parts: Sequence[LayerParts], run: RunLayers) -> RunLayers:
        """See Programs. All layers run in one foreign call if the kernels support their dtypes and sizes."""
        kernels = self._kernels.get(parts[0].attention_norm.dtype)
        if kernels is None or not all(_known(layer, parts[0].attention_norm.dtype) for layer in parts):
            return run
        return NativeLayers(parts, self._library, self._view, run)

    def chain(self, parts: ChainParts, otherwise: RunChain) -> RunChain:
        """See Programs."""
        kernels, dtype = self._kernels.get(parts.embedding.dtype), parts.embedding.dtype
        if (
            kernels is None
            or parts.embedding.device.type != "cpu"
            or parts.head.dtype is not dtype
            or not all(_known(layer, dtype) for layer in parts.layers)
        ):
            return otherwise
        return NativeChain(parts, kernels, self._view, self._fixed)

    def recurrent(self, integer: IntOps, parts: RecurrentParts, otherwise: Callable[[], RunRecurrent]) -> RunRecurrent:
        """See Programs. integer: the library's operations, which pack the matrices."""
        kernels = self._kernels.get(parts.embedding.dtype)
        known = parts.matrices["gate_up"].out % (2 * LANES) == 0 and _known_size(parts.head_dim)
        if kernels is None or not known or parts.embedding.device.type != "cpu":
            return otherwise()
        packed = {
            name: integer.pack(int_unpack(matrix), matrix.scales.float(), None, matrix.bits, matrix.group)
            for name, matrix in parts.matrices.items()
        }
        return NativeRecurrent(replace(parts, matrices=packed), kernels, self._view)

    def _of(self, x: torch.Tensor, view: KvView) -> Kernels | None:
        return self._kernels.get(x.dtype) if view.kv.dtype is x.dtype or view.scales is not None else None


def _known(parts: LayerParts, dtype: torch.dtype) -> bool:
    """Whether the kernels can run this layer: loaded on the CPU in one number format, with sizes that they take."""
    shape, matrices = parts.shape, (parts.qkv, parts.out, parts.gate_up, parts.down)
    if any(isinstance(matrix.packed, Fp8Matrix) for matrix in matrices) or parts.attention_post_norm is not None:
        return False
    tensors = [parts.attention_norm, parts.feed_forward_norm, shape.q_norm, shape.k_norm]
    tensors += [matrix.bias for matrix in matrices]
    tensors += [
        matrix.packed
        for matrix in matrices
        if isinstance(matrix.packed, torch.Tensor) and matrix.packed.dtype is not SPARSE
    ]
    same = all(tensor.dtype is dtype and tensor.device.type == "cpu" for tensor in tensors if tensor is not None)
    return same and _known_size(shape.head_dim) and outputs_of(parts.gate_up) % (2 * LANES) == 0


def _known_size(head_dim: int) -> bool:
    return head_dim <= MAX_HEAD_DIM and head_dim % 2 == 0


def _view(view: KvView, step: StepInputs, fixed: bool) -> ctypes.c_void_p:
    """Pointer to the kernels' struct of `view` and `step`, without the cache. Layers with equal views share it."""
    kv = view.kv
    identity = (view.table.data_ptr(), view.slots.data_ptr(), view.window, view.softcap, view.scale)
    key = ("native", identity, kv.shape, kv.stride(), view.format and view.format.name)
    if (pointer := step.derived.get(key)) is None:
        step.derived[key] = pointer = _gather(view, step, fixed)
    return pointer  # type: ignore[no-any-return]


def _gather(view: KvView, step: StepInputs, fixed: bool) -> ctypes.c_void_p:
    """Build that struct. The returned pointer keeps it and its tensors alive."""
    tensors = (view.slots, step.rows, step.q_start, step.length, step.position)
    slots, *step_tensors = (tensor.contiguous() for tensor in tensors)
    pages = view.table if view.table.stride(1) == 1 else view.table.contiguous()
    tree = None if step.ancestors is None else step.ancestors.contiguous()
    key_positions = None if step.key_positions is None else step.key_positions.contiguous()
    page, kind, head, place, _ = view.kv.stride()
    number_format = 0 if view.format is None or view.scales is None else KV_FORMATS[view.format.name]
    struct = View(
        pages.data_ptr(),
        slots.data_ptr(),
        *(tensor.data_ptr() for tensor in step_tensors),
        None if tree is None else tree.data_ptr(),
        None if key_positions is None else key_positions.data_ptr(),
        pages.stride(0),
        0 if key_positions is None else key_positions.stride(0),
        step.rows.shape[0],
        step.position.shape[0],
        page,
        kind,
        head,
        place,
        view.page_tokens,
        view.kv.shape[2],
        view.kv.shape[4] * (2 if view.bits == 4 else 1),
        -1 if view.window is None else view.window,
        view.softcap or 0.0,
        view.scale,
        fixed,
        number_format,
        0 if view.scales is None else view.scales.data_ptr() - view.kv.data_ptr(),
    )
    pointer = ctypes.c_void_p(ctypes.addressof(struct))
    pointer.kept = struct, pages, slots, *step_tensors, tree, key_positions  # type: ignore[attr-defined]
    return pointer


def load(folder: Path | None = None, fixed: bool = False) -> tuple[Ops | None, str]:
    """Load the library of this CPU: (operations, instruction set), or (None, reason and remedy). fixed: batch-invariant."""
    if (reason := unsupported()) is not None:
        return None, reason
    if (path := find_library(folder)) is None:
        return None, "not built: run `python -m ridgeline.ops.native.build` for faster CPU operations"
    try:
        library = open_library(path)
    except OSError as error:
        return None, f"cannot open {path}: {error}; run `python -m ridgeline.ops.native.build` again"
    return _table(library, fixed), library.instructions


def _table(library: Library, fixed: bool) -> Ops:
    arena = Arena(library)
    ops, rows = NativeOps(library, arena, fixed), NativeRows(library)
    tokenwise = TokenwiseOps(ops.rms_norm, norm_then_add(ops.rms_norm), ops.activate, ops.place, ops.embed)
    unquantized = FloatOps(ops.pack, ops.linear, ops.linear_add, ops.linear_activate, ops.pack_pruned, ops.memory)
    integers = partial(int_ops, library, arena, tokenwise, unquantized)
    integer = integers()
    return Ops(
        name="native, batch-invariant" if fixed else "native",
        tokenwise=tokenwise,
        attention=AttentionOps(ops.qkv_write, ops.attention, frozenset(KV_FORMATS)),
        matmul=MatmulOps(
            unquantized=unquantized,
            fp8=fp8_ops(library, arena, ops.activate, fixed=fixed, weight_only=False),
            fp8_weight=fp8_ops(library, arena, ops.activate, fixed=fixed, weight_only=True),
            integer=integer,
            w8a8=integers("rounded"),
            mixed=integers("token-outliers" if fixed else "batch-outliers"),
            blocks=block_ops(library, arena, tokenwise, unquantized),
        ),
        adapters=partial(adapters_of, library, Arena(library), ops.activate),
        sampler=SamplerOps(
            sample=ops.sample,
            sample_among=ops.sample_among,
            draw=rows.draw,
            gather=rows.gather,
            advance=rows.advance,
            verify=rows.verify,
            keep=rows.keep,
            last=rows.last,
        ),
        programs=Programs(
            layers=ops.layers,
            chain=ops.chain,
            recurrent=partial(ops.recurrent, integer),
            prunes_drafts=True,
        ),
        capture=CallListCapture(library),
    )
