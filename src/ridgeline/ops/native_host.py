"""Products of the CPU inside a GPU's step: recorded calls of the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch

from ridgeline.hardware.bandwidth import host_link_rate
from ridgeline.hardware.probe import host_memory
from ridgeline.ops.native import capture
from ridgeline.ops.native.binding import Library
from ridgeline.ops.native_cpu import load
from ridgeline.ops.table import Ops


class HostCalls(Protocol):
    """Recorded work of the CPU."""

    def enqueue(self, device: torch.device) -> None:
        """Run it in the order of the current stream of a GPU, which CUDA graphs capture; at once if the device is a CPU."""


@dataclass(frozen=True, slots=True)
class HostOps:
    """Operations of the CPU. record: runs work on tensors of the CPU, and records it: (its result, in memory that every enqueued
    run writes to; the calls, None if it cannot be recorded). The result is in pinned memory if the second argument says so.
    link_rate: bytes/s of copies to a GPU. free_bytes: of its memory."""

    ops: Ops
    record: Callable[[Callable[[], torch.Tensor], bool], tuple[torch.Tensor, HostCalls | None]]
    link_rate: Callable[[torch.device], float]
    free_bytes: Callable[[], int]


def host_ops() -> HostOps | None:
    """Operations of the CPU for a machine with a GPU; None: the library is missing."""
    ops, _ = load()
    if ops is None:
        return None
    assert isinstance(ops.capture, capture.CallListCapture)
    return HostOps(ops, partial(record, ops.capture.library), host_link_rate, lambda: host_memory()[1])


def record(library: Library, work: Callable[[], torch.Tensor], pinned: bool) -> tuple[torch.Tensor, StreamCalls | None]:
    """See HostOps."""
    result, recorded = capture.record(library, work, pinned)
    return result, None if recorded is None else StreamCalls(library, recorded)


@dataclass(frozen=True, slots=True)
class StreamCalls:
    """Implements HostCalls."""

    library: Library
    recorded: capture.Recorded

    def enqueue(self, device: torch.device) -> None:
        words = ctypes.c_void_p(ctypes.addressof(self.recorded.words))
        if device.type == "cpu":
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.library.replay_in)(words)
            return
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        if status := _driver().cuLaunchHostFunc(stream, ctypes.c_void_p(self.library.replay_in), words):
            raise RuntimeError(f"cuLaunchHostFunc: {status}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
