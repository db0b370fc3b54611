"""The kernel that writes keys and values computes the same however many heads a program takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.triton import qkv as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "largest"),
    [
        pytest.param(*heads, largest, marks=[pytest.mark.long] * ((at + which) % 2))
        for at, heads in enumerate([(12, 4), (6, 6), (9, 3), (5, 1)])
        for which, largest in enumerate([1, 32 * 6, 1 << 20])
    ],
)
def test_tiles_of_many_tokens(
    heads: int,
    kv_heads: int,
    largest: int,
    batch: Callable[..., Any],
    qkv_shape: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "MANY_TOKENS", 1)
    monkeypatch.setattr(kernels, "LARGEST_TILE", largest)
    case = batch([(40, 7), (3, 1), (20, 5)], heads=heads, kv_heads=kv_heads).to(DEVICE, torch.float32)
    shape = qkv_shape(heads, kv_heads, 32, 24, True, DEVICE)
    qkv = torch.randn(13, (heads + 2 * kv_heads) * 32, device=DEVICE)
    other = replace(case.view, kv=case.view.kv.clone())
    want = REFERENCE.attention.qkv_write(qkv.clone(), shape, other, case.step)
    for out, expected in zip(kernels.qkv_write(qkv, shape, case.view, case.step), want, strict=True):
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(case.view.kv, other.kv, atol=1e-5, rtol=1e-5)
