"""What a request is billed: computed, read, written, kept and repeated tokens."""

from __future__ import annotations

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.core.token_prices import Billable, TokenPrices


def test_reads_and_writes_are_factors_of_the_input_price() -> None:
    tokens = Billable(1000, 600, 50, {"5m": 100, "1h": 200}, token_s=3600.0 * 1000)
    bill = TokenPrices().bill(tokens)
    assert bill == {"input_tokens": 100 + 0.1 * 600 + 1.25 * 100 + 2 * 200, "output_tokens": 50, "usd": None}
    priced = TokenPrices.parse("input=2, output=10,storage=0.25").bill(tokens, 0.5)
    assert priced["input_tokens"] == bill["input_tokens"] + 0.25 * 1000
    assert priced["usd"] == pytest.approx(0.5 * (2 * priced["input_tokens"] + 10 * 50) / 1e6)


def test_a_repeated_answer_has_a_price_of_its_own() -> None:
    bill = TokenPrices.parse("answer=0.2,input=1,output=1").bill(Billable(100, 0, 50, repeated=True))
    assert bill == {"input_tokens": 20.0, "output_tokens": 10.0, "usd": pytest.approx(30e-6)}


@pytest.mark.parametrize("text", ["input", "input=x", "inputs=1", "input=-1", "read=0.1,read=0.2", "write_5m=1"])
def test_a_wrong_price_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--token-prices") as caught:
        TokenPrices.parse(text)
    assert "write-5m" in caught.value.message
