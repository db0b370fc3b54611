"""The calculators give the figures of the mission and of the field; each test names its oracle."""

from __future__ import annotations

import math

import pytest

from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.planner.breakeven import BreakEven
from ridgeline.planner.cost import Owned, Service, tokens_saved, usd_per_unit
from ridgeline.planner.energy import DRAW_FACTORS, Energy, site_factor, yearly_kwh
from ridgeline.planner.kv import (
    KvNeed,
    Saving,
    cache_of,
    kv_need,
    savings,
    sequences,
    uniform,
    with_sharing,
    with_windows,
)
from ridgeline.planner.training import Payback, Training

ROPE = Rope()


def mixed(*layers: LayerSpec) -> ModelSpec:
    """A model of these layers, known only by its attention."""
    return ModelSpec("attention", 0, layers[0].n_heads * layers[0].head_dim, layers, 1 << 20)


def need_of(spec: ModelSpec, batch: int, tokens: int, dtype: str | None = None) -> KvNeed:
    return kv_need(cache_of(spec, dtype), batch, tokens)


# --- MISSION 6: the cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "heads", "batch", "tokens", "gigabytes"),
    [
        (40, 40, 32, 2048, 53.7),  # 13B, 40 layers, 5,120 wide
        (32, 32, 1, 4096, 2.15),  # 7B, 32 layers, 4,096 wide
        (32, 32, 32, 4096, 68.7),
        (118, 48, 512, 2048, 3040),  # 540B, 118 layers, 48 heads of 128
    ],
)
def test_mission_kv_sizes(layers: int, heads: int, batch: int, tokens: int, gigabytes: float) -> None:
    need = need_of(uniform(layers, heads, 128), batch, tokens)
    assert need.total_bytes / 1e9 == pytest.approx(gigabytes, rel=0.005)
    assert need.total_bytes == need.common_bytes == batch * tokens * need.token_bytes


def test_mission_common_rule_is_wrong_where_heads_share_keys() -> None:
    grouped = need_of(uniform(32, 32, 128, kv_heads=8), 1, 4096)
    assert grouped.saving == 4.0 and grouped.common_bytes == need_of(uniform(32, 32, 128), 1, 4096).total_bytes


def test_mission_a_window_of_1000_in_10000_tokens_is_10_times_less() -> None:
    local = mixed(*[LayerSpec(32, 32, 128, 0, ROPE, window=1000)] * 4)
    assert need_of(local, 1, 10_000).saving == pytest.approx(10)


