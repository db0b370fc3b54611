"""Products of many tokens in 8 bits by cuBLASLt: what it refuses. That its results are right: tests/quant/test_kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.ops.reference import quantize
from ridgeline.ops.table import Fp8Matrix
from ridgeline.ops.triton import cublas


class Library:
    """Of which every call succeeds but the product, whose status is given."""

    def __init__(self, status: int) -> None:
        self.status = status

    def __getattr__(self, name: str) -> object:
        return lambda *_: self.status if name == "cublasLtMatmul" else 0


Launched = Callable[[int], tuple[list[bool], int]]
"""Status of the library -> what a product answers twice, and how often its kernel was chosen."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    chosen: list[tuple[object, ...]] = []
    use = cublas._Use(c_void_p(), c_void_p(), cublas.Algorithm())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(cublas.Product, "_use", lambda *given: chosen.append(given) or use)

    def launch(status: int) -> tuple[list[bool], int]:
        product = cublas.Product(Library(status), 64, 64)  # type: ignore[arg-type]
        x, weight = quantize(torch.zeros(512, 64)), quantize(torch.zeros(64, 64))
        matrix = Fp8Matrix(weight.values, weight.scales, torch.empty(0, dtype=torch.int32))
        out = torch.zeros(512, 64, dtype=torch.bfloat16)
        return [product(x, matrix, out, True) for _ in range(2)], len(chosen)

    return launch


@pytest.mark.parametrize("status", [7, 15])
def test_what_the_library_refuses_is_torchs_from_then_on(status: int, launched: Launched) -> None:
    done, asked = launched(status)
    assert done == [False, False] and asked == 1


def test_what_fails_is_no_refusal(launched: Launched) -> None:
    """The stream may have been written to."""
    with pytest.raises(RuntimeError, match="cublasLtMatmul: 13"):
        launched(13)
