"""The Triton kernels equal the reference: on a GPU where there is one, else in Triton's interpreter.

The interpreter computes a bf16 product wrongly, so it is asked for float32 and float16 only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.ops.noise import Purpose, row_key
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.rows import Gathered, Int, Knob, RowState, Spread
from ridgeline.ops.sample import sample as sample_plainly
from ridgeline.ops.step import SHORT

pytest.importorskip("triton")

from ridgeline.ops.triton import attention, tuning
from ridgeline.ops.triton.launch import processors
from ridgeline.ops.triton.table import TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])

DECODE = [(1, 1), (200, 1), (64, 1), (33, 1)]
MIXED = [(40, 7), (1, 1), (70, 50), (33, 1), (60, 5)]

ATTENTION: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "decode": (DECODE, {}),
    "decode-padded": ([*DECODE, (0, 1)], {}),
    "decode-one-split": ([(400, 1)], {}),
    "decode-one-in-large-pages": ([(400, 1)], {"page_tokens": 64}),
    "decode-one-window": ([(300, 1), (45, 1)], {"window": 100}),
    "decode-many": ([(20 + row, 1) for row in range(9)], {}),
    "decode-many-split": ([(20 + 40 * row, 1) for row in range(9)], {"head_dim": 24}),
    "verify-many-split": ([(60 + 30 * row, row % 5 + 1) for row in range(9)], {}),
    "verify": ([(40, 5), (200, 5), (9, 5)], {}),
    "mixed": (MIXED, {"padding": 3}),
    "whole-prompt": ([(70, 70)], {}),
    "mha": (MIXED, {"heads": 2}),
    "mqa-odd-sizes": (MIXED, {"heads": 5, "kv_heads": 1, "head_dim": 40}),
    "page-of-64": (MIXED, {"page_tokens": 64}),
    "wide-heads": (MIXED, {"heads": 2, "kv_heads": 1, "head_dim": 256}),
    "window": (MIXED, {"window": 19}),
    "window-decode": (DECODE, {"window": 19}),
    "softcap": (MIXED, {"softcap": 2.0}),
    "tree": (MIXED, {"tree": True}),
    "tree-only": ([(50, 10), (30, 10)], {"tree": True}),
    "tree-64": ([(100, 64), (64, 64)], {"tree": True, "heads": 4}),
    "tree-window": (MIXED, {"tree": True, "window": 9}),
    "compacted-window": (MIXED, {"compacted": True, "window": 30}),
    "layer-major": (MIXED, {"layer_major": True}),
}


def near(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative error in the 2-norm against a float64 result."""
    assert torch.isfinite(out).all()
    error = float((out.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype], error


def test_the_interpreter_runs_where_there_is_no_gpu() -> None:
    """Otherwise triton was imported before TRITON_INTERPRET was set, and nothing below would run."""
    from triton.runtime.interpreter import InterpretedFunction

    from ridgeline.ops.triton.gemv import resident_kernel

    assert isinstance(resident_kernel, InterpretedFunction) == (DEVICE == "cpu")


TWICE = ("decode", "decode-many-split", "verify", "mixed", "tree", "window-decode")
"""Cases that the slow interpreter computes a second time; a GPU does so with all."""
IN_HALF = ("decode", "decode-one-split", "decode-many-split", "mixed", "mqa-odd-sizes")
RUNS = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}")
    for name in ATTENTION
    for dtype in DTYPES
    # One dtype is enough for most in the slow interpreter.
    if DEVICE == "cuda" or dtype == torch.float32 or name in IN_HALF
]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_attention(name: str, dtype: torch.dtype, batch: Callable[..., Any]) -> None:
    rows, fields = ATTENTION[name]
    case = batch(rows, junk=float("nan"), **fields).to(DEVICE, dtype)
    want, want_lse = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, case.step)
    owned = slice(0, int(case.step.q_start[-1]))
    for _ in range(2 if DEVICE == "cuda" or name in TWICE else 1):  # the second time with the plan the step derived
        out, lse = TRITON.attention.attend(case.q, case.k, case.v, case.view, case.step)
        assert want_lse is not None and lse is not None
        seen = torch.isfinite(want_lse[owned, 0])
        near(out[owned][seen], want[owned][seen], dtype)
        near(lse[owned][seen], want_lse[owned][seen], dtype)


