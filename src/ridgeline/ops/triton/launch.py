"""Hardware queries and programmatic dependent launch (PDL).

A step runs hundreds of short kernels in sequence. With PDL the launch of a kernel overlaps the end of its predecessor, and only its
loads of the predecessor's results wait. PDL needs Hopper or later. It is off on other GPUs and in Triton's interpreter.
Source: CUDA C++ programming guide, section 4.5, "Programmatic Dependent Launch and Synchronization".
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ridgeline.ops.triton import tuning

OLDEST_CAPABILITY = (9, 0)


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors (SMs) of a GPU. The interpreter reports 6, so that tests cover both split and unsplit rows."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 6


@cache
def gluon(device: torch.device, name: str) -> ModuleType | None:
    """Import a module of Gluon kernels if it runs on this device: Hopper, with a tested version of Triton. Otherwise None."""
    if not is_hopper(device) or not triton.__version__.startswith(tuning.GLUON_VERSIONS):
        return None
    return import_module(f"ridgeline.ops.triton.{name}")


@cache
def overlap(device: torch.device) -> dict[str, object]:
    """Launch arguments for PDL on `device`. The constexpr `PDL` makes the kernel wait for its inputs by itself."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def gdc_wait():
    """Wait until all earlier kernels have completed (PTX ISA, griddepcontrol).

    Instead of Triton's gdc_wait, which is an operation since 3.9: loads do not move across it, so a loop that contains it is not
    pipelined. The kernels read weights and old keys ahead of the wait on purpose.
    """
    tl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Allow the next kernel to launch, then wait until all earlier kernels have completed (no operation without PDL).

    Each program of a kernel calls this before it reads or writes anything but weights. The order is deliberate: the launch of the
    next kernel also overlaps this wait. It is safe because a wait ends only when the previous kernel has completed, and that kernel
    completed after its own wait (PTX ISA, griddepcontrol). Every kernel therefore sees the results of all earlier kernels.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
