"""Methods on small matrices, against definitions and brute force."""

from __future__ import annotations

import pytest
import torch

from ridgeline.compress import awq, smooth
from ridgeline.compress.gptq import BLOCK, Order, gptq, inverse_factor
from ridgeline.compress.grid import TERNARY, Codes, Grid, check_matrix, fit_groups, nearest_codes, round_to_nearest
from ridgeline.compress.prune import Pattern, by_magnitude, sparsegpt, wanda
from ridgeline.compress.statistics import Statistics, output_error
from ridgeline.compress.structured import refit, removal_costs
from ridgeline.core.errors import UnsupportedModel

INPUTS, OUTPUTS, TOKENS = 24, 10, 400


@pytest.fixture
def inputs() -> torch.Tensor:
    """Tokens [TOKENS, INPUTS] whose features depend on each other and differ in size."""
    chance = torch.Generator().manual_seed(0)
    mixed = torch.randn(INPUTS, INPUTS, generator=chance)
    size = torch.logspace(-1, 1, INPUTS)[torch.randperm(INPUTS, generator=chance)]
    return torch.randn(TOKENS, INPUTS, generator=chance) @ mixed * size


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def seen(inputs: torch.Tensor) -> Statistics:
    statistics = Statistics(INPUTS)
    for part in inputs.split(150):
        statistics.update(part)
    return statistics


def error(values: torch.Tensor, weight: torch.Tensor, inputs: torch.Tensor) -> float:
    return float(((values - weight) @ inputs.T).square().sum())


def test_statistics_are_sums_over_tokens(inputs: torch.Tensor, seen: Statistics, weight: torch.Tensor) -> None:
    torch.testing.assert_close(seen.moment, inputs.T @ inputs, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(seen.max_abs, inputs.abs().amax(0))
    torch.testing.assert_close(seen.mean_abs, inputs.abs().mean(0))
    torch.testing.assert_close(seen.norm, inputs.norm(dim=0), rtol=1e-4, atol=1e-3)
    assert float(output_error(weight, seen.moment).sum()) == pytest.approx(error(weight * 2, weight, inputs), rel=1e-3)
    with pytest.raises(UnsupportedModel, match="o_proj cannot be calibrated"):
        Statistics(3).check("o_proj")


# --- the grid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 8), (4, 0), (3, 10), (8, 0)])
def test_rounding_is_the_nearest_point_of_the_grid(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool
) -> None:
    grid = Grid(bits, group, symmetric)
    codes = round_to_nearest(weight, grid)
    place = torch.arange(INPUTS) // (group or INPUTS)
    zeros = torch.full_like(codes.scales, 2 ** (bits - 1)) if codes.zeros is None else codes.zeros.float()
    points = (torch.arange(2**bits).view(1, 1, -1) - zeros[:, place].unsqueeze(2)) * codes.scales[:, place].unsqueeze(2)
    nearest = (points - weight.unsqueeze(2)).abs().amin(2)
    torch.testing.assert_close((codes.dequantize() - weight).abs(), nearest)
    # Stored scales are exact. The range is covered but for what rounding a scale to 11 bits takes away at the end of 2^bits
    # steps, and for values as large as a symmetric grid's end, on its other side.
    assert torch.equal(codes.scales, codes.scales.half().float())
    assert float((nearest / codes.scales[:, place].abs()).max()) <= 0.5 + 0.5 * symmetric + 2 ** (bits - 11)
    if symmetric and bits == 4:
        largest = weight.abs() == weight.abs().amax(1, keepdim=True)
        assert (codes.codes[largest] == 0).all()


def test_ternary_weights_have_three_values_and_err_less_than_with_the_extreme_as_scale(
    weight: torch.Tensor, seen: Statistics
) -> None:
    """The scale is the mean of the magnitudes above 0.7 of their mean (Ternary Weight Networks); GPTQ errs less than rounding."""
    grid = Grid(2, 0, levels=TERNARY)
    made = round_to_nearest(weight, grid)
    assert set(made.codes.unique().tolist()) == {0, 1, 2}
    row = weight[0].abs()
    scale = row[row > 0.7 * row.mean()].mean()
    torch.testing.assert_close(made.scales[0, 0], scale.half().float())
    torch.testing.assert_close(made.dequantize()[0], (weight[0] / made.scales[0]).round().clamp(-1, 1) * made.scales[0])
    extremes = weight.abs().amax(1, keepdim=True)
    coarse = (weight / extremes).round() * extremes
    assert float((made.dequantize() - weight).norm()) < float((coarse - weight).norm())
    better = gptq(weight, seen.moment, grid)
    assert set(better.codes.unique().tolist()) == {0, 1, 2}
    errors = (float(output_error(codes.dequantize() - weight, seen.moment).sum()) for codes in (better, made))
    assert next(errors) < next(errors)


def test_a_group_of_zeros_stays_zero() -> None:
    for symmetric in (True, False):
        assert not round_to_nearest(torch.zeros(3, 8), Grid(4, 4, symmetric)).dequantize().any()


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.tensor([[1.0, float("nan")]]), "NaN"),
        (torch.zeros(3), "not a matrix"),
        (torch.zeros(2, 2, dtype=torch.int32), "not floats"),
    ],
)
def test_what_is_no_matrix_of_numbers_is_named(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"tensor a.b cannot be compressed.*{said}"):
        check_matrix("a.b", tensor)


