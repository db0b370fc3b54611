"""How many nodes are drafted, on devices whose step times and acceptance the test makes up or repeats from records."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest

from ridgeline.speculation.controller import Controller
from ridgeline.speculation.state import Reading

SIZES = (0, 1, 2, 3, 4)
Seconds = Callable[[int, int], float]
"""Of a step, by the nodes that it verifies and those that it drafts."""
H200 = {1: (1.0, 1.03, 1.06, 1.09, 1.13), 8: (1.0, 1.06, 1.12, 1.19, 1.25), 128: (1.0, 1.45, 1.85, 2.3, 2.77)}
"""Steps of an 8B by rows and nodes that they verify, against plain ones; benchmarks/results/speculation.json."""


def batch_of(controller: Controller, rows: int) -> Any:
    """The record of steps with so many rows: their times and budgets."""
    return controller._of(rows)


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

    def step(self, controller: Controller, kept: float) -> list[tuple[float, float]]:
        """One step, or a rest's. Tokens per row and seconds of each."""
        verified, self.drafted = self.drafted, controller.choose(self.rows, controller.sizes[-1])
        right = 0
        for _ in range(self.rows if verified else 0):
            accepted = next((node for node in range(verified) if self.chance.random() >= kept), verified)
            controller.observe(verified, list(range(accepted)))
            right += accepted
        gained, took = 1 + right / self.rows, self.time(verified, self.drafted)
        self.used[verified] = self.used.get(verified, 0) + 1
        if verified or self.drafted:
            controller.measure(Reading(self.rows, took, gained, verified, self.drafted))
            return [(gained, took)]
        controller.measure_undrafted(self.rows, took)
        rest = [(1.0, self.time(0, 0)) for _ in range(controller.idle_steps(self.rows, host=False, device=True))]
        for _, seconds in rest:
            controller.measure_undrafted(self.rows, seconds)
        self.used[0] += len(rest)
        return [(gained, took), *rest]

    def run(self, controller: Controller, count: int, kept: float, length: int | None = None) -> float:
        """Tokens per row and second, against steps without drafts. length: steps between two requests that come new."""
        points: list[tuple[float, float]] = []
        came = -1
        while len(points) < count:
            if length is not None and len(points) // length > came:
                controller.admit(self.rows, 1)
                came = len(points) // length
            points += self.step(controller, kept)
        plain = sum(self.time(0, 0) for _ in range(2000)) / 2000
        return plain * sum(gained for gained, _ in points) / sum(seconds for _, seconds in points)


def seeds(rows: int) -> range:
    """Three; one where a step draws for so many rows that its gain hardly depends on the seed."""
    return range(3 if rows < 100 else 1)


@pytest.mark.parametrize("kept", [0.0, 0.05, 0.3, 0.5])
@pytest.mark.parametrize(("seconds", "rows"), [(two_cores, 1), (dear, 1), (dear, 7), (device(128), 128), (dear, 250)])
def test_what_does_not_pay_costs_next_to_nothing(kept: float, seconds: Seconds, rows: int) -> None:
    for seed in seeds(rows):
        controller, steps = Controller(SIZES), Steps(seconds, rows=rows, cold=0.4 if rows == 1 else 0.0, seed=seed)
        assert steps.run(controller, 128, kept) > 0.9, "nor does the first answer of an engine pay for all"
        assert steps.run(controller, 3000, kept) > 0.97


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
    for seed in seeds(rows):
        controller, steps = Controller(SIZES), Steps(seconds, rows=rows, seed=seed)
        steps.run(controller, 200, kept)
        assert steps.run(controller, 2000, kept) > 0.93 * best


def test_it_goes_off_and_on_again() -> None:
    for seed in range(4):
        controller, steps = Controller(SIZES), Steps(two_cores, seed=seed)
        steps.run(controller, 500, 0.9)
        assert steps.run(controller, 1500, 0.0) > 0.97
        assert steps.run(controller, 2500, 0.9) > 1.5


def test_easy_and_hard_answers_in_turns_are_no_slower_than_plain_ones() -> None:
    controller, steps = Controller(SIZES), Steps(two_cores)
    for _ in range(10):
        assert steps.run(controller, 128, 0.0) > 0.92
        steps.run(controller, 128, 0.7)


def test_who_comes_new_is_tried_again() -> None:
    """What a hard text taught must not keep an easy one behind it from being drafted."""
    for seed in range(3):
        controller, steps = Controller(SIZES), Steps(two_cores, seed=seed)
        easy, hard = [], []
        for _ in range(10):
            hard.append(steps.run(controller, 128, 0.0, 128))
            easy.append(steps.run(controller, 128, 0.7, 128))
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
        controller, steps = Controller(SIZES), Steps(seconds, rows=rows, seed=seed)
        steps.run(controller, 300, kept)
        assert steps.run(controller, 4000, kept, length) > 0.97


