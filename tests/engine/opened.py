"""The engines and draft-size controllers behind objects that start engines of their own, such as LLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ridgeline.engine import local
from ridgeline.engine.assemble import assemble
from ridgeline.engine.engine import Engine
from ridgeline.speculation import build, speculator
from ridgeline.speculation.controller import Controller


@contextmanager
def opened_engines() -> Iterator[list[Engine]]:
    """The engines that are started meanwhile."""
    engines: list[Engine] = []

    def assembled(*given: Any) -> Engine:
        engines.append(assemble(*given))
        return engines[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "assemble", assembled)
        yield engines


@contextmanager
def opened_controllers() -> Iterator[list[Controller]]:
    """The controllers of the engines that are started meanwhile."""
    controllers: list[Controller] = []

    def made(*given: Any) -> Controller:
        controllers.append(Controller(*given))
        return controllers[-1]

    with pytest.MonkeyPatch.context() as patch:
        for module in (build, speculator):
            patch.setattr(module, "Controller", made)
        yield controllers