@pytest.mark.parametrize("name", ["mixed", "whole-prompt", "mqa-odd-sizes", "page-of-64", "window", "softcap"])
def test_a_token_alone_sees_what_it_saw(name: str, batch: Callable[..., Any]) -> None:
    rows, fields = ATTENTION[name]
    case = batch(rows, junk=float("nan"), **fields).to(DEVICE, torch.float32)
    want, _ = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, case.step)
    tokens = torch.tensor([3, 6, 40, 63][-len(rows) :], dtype=torch.int32, device=DEVICE)
    step = case.step.one_row_per_token(tokens)
    assert step is not None and step.decode
    q, k, v = (tensor.index_select(0, tokens) for tensor in (case.q, case.k, case.v))
    for ops in (TRITON, REFERENCE):
        near(ops.attention.attend(q, k, v, case.view, step)[0], want.index_select(0, tokens), torch.float32)


@pytest.mark.parametrize("name", ["tree", "compacted-window"])
def test_who_sees_otherwise_than_in_order_is_not_taken_alone(name: str, batch: Callable[..., Any]) -> None:
    rows, fields = ATTENTION[name]
    step, tokens = batch(rows, **fields).step, torch.tensor([3], dtype=torch.int32)
    assert step.one_row_per_token(tokens) is None and batch(MIXED).step.one_row_per_token(tokens) is not None
    assert batch(MIXED).step.one_row_per_token(tokens.repeat(5)) is None, "more than a 16th of the tokens"
    long = batch([(90, 90)]).step
    assert long.one_row_per_token(tokens) is not None and long.one_row_per_token(tokens.repeat(2)) is None, (
        "more than rows"
    )


def form_of(case: Any) -> tuple[str, Any]:
    """(name, configuration) of the split kernel for a case."""
    entry = attention.SPLIT.kernel_for(attention.shape_of(case.q, case.view, case.step))
    assert entry is not None
    return entry


def test_one_more_program_on_every_processor(batch: Callable[..., Any]) -> None:
    """As many rows and heads as run at a time only with the tile that takes less memory."""
    count = 7 * processors(torch.device(DEVICE)) // 4
    case = batch([(30 + row * 37 % 150, 1) for row in range(count)], head_dim=128).to(DEVICE, torch.float16)
    assert form_of(case)[0] == "snug"
    want, _ = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, case.step)
    near(TRITON.attention.attend(case.q, case.k, case.v, case.view, case.step)[0], want, torch.float16)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="as many tokens take the interpreter minutes")
@pytest.mark.parametrize("window", [None, 700])
def test_long_chunks_of_wide_heads(window: int | None, batch: Callable[..., Any]) -> None:
    """Tiles that only some devices hold."""
    fields = {"heads": 4, "kv_heads": 2, "head_dim": 256, "window": window, "softcap": 20.0, "junk": float("nan")}
    case = batch([(1700, 1500), (30, 1), (1100, 1100)], **fields).to(DEVICE, torch.bfloat16)
    want, _ = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, case.step)
    near(TRITON.attention.attend(case.q, case.k, case.v, case.view, case.step)[0], want, torch.bfloat16)


@pytest.mark.parametrize(("share", "early"), [(3.5, True), (7, True), (9, False)])
def test_several_rows_that_ask_for_keys_early(share: float, early: bool, batch: Callable[..., Any]) -> None:
    """Programs a processor up to which rows that only decode do, in both tiles: with keys of this step among the first, rows cut
    in parts, and a row of nothing."""
    count = int(share * processors(torch.device(DEVICE))) // 2
    rows = [(900, 1), (0, 1), (1, 1), *[(30 + row * 57 % 250, 1) for row in range(count - 3)]]
    case = batch(rows, head_dim=128, junk=float("nan")).to(DEVICE, torch.float16)
    form, config = form_of(case)
    assert (config.registers is not None) == bool(config.ahead) == early and form == ("snug" if share < 4 else "whole")
    want, want_lse = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, case.step)
    assert want_lse is not None
    seen = torch.isfinite(want_lse[:, 0])
    out, _ = TRITON.attention.attend(case.q, case.k, case.v, case.view, case.step)
    near(out[seen], want[seen], torch.float16)


