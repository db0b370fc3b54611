"""Experts on a GPU equal the definition, for steps of every size; the kernels compile for Hopper without a GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ridgeline.core.config import ModelConfig
from ridgeline.core.formats import NUMBER_FORMATS
from ridgeline.models.build import build
from ridgeline.ops.blocks import arrays
from ridgeline.ops.experts import Tensors, by_expert, route
from ridgeline.ops.reference import FP8, REFERENCE, activate, clamped_swiglu, quantize
from ridgeline.ops.triton import block_tiles
from ridgeline.ops.triton import experts as kernels
from ridgeline.ops.triton.blocks import BLOCK_TRITON
from ridgeline.ops.triton.experts import FEW_PAIRS, GroupedExperts, TritonExperts
from ridgeline.quant.blocks import round_to_blocks
from tests.combinations import crossed
from tests.models.families import save
from tests.models.paged import PagedRows
from tests.ops.test_blocks import on_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D_MODEL, WIDTH, EXPERTS, PER_TOKEN = 48, 40, 6, 3
ALL = range(EXPERTS)


def weights(fp8: bool) -> tuple[list[Tensors], list[Tensors], list[tuple[torch.Tensor, torch.Tensor]]]:
    """(gate and up, down) of each expert as the kernels take them, and dense."""
    torch.manual_seed(3)
    gate_up: list[Tensors] = []
    down: list[Tensors] = []
    dense = []
    for _ in range(EXPERTS):
        pair = torch.randn(2 * WIDTH, D_MODEL) * 0.2, torch.randn(D_MODEL, WIDTH) * 0.2
        if fp8:
            stored = [quantize(weight) for weight in pair]
            pair = tuple(scaled.values.float() * scaled.scales[:, None] for scaled in stored)  # type: ignore[assignment]
            made: list[Tensors] = [(scaled.values.to(DEVICE), scaled.scales.to(DEVICE)) for scaled in stored]
        else:
            made = [(weight.to(DEVICE),) for weight in pair]
        gate_up.append(made[0])
        down.append(made[1])
        dense.append(pair)
    return gate_up, down, dense


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "fp8"), [(0, False), (1, False), (FEW_PAIRS // PER_TOKEN, True), (11, False), (50, True)]
)
def test_grouped_equals_the_definition(tokens: int, fp8: bool, fixed: bool) -> None:
    gate_up, down, dense = weights(fp8)
    grouped = TritonExperts(fixed=fixed).group(gate_up, down, "silu", ALL)
    x, logits = torch.randn(tokens, D_MODEL), torch.randn(tokens, EXPERTS)
    logits[:, 4] = -30.0  # an expert without tokens
    chosen = route(logits, PER_TOKEN, True)
    counts = torch.bincount(chosen.experts.flatten(), minlength=EXPERTS)

    def run(expert: int, rows: torch.Tensor | None) -> torch.Tensor:
        inner, outer = dense[expert]
        given = x if rows is None else x[rows]
        return activate(given @ inner.T, "silu") @ outer.T

    expected = by_expert(D_MODEL, chosen, counts.tolist(), run, ALL)
    load = torch.ones(EXPERTS, dtype=torch.int64, device=DEVICE)
    got = grouped(x.to(DEVICE), logits.to(DEVICE), PER_TOKEN, True, load)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert load.tolist() == (counts + 1).tolist()


@pytest.mark.parametrize("tokens", [10, 40])
def test_terms_in_16_bits_add_one_rounding(tokens: int) -> None:
    """Error against float64, in roundings of the result to x's dtype: what down multiplies is rounded once, and each term, which
    makes 1.41 on average."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    _, _, dense = weights(False)
    halves = [[(pair[side].to(DEVICE, dtype),) for pair in dense] for side in (0, 1)]
    x, logits = torch.randn(tokens, D_MODEL).to(dtype), torch.randn(tokens, EXPERTS)
    chosen = route(logits, PER_TOKEN, True)
    counts = torch.bincount(chosen.experts.flatten(), minlength=EXPERTS)

    def run(expert: int, rows: torch.Tensor | None) -> torch.Tensor:
        inner, outer = (side[expert][0].cpu().double() for side in halves)
        return activate((x if rows is None else x[rows]).double() @ inner.T, "silu") @ outer.T

    exact = by_expert(D_MODEL, chosen, counts.tolist(), run, ALL).double()
    load = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    grouped = TritonExperts().group(halves[0], halves[1], "silu", ALL)
    got = grouped(x.to(DEVICE), logits.to(DEVICE), PER_TOKEN, True, load)
    rounding = (exact.to(dtype).double() - exact).norm()
    assert got.dtype == torch.float32 and (got.cpu().double() - exact).norm() < 1.8 * rounding
    terms = grouped(x.to(DEVICE), logits.to(DEVICE), 1, True, load)
    assert torch.equal(terms, terms.to(dtype).float()), "with a single expert a sum is a term, a number of 16 bits"


