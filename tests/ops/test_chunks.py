"""What chunk_plan_kernel hands out, and Hopper's kernel: compiled where CUDA's compiler is, run where there is a Hopper GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.step import KvView, StepInputs

pytest.importorskip("triton")

from triton import knobs

from ridgeline.ops.triton import attention, cuda, hopper, pairs
from ridgeline.ops.triton.chunk import UNIT_FIELDS, chunk_plan_kernel
from ridgeline.ops.triton.launch import overlap
from ridgeline.ops.triton.table import TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
TILE, KEYS, SMALL = 64, 32, 16
PLAIN = hopper.Form(windowed=False, capped=False, bounded=False)
ALL = hopper.Form(windowed=True, capped=True, bounded=False)
BOUNDED = hopper.Form(windowed=True, capped=True, bounded=True)
NO_TABLE = torch.zeros(0)
WAIT = "WARPGROUP.DEPBAR.LE"
MOST_SHARED = 232448
"""Bytes of shared memory of a program on Hopper."""

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
    actual = [tuple(map(int, unit)) for unit in units.T]
    assert all(row == -1 and n == 0 for row, _, _, n, _ in actual[:5])
    assert sorted(actual[5:]) == sorted(wanted)
    tiles = [wanted[column] for column in actual[5:]]
    assert tiles == sorted(tiles)


@pytest.mark.parametrize("dim", hopper.KEYS)
def test_the_text_says_the_same_numbers(dim: int) -> None:
    """The host lays out memory and cuts units by its own constants, and passes a structure that the text declares again."""
    text = hopper.source(dim, torch.bfloat16, PLAIN)
    lines = [line.partition(";")[0] for line in text.splitlines() if line.startswith("constexpr u32")]
    stated = dict(
        assignment.split(" = ") for line in lines for assignment in line.removeprefix("constexpr u32 ").split(", ")
    )
    for name in ("GROUPS", "HALF", "STAGES"):
        assert int(stated[name]) == getattr(hopper, name), name
    assert stated["QUEUED"] == "DIM < 256 ? 2 : 1" and hopper.KEYS[dim] % (8 * pairs.PAIR) == 0
    assert int(stated["PAIR"]) == pairs.PAIR
    assert (
        f"#define KEYS {hopper.KEYS[dim]}u" in text and f"m64n{hopper.KEYS[dim]}k16" in text and f"m64n{dim}k16" in text
    )
    assert f"__launch_bounds__({hopper.THREADS}, 1)" in text
    declared = re.findall(r"\b(u32|float) ([a-z_, ]+);", text.partition("struct Sizes {")[2].partition("};")[0])
    names = [(name, kind) for kind, line in declared for name in line.split(", ")]
    kinds = {"u32": hopper.c_uint32, "float": hopper.c_float}
    assert [(name, kinds[kind]) for name, kind in names] == list(hopper.Sizes._fields_)
    assert hopper.shared_bytes(dim) + 4 * hopper.STAGES * 8 <= MOST_SHARED


@pytest.mark.parametrize("by", [1, 2, 3, 4, 7, 8, 16, 48, 64, 256])
def test_a_product_divides(by: int) -> None:
    """Packed queries by a group, slots by a page: up to 2^23 of them."""
    numbers = torch.cat((torch.arange(4096), torch.randint(0, 1 << 23, (4096,)), torch.tensor([(1 << 23) - 1])))
    assert torch.equal(numbers * hopper._inverse(by) >> hopper.BITS, numbers // by)


def test_who_takes_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, heads, pages and strides that copies take, queries in order; nothing where there is no kernel."""
    monkeypatch.setattr(hopper, "kernel", lambda device, dim, dtype, form: dim in hopper.KEYS or None)
    none = torch.empty(0, dtype=torch.int32)
    chunk = StepInputs(none[:1], none, none, none, none, 300, 300)
    q, kv = torch.zeros(3, 8, 128, dtype=torch.bfloat16), torch.zeros(4, 2, 2, 64, 128, dtype=torch.bfloat16)

    def takes(q: torch.Tensor, kv: torch.Tensor, step: StepInputs = chunk, lse_needed: bool = False) -> bool:
        shape = attention.shape_of(q, KvView(kv, NO_TABLE, NO_TABLE, None, None, 1.0), step, lse_needed)
        entry = attention.CHUNK.kernel_for(shape)
        assert entry is not None and attention.CHUNK.without("hopper").kernel_for(shape)[0] == "any"  # type: ignore[index]
        return entry[0] == "hopper"

    assert takes(q, kv)
    assert not takes(q, kv, lse_needed=True) and not takes(q, kv, replace(chunk, max_query=127))
    assert not takes(q, kv, replace(chunk, ancestors=none)) and not takes(q, kv, replace(chunk, key_positions=none))
    assert not takes(q, kv.half())
    assert not takes(q, kv[:, :, :, :24])
    assert not takes(torch.zeros(3, 8, 132, dtype=torch.bfloat16)[..., :128], kv)
    assert not takes(q.flatten()[1:1025].view(1, 8, 128), kv)
    assert not takes(torch.zeros(3, 8, 96, dtype=torch.bfloat16), kv[..., :96])
    apart = torch.zeros(300_000, dtype=torch.bfloat16).as_strided(kv.shape, (64 * 513, 64 * 256, 64 * 128, 128, 1))
    assert not takes(q, apart)
    monkeypatch.setattr(hopper, "kernel", lambda *_: None)
    assert not takes(q, kv)


