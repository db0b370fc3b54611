"""benchmarks/cache_contract.py on a tiny scale: what was cached was not computed, and the bill follows from the counts."""

from __future__ import annotations

from argparse import Namespace

import pytest
from cache_contract import CASES, Answered, Case, prompts, rows_of

from ridgeline.core.events import PinOutcome
from ridgeline.service.breakpoints import Breakpoint
from ridgeline.service.call import Usage

ARGS = Namespace(scale=1.0, prices="input=3,output=15", device="cpu", model=None, machine="a machine")


def test_prompts_share_their_beginning_and_a_conversation_grows() -> None:
    case = Case(20, 4, 3, 3)
    made = [(prompt, shared) for prompt, shared, _ in prompts(case, 50, 1)]
    assert [shared for _, shared in made] == [20, 20, 20]
    assert len({tuple(prompt[:20]) for prompt, _ in made}) == 1 and len({tuple(prompt) for prompt, _ in made}) == 3
    before: list[int] = []
    for prompt, shared, answer in prompts(Case(20, 4, 3, 3, grows=True), 50, 1):
        assert shared == len(prompt) and prompt[: len(before)] == before
        answer += [7, 8, 9]
        before = prompt + answer
    assert len(before) == 20 + 3 * 7


def test_a_case_is_as_long_as_its_longest_prompt_and_answer() -> None:
    assert CASES["book"].longest == 100_350
    assert CASES["chat"].scaled(0.5).longest == 1_000 + 10 * (30 + 100)


def answered(cached: int, written: int, seconds: float) -> Answered:
    usage = Usage(prompt=10_100, cached=cached, completion=64)
    outcome = PinOutcome(10_000, "written" if written else "renewed", token_s=3_000_000.0 if written else 0.0)
    if cached or written:
        usage.pin([Breakpoint(10_000, "5m")], [outcome])
    return Answered(seconds, usage, [])


def test_rows() -> None:
    kept = [answered(0, 10_000, 2.0), answered(10_000, 0, 0.1)]
    ttft, tokens, cost = rows_of("manyshot", kept, [answered(0, 0, 2.0)] * 2, ARGS)
    assert (ttft["row"], ttft["value"]) == ("cache-manyshot-ttft-ratio-cpu", 0.05)
    assert tokens["value"] == pytest.approx((10_100 + 100) / 20_200, abs=1e-4)
    answer = 64 * 15
    read, write, bare = 3 * (1_000 + 100) + answer, 3 * (12_500 + 100) + answer, 3 * 10_100 + answer
    assert cost["read"] == pytest.approx(read / bare, abs=1e-4)
    assert cost["value"] == pytest.approx((read + write) / (2 * bare), abs=1e-4)
    assert cost["token_hours"] == pytest.approx(3_000_000 / 3600, abs=0.01)
