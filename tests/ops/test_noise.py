"""Noise depends on who draws, where and for which token, and looks random."""

from __future__ import annotations

import pytest
import torch

from ridgeline.ops.noise import Purpose, draw_key, exponential, row_key, words

TOKENS = torch.arange(4096, dtype=torch.int32)
KNOWN_KEY, KNOWN_LAST = (-2032993677, -2074001574), (-64904317, 108709756)
KNOWN_WORDS = [206961468, 1320589444, 477988006, 748600609]
"""Worked out apart, in Python's whole numbers."""


def draws(keys: list[tuple[int, int]], positions: list[int], purpose: Purpose = Purpose.TOKEN) -> torch.Tensor:
    return draw_key(torch.tensor(keys, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32), purpose)


def uniform(draw: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return words(draw, tokens).double() * 2.0**-31


def uniform_of(seed: int = 1, choice: int = 0, position: int = 10, purpose: Purpose = Purpose.TOKEN) -> torch.Tensor:
    return uniform(draws([row_key(seed, choice)], [position], purpose), TOKENS)[0]


def test_known_numbers() -> None:
    """Seeds of users keep their meaning from release to release."""
    assert row_key(1, 0) == KNOWN_KEY
    assert row_key(-(1 << 63), 127) == KNOWN_LAST
    assert words(draws([row_key(1, 0)], [10]), TOKENS)[0, :4].tolist() == KNOWN_WORDS


def test_batch_and_vocabulary_do_not_matter() -> None:
    keys, positions = [row_key(seed, seed % 3) for seed in range(9)], list(range(100, 109))
    batch = uniform(draws(keys, positions), TOKENS)
    for index in range(9):
        assert torch.equal(
            batch[index], uniform(draws(keys[index : index + 1], positions[index : index + 1]), TOKENS)[0]
        )
    assert torch.equal(uniform(draws(keys, positions), TOKENS[:100]), batch[:, :100])


@pytest.mark.parametrize(
    "other",
    [{"seed": 2}, {"seed": 1 + (1 << 32)}, {"seed": -1}, {"choice": 1}, {"position": 11}, {"purpose": Purpose.DRAFT}],
)
def test_every_argument_matters(other: dict[str, int]) -> None:
    first, second = uniform_of(), uniform_of(**other)  # type: ignore[arg-type]
    assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 5 / len(TOKENS) ** 0.5
    assert int((first == second).sum()) < 3


def flatness(samples: torch.Tensor, bins: int = 64) -> float:
    """Chi-square statistic over its degrees of freedom; 1 is expected."""
    counts = torch.histc(samples.float(), bins, 0.0, 1.0)
    expected = samples.numel() / bins
    return float(((counts - expected) ** 2 / expected).sum()) / (bins - 1)


def test_uniform_along_tokens_positions_and_seeds() -> None:
    assert flatness(uniform_of()) < 1.7
    keys = [row_key(5, 0)] * 4096
    assert flatness(uniform(draws(keys, list(range(4096))), TOKENS[:1])) < 1.7
    assert flatness(uniform(draws([row_key(seed, 0) for seed in range(4096)], [3] * 4096), TOKENS[7:8])) < 1.7
    assert flatness(uniform(draws([row_key(0, choice) for choice in range(4096)], [3] * 4096), TOKENS[7:8])) < 1.7


def test_neighbours_are_independent() -> None:
    grid = uniform(draws([row_key(5, 0)] * 512, list(range(512))), TOKENS[:512])
    for first, second in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:]), (grid[:-1, :-1], grid[1:, 1:])):
        pair = torch.stack((first.flatten(), second.flatten()))
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / first.numel() ** 0.5


def test_exponential_is_positive_finite_and_of_mean_one() -> None:
    samples = exponential(draws([row_key(seed, 0) for seed in range(64)], [0] * 64), TOKENS)
    assert bool((samples > 0).all()) and bool(samples.isfinite().all())
    assert abs(float(samples.mean()) - 1) < 0.01
    assert abs(float((samples < 1e-4).float().mean()) - 1e-4) < 5e-5
