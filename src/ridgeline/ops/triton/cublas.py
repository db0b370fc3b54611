"""8-bit products of many tokens by cuBLASLt through its C interface, with the residual sum in the epilogue.

torch._scaled_mm takes no summand but a bias, so the residual sum would need another kernel, which reads two tensors and writes one.
cuBLASLt adds to the output (beta = 1), with half of that traffic and no launch. Its heuristic chooses the kernel. No workspace is
needed; torch's call uses four bytes that it zeroes before each product. Numeric constants are those of cublasLt.h of CUDA 13.

cuBLAS is column-major: a tensor [rows, k] is a matrix k x rows, so the call computes out^T [n, T] = W x^T, with W as A.
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
"""Supported cublasLt versions. They have a scale per token, and the constants below are valid."""
# cudaDataType_t; SUMS: CUBLAS_COMPUTE_32F.
FLOAT32, BFLOAT16, E4M3, SUMS = 0, 14, 28, 68
# cublasLtMatmulDescAttributes_t; EACH_ROW: one scale per row (cublasLtMatmulMatrixScale_t).
TRANSPOSED, SCALES, FAST, MODES, EACH_ROW = 3, (17, 18), 25, (31, 32), 3
# cublasStatus_t: invalid value, architecture mismatch, not supported. Nothing was launched in these cases.
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
    """Layouts of x and of the result for a token count, and the chosen kernel."""

    x: c_void_p
    out: c_void_p
    algorithm: Algorithm


class Product:
    """out [T, n] (+)= x [T, k] weight [n, k]^T for one weight shape: e4m3 values with a scale per row; out is bfloat16."""

    def __init__(self, library: ctypes.CDLL, n: int, k: int) -> None:
        self._library, self._n, self._k = library, n, k
        self._alpha, self._betas = c_float(1.0), (c_float(0.0), c_float(1.0))
        # A new preference allows no workspace.
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
        """Layout of contiguous columns."""
        made = c_void_p()
        self._call("MatrixLayoutCreate", byref(made), c_int(kind), c_uint64(rows), c_uint64(columns), c_int64(rows))
        return made

    def _use(self, handle: c_void_p, tokens: int) -> _Use | None:
        """Layouts and the kernel that the heuristic prefers. None: no kernel supports the product."""
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
        """Run the product. False: the library does not support it."""
        # torch's handle of this thread and device. A cuBLAS handle is a valid cublasLt handle.
        handle, tokens = torch.cuda.current_blas_handle(), len(out)
        for attribute, scales in zip(SCALES, (matrix.scales, x.scales), strict=True):
            self._set("MatmulDesc", self._product, attribute, c_void_p(scales.data_ptr()))
        if tokens not in self._uses:
            self._uses[tokens] = self._use(c_void_p(handle), tokens)
        if (use := self._uses[tokens]) is None:
            return False
        # Integers are cheaper to pass than ctypes objects. The host time of a launch must not exceed torch's.
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
    """The cublasLt that torch has loaded, if its version is supported."""
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
    """Compute x matrix^T into out [T, n], or add it to out. False: not supported; out is unchanged.

    x.values [T, k] and matrix.values [n, k] are e4m3, n and k multiples of 16. out is bfloat16. All tensors are contiguous.
    """
    if not is_hopper(out.device) or out.dtype != torch.bfloat16:
        return False
    if any(
        tensor.data_ptr() % 16 or not tensor.is_contiguous()
        for tensor in (matrix.values, x.values, out, matrix.scales, x.scales)
    ):
        return False
    run = _product(*matrix.values.shape)
    return run is not None and run(x, matrix, out, add)
