"""Choose the operations of a device at start-up, and log the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec

import torch

from ridgeline.core.errors import ConfigError
from ridgeline.ops import native_cpu
from ridgeline.ops.cpu import CPU
from ridgeline.ops.cpu_invariant import CPU_INVARIANT
from ridgeline.ops.native.binding import TYPES
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Ops

log = logging.getLogger(__name__)

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST_CAPABILITY = (8, 0)
"""Compute capability from which bf16 products and asynchronous copies exist (Ampere)."""


def choose(
    device: torch.device,
    dtype: torch.dtype,
    eager: bool = False,
    load: Callable[..., tuple[Ops | None, str]] | None = None,
) -> Ops:
    """Return the fastest operations for `device` and `dtype`. Falls back to the reference with a warning.
    eager: use PyTorch on a CPU. load: loads the compiled CPU operations (None: native_cpu.load)."""
    missing = _missing(device, dtype)
    if missing:
        log.warning("operations: slow PyTorch reference on %s in %s, because %s", device, dtype, missing)
        return REFERENCE
    if device.type == "cpu":
        native, detail = (None, "disabled by --enforce-eager") if eager else (load or native_cpu.load)()
        if native is not None:
            log.info("operations: native in %s, %s", dtype, detail)
            return native
        log.info("operations: PyTorch in %s (native operations: %s)", dtype, detail)
        return CPU
    # Only here: Triton is an extra that a machine without a GPU need not have.
    from ridgeline.ops.triton.ahead import hashing
    from ridgeline.ops.triton.table import TRITON

    hashing()

    log.info("operations: Triton on %s in %s, large products by cuBLAS", torch.cuda.get_device_name(device), dtype)
    return TRITON


def choose_invariant(
    device: torch.device, dtype: torch.dtype, load: Callable[..., tuple[Ops | None, str]] | None = None
) -> Ops:
    """Return batch-invariant operations: a token's results do not depend on the other tokens of the step. Raises ConfigError if
    `device` and `dtype` have none. load: see choose."""
    missing = _missing(device, dtype)
    if missing:
        raise ConfigError(f"--deterministic is not possible on this device: {missing}.", param="deterministic")
    if device.type == "cpu":
        native, detail = (
            (load or native_cpu.load)(fixed=True) if dtype in TYPES else (None, f"they do not support {dtype}")
        )
        if native is None:
            log.warning("operations: PyTorch, one token at a time, which is slow (native operations: %s)", detail)
        return native or CPU_INVARIANT
    from ridgeline.ops.triton.invariant import INVARIANT

    log.info("operations: batch-invariant Triton on %s in %s", torch.cuda.get_device_name(device), dtype)
    return INVARIANT


def _missing(device: torch.device, dtype: torch.dtype) -> str:
    """Reason why the kernels are unusable, empty if they are usable."""
    if device.type not in ("cpu", "cuda"):
        return f"there are no kernels for {device.type}"
    if dtype not in KERNEL_DTYPES:
        return f"there are no kernels for {dtype}"
    if device.type == "cuda" and find_spec("triton") is None:
        return "triton is not installed (run `pip install triton`)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return "the GPU is older than compute capability 8.0"
    return ""
