"""A GPU's context is asked for in the order of the driver's interface, and whatever fails is left to torch to say."""

from __future__ import annotations

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
def test_asked_in_order(refuses: str, asked: list[str]) -> None:
    driver = Driver(refuses)
    open_context(lambda name: driver).join()
    assert driver.asked == asked


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_driver_is_no_error() -> None:
    asked: list[str] = []

    def missing(name: str) -> None:
        asked.append(name)
        raise OSError(name)

    open_context(missing).join()
    assert asked == ["libcuda.so.1"]
