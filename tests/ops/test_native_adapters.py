"""What the compiled operations add for LoRA adapters equals float64: every rank, odd sizes, any number of tokens and threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.core.formats import NUMBER_FORMATS
from ridgeline.ops.adapters import AdaptedMatrix, AdapterOps, Bank, HostGroups, Pairs
from ridgeline.ops.native_adapters import NativePairs
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import LayerParts, Matrix, Normed, Ops
from tests.combinations import crossed
from tests.ops.test_blocks import random_blocks
from tests.ops.test_native import BF16, DECODE, DTYPES, F32, MIXED, close, layer_parts, refuse

BANK = Bank(7, 256)
RANKS = {1: 8, 2: 16, 4: 64, 5: 256, 6: 24, 7: 40}
"""Slot 3 is empty."""


def random_pairs(
    adapters: AdapterOps,
    outputs: tuple[int, ...],
    inputs: int,
    dtype: torch.dtype,
    scale: float = 1.0,
    dense: Tensor | None = None,
) -> Pairs:
    """Random factors in the slots of RANKS. Memory that no slot has filled is NaN. dense: float64 [slots, outputs, inputs], is set
    to what each slot adds."""
    ends = tuple(accumulate(outputs))
    pairs = adapters.create(BANK, inputs, ends, dtype, torch.device("cpu"))
    assert pairs.most_rank == BANK.rank
    pairs.a.fill_(torch.nan)
    pairs.b.fill_(torch.nan)
    for slot, rank in RANKS.items():
        pairs.ranks[slot] = rank
        of_a, of_b = pairs.of(slot)
        of_a.copy_(torch.randn(of_a.shape) * inputs**-0.5)
        of_b.copy_(torch.randn(of_b.shape) * scale * rank**-0.5)
        if dense is not None:
            for part, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
                dense[slot, begin:end] = of_b[begin:end].double() @ of_a[part * rank : (part + 1) * rank].double()
        pairs.pack(slot)
        pairs.device_ranks[slot] = rank
    return pairs


def pairs_of(adapters: AdapterOps, outputs: tuple[int, ...], inputs: int, dtype: torch.dtype) -> tuple[Pairs, Tensor]:
    """`random_pairs`, and what each slot adds in float64, [slots, outputs, inputs]."""
    dense = torch.zeros(BANK.slots + 1, sum(outputs), inputs, dtype=torch.float64)
    return random_pairs(adapters, outputs, inputs, dtype, dense=dense), dense


def step_of(slots: list[int]) -> StepInputs:
    """A step of a token for each slot, from device rows in another order, whose numbers are a column of a table."""
    rows = torch.randperm(len(slots)).int()
    table = torch.full((len(slots), 3), 99, dtype=torch.int32)
    table[rows.long(), 1] = torch.tensor(slots, dtype=torch.int32)
    count = torch.arange(len(slots) + 1, dtype=torch.int32)
    return StepInputs(rows, count, count[1:], count[1:], count[:-1], 1, 1, adapters=table[:, 1])


SIZES = [((96, 32, 32), 96), ((130, 20, 19), 70), ((64,), 1100), ((1,), 1), ((5, 5), 33), ((16, 16, 8, 24), 64)]
SLOTS = {
    "one": [5],
    "empty": [0, 3, 0],
    "decode": [1, 0, 2, 3, 4, 1, 2, 7],
    "all": [*range(8)] * 3,
    "prompts": [5] * 37 + [0] * 9 + [6] * 70 + [1] * 3 + [2] * 2,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_every_token_gets_what_its_adapter_adds(ops: Ops, threads: int, slots: list[int], dtype: torch.dtype) -> None:
    adapters = ops.adapters(dtype)
    for outputs, inputs in SIZES:
        torch.manual_seed(len(slots))
        pairs, dense = pairs_of(adapters, outputs, inputs, dtype)
        x, y = torch.randn(len(slots), inputs).to(dtype), torch.randn(len(slots), sum(outputs)).to(dtype)
        expected = y.double() + torch.einsum("ti,toi->to", x.double(), dense[torch.tensor(slots)])
        got = adapters.add(y.clone(), x, pairs, adapters.group(BANK, step_of(slots)))
        close(got, expected, dtype)
        untouched = torch.tensor([slot in (0, 3) for slot in slots])
        assert torch.equal(got[untouched], y[untouched])


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_selected_tokens_and_other_forms_of_tensors(ops: Ops, dtype: torch.dtype) -> None:
    """Of a step, and an input that is not contiguous."""
    adapters = ops.adapters(dtype)
    pairs, dense = pairs_of(adapters, (64, 64), 48, dtype)
    step = step_of([1, 2, 0, 5, 2]).select(torch.tensor([4, 3, 2], dtype=torch.int32))
    x, stream = torch.randn(48, 3).to(dtype).T, torch.randn(3, 128).to(dtype)
    added = torch.einsum("ti,toi->to", x.double(), dense[torch.tensor([2, 5, 0])])
    group = adapters.group(BANK, step)
    close(adapters.add(stream.clone(), x, pairs, group), stream + added, dtype)
    close(
        adapters.activate(torch.zeros(3, 128, dtype=dtype), x, pairs, group, "silu"),
        REFERENCE.tokenwise.activate(added, "silu"),
        dtype,
        bf16_error=1e-2,
    )
    for other in ((stream.double(), x), (stream, x.double()), (torch.zeros(128, 3, dtype=dtype).T, x)):
        with pytest.raises(AssertionError):  # the kernels would read memory that is not there
            adapters.add(*other, pairs, group)


def test_a_slot_is_filled_again(ops: Ops) -> None:
    """By an adapter of another rank; a group of tokens that was made before stays valid."""
    adapters = ops.adapters(F32)
    pairs, _ = pairs_of(adapters, (48, 48), 64, F32)
    x, group = torch.randn(2, 64), adapters.group(BANK, step_of([5, 0]))
    for rank in (8, 0, 120):
        pairs.ranks[5] = rank
        a, b = (tensor.normal_() for tensor in pairs.of(5))
        expected = torch.zeros(2, 96, dtype=torch.float64)
        for part in range(2):
            rows = slice(part * 48, part * 48 + 48)
            expected[0, rows] = x[0].double() @ a[part * rank : (part + 1) * rank].double().T @ b[rows].double().T
        pairs.pack(5)
        pairs.device_ranks[5] = rank
        close(adapters.add(torch.zeros(2, 96), x, pairs, group), expected, F32)


def test_number_formats_without_kernels_take_the_definition(ops: Ops) -> None:
    assert isinstance(ops.adapters(torch.float16), HostGroups)


# --- whole layers -------------------------------------------------------------------------------------------------------------


class Adapted:
    """A layer with adapters for a program, and run one operation after the other."""

    def __init__(self, ops: Ops, dtype: torch.dtype, form: str, left_out: str) -> None:
        self.ops, self.adapters = ops, ops.adapters(dtype)
        self.linears: Any = {"": ops.matmul.unquantized, "q4_1": ops.matmul.blocks}.get(form, ops.matmul.integer)

        def pack(weight: Tensor) -> Any:
            if not form:
                return ops.matmul.unquantized.pack(weight)
            if form == "q4_1":
                return ops.matmul.blocks.pack(random_blocks(NUMBER_FORMATS[form], *weight.shape))
            bits = int(form[3:])
            codes = torch.randint(1 << bits, weight.shape, dtype=torch.uint8)
            scales = torch.rand(len(weight), weight.shape[1] // 32) * weight.shape[1] ** -0.5 / (1 << bits)
            return ops.matmul.integer.pack(codes, scales, None, bits, 32)

        plain = layer_parts(dtype, pack, {"bias": True, "d_ff": 512})  # large enough for two threads
        sizes = {"qkv": ((192, 64, 64), 96), "out": ((96,), 192), "gate_up": ((512, 512), 96), "down": ((96,), 512)}
        self.pairs = {}
        for name, (outputs, inputs) in sizes.items():
            self.pairs[name] = random_pairs(self.adapters, outputs, inputs, dtype, 0.5)
            if name == left_out:
                self.pairs[name].device_ranks.zero_()
        self.parts: LayerParts = replace(plain, **{name: self.matrix(plain, name) for name in sizes})

    def matrix(self, plain: LayerParts, name: str) -> AdaptedMatrix:
        matrix: Matrix = getattr(plain, name)
        return AdaptedMatrix(matrix.packed, matrix.bias, self.pairs[name])

    def apart(self, stream: Tensor, view: KvView, step: StepInputs) -> Tensor:
        parts, ops, linears = self.parts, self.ops, self.linears
        group = self.adapters.group(BANK, step)

        def product(name: str, x: Any, stream: Tensor | None = None) -> Tensor:
            matrix: Matrix = getattr(parts, name)
            if isinstance(x, Normed):
                x = ops.tokenwise.rms_norm(x.x, x.weight, x.eps, x.offset)
            if stream is None:
                y = linears.linear(x, matrix.packed, matrix.bias)
            else:
                y = linears.linear_add(x, matrix.packed, matrix.bias, stream)
            return y if group is None else self.adapters.add(y, x, self.pairs[name], group)

        eps, offset = parts.shape.norm_eps, parts.shape.norm_offset
        qkv = product("qkv", Normed(stream, parts.attention_norm, eps, offset))
        out, _ = ops.attention.attend(*ops.attention.qkv_write(qkv, parts.shape, view, step), view, step)
        stream = product("out", out.flatten(1), stream)
        gate_up = product("gate_up", Normed(stream, parts.feed_forward_norm, eps, offset))
        return product("down", ops.tokenwise.activate(gate_up, parts.activation), stream)


FORMS = [(F32, ""), (BF16, ""), (F32, "int4"), (BF16, "int8"), (F32, "q4_1")]
ROWS = [[(37, 1)], DECODE, [(20, 1)] * 13, MIXED]


@pytest.mark.parametrize(
    ("form", "rows", "left_out"),
    crossed(
        FORMS,
        ROWS,
        ("", "qkv", "gate_up"),
        # Each form with each number of rows once, and every other pair of values at least once.
        quick=lambda form, rows, left_out: left_out == (form + rows) % 3,
    ),
)
def test_layers_with_adapters_in_one_call(
    ops: Ops,
    threads: int,
    batch: Callable[..., Any],
    rows: list[tuple[int, int]],
    left_out: str,
    form: tuple[torch.dtype, str],
) -> None:
    dtype, number_format = form
    case = batch(rows).to("cpu", dtype)
    torch.manual_seed(7)
    layers = [Adapted(ops, dtype, number_format, left_out) for _ in range(2)]
    stream = torch.randn(len(case.q), 96).to(dtype)
    program, results = ops.programs.layers([layer.parts for layer in layers], refuse), {}
    for slots in ([5, 0, 2, 4, 2, 1], [0] * 6, [3] * 6, None):
        adapters = None if slots is None else torch.zeros(int(case.step.rows.max()) + 1, dtype=torch.int32)
        if adapters is not None and slots is not None:
            adapters[case.step.rows.long()] = torch.tensor(slots * 3, dtype=torch.int32)[: len(rows)]
        step = replace(case.step, adapters=adapters)
        views, twins = ([replace(case.view, kv=case.view.kv.clone()) for _ in layers] for _ in range(2))
        want = stream.clone()
        for layer, view in zip(layers, twins, strict=True):
            want = layer.apart(want, view, step)
        got = program(stream.clone(), views, step)
        close(got, want, dtype, bf16_error=1e-2)
        results[str(slots)] = got
    assert not torch.equal(results["None"], results["[5, 0, 2, 4, 2, 1]"])
    assert torch.equal(results["None"], results["[0, 0, 0, 0, 0, 0]"]), "without an adapter the program is the same"


def test_the_definition_holds_rows_as_they_are() -> None:
    """Only the compiled operations pack B."""
    pairs, dense = pairs_of(HostGroups(REFERENCE.tokenwise.activate), (40, 8), 24, F32)
    assert not isinstance(pairs, NativePairs)
    torch.testing.assert_close(pairs.of(1)[1][:40] @ pairs.of(1)[0][:8], dense[1, :40].float())
