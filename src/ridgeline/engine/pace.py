"""How many nodes to draft: how often nodes were kept, against the time that steps took by how many they had.

Nothing is assumed of the hardware: the time of steps without drafts is measured like that of every other size, so
speculation is off where it does not pay, and tried again from time to time. The sums are those of Leviathan et al. (2023,
section 3.3), with measured rates in place of given ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_SHORTER, _LONGER = 0.3, 0.05
"""Weights of a time below and above the mean so far: whatever disturbs a step makes it longer."""
_SURPRISE = 1.5
"""A time counts as at most so many times the mean."""
_KNOWN, _WARM = 3, 16
"""Readings after which the time of a size is known, and that of plain steps: the first ones of an engine are slow."""
_SETTLED = 32
"""Readings after which a time has sunk to where it leans; from then on it moves because steps do."""
_PRIOR = 0.65
"""Chance that a node is kept if the one above it was, before anything was measured."""
_MEMORY = 0.05
"""Least weight of a new draft in the chances that its nodes are kept."""
_NODE = 0.05
"""Of a step's time, what a further node takes, before anything was measured."""
_LOOK = 3
"""Steps of a look at what is not in use: the first still verifies what was drafted before."""
_FIRST_WAIT, _LAST_WAIT = 32, 1024
"""Steps between looks, at first and at most; each look that changes nothing doubles them."""
_HOPELESS = 0.85
"""What promises less, relative to drafting nothing, is not looked at for each new request."""
_REST = 8
"""Steps for which a choice stands without being thought over."""
_WORTH = 1.04
"""A size must promise so many times the tokens per second of drafting nothing."""
_CREDIT, _ADVANCE = 8.0, 2.0
"""Steps that drafting may have lost before it pauses: at first and at most, and after a pause."""
_EARNED = 0.01
"""Steps of credit that a step without drafts gives: the share of a server's time that looks may lose while nothing pays."""
_FIRST_PAUSE, _LAST_PAUSE = 32, 512
"""Steps of a pause; each that was for nothing doubles the next one."""
_WORST = 4.0
"""A step counts as at most so many plain ones: what disturbs one says nothing of drafts."""


@dataclass(slots=True)
class _Mean:
    """Mean seconds and readings."""

    seconds: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count == 1:
            self.seconds = seconds
            return
        weight = _SHORTER if seconds < self.seconds else _LONGER
        self.seconds += weight * (min(seconds, _SURPRISE * self.seconds) - self.seconds)


