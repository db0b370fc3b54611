"""Products of many tokens in 16 bits: which take the thrifty kernel, and that nobody can tell by their results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ridgeline.ops.triton import cublas
from ridgeline.ops.triton.cublas import saves
from ridgeline.ops.triton.launch import is_hopper

HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
GATE_UP, QKV, OUT = 28672, 6144, 4096
"""Outputs of an 8B."""


@pytest.mark.parametrize("tokens", [2300, 8192, 8448])
def test_what_its_tiles_fit_is_its(tokens: int) -> None:
    """Measured at the limit: 1.5 to 3 % of gate, up and qkv."""
    assert saves(tokens, GATE_UP) and saves(tokens, QKV)


@pytest.mark.parametrize(
    ("tokens", "outputs"), [(5123, GATE_UP), (3333, GATE_UP), (3333, QKV), (8192, OUT), (8448, OUT)]
)
def test_what_they_do_not_fit_is_not(tokens: int, outputs: int) -> None:
    """5,123 tokens would be paid like 5,376, 4,096 outputs like 4,224."""
    assert not saves(tokens, outputs)


@pytest.mark.parametrize(("tokens", "outputs"), [(2304, OUT), (2048, QKV), (1280, GATE_UP), (1, GATE_UP), (0, QKV)])
def test_few_tiles_are_not(tokens: int, outputs: int) -> None:
    """A last round that is hardly begun, and steps that no limit slows down."""
    assert not saves(tokens, outputs)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "inputs"), [(2304, 64), (2300, 1048), (2303, 4096)])
def test_the_bits_are_those_of_torch(
    dtype: torch.dtype, tokens: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By cuBLASLt, in a graph too, whatever was asked in between; by torch where memory is not as it needs it."""
    noise = torch.Generator("cuda").manual_seed(tokens)
    x, weight, more = (
        torch.randn(rows, inputs, generator=noise, device="cuda").to(dtype) for rows in (tokens, QKV, 8192)
    )
    want, want_more = F.linear(x, weight), F.linear(more, weight)
    apart = torch.empty(tokens, 2 * inputs, dtype=dtype, device="cuda")[:, :inputs].copy_(x)
    assert torch.equal(cublas.linear(apart, weight, None), want)

    def none(*given: object) -> torch.Tensor:
        raise AssertionError("this was torch's")

    with monkeypatch.context() as patched:
        patched.setattr(F, "linear", none)
        assert torch.equal(cublas.linear(x, weight, None), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cublas.linear(x, weight, None)
        assert torch.equal(cublas.linear(more, weight, None), want_more)
        out.zero_()
        graph.replay()
    assert torch.equal(out, want)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_a_bias_is_torchs() -> None:
    x, weight, bias = (torch.randn(shape, device="cuda").bfloat16() for shape in ((2304, 64), (QKV, 64), (QKV,)))
    assert saves(2304, QKV) and torch.equal(cublas.linear(x, weight, bias), F.linear(x, weight, bias))
