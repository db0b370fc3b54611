"""How many nodes to draft, and when to ask: what promises most tokens per second, found out with a small share of the time.

Nothing is assumed of the hardware. Times are counted in plain steps (steps without drafts) of batches alike, which moves them
along as contexts grow. What the device drafts and what the host is asked for have an account each, so that the losses of one do
not silence the other. Two sums in each, both in plain steps, bound what drafting costs:

- `spare` is _SHARE of the time so far. A look at something else than what seems best is bought from it, at the price of what it is
  expected to lose: whatever is best, steps lose no more than that share against it.
- `credit` is what such drafts have really gained against plain steps, a share of whose time it is given. Without credit
  nothing is drafted: whatever was misjudged, plain decoding is faster by no more than that share, _CREDIT steps, what requests
  bring, and _BUILDING.

What one request's text taught says little of the next one's: who comes new brings a little of both, enough to try again.

What a size promises is the sum of Leviathan et al. (2023, section 3.3), with measured rates in place of given ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

_SHARE = 0.0125
_CREDIT, _START = 5.0, 2.0
"""Steps of credit at most, and at first."""
_NEW_CREDIT, _NEW_SPARE = 0.5, 0.3
"""What a request that is alone has of both when it comes, whatever was owed; in a batch it counts by its share."""
_BUILDING = 16.0
"""Plain steps by which the first steps of a form may, once, take longer than those to come without that being a loss, where one
request is alone; of more rows, whose forms seldom come again, a share."""
_DEAR = 3.0
"""Plain steps from which on the shortest step with drafts leaves a debt that nobody new is forgiven."""
_WARM = 16
"""Plain steps before anything is tried: the first ones of an engine are slow."""
_LOOK, _COLD, _ASKS = 6, 2, 4
"""Steps of a look, those at its begin whose times say little (nothing is verified yet, caches are cold), and questions of one."""
_REST, _LONGEST = 8, 64
"""Steps for which a choice stands, and for which drafting may be off, without being thought over."""
_LEAST, _WORTH = 0.3, 1.03
"""Steps that a look costs at least, as equals need no comparing; what a size must promise, times the tokens of plain steps."""
_MEMORY, _SURPRISE, _FREE = 0.05, 1.5, 0.05
"""Least weight of a reading; times the mean as which a time counts at most, as what disturbs a step says nothing of drafts; what a
question must gain at least."""
_FORGETS = 0.0125
"""Weight of what a node that is not drafted promises by those that are."""
_UNTRIED, _ASKED = 4.0, 2.0
"""Plain steps that one may take whose drafts the device makes and that was never timed, and one that asks the host."""
PRICE = 0.15
"""Plain steps that a question takes, where the device drafts as well and nobody can tell."""
_PRIOR = 0.65
"""Chance that a node is kept if the one above it was, before anything was measured."""


class Reading(NamedTuple):
    """A step that gave each of its rows `gained` tokens. nodes, quoted: nodes a row that the host had drafted, and tokens of those
    gained that were theirs. fresh: it was the first of its form, or recorded for those to come, which will take less. asked:
    questions a row to the host."""

    rows: int
    gained: float
    seconds: float
    nodes: float = 0.0
    quoted: float = 0.0
    fresh: bool = False
    asked: float = 0.0


@dataclass(slots=True)
class _Account:
    """What drafts of one kind may cost. won: what they have gained since somebody last looked."""

    spare: float = 1.0
    credit: float = _START
    won: float = 0.0

    def steps_to(self, price: float, keep: float = 0.0) -> int:
        """Plain steps after which a look can be paid, 0 if it can be now. keep: what must be left to spare."""
        return math.ceil(max(0.0, price + keep - self.spare, price - self.credit) / _SHARE)

    def book(self, took: float, gained: float) -> None:
        """A step took so many plain ones and gave its rows `gained` tokens each."""
        self.won += gained - took
        self.credit = min(_CREDIT, self.credit + gained - took)
        self.spare = min(_CREDIT, self.spare + _SHARE * took)

    def forgive(self, share: float) -> None:
        """Such a share of the requests is new."""
        self.credit += share * max(0.0, _NEW_CREDIT - self.credit)
        self.spare += share * max(0.0, _NEW_SPARE - self.spare)


@dataclass(slots=True)
class _Batch:
    """What is known of steps with about so many rows. plain: mean seconds of a plain one, 0 before any; count: readings. ratio: by
    number of nodes, how many times as long a step is. node: what a node per row adds that the host drafted. asking: what a
    question to a host drafter loses if it is asked to find out. device, host: the accounts of what either drafts. size, left: what
    the device drafts, and steps for which that stands. tried: the size looked at last. building: see _BUILDING."""

    plain: float = 0.0
    count: int = 0
    ratio: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    node: float = 0.05
    asking: float = 0.15
    device: _Account = field(default_factory=_Account)
    host: _Account = field(default_factory=_Account)
    size: int = 0
    left: int = 0
    tried: int = 0
    building: float = 0.0

    def took(self, step: Reading, known: float, most: float) -> tuple[float, bool]:
        """Plain steps that a step took, at most so many, and whether it says what those like it take. known: what they do, which
        is all that counts of a fresh one while there is something for building."""
        took, says = min(step.seconds / max(self.plain, 1e-9), most), not (step.fresh and self.building)
        free = 0.0 if says else min(max(0.0, took - known), self.building)
        self.building -= free
        return took - free, says

    def quoting(self, nodes: float) -> float:
        """Plain steps that it adds to verify so many nodes a row of the host's: to verify at all about as long as two."""
        return self.node * (nodes + 2) if nodes else 0.0


