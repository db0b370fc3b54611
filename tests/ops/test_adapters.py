"""What adapters add, by the path of a CPU and the kernels of a GPU, against float64; the kernels compile for Hopper anywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ridgeline.ops.adapters import AdapterOps, Bank, HostGroups
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.step import StepInputs
from ridgeline.ops.triton import adapters as kernels
from ridgeline.ops.triton.adapters import FEW_TOKENS, TritonAdapters
from ridgeline.quant.adapted import AdaptedFormat, AdaptedWeight
from ridgeline.quant.format import LinearShape, Part, Share
from ridgeline.quant.unquantized import UnquantizedFormat

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""Triton's interpreter computes products of bfloat16 wrongly."""
HOST = partial(HostGroups, REFERENCE.tokenwise.activate)
INPUTS, SLOTS, MAX_RANK = 4160, 4, 24
RANKS = {1: 8, 2: 24, 4: 3}
"""Slot 3 is empty."""


def step_of(slots: list[int], selected: torch.Tensor | None = None) -> StepInputs:
    """A step of a token for each slot, from rows in another order."""
    rows = torch.randperm(len(slots), generator=torch.Generator().manual_seed(1)).int()
    adapters = torch.zeros(len(slots), dtype=torch.int32)
    adapters[rows.long()] = torch.tensor(slots, dtype=torch.int32)
    count = torch.arange(len(slots) + 1, dtype=torch.int32)
    given = [tensor.to(DEVICE) for tensor in (rows, count, count[1:], count[1:], count[:-1])]
    step = StepInputs(*given, 1, 1, adapters=adapters.to(DEVICE))
    return step if selected is None else step.select(selected.int().to(DEVICE))


def weight_of(
    ops: AdapterOps, outputs: tuple[int, ...], dtype: torch.dtype
) -> tuple[AdaptedWeight, Bank, torch.Tensor]:
    """A linear with random adapters; the matrix of each slot in float64, that of the base as slot 0."""
    torch.manual_seed(2)
    bank = Bank(SLOTS, MAX_RANK)
    base = UnquantizedFormat(REFERENCE.matmul.unquantized, dtype, DEVICE)
    form = AdaptedFormat(base, bank, ops, REFERENCE.tokenwise, dtype, DEVICE)
    weight = form.create(LinearShape(INPUTS, tuple(Part(rows, 1) for rows in outputs)), Share())
    dense = torch.zeros(SLOTS + 1, sum(outputs), INPUTS, dtype=torch.float64)
    start = 0
    for part, rows in enumerate(outputs):
        matrix = torch.randn(rows, INPUTS).to(dtype) / INPUTS**0.5
        weight.load(part, "weight", matrix)
        dense[:, start : start + rows] += matrix.double()
        start += rows
    for slot, rank in RANKS.items():
        factors: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        start = 0
        for part, rows in enumerate(outputs):
            a, b = torch.randn(rank, INPUTS).to(dtype) / INPUTS**0.5, torch.randn(rows, rank).to(dtype)
            left_out = slot == 1 and part == 1
            factors.append(None if left_out else (a, b))
            dense[slot, start : start + rows] += 0 if left_out else b.double() @ a.double()
            start += rows
        weight.store(slot, factors)
    return weight, bank, dense


