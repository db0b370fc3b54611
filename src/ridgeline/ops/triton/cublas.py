"""Products of many tokens by cuBLASLt, through its C interface, where torch's way to it takes what we do not want.

Of 8 bits: torch takes no summand but a bias in such a product, so that a kernel of its own adds what comes out: it reads two
tensors and writes one. cuBLASLt joins the stream while it stores (beta = 1): half of that traffic, and no launch.
Of 16 bits: torch takes what the heuristic names first, the fastest at a clock that a card at its power limit does not hold. There
the one that takes less energy is faster, and it stands further down in the same list.
Neither needs memory of its own: torch's take four bytes, which a fill before each product sets to zero. Numbers are those of
cublasLt.h, of 13.

cuBLAS counts in columns: a tensor [rows, k] is to it a matrix k x rows, so out^T [n, T] = W x^T, and W is its A.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache

import torch
import torch.nn.functional as F

from ridgeline.ops.table import Fp8Matrix, Scaled
from ridgeline.ops.triton.launch import is_hopper
from ridgeline.ops.triton.shapes import PROCESSORS

VERSIONS = range(130000, 140000)
"""Of cublasLt: it knows a scale for each token, and its numbers mean what they mean here."""
# cudaDataType_t, and CUBLAS_COMPUTE_32F.
FLOAT32, SUMS = 0, 68
TYPES = {torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
# cublasLtMatmulDescAttributes_t; a scale for each row (cublasLtMatmulMatrixScale_t); cublasLtMatrixLayoutAttribute_t.
TRANSPOSED, SCALES, FAST, MODES, EACH_ROW, COLUMNS = 3, (17, 18), 25, (31, 32), 3, 3
# cublasLtMatmulAlgoConfigAttributes_t, cublasLtMatmulTile_t.
TILE, TILE_176_128 = 1, 201

TILE_OUTPUTS, TILE_TOKENS = 176, 256
"""Of the thrifty kernel: tiles of 176 x 128, two of which share what they read of the weight. By its name their warps do not
cooperate on one tile, so probably one is stored while the next is multiplied. Gate and up of an 8B take 3 % less than by torch's
choice at 700 W, 0.5 to 1 % less than by the next of those listed; of 929 configurations that run none was faster on a cold card,
and none of the best dozen cheaper at the limit."""
LISTED, MOST_LISTED = 8192, 8
"""Tokens for which the heuristic lists it, whatever the weight, and how many kernels it lists."""
FEWEST = 2048
"""Tokens below which nothing was measured at the limit."""


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Product:
    """out [T, n] (+)= x [T, k] weight [n, k]^T for one shape of weights. Values of `dtype`, and the results, which are bfloat16 of
    e4m3 ones: these have a scale for each row."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, n: int, k: int) -> None:
        self._library = library
        self._factors = c_float(0.0), c_float(1.0)
        # A preference as it is made allows no memory.
        self._product, self._preference = c_void_p(), c_void_p()
        self._call("MatmulDescCreate", byref(self._product), c_int(SUMS), c_int(FLOAT32))
        self._set("MatmulDesc", self._product, TRANSPOSED, c_int(1))
        self._scaled = dtype.itemsize == 1
        if self._scaled:
            self._set("MatmulDesc", self._product, FAST, c_int8(1))
            for mode in MODES:
                self._set("MatmulDesc", self._product, mode, c_int(EACH_ROW))
        kind, result = TYPES[dtype], TYPES[torch.bfloat16 if self._scaled else dtype]
        self._weight, self._x, self._out = (
            self._layout(one, rows) for one, rows in ((kind, k), (kind, k), (result, n))
        )
        self._set("MatrixLayout", self._weight, COLUMNS, c_uint64(n))
        self._call("MatmulPreferenceCreate", byref(self._preference))
        self._choices: dict[tuple[int, bool], _Choice | None] = {}

    def _call(self, name: str, *given: object) -> None:
        if status := getattr(self._library, f"cublasLt{name}")(*given):
            raise RuntimeError(f"cublasLt{name}: {status}")

    def _set(self, what: str, of: c_void_p, attribute: int, value: c_int | c_int8 | c_uint64 | c_void_p) -> None:
        self._call(f"{what}SetAttribute", of, c_int(attribute), byref(value), c_size_t(ctypes.sizeof(value)))

    def _layout(self, kind: int, rows: int) -> c_void_p:
        """Of contiguous columns, as many as are set before each use."""
        made = c_void_p()
        self._call("MatrixLayoutCreate", byref(made), c_int(kind), c_uint64(rows), c_uint64(1), c_int64(rows))
        return made

    def _of(self, tokens: int) -> None:
        """Lay x and the result out for so many tokens."""
        for layout in (self._x, self._out):
            self._set("MatrixLayout", layout, COLUMNS, c_uint64(tokens))

    def _named(self, handle: c_void_p, most: int) -> list[_Choice]:
        """The heuristic's kernels for the layouts as they are, the one that it holds for the fastest first."""
        found, count = (_Choice * most)(), c_int()
        layouts = (self._weight, self._x, self._out, self._out)
        given = (handle, self._product, *layouts, self._preference, c_int(most), found, byref(count))
        refused = self._library.cublasLtMatmulAlgoGetHeuristic(*given)
        return [] if refused else [one for one in found[: count.value] if not one.state]

    def _tile(self, choice: _Choice) -> int:
        tile, written = c_uint32(), c_size_t()
        into = byref(tile), c_size_t(ctypes.sizeof(tile)), byref(written)
        self._call("MatmulAlgoConfigGetAttribute", byref(choice.algorithm), c_int(TILE), *into)
        return tile.value

    def _chosen(self, handle: c_void_p, tokens: int) -> _Choice | None:
        """The kernel for so many tokens; None: there is none. The thrifty one serves any number that it is listed for once."""
        if self._scaled:
            return next(iter(self._named(handle, 1)), None)
        self._of(LISTED)
        listed = self._named(handle, MOST_LISTED)
        self._of(tokens)
        return next((one for one in listed if self._tile(one) == TILE_176_128), None)

    def __call__(
        self, weight: torch.Tensor, x: torch.Tensor, scales: Sequence[torch.Tensor], out: torch.Tensor, add: bool
    ) -> bool:
        """Whether the library did it. scales: of the weight and of x, where there are any."""
        # torch's handle of this thread and device: one of cuBLAS serves cublasLt.
        handle, kind = c_void_p(torch.cuda.current_blas_handle()), (len(out) if self._scaled else LISTED, add)
        self._of(len(out))
        for attribute, one in zip(SCALES, scales, strict=False):
            self._set("MatmulDesc", self._product, attribute, c_void_p(one.data_ptr()))
        if kind not in self._choices:
            self._choices[kind] = self._chosen(handle, len(out))
        if (choice := self._choices[kind]) is None:
            return False
        left, right, target = (c_void_p(one.data_ptr()) for one in (weight, x, out))
        alpha, beta = byref(self._factors[1]), byref(self._factors[add])
        operands = (alpha, left, self._weight, right, self._x, beta, target, self._out, target, self._out)
        where = c_void_p(torch.cuda.current_stream(out.device).cuda_stream)
        self._call("Matmul", handle, self._product, *operands, byref(choice), None, c_size_t(0), where)
        return True


