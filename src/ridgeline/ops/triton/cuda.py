"""Kernels of CUDA C++, for what Triton cannot say: one fetch that reaches the shared memory of several processors (multicast).

NVRTC compiles them, as torch brings it; the machine code lies on disk beside Triton's; the driver launches it, on torch's
stream, so that a graph records it. Numbers are those of nvrtc.h and cuda.h, of 12.3 and later.
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
"""Hopper's own instructions, and no others run there."""
# CUfunction_attribute, CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion.
MOST_SHARED, BFLOAT16, PLAIN, SWIZZLED, WHOLE_LINES = 8, 9, 0, 3, 3
SWIZZLED_BYTES = 128
MAPS = 1024
"""Tensor maps that are kept, of some 200 bytes: a model's weights and where its activations come to lie."""
EARLY = 6
"""CUlaunchAttributeID: the kernel comes up while the one before it ends, and waits by itself (programmatic dependent launch)."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig. sizes: programs and threads in three dimensions, bytes of shared memory."""

    _fields_ = (("sizes", c_uint32 * 7), ("stream", c_void_p), ("attributes", c_void_p), ("count", c_uint32))


class TensorMap(ctypes.Structure):
    """CUtensorMap: a matrix of 16-bit numbers as the copy engine addresses it."""

    _fields_ = (("words", c_uint64 * 16),)


@cache
def _nvrtc() -> ctypes.CDLL | None:
    """The compiler of torch's version of CUDA; torch loads it for kernels of its own."""
    try:
        return ctypes.CDLL(f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}")
    except OSError:
        return None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    if status := getattr(_driver(), name)(*arguments):
        raise RuntimeError(f"{name}: {status}")


def available() -> bool:
    return _nvrtc() is not None


def version() -> tuple[int, int]:
    """Of the compiler, which has to be there."""
    major, minor = c_int(), c_int()
    library = _nvrtc()
    assert library is not None
    library.nvrtcVersion(byref(major), byref(minor))
    return major.value, minor.value


def compiled(text: str) -> bytes:
    """Machine code of a source text, from disk if it has been compiled before; RuntimeError: the compiler's words."""
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
    """Of a matrix of 16-bit numbers with contiguous rows of whole 16 bytes. box: rows and columns of one copy; in shared memory
    rows of 128 bytes are swizzled, so that eight of them below each other lie in different banks. Only to be read: the same
    memory has the same map each time."""
    return _tensor_map(matrix.data_ptr(), *matrix.shape, matrix.stride(0), *box)


def rows_map(memory: torch.Tensor, box: tuple[int, int]) -> TensorMap:
    """Of all memory from the first element of a tensor of 16-bit numbers on, as rows of the size of its last dimension; box as
    above. Bits are copied, so the type does not matter."""
    width = memory.shape[-1]
    rows = (memory.untyped_storage().nbytes() // memory.itemsize - memory.storage_offset()) // width
    return _tensor_map(memory.data_ptr(), rows, width, width, *box)


@lru_cache(MAPS)
def _tensor_map(pointer: int, rows: int, columns: int, pitch: int, height: int, width: int) -> TensorMap:
    # The driver wants it at a multiple of 64.
    buffer = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 63)
    at = ctypes.addressof(buffer) + 63 & ~63
    shape, stride = (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(2 * pitch)
    boxes, each = (c_uint32 * 2)(width, height), (c_uint32 * 2)(1, 1)
    swizzle = SWIZZLED if 2 * width == SWIZZLED_BYTES else PLAIN
    how = c_int(0), c_int(swizzle), c_int(WHOLE_LINES), c_int(0)
    numbers = c_int(BFLOAT16), c_uint32(2), c_void_p(pointer)
    _call("cuTensorMapEncodeTiled", c_void_p(at), *numbers, shape, stride, boxes, each, *how)
    return TensorMap.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(TensorMap)))


class Kernel:
    """One kernel of a source text on torch's current device. shared: bytes of memory that a program takes beside what it
    declares."""

    def __init__(self, text: str, name: str, shared: int) -> None:
        self._module, self._function, self._shared = c_void_p(), c_void_p(), shared
        # A cubin is read to its own end.
        _call("cuModuleLoadData", byref(self._module), compiled(text))
        _call("cuModuleGetFunction", byref(self._function), self._module, name.encode())
        _call("cuFuncSetAttribute", self._function, c_int(MOST_SHARED), c_int(shared))

    def __call__(
        self, programs: int, threads: int, *arguments: ctypes.Structure | c_uint32 | c_void_p, early: bool = False
    ) -> None:
        """Launch it on torch's current stream. early: see EARLY."""
        where = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        attribute = _Attribute(EARLY, 0, (1,))
        stream = torch.cuda.current_stream().cuda_stream
        sizes = (c_uint32 * 7)(programs, 1, 1, threads, 1, 1, self._shared)
        launch = _Launch(sizes, stream, ctypes.addressof(attribute), int(early))
        _call("cuLaunchKernelEx", byref(launch), self._function, where, None)
