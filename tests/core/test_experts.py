"""The expected number of experts that a step reads, against a simulation, and the same figure in every formula."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ridgeline.core.cost import WorkMeter, step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.experts import ExpertSpec
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope

EXPERTS = ExpertSpec(16, 3, 32)
LAYER = LayerSpec(8, 2, 8, EXPERTS.active_width, Rope(dim=8), experts=EXPERTS)
DENSE = replace(LAYER, experts=None)
SPEC = ModelSpec("M", 1000, 64, (LAYER,) * 3, 4096)
BYTES = 2 * 3 * 64 * 32
"""Bytes of one expert."""


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_a_step_reads_the_experts_of_its_tokens(tokens: int) -> None:
    draw = random.Random(5)
    rounds = 3000
    distinct = sum(len({expert for _ in range(tokens) for expert in draw.sample(range(16), 3)}) for _ in range(rounds))
    read = SPEC.step_weight_bytes - SPEC.idle_bytes(tokens, tokens)
    others = SPEC.step_weight_bytes - 3 * 16 * BYTES
    assert (read - others) / (3 * BYTES) == pytest.approx(distinct / rounds, rel=0.02)


def test_one_token_reads_exactly_its_experts() -> None:
    assert SPEC.step_weight_bytes - SPEC.idle_bytes(1, 1) == SPEC.step_weight_bytes - 3 * (16 - 3) * BYTES
    assert SPEC.idle_bytes(10_000, 10_000) == 0


def test_a_token_costs_as_much_as_in_a_dense_layer_of_its_width() -> None:
    dense = replace(SPEC, layers=(DENSE,) * 3)
    router = 2 * 16 * 64 * 3
    assert SPEC.linear_flops(5, 5) == dense.linear_flops(5, 5) + 5 * router
    assert SPEC.params == dense.params + 3 * (13 * 3 * 64 * 32 + 16 * 64)


@pytest.mark.parametrize("layers", [(LAYER,) * 3, (LAYER, DENSE, DENSE), (DENSE, DENSE, LAYER)])
def test_the_meter_of_an_engine_counts_the_same(layers: tuple[LayerSpec, ...]) -> None:
    spec = replace(SPEC, layers=layers)
    for ends, counts, logits in (([9, 30], [1, 1], 2), ([64, 30], [64, 1], 2), ([40], [40], 0)):
        shares = [(end - count, count) for end, count in zip(ends, counts, strict=True)]
        assert WorkMeter(spec).work(ends, counts, logits) == step_work(spec, shares, logits)


def test_ranks_divide_the_width_of_each_expert_or_none() -> None:
    """A layer's d_ff is what a token uses of its experts; only experts that are not whole must have a width that divides."""
    odd = replace(LAYER, d_ff=99, experts=ExpertSpec(16, 3, 33))
    with pytest.raises(ConfigError, match=r"Experts of width 33 \(shared: 0\) cannot be split over 2 devices"):
        odd.on_rank(2)
    whole = replace(odd, experts=ExpertSpec(16, 3, 33, whole=True)).on_rank(2)
    assert whole.d_ff == 3 * 33, "one rank may hold all experts of a token"
    assert replace(LAYER, d_ff=4 * 34, experts=ExpertSpec(16, 4, 34)).on_rank(2).d_ff == 4 * 17
    with pytest.raises(ConfigError, match="Experts of width 33"):  # 4 x 33 would divide
        replace(LAYER, d_ff=4 * 33, experts=ExpertSpec(16, 4, 33)).on_rank(2)
    with pytest.raises(ConfigError, match="8 heads and a feed-forward width of 96"):
        LAYER.on_rank(3)


def test_a_rank_with_one_expert_reads_it_if_a_token_uses_it() -> None:
    whole = replace(LAYER, experts=replace(EXPERTS, whole=True, ranks=16))
    spec = replace(SPEC, layers=(whole,) * 3)
    assert spec.idle_bytes(4, 4) == pytest.approx(3 * BYTES * (1 - 3 / 16) ** 4, abs=3)
