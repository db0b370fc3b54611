"""How many nodes are drafted, on devices whose step times and acceptance the test makes up or repeats from records."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest

from ridgeline.speculation.pace import Pace, Reading

SIZES = (0, 1, 2, 3, 4)
Seconds = Callable[[int, int], float]
"""Of a step, by the nodes that it verifies and those that it drafts."""
H200 = {1: (1.0, 1.03, 1.06, 1.09, 1.13), 8: (1.0, 1.06, 1.12, 1.19, 1.25), 128: (1.0, 1.45, 1.85, 2.3, 2.77)}
"""Steps of an 8B by rows and nodes that they verify, against plain ones; benchmarks/results/speculation.json."""


def batch_of(pace: Pace, rows: int) -> Any:
    """The record of steps with so many rows: their times and accounts."""
    return pace._of(rows)


def device(rows: int) -> Seconds:
    return lambda verified, drafted: H200[rows][verified]


def two_cores(verified: int, drafted: int) -> float:
    """The shipped model on a CPU: verifying and drafting cost before their first node, and each node costs."""
    return 1 + (0.15 + 0.05 * verified) * bool(verified) + (0.05 + 0.13 * drafted) * bool(drafted)


def dear(verified: int, drafted: int) -> float:
    """Twice the tokens, twice the time."""
    return 1.0 + verified


def very_dear(verified: int, drafted: int) -> float:
    """Whatever a look finds costs thirty plain steps."""
    return 1.0 + 5.0 * bool(verified or drafted)


class Steps:
    """An engine's steps, of which some are disturbed and the first ones of a spell of drafting are cold."""

    def __init__(self, seconds: Seconds, *, rows: int = 1, cold: float = 0.0, seed: int = 0) -> None:
        self.seconds, self.rows, self.cold, self.chance = seconds, rows, cold, random.Random(seed)
        self.drafted = self.spell = 0
        self.used: dict[int, int] = {}

    def time(self, verified: int, drafted: int) -> float:
        self.spell = self.spell + 1 if verified or drafted else 0
        disturbed = 1.0 if self.chance.random() < 0.97 else self.chance.uniform(1.2, 2.5)
        return self.seconds(verified, drafted) * disturbed * (1 + self.cold * (0 < self.spell <= 2))

    def step(self, pace: Pace, kept: float) -> list[tuple[float, float]]:
        """One step, or a rest's. Tokens per row and seconds of each."""
        verified, self.drafted = self.drafted, pace.choose(self.rows, pace.sizes[-1])
        right = 0
        for _ in range(self.rows if verified else 0):
            own = next((node for node in range(verified) if self.chance.random() >= kept), verified)
            pace.learn(verified, list(range(own)))
            right += own
        gained, took = 1 + right / self.rows, self.time(verified, self.drafted)
        self.used[verified] = self.used.get(verified, 0) + 1
        if verified or self.drafted:
            pace.drafted(Reading(self.rows, gained, took), verified, steady=verified == self.drafted, idle=not verified)
            return [(gained, took)]
        pace.rested(self.rows, took)
        rest = [(1.0, self.time(0, 0)) for _ in range(pace.rest(self.rows, host=False, device=True))]
        for _, seconds in rest:
            pace.rested(self.rows, seconds)
        self.used[0] += len(rest)
        return [(gained, took), *rest]

    def run(self, pace: Pace, count: int, kept: float, length: int | None = None) -> float:
        """Tokens per row and second, against steps without drafts. length: steps between two requests that come new."""
        found: list[tuple[float, float]] = []
        came = -1
        while len(found) < count:
            if length is not None and len(found) // length > came:
                pace.welcome(self.rows, 1)
                came = len(found) // length
            found += self.step(pace, kept)
        plain = sum(self.time(0, 0) for _ in range(2000)) / 2000
        return plain * sum(gained for gained, _ in found) / sum(seconds for _, seconds in found)