# --- GPTQ -------------------------------------------------------------------------------------------------------------


def by_least_squares(weight: torch.Tensor, moment: torch.Tensor, grid: Grid, damping: float) -> torch.Tensor:
    """The definition: round one input; of the inputs not yet rounded take those weights that, by a direct solution of least
    squares, bring the outputs nearest to the original ones; go on."""
    wide = moment.double() + damping * moment.diagonal().double().mean() * torch.eye(len(moment)).double()
    # Rows of `root` stand for tokens: |d root^T|^2 = d wide d^T.
    root = torch.linalg.cholesky(wide).T
    target = weight.double() @ root.T
    done = torch.zeros_like(weight, dtype=torch.float64)
    left = weight.double().clone()
    codes = torch.zeros_like(weight)
    scales, zeros = fit_groups(weight, grid)
    for place in range(weight.shape[1]):
        if place:
            rest = target - done @ root.T
            left[:, place:] = torch.linalg.lstsq(root[:, place:], rest.T).solution.T
        if place % grid.width(weight.shape[1]) == 0:
            part = left[:, place : place + grid.width(weight.shape[1])].float()
            scale, zero = (factors[:, 0] for factors in fit_groups(part, Grid(grid.bits, 0, grid.symmetric)))
            group = place // grid.width(weight.shape[1])
            scales[:, group], zeros[:, group] = scale, zero
        codes[:, place] = nearest_codes(left[:, place], scale.double(), zero.double(), grid).float()
        done[:, place] = (codes[:, place].double() - zero) * scale
    return codes


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, 0, True), (3, 8, False), (4, 10, True)])
def test_gptq_is_the_sequence_of_least_squares(
    weight: torch.Tensor, seen: Statistics, bits: int, group: int, symmetric: bool
) -> None:
    grid = Grid(bits, group, symmetric)
    codes = gptq(weight, seen.moment, grid)
    torch.testing.assert_close(codes.codes.float(), by_least_squares(weight, seen.moment, grid, 0.01))


def test_gptq_of_more_inputs_than_a_block_has() -> None:
    chance, width = torch.Generator().manual_seed(6), BLOCK + 30
    weight, tokens = torch.randn(3, width, generator=chance), torch.randn(4 * width, width, generator=chance)
    moment, grid = tokens.T @ tokens / len(tokens), Grid(3, 0)
    torch.testing.assert_close(gptq(weight, moment, grid).codes.float(), by_least_squares(weight, moment, grid, 0.01))


@pytest.mark.parametrize("order", ["as stored", "static", "groups"])
def test_gptq_errs_less_than_rounding(order: Order) -> None:
    chance = torch.Generator().manual_seed(4)
    tokens = torch.randn(600, 30, generator=chance) @ torch.randn(30, 96, generator=chance)
    tokens += 0.3 * torch.randn(600, 96, generator=chance)
    weight = torch.randn(40, 96, generator=chance)
    grid = Grid(4, 32)
    codes = gptq(weight, tokens.T @ tokens, grid, order)
    assert (codes.g_idx is not None) == (order == "groups")
    plain = round_to_nearest(weight, grid).dequantize()
    assert error(codes.dequantize(), weight, tokens) < 0.5 * error(plain, weight, tokens)


def test_static_order_keeps_the_groups_and_the_order_of_groups_says_them(
    weight: torch.Tensor, seen: Statistics
) -> None:
    grid = Grid(4, 8)
    static = gptq(weight, seen.moment, grid, "static")
    torch.testing.assert_close(static.scales, fit_groups(weight, grid)[0])
    codes = gptq(weight, seen.moment, grid, "groups")
    assert codes.g_idx is not None
    assert codes.g_idx.bincount().tolist() == [8, 8, 8]
    largest = seen.moment.diagonal().argsort(descending=True)
    assert (codes.g_idx[largest[:8]] == 0).all()


def test_inputs_that_never_came_are_rounded_alone(weight: torch.Tensor, seen: Statistics) -> None:
    seen.moment[3], seen.moment[:, 3] = 0.0, 0.0
    codes = gptq(weight, seen.moment, Grid(8))
    assert torch.isfinite(codes.dequantize()).all()
    torch.testing.assert_close(codes.dequantize()[:, 3], weight[:, 3], atol=0.03, rtol=0)


def test_moments_that_are_none_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="not positive definite"):
        inverse_factor(torch.tensor([[1.0, 5.0], [5.0, 1.0]]))


# --- AWQ and SmoothQuant ----------------------------------------------------------------------------------------------


