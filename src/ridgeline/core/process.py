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
_NEVER = 1 << 30
_YOUNG = 2
"""Collections of the first generation before one of the second; Python's own number is 10."""

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
    FULL_COLLECTION_S seconds, without the objects of imports. Young garbage is collected in smaller parts than Python's,
    whose second generation of 7,000 objects takes 3 ms.

    Python 3.14.0 to 3.14.4 ignore the third threshold and need none: they search old objects in increments. 3.14.5 went back to
    the generations of 3.13 (What's New in Python 3.15, gc).
    """
    raise_file_limit()
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(thresholds[0], _YOUNG, _NEVER)
    collecting = asyncio.create_task(_collect())
    try:
        return await serving
    finally:
        collecting.cancel()
        gc.set_threshold(*thresholds)


async def _collect() -> None:
    while True:
        await asyncio.sleep(FULL_COLLECTION_S)
        gc.collect()
