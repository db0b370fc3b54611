"""Products of many tokens in 8 bits by cuBLASLt: what it refuses. That its results are right: tests/quant/test_kernels.py."""

from __future__ import annotations

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


@pytest.mark.parametrize("status", [7, 15])
def test_what_the_library_refuses_is_torchs_from_then_on(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done, asked = _launched(status, monkeypatch)
    assert done == [False, False] and asked == 1


def test_what_fails_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream may have been written to."""
    with pytest.raises(RuntimeError, match="cublasLtMatmul: 13"):
        _launched(13, monkeypatch)


def _launched(status: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], int]:
    """What a product says twice, and how often its kernel was chosen."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    use = cublas._Use(c_void_p(), c_void_p(), cublas.Algorithm())
    monkeypatch.setattr(cublas.Product, "_use", lambda *given: chosen.append(given) or use)
    product = cublas.Product(Library(status), 64, 64)  # type: ignore[arg-type]
    x, weight = quantize(torch.zeros(512, 64)), quantize(torch.zeros(64, 64))
    matrix = Fp8Matrix(weight.values, weight.scales, torch.empty(0, dtype=torch.int32))
    out = torch.zeros(512, 64, dtype=torch.bfloat16)
    return [product(x, matrix, out, True) for _ in range(2)], len(chosen)
