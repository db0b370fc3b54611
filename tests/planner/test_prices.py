"""Prices of input, cached and output tokens: they add up to the bill, and follow from device seconds and room in the cache."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import ConfigError
from ridgeline.planner.prices import LOOKUP_S, TokenCosts, Tokens, prices, token_costs

TIMES = st.floats(0, 1e3)


def record(prompt: int, cached: int, output: int, **changes: Any) -> dict[str, Any]:
    """0.2 s of device time for the prompt, 0.3 s for the output; held for three seconds, of which the output takes two."""
    spent = {"queue_s": 1.0, "decode_s": 2.0, "device_s": 0.5, "prompt_device_s": 0.2}
    return {
        "prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output, "e2e_s": 4.0, "spent": {**spent, **changes},
    }  # fmt: skip


@st.composite
def records(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Loads of requests with any lengths and times; the device computes at least the last token of each prompt."""
    made = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = draw(st.integers(1, 5000))
        request = record(prompt, draw(st.integers(0, prompt - 1)), draw(st.integers(1, 500)))
        prompt_s, output_s, queue_s, held_s = (draw(TIMES) for _ in range(4))
        request["spent"] = {
            "queue_s": queue_s,
            "decode_s": draw(st.floats(0, held_s)),
            "device_s": prompt_s + output_s,
            "prompt_device_s": prompt_s,
        }
        made.append(request | {"e2e_s": queue_s + held_s})
    return made


@given(records(), st.integers(16, 10**7), st.floats(1e-6, 1e6))
def test_prices_add_up_to_the_bill_and_cached_tokens_are_never_dearer(
    load: list[dict[str, Any]], cache_tokens: int, bill: float
) -> None:
    n_prompt, n_cached, n_output = (
        sum(request[name] for request in load) for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    )
    tokens = Tokens(n_prompt - n_cached, n_cached, n_output)
    shares = prices(bill, tokens, token_costs(load, cache_tokens))
    assert shares.bill(tokens) == pytest.approx(bill, rel=1e-9)
    assert min(shares.input, shares.cached, shares.output) >= 0
    assert shares.cached <= shares.input


def test_costs_by_hand() -> None:
    """Two requests: 0.4 s for 600 computed prompt tokens, 0.6 s for 30 output tokens, in a cache of 10,000 tokens."""
    costs = token_costs([record(500, 400, 10), record(500, 0, 20)], 10_000, lookup_s=0.0)
    assert costs.cached_s == pytest.approx(3 / 10_000)
    assert costs.input_s == pytest.approx(0.4 / 600 + 3 / 10_000)
    assert costs.output_s == pytest.approx(0.6 / 30 + 1 / 10_000)  # each is held for half of two seconds
    shares = prices(1.0, Tokens(600, 400, 30), costs)
    total_s = 0.4 + 0.6 + 1000 * 3 / 10_000 + 30 * 1 / 10_000
    assert shares.output == pytest.approx(1e6 * costs.output_s / total_s)


def test_a_full_cache_makes_cached_tokens_dear_and_an_empty_one_cheap() -> None:
    load = [record(500, 400, 10)]
    ratios = []
    for size in (10**3, 10**5, 10**9):
        costs = token_costs(load, size)
        ratios.append(costs.cached_s / costs.input_s)
    assert ratios[0] > 0.5 > ratios[1] > 10 * ratios[2]
    assert token_costs(load, 1e12).cached_s == pytest.approx(LOOKUP_S, rel=0.1)


def test_prices_rise_as_the_device_idles_and_their_ratios_stay() -> None:
    tokens, costs = Tokens(600, 400, 30), TokenCosts(2e-3, 1e-4, 2e-2)
    busy, idle = prices(1.0, tokens, costs), prices(3.0, tokens, costs)
    assert idle.input == pytest.approx(3 * busy.input)
    assert idle.output / idle.input == pytest.approx(busy.output / busy.input) == pytest.approx(10)


def test_bad_records_are_refused() -> None:
    old = copy.deepcopy(record(500, 400, 10))
    del old["spent"]
    with pytest.raises(ConfigError, match="lacks the device seconds .* record it again"):
        token_costs([old], 10_000)
    with pytest.raises(ConfigError, match="no request with prompt and output tokens"):
        token_costs([record(500, 400, 0)], 10_000)
    with pytest.raises(ConfigError, match="no tokens with a measured device time"):
        prices(1.0, Tokens(0, 0, 0), TokenCosts(1e-3, 1e-4, 1e-2))


def test_the_result_file_confirms_the_lookup_and_the_sums() -> None:
    rows = json.loads((Path(__file__).parents[2] / "benchmarks/results/economics.json").read_text())
    (lookup,) = (row["value"] for row in rows if row["row"] == "prefix-lookup")
    assert pytest.approx(lookup * 1e-9, rel=0.5) == LOOKUP_S
    loads = [row for row in rows if "bill_usd" in row]
    assert loads and all(row["priced_usd"] == pytest.approx(row["bill_usd"], rel=1e-9) for row in loads)
