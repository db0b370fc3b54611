"""The functions of the compiled library with their argument types."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

GATES = {"silu": 1, "gelu_tanh": 2}
KV_FORMATS = {"fp8": 1, "int8": 2, "int4": 3}
"""Format in view.h by name. 0: the cache is in the model's dtype."""
TYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


class View(ctypes.Structure):
    """Mirror of View in view.h: one layer's part of the cache, and the step's rows."""

    _fields_ = (
        *((name, c_void_p) for name in ("table", "slots", "rows", "q_start", "length", "position", "ancestors")),
        ("key_positions", c_void_p),
        *((name, c_int64) for name in ("table_stride", "key_positions_stride", "n_rows", "n_tokens")),
        *((name, c_int64) for name in ("page_stride", "kind_stride", "head_stride", "place_stride", "page_tokens")),
        *((name, c_int64) for name in ("kv_heads", "dim", "window")),
        ("softcap", c_float),
        ("scale", c_float),
        *((name, c_int64) for name in ("fixed", "format", "to_scales")),
    )


class IntWeights(ctypes.Structure):
    """Mirror of IntWeights in integer.h. bits 0: the matrix is in floating point."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "zeros")),
        *((name, c_int64) for name in ("bits", "group", "inputs")),
        *((name, c_void_p) for name in ("kept", "kept_columns")),
        *((name, c_int64) for name in ("n_kept", "scaling")),
        ("extra", c_void_p),
        ("blocks", c_int64),
        ("more", c_void_p),
    )


class MatrixOf(ctypes.Structure):
    """Mirror of Matrix in layers.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("packed", "bias", "sparse")),
        ("integer", IntWeights),
        ("adapters", c_void_p),
    )


class AdaptersOf(ctypes.Structure):
    """Mirror of Adapters in adapters.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("a", "b", "ranks", "ends")),
        *((name, c_int64) for name in ("a_stride", "b_stride", "inputs", "parts", "most_rank")),
    )


class Layer(ctypes.Structure):
    """Mirror of Layer in layers.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "feed_forward_norm", "q_norm", "k_norm")),
        *((name, MatrixOf) for name in ("qkv", "out", "gate_up", "down")),
        ("cos_sin", c_void_p),
        *((name, c_int64) for name in ("heads", "kv_heads", "half", "d_ff", "gate")),
        ("eps", c_float),
        ("offset", c_float),
    )


Call = tuple["Foreign", tuple[Any, ...]]
"""A function of the library and its arguments. They keep alive the memory that their pointers refer to."""


class CallLog:
    """calls: the library's calls since recording began, in order; None if nothing is recorded."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: list[Call] | None = None


class Foreign:
    """A function of the library that steps call. It appends its calls to the library's log."""

    __slots__ = ("_by_words", "_function", "_log")

    def __init__(self, function: Any, by_words: int, log: CallLog) -> None:
        """by_words: address of the function that makes a call from 64-bit words (replay.h)."""
        self._function, self._by_words, self._log = function, by_words, log

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)
        if self._log.calls is not None:
            self._log.calls.append((self, arguments))

    def words(self, arguments: tuple[Any, ...]) -> list[int]:
        """A call in the format of replay.cpp."""
        kinds = zip(self._function.argtypes, arguments, strict=True)
        return [self._by_words, len(arguments), *(_word(kind, value) for kind, value in kinds)]


