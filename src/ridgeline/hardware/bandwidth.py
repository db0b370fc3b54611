"""How fast this machine really reads memory and multiplies: the measured ceilings beside the table's."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def read_bandwidth(device: torch.device, size_bytes: int = 1 << 28, repeats: int = 10) -> float:
    """Bytes per second at which `size_bytes` bytes are read: the better of a sum and a matrix-vector product, which is
    what decoding does; the best of `repeats`."""
    matrix = torch.ones(size_bytes // 4 // 1024, 1024, dtype=torch.float32, device=device)
    vector = torch.ones(1024, dtype=torch.float32, device=device)
    seconds = min(_best(matrix.sum, device, repeats), _best(lambda: matrix @ vector, device, repeats))
    return matrix.nbytes / seconds


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 1024, repeats: int = 10) -> float:
    """FLOP/s of a square product of `size` (a multiply-add is 2), the best of `repeats`; of numbers in `dtype`, or, on a CPU, in
    float32, to which kernels widen them, if a small product is faster so: without instructions for 16 bits torch takes forty
    times as long. Of random numbers: ones toggle fewer transistors, so a chip at its power limit multiplies them faster than
    anything real."""

    def rate(kind: torch.dtype, size: int, repeats: int) -> float:
        left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
        return 2 * size**3 / _best(lambda: left @ right, device, repeats)

    if device.type == "cpu":
        dtype = max((dtype, torch.float32), key=lambda kind: rate(kind, 256, 3))
    return rate(dtype, size, repeats)


def _best(work: Callable[[], torch.Tensor], device: torch.device, repeats: int) -> float:
    """Shortest time of one call in seconds, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
