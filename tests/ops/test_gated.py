"""Gate, up and SiLU of many tokens in one kernel: which it takes, that it compiles, and that nobody can tell by its results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ridgeline.ops.triton import cuda, gated, linears, pairs
from ridgeline.ops.triton.activation import activate
from ridgeline.ops.triton.gated import gated_product, saves
from ridgeline.ops.triton.launch import is_hopper
from ridgeline.ops.triton.pairs import group_of

HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
FEATURES, INPUTS = 14336, 4096
"""Of an 8B."""
MOST_SHARED = 232448
"""Bytes of shared memory of a program on Hopper."""
SECTOR = 16
"""Bytes that a copy's rows are counted in."""


@pytest.mark.parametrize(
    ("tokens", "features"),
    [(1536, FEATURES), (3072, FEATURES), (8192, FEATURES), (8448, FEATURES), (2048, 6144), (8448, 6144), (8448, 3072)]
    + [(2700, FEATURES), (4200, FEATURES)],
)
def test_what_its_tiles_fit_is_its(tokens: int, features: int) -> None:
    """Measured: 3 to 6 %, and 14 of the smallest model's; 2,700 and 4,200 tokens, of which tiles hold 4 to 5 % more, 3 to 4."""
    assert saves(tokens, features)


@pytest.mark.parametrize(
    ("tokens", "features"), [(1170, FEATURES), (3333, FEATURES), (5123, FEATURES), (2048, 3072), (8448, 1000)]
)
def test_what_they_do_not_fit_is_not(tokens: int, features: int) -> None:
    """5,123 tokens are paid like 5,376 (between 1 % less and .5 more), 3,333 like 3,584 (1 to 2 more), 144 tiles for 66 clusters
    like 198, and 1,000 features like 1,056."""
    assert not saves(tokens, features)


@pytest.mark.parametrize(
    ("tokens", "inputs"), [(8448, 4096), (8192, 4096), (2048, 4096), (8448, 8192), (70000, 2048), (1, 64)]
)
def test_groups_fit_the_cache_and_are_about_alike(tokens: int, inputs: int) -> None:
    group, tiles = group_of(tokens, inputs), -(-tokens // pairs.TILE_TOKENS)
    assert 1 <= group * pairs.TILE_TOKENS * 2 * inputs <= pairs.L2_BYTES
    assert -(-tiles // group) * group - tiles < -(-tiles // group)


def test_the_text_says_the_same_numbers() -> None:
    """The host lays out memory by its own constants; copies of a matrix are of whole swizzled rows."""
    text = gated.source()
    stated = dict(
        assignment.split(" = ")
        for line in text.splitlines()
        if line.startswith("constexpr u32")
        for assignment in line.removeprefix("constexpr u32 ").partition(";")[0].split(", ")
    )
    for module, names in ((pairs, ("TOKENS", "STEP", "STAGES", "PAIR")), (gated, ("FEATURES", "SIDES"))):
        for name in names:
            assert int(stated[name]) == getattr(module, name), name
    assert f"m64n{2 * gated.FEATURES}k16" in text
    assert f"__launch_bounds__({pairs.THREADS}, 1)" in text
    assert 2 * pairs.STEP == cuda.SWIZZLED_BYTES
    # Swizzled rows come in eights, and rows of results have to lie in different banks without being swizzled.
    assert gated.FEATURES % 8 == 0 and 2 * gated.FEATURES // SECTOR % 2 == 1
    assert gated.SHARED + 2 * pairs.STAGES * 8 <= MOST_SHARED


def test_what_lies_where_it_lay_has_the_same_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked once for an address, a shape, a pitch and a box, and again if any of them differs."""
    asked = []
    monkeypatch.setattr(cuda, "call", lambda *given: asked.append(given))
    cuda._tensor_map.cache_clear()
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    kept = cuda.tensor_map(x, (8, 64))
    assert cuda.tensor_map(x.view(64, 128), (8, 64)) is kept and len(asked) == 1
    for matrix, box in ((x, (16, 64)), (x, (8, 32)), (x[1:], (8, 64)), (x[:32], (8, 64)), (x[:, :64], (8, 64))):
        assert cuda.tensor_map(matrix, box) is not kept
    # The same address and shape, another pitch.
    assert cuda.tensor_map(x.view(128, 64)[::2], (8, 64)) is not cuda.tensor_map(x.view(128, 64)[:64], (8, 64))
    cuda._tensor_map.cache_clear()


@pytest.mark.skipif(not cuda.available(), reason="needs the compiler that comes with torch for CUDA")
def test_it_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a card; then it lies on disk."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = cuda.compiled(gated.source())
    assert code.startswith(b"\x7fELF") and b"gated_product" in code
    (kept,) = tmp_path.rglob("kernel.cubin")
    kept.write_bytes(b"from disk")
    assert cuda.compiled(gated.source()) == b"from disk"
    with pytest.raises(RuntimeError, match="nothing"):
        cuda.compiled("nothing that compiles")


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("tokens", "features", "inputs"),
    [(1, 8, 64), (130, 1000, 1032), (2311, 3072, 1024), (4200, 6144, 72), (2048, 14336, 4096)],
)
def test_the_bits_are_those_of_two_kernels(
    tokens: int, features: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a graph, and where neither tokens nor features nor inputs fill a tile."""
    noise = torch.Generator("cuda").manual_seed(tokens)
    x, weight = (torch.randn(n, inputs, generator=noise, device="cuda").bfloat16() for n in (tokens, 2 * features))
    want = activate(F.linear(x, weight), "silu")
    for name in ("FEWEST", "FEWEST_INPUTS"):
        monkeypatch.setattr(pairs, name, 0)
    monkeypatch.setattr(gated, "saves", lambda *_: True)
    out = gated_product(x, weight)
    assert out is not None and torch.equal(out, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = gated_product(x, weight)
    assert again is not None
    again.zero_()
    graph.replay()
    assert torch.equal(again, want)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_few_tokens_are_two_kernels() -> None:
    x, weight = (torch.randn(n, INPUTS, device="cuda").bfloat16() for n in (pairs.FEWEST - 1, 2 * FEATURES))
    assert gated_product(x, weight) is None and gated_product(x[:5], weight) is None


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_the_table_takes_it_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a bias, another activation, other numbers or rows that are not contiguous: these are two kernels'."""
    x, weight = (torch.randn(n, INPUTS, device="cuda").bfloat16() for n in (2048, 2 * FEATURES))
    bias, apart = torch.randn(2 * FEATURES, device="cuda").bfloat16(), torch.cat((x, x), 1)[:, :INPUTS]
    taken = linears.linear_activate(x, weight, None, "silu")
    assert gated_product(apart, weight) is None and gated_product(x.half(), weight.half()) is None

    def none(*given: object) -> torch.Tensor:
        raise AssertionError("this was two kernels'")

    with monkeypatch.context() as patched:
        patched.setattr(linears, "activate", none)
        assert torch.equal(linears.linear_activate(x, weight, None, "silu"), taken)
    with monkeypatch.context() as patched:
        patched.setattr(pairs, "kernel", none)
        for given in (
            (x, weight, bias, "silu"),
            (x, weight, None, "gelu_tanh"),
            (x.half(), weight.half(), None, "silu"),
        ):
            linears.linear_activate(*given)
        assert torch.equal(linears.linear_activate(apart, weight, None, "silu"), taken)
