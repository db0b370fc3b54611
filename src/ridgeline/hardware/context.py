"""Creates the CUDA context in a thread while the process imports torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Thread
from typing import Any


def open_context(load: Callable[[str], Any] = ctypes.CDLL, number: int = 0) -> Thread:
    """Start a thread that creates the primary context of a visible GPU, by default of the first, the default device of torch.

    The driver takes several hundred milliseconds and does not hold the GIL. The context stays until the process ends. Without a
    driver or a working GPU, the thread does nothing, and torch reports the error later.
    load: opens a library by name; raises OSError if it does not exist.
    """
    thread = Thread(target=_open, args=(load, number), name="context", daemon=True)
    thread.start()
    return thread


def _open(load: Callable[[str], Any], number: int) -> None:
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    # Each call returns 0 on success (CUDA driver API, cuda.h).
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), number) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
