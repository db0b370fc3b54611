"""Memory that is given back while its address stays, on a CPU, and on a GPU with a driver that only keeps the books."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from ridgeline.core.errors import DoesNotFit, EngineFailed
from ridgeline.ops.releasable import PIECE, DeviceRange, move, move_into, moved_bytes, release_pages

GRANULARITY = 2 << 20


class Driver:
    """The calls of libcuda that a range makes: `memory` is free at first, and `places` are mapped, by their address."""

    def __init__(self, memory: int) -> None:
        self.memory, self.reserved = memory, 0
        self.handles: dict[int, int] = {}
        self.places: dict[int, int] = {}
        self.readable: set[int] = set()

    def cuMemGetAllocationGranularity(self, out, properties, option) -> int:
        out._obj.value = GRANULARITY
        return 0

    def cuMemAddressReserve(self, out, size, alignment, wanted, flags) -> int:
        self.reserved += size.value
        out._obj.value = 1 << 40
        return 0

    def cuMemCreate(self, out, size, properties, flags) -> int:
        if size.value > self.memory:
            return 2
        assert size.value % GRANULARITY == 0 and properties._obj.location.id == 3
        self.memory -= size.value
        out._obj.value = len(self.handles) + 1
        self.handles[out._obj.value] = size.value
        return 0

    def cuMemMap(self, place, size, offset, handle, flags) -> int:
        assert self.handles[handle.value] == size.value and offset.value == 0
        if any(
            first < place.value + size.value and place.value < first + length for first, length in self.places.items()
        ):
            return 1
        self.places[place.value] = size.value
        return 0

    def cuMemRelease(self, handle) -> int:
        del self.handles[handle.value]
        return 0

    def cuMemSetAccess(self, place, size, access, count) -> int:
        assert access._obj.flags == 3 and count.value == 1
        self.readable.add(place.value)
        return 0

    def cuMemUnmap(self, place, size) -> int:
        if self.places.get(place.value) != size.value:
            return 1
        self.memory += self.places.pop(place.value)
        return 0


def test_a_range_keeps_its_addresses_and_gives_all_memory_back():
    driver = Driver(4 << 30)
    place = DeviceRange(2 * PIECE + 5, 3, driver)
    place.grow(PIECE + 1)
    assert place.mapped == 2 * PIECE and driver.memory == 2 << 30
    place.restore()
    assert place.size == place.mapped == 2 * PIECE + GRANULARITY == driver.reserved
    before = dict(driver.places)
    assert driver.readable == set(before) and not driver.handles
    assert place.release() == place.size
    assert driver.memory == 4 << 30 and not driver.places and place.mapped == 0
    place.restore()
    assert driver.places == before


def test_without_memory_for_all_nothing_stays_mapped():
    driver = Driver(PIECE + GRANULARITY)
    place = DeviceRange(2 * PIECE, 3, driver)
    with pytest.raises(DoesNotFit, match="free memory"):
        place.restore()
    assert driver.memory == PIECE + GRANULARITY and place.mapped == 0


def test_a_call_that_the_driver_refuses_is_named():
    driver = Driver(PIECE)
    place = DeviceRange(PIECE, 3, driver)
    driver.places[place.address] = 1
    with pytest.raises(EngineFailed, match="cuMemMap with status 1"):
        place.restore()


def test_structures_have_the_sizes_of_the_header():
    from ridgeline.ops import releasable

    assert ctypes.sizeof(releasable._Properties) == 32 and ctypes.sizeof(releasable._Access) == 12


def test_pages_of_a_cpu_are_released_and_can_be_written_again():
    tensors = [torch.full((8 << 20,), 7, dtype=torch.uint8) for _ in range(3)]
    views = [tensors[0], tensors[0][100:], *tensors[1:]]
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    assert release_pages(views) > 23 << 20
    assert before - int(Path("/proc/self/statm").read_text().split()[1]) * 4096 > 23 << 20
    assert int(tensors[0][4 << 20]) == 0
    tensors[0].fill_(9)
    assert int(views[1][4 << 20]) == 9


class Buffer:
    """A place on a CPU. end: bytes asked for."""

    def __init__(self, size: int) -> None:
        self.memory, self.end = torch.empty(size, dtype=torch.uint8), 0

    def grow(self, end: int) -> None:
        self.end = max(self.end, end)

    def tensor(self) -> torch.Tensor:
        return self.memory


def test_moved_tensors_keep_values_forms_and_what_they_share():
    matrix = torch.randn(33, 7)
    tensors = [matrix, torch.randn(5).bfloat16(), matrix, matrix[3:9, 2:5], matrix.t(), torch.arange(9), torch.empty(0)]
    values, forms = [tensor.clone() for tensor in tensors], [(tensor.shape, tensor.stride()) for tensor in tensors]
    place = Buffer(moved_bytes(tensors))
    move_into(place, tensors)
    assert all(torch.equal(*pair) for pair in zip(tensors, values, strict=True))
    assert [(tensor.shape, tensor.stride()) for tensor in tensors] == forms
    inside = range(place.memory.data_ptr(), place.memory.data_ptr() + place.end)
    assert all(tensor.data_ptr() in inside for tensor in tensors[:-1]) and place.end <= len(place.memory)
    assert all(tensor.data_ptr() % 512 == place.memory.data_ptr() % 512 for tensor in (matrix, tensors[1], tensors[5]))
    place.memory.zero_()
    assert not matrix.any() and not tensors[3].any() and not tensors[4].any()


def test_weights_of_a_cpu_stay_where_they_are():
    assert move([torch.ones(3)], torch.device("cpu")) is None
