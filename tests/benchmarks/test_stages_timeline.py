"""What a stage waits for is told from its work, on its GPU and on its host."""

from __future__ import annotations

from stages_timeline import Step, device_times, host_times
from timeline import Span


def test_a_receive_and_what_lies_idle_before_it_are_a_wait() -> None:
    kernels = []
    for step in range(3):
        begin = 10_000.0 * step
        kernels += [Span("ncclDevKernel_SendRecv", begin, begin + 3000), Span("layer", begin + 3000, begin + 8000)]
    assert device_times(kernels) == {"period_ms": 10.0, "wait_ms": 5.0, "work_ms": 5.0}


def test_two_groups_of_rows_on_the_host() -> None:
    """A step is launched 1 ms behind the result of the group's last one, and takes 7 ms. The groups are 4 ms apart."""
    steps = [Step(32, at, at + 0.0005, at + 0.004, at + 0.007) for at in (0.0, 0.004, 0.008, 0.012, 0.016)]
    times = host_times(steps)
    assert times == {"launch_ms": 0.5, "collect_ms": 3.0, "flight_ms": 7.0, "between_ms": 1.0}
