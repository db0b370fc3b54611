"""Which kernels a device runs, and programmatic dependent launch: a kernel is made ready while the one before it drains (CUDA
guide, section 4.5).

A step is hundreds of short kernels, each waiting for the last. With this, the launch of a kernel overlaps the end of its
predecessor and only its work waits. Hopper and later; elsewhere, and in the interpreter, the switch is off.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.ops.triton import tuning

OLDEST_CAPABILITY = (9, 0)


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter gets few, so that tests see rows both split and whole."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 6


@cache
def gluon(device: torch.device, name: str) -> ModuleType | None:
    """A module of Gluon kernels for Hopper where they run. Their language may change from version to version of Triton."""
    if not is_hopper(device) or not triton.__version__.startswith(tuning.GLUON_VERSIONS):
        return None
    return import_module(f"ridgeline.ops.triton.{name}")


@cache
def overlap(device: torch.device) -> dict[str, object]:
    """Arguments of every launch on `device`: whether the kernel waits by itself (PDL) and is launched early."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Let the next kernel come up, then wait for all that earlier kernels wrote. Each program of a kernel calls it before
    it reads or writes anything but weights.

    In this order the next kernel's start overlaps this one's wait too. It is safe because a wait ends when the kernel
    before has completed, not when it lets others come up, and that one completed after its own wait (PTX ISA,
    griddepcontrol): so each kernel sees all that came before it.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
