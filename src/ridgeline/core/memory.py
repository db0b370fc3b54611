"""Memory of this process as the C library counts it."""

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
    """Bytes that malloc has handed out and not got back; None where the C library does not tell. Takes about 10 us."""
    library = _c_library()
    if not hasattr(library, "mallinfo2"):
        return None
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def return_free_memory() -> None:
    """Give memory that was freed back to the operating system, where the C library can. Takes about a millisecond."""
    library = _c_library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
