"""Compile, load and launch CUDA C++ kernels, for features that Triton lacks, such as TMA multicast to several SMs.

torch ships NVRTC, which compiles the kernels. Cubins are cached on disk in Triton's cache. The driver launches them on torch's
current stream, so that CUDA graphs capture them. Numeric constants are those of nvrtc.h and cuda.h, from 12.3 on.
"""

from __future__ import annotations

import ctypes
import hashlib
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path

import torch
from triton.runtime.cache import get_cache_manager

OPTIONS = (b"--gpu-architecture=sm_90a", b"-default-device")
"""sm_90a enables Hopper-specific instructions. Such code runs on Hopper only."""
# CUfunction_attribute, CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion.
MAX_SHARED, BFLOAT16, UNSWIZZLED, SWIZZLED, PROMOTE_256B = 8, 9, 0, 3, 3
SWIZZLED_BYTES = 128
MAPS = 1024
"""Cached tensor maps of some 200 bytes: those of a model's weights and of the addresses of its activations."""
EARLY = 6
"""CUlaunchAttributeID of programmatic dependent launch: the kernel starts while its predecessor ends, and waits by itself."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig. sizes: grid and block dimensions, three each, and bytes of dynamic shared memory."""

    _fields_ = (("sizes", c_uint32 * 7), ("stream", c_void_p), ("attributes", c_void_p), ("count", c_uint32))


class TensorMap(ctypes.Structure):
    """CUtensorMap: TMA descriptor of a matrix of 16-bit elements."""

    _fields_ = (("words", c_uint64 * 16),)


@cache
def _nvrtc() -> ctypes.CDLL | None:
    """NVRTC of torch's CUDA version. torch loads it for its own kernels. None: it is missing."""
    try:
        return ctypes.CDLL(f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """Call a function of the driver. Raises RuntimeError with its name and status."""
    if status := getattr(_driver(), name)(*arguments):
        raise RuntimeError(f"{name}: {status}")


def available() -> bool:
    return _nvrtc() is not None


def version() -> tuple[int, int]:
    """Version of NVRTC, which must be available."""
    major, minor = c_int(), c_int()
    library = _nvrtc()
    assert library is not None
    library.nvrtcVersion(byref(major), byref(minor))
    return major.value, minor.value


def compiled(text: str) -> bytes:
    """Cubin of a source text, from the cache on disk if it was compiled before. RuntimeError: the compiler's log."""
    key = hashlib.sha256(repr((text, OPTIONS, version())).encode()).hexdigest()
    kept = get_cache_manager(key)
    if (path := kept.get_file("kernel.cubin")) is not None:
        return Path(path).read_bytes()
    code = _compile(text)
    kept.put(code, "kernel.cubin")
    return code


def _compile(text: str) -> bytes:
    library, program, size = _nvrtc(), c_void_p(), c_size_t()
    assert library is not None
    status = library.nvrtcCreateProgram(byref(program), text.encode(), b"kernel.cu", 0, None, None)
    status = status or library.nvrtcCompileProgram(program, len(OPTIONS), (c_char_p * len(OPTIONS))(*OPTIONS))
    name = "ProgramLog" if status else "CUBIN"
    getattr(library, f"nvrtcGet{name}Size")(program, byref(size))
    result = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{name}")(program, result)
    library.nvrtcDestroyProgram(byref(program))
    if status:
        raise RuntimeError(f"NVRTC: {status}: {result.value.decode()}")
    return result.raw


def tensor_map(matrix: torch.Tensor, box: tuple[int, int]) -> TensorMap:
    """TMA descriptor of a matrix of 16-bit elements with contiguous rows of multiples of 16 bytes. box: rows and columns of a copy.
    Rows of 128 bytes are swizzled in shared memory, so that eight consecutive rows lie in different banks. The result is shared
    between calls with the same memory; treat it as immutable."""
    return _tensor_map(matrix.data_ptr(), *matrix.shape, matrix.stride(0), *box)


def rows_map(memory: torch.Tensor, box: tuple[int, int]) -> TensorMap:
    """TMA descriptor of all memory from the first element of a tensor of 16-bit elements on, as rows of the size of its last
    dimension. box: see tensor_map. TMA copies bits, so the dtype does not matter."""
    width = memory.shape[-1]
    rows = (memory.untyped_storage().nbytes() // memory.itemsize - memory.storage_offset()) // width
    return _tensor_map(memory.data_ptr(), rows, width, width, *box)


@lru_cache(MAPS)
def _tensor_map(pointer: int, rows: int, columns: int, pitch: int, height: int, width: int) -> TensorMap:
    # cuTensorMapEncodeTiled requires an address that is a multiple of 64.
    buffer = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 63)
    at = ctypes.addressof(buffer) + 63 & ~63
    shape, stride = (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(2 * pitch)
    boxes, each = (c_uint32 * 2)(width, height), (c_uint32 * 2)(1, 1)
    swizzle = SWIZZLED if 2 * width == SWIZZLED_BYTES else UNSWIZZLED
    how = c_int(0), c_int(swizzle), c_int(PROMOTE_256B), c_int(0)
    numbers = c_int(BFLOAT16), c_uint32(2), c_void_p(pointer)
    call("cuTensorMapEncodeTiled", c_void_p(at), *numbers, shape, stride, boxes, each, *how)
    return TensorMap.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(TensorMap)))


class Kernel:
    """A kernel of a source text, loaded on torch's current device. shared: bytes of dynamic shared memory per program."""

    def __init__(self, text: str, name: str, shared: int) -> None:
        self._module, self._function, self._shared = c_void_p(), c_void_p(), shared
        # cuModuleLoadData finds the end of a cubin from its header.
        call("cuModuleLoadData", byref(self._module), compiled(text))
        call("cuModuleGetFunction", byref(self._function), self._module, name.encode())
        call("cuFuncSetAttribute", self._function, c_int(MAX_SHARED), c_int(shared))

    def __call__(
        self,
        programs: int,
        threads: int,
        *arguments: ctypes.Structure | c_uint32 | c_uint64 | c_void_p,
        early: bool = False,
        shared: int | None = None,
    ) -> None:
        """Launch on torch's current stream. early: with programmatic dependent launch, see EARLY. shared: less shared memory than
        the kernel was loaded for."""
        where = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        attribute = _Attribute(EARLY, 0, (1,))
        stream = torch.cuda.current_stream().cuda_stream
        sizes = (c_uint32 * 7)(programs, 1, 1, threads, 1, 1, self._shared if shared is None else shared)
        launch = _Launch(sizes, stream, ctypes.addressof(attribute), int(early))
        call("cuLaunchKernelEx", byref(launch), self._function, where, None)
