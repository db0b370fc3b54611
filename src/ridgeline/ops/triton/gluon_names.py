"""Operations of Gluon whose names differ between Triton 3.6 and 3.9."""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.9 keeps the old name of the copy, which raises there.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Issue a TMA load into shared memory: async_load(descriptor, place, barrier, target)."""
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Wait for all threads of the program's partition."""
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
"""Shared memory as another type: reinterpret(memory, dtype, shape, layout)."""
