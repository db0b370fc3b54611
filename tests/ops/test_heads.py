"""q, k and v of many tokens in one kernel: which it takes, that it compiles, and that nobody can tell by its results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import QkvShape
from ridgeline.ops.triton import cuda, heads, pairs, table
from ridgeline.ops.triton.heads import turned_heads
from ridgeline.ops.triton.launch import is_hopper
from ridgeline.ops.triton.qkv import qkv_write

HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
MOST_SHARED = 232448
"""Bytes of shared memory of a program on Hopper."""
LONGEST = 9000
"""Positions of the rotary table."""
SECTOR = 16
"""Bytes that a staged row is counted in."""
Given = tuple[torch.Tensor, torch.Tensor, QkvShape, KvView, StepInputs]


def stated() -> dict[str, str]:
    """Constants of the text that are plain numbers."""
    text = heads.source(heads.HEAD_SIZES[0])
    lines = [line.partition(";")[0] for line in text.splitlines() if line.startswith("constexpr u32")]
    pairs = (one.split(" = ") for line in lines for one in line.removeprefix("constexpr u32 ").split(", "))
    return {name: value for name, value in pairs if value.isdigit()}


def test_the_text_says_the_same_numbers() -> None:
    """The host lays out memory by its own constants; copies of a matrix are of whole swizzled rows."""
    numbers, text = stated(), heads.source(heads.HEAD_SIZES[0])
    for own, names in ((pairs, ("TOKENS", "STEP", "STAGES", "PAIR")), (heads, ("WIDE", "NARROW", "MULTIPLIERS"))):
        for name in names:
            assert int(numbers[name]) == getattr(own, name), name
    assert f"m64n{heads.WIDE}k16" in text and f"m64n{heads.NARROW}k16" in text
    assert f"__launch_bounds__({pairs.THREADS}, 1)" in text
    assert 2 * pairs.STEP == cuda.SWIZZLED_BYTES and (heads.TILE_FEATURES // pairs.PAIR) % 8 == 0
    assert heads.MULTIPLIERS * heads.ROWS_OF_WARP == pairs.TOKENS
    order = text.partition("struct Target {")[2].partition("}")[0]
    places = [order.index(name) for name, _ in heads.Target._fields_ if name not in ("q", "cache")]
    assert places == sorted(places) and order.index("*q, *cache") < min(places)


@pytest.mark.parametrize("head", heads.HEAD_SIZES)
def test_what_a_program_holds_fits(head: int) -> None:
    """Whole heads fill both products of a tile; staged rows lie in different banks; angles are no more than a stage."""
    assert heads.shared(head) <= MOST_SHARED
    assert heads.WIDE % head == heads.NARROW % head == 0
    assert (2 * head + heads.SPARE) // SECTOR % 2 == 1
    assert pairs.TOKENS * head * 4 <= 2 * pairs.STEP * (pairs.TOKENS + heads.TILE_FEATURES)


@pytest.mark.skipif(not cuda.available(), reason="needs the compiler that comes with torch for CUDA")
@pytest.mark.parametrize("head", heads.HEAD_SIZES)
def test_it_compiles(head: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a card."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = cuda.compiled(heads.source(head))
    assert code.startswith(b"\x7fELF") and b"turned_heads" in code


def given(
    tokens: int, counts: tuple[int, int], size: int, inputs: int, page_tokens: int = 64, major: bool = False
) -> Given:
    """Tokens in pages in no order, the last ones in the scratch page; a layer of a cache of three."""
    noise, device = torch.Generator("cuda").manual_seed(tokens), "cuda"
    outputs = (counts[0] + 2 * counts[1]) * size
    x, weight = (torch.randn(n, inputs, generator=noise, device=device).bfloat16() for n in (tokens, outputs))
    pages, each = -(-tokens // page_tokens) + 2, (2, counts[1], page_tokens, size)
    pool = torch.zeros((3, pages, *each) if major else (pages, 3, *each), dtype=torch.bfloat16, device=device)
    slots = torch.randperm((pages - 1) * page_tokens, generator=noise, device=device)[:tokens] + page_tokens
    slots[tokens - tokens // 8 :] = 0
    angle = torch.outer(torch.arange(LONGEST), 5e5 ** (-torch.arange(0, size, 2) / size)).to(device)
    shape = QkvShape(*counts, size, torch.stack((angle.cos(), angle.sin()), 1), None, None, 1e-5, False)
    position = torch.randint(0, LONGEST, (tokens,), generator=noise, device=device, dtype=torch.int32)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    step = StepInputs(none, none, none, position, none, tokens, tokens)
    return x, weight, shape, KvView(pool[1] if major else pool[:, 1], none[None], slots, None, None, 1.0), step


def told(view: KvView) -> torch.Tensor:
    """The pages, of the scratch page nothing: the last of many tokens to write there is not said."""
    return view.kv[1:].clone()


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes what it can take, whether it saves or not."""
    for name in ("FEWEST", "FEWEST_INPUTS"):
        monkeypatch.setattr(pairs, name, 0)
    monkeypatch.setattr(pairs, "saves", lambda *_: True)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize(
    ("tokens", "counts", "size", "inputs", "page_tokens"),
    [
        (1, (1, 1), 128, 64, 16),
        (130, (5, 1), 128, 1032, 16),
        (300, (6, 2), 64, 72, 48),
        (2311, (32, 8), 64, 2048, 64),
        (4200, (32, 8), 128, 192, 64),
        (8448, (32, 8), 128, 4096, 64),
    ],
)
@pytest.mark.parametrize("major", [False, True])
def test_the_bits_are_those_of_two_kernels(
    tokens: int, counts: tuple[int, int], size: int, inputs: int, page_tokens: int, major: bool
) -> None:
    """Also in a graph, and where neither tokens nor heads nor inputs fill a tile."""
    x, weight, shape, view, step = given(tokens, counts, size, inputs, page_tokens, major)
    want = qkv_write(F.linear(x, weight), shape, view, step)[0].clone()
    pages = told(view)
    view.kv.zero_()
    out = turned_heads(x, weight, shape, view, step)
    assert out is not None and torch.equal(out, want) and torch.equal(told(view), pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = turned_heads(x, weight, shape, view, step)
    assert again is not None
    again.zero_()
    view.kv.zero_()
    graph.replay()
    assert torch.equal(again, want) and torch.equal(told(view), pages)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens, norms of heads, heads of which a part turns, other numbers, rows apart."""
    x, weight, shape, view, step = given(pairs.FEWEST, (8, 2), 128, 1024)

    def none(*_: object) -> torch.Tensor:
        raise AssertionError("this was two kernels'")

    monkeypatch.setattr(pairs, "saves", lambda *_: True)
    assert turned_heads(x, weight, shape, view, step) is not None
    monkeypatch.setattr(pairs, "kernel", none)
    ones = torch.ones(128, dtype=x.dtype, device=x.device)
    wider = replace(view, kv=torch.cat((view.kv, view.kv), 4)[..., :128])
    refused: list[tuple[Any, ...]] = [
        (x[:-1], weight, shape, view, step),
        (x[:, :1000], weight[:, :1000], shape, view, step),
        (x.half(), weight.half(), shape, replace(view, kv=view.kv.half()), step),
        (torch.cat((x, x), 1)[:, :1024], weight, shape, view, step),
        (x, weight, replace(shape, q_norm=ones), view, step),
        (x, weight, replace(shape, k_norm=ones), view, step),
        (x, weight, replace(shape, cos_sin=shape.cos_sin[:, :, :32].contiguous()), view, step),
        (x, weight, replace(shape, cos_sin=shape.cos_sin[:, :, :].half()), view, step),
        (x, weight, shape, replace(view, kv=view.kv.to(torch.float8_e4m3fn)), step),
        (x, weight, shape, wider, step),
    ]
    for one in refused:
        assert turned_heads(*one) is None


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_the_table_takes_it_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """q as ever, k and v in the pages alone; with a bias, and where tiles do not fit, all three."""
    x, weight, shape, view, step = given(8448, (32, 8), 128, 1024)
    q, k, v = table.linear_heads(x, weight, None, shape, view, step)
    pages = told(view)
    assert k is None and v is None
    view.kv.zero_()
    with monkeypatch.context() as patched:
        patched.setattr(table, "turned_heads", lambda *_: None)
        same, k, v = table.linear_heads(x, weight, None, shape, view, step)
    assert k is not None and v is not None and torch.equal(same, q) and torch.equal(told(view), pages)
    bias = torch.zeros(len(weight), dtype=x.dtype, device=x.device)
    assert table.linear_heads(x, weight, bias, shape, view, step)[1] is not None