@pytest.mark.skipif(not cuda.available(), reason="needs the compiler that comes with torch for CUDA")
@pytest.mark.parametrize("form", [PLAIN, ALL, BOUNDED], ids=["plain", "all", "bounded"])
@pytest.mark.parametrize("dim", hopper.KEYS)
def test_the_hopper_kernel_compiles(
    dim: int, form: hopper.Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a card. Nothing waits for each single product, and between the wait for the scores and the one for the
    values' product, which runs meanwhile, stands the softmax, where the assembler would rather have that wait."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (tmp_path / "code").write_bytes(cuda.compiled(hopper.source(dim, torch.bfloat16, form)))
    command = (knobs.nvidia.nvdisasm.path, "-c", str(tmp_path / "code"))
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert code.count(WAIT) == 4
    (_, beside) = code.split(f"{WAIT} gsb0, 0x1")
    assert beside.partition(WAIT)[0].count("MUFU.EX2") >= 2 * hopper.KEYS[dim] // 2


CHUNKS: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "whole": ([(300, 300)], {}),
    "pasts": ([(900, 300), (1000, 17), (130, 130), (77, 1), (3, 3)], {}),
    "many": ([(128, 128)] * 20, {}),
    "half-heads": ([(900, 300), (130, 130)], {"head_dim": 64}),
    "group-of-7": ([(900, 300), (130, 130)], {"heads": 14}),
    "small-pages": ([(900, 300), (130, 130)], {"page_tokens": 16}),
    "large-pages": ([(900, 300), (130, 130)], {"page_tokens": 256}),
    "padded": ([(400, 300), (130, 130)], {"padding": 9}),
    # Where halves of a unit see other tiles than the whole, or none, and where a unit ends in the middle of a page.
    "alone": ([(901, 301), (130, 130), (517, 400)], {"heads": 2}),
    "pairs": ([(900, 301), (130, 130)], {"heads": 4}),
    "group-of-8": ([(901, 301), (1, 1), (130, 130)], {"heads": 16}),
    "odd-pages": ([(900, 300), (130, 130)], {"page_tokens": 48}),
    "uneven": ([(1037, 500), (2001, 333), (401, 400), (300, 257)], {}),
    # Windows shorter and longer than the chunk, of whole tiles and not, of a few slots, and of all there is.
    "window": ([(900, 300), (1000, 17), (130, 130), (77, 1), (3, 3)], {"window": 201}),
    "window-of-tiles": ([(1037, 500), (2001, 333), (401, 400), (300, 257)], {"window": 256}),
    "window-long": ([(2901, 1301), (1300, 1300)], {"window": 1000, "heads": 4}),
    "window-narrow": ([(901, 301), (130, 130), (517, 400)], {"window": 5, "heads": 2}),
    "window-of-itself": ([(901, 301), (130, 130)], {"window": 1}),
    "window-of-all": ([(900, 300), (130, 130)], {"window": 2000}),
    "window-odd-pages": ([(1900, 300), (130, 130)], {"window": 333, "page_tokens": 48}),
    "window-half-heads": ([(1900, 300), (390, 390)], {"window": 128, "heads": 16, "head_dim": 64}),
    "capped": ([(900, 300), (1000, 17), (130, 130)], {"softcap": 1.5}),
    "capped-high": ([(900, 300), (130, 130)], {"softcap": 200.0}),
    "capped-window": ([(900, 300), (130, 130)], {"softcap": 20.0, "window": 150, "head_dim": 64}),
    "wide": ([(900, 300), (1000, 17), (130, 130), (77, 1), (3, 3)], {"head_dim": 256, "heads": 4}),
    "wide-uneven": ([(1037, 500), (2001, 333), (401, 400), (300, 257)], {"head_dim": 256}),
    "wide-alone": ([(901, 301), (130, 130), (517, 400)], {"head_dim": 256, "heads": 2, "page_tokens": 16}),
    "wide-odd-pages": ([(900, 300), (130, 130)], {"head_dim": 256, "page_tokens": 48, "padding": 9}),
    "wide-many": ([(128, 128)] * 20 + [(257, 257)], {"head_dim": 256, "heads": 4}),
    "wide-window": ([(1900, 1300), (1100, 300), (777, 300)], {"head_dim": 256, "heads": 4, "window": 400}),
    "wide-narrow": ([(901, 301), (130, 130)], {"head_dim": 256, "heads": 2, "window": 7}),
    "wide-capped": ([(900, 300), (130, 130)], {"head_dim": 256, "heads": 4, "softcap": 1.5}),
    "wide-capped-window": ([(1700, 1500), (30, 1), (1100, 1100)], {"head_dim": 256, "softcap": 50.0, "window": 700}),
}