@pytest.mark.parametrize("kept", [0.0, 0.05, 0.3, 0.5])
@pytest.mark.parametrize(("seconds", "rows"), [(two_cores, 1), (dear, 1), (dear, 7), (device(128), 128), (dear, 250)])
def test_what_does_not_pay_costs_next_to_nothing(kept: float, seconds: Seconds, rows: int) -> None:
    for seed in range(3):
        pace, steps = Pace(SIZES), Steps(seconds, rows=rows, cold=0.4 if rows == 1 else 0.0, seed=seed)
        assert steps.run(pace, 128, kept) > 0.9, "nor does the first answer of an engine pay for all"
        assert steps.run(pace, 3000, kept) > 0.97


@pytest.mark.parametrize(
    ("seconds", "rows", "kept", "best"),
    [
        (device(1), 1, 0.8, 2.98),
        (device(8), 8, 0.8, 2.69),
        (device(128), 128, 0.8, 1.32),
        (device(128), 128, 0.65, 1.14),
        (two_cores, 1, 0.65, 1.35),
        (two_cores, 1, 0.9, 2.13),
    ],
)
def test_what_pays_is_used(seconds: Seconds, rows: int, kept: float, best: float) -> None:
    """best: tokens per second of the best number of nodes, always."""
    for seed in range(3):
        pace, steps = Pace(SIZES), Steps(seconds, rows=rows, seed=seed)
        steps.run(pace, 200, kept)
        assert steps.run(pace, 2000, kept) > 0.93 * best


def test_it_goes_off_and_on_again() -> None:
    for seed in range(4):
        pace, steps = Pace(SIZES), Steps(two_cores, seed=seed)
        steps.run(pace, 500, 0.9)
        assert steps.run(pace, 1500, 0.0) > 0.97
        assert steps.run(pace, 2500, 0.9) > 1.5


def test_easy_and_hard_answers_in_turns_are_no_slower_than_plain_ones() -> None:
    pace, steps = Pace(SIZES), Steps(two_cores)
    for _ in range(10):
        assert steps.run(pace, 128, 0.0) > 0.92
        steps.run(pace, 128, 0.7)


def test_who_comes_new_is_tried_again() -> None:
    """What a hard text taught must not keep an easy one behind it from being drafted."""
    for seed in range(3):
        pace, steps = Pace(SIZES), Steps(two_cores, seed=seed)
        easy, hard = [], []
        for _ in range(10):
            hard.append(steps.run(pace, 128, 0.0, 128))
            easy.append(steps.run(pace, 128, 0.7, 128))
        assert sum(easy) > 10 * 1.3 and sum(hard) > 10 * 0.93


@pytest.mark.parametrize(
    ("seconds", "rows", "kept", "length"),
    [
        (two_cores, 1, 0.0, 32),
        (two_cores, 1, 0.3, 32),
        (very_dear, 1, 0.05, 32),
        (very_dear, 1, 0.05, 128),
        (device(128), 128, 0.0, 1),
        (device(128), 128, 0.3, 1),
    ],
)
def test_short_requests_that_gain_nothing_cost_next_to_nothing(
    seconds: Seconds, rows: int, kept: float, length: int
) -> None:
    for seed in range(3):
        pace, steps = Pace(SIZES), Steps(seconds, rows=rows, seed=seed)
        steps.run(pace, 300, kept)
        assert steps.run(pace, 4000, kept, length) > 0.97


def test_a_first_look_that_nobody_would_have_paid_ends_early() -> None:
    """Six steps of eight plain ones each would be a fiftieth of all that is run here, beside the share that looks may cost."""
    for seed in range(3):
        pace, steps = Pace(SIZES), Steps(lambda verified, drafted: 1.0 + 7.0 * bool(verified or drafted), seed=seed)
        assert steps.run(pace, 2500, 0.05, 128) > 0.972


def test_longer_contexts_do_not_turn_the_choice() -> None:
    """Steps become longer while one size is in use, and the others were read long ago."""
    at = [0]

    def growing(verified: int, drafted: int) -> float:
        at[0] += 1
        return (1 + at[0] / 1000) * device(8)(verified, drafted)

    pace, steps = Pace(SIZES), Steps(growing, rows=8)
    for _ in range(3000):
        steps.step(pace, 0.8)
    assert steps.used[0] < 0.1 * 3000
    assert steps.used[4] > 0.6 * 3000