def test_awq_scales_err_less_than_none(weight: torch.Tensor, seen: Statistics, inputs: torch.Tensor) -> None:
    grid = Grid(3, 8, symmetric=False)
    scale = awq.scales_for([weight], seen, grid)
    scaled = round_to_nearest(weight * scale, grid).dequantize() / scale
    plain = round_to_nearest(weight, grid).dequantize()
    assert error(scaled, weight, inputs) < error(plain, weight, inputs)
    # Exponent 0 is no scale at all, so nothing worse than rounding can come out.
    assert torch.equal(awq.scales_for([weight], Statistics(INPUTS), grid), torch.ones(INPUTS))


def test_cutting_a_range_never_costs_in_its_own_group(weight: torch.Tensor, seen: Statistics) -> None:
    grid = Grid(3, 8)
    cut, plain = awq.cut_to_error(weight, seen.moment, grid), round_to_nearest(weight, grid)
    narrower = cut.scales.abs() < plain.scales.abs()
    assert (narrower | (cut.scales == plain.scales)).all() and narrower.any()
    for start in range(0, INPUTS, 8):
        inside = slice(start, start + 8)

        def cost(codes: Codes, inside: slice = inside) -> torch.Tensor:
            return output_error((codes.dequantize() - weight)[:, inside], seen.moment[inside, inside])

        assert (cost(cut) <= cost(plain) * 1.0001).all()


def test_smoothquant_shares_the_range(weight: torch.Tensor, seen: Statistics) -> None:
    """At alpha 0.5 inputs and weights end with the same largest value, as in section 4 of the paper."""
    scale = smooth.factors([weight, weight * 0.5], seen.max_abs, 0.5)
    torch.testing.assert_close(seen.max_abs / scale, (weight * scale).abs().amax(0))
    torch.testing.assert_close(smooth.factors([weight], seen.max_abs, 1.0), seen.max_abs)


# --- pruning ----------------------------------------------------------------------------------------------------------


def test_magnitude_and_wanda_by_hand() -> None:
    weight = torch.tensor([[1.0, -3.0, 2.0, 4.0], [-0.1, 0.2, 0.3, -0.4]])
    half = Pattern(0.5)
    assert by_magnitude(weight, half).tolist() == [[1.0, -3.0, 2.0, 4.0], [0.0, 0.0, 0.0, 0.0]]
    norm = torch.tensor([10.0, 1.0, 1.0, 1.0])
    mask = wanda(weight, norm, half)
    torch.testing.assert_close(mask, torch.tensor([[1.0, 0, 0, 4.0], [-0.1, 0, 0, -0.4]]))


@pytest.mark.parametrize("pattern", [Pattern(0.5), Pattern(0.25), Pattern(0.5, 4), Pattern(0.25, 8)])
def test_every_method_leaves_the_share_it_should(weight: torch.Tensor, seen: Statistics, pattern: Pattern) -> None:
    for mask in (
        by_magnitude(weight, pattern),
        wanda(weight, seen.norm, pattern),
        sparsegpt(weight, seen.moment, pattern),
    ):
        assert int((mask == 0).sum()) == round(weight.numel() * pattern.share)
        if pattern.run_length:
            runs = (mask == 0).unflatten(1, (-1, pattern.run_length)).sum(-1)
            assert (runs == pattern.zeros).all()


def test_who_knows_more_errs_less(weight: torch.Tensor, seen: Statistics, inputs: torch.Tensor) -> None:
    for pattern in (Pattern(0.5), Pattern(0.5, 4)):
        magnitude = error(by_magnitude(weight, pattern), weight, inputs)
        masked = error(wanda(weight, seen.norm, pattern), weight, inputs)
        settled = error(sparsegpt(weight, seen.moment, pattern), weight, inputs)
        assert settled < masked < magnitude


def test_a_width_that_a_pattern_does_not_fit_is_named(weight: torch.Tensor) -> None:
    with pytest.raises(UnsupportedModel, match="tensor q cannot be pruned 2:5: its 24 inputs"):
        Pattern(0.6, 5).check("q", weight)


def test_costs_and_refits_are_least_squares(weight: torch.Tensor, inputs: torch.Tensor, seen: Statistics) -> None:
    """What the surgeon says of a block equals the error after a direct solution without it."""
    costs = removal_costs(weight, seen.moment, 4)
    damping = float(0.01 * seen.moment.diagonal().mean()) ** 0.5
    rows = torch.cat((inputs, damping * torch.eye(INPUTS))).double()
    for block in range(INPUTS // 4):
        kept = torch.tensor([index for index in range(INPUTS) if index // 4 != block])
        best = torch.linalg.lstsq(rows[:, kept], rows @ weight.double().T).solution.T
        torch.testing.assert_close(refit(weight, seen.moment, kept).double(), best, rtol=1e-3, atol=1e-3)
        left = (rows[:, kept] @ best.T - rows @ weight.double().T).square().sum()
        assert float(costs[block]) == pytest.approx(float(left), rel=1e-2)