def forget(case: Any) -> None:
    """What lies before the windows of all queries of a chunk may be another's, or nothing."""
    view, step = case.view, case.step
    for row, held, n in zip(step.rows.tolist(), step.length.tolist(), step.q_start.diff().tolist(), strict=True):
        slot = torch.arange(max(held - n + 1 - (view.window or held), 0) if n > SMALL else 0, device=view.kv.device)
        view.kv[view.table[row, slot // view.page_tokens].long(), :, :, slot % view.page_tokens] = float("nan")


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(CHUNKS))
def test_hopper_equals_the_reference(name: str, dtype: torch.dtype, batch: Callable[..., Any]) -> None:
    rows, fields = CHUNKS[name]
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 128, "page_tokens": 64} | fields
    case = batch(rows, junk=float("nan"), **shape).to(DEVICE, dtype)
    forget(case)
    want, want_lse = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, case.step)
    assert want_lse is not None
    owned = slice(0, int(case.step.q_start[-1]))
    entry = attention.CHUNK.kernel_for(attention.shape_of(case.q, case.view, case.step))
    assert entry is not None
    assert (entry[0] == "hopper") == (case.step.max_query >= hopper.SHORTEST_CHUNK[case.q.shape[2]])
    out, lse = TRITON.attention.attend(case.q, case.k, case.v, case.view, case.step)
    assert lse is not None
    assert (out[owned].double() - want[owned]).norm() < 1e-2 * want[owned].norm()
    assert (lse[owned].double() - want_lse[owned]).norm() < 1e-5 * want_lse[owned].norm()
    again, _ = TRITON.attention.attend(case.q, case.k, case.v, case.view, case.step)
    assert torch.equal(again[owned], out[owned])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("how", ["growing", "low", "steep"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"head_dim": 256, "window": 300}, {"head_dim": 256, "softcap": 50.0}],
    ids=["plain", "window", "capped"],
)
def test_maxima_are_renewed_in_time(fields: dict[str, Any], how: str, batch: Callable[..., Any]) -> None:
    """Scores that outgrow the first tile's maximum again and again; that are all far below zero, where floats do not compare as
    integers; that differ by hundreds from key to key."""
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 128, "page_tokens": 64} | fields
    case = batch([(1500, 600), (300, 300)], junk=float("nan"), **shape)
    case = case.to(DEVICE, torch.bfloat16)
    keys = case.view.kv[:, 0]
    if how == "growing":
        case.q.abs_()
        position = torch.zeros(keys.shape[0] * keys.shape[2], device=DEVICE)
        for row in case.step.rows.tolist():
            pages = case.view.table[row].long()
            slots = (pages[:, None] * keys.shape[2] + torch.arange(keys.shape[2], device=DEVICE)).flatten()
            position[slots] = torch.arange(len(slots), device=DEVICE).float()
        keys.copy_((keys.abs() * position.view(keys.shape[0], 1, keys.shape[2], 1) / 100).to(keys.dtype))
    elif how == "low":
        case.q.abs_().add_(1)
        keys.abs_().add_(2).neg_()
    else:
        case.q.mul_(30)
    want, want_lse = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, case.step)
    out, lse = TRITON.attention.attend(case.q, case.k, case.v, case.view, case.step)
    assert lse is not None and want_lse is not None
    owned = slice(0, int(case.step.q_start[-1]))
    assert (out[owned].double() - want[owned]).norm() < 1e-2 * want[owned].norm()
    assert (lse[owned].double() - want_lse[owned]).norm() < 1e-5 * want_lse[owned].norm()


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_a_captured_graph_follows_chunks(batch: Callable[..., Any]) -> None:
    """Also where the captured step's chunks are now rows of few tokens, and nothing is left for the kernel to do."""
    rows = [(900, 300), (400, 130), (77, 1)]
    case = batch(rows, heads=8, kv_heads=2, head_dim=128, page_tokens=64, junk=0.5).to(DEVICE, torch.bfloat16)
    step = case.step
    TRITON.attention.attend(case.q, case.k, case.v, case.view, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = TRITON.attention.attend(case.q, case.k, case.v, case.view, step)
    for counts in ([300, 130, 1], [1, 399, 0], [2, 3, 1]):
        lengths = [held for held, _ in rows]
        step.q_start.copy_(torch.tensor([0, *counts]).cumsum(0))
        total = sum(counts)
        row_of = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
        position = [held - n + place for held, n in zip(lengths, counts, strict=True) for place in range(n)]
        step.row_of[:total].copy_(row_of)
        step.position[:total].copy_(torch.tensor(position))
        graph.replay()
        want, _ = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, step)
        assert (out[:total].double() - want[:total]).norm() < 1e-2 * want[:total].norm()
