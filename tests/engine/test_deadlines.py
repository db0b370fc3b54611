"""Limits on latency decide the order of prompts and the size of steps: the real scheduler on a virtual device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from ridgeline.core.host_weights import HostTimes
from ridgeline.core.slo import NO_SLO, Slo
from ridgeline.core.workload import RequestSpec, Workload
from ridgeline.engine.deadlines import LEAST_TOKENS, PATIENCE, TILE, Deadlines
from ridgeline.engine.policy import Limits
from ridgeline.engine.request import Request
from ridgeline.planner.simulate import Outcome, Run, Server, VirtualServer, request_of
from ridgeline.planner.situation import slower
from ridgeline.planner.split import good_share
from tests.engine.test_virtual import COST, LAYOUT

SERVER = Server(COST, LAYOUT, 4000, Limits(64, 2048, 16_384), prefix_cache=False)
CHAT = Slo.parse("ttft=200ms,tpot=15ms")
PROMPT_S = Deadlines(COST)._token_s
"""Seconds of a token of a prompt."""


def workload(requests: Iterable[tuple[float, int, int]]) -> Workload:
    """(arrival, prompt tokens, answer tokens) of each request."""
    return Workload("made", tuple(RequestSpec(at, prompt, answer) for at, prompt, answer in requests), timed=True)


def outcomes(slo: Slo, requests: Iterable[tuple[float, int, int]]) -> list[Outcome]:
    """Of each request, in their order."""
    run = Run(replace(SERVER, slo=slo), enumerate(workload(requests).requests))
    run.complete()
    return [run.outcomes[number] for number in sorted(run.outcomes)]


def prompt(number: int, tokens: int, at: float = 0.0, ttft: str = "200ms", priority: int = 0) -> Request:
    request = request_of(number, RequestSpec(at, tokens, 8), at, Slo.parse(f"ttft={ttft}"))
    request.order = (priority, number)
    return request


def judged(requests: Sequence[Request], now: float = 0.0) -> list[int]:
    """Numbers of waiting requests in the order in which they run."""
    waiting = list(requests)
    Deadlines(COST).step_tokens(8192, [], waiting, (), now)
    return [int(request.id) for request in waiting]


def test_the_longest_prompt_is_given_up_for_the_others() -> None:
    room = int(0.15 / PROMPT_S)
    requests = [prompt(0, room // 2), prompt(1, room), prompt(2, room // 4)]
    assert judged(requests) == [0, 2, 1]
    assert requests[1].leaves > 7000 and not requests[0].leaves


def test_prompts_that_can_all_be_in_time_keep_their_order() -> None:
    assert judged([prompt(number, 300) for number in range(6)]) == list(range(6))


def test_a_prompt_that_is_too_late_lets_others_pass() -> None:
    late, early = prompt(0, 300, at=0.0), prompt(1, 300, at=0.95)
    assert judged([late, early], now=1.0) == [1, 0]


def test_a_prompt_that_can_be_in_time_again_has_its_old_place() -> None:
    """The prompt that it was given up for has been cancelled."""
    room = int(0.15 / PROMPT_S)
    waiting, deadlines = [prompt(0, room), prompt(1, room // 2)], Deadlines(COST)
    long, short = waiting
    deadlines.step_tokens(8192, [], waiting, (), 0.0)
    assert waiting == [short, long] and long.leaves
    waiting.remove(short)
    deadlines.step_tokens(8192, [], waiting, (), 0.0)
    assert long.order == (0, 0) and not long.leaves


def answering(drawn: int, left: int) -> Request:
    """An answer that is exactly at its limit of 15 ms per token at time 1."""
    request = request_of(9, RequestSpec(0.0, 100, drawn + left), 0.0, CHAT)
    request.tokens.extend([0] * drawn)
    request.computed = request.planned = 100 + drawn - 1
    request.first_token = 1 - 0.015 * drawn
    return request


def test_an_answer_that_will_save_seconds_allows_larger_steps() -> None:
    sizes = {}
    for left in (1, 8, 32):
        deadlines = Deadlines(COST)
        sizes[left] = deadlines.step_tokens(8192, [answering(20, left)], [prompt(0, 6000, at=1.0)], (), 1.0)
        deadlines._pace_s = 0.015
        least = deadlines.step_tokens(8192, [answering(20, left)], [prompt(0, 6000, at=1.0)], (), 1.0)
        assert LEAST_TOKENS <= least < LEAST_TOKENS + TILE + int(0.015 / PROMPT_S)
    assert sizes[1] < sizes[8] < sizes[32]


def test_steps_are_whole_tiles() -> None:
    for rows in range(1, 60, 7):
        size = Deadlines(COST).step_tokens(8192, [answering(20, 4)] * rows, [prompt(0, 6000, at=1.0)], (), 1.0)
        assert size % TILE == 0 and size > rows


def test_the_least_urgent_are_given_up_first() -> None:
    room = int(0.15 / PROMPT_S)
    urgent, other = prompt(0, 3 * room // 4), prompt(1, room // 2, priority=1)
    assert judged([urgent, other]) == [0, 1]
    assert not urgent.leaves and other.leaves


def test_a_late_prompt_runs_first_again_after_its_patience() -> None:
    waits = PATIENCE * 0.2
    late, early = prompt(0, 300, at=0.0), prompt(1, 300, at=waits)
    assert judged([late, early], now=waits + 0.01) == [0, 1] and not late.leaves


def test_steps_that_copies_of_weights_take() -> None:
    """Every step takes a second, so tokens cost nothing, and no prompt makes another late."""
    waiting = [prompt(number, 900, ttft="9s") for number in range(4)]
    deadlines = Deadlines(replace(COST, host=HostTimes(copies_s=1.0)))
    assert deadlines.step_tokens(8192, [], waiting, (), 0.0) == 8192
    assert [int(request.id) for request in waiting] == [0, 1, 2, 3]


def test_requests_without_limits_are_never_late() -> None:
    unlimited, limited = request_of(0, RequestSpec(0.0, 9000, 8), 0.0, NO_SLO), prompt(1, 300, at=0.9)
    assert judged([unlimited, limited], now=1.0) == [0, 1]


@pytest.mark.parametrize("slo", [NO_SLO, CHAT], ids=["without", "with"])
def test_a_long_prompt_does_not_make_others_late(slo: Slo) -> None:
    """16,000 tokens take longer than the limit. Without limits the short prompts behind them are late too."""
    requests = [(0.0, 16_000, 8), *((0.01 + 0.03 * number, 500, 8) for number in range(10))]
    seconds = [outcome.ttft_s for outcome in outcomes(slo, requests)]
    assert seconds[0] > 0.2
    assert (max(seconds[1:]) < 0.2) is bool(slo)


@pytest.mark.parametrize("slo", [NO_SLO, CHAT], ids=["without", "with"])
def test_prompts_do_not_make_answers_slow(slo: Slo) -> None:
    """An answer of 10 tokens has no seconds to spare for steps of 2,048 tokens in its middle."""
    requests = [(0.0, 100, 10), (0.02, 6000, 2)]
    answer = outcomes(slo, requests)[0]
    assert (answer.tpot_s < 0.015) is bool(slo)


def test_a_limit_that_no_step_meets_changes_nothing() -> None:
    requests = [(0.01 * number, 700, 20) for number in range(40)]
    assert outcomes(Slo.parse("ttft=1ms,tpot=1ms"), requests) == outcomes(NO_SLO, requests)


def test_predictions_follow_what_steps_take() -> None:
    """The device takes twice the predicted seconds."""
    server = VirtualServer(replace(SERVER, cost=slower(COST, 2.0), slo=CHAT))
    deadlines = server._scheduler._deadlines = Deadlines(COST)
    for number in range(150):
        server.add(number, RequestSpec(0.0, 900, 60), 0.0)
    while not server.idle:
        server.turn()
    assert deadlines._empty_ratio == pytest.approx(2, rel=0.1) and deadlines._token_ratio == pytest.approx(2, rel=0.1)


def test_more_requests_are_good_and_every_one_is_answered() -> None:
    """Random lengths at the server's capacity, with bursts."""
    requests = [(0.25 * (number // 6), (137 * number**2) % 3000 + 60, number % 90 + 10) for number in range(400)]
    without, within = outcomes(NO_SLO, requests), outcomes(CHAT, requests)
    assert good_share(CHAT, within) > 1.15 * good_share(CHAT, without)
    assert [outcome.output for outcome in within] == [answer for _, _, answer in requests]
    assert max(outcome.e2e_s for outcome in within) < 2 * PATIENCE * 0.2


def test_an_overloaded_server_starves_nobody() -> None:
    requests = [(0.01 * number, 900, 10) for number in range(600)]
    server = VirtualServer(replace(SERVER, slo=CHAT))
    for number, request in enumerate(workload(requests).requests):
        server.add(number, request, request.at_s)
    ended = []
    while not server.idle:
        ended += [event.number for event in server.turn() if event.outcome is not None]
    assert sorted(ended) == list(range(600))