def test_batches_of_other_sizes_are_others() -> None:
    pace = Pace(SIZES)
    assert Steps(two_cores, rows=1).run(pace, 600, 0.9) > 1.5
    assert Steps(dear, rows=100).run(pace, 600, 0.9) > 0.95
    assert Steps(two_cores, rows=1).run(pace, 600, 0.9) > 1.8


def test_fewer_rows_begin_with_what_pays_for_more() -> None:
    """As a batch runs dry, it is in each range of rows for a few steps only."""
    pace = Pace(SIZES)
    Steps(device(8), rows=100).run(pace, 600, 0.9)
    steps = Steps(device(8), rows=30)
    for _ in range(8):
        steps.step(pace, 0.9)
    assert steps.used[0] == 1, "the first, which verifies nothing"
    assert pace.choose(120, 4) == 0, "more rows may be another matter"


def test_no_more_nodes_than_there_is_room_for() -> None:
    pace = Pace(SIZES)
    Steps(device(1)).run(pace, 600, 0.9)
    assert pace.choose(1, 4) > 2
    assert all(pace.choose(1, 2) <= 2 for _ in range(50))
    assert Pace(SIZES, fixed=True).choose(1, 3) == 3


def test_what_is_saved() -> None:
    pace = Pace((0, 4), fixed=True)
    assert pace.drafted(Reading(2, 3.0, 1.5), 4, steady=True, idle=False) == pytest.approx(3.0), (
        "all there is to compare with"
    )
    for _ in range(60):
        pace.rested(2, 1.0)
    assert pace.drafted(Reading(2, 3.0, 1.2), 4, steady=True, idle=False) == pytest.approx(1.8, rel=0.02)


def ask(pace: Pace, steps: int, gained: float, took: float, rows: int = 1) -> tuple[float, int]:
    """One of `rows` requests is asked whenever that is allowed, for `gained` tokens in a step of `took`. Tokens per second against
    plain steps, and how often it was asked."""
    tokens = total = quoted = 0.0
    asked = left = 0
    for _ in range(steps):
        pays = quoted > 0 and pace.affords(rows)
        left = left - 1 if left else 0 if pays else pace.look(rows, new=False)
        if pays or left:
            _, price = pace.asked(Reading(rows, 1 + gained / rows, took, gained / rows), 1, int(not pays))
            quoted += 0.2 * (gained - price - quoted)
            tokens, total, asked = tokens + 1 + gained / rows, total + took, asked + 1
        else:
            pace.rested(rows, 1.0)
            tokens, total = tokens + 1, total + 1
    return tokens / total, asked


@pytest.mark.parametrize(("gained", "took"), [(0.0, 1.1), (0.1, 1.6), (0.0, 3.0), (0.3, 1.5)])
@pytest.mark.parametrize("rows", [1, 8])
def test_questions_that_lose_are_seldom_asked(gained: float, took: float, rows: int) -> None:
    rate, asked = ask(Pace(SIZES), 4000, gained, took, rows)
    assert rate > 0.975
    assert asked > 0


def test_questions_that_pay_are_asked_and_found_again() -> None:
    pace = Pace(SIZES)
    assert ask(pace, 1000, 1.5, 1.4)[1] > 900
    assert ask(pace, 2000, 0.0, 1.1)[0] > 0.97
    assert ask(pace, 1000, 1.5, 1.4)[1] > 700


def test_losses_of_what_the_device_drafts_do_not_silence_quotes() -> None:
    pace = Pace((0, 4))
    pace.rested(1, 1.0, 100)
    for _ in range(30):
        pace.drafted(Reading(1, 1.0, 2.5), 4, steady=True, idle=False)
    assert pace.affords(1) and ask(pace, 300, 1.5, 1.4)[1] > 250
    assert pace.choose(1, 4) == 0, "what quotes have gained is not the device's to lose"