@pytest.mark.parametrize("fp8", [False, True])
def test_the_largest_tile_equals_the_definition(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no float32 gets otherwise."""
    monkeypatch.setattr(kernels, "TILES", kernels.HOPPER_TILES)
    tokens = -(-kernels.HOPPER_TILES[0][0] * EXPERTS // PER_TOKEN)
    test_grouped_equals_the_definition(tokens, fp8, fixed=False)


def test_who_gets_the_largest_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXFP4 has no kernels of more than 64 rows, and other GPUs have no shared memory for it."""
    halves, floats = torch.empty(1, dtype=torch.bfloat16), torch.empty(1)
    tiles: list[tuple[torch.Tensor, torch.Tensor, kernels.Tile]] = [
        (halves, halves, kernels.MOST),
        (halves.to(FP8), halves, kernels.MOST),
        (halves.to(kernels.TILED), halves, kernels.MANY),
        (halves.to(torch.uint8), halves, kernels.MANY),
        (floats, floats, kernels.MANY._replace(outputs=32)),
    ]
    for weights, x, tile in tiles:
        assert kernels.tile_for(weights, x, 128.0)[:2] == (64, tile.outputs if x is floats else 64)
        monkeypatch.setattr(kernels, "is_hopper", lambda device: True)
        assert kernels.tile_for(weights, x, 128.0) == tile
        monkeypatch.undo()
        assert kernels.tile_for(weights, x, 16.0).rows == 64 and kernels.tile_for(weights, x, 15.9).rows == 16
    assert all(tile.rows // 8 in block_tiles.EXPERT_TILES for _, tile in kernels.TILES)


@pytest.mark.parametrize(("tokens", "fp8"), [(1, True), (20, False)])
def test_biases_and_the_clamped_gate(tokens: int, fp8: bool) -> None:
    """Half of the biases exceed the limits of the clamp."""
    gate_up, down, dense = weights(fp8)
    biases = [(torch.randn(2 * WIDTH) * 10, torch.randn(D_MODEL)) for _ in range(EXPERTS)]
    gate_up, down = (
        [(*tensors, pair[side].to(DEVICE)) for tensors, pair in zip(pairs, biases, strict=True)]
        for side, pairs in enumerate((gate_up, down))
    )
    x, logits = torch.randn(tokens, D_MODEL), torch.randn(tokens, EXPERTS)
    chosen = route(logits, PER_TOKEN, True)
    counts = torch.bincount(chosen.experts.flatten(), minlength=EXPERTS)

    def run(expert: int, rows: torch.Tensor | None) -> torch.Tensor:
        (inner, outer), (inner_bias, outer_bias) = dense[expert], biases[expert]
        return clamped_swiglu((x if rows is None else x[rows]) @ inner.T + inner_bias) @ outer.T + outer_bias

    expected = by_expert(D_MODEL, chosen, counts.tolist(), run, ALL)
    grouped = TritonExperts().group(gate_up, down, "swiglu_clamped", ALL)
    load = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    got = grouped(x.to(DEVICE), logits.to(DEVICE), PER_TOKEN, True, load)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert len(grouped.tensors()) == (6 if fp8 else 4)


@pytest.mark.parametrize("tokens", [1, 11, 50])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_in_mxfp4(tokens: int, biased: bool) -> None:
    """Against float64. 96 inputs do not fill their last unit of 64."""
    d_model, width, numbers = 96, 64, NUMBER_FORMATS["mxfp4"]
    stored = [
        [round_to_blocks(torch.randn(*shape) * 0.2, numbers) for _ in range(EXPERTS)]
        for shape in ((2 * width, d_model), (d_model, width))
    ]
    biases = [[torch.randn(len(blocks.codes)) for blocks in side] for side in stored]
    tensors = [
        [
            (*arrays(BLOCK_TRITON.pack(on_device(blocks))), *((bias.to(DEVICE),) if biased else ()))
            for blocks, bias in zip(side, side_biases, strict=True)
        ]
        for side, side_biases in zip(stored, biases, strict=True)
    ]
    x, logits = torch.randn(tokens, d_model), torch.randn(tokens, EXPERTS)
    chosen = route(logits, PER_TOKEN, True)
    counts = torch.bincount(chosen.experts.flatten(), minlength=EXPERTS)

    def run(expert: int, rows: torch.Tensor | None) -> torch.Tensor:
        values = (x if rows is None else x[rows]).double()
        for side in (0, 1):
            values = values @ stored[side][expert].dequantized().double().T
            values = values + biases[side][expert].double() if biased else values
            values = clamped_swiglu(values) if side == 0 else values
        return values

    expected = by_expert(d_model, chosen, counts.tolist(), run, ALL)
    grouped = TritonExperts().group(tensors[0], tensors[1], "swiglu_clamped", ALL)
    load = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    got = grouped(x.to(DEVICE), logits.to(DEVICE), PER_TOKEN, True, load)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 11, 50])
