"""Random ragged batches over a paged cache, the way the runner hands them to the ops."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.ops import native_cpu
from ridgeline.ops.native import build as native_build
from ridgeline.ops.native.build import build as build_library
from ridgeline.ops.native.build import why_not
from ridgeline.ops.native.files import cpu_flags, library_path
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Ops, QkvShape

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@dataclass(frozen=True)
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    view: KvView
    step: StepInputs

    def to(self, device: str, dtype: torch.dtype) -> Case:
        """The same batch elsewhere: floats in `dtype`, the cache's strides kept in spirit (page-major stays so)."""
        moved = {
            name: value.to(device)
            for name in StepInputs.__slots__
            if isinstance(value := getattr(self.step, name), torch.Tensor)
        }
        view = replace(
            self.view,
            kv=self.view.kv.to(device=device, dtype=dtype),
            table=self.view.table.to(device),
            slots=self.view.slots.to(device),
        )
        q, k, v = (tensor.to(device=device, dtype=dtype) for tensor in (self.q, self.k, self.v))
        return Case(q, k, v, view, replace(self.step, **moved))


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    page_tokens: int = 16
    window: int | None = None
    softcap: float | None = None
    tree: bool = False
    compacted: bool = False
    layer_major: bool = False
    padding: int = 0
    junk: float = 1e3
    seed: int = 0


