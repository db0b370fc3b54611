"""Sums over the GPUs of one host by a kernel of our own (peers.cu), for small messages, whose time is NCCL's latency.

Each GPU has memory that the others map (CUDA IPC) and write over NVLink with plain stores; multicast is not used. One shot: each
rank sends all of its numbers to all others, and adds what arrives; the arrival of the data is also the signal. Two shots: each rank
adds a part of the numbers and sends the sum, which moves 2 (n - 1) / n of a message instead of n - 1, for a second wait; with two
ranks both move the same. Sums are in rank order in float32, rounded once, so they have the same bits on all ranks. A sum starts
while the kernel before it ends, and the kernel behind it fetches weights while the sum waits for other ranks (PDL, see launch).

Source: NCCL's protocol LL (Jeaugey, NCCL 2.0, GTC 2017) for one shot; vLLM's custom all-reduce for the use of IPC memory and two
shots (github.com/vllm-project/vllm, csrc/custom_all_reduce.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t, c_uint, c_uint32, c_uint64
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ridgeline.ops.peer_memory import open_shared, share
from ridgeline.ops.triton import cuda, pairs
from ridgeline.ops.triton.launch import is_hopper

MOST_RANKS = 8
"""Must equal MOST of peers.cu."""
PROGRAMS, THREADS = 64, 256
ONE_SHOT_ROOM, TWO_SHOT_ROOM = 1 << 20, 8 << 20
"""Most bytes of a message."""
WIDEST = 1 << 14
"""Most numbers of a vector that is summed within a kernel."""
_MACROS = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}

Swap = Callable[[str], Sequence[str]]
"""Give a word to all ranks; returns those of all, in order."""


class _Addresses(ctypes.Structure):
    """Peers of peers.cu."""

    _fields_ = (("at", c_uint64 * MOST_RANKS),)


@cache
def source(dtype: torch.dtype) -> str:
    """Source text that NVRTC compiles."""
    macros = [f"#define {macro} {int(other == dtype)}" for other, macro in _MACROS.items()]
    return "\n".join((*macros, f"#define THREADS {THREADS}", (Path(__file__).parent / "peers.cu").read_text()))


class Layout:
    """Offsets into a rank's memory of `total` bytes: slots of one shot (twice the data); parts, sums and flags of two shots;
    vectors that are summed within a kernel."""

    def __init__(self, size: int) -> None:
        self.slot = 2 * ONE_SHOT_ROOM
        self.part = TWO_SHOT_ROOM // size // 16 * 16
        self.parts = 2 * size * self.slot
        self.sums = self.parts + 2 * size * self.part
        self.flags = self.sums + 2 * size * self.part
        self.vectors = self.flags + 2 * 4 * MOST_RANKS * PROGRAMS
        self.total = self.vectors + 2 * size * 4 * WIDEST


class Vectors(NamedTuple):
    """Memory of all ranks for sums of vectors within a kernel, see layers_ranks: two halves, each of WIDEST words per rank.

    addresses: int64 [size + 1], of each rank's memory as this GPU sees it, and of the word with which the host ends a wait. sums:
    int32 [1], number of sums so far. Both on the GPU; None: there is one rank.
    """

    addresses: torch.Tensor | None
    sums: torch.Tensor | None
    rank: int
    size: int


NO_VECTORS = Vectors(None, None, 0, 1)


class PeerSums:
    """Sums over `size` ranks of one host. All ranks call the same sums in the same order, on one stream each."""

    def __init__(self, rank: int, size: int, device: torch.device, memory: Sequence[int]) -> None:
        """memory: addresses of all ranks' memory as this GPU sees it, from `shared_memory`. It is kept until the process ends,
        because another rank may still write to it."""
        self._rank, self._size, self._layout = rank, size, Layout(size)
        self._memory = _Addresses((c_uint64 * MOST_RANKS)(*memory))
        self._counts = torch.zeros(2, PROGRAMS, dtype=torch.int32, device=device)
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """Read by waiting kernels. Not 0: they stop waiting."""
        self._alone = torch.zeros(2 * size * WIDEST, dtype=torch.int32, device=device)
        # Alone, what this rank sends to each rank arrives here in the place of what that rank sends.
        alone = [self._alone.data_ptr() + 4 * WIDEST * (other - rank) for other in range(size)]
        live = [address + self._layout.vectors for address in memory]
        self.vectors, self.vectors_alone = (
            Vectors(
                torch.tensor([*addresses, self._stop.data_ptr()], dtype=torch.int64, device=device),
                torch.zeros(1, dtype=torch.int32, device=device),
                rank,
                size,
            )
            for addresses in (live, alone)
        )
        """While the group is connected, and while it is muted."""
        self._kernels = {
            (dtype, name): pairs.kernel(device, source(dtype), name, 0)
            for dtype in _MACROS
            for name in ("one_shot", "two_shot")
        }

    @property
    def loaded(self) -> bool:
        return None not in self._kernels.values()

    def one_shot(self, x: torch.Tensor) -> bool:
        """Replace contiguous x by its sum over all ranks. Returns whether it did: a size must be a multiple of 8 bytes, up to
        ONE_SHOT_ROOM."""
        if x.nbytes % 8 or x.nbytes > ONE_SHOT_ROOM or x.dtype not in _MACROS:
            return False
        sizes = (x.nbytes // 8, self._layout.slot // 16, self._rank, self._size)
        self._launch(x, "one_shot", (), sizes)
        return True

    def two_shot(self, x: torch.Tensor) -> bool:
        """As one_shot, for sizes that are multiples of 16 bytes times ranks, up to TWO_SHOT_ROOM."""
        layout = self._layout
        if x.nbytes % (16 * self._size) or x.nbytes // self._size > layout.part or x.dtype not in _MACROS:
            return False
        sizes = (x.nbytes // 16 // self._size, layout.part // 16, self._rank, self._size)
        self._launch(x, "two_shot", (layout.parts, layout.sums, layout.flags), sizes)
        return True

    def stop(self) -> None:
        """End kernels that wait for another rank, now and later. Their sums are wrong."""
        self._stop.fill_(1)

    def _launch(self, x: torch.Tensor, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        kernel = self._kernels[x.dtype, name]
        assert kernel is not None
        if not x.nbytes:
            return
        if x.data_ptr() % 16:  # other ranks may have an aligned x, so all use the same kernel
            aligned = x.clone()
            self._launch(aligned, name, offsets, sizes)
            x.copy_(aligned)
            return
        counts = self._counts[int(name == "two_shot")]
        addresses = (c_uint64(at) for at in (x.data_ptr(), counts.data_ptr(), self._stop.data_ptr(), *offsets))
        kernel(PROGRAMS, THREADS, self._memory, *addresses, *map(c_uint32, sizes), early=True)


def peer_sums(rank: int, size: int, device: torch.device, swap: Swap) -> PeerSums | None:
    """Sums over the ranks of this host, or None on all of them if one lacks Hopper, the compiler or access to another's memory."""
    memory = shared_memory(rank, size, device, swap)
    sums = PeerSums(rank, size, device, memory) if memory else None
    agreed = set(swap("loaded" if sums is not None and sums.loaded else "")) == {"loaded"}
    return sums if agreed else None


def shared_memory(rank: int, size: int, device: torch.device, swap: Swap) -> list[int]:
    """Allocate zeroed memory that all ranks map. Returns the addresses of all ranks' memory, or none if a rank cannot have it."""
    mine, word = c_uint64(), b""
    if size <= MOST_RANKS and is_hopper(device) and cuda.available():
        try:
            cuda.call("cuMemAlloc_v2", byref(mine), c_size_t(Layout(size).total))
            cuda.call("cuMemsetD8_v2", mine, c_uint(0), c_size_t(Layout(size).total))
            cuda.call("cuCtxSynchronize")
            word = share(mine.value)
        except RuntimeError:
            word = b""
    words = swap(word.hex())
    if not all(words):
        return []
    memory: list[int] = []
    for number, shared in enumerate(words):
        try:
            memory.append(mine.value if number == rank else open_shared(bytes.fromhex(shared)))
        except RuntimeError:
            memory.clear()
            break
    return memory if all(swap("mapped" if memory else "")) else []
