"""Products of many tokens by cuBLASLt, through its C interface, where torch's way to it takes what we do not want.

Of 8 bits: torch takes no summand but a bias in such a product, so that a kernel of its own adds what comes out: it reads two
tensors and writes one. cuBLASLt joins the stream while it stores (beta = 1): half of that traffic, and no launch.
Of 16 bits: torch takes what the heuristic names first, where another kernel is faster (cublas_tiles).
Neither needs memory of its own: torch's take four bytes, which a fill before each product sets to zero. Numbers are those of
cublasLt.h, of 13.

cuBLAS counts in columns: a tensor [rows, k] is to it a matrix k x rows, so out^T [n, T] = W x^T, and W is its A.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from ctypes import addressof, byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from ridgeline.ops.table import Fp8Matrix, Scaled
from ridgeline.ops.triton.cublas_tiles import ALGORITHM, KERNELS, STAGES, Kernel, kernel_for
from ridgeline.ops.triton.launch import is_hopper

VERSIONS = range(130000, 140000)
"""Of cublasLt: it knows a scale for each token, and its numbers mean what they mean here."""
# cudaDataType_t, and CUBLAS_COMPUTE_32F.
FLOAT32, SUMS = 0, 68
TYPES = {torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
# cublasLtMatmulDescAttributes_t; a scale for each row (cublasLtMatmulMatrixScale_t).
TRANSPOSED, SCALES, FAST, MODES, EACH_ROW = 3, (17, 18), 25, (31, 32), 3
# cublasLtMatmulAlgoConfigAttributes_t.
TILE, SPLITS, FORM, STAGES_ID, CLUSTER = 1, 2, 5, 6, 8
LISTED, MOST_LISTED, FEWEST_ALIKE = (2048, 4096, 4096), 8, 3
"""Tokens, outputs and inputs of which the heuristic's list is compared with what is named here, how many it lists, and how many of
them must be among those."""

# cublasStatus_t: an invalid value, a device or a product that is not supported. Said before anything is launched, so others can.
REFUSALS = (7, 8, 15)

log = logging.getLogger(__name__)


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t, of which nothing is said."""

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
    """out [T, n] (+)= x [T, k] weight [n, k]^T for one shape of weights. Values of `dtype`, and the results, which are bfloat16 of
    e4m3 ones: these have a scale for each row."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, n: int, k: int) -> None:
        self._library, self._n, self._k = library, n, k
        self._alpha, self._betas = c_float(1.0), (c_float(0.0), c_float(1.0))
        # A preference as it is made allows no memory.
        self._product, self._preference = c_void_p(), c_void_p()
        self._call("MatmulDescCreate", byref(self._product), c_int(SUMS), c_int(FLOAT32))
        self._set("MatmulDesc", self._product, TRANSPOSED, c_int(1))
        self._scaled = dtype.itemsize == 1
        if self._scaled:
            self._set("MatmulDesc", self._product, FAST, c_int8(1))
            for mode in MODES:
                self._set("MatmulDesc", self._product, mode, c_int(EACH_ROW))
        self._kind, self._result = TYPES[dtype], TYPES[torch.bfloat16 if self._scaled else dtype]
        self._weight = self._layout(self._kind, k, n)
        self._call("MatmulPreferenceCreate", byref(self._preference))
        self._uses: dict[int, _Use | None] = {}

    def _call(self, name: str, *given: object) -> None:
        if status := getattr(self._library, f"cublasLt{name}")(*given):
            raise RuntimeError(f"cublasLt{name}: {status}")

    def _set(self, what: str, of: c_void_p, attribute: int, value: c_int | c_int8 | c_void_p) -> None:
        self._call(f"{what}SetAttribute", of, c_int(attribute), byref(value), c_size_t(ctypes.sizeof(value)))

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        """Of contiguous columns."""
        made = c_void_p()
        self._call("MatrixLayoutCreate", byref(made), c_int(kind), c_uint64(rows), c_uint64(columns), c_int64(rows))
        return made

    def _layouts(self, tokens: int) -> tuple[c_void_p, c_void_p]:
        """Of x and of the result."""
        return self._layout(self._kind, self._k, tokens), self._layout(self._result, self._n, tokens)

    def listed(self, handle: c_void_p, tokens: int, most: int = MOST_LISTED) -> list[Algorithm]:
        """The heuristic's kernels, the one that it holds for the fastest first."""
        return self._listed(handle, *self._layouts(tokens), most)

    def _listed(self, handle: c_void_p, x: c_void_p, out: c_void_p, most: int) -> list[Algorithm]:
        found, count = (_Choice * most)(), c_int()
        given = (handle, self._product, self._weight, x, out, out, self._preference, c_int(most), found, byref(count))
        refused = self._library.cublasLtMatmulAlgoGetHeuristic(*given)
        return [] if refused else [one.algorithm for one in found[: count.value] if not one.state]

    def named(self, handle: c_void_p, kernel: Kernel) -> Algorithm:
        made = Algorithm()
        kinds = (SUMS, FLOAT32, self._kind, self._kind, self._result, self._result, ALGORITHM)
        self._call("MatmulAlgoInit", handle, *(c_int(one) for one in kinds), byref(made))
        for attribute, number in ((TILE, kernel.tile), (SPLITS, 1), (FORM, kernel.form), (STAGES_ID, STAGES)):
            self._configure(made, attribute, c_uint32(number))
        self._configure(made, CLUSTER, c_uint16(kernel.pair))
        return made

    def _configure(self, made: Algorithm, attribute: int, value: c_uint16 | c_uint32) -> None:
        given = byref(made), c_int(attribute), byref(value), c_size_t(ctypes.sizeof(value))
        self._call("MatmulAlgoConfigSetAttribute", *given)

    def _use(self, handle: c_void_p, tokens: int) -> _Use | None:
        x, out = self._layouts(tokens)
        if self._scaled:
            algorithm = next(iter(self._listed(handle, x, out, 1)), None)
        else:
            kernel = kernel_for(tokens, self._n, self._k)
            algorithm = None if kernel is None else self.named(handle, kernel)
        return None if algorithm is None else _Use(x, out, algorithm)

    def __call__(
        self, weight: torch.Tensor, x: torch.Tensor, scales: Sequence[torch.Tensor], out: torch.Tensor, add: bool
    ) -> bool:
        """Whether the library did it. scales: of the weight and of x, where there are any."""
        # torch's handle of this thread and device: one of cuBLAS serves cublasLt.
        handle, tokens = torch.cuda.current_blas_handle(), len(out)
        for attribute, one in zip(SCALES, scales, strict=False):
            self._set("MatmulDesc", self._product, attribute, c_void_p(one.data_ptr()))
        if tokens not in self._uses:
            self._uses[tokens] = self._use(c_void_p(handle), tokens)
        if (use := self._uses[tokens]) is None:
            return False
        # Plain numbers: made once, and cheaper to hand over than objects; a launch must not take longer than torch's.
        target, where = out.data_ptr(), torch._C._cuda_getCurrentRawStream(out.device.index)
        sides = weight.data_ptr(), self._weight.value, x.data_ptr(), use.x.value
        rest = target, use.out.value, target, use.out.value, addressof(use.algorithm), None, 0, where
        given = addressof(self._alpha), *sides, addressof(self._betas[add]), *rest
        if status := self._library.cublasLtMatmul(handle, self._product.value, *given):
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
def _names(dtype: torch.dtype) -> bool:
    """Whether this cublasLt means by numbers what is meant here: of the kernels that its heuristic lists for one shape, some are
    to the last bit what is named here."""
    library, (tokens, n, k) = _library(), LISTED
    if library is None:
        return False
    try:
        product, handle = Product(library, dtype, n, k), c_void_p(torch.cuda.current_blas_handle())
        listed = {bytes(one) for one in product.listed(handle, tokens)}
        return len(listed & {bytes(product.named(handle, one)) for one in KERNELS}) >= FEWEST_ALIKE
    except RuntimeError:
        log.warning("torch chooses the kernels of cuBLASLt, because they cannot be listed", exc_info=True)
        return False


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


def _runs(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a kernel that is named multiplies x [T, k] by weight [n, k] faster than torch's."""
    (tokens, k), n = x.shape, weight.shape[0]
    if not is_hopper(x.device) or x.dtype.itemsize != 2 or x.dtype != weight.dtype or (k | n) % 8:
        return False
    return kernel_for(tokens, n, k) is not None and _names(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, k] weight [n, k]^T + bias of one type of floats, by torch where its kernel is as good. No bit was different
    from torch's."""
    if bias is None and _runs(x, weight):
        out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
        if _done(weight, x, (), out, False):
            return out
    return F.linear(x, weight, bias)


def added(x: torch.Tensor, weight: torch.Tensor, stream: torch.Tensor) -> bool:
    """Whether x [T, k] weight [n, k]^T was added to the stream [T, n], all of one type of floats."""
    return x.dtype == stream.dtype and _runs(x, weight) and _done(weight, x, (), stream, True)
