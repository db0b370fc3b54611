"""What chunk_plan_kernel hands out, and Hopper's kernel: compiled everywhere, run where there is a Hopper GPU.

Gluon has no interpreter: without such a GPU, only that the kernel compiles can be tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ridgeline.ops.reference import REFERENCE

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from ridgeline.ops.triton import hopper, tuning
from ridgeline.ops.triton.chunk import UNIT_FIELDS, chunk_plan_kernel
from ridgeline.ops.triton.launch import overlap
from ridgeline.ops.triton.table import TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
TILE, KEYS, SMALL = 64, 32, 16
WAIT = "WARPGROUP.DEPBAR.LE"

ROWS = {
    "one": [(300, 300)],
    "pasts": [(900, 150), (70, 1), (130, 130), (500, 17), (20, 20)],
    "none": [(40, 1), (9, 2)],
    "idle-rows": [(100, 0), (0, 0), (77, 77)],
    "equal": [(90, 90)] * 4,
}


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("name", list(ROWS))
def test_units_are_every_chunk_once_in_order_of_their_tiles(name: str, group: int) -> None:
    rows = ROWS[name]
    q_start = torch.tensor([0, *(n for _, n in rows)], device=DEVICE).cumsum(0).int()
    length = torch.tensor([held for held, _ in rows], dtype=torch.int32, device=DEVICE)
    device_rows = torch.arange(len(rows), dtype=torch.int32, device=DEVICE) * 3 + 2
    wanted: dict[tuple[int, ...], int] = {
        (index * 3 + 2, begin, int(q_start[index]), n, held - n): (
            held - n + (min(begin + TILE, n * group) - 1) // group
        )
        // KEYS
        + 1
        for index, (held, n) in enumerate(rows)
        if n * group > SMALL
        for begin in range(0, n * group, TILE)
    }
    count = len(wanted) + 5
    units = torch.full((UNIT_FIELDS, count), -7, dtype=torch.int32, device=DEVICE)
    sizes = (len(rows), count, group, SMALL, TILE, KEYS)
    chunk_plan_kernel[(-(-count // 16),)](
        device_rows, q_start, length, units, *sizes, ROWS=64, BLOCK=16, **overlap(units.device)
    )
    found = [tuple(map(int, unit)) for unit in units.T]
    assert all(row == -1 and n == 0 for row, _, _, n, _ in found[:5])
    assert sorted(found[5:]) == sorted(wanted)
    tiles = [wanted[one] for one in found[5:]]
    assert tiles == sorted(tiles)


def compile_for_hopper(dim: int, page_tokens: int) -> None:
    """Compile the kernel as attention would launch it; no GPU is asked."""
    kernel, tile = hopper.hopper_kernel, tuning.HOPPER_TILE
    layout = hopper.cache_rows(torch.zeros(2, 2, 1, page_tokens, dim, dtype=torch.bfloat16), page_tokens).layout
    types = {name: "*i32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= {"q_ptr": "*bf16", "out_ptr": "*bf16", "lse_ptr": "*fp32", "scale": "fp32"}
    types["cache"] = f"tensordesc<bf16[{page_tokens},{hopper.HALF.value}],{layout!r}>"
    constants = {"kv_heads": 2, "group": 4, "page_tokens": page_tokens, "BOX": page_tokens, "KEYS": tile.keys}
    constants |= {"DIM": dim, "STAGES": tile.stages, "PDL": True}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # Memory and strides of a model's tensors, as launches find them: queries are copied 16 bytes at a time.
    aligned = ("q_ptr", "out_ptr", "lse_ptr", "q_token_stride", "q_head_stride")
    properties = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, fixed, properties)
    options = {"num_warps": tile.warps, "maxnreg": tuning.HOPPER_REGISTERS}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.num_warps == 12
    assert made.metadata.shared <= 227 * 1024
    # Between the wait for the scores and the one for the values' product, which runs meanwhile, stands the softmax.
    beside = [part.partition(WAIT)[0].count("MUFU.EX2") for part in made.asm["sass"].split(f"{WAIT} gsb0, 0x1")]
    assert len(beside) >= 1 + 2
    assert min(beside[1:]) >= tile.keys // 2


@pytest.mark.parametrize(("dim", "page_tokens"), [(128, 64), (64, 16)])
def test_the_hopper_kernel_compiles(apart: Callable[..., Any], dim: int, page_tokens: int) -> None:
    apart(compile_for_hopper, dim, page_tokens)


CHUNKS: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "whole": ([(300, 300)], {}),
    "pasts": ([(900, 300), (1000, 17), (130, 130), (77, 1), (3, 3)], {}),
    "many": ([(128, 128)] * 20, {}),
    "half-heads": ([(900, 300), (130, 130)], {"head_dim": 64}),
    "group-of-7": ([(900, 300), (130, 130)], {"heads": 14}),
    "small-pages": ([(900, 300), (130, 130)], {"page_tokens": 16}),
    "large-pages": ([(900, 300), (130, 130)], {"page_tokens": 256}),
    "padded": ([(400, 300), (130, 130)], {"padding": 9}),
}


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(CHUNKS))
def test_hopper_equals_the_reference(name: str, dtype: torch.dtype, batch: Callable[..., Any]) -> None:
    rows, fields = CHUNKS[name]
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 128, "page_tokens": 64} | fields
    case = batch(rows, junk=float("nan"), **shape).to(DEVICE, dtype)
    want, want_lse = REFERENCE.attention(case.q.double(), case.k, case.v, case.view, case.step)
    assert want_lse is not None
    owned = slice(0, int(case.step.q_start[-1]))
    out, lse = TRITON.attention(case.q, case.k, case.v, case.view, case.step)
    assert lse is not None
    assert (out[owned].double() - want[owned]).norm() < 1e-2 * want[owned].norm()
    assert (lse[owned].double() - want_lse[owned]).norm() < 1e-5 * want_lse[owned].norm()
    again, _ = TRITON.attention(case.q, case.k, case.v, case.view, case.step)
    assert torch.equal(again[owned], out[owned])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_a_captured_graph_follows_chunks(batch: Callable[..., Any]) -> None:
    """Also where the captured step's chunks are now rows of few tokens, and nothing is left for the kernel to do."""
    rows = [(900, 300), (400, 130), (77, 1)]
    case = batch(rows, heads=8, kv_heads=2, head_dim=128, page_tokens=64, junk=0.5).to(DEVICE, torch.bfloat16)
    step = case.step
    TRITON.attention(case.q, case.k, case.v, case.view, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = TRITON.attention(case.q, case.k, case.v, case.view, step)
    for counts in ([300, 130, 1], [1, 399, 0], [2, 3, 1]):
        lengths = [held for held, _ in rows]
        step.q_start.copy_(torch.tensor([0, *counts]).cumsum(0))
        total = sum(counts)
        row_of = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
        position = [held - n + place for held, n in zip(lengths, counts, strict=True) for place in range(n)]
        step.row_of[:total].copy_(row_of)
        step.position[:total].copy_(torch.tensor(position))
        graph.replay()
        want, _ = REFERENCE.attention(case.q.double(), case.k, case.v, case.view, step)
        assert (out[:total].double() - want[:total]).norm() < 1e-2 * want[:total].norm()
