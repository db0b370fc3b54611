"""Limits and verdicts."""

from __future__ import annotations

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import NAMES, Latencies, Objective, Slo


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=200ms,tpot=100ms", Slo(ttft_s=0.2, tpot_s=0.1)),
        ("e2e=5s", Slo(e2e_s=5.0)),
        # as `vllm bench serve --goodput` has it
        ("ttft:200 tpot:50 e2el:5000", Slo(ttft_s=0.2, tpot_s=0.05, e2e_s=5.0)),
        ("time_to_first_token:200", Slo(ttft_s=0.2)),
        ("tpot<=0.05s", Slo(tpot_s=0.05)),
        (
            "p95(ttft)<=500ms & p99(tpot)<=50ms & attain>=0.95",
            Slo(objectives=(Objective("ttft", 0.95, 0.5), Objective("tpot", 0.99, 0.05)), attain=0.95),
        ),
        ("P99.9(e2el) <= 2s, ttft = 200", Slo(ttft_s=0.2, objectives=(Objective("e2e", 0.999, 2.0),))),
        ("publish=2s", Slo(publish_s=2.0)),
        ("time_to_first_output_token:900", Slo(publish_s=0.9)),
        ("p95(publish)<=2s,ttft=1s", Slo(ttft_s=1.0, objectives=(Objective("publish", 0.95, 2.0),))),
        ("attain=90%", Slo(attain=0.9)),
        ("", Slo()),
    ],
)
def test_parse(text: str, slo: Slo) -> None:
    assert Slo.parse(text) == slo
    assert Slo.parse(str(slo)) == slo
    assert bool(slo) == bool(text)


@pytest.mark.parametrize(
    "text",
    [
        "ttft",
        "ttft=",
        "ttft=fast",
        "ttft=0",
        "ttft=-1",
        "itl=5",
        "ttft=1,ttft=2",
        "=5",
        "ttft>=5",
        "p95(ttft)",
        "p95(itl)<=5",
        "publish>=2s",
        "p95(publish)>=2s",
        "p0(ttft)<=5",
        "p100(ttft)<=5",
        "p95(ttft)>=5",
        "p95(ttft)<=5 p95(ttft)<=6",
        "attain<=0.9",
        "attain>=1.5",
        "attain>=much",
        "p95(ttft)<=0",
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ConfigError, match="slo") as error:
        Slo.parse(text)
    assert error.value.param == "slo"
    assert "ttft" in error.value.message


def latencies(
    ttft: float | None, *, publish: float | None = None, tpot: float | None = None, e2e: float | None = None
) -> Latencies:
    """Of a request without hidden tokens, unless `publish` is given."""
    return Latencies(ttft, ttft if publish is None else publish, tpot, e2e)


def test_verdict_names_the_first_missed_limit_with_both_numbers() -> None:
    slo = Slo.parse("ttft=200ms,tpot=100ms,e2e=12s")
    assert slo.verdict(latencies(0.2, tpot=0.1, e2e=12.0)) == ""
    assert slo.verdict(latencies(0.312, tpot=0.5, e2e=1.0)) == "ttft 312 ms > 200 ms"
    assert slo.verdict(latencies(0.1, tpot=0.1001, e2e=1.0)) == "tpot 100.1 ms > 100 ms"
    assert slo.verdict(latencies(0.1, tpot=0.1, e2e=12.5)) == "e2e 12.5 s > 12 s"


def test_an_answer_of_one_token_has_no_tpot_but_a_first_token_must_come() -> None:
    slo = Slo.parse("ttft=200ms,tpot=100ms")
    assert slo.verdict(latencies(0.1, tpot=None, e2e=0.1)) == ""
    assert slo.verdict(latencies(None)) == "ttft never reached (limit 200 ms)"
    assert Slo().verdict(latencies(None)) == ""


def test_a_request_is_judged_by_its_own_limit_or_by_the_loosest_objective() -> None:
    slo = Slo.parse("p50(ttft)<=100ms p99(ttft)<=400ms tpot=50ms p90(tpot)<=80ms")
    assert slo.limits() == {"ttft": 0.4, "publish": None, "tpot": 0.05, "e2e": None}
    assert (
        slo.verdict(latencies(0.3, tpot=0.05, e2e=9.0)) == ""
        and slo.verdict(latencies(0.5, tpot=None, e2e=9.0)) == "ttft 500 ms > 400 ms"
    )
    assert slo.within(latencies(0.3, tpot=0.06, e2e=9.0)) == (False, True, True)
    assert slo.within(latencies(0.1, tpot=None, e2e=9.0)) == (True, True, True)
    assert slo.within(latencies(None)) == (False, False, True), "no first token; TPOT does no harm"


def test_a_window_misses_what_too_few_requests_are_within() -> None:
    slo = Slo.parse("p95(ttft)<=200ms, attain>=0.9")
    assert slo.of_windows and not Slo.parse("ttft=200ms").of_windows
    assert slo.broken((0.95,), 0.9) == ()
    assert slo.broken((0.9499,), 0.9) == (
        "p95(ttft)<=200ms: a share of 0.9499 of requests meets the limit; 0.95 is required",
    )
    assert slo.broken((1.0,), 0.5) == ("attain>=0.9: a share of 0.5 of requests is good",)


def test_publish_is_judged_by_the_first_visible_content_not_by_the_first_token() -> None:
    slo = Slo.parse("ttft=500ms,publish=2s,p90(publish)<=1s")
    assert slo.limits() == {"ttft": 0.5, "publish": 2.0, "tpot": None, "e2e": None}
    reasoned = latencies(0.1, publish=2.5, tpot=0.01, e2e=3.0)
    assert slo.verdict(reasoned) == "publish 2500 ms > 2000 ms" and slo.within(reasoned) == (False,)
    assert slo.verdict(latencies(0.1, publish=1.5)) == "" and slo.within(latencies(0.1, publish=0.9)) == (True,)
    never = Latencies(0.1, None, 0.01, 3.0)
    assert slo.verdict(never) == "publish never reached (limit 2000 ms)" and slo.within(never) == (False,)
    assert slo.verdict(latencies(0.6, publish=2.5)) == "ttft 600 ms > 500 ms", "in the order of the checks"
    assert NAMES == ("ttft", "publish", "tpot", "e2e")


def test_limits_of_a_request_replace_those_it_names() -> None:
    server = Slo.parse("ttft=200ms,publish=2s,attain>=0.9")
    merged = server.under(Slo.parse("publish=5s,tpot=50ms"))
    assert merged == Slo(ttft_s=0.2, publish_s=5.0, tpot_s=0.05, attain=0.9)
    assert Slo.of({"publish": 2.0}) == Slo(publish_s=2.0)