def _word(kind: Any, value: Any) -> int:
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("f", value), "little")
    value = getattr(value, "_obj", value)  # the object behind byref
    if isinstance(value, ctypes.c_void_p):
        value = value.value
    if isinstance(value, bytes):
        value = ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value
    return int(value or 0) if value is None or isinstance(value, int) else ctypes.addressof(value)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The library's functions for one element type. Pointers are integers, sizes count elements. "or 0" marks optional pointers.

    linear(x, packed, bias or 0, added or 0, out, m, n, k, gate or 0, norm or 0, eps, offset, fixed): see problem.h.
    pack(weight, packed, n, k). embed(table, ids, out, rows, n, scale). norm(x, weight, out, rows, n, eps, offset).
    place(x, weight or 0, out, rows, n, x_stride, out_stride, eps, offset). activate(gate_up, out, rows, n, gate).
    qkv_write(view, qkv, out, cache, cos_sin, q_norm or 0, k_norm or 0, heads, kv_heads, half, eps, offset).
    attention(view, q, out, cache, heads, q_stride, lse or 0).
    layers(layers, n, views, caches, stream, tokens, d_model, groups or 0). adapt(groups, adapters, x, y): see adapters.h.
    chain(arguments): see chain.cpp. recurrent(arguments): recurrent.cpp. draw(arguments): sample.cpp.
    fp8_linear(x, packed, scales, bias or 0, added or 0, out, m, n, k, norm or 0, eps, offset, fixed, weight_only, group or 0): see
    fp8.cpp.
    int_linear(x, weights, bias or 0, added or 0, out, m, n, k, gate or 0, norm or 0, eps, offset): see integer.h.
    """

    linear: Any
    pack: Any
    embed: Any
    norm: Any
    place: Any
    activate: Any
    qkv_write: Any
    attention: Any
    layers: Any
    adapt: Any
    fp8_linear: Any
    int_linear: Any
    chain: Any
    recurrent: Any
    draw: Any


_PACK: tuple[Any, ...] = (*[c_void_p] * 2, *[c_int64] * 2)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "linear": (*[c_void_p] * 5, *[c_int64] * 3, c_int, c_void_p, c_float, c_float, c_int),
    "embed": (*[c_void_p] * 3, *[c_int64] * 2, c_float),
    "norm": (*[c_void_p] * 3, *[c_int64] * 2, c_float, c_float),
    "place": (*[c_void_p] * 3, *[c_int64] * 4, c_float, c_float),
    "activate": (*[c_void_p] * 2, *[c_int64] * 2, c_int),
    "qkv_write": (*[c_void_p] * 7, *[c_int64] * 3, c_float, c_float),
    "attention": (*[c_void_p] * 4, *[c_int64] * 2, c_void_p),
    "layers": (c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 2, c_void_p),
    "adapt": (c_void_p,) * 4,
    "chain": (ctypes.c_char_p,),
    "recurrent": (ctypes.c_char_p,),
    "draw": (ctypes.c_char_p,),
    "fp8_linear": (*[c_void_p] * 6, *[c_int64] * 3, c_void_p, c_float, c_float, c_int, c_int, c_int64),
    "int_linear": (*[c_void_p] * 5, *[c_int64] * 3, c_int, c_void_p, c_float, c_float),
}
"""Argument types of the functions that steps call."""
# These take microseconds and keep the GIL, because releasing and acquiring it would cost more.
_BRIEF = frozenset({"embed", "norm", "place", "activate", "qkv_write"})


@dataclass(frozen=True, slots=True)
class Library:
    """An opened library: kernels by element type, its instruction set and its compiler.

    sample(logits, temperature, key, position, top_k, top_p, min_p or three times 0, tokens, n, vocab, strides of the first seven,
    purpose, ids or 0): see sample.cpp.
    fp8_pack(values, packed, n, k): see fp8.cpp. int_pack(codes, packed, n, k, bits): see integer.cpp.
    sparse_pack(weight, packed or 0, n, k) -> bytes. sparse_linear: as linear, in bfloat16. expands: whether it pays (sparse.cpp).
    rows_gather, rows_advance, rows_verify, rows_keep, rows_last(arguments): see rows.cpp.
    adapter_groups(adapters, stride, rows, row_of, selected or 0, n, slots, words): see adapters.cpp.
    huge_pages(address, bytes): requests pages of 2 MiB; it is optional.
    replay(words, calls): makes recorded calls, see replay.cpp. replay_in: address of the function of one pointer that does.
    log: records calls of all functions that steps call.
    """

    kernels: dict[torch.dtype, Kernels]
    huge_pages: Any
    sample: Any
    fp8_pack: Any
    int_pack: Any
    sparse_pack: Any
    sparse_linear: Any
    expands: bool
    rows_gather: Any
    rows_advance: Any
    rows_verify: Any
    rows_keep: Any
    rows_last: Any
    adapter_groups: Any
    replay: Any
    replay_in: int
    log: CallLog
    instructions: str
    compiler: str


def open_library(path: Path) -> Library:
    """Open a library that `build` made. Raises OSError if it cannot be loaded.

    It links to libgomp, which torch has loaded already. Both share one thread pool, whose size torch.set_num_threads sets.
    """
    library, brief, log = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path)), CallLog()

    def foreign(name: str, arguments: tuple[Any, ...], *, keeps_lock: bool) -> Foreign:
        function = getattr(brief if keeps_lock else library, f"rl_{name}")
        function.argtypes, function.restype = arguments, None
        by_words = ctypes.cast(library[f"rl_{name}_words"], c_void_p).value
        return Foreign(function, by_words or 0, log)

    kernels = {}
    for dtype, suffix in TYPES.items():
        pack = library[f"rl_pack_{suffix}"]
        pack.argtypes, pack.restype = _PACK, None
        steps = {
            name: foreign(f"{name}_{suffix}", arguments, keeps_lock=name in _BRIEF)
            for name, arguments in _ARGUMENTS.items()
        }
        kernels[dtype] = Kernels(pack=pack, **steps)
    library.rl_huge_pages.argtypes = (c_void_p, c_int64)
    for text_function in (library.rl_instructions, library.rl_compiler):
        text_function.restype = ctypes.c_char_p
    library.rl_fp8_pack.argtypes = (*[c_void_p] * 2, *[c_int64] * 2)
    library.rl_int_pack.argtypes = (*[c_void_p] * 2, *[c_int64] * 3)
    library.rl_sparse_pack.argtypes, library.rl_sparse_pack.restype = (*[c_void_p] * 2, *[c_int64] * 2), c_int64
    library.rl_replay.argtypes, library.rl_replay.restype = (c_void_p, c_int64), None
    rows = (f"rows_{name}" for name in ("gather", "advance", "verify", "keep", "last"))
    return Library(
        kernels=kernels,
        huge_pages=library.rl_huge_pages,
        sample=foreign("sample", (*[c_void_p] * 8, *[c_int64] * 2, c_void_p, c_int, c_void_p), keeps_lock=False),
        fp8_pack=library.rl_fp8_pack,
        int_pack=library.rl_int_pack,
        sparse_pack=library.rl_sparse_pack,
        sparse_linear=foreign("sparse_linear", _ARGUMENTS["linear"], keeps_lock=False),
        expands=bool(library.rl_expands()),
        adapter_groups=foreign(
            "adapter_groups", (c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 2, c_void_p), keeps_lock=True
        ),
        replay=library.rl_replay,
        replay_in=ctypes.cast(library.rl_replay_in, c_void_p).value or 0,
        log=log,
        instructions=library.rl_instructions().decode(),
        compiler=library.rl_compiler().decode(),
        **{name: foreign(name, (ctypes.c_char_p,), keeps_lock=True) for name in rows},
    )
