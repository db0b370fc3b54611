"""A GPU's context, made while this process imports torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Thread
from typing import Any


def open_context(load: Callable[[str], Any] = ctypes.CDLL) -> Thread:
    """Begin to make the context of the first GPU that this process may use, the one that torch takes if nobody names another.
    It takes the driver a good part of a second, in which it asks nothing of Python. It stays until the process ends. Where
    there is no driver, or no GPU that works, nothing happens: torch will say so. load: opens a library by its name; OSError if
    there is none. -> the thread that does it."""
    thread = Thread(target=_open, args=(load,), name="context", daemon=True)
    thread.start()
    return thread


def _open(load: Callable[[str], Any]) -> None:
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    # Each says 0 if it went well (CUDA driver API, cuda.h).
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