def test_ranks_with_whole_experts_add_up_to_all(tokens: int) -> None:
    """Each rank has every token and the load of all experts, and the terms of its own experts."""
    gate_up, down, dense = weights(False)
    x, logits = torch.randn(tokens, D_MODEL), torch.randn(tokens, EXPERTS)
    chosen = route(logits, PER_TOKEN, True)
    counts = torch.bincount(chosen.experts.flatten(), minlength=EXPERTS)

    def run(expert: int, rows: torch.Tensor | None) -> torch.Tensor:
        inner, outer = dense[expert]
        return activate((x if rows is None else x[rows]) @ inner.T, "silu") @ outer.T

    expected = by_expert(D_MODEL, chosen, counts.tolist(), run, ALL)
    half = EXPERTS // 2
    total = torch.zeros_like(expected)
    for held in (range(half), range(half, EXPERTS)):
        part = by_expert(D_MODEL, chosen, counts.tolist(), run, held)
        mine = slice(held.start, held.stop)
        grouped = TritonExperts().group(gate_up[mine], down[mine], "silu", held)
        load = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
        got = grouped(x.to(DEVICE), logits.to(DEVICE), PER_TOKEN, True, load).cpu()
        torch.testing.assert_close(got, part, rtol=1e-4, atol=1e-5)
        assert load.tolist() == counts.tolist()
        total += part
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def test_a_tokens_sum_does_not_depend_on_the_others() -> None:
    gate_up, down, _ = weights(False)
    grouped = GroupedExperts(gate_up, down, "silu", ALL, fixed=True)
    x, logits = torch.randn(40, D_MODEL, device=DEVICE), torch.randn(40, EXPERTS, device=DEVICE)
    load = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    together = grouped(x, logits, PER_TOKEN, False, load)
    for token in (0, 17, 39):
        alone = grouped(x[token : token + 1], logits[token : token + 1], PER_TOKEN, False, load)
        # The interpreter multiplies tiles with NumPy, whose rows may differ in the last bits by their place.
        last_bits = 0.0 if DEVICE == "cuda" else 1e-6
        torch.testing.assert_close(alone[0], together[token], rtol=last_bits, atol=last_bits)


def test_a_token_that_is_not_a_number_harms_no_other() -> None:
    gate_up, down, _ = weights(False)
    grouped = GroupedExperts(gate_up, down, "silu", ALL, fixed=False)
    x, logits = torch.randn(40, D_MODEL, device=DEVICE), torch.randn(40, EXPERTS, device=DEVICE)
    load = torch.zeros(8 * EXPERTS, dtype=torch.int64, device=DEVICE)
    expected = grouped(x, logits, PER_TOKEN, True, load[:EXPERTS])
    x[7], logits[7] = torch.nan, torch.nan
    load.zero_()
    got = grouped(x, logits, PER_TOKEN, True, load[:EXPERTS])
    assert not load[EXPERTS:].any() and load.sum() == 40 * PER_TOKEN, "every chosen expert exists"
    others = [token for token in range(40) if token != 7]
    torch.testing.assert_close(got[others], expected[others])


