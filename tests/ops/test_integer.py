"""The compiled integer linears equal the reference: any bits, groups, sizes, number of rows and threads."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.spec import NumberFormat
from ridgeline.ops.reference import INT_REFERENCE, dequantized, pack_bits, unpack_bits
from ridgeline.ops.table import IntMatrix, IntOps, Normed, Ops
from tests.combinations import crossed

BF16, F32 = torch.bfloat16, torch.float32
# outputs, inputs, group: of one group, of many, of a last one that is shorter, of chunks inside a group.
SHAPES = [(96, 64, 0), (49, 33, 32), (160, 300, 0), (96, 300, 64), (32, 300, 256), (32, 200, 96), (64, 256, 128)]


def made(
    outputs: int, inputs: int, form: NumberFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int]:
    """What IntOps.pack takes."""
    noise = torch.Generator().manual_seed(outputs + inputs + form.bits)
    group = form.group or inputs
    codes = torch.randint(0, 1 << form.bits, (outputs, inputs), generator=noise, dtype=torch.uint8)
    scales = (0.01 * torch.rand(outputs, -(-inputs // group), generator=noise) + 0.001).half().float()
    zeros = torch.randint(0, 1 << form.bits, scales.shape, generator=noise, dtype=torch.uint8)
    return codes, scales, zeros if form.zeros else None, form.bits, group


def both(ops: Ops, outputs: int, inputs: int, form: NumberFormat) -> tuple[IntOps, IntMatrix, IntMatrix]:
    given = made(outputs, inputs, form)
    return ops.matmul.integer, ops.matmul.integer.pack(*given), INT_REFERENCE.pack(*given)


def close(mine: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    error = {F32: 2.5e-4, BF16: 1e-2, torch.float16: 2e-3}[dtype]
    assert mine.dtype == dtype and (mine.double() - want.double()).norm() < error * want.double().norm()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_bits_come_back(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 77), dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (5, 3 * 4 * bits) and torch.equal(unpack_bits(packed, bits, 77), codes)


def test_the_reference_is_the_formula() -> None:
    """Against the dequantized matrix in float64, one bias, a shorter last group."""
    given = made(37, 75, NumberFormat(4, 32, zeros=True))
    x, bias = torch.randn(5, 75), torch.randn(37)
    want = x.double() @ dequantized(*given).double().t() + bias.double()
    close(INT_REFERENCE.linear(x, INT_REFERENCE.pack(*given), bias), want, F32)


@pytest.mark.parametrize(
    ("dtype", "bits", "threads"),
    crossed([F32, BF16, torch.float16], [3, 4, 8], (1, 2), quick=lambda *at: sum(at) % 2 == 0),
    indirect=["threads"],
)
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
def test_products(ops: Ops, threads: int, dtype: torch.dtype, bits: int, zeros: bool) -> None:
    """Plain, normed on the way in, added to a stream, gated."""
    for outputs, inputs, group in SHAPES:
        mine, matrix, plain = both(ops, outputs, inputs, NumberFormat(bits, group, zeros))
        x, stream = torch.randn(3, inputs).to(dtype), torch.randn(3, outputs).to(dtype)
        bias, norm = torch.randn(outputs).to(dtype), torch.rand(inputs).to(dtype)
        for given in (x, Normed(x, norm, 1e-5, True)):
            close(mine.linear(given, matrix, bias), INT_REFERENCE.linear(given, plain, bias), dtype)
            if outputs % 2 == 0:
                want = INT_REFERENCE.linear_activate(given, plain, bias, "silu")
                close(mine.linear_activate(given, matrix, bias, "silu"), want, dtype)
        want = INT_REFERENCE.linear_add(x, plain, None, stream)
        close(mine.linear_add(x, matrix, None, stream.clone()), want, dtype)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_token_alone_and_among_others(ops: Ops, threads: int, bits: int) -> None:
    """Bit for bit the same, in any company."""
    mine, matrix, plain = both(ops, 80, 288, NumberFormat(bits, 64))
    x = torch.randn(45, 288).bfloat16()
    want = torch.cat([mine.linear(row, matrix, None) for row in x.split(1)])
    close(want, INT_REFERENCE.linear(x, plain, None), BF16)
    for rows in range(1, 46):
        assert torch.equal(mine.linear(x[:rows], matrix, None), want[:rows])


@pytest.mark.parametrize("form", [NumberFormat(8), NumberFormat(4, 128), NumberFormat(3, 32)], ids=str)
def test_large_inputs_and_what_is_no_number(ops: Ops, form: NumberFormat) -> None:
    """One input a thousand times the others hides them no more than 15 bits do; a NaN stays with its token."""
    mine, matrix, plain = both(ops, 32, 256, form)
    x = torch.randn(4, 256)
    x[0, 7], x[1] = 1000.0, 0.0
    x[2, 3], x[3, 250] = float("nan"), float("inf")
    out = mine.linear(x, matrix, None)
    rest = x[:1].clone()
    rest[0, 7] = 0.0
    want = INT_REFERENCE.linear(x[:1], plain, None)
    scale = INT_REFERENCE.linear(rest, plain, None).norm()
    assert (out[:1] - want).norm() < 0.05 * scale
    assert torch.equal(out[1], torch.zeros(32)) and not out[2:].isfinite().any()


def test_every_code_is_read(ops: Ops) -> None:
    """Through a unit input, each code at each place of a piece."""
    for bits in (3, 4, 8):
        codes = torch.arange(32 * 32).view(32, 32).remainder(1 << bits).to(torch.uint8)
        given = (codes, torch.ones(32, 1), torch.zeros(32, 1, dtype=torch.uint8), bits, 32)
        out = ops.matmul.integer.linear(torch.eye(32) * 127, ops.matmul.integer.pack(*given), None)
        assert torch.equal(out.t().round().to(torch.int32), codes.int() * 127)