@dataclass(slots=True)
class Pace:
    """sizes: numbers of nodes to choose from, ascending, 0 first. fixed: always the largest, for measurements."""

    sizes: tuple[int, ...]
    fixed: bool = False
    _batches: dict[int, _Batch] = field(default_factory=dict)
    _kept: list[float] = field(default_factory=list)
    _drafts: int = 0

    def __post_init__(self) -> None:
        self._kept = [_PRIOR ** (node + 1) for node in range(self.sizes[-1])]

    def _of(self, rows: int) -> _Batch:
        """Batches within a quarter are alike. A new one begins with what is known of the next larger: with fewer rows a node adds
        less to a step, so what pays there pays here."""
        bits = max(0, rows.bit_length() - 3)
        key = rows >> bits << bits
        if (found := self._batches.get(key)) is not None:
            return found
        larger = min((other for other, one in self._batches.items() if other > key and one.count >= _WARM), default=0)
        known = self._batches.get(larger, _Batch())
        own = replace(known, plain=0.0, ratio=dict(known.ratio), device=_Account(), host=_Account(), left=0)
        own.building = _BUILDING / rows
        self._batches[key] = own
        return own

    def welcome(self, rows: int, new: int) -> None:
        """Of so many rows some are new: what was learned may not hold for them."""
        batch, share = self._of(rows), min(1.0, new / rows)
        batch.host.forgive(share)
        if min((ratio for size, ratio in batch.ratio.items() if size), default=0.0) < _DEAR:
            batch.device.forgive(share)

    # --- what the device drafts ---------------------------------------------------------------------------------------

    def choose(self, rows: int, most: int) -> int:
        """The number of nodes, at most `most`, for the next step with `rows` rows."""
        if self.fixed:
            return min(self.sizes[-1], most)
        batch = self._of(rows)
        if not batch.left:
            self._begin(batch, [size for size in self.sizes if size <= most])
        batch.left -= 1
        return min(batch.size, most)

    def _begin(self, batch: _Batch, sizes: list[int]) -> None:
        """Choose for some steps: what is best, or a look at another size."""
        account = batch.device
        won, account.won = account.won, 0.0
        if account.credit <= 0 or batch.count < _WARM:
            batch.size, batch.left = 0, _REST
            return
        best = max((size for size in sizes if size in batch.ratio), key=lambda size: self._rate(batch, size))
        if self._rate(batch, best) < _WORTH:
            # A look that pays goes on, whatever was kept before it.
            best = batch.size if won > 0 else 0
        other = self._other(batch, sizes, best)
        loses = 1 - self._rate(batch, other) / self._rate(batch, best)
        price = min(_CREDIT, max(_LEAST, _LOOK * loses * batch.ratio.get(other, 1.0)))
        if other != best and (price <= account.spare if best else not account.steps_to(price)):
            account.spare -= price
            batch.size, batch.left, batch.tried = other, _LOOK, other
        else:
            batch.size, batch.left = best, _REST if best else max(_REST, min(_LONGEST, account.steps_to(price)))

    def _other(self, batch: _Batch, sizes: list[int], best: int) -> int:
        """What to look at: a size that was never tried if it could be best, beside none the one that promises most, beside
        another one its neighbours and none in turns."""
        known = [size for size in sizes if size in batch.ratio]
        new = next((size for size in sizes if size not in batch.ratio), 0)
        if new and self._rate(batch, new) > self._rate(batch, best):
            return new
        if not best:
            return max(known[1:], key=lambda size: self._rate(batch, size), default=0)
        place = known.index(best) if best in known else 0
        others = sorted({0, *known[max(0, place - 1) : place + 2]} - {best})
        return next((size for size in others if size > batch.tried), others[0])

    def _rate(self, batch: _Batch, size: int) -> float:
        """Tokens per second that a size promises, against none; one never tried takes no longer than the largest that was."""
        return self.gained(size) / batch.ratio.get(size, max(batch.ratio.values()))

    def gained(self, nodes: int) -> float:
        """Tokens that a row is expected to gain by a step with so many nodes."""
        return 1 + sum(self._kept[:nodes])

    def learn(self, nodes: int, kept: list[int]) -> None:
        """Of the first nodes of a draft those in `kept` were kept; what is not worth verifying is not."""
        self._drafts += 1
        weight, every = max(_MEMORY, 1 / (self._drafts + 4)), self._kept
        every[:nodes] = [own + weight * ((node in kept) - own) for node, own in enumerate(every[:nodes])]
        if nodes == len(every):
            return
        rate = every[nodes - 1] / max(every[nodes - 2] if nodes > 1 else 1.0, 0.01) if nodes in self.sizes else 0.0
        for node in range(nodes, len(every)):
            # Nobody has seen it. A later node is no likelier; bad luck is forgotten, until it is kept as the last one seen is where
            # the one before it was. Else a size that had some would not be chosen again, and nothing would be learned of it.
            above, own = every[node - 1], every[node]
            if own < above * rate:
                own += _FORGETS * (above * rate - own)
            every[node] = own if own < above else above

    # --- what the host drafts -----------------------------------------------------------------------------------------

    def affords(self, rows: int) -> bool:
        """Whether a request may be asked because that pays."""
        return self.fixed or self._of(rows).host.credit > 0

    def look(self, rows: int, *, new: bool) -> int:
        """Begin to ask for a request to find out, if that can be paid: for so many tokens. new: for the first time; others leave
        enough for that."""
        batch, price = self._of(rows), self._price(rows)
        if not self.fixed and (batch.count < _WARM or batch.host.steps_to(price, 0.0 if new else price)):
            return 0
        batch.host.spare -= price
        return _ASKS

    def _price(self, rows: int) -> float:
        return min(_CREDIT, max(_LEAST, _ASKS * self._of(rows).asking) / rows)

    def rest(self, rows: int, *, host: bool, device: bool) -> int:
        """Steps for which drafting is off, when nothing is drafted or asked now."""
        batch, price = self._of(rows), self._price(rows)
        steps = max(_REST, min(_LONGEST, batch.host.steps_to(price, price))) if host else _LONGEST
        if device:
            steps, batch.left = min(steps, batch.left), 0
        return steps

    def worth(self, rows: int, kept: float) -> int:
        """Nodes of a chain that pay for one request, a share `kept` of whose nodes is kept where those before them were: the
        chance of the last one is worth the time that it adds to the step."""
        most, node = self.sizes[-1], self._of(rows).node
        if self.fixed or kept >= 1:
            return most
        return min(most, max(1, int(math.log(min(0.5, max(node, 0.01))) / math.log(max(kept, 0.01)))))

    # --- what is learned of time --------------------------------------------------------------------------------------

    def rested(self, rows: int, seconds: float, steps: int = 1) -> None:
        """So many plain steps, the last of which took `seconds`."""
        batch = self._of(rows)
        batch.count += steps
        batch.plain = min(batch.plain or seconds, _SURPRISE * seconds)  # the first of a process may take seconds
        batch.plain += max(_MEMORY, steps / batch.count) * (min(seconds, _SURPRISE * batch.plain) - batch.plain)
        for account in (batch.device, batch.host):
            account.book(steps, steps * (1.0 + _SHARE))

    def drafted(self, step: Reading, size: int, *, steady: bool, idle: bool) -> float:
        """A step that drafts on the device or verifies; steady: it verified `size` nodes a row, or what of them was worth it, and
        as many were drafted; idle: it verified none. Returns the seconds saved."""
        batch = self._of(step.rows)
        if idle and step.seconds < batch.plain:  # a plain step takes less: what is known of those is old
            batch.plain += 4 * _MEMORY * (step.seconds - batch.plain)
        known = batch.ratio.get(size) if size else max(batch.ratio.values())
        batch.plain = batch.plain or step.seconds / (known or 1.0)
        took, says = batch.took(step, known or 1.0, _SURPRISE * (known or _UNTRIED))
        quoting = batch.quoting(step.nodes) + PRICE * step.asked
        batch.host.book(took, took - quoting + step.quoted)
        batch.device.book(took - quoting, step.gained - step.quoted)
        ruined = size > 0 and batch.device.credit <= 0
        if says and ((steady and batch.left < _LOOK - _COLD) or (ruined and size not in batch.ratio)):
            batch.ratio[size] = took + (1 - 4 * _MEMORY) * (batch.ratio.get(size, took) - took)
        if ruined:  # before the look was over
            batch.left = 0
        return (step.gained - took) * batch.plain

    def asked(self, step: Reading, questions: int, looks: int) -> tuple[float, float]:
        """A step for which the host was asked for so many requests, for `looks` of them to find out, and the device drafted
        nothing. Returns the seconds saved, and the tokens that each question must have gained to pay."""
        batch, each = self._of(step.rows), step.rows / questions
        if not step.nodes and step.seconds < batch.plain:
            # Nothing was said, so a plain step would have taken less: what is known of those is old.
            batch.plain += 4 * _MEMORY * (step.seconds - batch.plain)
        batch.plain = batch.plain or step.seconds
        took, says = batch.took(step, 1 + batch.quoting(step.nodes), _SURPRISE * _ASKED)
        batch.host.book(took, step.gained)
        batch.device.book(took, took)
        if looks == questions:
            batch.asking += _MEMORY * (max(0.0, took - step.gained) * each - batch.asking)
        if step.nodes and says:
            batch.node += 2 * _MEMORY * (max(0.0, took - 1) / (step.nodes + 2) - batch.node)
        return (step.gained - took) * batch.plain, max(_FREE, (took - 1) * each)