def test_a_first_look_that_nobody_would_have_paid_ends_early() -> None:
    """Six steps of eight plain ones each would be a fiftieth of all that is run here, beside the share that looks may cost."""
    for seed in range(3):
        controller, steps = (
            Controller(SIZES),
            Steps(lambda verified, drafted: 1.0 + 7.0 * bool(verified or drafted), seed=seed),
        )
        assert steps.run(controller, 2500, 0.05, 128) > 0.972


def test_longer_contexts_do_not_turn_the_choice() -> None:
    """Steps become longer while one size is in use, and the others were read long ago."""
    at = [0]

    def growing(verified: int, drafted: int) -> float:
        at[0] += 1
        return (1 + at[0] / 1000) * device(8)(verified, drafted)

    controller, steps = Controller(SIZES), Steps(growing, rows=8)
    for _ in range(3000):
        steps.step(controller, 0.8)
    assert steps.used[0] < 0.1 * 3000
    assert steps.used[4] > 0.6 * 3000


def test_batches_of_other_sizes_are_others() -> None:
    controller = Controller(SIZES)
    assert Steps(two_cores, rows=1).run(controller, 600, 0.9) > 1.5
    assert Steps(dear, rows=100).run(controller, 600, 0.9) > 0.95
    assert Steps(two_cores, rows=1).run(controller, 600, 0.9) > 1.8


def test_fewer_rows_begin_with_what_pays_for_more() -> None:
    """As a batch runs dry, it is in each range of rows for a few steps only."""
    controller = Controller(SIZES)
    Steps(device(8), rows=100).run(controller, 600, 0.9)
    steps = Steps(device(8), rows=30)
    for _ in range(8):
        steps.step(controller, 0.9)
    assert steps.used[0] == 1, "the first, which verifies nothing"
    assert controller.choose(120, 4) == 0, "more rows may be another matter"


def test_no_more_nodes_than_there_is_room_for() -> None:
    controller = Controller(SIZES)
    Steps(device(1)).run(controller, 600, 0.9)
    assert controller.choose(1, 4) > 2
    assert all(controller.choose(1, 2) <= 2 for _ in range(50))
    assert Controller(SIZES, fixed=True).choose(1, 3) == 3


def test_what_is_saved() -> None:
    controller = Controller((0, 4), fixed=True)
    assert controller.measure(Reading(2, 1.5, 3.0, 4, 4))[0] == pytest.approx(3.0), "all there is to compare with"
    for _ in range(60):
        controller.measure_undrafted(2, 1.0)
    assert controller.measure(Reading(2, 1.2, 3.0, 4, 4))[0] == pytest.approx(1.8, rel=0.02)


def asked(rows: int, took: float, gained: float, nodes: float, calls: int = 1, fresh: bool = False) -> Reading:
    """A step with calls of the host drafter, whose nodes gain `gained` tokens per row; the device drafts nothing."""
    return Reading(rows, took, 1 + gained, host_nodes=nodes, host_tokens=gained, calls=calls / rows, fresh=fresh)


def ask(controller: Controller, steps: int, gained: float, took: float, rows: int = 1) -> tuple[float, int]:
    """One of `rows` requests is asked whenever that is allowed, for `gained` tokens in a step of `took`. Tokens per second against
    plain steps, and how often it was asked."""
    tokens = total = quoted = 0.0
    calls = left = 0
    for _ in range(steps):
        pays = quoted > 0 and controller.may_call(rows)
        left = left - 1 if left else 0 if pays else controller.probe_calls(rows, new=False)
        if pays or left:
            _, price = controller.measure(asked(rows, took, gained / rows, gained / rows))
            quoted += 0.2 * (gained - price - quoted)
            tokens, total, calls = tokens + 1 + gained / rows, total + took, calls + 1
        else:
            controller.measure_undrafted(rows, 1.0)
            tokens, total = tokens + 1, total + 1
    return tokens / total, calls


@pytest.mark.parametrize(("gained", "took"), [(0.0, 1.1), (0.1, 1.6), (0.0, 3.0), (0.3, 1.5)])
@pytest.mark.parametrize("rows", [1, 8])
def test_questions_that_lose_are_seldom_asked(gained: float, took: float, rows: int) -> None:
    rate, asked = ask(Controller(SIZES), 4000, gained, took, rows)
    assert rate > 0.975
    assert asked > 0


def test_questions_that_pay_are_asked_and_found_again() -> None:
    controller = Controller(SIZES)
    assert ask(controller, 1000, 1.5, 1.4)[1] > 900
    assert ask(controller, 2000, 0.0, 1.1)[0] > 0.97
    assert ask(controller, 1000, 1.5, 1.4)[1] > 700