def test_losses_of_quotes_do_not_silence_the_device() -> None:
    pace, steps = Pace(SIZES), Steps(two_cores)
    steps.run(pace, 300, 0.9)
    for _ in range(30):
        pace.asked(Reading(1, 1.0, 3.0, 4.0), 1, 0)
    assert not pace.affords(1)
    assert steps.run(pace, 300, 0.9) > 1.8
    assert not pace.affords(1), "nor does the host live on what the device gains"
    pace.welcome(1, 1)
    assert pace.affords(1)


def test_a_step_in_which_both_drafted_is_booked_to_both() -> None:
    """Together what it gained and took; the host's part is what its nodes are known to take and bring."""
    pace = Pace((0, 4))
    pace.rested(1, 1.0, 100)
    for _ in range(60):
        pace.asked(Reading(1, 1.0, 1.6, 4.0), 1, 0)
    batch = batch_of(pace, 1)
    batch.host.credit = batch.device.credit = 0.0
    pace.drafted(Reading(1, 3.0, 2.0, 4.0, quoted=2.0), 0, steady=False, idle=False)
    assert batch.host.credit == pytest.approx(2.0 - 0.6, abs=0.05)
    assert batch.device.credit + batch.host.credit == pytest.approx(3.0 - 1.5), (
        "a step of no known form may surprise by a half"
    )


def test_a_debt_is_forgiven_by_the_share_of_those_who_come_new() -> None:
    """Where many come, one after the other, each would else ask once and owe it to nobody."""
    for rows in (1, 8):
        pace, asked, tokens, seconds = Pace(SIZES), 0, 0.0, 0.0
        pace.rested(rows, 1.0, 100)
        for step in range(4000):
            if step % 12 == 0:
                pace.welcome(rows, 1)
            if asks := pace.affords(rows):
                pace.asked(Reading(rows, 1.5, 2.5, 1.0, 0.5), 1, 0)
            else:
                pace.rested(rows, 1.0)
            asked, tokens, seconds = asked + asks, tokens + 1 + 0.5 * asks, seconds + 1 + 1.5 * asks
        assert asked > 10 and (rows == 1 or tokens / seconds > 0.97)


def test_what_a_new_form_takes_says_nothing_of_its_steps_to_come() -> None:
    """To build and to record it takes many plain steps: nobody is silenced for some of those, and none is learned from."""
    pace = Pace((0, 4))
    pace.rested(1, 1.0, 100)
    for _ in range(2):
        pace.drafted(Reading(1, 2.0, 4.0, fresh=True), 4, steady=True, idle=False)
        _, price = pace.asked(Reading(1, 2.0, 4.0, 4.0, 1.0, fresh=True), 1, 0)
    batch = batch_of(pace, 1)
    assert 4 not in batch.ratio and batch.device.credit > 2 and batch.host.credit > 2 and price < 1
    for _ in range(10):
        pace.drafted(Reading(1, 2.0, 1.5), 4, steady=True, idle=False)
    pace.drafted(Reading(1, 2.0, 9.0, fresh=True), 4, steady=True, idle=False)
    assert batch.ratio[4] == pytest.approx(1.5)


def test_new_forms_without_end_are_losses() -> None:
    """As where of many rows each drafts as it will."""
    pace = Pace((0, 4))
    pace.rested(8, 1.0, 100)
    for _ in range(6):
        pace.drafted(Reading(8, 1.5, 2.5, fresh=True), 4, steady=True, idle=False)
        pace.asked(Reading(8, 1.5, 2.5, 4.0, 0.5, fresh=True), 8, 0)
    assert not pace.affords(8) and batch_of(pace, 8).device.credit <= 0
    pace.drafted(Reading(8, 1.5, 2.5, fresh=True), 4, steady=True, idle=False)
    assert batch_of(pace, 8).ratio[4] > 2, "and that is what they take"


def test_nodes_worth_verifying_for_one_request() -> None:
    pace = Pace((0, 1, 2, 4, 8))
    assert pace.worth(1, 0.95) == 8
    pace.rested(1, 1.0)
    for _ in range(50):
        pace.asked(Reading(1, 2.0, 1.1, 4.0), 1, 0)
    assert pace.worth(1, 0.95) == 8
    assert 1 <= pace.worth(1, 0.3) <= 3
    assert pace.worth(1, 0.0) == 1
    for _ in range(50):
        pace.asked(Reading(1, 2.0, 2.9, 4.0), 1, 0)
    assert pace.worth(1, 0.5) == 1


