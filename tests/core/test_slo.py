"""Limits and verdicts."""

from __future__ import annotations

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import Slo


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=200ms,tpot=100ms", Slo(0.2, 0.1, None)),
        ("e2e=5s", Slo(None, None, 5.0)),
        ("ttft:200 tpot:50 e2el:5000", Slo(0.2, 0.05, 5.0)),  # as `vllm bench serve --goodput` has it
        ("time_to_first_token:200", Slo(0.2, None, None)),
        ("tpot<=0.05s", Slo(None, 0.05, None)),
        ("", Slo()),
    ],
)
def test_parse(text: str, slo: Slo) -> None:
    assert Slo.parse(text) == slo
    assert Slo.parse(str(slo)) == slo
    assert bool(slo) == bool(text)


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=fast", "ttft=0", "ttft=-1", "itl=5", "ttft=1,ttft=2", "=5"])
def test_what_cannot_be_meant_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ConfigError, match="slo") as error:
        Slo.parse(text)
    assert error.value.param == "slo"
    assert "ttft" in error.value.message


def test_verdict_names_the_first_missed_limit_with_both_numbers() -> None:
    slo = Slo.parse("ttft=200ms,tpot=100ms,e2e=12s")
    assert slo.verdict(0.2, 0.1, 12.0) == ""
    assert slo.verdict(0.312, 0.5, 1.0) == "ttft 312 ms > 200 ms"
    assert slo.verdict(0.1, 0.1001, 1.0) == "tpot 100.1 ms > 100 ms"
    assert slo.verdict(0.1, 0.1, 12.5) == "e2e 12.5 s > 12 s"


def test_an_answer_of_one_token_has_no_tpot_but_a_first_token_must_come() -> None:
    slo = Slo.parse("ttft=200ms,tpot=100ms")
    assert slo.verdict(0.1, None, 0.1) == ""
    assert slo.verdict(None, None, None) == "ttft never reached (limit 200 ms)"
    assert Slo().verdict(None, None, None) == ""
