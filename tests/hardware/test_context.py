"""A GPU's context is asked for in the order of the driver's interface, and whatever fails is left to torch to say."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ridgeline.hardware.context import open_context


class Driver:
    """Notes what it is asked; `refuses` returns an error."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*given: Any) -> int:
            self.asked.append(name)
            return int(name == self.refuses)

        return call


@pytest.mark.parametrize(
    ("refuses", "asked"),
    [("", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]), ("cuInit", ["cuInit"])],
)
def test_asked_in_order(monkeypatch: pytest.MonkeyPatch, refuses: str, asked: list[str]) -> None:
    driver = Driver(refuses)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    open_context().join()
    assert driver.asked == asked


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    open_context().join()
    assert not raised
