"""Steps with drafts that take many times as long as others: no graph has their shape, or the machine was busy."""

from __future__ import annotations

import pytest

from ridgeline.speculation.controller import Controller
from ridgeline.speculation.state import Reading
from tests.speculation.test_controller import SIZES, Steps, asked, two_cores


@pytest.mark.parametrize("rows", [(1,), (8,), (32, 30, 24, 20, 7)])
def test_steps_that_take_twenty_times_as_long_stay_within_the_budget(rows: tuple[int, ...]) -> None:
    """As those that no graph runs. Whatever a batch loses, batches of other sizes cannot lose again. The first slow step may be
    chance, and the second is known only when it is over."""
    controller = Controller(SIZES)
    steps = slow = 0
    for _ in range(300):
        for count in rows:
            for _ in range(40):
                steps += 1
                if controller.may_call(count) or controller.probe_calls(count, new=False):
                    controller.measure(asked(count, 20.0, 0.1, 4.0, calls=count))
                    slow += 1
                else:
                    controller.measure_undrafted(count, 1.0)
    assert 19 * slow <= 0.0125 * (steps + 19 * slow) + 5 + 2 * 19
    assert slow >= 3, "they are tried again"


@pytest.mark.parametrize("between", [1000, 5000])
def test_a_hiccup_of_the_machine_does_not_end_drafting(between: int) -> None:
    """A step that takes twenty times as long, once in a while: of the host drafter and of device drafts."""
    host, device = Controller(SIZES), Controller(SIZES)
    steps = Steps(two_cores)
    steps.run(device, 600, 0.9)
    host.measure_undrafted(1, 1.0, 100)
    for _ in range(3):
        for _ in range(between):
            host.measure(asked(1, 1.2, 1.0, 4.0))
        host.measure(asked(1, 24.0, 1.0, 4.0))
        assert host.may_call(1)
        steps.run(device, between, 0.9)
        device.measure(Reading(1, 24.0, 4.0, 4, 4))
        assert steps.run(device, 300, 0.9) > 1.8


def test_a_step_that_a_waiting_request_misses_is_a_loss() -> None:
    """Half of the rows wait for the host drafter, so each step yields half of the tokens, and drafts gain nothing."""
    controller = Controller(SIZES)
    controller.measure_undrafted(8, 1.0, 100)
    for _ in range(20):
        controller.measure(Reading(8, 1.0, 0.5, host_tokens=-0.5))
    assert not controller.may_call(8)


def test_the_first_step_of_a_batch_does_not_teach_how_long_undrafted_steps_take() -> None:
    controller = Controller(SIZES)
    assert not controller.may_call(30), "nothing is known yet"
    controller.measure_undrafted(32, 1.0, 100)
    for _ in range(3):
        controller.measure(asked(30, 20.0, 0.0, 4.0, calls=30))
    assert not controller.may_call(30) and not controller.may_call(32)