def test_long_contexts_of_few_rows(batch: Callable[..., Any]) -> None:
    """Programs that ask for keys before they wait, and rows whose first such keys are this step's."""
    case = batch([(700, 1), (21, 1)]).to(DEVICE, torch.float16)
    case = replace(case, step=replace(case.step, max_length=SHORT + 1))
    form, config = form_of(case)
    assert form == "lone" and config.ahead and config.combined
    want, _ = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, case.step)
    near(TRITON.attention.attend(case.q, case.k, case.v, case.view, case.step)[0], want, torch.float16)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_row_that_is_split_among_many(mixed: bool, batch: Callable[..., Any]) -> None:
    """Its last program puts its parts together, though all programs run at a time: there is a wave of parts more."""
    count = processors(torch.device(DEVICE))
    case = batch([(900, 1), *[(50, 40)] * mixed, *[(30, 1)] * count], head_dim=64).to(DEVICE, torch.float16)
    form, config = form_of(case)
    kv_heads = case.view.kv.shape[2]
    programs, wave = len(case.step.rows) * kv_heads, count * tuning.SPLIT_PROGRAMS_PER_PROCESSOR
    assert form == "whole" and programs < wave < programs + config.spare * kv_heads
    want, _ = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, case.step)
    near(TRITON.attention.attend(case.q, case.k, case.v, case.view, case.step)[0], want, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("size", [96, 576])
def test_norms(size: int, offset: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, size).to(DEVICE, dtype), torch.randn(size).to(DEVICE, dtype)
    near(
        TRITON.tokenwise.rms_norm(x, weight, 1e-5, offset),
        REFERENCE.tokenwise.rms_norm(x.double(), weight, 1e-5, offset),
        dtype,
    )
    stream = torch.randn_like(x)
    want = stream + TRITON.tokenwise.rms_norm(x, weight, 1e-5, offset)
    joined = TRITON.tokenwise.norm_add(x, weight, 1e-5, offset, stream.clone())
    near(joined, want, dtype)
    assert dtype == torch.float32 or torch.equal(joined, want), "what joins a stream of 16 bits is rounded before"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activation(kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 2 * 1100).to(DEVICE, dtype)
    near(TRITON.tokenwise.activate(x, kind), REFERENCE.tokenwise.activate(x.double(), kind), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_capped(dtype: torch.dtype) -> None:
    logits = torch.cat((torch.linspace(-300, 300, 2500), torch.linspace(-0.1, 0.1, 500))).to(DEVICE, dtype).view(-1, 3)
    for given in (logits, logits[:, :2]):
        out = TRITON.tokenwise.cap(given, 30.0)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), 30 * torch.tanh(given.double() / 30), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fields", [{}, {"norms": True}, {"rope_dim": 8, "norms": True}, {"rope_dim": 24}])
def test_qkv_write(
    fields: dict[str, Any], dtype: torch.dtype, batch: Callable[..., Any], qkv_shape: Callable[..., Any]
) -> None:
    case = batch([(40, 7), (3, 1), (20, 5)]).to(DEVICE, dtype)
    shape = qkv_shape(6, 2, 32, fields.get("rope_dim", 32), fields.get("norms", False), DEVICE)
    qkv = torch.randn(13, 10 * 32).to(DEVICE, dtype)
    before = case.view.kv.clone()
    want = REFERENCE.attention.qkv_write(qkv.clone(), shape, case.view, case.step)
    want_kv = case.view.kv.clone()
    case.view.kv.copy_(before)
    for out, expected in zip(TRITON.attention.qkv_write(qkv, shape, case.view, case.step), want, strict=True):
        near(out, expected, dtype)
    near(case.view.kv, want_kv, dtype)
    untouched = before == want_kv
    assert torch.equal(case.view.kv[untouched], before[untouched])


def test_attention_reads_queries_out_of_the_projection(
    batch: Callable[..., Any], qkv_shape: Callable[..., Any]
) -> None:
    """q, k and v are views of one buffer; what qkv_write stored is what attention reads."""
    case = batch([(40, 7), (3, 1), (20, 20)]).to(DEVICE, torch.float32)
    shape = qkv_shape(6, 2, 32, 32, False, DEVICE)
    qkv = torch.randn(28, 10 * 32, device=DEVICE)
    want, _ = REFERENCE.attention.attend(
        *REFERENCE.attention.qkv_write(qkv.clone(), shape, case.view, case.step), case.view, case.step
    )
    out, _ = TRITON.attention.attend(
        *TRITON.attention.qkv_write(qkv, shape, case.view, case.step), case.view, case.step
    )
    near(out, want, torch.float32)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_sample_draws_what_the_sampler_draws(purpose: Purpose) -> None:
    rows, vocab = 24, 5000
    logits = (3 * torch.randn(rows, vocab)).to(DEVICE)
    logits[:, ::3] = float("-inf")
    # Columns of wider tables, as the runner has them.
    knobs, ints = torch.full((rows, 6), 9.0), torch.full((rows, 13), 77, dtype=torch.int32)
    knobs[:, 1] = torch.tensor([0.0, 0.3, 1.0, 2.0] * 6)
    ints[:, 8:10] = torch.tensor([row_key(-7 + row, row % 2) for row in range(rows)], dtype=torch.int32)
    ints[:, 2] = torch.arange(rows, dtype=torch.int32) * 1000
    knobs, ints = knobs.to(DEVICE), ints.to(DEVICE)
    temperature, key, position = knobs[:, 1], ints[:, 8:10], ints[:, 2]
    want = sample_plainly(logits, temperature, key, position, purpose)
    assert torch.equal(TRITON.sampler.sample(logits, temperature, key, position, purpose), want)
    assert len(set(want.tolist())) > rows // 2


def test_the_first_of_equals_is_drawn_and_never_a_token_that_is_not_there() -> None:
    vocab = 5000
    logits = torch.full((5, vocab), -1.0)
    logits[0, [4990, 70, 900]] = 2.0
    logits[4, 5], logits[4, 4990] = -0.0, 0.0
    logits[1] = float("-inf")
    logits[1, 4321] = -9.0
    logits[2] = float("nan")
    logits[2, :4096] = float("-inf")
    logits[3] = float("nan")
    zeros = torch.zeros(5, 2, dtype=torch.int32, device=DEVICE)
    drawn = TRITON.sampler.sample(
        logits.to(DEVICE), torch.zeros(5, device=DEVICE), zeros, zeros[:, 0], Purpose.TOKEN
    ).tolist()
    assert drawn[:2] == [70, 4321] and drawn[4] == 5
    assert all(0 <= token < vocab for token in drawn)


@pytest.mark.parametrize("deep", [False, True])
def test_draw_finds_what_sample_is_given(deep: bool) -> None:
    """Rows of any temperature side by side, some of them more than once."""
    ints = torch.randint(1, 50, (9, Int.STOP + 3), dtype=torch.int32).to(DEVICE)
    tokens, tables = ints.new_zeros(9, 90), ints.new_zeros(1, 9, 4)
    knobs = torch.rand(9, len(Knob)).to(DEVICE)
    knobs[:, Knob.TEMPERATURE] *= torch.arange(9, device=DEVICE) % 4 > 0
    temperature, ints[:, Int.TOP_K] = knobs[:, Knob.TEMPERATURE], 0
    knobs[:, Knob.TOP_P], knobs[:, Knob.MIN_P] = 1.0, 0.0
    rows = torch.tensor([5, 5, 5, 1, 3, 3, 4, 8, 0, 0], dtype=torch.int32, device=DEVICE)
    logits = torch.randn(len(rows), 5000).to(DEVICE)
    depth = torch.tensor([0, 1, 1, 0, 0, 1, 0, 0, 0, 0], dtype=torch.int32, device=DEVICE) if deep else None
    place = ints[rows, Int.KNOWN] if depth is None else ints[rows, Int.KNOWN] + depth
    want = TRITON.sampler.sample(logits, temperature[rows], ints[rows, Int.KEY : Int.KEY + 2], place, Purpose.TOKEN)
    state = RowState(tokens, ints, tables, 16)
    assert torch.equal(TRITON.sampler.draw(state, knobs, rows, logits, depth), want)


def row_state(rows: int = 9, width: int = 90) -> RowState:
    """Rows in the middle of their requests, some done, some about to end; row 0 as the engine has it."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 50, (rows, width), generator=generator, dtype=torch.int32)
    tables = torch.randint(1, 99, (2, rows, 12), generator=generator, dtype=torch.int32)
    ints = torch.randint(-1, 50, (rows, Int.STOP + 7), generator=generator, dtype=torch.int32)
    ints[:, Int.POSITION] = torch.arange(rows) * 7
    ints[:, Int.LENGTH] = torch.arange(rows) * 6 + 3
    ints[:, Int.KNOWN] = torch.arange(rows) * 7 + 1
    ints[:, Int.DONE] = torch.tensor([1, 0, 0, 0, 1, 0, 0, 0, 0])
    ints[:, Int.LIMIT] = torch.tensor([80, 80, 16, 80, 80, 37, 80, 80, 80])
    ints[:, Int.PROMPT], ints[:, Int.MIN_TOKENS] = 5, torch.tensor([0, 0, 0, 99, 0, 0, 0, 0, 0])
    ints[3, Int.STOP + 2] = ints[5, Int.STOP + 6] = ints[6, Int.STOP] = 31
    ints[0, : Int.LIMIT] = torch.tensor([0, 0, 1, 1])
    return RowState(tokens, ints, tables, 8)


def moved(state: RowState) -> RowState:
    return RowState(state.tokens.to(DEVICE), state.ints.to(DEVICE), state.tables.to(DEVICE), state.page_tokens)


def test_gather() -> None:
    state = row_state()
    row_ids = torch.tensor([4, 7, 1, 0, 0], dtype=torch.int32)
    n_query = torch.tensor([3, 1, 70, 0, 0], dtype=torch.int32)
    row_of = torch.repeat_interleave(torch.arange(5, dtype=torch.int32), torch.tensor([3, 1, 70, 0, 5]))
    place = torch.cat((torch.arange(3), torch.arange(1), torch.arange(70), torch.zeros(5))).int()
    tensors = (n_query, row_of, place)
    for spread in (None, Spread(*tensors), Spread(*tensors, -place // 2)):
        want = REFERENCE.sampler.gather(state, row_ids, spread)
        there = None
        if spread is not None:
            shift = None if spread.shift is None else spread.shift.to(DEVICE)
            there = Spread(*(tensor.to(DEVICE) for tensor in tensors), shift)
        got = TRITON.sampler.gather(moved(state), row_ids.to(DEVICE), there)
        for name in Gathered.__slots__:
            assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name


@pytest.mark.parametrize("shape", [(1, 3), (600, 3), (40_000, 3), (0, 3)])
def test_what_a_step_tells_comes_to_the_host(shape: tuple[int, int]) -> None:
    """Few numbers, more than a kernel writes, none; a part of wider rows; and other types."""
    values = torch.randint(-(1 << 31), (1 << 31) - 1, (shape[0], shape[1] + 4), dtype=torch.int32, device=DEVICE)
    for part in (values[:, 1:4].contiguous(), values[:, 1:4], values[:, 2], values[:, 0:2].float(), values.long()):
        copied = TRITON.sampler.to_host(part)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        assert copied.device.type == "cpu" and copied.dtype == part.dtype and torch.equal(copied, part.cpu())


def test_advance() -> None:
    state = row_state()
    rows = torch.tensor([3, 1, 4, 2, 5, 6, 0, 0], dtype=torch.int32)
    drawn = torch.full((8,), 31, dtype=torch.int32)
    there = moved(row_state())
    want, got = (
        REFERENCE.sampler.advance(state, rows, drawn),
        TRITON.sampler.advance(there, rows.to(DEVICE), drawn.to(DEVICE)),
    )
    assert torch.equal(got.cpu(), want)
    assert torch.equal(there.ints.cpu(), state.ints) and torch.equal(there.tokens.cpu(), state.tokens)
    assert set(want[:, 1].tolist()) == {0, 1, 2, 3}


@pytest.mark.gpu
def test_a_captured_graph_follows_the_device(batch: Callable[..., Any]) -> None:
    """Lengths, tables and rows are device data: a graph captured on one batch serves another of its shape."""
    if DEVICE != "cuda":
        pytest.skip("needs a CUDA device")
    first = batch([(300, 1), (20, 1), (700, 1)], heads=8, head_dim=128, page_tokens=64).to(DEVICE, torch.bfloat16)
    TRITON.attention.attend(first.q, first.k, first.v, first.view, first.step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = TRITON.attention.attend(first.q, first.k, first.v, first.view, first.step)
    for lengths in ([300, 20, 700], [5, 650, 1], [64, 128, 640]):
        first.step.length.copy_(torch.tensor(lengths))
        first.step.position.copy_(first.step.length - 1)
        graph.replay()
        want, _ = REFERENCE.attention.attend(first.q.double(), first.k, first.v, first.view, first.step)
        near(out, want, torch.bfloat16)
