"""Memory that is given back to the system while its address stays: what an engine releases when it sleeps.

CUDA graphs, compiled programs and captured steps of a CPU hold addresses. Because addresses stay, nothing is captured again.

- On a CPU the pages of a range are dropped (madvise(2), MADV_DONTNEED). The next touch gives pages of zeros.
- On a GPU a range of addresses is reserved once. Physical memory is mapped to it, unmapped and mapped again.

Source: CUDA driver API, "Virtual Memory Management"; structures and constants are those of cuda.h.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint64
from pathlib import Path
from typing import Any, Protocol

import torch

from ridgeline.core.errors import DoesNotFit, EngineFailed

PIECE = 1 << 30
"""Bytes of physical memory that a device maps at a time: while weights are moved, as much is held twice at most."""
ALIGNED = 512
"""Alignment of a tensor in a range of a device, as that of torch's allocator."""
_PINNED_ON_DEVICE = _LOCATION_DEVICE = 1
_READ_WRITE = 3
_OUT_OF_MEMORY = 2


def release_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Drop the pages that lie completely within the memory of CPU tensors. Their content is undefined afterwards, and the tensors
    can be written again. Returns the bytes by which the process has become smaller."""
    system, before = ctypes.CDLL(None), _resident()
    for first, size in sorted({(memory.data_ptr(), memory.nbytes()) for memory in map(_memory, tensors)}):
        start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, (first + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            system.madvise(ctypes.c_void_p(start), c_size_t(end - start), mmap.MADV_DONTNEED)
    trim()
    return before - _resident()


def trim() -> None:
    """Give memory that the process has freed back to the system (malloc_trim(3))."""
    ctypes.CDLL(None).malloc_trim(0)


def _resident() -> int:
    """Bytes of this process in memory (proc(5))."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _memory(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


class DeviceRange:
    """Reserved addresses of one GPU, of which the first `mapped` bytes have memory.

    size: bytes; rounded up to what the device maps at once. driver: libcuda; tests have another one. Every method raises
    EngineFailed if the driver refuses a call, and DoesNotFit if it has no memory left. The range is never unreserved: it lives as
    long as the engine.
    """

    def __init__(self, size: int, device: int, driver: Any = None) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
        self._device = device
        self._location = _Location(_LOCATION_DEVICE, device)
        self._properties = _Properties(_PINNED_ON_DEVICE, 0, self._location)
        granularity = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties), c_int(0))
        self._granularity = granularity.value
        self.size = self._rounded(size)
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), c_size_t(self.size), c_size_t(0), c_uint64(0), c_uint64(0))
        self.address = address.value
        self.mapped = 0
        self._pieces: list[tuple[int, int]] = []
        """(first byte, bytes) of each physical allocation, in order."""

    def grow(self, end: int) -> None:
        """Map memory until the first `end` bytes have some."""
        while self.mapped < end:
            size = self._rounded(min(PIECE, self.size - self.mapped))
            self._map(self.mapped, size)
            self._pieces.append((self.mapped, size))
            self.mapped += size

    def release(self) -> int:
        """Give the memory back. All work on it has ended. Returns the bytes released."""
        for first, size in self._pieces:
            self._call("cuMemUnmap", c_uint64(self.address + first), c_size_t(size))
        released, self.mapped, self._pieces = self.mapped, 0, []
        return released

    def restore(self) -> None:
        """Map memory to the whole range again; its content is undefined. Without enough memory nothing stays mapped."""
        try:
            self.grow(self.size)
        except DoesNotFit:
            self.release()
            raise

    def tensor(self) -> torch.Tensor:
        """The whole range, uint8 [size]. Call it while at least the first byte is mapped."""
        return torch.as_tensor(_Array(self.address, self.size), device=torch.device("cuda", self._device))

    def zeros(self, size: int) -> torch.Tensor:
        """The first `size` bytes, mapped and zeroed, uint8 [size]."""
        self.grow(size)
        return self.tensor()[:size].zero_()

    def _map(self, first: int, size: int) -> None:
        handle, access = c_uint64(), _Access(self._location, _READ_WRITE)
        place, length = c_uint64(self.address + first), c_size_t(size)
        self._call("cuMemCreate", byref(handle), length, byref(self._properties), c_uint64(0))
        try:
            self._call("cuMemMap", place, length, c_size_t(0), handle, c_uint64(0))
        finally:
            self._call("cuMemRelease", handle)  # the mapping keeps the memory
        self._call("cuMemSetAccess", place, length, byref(access), c_size_t(1))

    def _rounded(self, size: int) -> int:
        return -(-size // self._granularity) * self._granularity

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._driver, name)(*arguments):
            if status == _OUT_OF_MEMORY:
                raise DoesNotFit("The GPU has not enough free memory to wake the model: put another one to sleep.")
            raise EngineFailed(f"The GPU's driver refused {name} with status {status}.")


class _Array:
    """Memory of a GPU as torch.as_tensor takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class Place(Protocol):
    """Memory at fixed addresses, of which the first bytes are there."""

    def grow(self, end: int) -> None:
        """Provide the first `end` bytes."""

    def tensor(self) -> torch.Tensor:
        """All of it, uint8 [size]."""


def move(tensors: Sequence[torch.Tensor], device: torch.device) -> DeviceRange | None:
    """Move the memory of tensors of a GPU into a range (`move_into`). None on a CPU, which releases pages of any memory."""
    if device.type != "cuda":
        return None
    place = DeviceRange(moved_bytes(tensors), device.index)
    move_into(place, tensors)
    return place


def moved_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that `move_into` takes."""
    return sum(-(-_memory(group[0]).nbytes() // ALIGNED) * ALIGNED for group in _sharing(tensors))


@torch.no_grad()
def move_into(place: Place, tensors: Sequence[torch.Tensor]) -> None:
    """Move the memory of tensors. The tensor objects stay, so that all who hold them see the new address.

    Tensors that share memory share it afterwards. Before the end at most PIECE bytes, and the largest tensor, are held twice.
    """
    place.grow(1)
    whole, first, moved = place.tensor(), 0, 0
    for group in _sharing(tensors):
        size = _memory(group[0]).nbytes()
        place.grow(first + size)
        target = whole[first : first + size]
        target.copy_(torch.empty(0, dtype=torch.uint8, device=whole.device).set_(_memory(group[0])))
        for tensor in group:
            start = tensor.storage_offset() * tensor.itemsize
            part = target[start : start + _span(tensor) * tensor.itemsize].view(tensor.dtype)
            tensor.set_(part.as_strided(tensor.shape, tensor.stride(), part.storage_offset()))  # type: ignore[call-overload]
        first += -(-size // ALIGNED) * ALIGNED
        moved += size
        if moved >= PIECE:
            torch.cuda.empty_cache()  # the old memory
            moved = 0
    torch.cuda.empty_cache()


def _sharing(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensor objects by the memory that they share, each once: a tied head may be the embedding itself."""
    shared: dict[int, list[torch.Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if tensor.numel():
            shared.setdefault(_memory(tensor).data_ptr(), []).append(tensor)
    return list(shared.values())


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of a tensor in memory."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
