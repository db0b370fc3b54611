"""Experts on a GPU equal the definition, for steps of every size."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


from ridgeline.core.config import ModelConfig
from ridgeline.core.experts import ExpertSpec
from ridgeline.core.formats import NUMBER_FORMATS
from ridgeline.core.gpu_blocks import converted
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.models.build import build
from ridgeline.ops.experts import by_expert, route
from ridgeline.ops.reference import REFERENCE, activate, clamped_swiglu, quantize
from ridgeline.ops.table import Fp8Matrix, IntMatrix, Matrix
from ridgeline.ops.triton import block_tiles, integer
from ridgeline.ops.triton import experts as kernels
from ridgeline.ops.triton.blocks import BLOCK_TRITON
from ridgeline.ops.triton.experts import FEW_PAIRS, GroupedExperts, TritonExperts
from ridgeline.quant.blocks import round_to_blocks
from ridgeline.quant.fp8 import quantize_groups
from ridgeline.quant.integer import round_to_nearest
from tests.combinations import crossed
from tests.models.families import save
from tests.models.paged import PagedRows
from tests.ops.test_blocks import on_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D_MODEL, WIDTH, EXPERTS, PER_TOKEN = 48, 40, 6, 3
ALL = range(EXPERTS)
QUICK = ((0, 0, 0), (1, 0, 0), (3, 0, 1), (2, 1, 0), (3, 2, 0), (3, 3, 0), (4, 4, 1), (1, 5, 0), (4, 6, 0), (3, 7, 0))
CODES = kernels.HOPPER_CODE_TILES[0][1], kernels.CODE_TILES[0][1].of_floats()
NIBBLES = IntMatrix(torch.empty(1, 1), torch.empty(1), None, 4, 32, 32, 32)


def stored(weight: torch.Tensor, form: str) -> tuple[Matrix, torch.Tensor]:
    """A weight in a number format as the kernels take it, and as floats."""
    weight = weight.to(DEVICE)
    if not form:
        return Matrix(weight, None), weight.cpu()
    numbers = NUMBER_FORMATS[form]
    if form.startswith("fp8"):
        scaled = quantize_groups(weight, numbers.group)
        packed = replace(integer.pack_e4m3(scaled.values, scaled.scales), group=numbers.group)
        per_input = scaled.scales.view(len(weight), -1).repeat_interleave(numbers.group or weight.shape[1], 1)
        return Matrix(packed, None), (scaled.values.float() * per_input[:, : weight.shape[1]]).cpu()
    codes, scales, zeros = round_to_nearest(weight, numbers)
    matrix = integer.pack(codes, scales, zeros, numbers.bits, numbers.group or weight.shape[1])
    return Matrix(matrix, None), integer.dequantize(matrix, torch.float32).cpu()


def weights(form: str = "") -> tuple[list[Matrix], list[Matrix], list[tuple[torch.Tensor, torch.Tensor]]]:
    """(gate and up, down) of each expert as the kernels take them, and as floats."""
    torch.manual_seed(3)
    pairs = [
        (stored(torch.randn(2 * WIDTH, D_MODEL) * 0.2, form), stored(torch.randn(D_MODEL, WIDTH) * 0.2, form))
        for _ in range(EXPERTS)
    ]
    return [inner for (inner, _), _ in pairs], [outer for _, (outer, _) in pairs], [(a, b) for (_, a), (_, b) in pairs]


@pytest.mark.parametrize(
    ("tokens", "form", "fixed"),
    crossed(
        (0, 1, FEW_PAIRS // PER_TOKEN, 11, 50),
        ("", "fp8-weight", "fp8-block", "int8", "int8-g32", "int4-g32", "int4-g32-zp", "int3-channel-zp"),
        (False, True),
        quick=lambda tokens, form, fixed: (tokens, form, fixed) in QUICK,
    ),
)
def test_grouped_equals_the_definition(tokens: int, form: str, fixed: bool) -> None:
    gate_up, down, dense = weights(form)
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


@pytest.mark.parametrize(
    "form",
    (
        "", "fp8", "fp8-weight", "fp8-block", "int8", "int8-g32", "int8-g32-zp", "int4-g32", "int4-g32-zp", "int4-g128",
        "int4-g128-zp", "int3-g32", "int3-channel-zp",
    ),
)  # fmt: skip
@pytest.mark.parametrize(("width", "d_model"), [(40, 48), (96, 160)])
def test_counted_bytes_are_those_of_the_tensors(form: str, width: int, d_model: int) -> None:
    def matrices(outputs: int, inputs: int) -> list[Matrix]:
        matrix, _ = stored(torch.randn(outputs, inputs).to(torch.bfloat16), form)
        return [matrix] * EXPERTS

    experts = ExpertSpec(EXPERTS, PER_TOKEN, width)
    layer = LayerSpec(2, 2, 16, experts.active_width, Rope(), experts=experts)
    spec = converted(ModelSpec("", 64, d_model, (layer,), 64, quantization=form), "hopper")
    grouped = TritonExperts().group(matrices(2 * width, d_model), matrices(d_model, width), "silu", ALL)
    counted = sum(spec.matrix_bytes(matrix) for matrix in spec.matrices(layer) if matrix.chosen)
    assert counted == sum(tensor.nbytes for tensor in grouped.tensors())


@pytest.mark.parametrize("tokens", [10, 40])
def test_terms_in_16_bits_add_one_rounding(tokens: int) -> None:
    """Error against float64, in roundings of the result to x's dtype: what down multiplies is rounded once, and each term, which
    makes 1.41 on average."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    _, _, dense = weights()
    halves = [[Matrix(pair[side].to(DEVICE, dtype), None) for pair in dense] for side in (0, 1)]
    x, logits = torch.randn(tokens, D_MODEL).to(dtype), torch.randn(tokens, EXPERTS)
    chosen = route(logits, PER_TOKEN, True)
    counts = torch.bincount(chosen.experts.flatten(), minlength=EXPERTS)

    def run(expert: int, rows: torch.Tensor | None) -> torch.Tensor:
        inner, outer = (pair.to(dtype).double() for pair in dense[expert])
        return activate((x if rows is None else x[rows]).double() @ inner.T, "silu") @ outer.T

    exact = by_expert(D_MODEL, chosen, counts.tolist(), run, ALL).double()
    load = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    grouped = TritonExperts().group(halves[0], halves[1], "silu", ALL)
    got = grouped(x.to(DEVICE), logits.to(DEVICE), PER_TOKEN, True, load)
    rounding = (exact.to(dtype).double() - exact).norm()
    assert got.dtype == torch.float32 and (got.cpu().double() - exact).norm() < 1.8 * rounding
    terms = grouped(x.to(DEVICE), logits.to(DEVICE), 1, True, load)
    assert torch.equal(terms, terms.to(dtype).float()), "with a single expert a sum is a term, a number of 16 bits"


