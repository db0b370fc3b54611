"""How many nodes to draft: what steps with so many rows gained and took, by the number of nodes.

Nothing is assumed of the hardware: the tokens per second of drafting nothing are measured like those of every other size, so
speculation is off where it does not pay, and tried again from time to time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_SHORTER, _LONGER = 0.3, 0.05
"""Weights of a time below and above the mean so far: whatever disturbs a step makes it longer."""
_SURPRISE = 1.5
"""A time counts as at most so many times the mean."""
_GAIN = 0.1
"""Weight of a new reading of the tokens gained."""
_KNOWN = 3
"""Readings after which a size is known."""
_LOOK = 3
"""Steps of a look at a size that is not the best: the first still verifies what was drafted before."""
_FIRST_WAIT, _LAST_WAIT = 32, 1024
"""Steps between looks, at first and at most; each look that changes nothing doubles them."""
_WORTH = 1.02
"""A size must gain so many times what drafting nothing gains."""


@dataclass(slots=True)
class _Seen:
    """Steps with one number of nodes: mean seconds, mean tokens per row, readings."""

    seconds: float = 0.0
    gained: float = 0.0
    count: int = 0

    def add(self, seconds: float, gained: float) -> None:
        self.count += 1
        if self.count == 1:
            self.seconds, self.gained = seconds, gained
            return
        weight = _SHORTER if seconds < self.seconds else _LONGER
        self.seconds += weight * (min(seconds, _SURPRISE * self.seconds) - self.seconds)
        self.gained += max(_GAIN, 1 / self.count) * (gained - self.gained)

    @property
    def rate(self) -> float:
        """Tokens per second and row."""
        return self.gained / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class _Batch:
    """What is known of steps with about so many rows. best: the size in use. wait: steps until the next look, of those in
    `patience`; look: steps left of one at `tried`."""

    seen: dict[int, _Seen]
    best: int = 0
    wait: int = _FIRST_WAIT
    patience: int = _FIRST_WAIT
    look: int = 0
    tried: int = 0


@dataclass(slots=True)
class Pace:
    """sizes: numbers of nodes to choose from, ascending, 0 first. fixed: always the largest, for measurements."""

    sizes: tuple[int, ...]
    fixed: bool = False
    size: int = 0
    """The number chosen last."""
    _batches: dict[int, _Batch] = field(default_factory=dict)

    def _of(self, rows: int) -> _Batch:
        """Batches within a quarter are alike."""
        bits = max(0, rows.bit_length() - 3)
        key = rows >> bits << bits
        if key not in self._batches:
            self._batches[key] = _Batch({size: _Seen() for size in self.sizes})
        return self._batches[key]

    def choose(self, rows: int) -> int:
        """The number of nodes for the next step with `rows` rows."""
        self.size = self.sizes[-1] if self.fixed else self._choose(self._of(rows))
        return self.size

    def _choose(self, batch: _Batch) -> int:
        known = [size for size in self.sizes if batch.seen[size].count >= _KNOWN]
        new = next((size for size in self.sizes if size not in known), None)
        if new is not None and (not known or self._may_pay(batch, known[-1], new)):
            return new
        if batch.look:
            batch.look -= 1
            return batch.tried
        best = max(known, key=lambda size: batch.seen[size].rate)
        if batch.seen[best].rate < _WORTH * batch.seen[0].rate:
            best = 0
        if best != batch.best:
            batch.best, batch.patience = best, _FIRST_WAIT
        batch.wait -= 1
        if batch.wait <= 0 and len(self.sizes) > 1:
            batch.patience = min(_LAST_WAIT, 2 * batch.patience)
            batch.wait, batch.look = batch.patience, _LOOK
            batch.tried = self._neighbour(best, batch.tried)
        return best

    def _may_pay(self, batch: _Batch, known: int, new: int) -> bool:
        """Whether a larger size could gain more than drafting nothing, if it took no longer than the largest known one and its
        further nodes were kept as often."""
        if not known:
            return True
        seen = batch.seen[known]
        gained = 1 + (seen.gained - 1) * new / known
        return gained / seen.seconds > _WORTH * batch.seen[0].rate

    def _neighbour(self, best: int, tried: int) -> int:
        """The size above `best` or the one below, in turns; of drafting nothing, the smallest."""
        place = self.sizes.index(best)
        near = self.sizes[max(0, place - 1) : place + 2]
        others = [size for size in near if size != best]
        return next((size for size in others if size > tried), others[0])

    def renew(self, rows: int) -> None:
        """A request has begun: what it says may be easier to draft than what was said so far."""
        batch = self._of(rows)
        batch.wait, batch.patience = min(batch.wait, _LOOK), _FIRST_WAIT

    def measure(self, rows: int, size: int, gained: float, seconds: float) -> float:
        """A step for which `size` nodes were chosen gave `rows` rows `gained` tokens each. Returns the seconds saved."""
        seen = self._of(rows).seen
        if size in seen:
            seen[size].add(seconds, gained)
        return seen[0].seconds * gained - seconds if seen[0].count and size else 0.0

    def worth(self, rows: int, kept: float) -> int:
        """Nodes of a chain that pay for one request, a share `kept` of whose nodes is kept where those before them were: the
        chance of the last one is worth the time that it adds to the step."""
        if self.fixed or kept >= 1 or not self.size:
            return self.size
        seen = self._of(rows).seen
        plain, longest = seen[0], seen[self.sizes[-1]]
        if not (plain.count and longest.count):
            return self.size
        added = (longest.seconds / plain.seconds - 1) / self.sizes[-1] if plain.seconds else 0.0
        return min(self.size, max(1, int(math.log(max(added, 0.01)) / math.log(max(kept, 0.01)))))
