"""Settings of a process that keeps thousands of requests at once."""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

FULL_COLLECTION_S = 600.0
"""Seconds between two full garbage collections."""
YOUNG_COLLECTION_S = 0.05
"""Seconds between two collections of the objects that came meanwhile."""
_NEVER = 1 << 30

_T = TypeVar("_T")


def raise_file_limit() -> None:
    """Raise the limit of open files to its hard limit, if the system allows it. A connection is an open file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def with_rare_collections(serving: Awaitable[_T]) -> _T:
    """The result of `serving`, a server that may have thousands of requests at once.

    Python collects all garbage whenever a quarter of its objects are new, and a full collection stops every request: among 1,500
    streams it took half a second and found a dozen objects, because requests leave next to no cycles. It now runs every
    FULL_COLLECTION_S seconds, without the objects of imports.

    Young garbage is collected every YOUNG_COLLECTION_S seconds. Python's own count does not do: objects of ended requests are
    subtracted from it, so that among 2,500 streams, as many of which ended as began, 700 counted were 20,000 to search, 8 to 17 ms.

    Python 3.14.0 to 3.14.4 ignore the third threshold and need none: they search old objects in increments. 3.14.5 went back to
    the generations of 3.13 (What's New in Python 3.15, gc).
    """
    raise_file_limit()
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], _NEVER)
    collecting = asyncio.create_task(_collect())
    try:
        return await serving
    finally:
        collecting.cancel()
        gc.set_threshold(*thresholds)


async def _collect() -> None:
    clock = asyncio.get_running_loop().time
    full = clock() + FULL_COLLECTION_S
    while True:
        await asyncio.sleep(YOUNG_COLLECTION_S)
        if clock() < full:
            gc.collect(1)  # of the two young generations
        else:
            gc.collect()
            full = clock() + FULL_COLLECTION_S
