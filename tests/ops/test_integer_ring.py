"""Integer and e4m3 weights through a ring: that the kernel compiles to products that do not wait for each other, which
configurations are shipped, and results where there is a Hopper GPU (Gluon has no interpreter)."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.ops.reference import REFERENCE, dequantized

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon._runtime import GluonASTSource

from ridgeline.ops.table import IntMatrix
from ridgeline.ops.triton import integer_ring
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.integer import as_codes, pack, pack_e4m3
from ridgeline.ops.triton.integer_matrix import conversion, conversion_e4m3, shift_of
from ridgeline.ops.triton.integer_shapes import IntRingTile, ring_for, vector_for
from ridgeline.ops.triton.tuning import GLUON_VERSIONS
from ridgeline.quant.fp8 import quantize_groups
from tests.ops.test_waits import WAITS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
MEMORY = 227 * 1024
PARTITIONS = re.compile(r"^ *(?:default|partition\d+\(.*\) num_warps\(\d+\)) \{$", re.MULTILINE)
LOADS = re.compile(r"tt\.load.*?!tt\.ptr<(\w+)>")
COPIES = re.compile(r"async_tma_copy_global_to_local.*")
COUNTS = [1, 2, 5, 16, 17, 32, 33, 64, 65, 128, 129, 256, 300, 640, 2000]
SIZES = [(48, 64), (4096, 1024), (6144, 4096), (4096, 4096), (4096, 14336), (28672, 4096), (128256, 4096)]


def check_configuration(tokens: int, n: int, k: int, bits: int, gate: bool) -> None:
    """A ring fits a processor's memory; programs that wait for each other all run."""
    tile = ring_for(tokens, n, k, gate, bits)
    if tile is not None:
        sides, together = 2 if gate else 1, 2 if tile.registers <= 128 else 1
        stage = 16 * tile.warps * sides * tile.block * bits // 8 + tile.batch * tile.block * 2
        assert together * (stage * tile.stages + 8192) <= MEMORY
        assert together * 32 * tile.registers * (tile.warps + 4) <= 1 << 16
        assert tile.warps in (4, 8) and tile.block % 128 == 0
        assert tile.batch % tile.split == 0 and tile.split <= -(-k // tile.block)
        tiles = -(-n // (sides * 16 * tile.warps)) * -(-tokens // tile.batch)
        assert tile.split == 1 or tile.split * tiles <= together * 132


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("gate", [False, True])
def test_configurations_fit_the_chip(bits: int, gate: bool) -> None:
    """Of every product with every number of tokens: see check_configuration."""
    for tokens, (n, k) in itertools.product(COUNTS, SIZES):
        check_configuration(tokens, n, k, bits, gate)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_serves_where_no_ring_runs(bits: int) -> None:
    """Few tokens are vectors on any GPU, for 8 bits too, which prefer the ring from 2 tokens on where it runs."""
    alone = [vector_for(tokens, 6144, 4096, bits, rings=False) for tokens in (1, 2, 4, 5, 64)]
    assert [tile is None for tile in alone] == [False] * 3 + [True] * 2
    assert (vector_for(2, 6144, 4096, bits, rings=True) is None) is (bits == 8)


def compile_for_hopper(tile: IntRingTile, bits: int, group: int, kind: str | None, zeros: bool) -> None:
    """Compile the kernel as integer_ring_product would launch it; no GPU is asked. ptxas says so if it makes every product
    wait for the one before it. bits 0: e4m3 values."""
    kernel, dtype, rows = integer_ring.integer_ring_kernel, torch.bfloat16, 16 * tile.warps
    types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= {"part_ptr": "*fp32", "arrivals_ptr": "*i32", "scale_ptr": "*fp16" if bits else "*fp32", "zero_ptr": "*u8"}
    types["w_desc"] = f"tensordesc<i16[{rows},32],{integer_ring._layout(64)!r}>"
    types["x_desc"] = f"tensordesc<bf16[{tile.batch},64],{integer_ring._layout(128)!r}>"
    ptx, shift = (
        (conversion(bits, dtype, group > 0, True), shift_of(bits, dtype)) if bits else (conversion_e4m3(dtype), 0.0)
    )
    constants: dict[str, object] = {"SHIFT": shift, "GROUP": group, "ZEROS": zeros, "BITS": bits or 8, "PTX": ptx}
    constants |= {"ADD": kind is None, "KIND": KINDS[kind], "POWER": 1.0 if bits else 2.0**120}
    constants |= {"BIAS": True, "BATCH": tile.batch, "ROWS": rows, "BLOCK": tile.block, "SPLIT": tile.split}
    constants |= {"STAGES": tile.stages, "WARPS": tile.warps, "PDL": True}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, fixed, {})
    options = {"num_warps": tile.warps, "maxnreg": tile.registers}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= MEMORY
    # Before the wait for what earlier kernels write, a partition reads nothing but codes, scales and zero points.
    partitions = PARTITIONS.split(made.asm["ttgir"])[1:]
    assert len(partitions) == 2
    loads, copies = set(), set()
    for partition in partitions:
        before, *after = WAITS.split(partition, maxsplit=1)
        assert after
        loads.update(LOADS.findall(before))
        copies.update(COPIES.findall(before))
    assert loads and loads <= ({"f16", "i8"} if bits else {"f32"})
    assert copies and all(re.search(rf"tensordesc<(?:tensor<)?{rows}x32x", copy) for copy in copies)
    done = subprocess.run(
        [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-", "-o", os.devnull],
        input=made.asm["ptx"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Used" in done.stderr and "serialized" not in done.stderr, done.stderr


@pytest.mark.skipif(
    not triton.__version__.startswith(GLUON_VERSIONS),
    reason="Gluon kernels run with the versions of Triton in GLUON_VERSIONS",
)
@pytest.mark.parametrize(
    ("tile", "rest"),
    [
        (IntRingTile(64, 128, 4, 4, 128), (4, 128, "silu", False)),
        (IntRingTile(64, 128, 4, 3, 128), (0, 128, "silu", False)),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (IntRingTile(16, 256, 4, 4, 128, split=4), (8, 0, None, False)),
                (IntRingTile(128, 128, 8, 4), (4, 32, None, True)),
                (IntRingTile(64, 128, 4, 3, 128), (0, 0, "silu", False)),
                (IntRingTile(128, 128, 8, 4), (0, 0, None, False)),
                (IntRingTile(128, 128, 8, 3), (0, 128, "silu", False)),
            )
        ),
    ],
    ids=str,
)
def test_the_kernel_compiles(apart: Callable[..., Any], tile: IntRingTile, rest: tuple[object, ...]) -> None:
    apart(compile_for_hopper, tile, *rest)


def off(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want).norm() / want.norm())


FORMATS = [(4, 128, False), (8, 1 << 20, False), (4, 32, True), (8, 64, True), (4, 1 << 20, True), (3, 96, False)]
E4M3 = [(0, 1 << 20, False), (0, 128, False), (0, 32, False)]
TILES = [
    IntRingTile(16, 256, 4, 3, 128, split=4),
    IntRingTile(64, 128, 4, 3, 128, programs=5),
    IntRingTile(64, 128, 8, 3, split=2),
]


def random_e4m3(n: int, k: int, group: int) -> tuple[IntMatrix, torch.Tensor]:
    """Packed, with a scale for each row or group of inputs, and the weights in float64."""
    scaled = quantize_groups(torch.randn(n, k, device=DEVICE).div_(32), group if group < k else 0)
    # Kernels round scales of groups to 16 bits; these are numbers of bfloat16.
    scales = scaled.scales.bfloat16().float() if group < k else scaled.scales
    spread = scales.view(n, -1)[:, torch.arange(k, device=DEVICE) // group].double()
    packed = replace(pack_e4m3(scaled.values, scales), group=group if group < k else 0)
    return as_codes(packed, k), scaled.values.double() * spread


def random_matrix(n: int, k: int, form: tuple[int, int, bool]) -> tuple[IntMatrix, torch.Tensor]:
    """Packed, and the weights in float64, of a size with which products of gate and up stay finite in float16."""
    (bits, group, asymmetric), groups = form, -(-k // form[1])
    if form in E4M3:
        return random_e4m3(n, k, group)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=DEVICE)
    scales = (torch.rand(n, groups, device=DEVICE) + 0.5).div_(1024).half().float()
    zeros = torch.randint(0, 1 << bits, (n, groups), dtype=torch.uint8, device=DEVICE) if asymmetric else None
    return pack(codes, scales, zeros, bits, group), dequantized(codes, scales, zeros, bits, group).double()


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("form", [*FORMATS, *E4M3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "n", "k"), [(7, 1000, 1048), (150, 272, 2048), (64, 4096, 4096)])
def test_products(
    tokens: int, n: int, k: int, dtype: torch.dtype, form: tuple[int, int, bool], tile: IntRingTile
) -> None:
    """Alone, onto a stream, and with gate and up; with edges in every direction, and each run like the one before."""
    torch.manual_seed(0)
    matrix, weight = random_matrix(n, k, form)
    x = torch.randn(tokens, k, dtype=dtype, device=DEVICE)
    bias, stream = torch.randn(n, dtype=dtype, device=DEVICE), torch.randn(tokens, n, dtype=dtype, device=DEVICE)
    want = x.double() @ weight.T
    allowed = 6e-3 if dtype == torch.bfloat16 else 1e-3
    product = integer_ring.integer_ring_product
    assert off(product(x, matrix, None, tile), want) < allowed
    added = product(x, matrix, bias, tile, stream.clone())
    assert off(added, want + bias.double() + stream.double()) < allowed
    assert torch.equal(added, product(x, matrix, bias, tile, stream.clone()))
    gated = product(x, matrix, bias, tile, kind="gelu_tanh")
    assert off(gated, REFERENCE.tokenwise.activate(want + bias.double(), "gelu_tanh")) < allowed
