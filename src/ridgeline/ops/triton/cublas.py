"""Products of many tokens in 8 bits by cuBLASLt, through its C interface, which joins the stream while it stores.

torch takes no summand but a bias in such a product, so a kernel of its own adds the result: it reads two tensors and writes one.
cuBLASLt joins the stream (beta = 1): half of that traffic, and no launch. Its heuristic chooses the kernel. No memory is needed:
torch's way takes four bytes, which a fill before each product sets to zero. Numbers are those of cublasLt.h, of 13.

cuBLAS counts in columns: a tensor [rows, k] is to it a matrix k x rows, so out^T [n, T] = W x^T, and W is its A.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import addressof, byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch

from ridgeline.ops.table import Fp8Matrix, Scaled
from ridgeline.ops.triton.launch import is_hopper

VERSIONS = range(130000, 140000)
"""Of cublasLt: it knows a scale for each token, and its numbers mean what they mean here."""
# cudaDataType_t, and CUBLAS_COMPUTE_32F.
FLOAT32, BFLOAT16, E4M3, SUMS = 0, 14, 28, 68
# cublasLtMatmulDescAttributes_t; a scale for each row (cublasLtMatmulMatrixScale_t).
TRANSPOSED, SCALES, FAST, MODES, EACH_ROW = 3, (17, 18), 25, (31, 32), 3
# cublasStatus_t: an invalid value, a device or a product that is not supported. Nothing was launched then.
REFUSALS = (7, 8, 15)

log = logging.getLogger(__name__)


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t, which is opaque."""

    _fields_ = (("data", c_uint64 * 8),)


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class _Use:
    """What a number of tokens takes: the layouts of x and of the result, and the kernel."""

    x: c_void_p
    out: c_void_p
    algorithm: Algorithm


class Product:
    """out [T, n] (+)= x [T, k] weight [n, k]^T for one shape of weights, of e4m3 values with a scale for each row; out bfloat16."""

    def __init__(self, library: ctypes.CDLL, n: int, k: int) -> None:
        self._library, self._n, self._k = library, n, k
        self._alpha, self._betas = c_float(1.0), (c_float(0.0), c_float(1.0))
        # A preference as it is made allows no memory.
        self._product, self._preference = c_void_p(), c_void_p()
        self._call("MatmulDescCreate", byref(self._product), c_int(SUMS), c_int(FLOAT32))
        self._set("MatmulDesc", self._product, TRANSPOSED, c_int(1))
        self._set("MatmulDesc", self._product, FAST, c_int8(1))
        for mode in MODES:
            self._set("MatmulDesc", self._product, mode, c_int(EACH_ROW))
        self._weight = self._layout(E4M3, k, n)
        self._call("MatmulPreferenceCreate", byref(self._preference))
        self._uses: dict[int, _Use | None] = {}

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, f"cublasLt{name}")(*arguments):
            raise RuntimeError(f"cublasLt{name}: {status}")

    def _set(self, descriptor: str, of: c_void_p, attribute: int, value: c_int | c_int8 | c_void_p) -> None:
        self._call(f"{descriptor}SetAttribute", of, c_int(attribute), byref(value), c_size_t(ctypes.sizeof(value)))

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        """Of contiguous columns."""
        made = c_void_p()
        self._call("MatrixLayoutCreate", byref(made), c_int(kind), c_uint64(rows), c_uint64(columns), c_int64(rows))
        return made

    def _use(self, handle: c_void_p, tokens: int) -> _Use | None:
        """The layouts, and the kernel that the heuristic holds for the fastest."""
        x, out = self._layout(E4M3, self._k, tokens), self._layout(BFLOAT16, self._n, tokens)
        choice, count = _Choice(), c_int()
        arguments = (
            handle,
            self._product,
            self._weight,
            x,
            out,
            out,
            self._preference,
            c_int(1),
            byref(choice),
            byref(count),
        )
        if self._library.cublasLtMatmulAlgoGetHeuristic(*arguments) or not count.value or choice.state:
            return None
        return _Use(x, out, choice.algorithm)

    def __call__(self, x: Scaled, matrix: Fp8Matrix, out: torch.Tensor, add: bool) -> bool:
        """Whether the library did it."""
        # torch's handle of this thread and device: one of cuBLAS serves cublasLt.
        handle, tokens = torch.cuda.current_blas_handle(), len(out)
        for attribute, scales in zip(SCALES, (matrix.scales, x.scales), strict=True):
            self._set("MatmulDesc", self._product, attribute, c_void_p(scales.data_ptr()))
        if tokens not in self._uses:
            self._uses[tokens] = self._use(c_void_p(handle), tokens)
        if (use := self._uses[tokens]) is None:
            return False
        # Plain numbers: made once, and cheaper to hand over than objects; a launch must not take longer than torch's.
        target, where = out.data_ptr(), torch._C._cuda_getCurrentRawStream(out.device.index)
        sides = matrix.values.data_ptr(), self._weight.value, x.values.data_ptr(), use.x.value
        outputs = target, use.out.value, target, use.out.value, addressof(use.algorithm), None, 0, where
        arguments = addressof(self._alpha), *sides, addressof(self._betas[add]), *outputs
        if status := self._library.cublasLtMatmul(handle, self._product.value, *arguments):
            if status not in REFUSALS:
                raise RuntimeError(f"cublasLtMatmul: {status}")
            log.warning(
                "cuBLASLt refuses a product of %d tokens with a matrix of %d x %d (status %d); torch computes it",
                tokens,
                self._n,
                self._k,
                status,
            )
            self._uses[tokens] = None
        return not status


@cache
def _library() -> ctypes.CDLL | None:
    """The cublasLt that torch has loaded, if it is one that we know."""
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return None
    library.cublasLtGetVersion.restype = c_size_t
    library.cublasLtMatmul.argtypes = (*(c_void_p,) * 14, c_size_t, c_void_p)
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
    if any(
        tensor.data_ptr() % 16 or not tensor.is_contiguous()
        for tensor in (matrix.values, x.values, out, matrix.scales, x.scales)
    ):
        return False
    run = _product(*matrix.values.shape)
    return run is not None and run(x, matrix, out, add)
