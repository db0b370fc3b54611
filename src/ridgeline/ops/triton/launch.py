"""Programmatic dependent launch: a kernel is made ready while the one before it drains (CUDA guide, section 4.5).

A step is hundreds of short kernels, each waiting for the last. With this, the launch of a kernel overlaps the end of its
predecessor and only its work waits. Hopper and later; elsewhere, and in the interpreter, the switch is off.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OLDEST_CAPABILITY = (9, 0)


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
