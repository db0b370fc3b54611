"""The operations of the compiled library (ops.native) on a CPU; what it does not know goes to ops.cpu.

A call costs 2 to 4 us beside its work: shapes, pointers, one allocation, one foreign call. Pointers of a step's tensors
are gathered once per group of layers and kept in step.derived.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ridgeline.ops import cpu
from ridgeline.ops.native.binding import Kernels, Library, View, library_path, open_library, unsupported
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Ops, QkvShape

LANES = 16
PAD_INPUTS = {torch.bfloat16: 32, torch.float32: 1}
MAX_HEAD_DIM = 256
CACHE_LINE = 64
HUGE_PAGE = 2 << 20
CHUNK = 16 * HUGE_PAGE


class Arena:
    """Room for packed weights on pages of 2 MiB, one behind the other: reading them in order is about 10% faster so.

    Each weight is a part of a chunk and keeps it alive; nothing is given back one by one. Untouched room costs nothing.
    """

    __slots__ = ("_library", "_room", "_used")

    def __init__(self, library: Library) -> None:
        self._library, self._room, self._used = library, torch.empty(0, dtype=torch.uint8), 0

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns], not initialized."""
        size = rows * columns * dtype.itemsize
        if self._used + size > self._room.numel():
            chunk = max(CHUNK, -(-size // HUGE_PAGE) * HUGE_PAGE)
            memory = torch.empty(chunk + HUGE_PAGE, dtype=torch.uint8)
            skip = -memory.data_ptr() % HUGE_PAGE
            self._room, self._used = memory[skip : skip + chunk], 0
            self._library.huge_pages(self._room.data_ptr(), chunk)
        part = self._room[self._used : self._used + size]
        self._used += -(-size // CACHE_LINE) * CACHE_LINE
        return part.view(dtype).view(rows, columns)


class NativeOps:
    """The table's functions over one opened library; nothing but the room for weights changes."""

    __slots__ = ("_arena", "_kernels")

    def __init__(self, library: Library) -> None:
        self._kernels, self._arena = library.kernels, Arena(library)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool) -> torch.Tensor:
        """See reference.rms_norm."""
        kernels = self._kernels.get(x.dtype)
        if kernels is None or weight.dtype is not x.dtype:
            return cpu.rms_norm(x, weight, eps, offset)
        x = x if x.is_contiguous() else x.contiguous()
        out, size = torch.empty_like(x), x.shape[-1]
        kernels.norm(x.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr(), x.numel() // size, size, eps, offset)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See reference.add_rms_norm."""
        kernels = self._kernels.get(x.dtype)
        if kernels is None or weight.dtype is not x.dtype or residual.dtype is not x.dtype:
            return cpu.add_rms_norm(x, residual, weight, eps, offset)
        x = x if x.is_contiguous() else x.contiguous()
        residual = residual if residual.is_contiguous() else residual.contiguous()
        out, total, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
        kernels.norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            total.data_ptr(),
            out.data_ptr(),
            x.numel() // size,
            size,
            eps,
            offset,
        )
        return out, total

    def activate(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        """See reference.activate."""
        kernels = self._kernels.get(gate_up.dtype)
        if kernels is None:
            return cpu.activate(gate_up, kind)
        gate_up = gate_up if gate_up.is_contiguous() else gate_up.contiguous()
        rows, both = gate_up.shape
        out = gate_up.new_empty((rows, both // 2))
        kernels.activate(gate_up.data_ptr(), out.data_ptr(), rows, both // 2, kind != "silu")
        return out

    def qkv_write(
        self, qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See reference.qkv_write; q, k and v are parts of one tensor."""
        kernels = self._of(qkv, view)
        if kernels is None:
            return cpu.qkv_write(qkv, shape, view, step)
        qkv = qkv if qkv.is_contiguous() else qkv.contiguous()
        tokens, dim = qkv.shape[0], shape.head_dim
        out = torch.empty_like(qkv)
        kernels.qkv_write(
            _view(view, step),
            qkv.data_ptr(),
            out.data_ptr(),
            view.kv.data_ptr(),
            shape.cos_sin.data_ptr(),
            0 if shape.q_norm is None else shape.q_norm.data_ptr(),
            0 if shape.k_norm is None else shape.k_norm.data_ptr(),
            shape.n_heads,
            shape.cos_sin.shape[2],
            shape.norm_eps,
            shape.norm_offset,
        )
        sizes = (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
        q, k, v = out.view(tokens, -1, dim).split_with_sizes(sizes, 1)
        return q, k, v

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: KvView, step: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See Ops. No log-sum-exp: on a CPU nothing is merged."""
        kernels = self._of(q, view)
        if kernels is None or view.kv.shape[4] > MAX_HEAD_DIM or view.kv.shape[4] % 2:
            return cpu.attention(q, k, v, view, step)
        tokens, heads, dim = q.shape
        stride, *inner = q.stride()
        if inner != [dim, 1]:
            q, stride = q.contiguous(), heads * dim
        out = q.new_empty((tokens, heads, dim))
        kernels.attention(_view(view, step), q.data_ptr(), out.data_ptr(), view.kv.data_ptr(), heads, stride)
        return out, None

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [out, in] -> a tensor of `out` rows whose memory holds blocks of 16 outputs; see linear.cpp."""
        kernels = self._kernels.get(weight.dtype)
        if weight.device.type != "cpu":  # the meta device: a model that is only measured
            return weight
        if kernels is None:
            return cpu.pack(weight)
        outputs, inputs = weight.shape
        pad = PAD_INPUTS[weight.dtype]
        packed = self._arena.take(-(-outputs // LANES) * LANES, -(-inputs // pad) * pad, weight.dtype)
        weight = weight.contiguous()
        kernels.pack(weight.data_ptr(), packed.data_ptr(), outputs, inputs)
        return packed[:outputs]

    def linear(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        kernels = self._kernels.get(x.dtype)
        if kernels is None:
            return cpu.linear(x, packed, bias)
        x = x if x.is_contiguous() else x.contiguous()
        rows, inputs = x.shape
        outputs = packed.shape[0]
        out = x.new_empty((rows, outputs))
        kernels.linear(
            x.data_ptr(),
            packed.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            outputs,
            inputs,
        )
        return out

    def _of(self, x: torch.Tensor, view: KvView) -> Kernels | None:
        return self._kernels.get(x.dtype) if view.kv.dtype is x.dtype else None


def _view(view: KvView, step: StepInputs) -> ctypes.c_void_p:
    """Pointer to what the kernels need of `view` and `step` beside the cache itself, the same for layers alike."""
    kv = view.kv
    told = (view.table.data_ptr(), view.slots.data_ptr(), view.window, view.softcap, view.scale)
    key = ("native", told, kv.shape, kv.stride())
    if (found := step.derived.get(key)) is not None:
        return found[0]  # type: ignore[no-any-return]
    step.derived[key] = found = _gather(view, step)
    return found[0]


def _gather(view: KvView, step: StepInputs) -> tuple[ctypes.c_void_p, View, tuple[torch.Tensor, ...]]:
    """(pointer, what it points to, tensors that must live as long)."""
    told = (view.slots, step.rows, step.q_start, step.length, step.position)
    slots, *own = (one.contiguous() for one in told)
    pages = view.table if view.table.stride(1) == 1 else view.table.contiguous()
    tree = None if step.ancestors is None else step.ancestors.contiguous()
    said = None if step.key_positions is None else step.key_positions.contiguous()
    page, kind, head, place, _ = view.kv.stride()
    struct = View(
        pages.data_ptr(),
        slots.data_ptr(),
        *(one.data_ptr() for one in own),
        None if tree is None else tree.data_ptr(),
        None if said is None else said.data_ptr(),
        pages.stride(0),
        0 if said is None else said.stride(0),
        step.rows.shape[0],
        step.position.shape[0],
        page,
        kind,
        head,
        place,
        view.page_tokens,
        view.kv.shape[2],
        view.kv.shape[4],
        -1 if view.window is None else view.window,
        view.softcap or 0.0,
        view.scale,
    )
    kept = tuple(one for one in (pages, slots, *own, tree, said) if one is not None)
    return ctypes.c_void_p(ctypes.addressof(struct)), struct, kept


def load(folder: Path | None = None) -> tuple[Ops | None, str]:
    """(operations, what they are) where a library for this CPU was built, else (None, why not and what to do)."""
    if (reason := unsupported()) is not None:
        return None, reason
    path = library_path(folder)
    if not path.exists():
        return None, "not built: run `python -m ridgeline.ops.native.build` for faster CPU operations"
    try:
        library = open_library(path)
    except OSError as error:
        return None, f"{path} cannot be opened: {error}"
    ops = NativeOps(library)
    table = Ops(
        name="native",
        rms_norm=ops.rms_norm,
        add_rms_norm=ops.add_rms_norm,
        qkv_write=ops.qkv_write,
        attention=ops.attention,
        activate=ops.activate,
        pack=ops.pack,
        linear=ops.linear,
    )
    return table, "AVX-512 and AMX tiles" if library.tiles else "AVX-512"