@pytest.mark.parametrize("make", [HOST, TritonAdapters])
@pytest.mark.parametrize(
    ("slots", "outputs", "dtype"),
    [
        ([2], (40,), torch.float32),
        ([0, 0, 0], (40,), torch.float32),
        ([1, 0, 2, 4, 1, 2], (130, 20, 20), torch.float32),
        ([4, 0, 1] * 9 + [2] * 20, (70, 40), torch.float32),
        pytest.param([1] * 16 + [2], (5000, 300, 40), torch.float32, marks=pytest.mark.long),
        ([2, 1] * 12, (48, 16, 16), HALF),
    ],
)
def test_tokens_get_what_their_adapters_add(
    make: Callable[[], AdapterOps], slots: list[int], outputs: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight, _, dense = weight_of(make(), outputs, dtype)
    x = torch.randn(len(slots), INPUTS).to(dtype)
    expected = torch.einsum("ti,toi->to", x.double(), dense[torch.tensor(slots)])
    near = {"rtol": 2e-2, "atol": 6e-2} if dtype is HALF else {"rtol": 1e-4, "atol": 1e-4}
    step = step_of(slots)
    torch.testing.assert_close(weight.apply(x.to(DEVICE), step).double().cpu(), expected, **near)
    stream = torch.randn(len(slots), sum(outputs)).to(dtype)
    added = weight.add(x.to(DEVICE), stream.to(DEVICE).clone(), step)
    torch.testing.assert_close(added.double().cpu(), expected + stream.double(), **near)


@pytest.mark.parametrize("make", [HOST, TritonAdapters])
@pytest.mark.parametrize(
    ("slots", "outputs", "dtype", "kind"),
    [
        ([2], (40, 40), torch.float32, "silu"),
        ([1, 0, 2, 4, 1, 2], (130, 130), torch.float32, "gelu_tanh"),
        pytest.param([4, 0, 1] * 6 + [2] * 20, (600, 600), torch.float32, "silu", marks=pytest.mark.long),
        ([0] * 20, (16, 16), HALF, "silu"),
    ],
)
def test_gated_outputs_are_activated_with_what_adapters_add(
    make: Callable[[], AdapterOps], slots: list[int], outputs: tuple[int, ...], dtype: torch.dtype, kind: str
) -> None:
    """Also those of tokens without an adapter."""
    weight, _, dense = weight_of(make(), outputs, dtype)
    x = torch.randn(len(slots), INPUTS).to(dtype)
    both = torch.einsum("ti,toi->to", x.double(), dense[torch.tensor(slots)])
    expected = REFERENCE.tokenwise.activate(both, kind)
    near = {"rtol": 2e-2, "atol": 6e-2} if dtype is HALF else {"rtol": 1e-4, "atol": 2e-4}
    got = weight.activate(x.to(DEVICE), kind, step_of(slots))
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got.double().cpu(), expected, **near)


def test_counters_are_zero_again() -> None:
    """A step's linears share them: of all slots, also of those with several blocks of A, after any number of products."""
    weight, bank, _ = weight_of(TritonAdapters(), (300, 20, 20), torch.float32)
    step, x = step_of([2, 1, 0, 4] * 6), torch.randn(24, INPUTS, device=DEVICE)
    first = weight.apply(x, step)
    torch.testing.assert_close(weight.apply(x, step), first, rtol=0, atol=0)
    group = TritonAdapters().group(bank, step)
    assert group is not None and not group.arrivals.any() and len(group.arrivals) > SLOTS


def test_only_selected_tokens_are_multiplied() -> None:
    slots, selected = [1, 2, 0, 4, 2], torch.tensor([1, 3])
    weight, _, dense = weight_of(TritonAdapters(), (32,), torch.float32)
    x = torch.randn(2, INPUTS)
    got = weight.apply(x.to(DEVICE), step_of(slots, selected))
    expected = torch.einsum("ti,toi->to", x.double(), dense[torch.tensor([2, 4])])
    torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-4, atol=1e-4)


def test_large_tiles() -> None:
    """The tiles of a long prompt, with few tokens."""
    slots = [2] * 70 + [0] * 30 + [1] * 5
    weight, bank, dense = weight_of(TritonAdapters(), (32,), torch.float32)
    step, x = step_of(slots), torch.randn(len(slots), INPUTS)
    ops = TritonAdapters()
    group = ops.group(bank, step)
    assert group is not None and group.is_sorted and len(slots) > FEW_TOKENS
    chosen = group.chosen
    places = chosen.new_empty(3, len(slots) // kernels.LARGE_ROWS + SLOTS + 1)
    order = torch.empty_like(chosen)
    kernels.sort_kernel[(SLOTS + 1,)](
        chosen,
        order,
        *places,
        len(slots),
        SLOTS + 1,
        ROWS=kernels.LARGE_ROWS,
        BLOCK=kernels.SORTED_AT_ONCE,
        num_warps=4,
        PDL=False,
    )
    large = kernels.Group(chosen, order, places, torch.zeros_like(places[0]), kernels.LARGE_ROWS, SLOTS + 1)
    got = ops.add(torch.zeros(len(slots), 32, device=DEVICE), x.to(DEVICE), weight.pairs, large)
    expected = torch.einsum("ti,toi->to", x.double(), (dense - dense[:1])[torch.tensor(slots)])
    torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 64, 2048])