def test_losses_of_device_drafts_do_not_silence_the_host_drafter() -> None:
    controller = Controller((0, 4))
    controller.measure_undrafted(1, 1.0, 100)
    for _ in range(30):
        controller.measure(Reading(1, 2.5, 1.0, 4, 4))
    assert controller.may_call(1) and ask(controller, 300, 1.5, 1.4)[1] > 250
    assert controller.choose(1, 4) == 0, "what the host drafter gained is not for device drafts to lose"


def test_losses_of_the_host_drafter_do_not_silence_device_drafts() -> None:
    controller, steps = Controller(SIZES), Steps(two_cores)
    steps.run(controller, 300, 0.9)
    for _ in range(30):
        controller.measure(asked(1, 3.0, 0.0, 4.0))
    assert not controller.may_call(1)
    assert steps.run(controller, 300, 0.9) > 1.8
    batch_of(controller, 1).host.balance = 0.0
    controller.admit(1, 1)
    assert controller.may_call(1)


def test_a_step_in_which_both_drafted_is_booked_to_both() -> None:
    """The host drafter's part is what its calls and nodes are known to take and what its nodes gained."""
    controller = Controller((0, 4))
    controller.measure_undrafted(1, 1.0, 100)
    for _ in range(60):
        controller.measure(asked(1, 1.6, 0.0, 4.0))
    batch = batch_of(controller, 1)
    batch.host.balance = batch.device.balance = 0.0
    controller.measure(Reading(1, 2.0, 3.0, 0, 4, host_nodes=4.0, host_tokens=2.0, calls=1.0))
    assert batch.host.balance == pytest.approx(2.0 - batch.node_time * 6 - batch.call_time + 0.025)
    assert batch.device.balance + batch.host.balance == pytest.approx(3.0 - 2.0 + 0.05)


def test_a_debt_is_forgiven_by_the_share_of_new_requests() -> None:
    """Where many come, one after the other, calls that lose are still rare."""
    for rows in (1, 8):
        controller, calls, tokens, seconds = Controller(SIZES), 0, 0.0, 0.0
        controller.measure_undrafted(rows, 1.0, 100)
        for step in range(4000):
            if step % 12 == 0:
                controller.admit(rows, 1)
            if asks := controller.may_call(rows):
                controller.measure(asked(rows, 2.5, 0.5, 1.0))
            else:
                controller.measure_undrafted(rows, 1.0)
            calls, tokens, seconds = calls + asks, tokens + 1 + 0.5 * asks, seconds + 1 + 1.5 * asks
        assert calls > 10 and (rows == 1 or tokens / seconds > 0.97)


def test_what_a_new_shape_takes_says_nothing_of_its_later_steps() -> None:
    """To build and to record it takes many plain steps: they are no regret, and no reading."""
    controller = Controller((0, 4))
    controller.measure_undrafted(1, 1.0, 100)
    for _ in range(2):
        controller.measure(Reading(1, 4.0, 2.0, 4, 4, fresh=True))
        _, price = controller.measure(asked(1, 4.0, 1.0, 4.0, fresh=True))
    batch = batch_of(controller, 1)
    assert 4 not in batch.times and batch.device.balance > 2 and batch.host.balance > 2 and price < 1
    for _ in range(10):
        controller.measure(Reading(1, 1.5, 2.0, 4, 4))
    controller.measure(Reading(1, 9.0, 2.0, 4, 4, fresh=True))
    assert batch.times[4] == pytest.approx(1.5)


def test_new_shapes_without_end_are_regret() -> None:
    """As where of many rows each drafts another number of nodes."""
    controller = Controller((0, 4))
    controller.measure_undrafted(8, 1.0, 100)
    for _ in range(6):
        controller.measure(Reading(8, 2.5, 1.5, 4, 4, fresh=True))
        controller.measure(asked(8, 2.5, 0.5, 4.0, calls=8, fresh=True))
    assert not controller.may_call(8) and batch_of(controller, 8).device.balance <= 0
    controller.measure(Reading(8, 2.5, 1.5, 4, 4, fresh=True))
    assert batch_of(controller, 8).times[4] > 2, "and that is what they take"


def test_nodes_worth_verifying_for_one_request() -> None:
    controller = Controller((0, 1, 2, 4, 8))
    assert controller.host_nodes(1, 0.95)[0] == 8
    controller.measure_undrafted(1, 1.0)
    for _ in range(50):
        controller.measure(asked(1, 1.1, 1.0, 4.0))
    assert controller.host_nodes(1, 0.95)[0] == 8
    assert 1 <= controller.host_nodes(1, 0.3)[0] <= 3
    assert controller.host_nodes(1, 0.0)[0] == 1
    for _ in range(50):
        controller.measure(asked(1, 2.9, 1.0, 4.0))
    assert controller.host_nodes(1, 0.5)[0] == 1


