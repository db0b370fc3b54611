"""Products of many tokens in 16 bits: which kernel takes them, and that nobody can tell by their results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ridgeline.ops.triton import cublas
from ridgeline.ops.triton.cublas_tiles import KERNELS, OUTPUT_PAIR, THRIFTY, TOKEN_PAIR, Kernel, kernel_for, saves
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


def _tile(kernel: Kernel | None) -> tuple[int, int] | None:
    return None if kernel is None else (kernel.outputs, kernel.tokens)


@pytest.mark.parametrize(
    ("tokens", "n", "k", "tile"),
    [
        (448, GATE_UP, OUT, (128, 112)),
        (1170, GATE_UP, OUT, (128, 168)),
        (832, OUT, 14336, (128, 208)),
        (1664, OUT, 14336, (128, 208)),
        (640, QKV, OUT, (192, 160)),
        (2304, QKV, OUT, (176, 128)),
    ],
)
def test_tiles_fill_the_last_round(tokens: int, n: int, k: int, tile: tuple[int, int]) -> None:
    """The fastest of those that were measured, by 4 to 14 % against the first of the heuristic's list; beyond, the thrifty one."""
    assert _tile(kernel_for(tokens, n, k)) == tile


@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [
        (256, GATE_UP, OUT),
        (320, 1024, 3072),
        (1170, 1280, 8192),
        (5123, GATE_UP, OUT),
        (300, 64, OUT),
        (512, QKV, 1024),
    ],
)
def test_few_tiles_are_torchs(tokens: int, n: int, k: int) -> None:
    """Nothing of these fills the chip, or their tiles; or others were measured there."""
    assert kernel_for(tokens, n, k) is None


def test_a_pair_has_two_tiles_and_widths_are_classes() -> None:
    """No program of a pair is without work; what lies between two multiples of eight tokens has one kernel."""
    for n, k in ((GATE_UP, OUT), (QKV, OUT), (OUT, 14336), (3584, 18944)):
        for tokens in range(264, 2041, 8):
            kernel = kernel_for(tokens, n, k)
            assert kernel == kernel_for(tokens - 7, n, k)
            if kernel is not None:
                assert -(-n // kernel.outputs) % 2 == 0 or kernel.pair == TOKEN_PAIR
                assert -(-tokens // kernel.tokens) % 2 == 0 or kernel.pair == OUTPUT_PAIR


def test_forms_are_what_the_heuristic_lists() -> None:
    """As read on an H200 from its lists (CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION)."""
    listed = {
        (128, 128, 3): 1,
        (192, 112, 5): 3,
        (176, 128, 5): 2,
        (176, 128, 3): 0,
        (256, 128, 5): 7,
        (192, 128, 3): 5,
    } | {
        (128, 192, 3): 4,
        (192, 192, 3): 4,
        (128, 176, 3): 1,
        (128, 184, 3): 5,
    }
    forms = {(one.outputs, one.tokens, one.pair): one.form for one in KERNELS}
    assert {key: forms[key] for key in listed} == listed
    assert len(forms) == len(KERNELS) == len({(one.tile, one.pair) for one in KERNELS}) and THRIFTY.form == 2


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "inputs"), [(448, 4096), (1672, 1048), (2304, 64), (2300, 1048), (2303, 4096)])
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


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_kernel_that_is_named(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes torch's bits of a shape that fits no tile, alone and joined to a stream."""
    assert cublas._names(dtype)
    noise = torch.Generator("cuda").manual_seed(0)
    x, weight, stream = (
        torch.randn(s, generator=noise, device="cuda").to(dtype) for s in ((1037, 520), (2056, 520), (1037, 2056))
    )
    want, joined = F.linear(x, weight), torch.addmm(stream, x, weight.t())
    library = cublas._library()
    assert library is not None
    for kernel in KERNELS:
        with monkeypatch.context() as patched:
            patched.setattr(cublas, "kernel_for", lambda *given, one=kernel: one)
            out, sums, run = torch.empty_like(want), stream.clone(), cublas.Product(library, dtype, *weight.shape)
            assert run(weight, x, (), out, False) and torch.equal(out, want), kernel
            assert run(weight, x, (), sums, True) and torch.equal(sums, joined), kernel


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_the_stream_is_joined_in_its_place() -> None:
    """Where a kernel is named, and only there; a stream of another type is not taken."""
    noise = torch.Generator("cuda").manual_seed(1)
    x, weight, stream = (
        torch.randn(s, generator=noise, device="cuda").bfloat16() for s in ((832, OUT), (OUT, OUT), (832, OUT))
    )
    want = torch.addmm(stream, x, weight.t())
    assert not cublas.added(x, weight, stream.float()) and not cublas.added(x[:200], weight, stream[:200])
    assert cublas.added(x, weight, stream) and torch.equal(stream, want)


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
    monkeypatch.setattr(cublas, "kernel_for", lambda *given: chosen.append(given) or THRIFTY)
    product = cublas.Product(Library(status), torch.bfloat16, 64, 64)  # type: ignore[arg-type]
    x, weight, out = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (512, 64, 512))
    return [product(weight, x, (), out, True) for _ in range(2)], len(chosen)