def test_a_captured_step_serves_other_adapters_later(tokens: int) -> None:
    """A CUDA graph reads which row has which adapter, and the adapters themselves, when it is replayed."""
    weight, _, dense = weight_of(TritonAdapters(), (256, 64, 64), HALF)
    x, slots = torch.randn(tokens, INPUTS).to(HALF), [0] * tokens
    step, given = step_of(slots), x.to(DEVICE)
    weight.apply(given, step_of(slots))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = weight.apply(given, step)
    for number in (0, 1):
        slots = [(token + number) % 3 * 2 for token in range(tokens)]  # slots 0, 2 and 4
        assert step.adapters is not None
        step.adapters.copy_(step_of(slots).adapters)  # type: ignore[arg-type]
        if number:
            weight.store(4, [None] * 3)
            dense[4] = dense[0]
        graph.replay()
        expected = torch.einsum("ti,tio->to", x.double()[:16], dense[torch.tensor(slots[:16])].mT)
        torch.testing.assert_close(got[:16].double().cpu(), expected, rtol=2e-2, atol=6e-2)


FORM: dict[str, object] = {
    "PARTS": 3,
    "SPLITS": 8,
    "SORTED": True,
    "ROWS": 16,
    "MADE": kernels.MAKER_ROWS,
    "MADE_ELEMENTS": kernels.MAKER_ELEMENTS,
    "MAKERS": kernels.MOST_MAKERS,
    "USED": kernels.USER_OUTPUTS,
    "USED_ELEMENTS": kernels.USER_ELEMENTS,
    "PIECES": 1,
    "BLOCK": 16,
    "KIND": 0,
    "PDL": True,
}
"""Of q, k and v in a decode step."""
GATED: dict[str, object] = {"PARTS": 2, "USED": 128, "USED_ELEMENTS": 4096, "PIECES": 4, "BLOCK": 64, "KIND": 1}


def check_compiles(constants: dict[str, object]) -> str:
    """Compile the kernel for a Hopper GPU; the names of instructions that it has."""
    kernel, signature = kernels._adapt, {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument == "inner_ptr":
            signature[argument] = "*fp32"
        elif argument in ("x_ptr", "a_ptr", "b_ptr", "y_ptr", "out_ptr"):
            signature[argument] = "*bf16"
        else:
            signature[argument] = "*i32" if argument.endswith("_ptr") else "i32"
    numbers = ("inputs", "length", "outputs", "a_stride", "b_stride", "width")
    aligned = [name for name, kind in signature.items() if name in numbers or kind in ("*bf16", "*fp32")]
    apart = {(kernel.arg_names.index(argument),): [["tt.divisibility", 16]] for argument in aligned}
    options = {"num_warps": kernels.WARPS, "num_stages": 1}
    source = ASTSource(kernel, signature, constants, apart)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return " ".join(part for part in ("wgmma", "mma.sync", "cp.async", "griddepcontrol") if part in made.asm["ptx"])


@pytest.mark.parametrize(
    "constants",
    [
        FORM,
        pytest.param({**FORM, **GATED}, marks=pytest.mark.long),
        pytest.param({**FORM, "ROWS": 64, "SPLITS": 4, "BLOCK": 64}, marks=pytest.mark.long),
    ],
)
def test_the_kernel_compiles_for_hopper(constants: dict[str, object], apart) -> None:
    instructions = apart(check_compiles, constants)
    assert "mma" in instructions and "griddepcontrol" in instructions
