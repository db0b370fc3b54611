"""Products of many tokens in 8 bits by cuBLASLt, through its C interface.

torch takes no summand but a bias in an 8-bit product, so that a kernel of its own adds what comes out: it reads two tensors
and writes one. cuBLASLt joins the stream while it stores (beta = 1): half of that traffic, and no launch. The kernel is the
one that its heuristic names first, as for torch, but of those that need no memory of their own: torch's take four bytes,
which a fill before each product sets to zero. Numbers are those of cublasLt.h, of 13.

cuBLAS counts in columns: a tensor [rows, k] is to it a matrix k x rows, so out^T [n, T] = W x^T, and W is its A.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache

import torch

from ridgeline.ops.table import Fp8Matrix, Scaled
from ridgeline.ops.triton.launch import is_hopper

VERSIONS = range(130000, 140000)
"""Of cublasLt: it knows a scale for each token, and its numbers mean what they mean here."""
# cudaDataType_t, and CUBLAS_COMPUTE_32F.
FLOAT32, BFLOAT16, E4M3, SUMS = 0, 14, 28, 68
# cublasLtMatmulDescAttributes_t; a scale for each row (cublasLtMatmulMatrixScale_t); cublasLtMatrixLayoutAttribute_t.
TRANSPOSED, SCALES, FAST, MODES, EACH_ROW, COLUMNS = 3, (17, 18), 25, (31, 32), 3, 3


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
    """out [T, n] (+)= x [T, k] weight [n, k]^T of e4m3 values with a scale for each row, for one shape of weights."""

    def __init__(self, library: ctypes.CDLL, n: int, k: int) -> None:
        self._library = library
        self._factors = c_float(0.0), c_float(1.0)
        # A preference as it is made allows no memory.
        self._product, self._preference = c_void_p(), c_void_p()
        self._call("MatmulDescCreate", byref(self._product), c_int(SUMS), c_int(FLOAT32))
        self._set("MatmulDesc", self._product, TRANSPOSED, c_int(1))
        self._set("MatmulDesc", self._product, FAST, c_int8(1))
        for mode in MODES:
            self._set("MatmulDesc", self._product, mode, c_int(EACH_ROW))
        self._weight, self._x, self._out = (
            self._layout(kind, rows) for kind, rows in ((E4M3, k), (E4M3, k), (BFLOAT16, n))
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

    def _chosen(self, handle: c_void_p) -> _Choice | None:
        """The heuristic's kernel for the layouts as they are; None: there is none."""
        found, count = _Choice(), c_int()
        layouts = (self._weight, self._x, self._out, self._out)
        given = (handle, self._product, *layouts, self._preference, c_int(1), byref(found), byref(count))
        refused = self._library.cublasLtMatmulAlgoGetHeuristic(*given)
        return None if refused or not count.value or found.state else found

    def __call__(self, x: Scaled, matrix: Fp8Matrix, out: torch.Tensor, add: bool) -> bool:
        """Whether the library did it."""
        # torch's handle of this thread and device: one of cuBLAS serves cublasLt.
        handle, kind = c_void_p(torch.cuda.current_blas_handle()), (len(out), add)
        for layout in (self._x, self._out):
            self._set("MatrixLayout", layout, COLUMNS, c_uint64(len(out)))
        for attribute, scales in zip(SCALES, (matrix.scales, x.scales), strict=True):
            self._set("MatmulDesc", self._product, attribute, c_void_p(scales.data_ptr()))
        if kind not in self._choices:
            self._choices[kind] = self._chosen(handle)
        if (choice := self._choices[kind]) is None:
            return False
        weight, inputs, target = (c_void_p(one.data_ptr()) for one in (matrix.values, x.values, out))
        one, beta = byref(self._factors[1]), byref(self._factors[add])
        operands = (one, weight, self._weight, inputs, self._x, beta, target, self._out, target, self._out)
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
def _product(n: int, k: int) -> Product | None:
    library = _library()
    return None if library is None else Product(library, n, k)


def product(x: Scaled, matrix: Fp8Matrix, out: torch.Tensor, add: bool) -> bool:
    """x matrix^T into out [T, n], or added to what is there; False: not here, and nothing was done.

    x.values [T, k] and matrix.values [n, k] e4m3, n and k in sixteens; out bfloat16; all contiguous."""
    if not is_hopper(out.device) or out.dtype != torch.bfloat16:
        return False
    held = (x.values, x.scales, matrix.values, matrix.scales, out)
    if any(one.data_ptr() % 16 or not one.is_contiguous() for one in held):
        return False
    run = _product(*matrix.values.shape)
    return run is not None and run(x, matrix, out, add)