def test_mission_three_layers_that_share_are_3_times_less() -> None:
    layer = LayerSpec(32, 32, 128, 0, ROPE)
    shared = mixed(*[layer if index % 3 == 0 else LayerSpec(32, 32, 128, 0, ROPE, share_from=index // 3 * 3)
                     for index in range(12)])  # fmt: skip
    assert need_of(shared, 1, 4096).saving == pytest.approx(3)


def test_mission_together_more_than_20_times_less() -> None:
    """Grouped heads (8 for 32), windows in five of six layers, and pairs of each kind that share."""
    layers = []
    for index in range(24):
        window = None if index % 6 == 0 else 1000
        partner = {6: 0, 18: 12}.get(index) if window is None else index - 1 if index % 6 in (2, 4) else None
        layers.append(LayerSpec(32, 8, 128, 0, ROPE, window=window, share_from=partner))
    assert need_of(mixed(*layers), 1, 10_000).saving > 20


def factors(changes: list[Saving]) -> dict[str, float]:
    return {change.name: change.factor for change in changes}


EIGHT_BITS = 2 * 128 / (128 + 2)
"""How many times less 128 elements take in 8 bits with a 16-bit scale than in 16 bits."""


def test_the_saving_of_published_models_line_by_line() -> None:
    """Character.AI, "Optimizing AI Inference at Character.AI", June 2024: multi-query attention instead of 8 groups (8 times less),
    1 global layer in 6 with windows of 1,024 tokens elsewhere, two or three neighbouring layers with one cache, int8: more than
    20 times less. At 8,192 tokens a window keeps an eighth: 6 layers hold 1 + 5/8 = 1.625 instead of 6."""
    for shared in (2, 3):
        spec = with_sharing(with_windows(uniform(36, 64, 128, kv_heads=1), 1024, global_every=6), shared)
        cache = cache_of(spec, "int8")
        base, changes = savings(cache, 8192, kv_heads=8)
        assert base == 2 * 8 * 128 * 2 * 36 * 8192
        assert factors(changes) == pytest.approx(
            {"heads": 8, "windows": 6 / 1.625, "sharing": shared, "format": EIGHT_BITS}
        )
        product = math.prod(change.factor for change in changes)
        assert (
            product
            == pytest.approx(base / cache.sequence_bytes(8192))
            == pytest.approx(8 * 6 / 1.625 * shared * EIGHT_BITS)
        )
        assert product / EIGHT_BITS > 20  # in 16 bits too
        assert changes[-1].sequence_bytes == cache.sequence_bytes(8192)


def test_latent_attention_is_as_small_as_two_and_a_quarter_groups() -> None:
    """DeepSeek-V2 (DeepSeek-AI, May 2024), section 2.1.4: 128 heads of 128, latents of 512 + 64 elements, equal to 2.25 groups."""
    spec = uniform(60, 128, 128)
    base, (change,) = savings(cache_of(spec, latent=512 + 64), 4096)
    assert change.name == "heads" and change.factor == pytest.approx(128 / 2.25)
    assert base == kv_need(cache_of(spec), 1, 4096).total_bytes
    eight = savings(cache_of(spec, "fp8", latent=576), 4096)[1]
    assert factors(eight) == pytest.approx({"heads": 128 / 2.25, "format": 2 * 576 / (576 + 2)})


def test_layers_share_among_their_kind_and_rests_share_too() -> None:
    """Seven layers, of which 0, 3 and 6 are global: pairs leave two global caches and two local ones."""
    spec = with_sharing(with_windows(uniform(7, 8, 64), 100, global_every=3), 2)
    assert [layer.share_from for layer in spec.layers] == [None, None, 1, 0, None, 4, None]
    assert savings(cache_of(uniform(4, 8, 64)), 100) == (4 * 2 * 8 * 64 * 2 * 100, [])
    twice = with_sharing(spec, 2)  # caches that are left are shared again
    assert sum(layer.share_from is None for layer in twice.layers) == 2


def test_four_bits_with_their_scales() -> None:
    _, (change,) = savings(cache_of(uniform(4, 8, 128), "int4"), 1000)
    assert change.factor == pytest.approx(16 / 4.5)


def test_a_cache_in_8_bits_is_half() -> None:
    spec = uniform(32, 32, 128)
    assert need_of(spec, 1, 100, "fp8").total_bytes * EIGHT_BITS == need_of(spec, 1, 100).total_bytes


def test_sequences_that_fit_beside_the_weights() -> None:
    """FIGURES 7: 953k tokens of cache beside bf16 weights of an 8B in 141e9 bytes."""
    layer = LayerSpec(32, 8, 128, 14336, Rope(500_000.0, 128))
    spec = ModelSpec("LlamaForCausalLM", 128_256, 4096, (layer,) * 32, 131_072)
    assert sequences(cache_of(spec), 1000, 141e9) == pytest.approx(953, abs=1)
    assert sequences(cache_of(spec), 1000, 10e9) == 0


# --- MISSION 2: money -------------------------------------------------------------------------------------------------


def test_mission_two_dollars_an_hour() -> None:
    service = Service(usd_hour=2, tokens_s=100, prefills_min=100, output_tokens=200)
    assert service.usd_million_tokens == pytest.approx(5.556, abs=0.001)
    assert service.decode_usd_thousand == pytest.approx(1.11, abs=0.005)
    assert service.prefill_usd_thousand == pytest.approx(0.33, abs=0.005)
    assert service.usd_thousand_requests == pytest.approx(1.44, abs=0.005)


def test_without_prefills_only_answers_cost() -> None:
    assert Service(2, 100, output_tokens=200).usd_thousand_requests == pytest.approx(1.111, abs=0.001)
    assert usd_per_unit(3600, 1) == 1


def test_mission_training_pays_when_t_is_at_most_p_times_n() -> None:
    rule = Payback(1000, 0.01)
    assert rule.pays(100_000) and not rule.pays(99_999) and rule.requests == pytest.approx(100_000)
    assert not Payback(1000.01, 0.01).pays(100_000)
    assert Payback(0, 0).pays(0) and Payback(1, 0).requests == Payback(1, -0.5).requests == math.inf
    assert not Payback(1, -0.5).pays(1e30)


def test_training_takes_six_flops_per_parameter_and_token() -> None:
    """Published: Chinchilla, 70B on 1.4e12 tokens, 5.76e23 FLOPs (Hoffmann et al. 2022); GPT-3, 175B on 300e9, 3.14e23
    (Brown et al. 2020)."""
    chinchilla, gpt3 = Training(70e9, 1.4e12), Training(175e9, 300e9)
    assert chinchilla.flops == pytest.approx(5.76e23, rel=0.03) and chinchilla.tokens_per_param == pytest.approx(20)
    assert gpt3.flops == pytest.approx(3.14e23, rel=0.01)
    assert chinchilla.served_tokens == 3 * chinchilla.tokens
    assert Training(1e9, 1e9).device_hours(1e15, 0.5) == pytest.approx(6e18 / 5e14 / 3600)


def test_mission_prompt_cache_saves_a_billion_tokens_a_day() -> None:
    assert tokens_saved(1000, 1e6) == pytest.approx(1e9, rel=1e-5)
    assert tokens_saved(1000, 1) == tokens_saved(1000, 0) == 0


def test_owned_hardware_costs_its_life_its_upkeep_and_its_power() -> None:
    owned = Owned(35_040, years=4, upkeep=0.0, watts=1000, pue=1.5, usd_kwh=0.10)
    assert owned.usd_hour() == pytest.approx(1.00 + 0.15)
    assert owned.usd_hour(0.5) == pytest.approx(2.00 + 0.15)
    assert Owned(35_040, residual=0.5, upkeep=0, watts=0).usd_hour() == pytest.approx(0.5)


# --- renting or owning ------------------------------------------------------------------------------------------------


def test_an_h100_node_is_paid_back_in_14_to_18_months() -> None:
    """Published: an eight-GPU node of 300,000 to 350,000 dollars and 10.2 kW, rented at 3.00 to 4.50 an hour and GPU."""
    owned = Owned(325_000 / 8, watts=10_200 / 8, upkeep=0.05)
    assert 14 < BreakEven(owned, 3.75).payback_months() < 18


def test_break_even_is_where_both_cost_the_same() -> None:
    comparison = BreakEven(Owned(30_000, years=3), rent_usd_hour=2.5)
    assert 0 < comparison.utilization < 1
    assert comparison.owned.usd_hour(comparison.utilization) == pytest.approx(2.5)
    assert comparison.saved_usd(comparison.utilization) == pytest.approx(0, abs=1e-6)
    assert comparison.saved_usd(1.0) > 0 > comparison.saved_usd(comparison.utilization / 2)
    assert comparison.payback_months(0.5) > 2 * comparison.payback_months(1.0)


def test_rent_below_the_price_of_power_never_breaks_even() -> None:
    comparison = BreakEven(Owned(30_000, watts=10_000), rent_usd_hour=1.0)
    assert comparison.utilization == math.inf and comparison.payback_hours() == math.inf


# --- MISSION 2: energy ------------------------------------------------------------------------------------------------


def test_mission_700_watts_for_a_year() -> None:
    assert yearly_kwh(700) == pytest.approx(6132)
    assert site_factor(7000, 700) == pytest.approx(1.14, abs=0.005)
    assert Energy(700, pue=1.14).site_kwh_year == pytest.approx(7000, rel=0.002)


def test_mission_draw_above_the_design_power() -> None:
    assert DRAW_FACTORS == (1.1, 1.5)
    assert Energy(700).peak_watts == (pytest.approx(770), pytest.approx(1050))


def test_joules_per_token_of_the_field() -> None:
    """FIGURES 6: 8B on an H100, batch 512: 688 W, 9,806 tokens/s, 0.070 J."""
    energy = Energy(688, 9806, pue=1.0, usd_kwh=0.10)
    assert energy.joules_per_token == pytest.approx(0.070, abs=0.0005)
    assert energy.kwh_million_tokens == pytest.approx(0.0195, rel=0.01)
    assert energy.usd_million_tokens == pytest.approx(0.00195, rel=0.01)
    assert Energy(688).joules_per_token == 0
