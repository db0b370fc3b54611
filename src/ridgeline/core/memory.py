"""Heap memory of this process, as reported by the C library."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


@lru_cache(1)
def _c_library() -> Any:
    library = ctypes.CDLL(None)
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _MallocInfo
    return library


def allocated_bytes() -> int | None:
    """Bytes that malloc has allocated and not freed; None where the C library does not report them. Takes about 10 us."""
    library = _c_library()
    if not hasattr(library, "mallinfo2"):
        return None
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def return_free_memory() -> None:
    """Return freed memory to the operating system, where the C library supports it. Takes about a millisecond."""
    library = _c_library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