def _tree(n: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """(ancestor bits, depth) of each node of a random tree of n nodes, the root first."""
    bits, depth = [1], [0]
    for node in range(1, n):
        parent = int(torch.randint(0, node, (), generator=generator))
        bits.append(bits[parent] | 1 << node)
        depth.append(depth[parent] + 1)
    return bits, depth


def _queries(
    rows: list[tuple[int, int]], shape: Shape, generator: torch.Generator
) -> tuple[list[int], list[int], list[int]]:
    """(position, row_of, ancestors) of all query tokens; with `compacted`, what was said lies further on than its slot."""
    position, row_of, ancestors = [], [], []
    for index, (length, n) in enumerate(rows):
        bits, depth = [-1] * n, list(range(n))
        if shape.tree and 1 < n <= 64:
            bits, depth = _tree(n, generator)
        start = 2 * (length - n) if shape.compacted else length - n
        position += [start + level for level in depth]
        row_of += [index] * n
        ancestors += [bit - (1 << 64) if bit >= 1 << 63 else bit for bit in bits]
    return position, row_of, ancestors


def build(rows: list[tuple[int, int]], shape: Shape) -> Case:
    """A float32 CPU batch of `rows`, each (slots held, query tokens among them)."""
    generator = torch.Generator().manual_seed(shape.seed)
    longest = max(length for length, _ in rows)
    per_row = -(-longest // shape.page_tokens) + 1
    device_rows = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)] + 1
    n_pages = (len(rows) + 3) * per_row + 2
    free = (torch.randperm(n_pages - 1, generator=generator) + 1).tolist()
    table = torch.zeros(len(rows) + 3, per_row, dtype=torch.int32)
    layers, size = 3, (2, shape.kv_heads, shape.page_tokens, shape.head_dim)
    pool = torch.full((layers, n_pages, *size) if shape.layer_major else (n_pages, layers, *size), shape.junk)
    kv = pool[1] if shape.layer_major else pool[:, 1]
    position, row_of, ancestors = _queries(rows, shape, generator)
    total = len(position)
    slots, fresh_k, fresh_v = [], [], []
    for (length, n), row in zip(rows, device_rows.tolist(), strict=True):
        for place in range(-(-length // shape.page_tokens)):
            table[row, place] = free.pop()
        slot = torch.arange(length)
        page, place = table[row, slot // shape.page_tokens].long(), slot % shape.page_tokens
        for kind, kept in ((0, fresh_k), (1, fresh_v)):
            values = torch.randn(length, shape.kv_heads, shape.head_dim, generator=generator)
            kv[page, kind, :, place] = values
            kept.append(values[length - n :])
        slots.append((page * shape.page_tokens + place)[length - n :])
    key_positions = None
    if shape.compacted:
        key_positions = (2 * torch.arange(per_row * shape.page_tokens)).int().repeat(len(rows) + 3, 1)
    pad = shape.padding
    step = StepInputs(
        rows=device_rows.int(),
        q_start=torch.tensor([0] + [n for _, n in rows]).cumsum(0).int(),
        length=torch.tensor([length for length, _ in rows], dtype=torch.int32),
        position=torch.tensor(position + [0] * pad, dtype=torch.int32),
        row_of=torch.tensor(row_of + [0] * pad, dtype=torch.int32),
        max_query=max(n for _, n in rows),
        max_length=longest,
        ancestors=torch.tensor(ancestors + [-1] * pad) if shape.tree else None,
        key_positions=key_positions,
    )
    view = KvView(
        kv=kv,
        table=table,
        slots=torch.cat((*slots, torch.zeros(pad, dtype=torch.int64))),
        window=shape.window,
        softcap=shape.softcap,
        scale=shape.head_dim**-0.5,
    )
    q = torch.randn(total + pad, shape.heads, shape.head_dim, generator=generator)
    empty = torch.zeros(pad, shape.kv_heads, shape.head_dim)
    return Case(q, torch.cat((*fresh_k, empty)), torch.cat((*fresh_v, empty)), view, step)


@pytest.fixture
def batch() -> Callable[..., Case]:
    """Builds a batch: batch(rows, **fields of Shape)."""
    return lambda rows, **fields: build(rows, Shape(**fields))


def _qkv_shape(heads: int, kv_heads: int, dim: int, rope_dim: int, norms: bool, device: str = "cpu") -> QkvShape:
    angle = torch.outer(torch.arange(200).double(), 10000.0 ** (-torch.arange(0, rope_dim, 2).double() / rope_dim))
    return QkvShape(
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=dim,
        cos_sin=torch.stack((angle.cos(), angle.sin()), 1).float().to(device),
        q_norm=(torch.rand(dim) + 0.5).to(device) if norms else None,
        k_norm=(torch.rand(dim) + 0.5).to(device) if norms else None,
        norm_eps=1e-6,
        norm_offset=norms,
    )


@pytest.fixture
def qkv_shape() -> Callable[..., QkvShape]:
    """Builds a projection's shape: qkv_shape(heads, kv_heads, head_dim, rope_dim, norms, device)."""
    return _qkv_shape


# --- compiled operations of the CPU ----------------------------------------


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def folder(shared: Path) -> Path:
    """Where a library for this CPU lies: the user's cache if it was built, else made for these tests."""
    if library_path().exists():
        return library_path().parent
    return _built(shared / "native")


LEFT_OUT = {
    "this-cpu": "",
    "plain": "-mno-amx-bf16 -mno-avx512bf16",
    "avx2": "-mno-avx512f",
    "avx2-words": "-mno-avx512f -mno-avxvnni",
}
"""What the same sources are compiled without: nothing; AMX and bfloat16 instructions; all of AVX-512; products of bytes too."""
HAVING = {"plain": {"amx_bf16", "avx512_bf16"}, "avx2": {"avx512f"}, "avx2-words": {"avx_vnni"}}
"""Flags of a CPU, one of which it must have for these to leave out anything."""


@pytest.fixture(scope="session")
def plainer(shared: Path, pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Where a library lies that leaves instructions out, made once for these sources and kept where pytest keeps what it finds
    again (a quarter of a minute of two cores): plainer(name in HAVING)."""
    kept: Any = getattr(pytestconfig, "cache", None)

    @cache
    def made(name: str) -> Path:
        if not HAVING[name] & cpu_flags():
            pytest.skip("this CPU has nothing to leave out")
        command = f"{os.environ.get('CXX', 'g++')} {LEFT_OUT[name]}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CXX", command)
            # Half of the compiler's time; the library of this CPU, and those of `make wheel`, are compiled as users have them.
            patch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-O1"))
            return _built(shared / name if kept is None else kept.mkdir("native" + re.sub(r"\W+", "-", command)))

    return made


def _built(folder: Path) -> Path:
    """The folder with a library in it, which one process compiles while others wait for it."""
    if (reason := why_not()) is not None:
        pytest.skip(f"native operations: {reason}")
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_library(folder).parent


@pytest.fixture(scope="module", params=["this-cpu", pytest.param("plain", marks=pytest.mark.long), "avx2"])
def ops(request: pytest.FixtureRequest) -> Ops:
    name = request.param
    where = request.getfixturevalue("folder") if name == "this-cpu" else request.getfixturevalue("plainer")(name)
    library, what = native_cpu.load(where)
    assert library is not None, what
    assert what == {"plain": "AVX-512", "avx2": "AVX2"}.get(name, what)
    return library


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _pieces_of(case: Case, pieces: list[tuple[int, int, int]]) -> tuple[torch.Tensor, StepInputs, list[int]]:
    """(queries, step, which tokens they are) of a batch of whole prompts, computed in (row, first, end) pieces."""
    step, starts = case.step, case.step.q_start.tolist()
    which = [starts[row] + at for row, first, end in pieces for at in range(first, end)]
    device, counts = case.q.device, torch.tensor([end - first for _, first, end in pieces])
    made = StepInputs(
        rows=step.rows[[row for row, _, _ in pieces]],
        q_start=torch.cat((torch.zeros(1), counts.cumsum(0))).int().to(device),
        length=torch.tensor([end for _, _, end in pieces], dtype=torch.int32, device=device),
        position=step.position[which],
        row_of=torch.arange(len(pieces)).repeat_interleave(counts).int().to(device),
        max_query=int(counts.max()),
        max_length=max(end for _, _, end in pieces),
    )
    return case.q[which], made, which


@pytest.fixture
def pieces_of() -> Callable[..., tuple[torch.Tensor, StepInputs, list[int]]]:
    """Part of a batch as a step of its own: pieces_of(case, pieces)."""
    return _pieces_of


@pytest.fixture(scope="session", autouse=True)
def _mended(request: pytest.FixtureRequest) -> None:
    if find_spec("triton") is not None:
        request.getfixturevalue("interpreter")


@pytest.fixture(autouse=True)
def _every_regime(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, whose processors are few, let few rows take the wide tiles too."""
    if not torch.cuda.is_available():
        from ridgeline.ops.triton import tuning

        monkeypatch.setattr(tuning, "FEWEST_WIDE_ROWS", 1)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """A test draws the same numbers alone, in any order and on any worker."""
    torch.manual_seed(0)
