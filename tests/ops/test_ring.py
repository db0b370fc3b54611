"""Products through a ring: who computes what, that the kernel compiles, and its results where there is a Hopper GPU.

Gluon has no interpreter: without such a GPU, only the division of the work and that the kernel compiles can be tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ridgeline.ops.reference import FP8, REFERENCE, quantize

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from ridgeline.ops.triton import ring
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.linears import FP8_TRITON
from ridgeline.ops.triton.ring_shapes import SMALL, RingTile, ring8_for, ring_for
from ridgeline.ops.triton.tuning import GLUON_VERSIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


@pytest.mark.parametrize(
    ("tiles", "blocks", "split", "programs"),
    [(1, 40, 1, 1), (300, 7, 1, 132), (132, 3, 1, 132), (48, 64, 2, 96), (32, 7, 4, 128), (5, 8, 8, 40)],
)
def test_every_block_is_computed_once(
    tiles: int, blocks: int, split: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assigned = []
    monkeypatch.setattr(ring.gl, "num_programs", lambda axis: programs)
    monkeypatch.setattr(ring.gl, "cdiv", triton.cdiv)
    for program in range(programs):
        monkeypatch.setattr(ring.gl, "program_id", lambda axis, number=program: number)
        first, count, begin, run = ring._share.fn((tiles, blocks, 1), split)
        for turn in range(count):
            assigned += [(first + turn * programs, block) for block in range(begin, begin + run)]
    assert sorted(assigned) == [(tile, block) for tile in range(tiles) for block in range(blocks)]


COUNTS = [1, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 160, 192, 256, 300]
SIZES = [(48, 64), (512, 14336), (4096, 1024), (1024, 3072), (6144, 4096), (4096, 14336), (28672, 4096), (151936, 1024)]
SIZES += [(2560, 9728), (5120, 17408), (16384, 3072)]


def check_configuration(tokens: int, n: int, k: int, gate: bool, eight: bool) -> None:
    """A ring and what turns the layout of results fit a processor's memory; programs that wait for each other all run."""
    tile = (ring8_for if eight else ring_for)(tokens, n, k, gate)
    if tile is None:
        assert gate or not 1 < tokens <= 64 or (tokens <= 16 and n > 16384 and not eight)
    else:
        assert (tile.rows + tile.batch) * tile.block * (1 if eight else 2) * tile.stages + 8192 <= 227 * 1024
        assert not eight or tile.block * (2 if gate else 1) == 2 * ring.PROMOTED
        assert tile.registers * 32 * (tile.warps + 4) <= 1 << 16
        assert tile.batch >= tokens or n * k <= SMALL or eight
        assert tile.split <= min(tile.batch, -(-k // tile.block))
        assert tile.split <= ring.ROUND.value
        assert tile.split == 1 or tile.split * -(-n // tile.rows) * -(-tokens // tile.batch) <= 132
        assert tile.rows >= (128 if gate else 64)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("eight", [False, True])
def test_configurations_fit_the_chip(gate: bool, eight: bool) -> None:
    """Of every product with every number of tokens: see check_configuration."""
    for tokens, (n, k) in itertools.product(COUNTS, SIZES):
        check_configuration(tokens, n, k, gate, eight)


@pytest.mark.parametrize(
    ("n", "k", "rows", "split"),
    [
        (4096, 14336, 64, 2),  # 128 programs
        (3584, 18944, 64, 2),
        (2560, 9728, 64, 3),  # 120 for the 80 of two
        (2048, 6144, 64, 3),  # fewer than the 128 of four, but one part less to add
        (1024, 2048, 64, 4),
        (5120, 17408, 128, 3),  # 80 tiles of 64 rows could not be cut
        (5120, 5120, 64, 1),
        (6144, 4096, 64, 1),
    ],
)
@pytest.mark.parametrize("tokens", [2, 8, 16, 32, 64])
def test_how_many_programs_share_a_tile(tokens: int, n: int, k: int, rows: int, split: int) -> None:
    tile = ring_for(tokens, n, k)
    assert tile is not None and (tile.rows, tile.split) == (rows, split)


def compile_for_hopper(tile: RingTile, kind: str | None, add: bool, eight: bool = False) -> str:
    """Compile the kernel as ring_product would launch it; no GPU is asked. Returns its code in PTX."""
    kernel = ring.ring_kernel
    rows = tile.rows if kind is None else tile.rows // 2
    some = torch.empty(tile.rows + tile.batch, tile.block, dtype=FP8 if eight else torch.bfloat16)
    types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= {"part_ptr": "*fp32", "arrivals_ptr": "*i32", "w_scale_ptr": "*fp32", "x_scale_ptr": "*fp32"}
    for name, height in (("w_desc", rows), ("x_desc", tile.batch)):
        blocks = ring._blocks(some, height, tile.block)
        shape = ",".join(map(str, blocks.block_shape))
        types[name] = f"tensordesc<{'fp8e4nv' if eight else 'bf16'}[{shape}],{blocks.layout!r}>"
    constants = {"BIAS": True, "ADD": add, "KIND": KINDS[kind], "BATCH": tile.batch, "ROWS": rows, "BLOCK": tile.block}
    constants |= {"SPLIT": tile.split, "STAGES": tile.stages, "WARPS": tile.warps, "PDL": True}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, fixed, {})
    options = {"num_warps": tile.warps, "maxnreg": tile.registers}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= 227 * 1024
    ptx: str = made.asm["ptx"]
    return ptx


@pytest.mark.skipif(
    not triton.__version__.startswith(GLUON_VERSIONS),
    reason="Gluon kernels run with the versions of Triton in GLUON_VERSIONS",
)
@pytest.mark.parametrize(
    ("tile", "kind", "add", "product"),
    [
        (RingTile(64, 128, 64, 4, 4, 128), "silu", False, ""),
        (RingTile(8, 64, 128, 4, 12, 96, split=2), None, True, ""),
        (RingTile(16, 64, 256, 4, 5, 96, split=2), None, True, "m64n16k32.f32.e4m3.e4m3"),
        pytest.param(RingTile(16, 128, 128, 4, 6, 128, split=3), None, True, "", marks=pytest.mark.long),
        pytest.param(
            RingTile(64, 128, 128, 4, 4, 168), "silu", False, "m64n64k32.f32.e4m3.e4m3", marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_the_ring_kernel_compiles(
    apart: Callable[..., Any], tile: RingTile, kind: str | None, add: bool, product: str
) -> None:
    assert product in apart(compile_for_hopper, tile, kind, add, bool(product))


def off(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want).norm() / want.norm())


SHAPES = [(5, 272, 512), (64, 1536, 1024), (100, 304, 4096), (130, 640, 72), (1, 4096, 256)]
TILES = [
    (RingTile(64, 128, 64, 4, 4, 128, programs=7), torch.bfloat16),
    (RingTile(64, 64, 128, 4, 6, 128, split=2), torch.float16),
    (RingTile(16, 128, 128, 4, 6, 128), torch.bfloat16),
    (RingTile(16, 64, 128, 4, 10, 96, split=4), torch.bfloat16),
    (RingTile(8, 64, 128, 4, 12, 96, split=2), torch.bfloat16),
    (RingTile(16, 128, 128, 4, 6, 128, split=3), torch.bfloat16),
    (RingTile(64, 64, 128, 4, 6, 128, split=6), torch.bfloat16),
    (RingTile(8, 128, 128, 4, 6, 128), torch.float16),
]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("tile", "dtype"), TILES, ids=str)
@pytest.mark.parametrize(("tokens", "n", "k"), SHAPES)
def test_ring_products(tokens: int, n: int, k: int, tile: RingTile, dtype: torch.dtype) -> None:
    """Alone, onto a stream, and with gate and up; with edges in every direction, and each run like the one before."""
    torch.manual_seed(0)
    x = torch.randn(tokens, k, dtype=dtype, device=DEVICE)
    weight = torch.randn(2 * n, k, dtype=dtype, device=DEVICE)
    bias = 20 * torch.randn(2 * n, dtype=dtype, device=DEVICE)
    stream = 20 * torch.randn(tokens, n, dtype=dtype, device=DEVICE)
    both = x.double() @ weight.double().T
    assert off(ring.ring_product(x, weight[:n], None, tile), both[:, :n]) < 4e-3
    added = ring.ring_product(x, weight[:n], bias[:n], tile, stream.clone())
    assert off(added, both[:, :n] + bias[:n].double() + stream.double()) < 4e-3
    assert torch.equal(added, ring.ring_product(x, weight[:n], bias[:n], tile, stream.clone()))
    if tile.rows >= 128:
        both += bias.double()
        activated = ring.ring_product(x, weight, bias, tile, kind="gelu_tanh")
        assert off(activated, REFERENCE.tokenwise.activate(both, "gelu_tanh")) < 6e-3


@pytest.mark.gpu
@hopper
@torch.inference_mode()  # in which an engine may have made the counters
def test_counters_run_over() -> None:
    """They are never set back: the sums of a shared tile are whole on either side of the largest number."""
    torch.manual_seed(0)
    x = torch.randn(5, 2048, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(300, 2048, dtype=torch.bfloat16, device=DEVICE)
    tiles = [RingTile(8, 64, 128, 4, 12, 96, split=split) for split in (2, 3, 4, 7)]
    counters = ring._arrivals(x.device)
    before = counters.clone()
    counters.fill_((1 << 31) - 2 * ring.ROUND.value)
    for tile in tiles:
        assert off(ring.ring_product(x, weight, None, tile), x.double() @ weight.double().T) < 4e-3
    assert counters[0].item() == 2 * ring.ROUND.value - (1 << 31)
    counters.copy_(before)


TILES8 = [
    RingTile(64, 128, 128, 4, 4, 168, programs=7),
    RingTile(64, 64, 256, 4, 6, 128, split=2),
    RingTile(16, 64, 256, 4, 10, 96, split=3),
    RingTile(128, 128, 128, 8, 6, 168),
]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("tile", TILES8, ids=str)
@pytest.mark.parametrize(("tokens", "n", "k"), [*SHAPES[:3], (130, 640, 80), (37, 4096, 14336)])
def test_ring_products_in_8_bits(tokens: int, n: int, k: int, tile: RingTile) -> None:
    """The same. Sums of 128 products keep about 13 bits, so that those of all are off by as little as bfloat16 rounds."""
    torch.manual_seed(0)
    x = quantize(torch.randn(tokens, k, device=DEVICE) * torch.logspace(-2, 2, tokens, device=DEVICE)[:, None])
    rows = quantize(torch.randn(2 * n, k, device=DEVICE) * torch.logspace(-2, 0, 2 * n, device=DEVICE)[:, None])
    weight = FP8_TRITON.pack(rows.values, rows.scales)
    half = FP8_TRITON.pack(rows.values[:n], rows.scales[:n])
    bias = 20 * torch.randn(2 * n, dtype=torch.bfloat16, device=DEVICE)
    stream = 20 * torch.randn(tokens, n, dtype=torch.bfloat16, device=DEVICE)
    wide = [operand.values.double() * operand.scales.double()[:, None] for operand in (x, rows)]
    both = wide[0] @ wide[1].T
    if tile.block == 256:
        assert off(ring.ring_product(x, half, None, tile, torch.bfloat16), both[:, :n]) < 4e-3
        added = ring.ring_product(x, half, bias[:n], tile, stream.clone())
        assert off(added, both[:, :n] + bias[:n].double() + stream.double()) < 4e-3
        assert torch.equal(added, ring.ring_product(x, half, bias[:n], tile, stream.clone()))
    else:
        activated = ring.ring_product(x, weight, bias, tile, torch.bfloat16, "gelu_tanh")
        assert off(activated, REFERENCE.tokenwise.activate(both + bias.double(), "gelu_tanh")) < 6e-3
