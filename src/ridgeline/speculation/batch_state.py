"""Records of the controller: budgets for drafting, and measured times of steps. Both count in undrafted steps (see controller)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

SHARE, CAP, START, UNTIL_PROBE = 0.0125, 5.0, 2.0, 24.0
"""Share of all time that a budget earns; its largest and its first balance; time before a probe while a size is in use."""


@dataclass(slots=True)
class Budget:
    """Balance of undrafted steps that drafting may lose. recent: undrafted steps gained since the last decision."""

    balance: float = START
    recent: float = 0.0

    def book(self, gained: float, earned: float) -> None:
        """Add what drafting gained (negative: lost), and what the budget earned meanwhile."""
        self.recent += gained
        self.balance = min(CAP, self.balance + gained + earned)

    def steps_to(self, price: float) -> int:
        """Plain steps until the balance covers a price."""
        return max(0, ceil((price - self.balance) / SHARE))


@dataclass(slots=True)
class BatchState:
    """State of the controller for steps with similar numbers of rows. Times are in undrafted steps, unless noted.

    undrafted_s: mean seconds of an undrafted step, `count` of them so far. times: t(n). node_time, call_time: cost of a host node
    and of a host call per row; verification costs two more nodes. build: time by which first steps of new shapes may still exceed
    the expected time without being booked. slow: time of the slowest drafted step, which decays. nodes: the size in use, for `hold`
    more steps. until_probe: time to the next probe while a size is in use; `probed` is the size of the last one. off: undrafted
    steps since the last step that drafted. read_time: time of a draft model per token per row that it did not read meanwhile.
    device: budget of device drafts. host: budget of the host drafter, shared by all numbers of rows.
    """

    build: float
    off: int = 0
    read_time: float = 0.0
    times: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    node_time: float = 0.05
    call_time: float = 0.15
    undrafted_s: float = 0.0
    count: int = 0
    slow: float = 0.0
    nodes: int = 0
    hold: int = 0
    probed: int = 0
    until_probe: float = UNTIL_PROBE
    device: Budget = field(default_factory=Budget)
    host: Budget = field(default_factory=Budget)

    def earn(self, steps: float, device: float = 0.0, host: float = 0.0) -> None:
        """Book a time of `steps` undrafted steps, in which device and host drafts gained so many tokens more than they cost."""
        self.until_probe -= steps
        self.device.book(device, SHARE * steps)
        self.host.book(host, SHARE * steps)