@pytest.mark.parametrize(
    "family",
    [pytest.param("mixtral", marks=pytest.mark.long), "qwen2-moe", pytest.param("gpt-oss", marks=pytest.mark.long)],
)
def test_a_decoder_with_grouped_experts(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    ops = replace(REFERENCE, experts=TritonExperts())
    device = torch.device("cpu")
    if DEVICE == "cuda":
        pytest.skip("the interpreter runs kernels on a CPU")
    reference = build(tmp_path, model=ModelConfig(), ops=REFERENCE, device=device)
    ours = build(tmp_path, model=ModelConfig(), ops=ops, device=device)
    assert ours.spec.weight_bytes == sum(tensor.nbytes for tensor in ours.decoder.tensors())
    draw = random.Random(4)
    prompt = [draw.randrange(3, 320) for _ in range(24)]
    expected = PagedRows(reference).step([(1, prompt)])
    cache = PagedRows(ours)
    got = torch.cat([cache.step([(1, prompt[:20])]), *(cache.step([(1, [token])]) for token in prompt[20:])])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


TYPES = {
    "logits_ptr": "*bf16",
    "x_ptr": "*bf16",
    "load_ptr": "*i64",
    "shares_ptr": "*fp32",
    "scale_ptr": "*fp32",
    "bias_ptr": "*bf16",
}


def compiled(
    name: str, weight: str, constants: dict[str, object], tile: kernels.Tile, x: str = "*bf16", capability: int = 90
) -> Any:
    kernel = getattr(kernels, name)
    known = {**TYPES, "x_ptr": x, "w_ptr": weight, "out_ptr": x}
    if weight == "*u8":
        known["scale_ptr"] = "*u8"
    signature = {
        argument: "constexpr"
        if argument in constants
        else known.get(argument, "*i32" if argument.endswith("_ptr") else "i32")
        for argument in kernel.arg_names
    }
    apart = {
        (kernel.arg_names.index(argument),): [["tt.divisibility", 16]]
        for argument in (*known, "width", "inputs", "outputs")
        if argument in signature
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(ASTSource(kernel, signature, constants, apart), target=target, options=options)


def check_compiles(name: str, weight: str, constants: dict[str, object], tile: kernels.Tile) -> str:
    """Compile a kernel for a Hopper GPU; the names of its matrix instructions."""
    ptx = compiled(name, weight, constants, tile).asm["ptx"]
    return " ".join(part for part in ("wgmma", "mma.sync", "cp.async") if part in ptx)


def shared_memory(*arguments: Any) -> int:
    return int(compiled(*arguments).metadata.shared)


KERNELS = (
    ("_inner", {"KIND": 1, "BIASED": False}),
    ("_outer", {"BIASED": False}),
    ("_inner", {"KIND": 3, "BIASED": True}),
    ("_outer", {"BIASED": True}),
)


@pytest.mark.parametrize(
    ("kernel", "weight", "tile"),
    crossed(
        KERNELS,
        ("*bf16", "*u8", "*fp8e4nv"),
        (kernels.MOST, kernels.MANY, kernels.FEW),
        quick=lambda kernel, weight, tile: kernel == weight and kernel < 2 and tile == 0,
    ),
)
def test_the_products_compile_for_hopper(
    kernel: tuple[str, dict[str, object]], weight: str, tile: kernels.Tile, apart
) -> None:
    name, more = kernel
    shape = {"ROWS": tile.rows, "WIDE": tile.outputs, "BLOCK": tile.inputs}
    stored = {"SCALED": weight == "*fp8e4nv", "FOUR_BITS": weight == "*u8"}
    used = apart(check_compiles, name, weight, {**stored, "SORTED": True, **more, **shape}, tile)
    assert "mma" in used and "cp.async" in used


@pytest.mark.parametrize(
    ("name", "x", "tile"),
    crossed(
        ("_inner", "_outer"),
        (torch.float32, torch.bfloat16),
        (kernels.MANY, kernels.FEW),
        quick=lambda name, x, tile: name == x == 0,
    ),
)
def test_tiles_of_all_gpus_fit_into_99_kib(name: str, x: torch.dtype, tile: kernels.Tile, apart) -> None:
    """Of shared memory, which a program may have on a GPU of Ada's generation."""
    least = next(least for least, known in kernels.TILES if known == tile)
    tile = kernels.tile_for(torch.empty(1, dtype=x), torch.empty(1, dtype=x), least)
    shape = {"ROWS": tile.rows, "WIDE": tile.outputs, "BLOCK": tile.inputs}
    constants = {"SCALED": False, "FOUR_BITS": False, "SORTED": True, "BIASED": False, **shape}
    constants |= {"KIND": 1} if name == "_inner" else {}
    number = "*fp32" if x is torch.float32 else "*bf16"
    assert apart(shared_memory, name, number, constants, tile, number, 89) <= 99 << 10


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("_route", {"NORMALIZED": True, "BLOCK": 128}),
        ("_sort", {"ROWS": 64, "BLOCK": 1024}),
        ("_sort", {"ROWS": 128, "BLOCK": 8192}),
    ],
)
def test_routing_compiles_for_hopper(name: str, constants: dict[str, object], apart) -> None:
    apart(check_compiles, name, "*bf16", constants, kernels.FEW)