def test_questions_without_an_answer_tell_that_plain_steps_have_become_shorter() -> None:
    """While requests are asked in every step there are no plain ones."""
    controller = Controller(SIZES)
    ask(controller, 200, 1.5, 1.2)
    for _ in range(100):
        controller.measure(asked(1, 0.5, 0.0, 0.0))
    saved, price = controller.measure(asked(1, 1.2, 1.0, 4.0))
    assert saved < 0
    assert price > 0.9


def test_what_is_known_of_plain_steps_does_not_stay_too_high() -> None:
    """A first step that took a thousand times as long, and steps that draft and verify nothing in less time than a plain one took
    before: the machine has become faster."""
    controller = Controller((0, 4))
    for seconds in (1.0, *[0.001] * 20):
        controller.measure_undrafted(1, seconds)
    assert controller.measure(Reading(1, 0.0, 2.0, 4, 4))[0] == pytest.approx(0.002, rel=0.3), "seconds saved"
    for _ in range(30):
        controller.measure(Reading(1, 0.0005, 1.0, 0, 4))
    assert controller.measure(Reading(1, 0.0, 2.0, 4, 4))[0] == pytest.approx(0.001, rel=0.05)


def test_bad_luck_of_a_later_node_is_forgotten() -> None:
    """Where it is not drafted any more, it promises in the end what those before it do."""
    controller = Controller(SIZES)
    for _ in range(60):
        controller.observe(3, [0, 1])
    assert controller.expected(3) - controller.expected(2) < 0.1
    for _ in range(200):
        controller.observe(2, [0, 1])
    assert controller.expected(3) - controller.expected(2) > 0.8
    for _ in range(200):
        controller.observe(2, [0])
    assert controller.expected(3) - controller.expected(2) < 0.1, "no likelier than the one before it"


def test_what_is_cut_is_not_believed_to_be_kept() -> None:
    """Of a drafter that says itself what is worth verifying."""
    controller = Controller((0, 4))
    for _ in range(300):
        controller.observe(4, [0, 1])
    assert 2.9 < controller.expected(4) < 3.1


def test_one_plain_step_may_stand_for_several() -> None:
    """Budgets and the mean of plain steps grow alike."""
    controllers = Controller((0, 4)), Controller((0, 4))
    for _ in range(25):
        for _ in range(4):
            controllers[0].measure_undrafted(2, 0.003)
        controllers[1].measure_undrafted(2, 0.003, 4)
    for controller in controllers:
        batch = batch_of(controller, 2)
        assert (batch.count, batch.undrafted_s) == (100, pytest.approx(0.003))
        assert controller.measure(Reading(2, 0.006, 3.0, 4, 4))[0] == pytest.approx(0.003)
    first, other = (batch_of(controller, 2) for controller in controllers)
    for budget, same in ((first.device, other.device), (first.host, other.host)):
        assert astuple(budget) == pytest.approx(astuple(same))


def test_calls_are_paid_by_the_host_drafter_and_earned_while_the_device_drafts() -> None:
    controller = Controller((0, 2, 4))
    controller.measure_undrafted(1, 1.0, 100)
    batch = batch_of(controller, 1)
    batch.host.balance = 0.0
    assert not controller.probe_calls(1, new=False)
    for _ in range(400):
        controller.measure(Reading(1, 1.5, 3.0, 4, 4))
    assert controller.probe_calls(1, new=False), "the time of drafted steps counts as well"
    before = batch.device.balance, batch.host.balance
    for _ in range(10):
        controller.measure(Reading(1, 1.15, 1.0, 0, 4, calls=1.0))
    assert batch.device.balance == pytest.approx(min(5.0, before[0] + 10 * 0.0125 * 1.15), abs=0.01)
    assert batch.host.balance == pytest.approx(before[1] - 10 * (0.15 - 0.0125 * 1.15), abs=0.01)


def test_a_draft_model_that_reads_what_it_missed_is_worth_less() -> None:
    """What it reads counts in full against the budget, and tells nothing of the size; a longer pause makes it dearer to begin."""

    def started(read_time: float) -> int:
        controller, chosen = Controller((0, 1)), 0
        controller.measure_undrafted(64, 1.0, 16)
        off = 16.0
        for _ in range(2000):
            nodes = controller.choose(64, 1)
            if not nodes:
                controller.measure_undrafted(64, 1.0)
                off += 1
                continue
            chosen += 1
            controller.measure(Reading(64, 1.2 + read_time * off, 1.3, nodes, nodes, missed=off))
            off = 0.0
        return chosen

    free, dear = started(0.0), started(0.5)
    assert free > 1500 and dear < 100
