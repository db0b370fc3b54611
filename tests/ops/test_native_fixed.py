"""The compiled operations in a fixed order: bit-equal rows whatever is computed beside them, and close to the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ridgeline.ops import native_cpu
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Normed, Ops

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def ops() -> Ops:
    library, what = native_cpu.load(fixed=True)
    if library is None:
        pytest.skip(what)
    return library


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (17, 33), (352, 512), (64, 1100)])
def test_a_row_is_the_same_among_any_number_of_rows(ops: Ops, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, stream = torch.randn(70, inputs).to(dtype), torch.randn(70, outputs).to(dtype)
    weight, gain = torch.randn(outputs, inputs).to(dtype) / 8, torch.rand(inputs).to(dtype)
    packed = ops.matmul.unquantized.pack(weight)

    def run(part: slice) -> tuple[torch.Tensor, ...]:
        gated = [ops.matmul.unquantized.linear_activate(x[part], packed, None, "silu")] if outputs % 2 == 0 else []
        deferred = Normed(x[part], gain, 1e-5, False)
        return (
            ops.matmul.unquantized.linear(deferred, packed, None),
            ops.matmul.unquantized.linear_add(x[part], packed, None, stream[part].clone()),
            *gated,
        )

    whole = run(slice(0, 70))
    want = stream.double() + x.double() @ weight.double().T
    error = (whole[1].double() - want).norm() / want.norm()
    assert error < (5e-3 if dtype == torch.bfloat16 else 1e-6), float(error)
    for rows in (1, 2, 3, 5, 7, 13, 16, 17, 33):
        for first in (0, 70 - rows):
            part = slice(first, first + rows)
            for out, all_rows in zip(run(part), whole, strict=True):
                assert torch.equal(out, all_rows[part]), (rows, first)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fields", [{}, {"window": 70}, {"window": 41, "softcap": 3.0}, {"heads": 5, "kv_heads": 1, "head_dim": 40}]
)
def test_a_query_is_the_same_however_its_row_is_cut(
    ops: Ops,
    fields: dict[str, Any],
    dtype: torch.dtype,
    batch: Callable[..., Any],
    pieces_of: Callable[..., Any],
) -> None:
    """A prompt at once, in chunks beside others, token by token."""
    case = batch([(430, 430), (90, 90), (5, 5)], **fields).to("cpu", dtype)
    whole, _ = ops.attention.attend(case.q, case.k, case.v, case.view, case.step)
    want, _ = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, case.step)
    error = (whole.double() - want).norm() / want.norm()
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5), float(error)
    cuts = [
        [(0, 0, 100)],
        [(0, 100, 430), (1, 0, 33)],
        [(1, 33, 90), (0, 429, 430), (2, 4, 5)],
        [(0, 250, 270), (2, 0, 5)],
        [(0, at, at + 1) for at in range(300, 430)],
        [(0, 399, 400)],
        [(0, 127, 129), (1, 50, 53)],
    ]
    for pieces in cuts:
        q, step, which = pieces_of(case, pieces)
        out, _ = ops.attention.attend(q, case.k, case.v, case.view, step)
        assert torch.equal(out, whole[which]), pieces