@cache
def _library() -> ctypes.CDLL | None:
    """The cublasLt that torch has loaded, if it is one that we know."""
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return None
    library.cublasLtGetVersion.restype = c_size_t
    return library if library.cublasLtGetVersion() in VERSIONS else None


@cache
def _product(dtype: torch.dtype, n: int, k: int) -> Product | None:
    library = _library()
    return None if library is None else Product(library, dtype, n, k)


def _done(weight: torch.Tensor, x: torch.Tensor, scales: Sequence[torch.Tensor], out: torch.Tensor, add: bool) -> bool:
    if any(one.data_ptr() % 16 or not one.is_contiguous() for one in (weight, x, out, *scales)):
        return False
    run = _product(weight.dtype, *weight.shape)
    return run is not None and run(weight, x, scales, out, add)


def product(x: Scaled, matrix: Fp8Matrix, out: torch.Tensor, add: bool) -> bool:
    """x matrix^T into out [T, n], or added to what is there; False: not here, and nothing was done.

    x.values [T, k] and matrix.values [n, k] e4m3, n and k in sixteens; out bfloat16; all contiguous."""
    if not is_hopper(out.device) or out.dtype != torch.bfloat16:
        return False
    return _done(matrix.values, x.values, (matrix.scales, x.scales), out, add)


def saves(tokens: int, n: int) -> bool:
    """Whether the thrifty kernel makes [tokens, n] for less than others: what its tiles hold beyond that takes energy all the
    same, so a 64th at most, and places without a tile in their last round take time, so a 16th at most with these."""
    tiles = -(-n // TILE_OUTPUTS) * -(-tokens // TILE_TOKENS)
    held = tiles * TILE_OUTPUTS * TILE_TOKENS
    rounds = -(-2 * tiles // PROCESSORS) * PROCESSORS * TILE_OUTPUTS * TILE_TOKENS // 2
    return tokens >= FEWEST and 64 * held <= 65 * tokens * n and 16 * rounds <= 17 * tokens * n


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, k] weight [n, k]^T + bias of one type of floats, by torch where its kernel is as good. No bit was different
    from torch's."""
    (tokens, k), n = x.shape, weight.shape[0]
    if bias is None and saves(tokens, n) and is_hopper(x.device) and x.dtype.itemsize == 2 and not (k | n) % 8:
        out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
        if _done(weight, x, (), out, False):
            return out
    return F.linear(x, weight, bias)
