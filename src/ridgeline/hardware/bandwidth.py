"""Measures memory bandwidth and matrix-product rate of this machine, for comparison with the hardware table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from ridgeline.hardware.table import Accelerator

GPU_PRODUCT, CPU_PRODUCT = 8192, 1024
"""Matrix sizes with which `measured_rates` measures the FLOP rate."""
GPU_BYTES, CPU_BYTES = 1 << 29, 1 << 27
"""Bytes that it reads, many times the size of the caches."""
HOST_BYTES = 1 << 26
"""Bytes that `host_link_rate` copies."""


@cache
def measured_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(FLOP/s of matrix products, bytes/s read) of a device. Measured once per process, which may load several models: it takes up
    to half a second on a CPU."""
    cuda = device.type == "cuda"
    flops = matmul_rate(device, dtype, GPU_PRODUCT if cuda else CPU_PRODUCT, 3)
    read = read_bandwidth(device, GPU_BYTES if cuda else CPU_BYTES, 3)
    if cuda:
        torch.cuda.empty_cache()
    return flops, read


def with_measured_rates(row: Accelerator, dtype: str) -> Accelerator:
    """`row`, with measured rates where the specification of this machine's processor is unknown.

    dtype: precision of matrix products that is measured. `Accelerator.measured` names the replaced figures.
    """
    if row.kind != "cpu" or (row.flops and row.bandwidth):
        return row
    flops, read = measured_rates(torch.device("cpu"), getattr(torch, dtype))
    unknown = {"dense": not row.flops, "memory.gb_s": not row.bandwidth}
    return replace(
        row,
        flops=row.flops or {dtype: flops},
        memory=replace(row.memory, bandwidth=row.bandwidth or read),
        measured=tuple(name for name, missing in unknown.items() if missing),
    )


def measured_note(row: Accelerator) -> str:
    """Which figures of a row `with_measured_rates` measured, in words; "" for none."""
    names = {"dense": "FLOP/s", "memory.gb_s": "memory bandwidth"}
    measured = " and ".join(names[field] for field in row.measured)
    return (
        f"Measured on this machine now, because the specification is unknown: {measured}. Other processes lower them."
        if measured
        else ""
    )


def read_bandwidth(device: torch.device, size_bytes: int = 1 << 28, repeats: int = 10) -> float:
    """Measure the read bandwidth in bytes per second: the faster of a sum and a matrix-vector product, best of `repeats`."""
    matrix = torch.ones(size_bytes // 4 // 1024, 1024, dtype=torch.float32, device=device)
    vector = torch.ones(1024, dtype=torch.float32, device=device)
    seconds = min(_best(matrix.sum, device, repeats), _best(lambda: matrix @ vector, device, repeats))
    return matrix.nbytes / seconds


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 1024, repeats: int = 10) -> float:
    """Measure FLOP/s of a square matrix product (a multiply-add counts as 2), best of `repeats`.

    On a CPU it uses float32 instead of `dtype` if a small product is faster in float32: without 16-bit instructions, torch is
    forty times slower in 16 bits, and kernels widen to float32. The matrices are random, because constant matrices switch fewer
    transistors and run faster on a chip at its power limit.
    """

    def rate(kind: torch.dtype, size: int, repeats: int) -> float:
        left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
        return 2 * size**3 / _best(lambda: left @ right, device, repeats)

    if device.type == "cpu":
        dtype = max((dtype, torch.float32), key=lambda kind: rate(kind, 256, 3))
    return rate(dtype, size, repeats)


def host_link_rate(device: torch.device, size_bytes: int = HOST_BYTES, repeats: int = 5) -> float:
    """Measure the rate of copies from pinned host memory to a GPU in bytes per second, best of `repeats`."""
    source = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return size_bytes / _best(lambda: target.copy_(source, non_blocking=True), device, repeats)


def _best(work: Callable[[], torch.Tensor], device: torch.device, repeats: int) -> float:
    """Shortest time of one call in seconds, after one warm-up call."""
    times = []
    for _ in range(repeats + 1):
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