@dataclass(slots=True)
class _Batch:
    """What is known of steps with about so many rows.

    took: by the number of nodes. node_s: seconds of one more node that the host drafted, None before any. asking: how much
    longer steps are while the host drafts, as a share. best: the size in use. wait: steps until the next look, of those in
    `patience`; look: steps left of one at `tried`. rest: steps for which `best` stands. usual: mean seconds of steps without
    drafts, 0 before any. credit: steps that drafting may still lose. pause: steps without drafts to come; spell: the next one.
    lent: times are those of more rows, right only against each other, until the first of its own.
    """

    took: dict[int, _Mean]
    node_s: float | None = None
    asking: float = 0.0
    best: int = 0
    wait: int = _FIRST_WAIT
    patience: int = _FIRST_WAIT
    look: int = 0
    tried: int = 0
    rest: int = 0
    usual: float = 0.0
    credit: float = _CREDIT
    pause: int = 0
    spell: int = _FIRST_PAUSE
    lent: bool = False

    def known(self) -> list[int]:
        """Sizes whose times are known."""
        return [size for size, mean in self.took.items() if mean.count >= (_KNOWN if size else _WARM)]

    def drift(self, size: int, factor: float) -> None:
        """Steps of the size in use have become longer or shorter, as contexts grow and requests end: so have all others, which
        were last read when it took what it took then."""
        for other, mean in self.took.items():
            if other != size:
                mean.seconds *= factor
        if size:
            self.usual *= factor


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
        """Batches within a quarter are alike."""
        bits = max(0, rows.bit_length() - 3)
        key = rows >> bits << bits
        if key not in self._batches:
            self._batches[key] = self._lend(key)
        return self._batches[key]

    def _lend(self, key: int) -> _Batch:
        """What is known of the next larger batch: with fewer rows a node adds less to a step, so what pays there pays here."""
        larger = [other for other, batch in self._batches.items() if other > key and batch.took[0].count >= _KNOWN]
        if not larger:
            return _Batch({size: _Mean() for size in self.sizes})
        known = self._batches[min(larger)]
        took = {size: _Mean(mean.seconds, min(mean.count, _KNOWN)) for size, mean in known.took.items()}
        return _Batch(took, best=known.best, lent=True)

    # --- what the device drafts --------------------------------------------------------------------------------------

    def choose(self, rows: int) -> int:
        """The number of nodes for the next step with `rows` rows."""
        if self.fixed:
            return self.sizes[-1]
        batch = self._of(rows)
        return 0 if batch.pause else self._choose(batch)

    def _choose(self, batch: _Batch) -> int:
        if batch.rest:
            batch.rest -= 1
            batch.wait -= 1
            return batch.best
        known = batch.known()
        new = next((size for size in self.sizes if size not in known), None)
        if new is not None and (not known or self._may_pay(batch, known[-1], new)):
            return new
        if batch.look:
            batch.look -= 1
            return batch.tried
        best = max(known, key=lambda size: self._rate(batch, size))
        if self._rate(batch, best) < _WORTH * self._rate(batch, 0):
            best = 0
        if best != batch.best:
            batch.best, batch.patience = best, _FIRST_WAIT
        batch.wait -= 1
        if batch.wait <= 0 and len(known) > 1:
            self._begin_look(batch, known, best)
        else:
            batch.rest = min(_REST, max(0, batch.wait - 1))
        return best

    def _begin_look(self, batch: _Batch, known: list[int], best: int) -> None:
        """What is off is looked at when its credit covers what the look is expected to lose (which may have been read in a bad
        moment, so no more than _ADVANCE is asked): while its prospects are poor, that many steps of plain decoding must pass."""
        tried = self._other(batch, known, best)
        loses = batch.took[tried].seconds / max(batch.took[0].seconds, 1e-9) - self.gained(tried)
        if not best and min(_ADVANCE, _LOOK * loses) > batch.credit:
            batch.wait = _FIRST_WAIT
            return
        batch.patience = min(_LAST_WAIT, 2 * batch.patience)
        batch.wait, batch.look, batch.tried = batch.patience, _LOOK, tried

    def gained(self, nodes: int) -> float:
        """Tokens that a row is expected to gain by a step with so many nodes."""
        return 1 + sum(self._kept[:nodes])

    def _rate(self, batch: _Batch, size: int) -> float:
        """Tokens per second and row that steps of a known size promise."""
        return self.gained(size) / max(batch.took[size].seconds, 1e-9)

    def _may_pay(self, batch: _Batch, known: int, new: int) -> bool:
        """Whether a larger size could beat the best one, if it took no longer than the largest known one."""
        if not known:
            return self.gained(new) > _WORTH
        best = max(self._rate(batch, size) for size in self.sizes if size <= known)
        return self.gained(new) / max(batch.took[known].seconds, 1e-9) > _WORTH * best

    def _other(self, batch: _Batch, known: list[int], best: int) -> int:
        """What to look at: beside a size in use its neighbours and none in turns (what plain steps take was read long ago, maybe by
        a machine that was busy), beside none the one that promises most."""
        if not best:
            return max(known[1:], key=lambda size: self._rate(batch, size))
        place = known.index(best)
        others = sorted({0, *known[place - 1 : place + 2]} - {best})
        return next((size for size in others if size > batch.tried), others[0])

    # --- what is learned ---------------------------------------------------------------------------------------------

    def renew(self, rows: int) -> None:
        """A request has begun among `rows`: its text may be easier to draft than what was said so far."""
        batch = self._of(rows)
        known = batch.known()
        if any(self._rate(batch, size) > _HOPELESS * self._rate(batch, 0) for size in known if size):
            batch.wait, batch.patience = min(batch.wait, _LOOK), _FIRST_WAIT

    def learn(self, offered: int, kept: list[int]) -> None:
        """Of a draft's first `offered` nodes those in `kept` were kept."""
        self._drafts += 1
        weight = max(_MEMORY, 1 / (self._drafts + 4))
        hits = set(kept)
        for node in range(offered):
            self._kept[node] += weight * ((node in hits) - self._kept[node])

    def measure(self, rows: int, size: int, gained: float, seconds: float) -> float:
        """A step for which `size` nodes were drafted gave `rows` rows `gained` tokens each. Returns the seconds saved."""
        batch = self._of(rows)
        took = batch.took
        if size in took:
            before = took[size].seconds
            if batch.lent and before:
                batch.lent = False
                batch.drift(size, seconds / before)
                took[size].seconds = seconds
            took[size].add(seconds)
            if size == batch.best and took[size].count > _SETTLED:
                batch.drift(size, took[size].seconds / before)
        return took[0].seconds * gained - seconds if took[0].count and size else 0.0

    # --- what it all costs -------------------------------------------------------------------------------------------

    def affords(self, rows: int) -> bool:
        """Whether drafting has not lost too much lately, with about so many rows."""
        return self.fixed or not self._of(rows).pause

    def settle(self, rows: int, drafting: bool, gained: float, seconds: float) -> None:
        """A step gave `rows` rows `gained` tokens each. drafting: something was drafted, asked or verified in it. What drafting
        loses against plain steps is charged: whatever misjudges it, in the end it costs no more than its credit."""
        batch = self._of(rows)
        if not drafting:
            if not batch.usual:
                batch.usual = seconds
            # Beside drafts plain steps are few.
            weight = max(_LONGER if not batch.best else 4 * _LONGER, 1 / (1 + batch.took[0].count))
            batch.usual += weight * (min(seconds, _SURPRISE * batch.usual) - batch.usual)
            batch.credit = min(_CREDIT, batch.credit + _EARNED)
            batch.pause = max(0, batch.pause - 1)
        elif batch.usual:
            batch.credit = min(_CREDIT, batch.credit + gained - min(seconds / batch.usual, _WORST))
            if batch.credit < 0:
                batch.credit, batch.pause = _ADVANCE, batch.spell
                batch.spell = min(_LAST_PAUSE, 2 * batch.spell)
            elif batch.credit == _CREDIT:
                batch.spell = _FIRST_PAUSE

    # --- what the host drafts ----------------------------------------------------------------------------------------

    def asked(self, rows: int) -> float:
        """How much longer steps with `rows` rows are while the host drafts, as a share of one without: what it must gain."""
        return self._of(rows).asking

    def measure_host(self, rows: int, nodes: float, gained: float, seconds: float) -> float:
        """A step for which the host was asked, and which verified `nodes` nodes per row of its. Returns the seconds saved."""
        batch = self._of(rows)
        plain = batch.took[0]
        if not plain.count:
            return 0.0
        batch.asking += _MEMORY * (min(seconds / max(plain.seconds, 1e-9), 2 * _SURPRISE) - 1 - batch.asking)
        if not nodes:
            return 0.0
        added = max(0.0, min(seconds, _SURPRISE * plain.seconds) - plain.seconds) / max(nodes, 0.1)
        batch.node_s = added if batch.node_s is None else batch.node_s + 0.1 * (added - batch.node_s)
        return plain.seconds * gained - seconds

    def worth(self, rows: int, kept: float) -> int:
        """Nodes of a chain that pay for one request, a share `kept` of whose nodes is kept where those before them were: the
        chance of the last one is worth the time that it adds to the step."""
        most = self.sizes[-1]
        if self.fixed or kept >= 1:
            return most
        batch = self._of(rows)
        plain = batch.took[0]
        share = batch.node_s / plain.seconds if batch.node_s is not None and plain.seconds else _NODE
        return min(most, max(1, int(math.log(min(0.5, max(share, 0.01))) / math.log(max(kept, 0.01)))))
