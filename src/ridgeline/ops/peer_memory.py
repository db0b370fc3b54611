"""Memory of GPUs that processes of one host share by CUDA IPC, and copies from it.

A handle names a whole allocation, so a shared address is a handle and an offset into it. Memory of torch's allocator can be shared
unless its segments are expandable (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True): those have no handle.

Source: CUDA driver API, "Memory Management" (cuIpcGetMemHandle, cuIpcOpenMemHandle).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import NamedTuple

import torch

_HANDLE = 64
"""Bytes of CUipcMemHandle."""
_OFFSET = struct.Struct("<Q")
WORD_BYTES = _HANDLE + _OFFSET.size
"""Bytes of a shared address."""
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("words", ctypes.c_ubyte * _HANDLE),)


class Run(NamedTuple):
    """A copy between two addresses."""

    target: int
    source: int
    size: int


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    if status := getattr(_driver(), name)(*arguments):
        raise RuntimeError(f"{name}: {status}")


def share(address: int) -> bytes:
    """WORD_BYTES with which other processes `open_shared` the address. Raises RuntimeError if its memory cannot be shared."""
    base, size, handle = c_uint64(), c_size_t(), _Handle()
    _call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
    _call("cuIpcGetMemHandle", byref(handle), base)
    return bytes(handle) + _OFFSET.pack(address - base.value)


def open_shared(word: bytes) -> int:
    """The address, on torch's current device, of what another process has shared. Raises RuntimeError if the driver refuses: the
    process is gone, or the GPUs have no access to each other. A process cannot open its own memory."""
    address = c_uint64()
    _call("cuIpcOpenMemHandle_v2", byref(address), _Handle.from_buffer_copy(word), c_uint(_LAZY_PEER_ACCESS))
    return address.value + int(_OFFSET.unpack_from(word, _HANDLE)[0])


class PeerMemory:
    """Memory of other processes' GPUs as `device` sees it. Copies run on a stream of their own, by the copy engines of the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._opened: dict[bytes, int] = {}
        """Shared word -> base address."""

    def share(self, address: int) -> bytes:
        """As the function."""
        return share(address)

    def open(self, word: bytes) -> int:
        """As `open_shared`."""
        with torch.cuda.device(self._device):
            self._opened[word] = address = open_shared(word)
        return address

    def close(self, word: bytes) -> None:
        """The memory is not read any more. Copies that have begun end first."""
        self._stream.synchronize()
        address = self._opened.pop(word) - int(_OFFSET.unpack_from(word, _HANDLE)[0])
        _call("cuIpcCloseMemHandle", c_uint64(address))

    def bind(self) -> None:
        """Make the GPU the current device of the calling thread."""
        torch.cuda.set_device(self._device)

    def pin(self, address: int, size: int) -> None:
        """Let the GPU copy to host memory of this process. Raises RuntimeError if the system refuses."""
        with torch.cuda.device(self._device):
            _call("cuMemHostRegister_v2", c_void_p(address), c_size_t(size), c_uint(0))

    def copy(self, runs: Sequence[Run]) -> torch.cuda.Event:
        """Enqueue copies after all work of the current stream. Returns the event after them."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        stream = c_void_p(self._stream.cuda_stream)
        for target, source, size in runs:
            _call("cuMemcpyAsync", c_uint64(target), c_uint64(source), c_size_t(size), stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event
