"""The registry of kernels: the first entry that serves a shape and takes the operands multiplies, chosen once per shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.ops.triton import attention, kernels
from ridgeline.ops.triton.products import Launch, Products, ProductShape, multiply
from ridgeline.ops.triton.registry import Entry, Registry

SHAPE = ProductShape(3, 8, 4, torch.float32, torch.float32, torch.device("cpu"), aligned=True)


def returning(name: str | None, seen: list[Any]) -> Launch:
    def launch(x: Any, weight: Any, bias: Any, config: Any, stream: Any, kind: str | None) -> Any:
        seen.append((name, config, kind))
        return name

    return launch


def test_the_first_that_serves_and_takes_the_operands_multiplies() -> None:
    seen: list[Any] = []
    asked: list[ProductShape] = []

    def serves(shape: ProductShape) -> str | None:
        asked.append(shape)
        return "tile" if shape.tokens > 2 else None

    registry: Products = Registry(
        Entry("never", lambda shape: None, returning("never", seen), ""),
        Entry("refuses", serves, returning(None, seen), ""),
        Entry("multiplies", lambda shape: True, returning("multiplies", seen), ""),
    )
    for _ in range(2):
        assert multiply(registry, SHAPE._replace(kind="silu"), None, None, None, None) == "multiplies"
    assert seen == [(None, "tile", "silu"), ("multiplies", True, "silu")] * 2
    assert len(asked) == 1, "a shape is decided once"
    assert multiply(registry, SHAPE._replace(tokens=2), None, None, None, None) == "multiplies" and len(seen) == 5
    assert registry.kernel_for(SHAPE) == ("refuses", "tile")
    fewer = registry.without("refuses", "multiplies")
    assert fewer.kernel_for(SHAPE) is None and multiply(fewer, SHAPE, None, None, None, None) is None


REGISTRIES = {name: getattr(kernels, name) for name in ("PLAIN", "INTEGER", "FP8", "W8A8")}
REGISTRIES |= {name: getattr(attention, name) for name in ("SPLIT", "CHUNK")}


@pytest.mark.parametrize("name", REGISTRIES)
def test_every_kernel_says_what_was_measured(name: str) -> None:
    entries = REGISTRIES[name].entries
    assert all(entry.measured for entry in entries)
    assert len({entry.kernel for entry in entries}) == len(entries)