def test_questions_without_an_answer_tell_that_plain_steps_have_become_shorter() -> None:
    """While requests are asked in every step there are no plain ones."""
    pace = Pace(SIZES)
    ask(pace, 200, 1.5, 1.2)
    for _ in range(100):
        pace.asked(Reading(1, 1.0, 0.5, 0.0), 1, 0)
    saved, price = pace.asked(Reading(1, 2.0, 1.2, 4.0), 1, 0)
    assert saved < 0
    assert price > 0.9


def test_what_is_known_of_plain_steps_does_not_stay_too_high() -> None:
    """A first step that took a thousand times as long, and steps that draft and verify nothing in less time than a plain one took
    before: the machine has become faster."""
    pace = Pace((0, 4))
    for seconds in (1.0, *[0.001] * 20):
        pace.rested(1, seconds)
    assert pace.drafted(Reading(1, 2.0, 0.0), 4, steady=True, idle=False) == pytest.approx(0.002, rel=0.3), (
        "seconds saved"
    )
    for _ in range(30):
        pace.drafted(Reading(1, 1.0, 0.0005), 4, steady=True, idle=True)
    assert pace.drafted(Reading(1, 2.0, 0.0), 4, steady=True, idle=False) == pytest.approx(0.001, rel=0.05)


def test_bad_luck_of_a_later_node_is_forgotten() -> None:
    """Where it is not drafted any more, it promises in the end what those before it do."""
    pace = Pace(SIZES)
    for _ in range(60):
        pace.learn(3, [0, 1])
    assert pace.gained(3) - pace.gained(2) < 0.1
    for _ in range(200):
        pace.learn(2, [0, 1])
    assert pace.gained(3) - pace.gained(2) > 0.8
    for _ in range(200):
        pace.learn(2, [0])
    assert pace.gained(3) - pace.gained(2) < 0.1, "no likelier than the one before it"


def test_what_is_cut_is_not_believed_to_be_kept() -> None:
    """Of a drafter that says itself what is worth verifying."""
    pace = Pace((0, 4))
    for _ in range(300):
        pace.learn(4, [0, 1])
    assert 2.9 < pace.gained(4) < 3.1


def test_one_plain_step_may_stand_for_several() -> None:
    """What is spared for looks and what is known of plain steps grow alike; a look comes as soon."""
    paces = Pace((0, 4)), Pace((0, 4))
    for _ in range(25):
        for _ in range(4):
            paces[0].rested(2, 0.003)
        paces[1].rested(2, 0.003, 4)
    for pace in paces:
        batch = batch_of(pace, 2)
        assert (batch.count, batch.plain) == (100, pytest.approx(0.003))
        assert pace.drafted(Reading(2, 3.0, 0.006), 4, steady=True, idle=False) == pytest.approx(0.003)
    one, other = (batch_of(pace, 2) for pace in paces)
    for account, same in ((one.device, other.device), (one.host, other.host)):
        assert astuple(account) == pytest.approx(astuple(same))


def test_a_question_is_paid_by_who_asks_and_bought_while_the_device_drafts() -> None:
    pace = Pace((0, 2, 4))
    pace.rested(1, 1.0, 100)
    while pace.look(1, new=False):  # until nothing is left to spare
        pass
    for _ in range(400):
        pace.drafted(Reading(1, 3.0, 1.5), 4, steady=True, idle=False)
    assert pace.look(1, new=False), "the time of drafted steps counts as well"
    pace.welcome(1, 1)
    one = batch_of(pace, 1)
    before = one.device.credit, one.host.credit
    for _ in range(10):
        pace.drafted(Reading(1, 1.0, 1.15, asked=1.0), 4, steady=False, idle=False)
    assert one.device.credit == pytest.approx(before[0]), "it gained what it took"
    assert one.host.credit == pytest.approx(before[1] - 1.5)
