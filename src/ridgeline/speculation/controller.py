"""The controller chooses how many nodes to draft and when to call the host drafter. A step that verifies n device nodes per row
yields

    rate(n) = (1 + a_1 + .. + a_n) / t(n)

tokens per undrafted step (Leviathan et al. 2023, section 3.3). An undrafted step is a step of as many rows without drafts; its time
is the unit of all times here, so rate(0) = 1. a_i is the measured probability that node i is kept, t(n) the measured time. The size
with the highest rate is used; other sizes are probed.

Two budgets bound the regret: one for device drafts, one for the host drafter. A budget earns the share SHARE of all time, and
_GRANT for each new request. Each step with drafts adds the tokens it gained and subtracts the time it took. With an empty budget
nothing is drafted, and the budget must cover the price of a probe. So drafting that never pays costs at most the share SHARE of
the time, CAP steps, and _GRANT per request.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ridgeline.speculation.batch_state import CAP, SHARE, UNTIL_PROBE, BatchState, Budget
from ridgeline.speculation.state import Reading

_GRANT, _DEAR = 0.75, 3.0
"""Time granted for a new request; t(n) from which on a grant pays no device probe."""
_PROBE, _COLD, _CALLS, _LEAST_PRICE = 6, 2, 4, 0.3
"""Steps of a probe; warm-up steps of a probe that are discarded; calls of a host probe; lowest price of a probe."""
_HOLD, _MAX_IDLE, _WARM_UP = 8, 64, 16
"""Steps between two decisions; longest idle period; undrafted steps before the first probe."""
_MARGIN, _PRIOR = 1.03, 0.65
"""Lowest rate of a size in use; acceptance of a node, given that its parent is kept, before any reading."""
_WEIGHT, _OUTLIER, _UNKNOWN, _SLOW, _FORGET, _BUILD = 0.05, 1.5, 4.0, 4.0, 1 - 1 / 32, 16.0
"""Weight of a reading in a moving average; largest time of a step from which means learn, as a multiple of the expected time; the
same for a size without readings; time from which on a step is slow, again as a multiple; decay of the slowest step's time with each
drafted step; time, divided by the rows, by which first steps of new shapes may exceed the expected time without being
booked."""


class Controller:
    """Chooses draft sizes. sizes: numbers of device nodes, ascending, 0 first. fixed: always use the largest, for measurements."""

    def __init__(self, sizes: tuple[int, ...], fixed: bool = False) -> None:
        self.sizes, self.fixed = sizes, fixed
        self._batches, self._host, self._drafts = dict[int, BatchState](), Budget(), 0
        self._kept = [_PRIOR ** (node + 1) for node in range(sizes[-1])]  # a_i

    def _of(self, rows: int) -> BatchState:
        """State for `rows`; counts of rows within a quarter share it. New state starts with the times of the next larger count,
        where a node costs at least as much."""
        bits = max(0, rows.bit_length() - 3)
        key = rows >> bits << bits
        if key not in self._batches:
            larger = [other for other, batch in self._batches.items() if other > key and batch.count >= _WARM_UP]
            like = self._batches[min(larger)] if larger else BatchState(0.0)
            new = replace(like, build=_BUILD / rows, times=dict(like.times), undrafted_s=0.0, hold=0, off=0)
            self._batches[key] = replace(new, until_probe=UNTIL_PROBE, device=Budget(), host=self._host)
        return self._batches[key]

    def admit(self, rows: int, new: int) -> None:
        """Grant budget for `new` requests among `rows`: their text may be easier to predict."""
        batch, grant = self._of(rows), _GRANT * min(1.0, new / rows)
        cheapest = min([time for size, time in batch.times.items() if size], default=0.0)
        for budget in (batch.host, batch.device)[: 1 + (cheapest < _DEAR)]:
            budget.balance = max(budget.balance, min(_GRANT, budget.balance + grant))

    def expected(self, nodes: int) -> float:
        """Expected tokens per row of a step with `nodes` nodes."""
        return 1 + sum(self._kept[:nodes])

    def choose(self, rows: int, max_nodes: int) -> int:
        """Device nodes per row, at most `max_nodes`, to draft for the next step."""
        if self.fixed:
            return min(self.sizes[-1], max_nodes)
        batch = self._of(rows)
        if not batch.hold:
            self._decide(batch, [size for size in self.sizes if size <= max_nodes])
        batch.hold -= 1
        return min(batch.nodes, max_nodes)

    def _decide(self, batch: BatchState, sizes: list[int]) -> None:
        budget, times = batch.device, batch.times
        rates = {size: self.expected(size) / times.get(size, max(times.values())) for size in sizes}
        known = [size for size in sizes if size in times]
        best = max(known, key=rates.__getitem__)
        if rates[best] < _MARGIN:
            best = min(batch.nodes, sizes[-1]) if budget.recent > 0 else 0  # continue a probe that gains
        if batch.read_time * batch.off > max(0.0, budget.balance):
            best = 0  # catching up costs a draft model more than the budget
        budget.recent, batch.nodes, batch.hold = 0.0, best, _HOLD
        # Probe a size without readings if it may be best. Else probe the best other size beside 0, or 0 and the neighbours in turn.
        new = next((size for size in sizes if size not in times and rates[size] > rates[best]), 0)
        place = known.index(best) if best in known else 0
        near = {0, *known[max(1, place - 1) : place + 2]} - {best}
        turn = min(near, key=lambda size: (size <= batch.probed, size), default=0)
        other = new or (turn if best else max(known[1:], key=rates.__getitem__, default=0))
        price = max(_LEAST_PRICE, _PROBE * (1 - rates[other] / rates[best]) * times.get(other, 1.0))
        price = min(CAP, price + batch.read_time * (batch.off if not best else _PROBE * (not other)))
        if budget.balance <= 0 or batch.count < _WARM_UP:
            batch.nodes = 0
        elif other != best and price <= budget.balance and (new or not best or batch.until_probe <= 0):
            batch.nodes = batch.probed = other
            batch.hold, batch.until_probe = _PROBE, price / SHARE
        elif not best:
            batch.hold = max(_HOLD, min(_MAX_IDLE, budget.steps_to(price)))

    def observe(self, nodes: int, kept: list[int]) -> None:
        """Update acceptance: of the first `nodes` nodes of a device draft those in `kept` were accepted."""
        self._drafts += 1
        weight, acceptance = max(_WEIGHT, 1 / (self._drafts + 4)), self._kept
        acceptance[:nodes] = [rate + weight * ((node in kept) - rate) for node, rate in enumerate(acceptance[:nodes])]
        ratio = acceptance[nodes - 1] / max(acceptance[nodes - 2] if nodes > 1 else 1.0, 0.01)
        for node in range(nodes, len(acceptance)):  # without readings: drifts up to the extrapolation of the last two
            target = max(acceptance[node], acceptance[node - 1] * ratio)
            acceptance[node] = min(acceptance[node - 1], acceptance[node] + _WEIGHT / 4 * (target - acceptance[node]))

    def may_call(self, rows: int) -> bool:
        """Whether the budget allows calls of the host drafter, whose time is known only beside that of undrafted steps."""
        return self.fixed or (self._of(rows).undrafted_s > 0 and self._host.balance > 0)

    def probe_calls(self, rows: int, new: bool) -> int:
        """Calls of a host probe for one request; 0 if the budget is too small. new: the first probe of the request; later probes
        leave budget for one more."""
        batch = self._of(rows)
        price = self._call_price(batch, rows) * (1 if new else 2)
        return _CALLS if self.fixed or (batch.count >= _WARM_UP and price <= batch.host.balance) else 0

    def _call_price(self, batch: BatchState, rows: int) -> float:
        return min(CAP, max(_LEAST_PRICE, _CALLS * batch.call_time) / rows)

    def host_nodes(self, rows: int, acceptance: float) -> tuple[int, float]:
        """Nodes of a host chain: the acceptance probability of the last one still exceeds its cost. And that cost; 0 if the largest
        drafts are wanted."""
        if self.fixed:
            return self.sizes[-1], 0.0
        cost = min(0.5, max(self._of(rows).node_time, 0.01))
        return min(self.sizes[-1], max(1, int(math.log(cost) / math.log(min(0.99, max(acceptance, 0.01)))))), cost

    def idle_steps(self, rows: int, host: bool, device: bool) -> int:
        """Plain steps until the next decision, after a step without drafts."""
        batch = self._of(rows)
        call = max(_HOLD, batch.host.steps_to(2 * self._call_price(batch, rows))) if host else _MAX_IDLE
        steps, batch.hold = min(_MAX_IDLE, call, batch.hold if device else _MAX_IDLE), 0
        return steps

    def measure_undrafted(self, rows: int, seconds: float, steps: int = 1) -> None:
        """Account for `steps` undrafted steps, the last of which took `seconds`."""
        batch = self._of(rows)
        batch.count, batch.off = batch.count + steps, batch.off + steps
        # The first step of a process may take seconds.
        batch.undrafted_s = min(batch.undrafted_s or seconds, _OUTLIER * seconds)
        # The machine was busy, as it may have been in slow steps with drafts: forgive their debts.
        if seconds > _SLOW * batch.undrafted_s:
            batch.slow, host, device = 0.0, batch.host, batch.device
            host.balance, device.balance = max(0.0, host.balance), max(0.0, device.balance)
        batch.undrafted_s += max(_WEIGHT, steps / batch.count) * (
            min(seconds, _OUTLIER * batch.undrafted_s) - batch.undrafted_s
        )
        batch.earn(steps)

    def measure(self, step: Reading) -> tuple[float, float]:
        """Account for a step that drafts, verifies or called the host drafter. Returns the seconds saved and the time of a
        call."""
        batch, times, drafts = self._of(step.rows), self._of(step.rows).times, step.nodes or step.drafted
        if not (step.nodes or step.host_nodes):  # an undrafted step takes no longer: a higher mean is outdated
            batch.undrafted_s -= 4 * _WEIGHT * max(0.0, batch.undrafted_s - step.seconds)
        host = batch.call_time * step.calls + batch.node_time * (step.host_nodes and step.host_nodes + 2)
        known = times.get(step.nodes) if step.nodes or not step.drafted else None
        expected = (known or max(times.values())) + host
        batch.undrafted_s = batch.undrafted_s or (
            # With its own time as the unit, the first call in a batch of this size would seem free.
            (step.calls and max(other.undrafted_s for other in self._batches.values())) or step.seconds / expected
        )
        took = step.seconds / batch.undrafted_s
        if step.missed:  # not limited: the time of catching up varies
            batch.read_time += 4 * _WEIGHT * (max(0.0, took - expected) / step.missed - batch.read_time)
        # The means learn from no more than `limit`. The budgets book more from the second slow step on: one alone is chance.
        limit = math.inf if step.missed else _OUTLIER * expected if known else _UNKNOWN
        excess, usual = max(0.0, min(took, batch.slow) - limit), step.missed or step.fresh or took < _SLOW * expected
        batch.slow, took = max(0.0 if usual else took, batch.slow * _FORGET), min(took, limit)
        building = min(max(0.0, took - expected), batch.build) if step.fresh else 0.0
        readable = not (step.missed or (step.fresh and batch.build))
        batch.build, took = batch.build - building, took - building
        host = host if drafts else took - 1  # measured where only the host drafts
        batch.off *= not (step.nodes or step.drafted)
        batch.earn(
            took + excess,
            device=step.tokens - step.host_tokens - took + host - excess * (drafts > 0),
            host=step.host_tokens - host - excess * (drafts == 0),
        )
        ruined = drafts and batch.device.balance <= 0  # before the probe is over
        if readable and step.nodes and not step.calls:
            if (step.nodes == step.drafted and batch.hold < _PROBE - _COLD) or (ruined and known is None):
                times[step.nodes] = took + (1 - 4 * _WEIGHT) * ((known or took) - took)
        elif readable and step.host_nodes and not drafts:
            batch.node_time += 2 * _WEIGHT * (max(0.0, host) / (step.host_nodes + 2) - batch.node_time)
        elif readable and step.calls and not drafts:
            batch.call_time += _WEIGHT * (max(0.0, host) / step.calls - batch.call_time)
        batch.hold = 0 if ruined else batch.hold
        price = max(0.05, (host + excess) / step.calls) if step.calls else 0.0
        return (step.tokens - took - excess) * batch.undrafted_s, price