def test_the_largest_tile_equals_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no float32 gets otherwise."""
    monkeypatch.setattr(kernels, "CODE_TILES", kernels.HOPPER_CODE_TILES)
    test_grouped_equals_the_definition(-(-kernels.HOPPER_CODE_TILES[0][0] * EXPERTS // PER_TOKEN), "int4", fixed=False)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """x rounded to e4m3 with a scale for each row."""
    scaled = quantize(x)
    return scaled.values.float() * scaled.scales[:, None]


@pytest.mark.parametrize(
    ("form", "mean", "biased"),
    [
        ("", 128, False),
        ("fp8", 32, True),
        pytest.param("fp8", 256, False, marks=pytest.mark.long),
    ],
)
def test_long_prompts_equal_the_definition(form: str, mean: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, and with inputs rounded to e4m3, which changes results by more than the error that is allowed. A GPU's matrix
    unit adds products of e4m3 in some 14 bits (DeepSeek-AI 2024, DeepSeek-V3 Technical Report, 3.3.2), which rounds some of what
    down multiplies to the other neighbour."""
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "is_hopper", lambda device: True)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    gate_up, down, dense = weights("fp8-weight" if form else "")
    biases = [(torch.randn(2 * WIDTH).to(dtype), torch.randn(D_MODEL).to(dtype)) for _ in range(EXPERTS)]

    def of_format(matrix: Matrix, bias: torch.Tensor) -> Matrix:
        packed = matrix.packed
        made = replace(packed, rounded=True) if isinstance(packed, Fp8Matrix) else packed
        return Matrix(made.to(dtype) if isinstance(made, torch.Tensor) else made, bias.to(DEVICE) if biased else None)

    sides = [
        [of_format(matrix, pair[side]) for matrix, pair in zip(matrices, biases, strict=True)]
        for side, matrices in enumerate((gate_up, down))
    ]
    tokens = mean * EXPERTS // PER_TOKEN
    x, logits = torch.randn(tokens, D_MODEL).to(dtype), torch.randn(tokens, EXPERTS)
    chosen = route(logits, PER_TOKEN, True)
    counts = torch.bincount(chosen.experts.flatten(), minlength=EXPERTS)

    def expected(read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        def run(expert: int, rows: torch.Tensor | None) -> torch.Tensor:
            values, added = (x if rows is None else x[rows]).float(), [bias.float() * biased for bias in biases[expert]]
            inner, outer = (weight if form else weight.to(dtype).float() for weight in dense[expert])
            values = activate(read(values) @ inner.T + added[0], "silu").to(dtype).float()
            return read(values) @ outer.T + added[1]

        return by_expert(D_MODEL, chosen, counts.tolist(), run, ALL)

    exact = expected(e4m3 if form else torch.Tensor.float)
    load = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    got = TritonExperts().group(*sides, "silu", ALL)(x.to(DEVICE), logits.to(DEVICE), PER_TOKEN, True, load).cpu()
    assert (got - exact).norm() / exact.norm() < (8e-3 if DEVICE == "cuda" else 5e-3)
    assert not form or (got - expected(torch.Tensor.float)).norm() / exact.norm() > 2e-2
    fixed = TritonExperts(fixed=True).group(*sides, "silu", ALL)
    alone = fixed(x.to(DEVICE), logits.to(DEVICE), PER_TOKEN, True, load).cpu()
    assert (alone - expected(torch.Tensor.float)).norm() / exact.norm() < 5e-3, "a fixed tile leaves inputs as they are"


def test_who_gets_which_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXFP4 has no kernels of more than 64 rows, other GPUs no TMA and no shared memory for the largest tiles, and TMA loads rows
    of whole 16 bytes."""
    halves, floats = torch.empty(2, 32, 16, dtype=torch.bfloat16), torch.empty(2, 32, 16)
    codes = replace(NIBBLES, bits=8, scaling="e4m3")
    tiles: list[tuple[kernels.Weights, torch.Tensor, kernels.Tile]] = [
        (halves, halves, kernels.HOPPER_TILES[0][1]),
        (halves[..., :8], halves, kernels.MANY),
        (halves[:, :24], halves, kernels.MANY),
        (NIBBLES, halves, CODES[0]),
        (codes, halves, CODES[0]),
        (replace(codes, inputs="rounded"), halves, kernels.HOPPER_ROUNDED_TILES[0][1]),
        (replace(codes, inputs="rounded"), floats, CODES[1]),
        (replace(NIBBLES, scaling="e8m0"), halves, kernels.MANY),
        (floats, floats, kernels.MANY.of_floats()),
        (NIBBLES, floats, CODES[1]),
    ]
    for weights, x, tile in tiles:
        assert kernels.tile_for(weights, x, 256.0).rows == 64
        monkeypatch.setattr(kernels, "is_hopper", lambda device: True)
        assert kernels.tile_for(weights, x, 256.0) == tile
        monkeypatch.undo()
        rows = [kernels.tile_for(weights, x, mean).rows for mean in (9.9, 10.0, 15.9, 16.0, 30.0)]
        is_codes = isinstance(weights, IntMatrix) and weights.scaling != "e8m0"
        assert rows == ([16, 32, 32, 32, 64] if is_codes else [16, 16, 16, 64, 64])
    assert all(tile.rows // 8 in block_tiles.EXPERT_TILES for _, tile in kernels.TILES)


@pytest.mark.parametrize(("tokens", "form"), [(1, "fp8-weight"), (20, "")])
def test_biases_and_the_clamped_gate(tokens: int, form: str) -> None:
    """Half of the biases exceed the limits of the clamp."""
    gate_up, down, dense = weights(form)
    biases = [(torch.randn(2 * WIDTH) * 10, torch.randn(D_MODEL)) for _ in range(EXPERTS)]
    gate_up, down = (
        [replace(matrix, bias=pair[side].to(DEVICE)) for matrix, pair in zip(pairs, biases, strict=True)]
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
    assert len(list(grouped.tensors())) == (6 if form else 4)


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
            Matrix(BLOCK_TRITON.pack(on_device(blocks)), bias.to(DEVICE) if biased else None)
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
    gate_up, down, dense = weights()
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
    gate_up, down, _ = weights()
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
    gate_up, down, _ = weights()
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
    ("family", "quantization"),
    [
        pytest.param("mixtral", "", marks=pytest.mark.long),
        pytest.param("qwen2-moe", "", marks=pytest.mark.long),
        pytest.param("gpt-oss", "", marks=pytest.mark.long),
        ("qwen2-moe", "int4-g32-zp"),
        ("qwen3-moe", "fp8"),
    ],
)
def test_a_decoder_with_grouped_experts(
    family: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cuda":
        pytest.skip("the interpreter runs kernels on a CPU")
    save(family, tmp_path)
    # Integers in the layout that a GPU has, multiplied by the reference outside of experts.
    integers = integer.widened(REFERENCE.matmul.unquantized)
    matmul = replace(REFERENCE.matmul, integer=integers, fp8_weight=integer.with_e4m3(integers))
    device, model = torch.device("cpu"), ModelConfig(quantization=quantization)
    sides, stacked = list[kernels.Stacked](), kernels.stacked

    def watched(matrices: Sequence[Matrix], inputs: int) -> kernels.Stacked:
        sides.append(stacked(matrices, inputs))
        return sides[-1]

    monkeypatch.setattr(kernels, "stacked", watched)
    reference = build(tmp_path, model=model, ops=REFERENCE, device=device)
    ours = build(tmp_path, model=model, ops=replace(REFERENCE, experts=TritonExperts(), matmul=matmul), device=device)
    reads = {side.weights.inputs if isinstance(side.weights, IntMatrix) else "float" for side in sides}
    assert reads == {"rounded" if quantization == "fp8" else "float"}, (
        "long prompts round the inputs of this format alone"
    )
    held = converted(ours.spec, "hopper").weight_bytes
    assert quantization == "fp8" or held == sum(tensor.nbytes for tensor in ours.decoder.tensors())
    draw = random.Random(4)
    prompt = [draw.randrange(3, 320) for _ in range(24)]
    expected = PagedRows(reference).step([(1, prompt)])
    cache = PagedRows(ours)
    got = torch.cat([cache.step([(1, prompt[:20])]), *(cache.step([(1, [token])]) for token in prompt[20:])])
    if quantization == "fp8":  # the reference rounds the inputs of experts, too
        assert (got - expected).norm() < 0.2 * expected.norm()
    else:
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
