"""How many nodes to draft: from how often nodes were kept, and how long steps took."""

from __future__ import annotations

from dataclasses import dataclass, field

_SOON, _LATE = 0.3, 0.1
"""Weights of a new reading below and above the mean so far: whatever disturbs a step makes it longer."""
_SURPRISE = 1.5
"""A reading counts as at most so many times the mean."""
_KNOWN = 3
"""Readings after which a mean is trusted."""
_FIRST_LOOK, _LAST_LOOK = 32, 1024
"""Steps until a size that did not pay is tried again: at first, and at most (each failure doubles them)."""
_PRIOR = 0.5
"""Chance that a node is kept if the one before it was, before anything was measured."""
_MEMORY = 0.02
"""Weight of a new draft in the chances that its nodes are kept."""
_WORTH = 1.01
"""A size must promise so many times the tokens per second of drafting nothing."""


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0

    def add(self, reading: float) -> None:
        self.count += 1
        if self.count == 1:
            self.value = reading
            return
        weight = _SOON if reading < self.value else _LATE
        self.value += weight * (min(reading, _SURPRISE * self.value) - self.value)


@dataclass(slots=True)
class _Rows:
    """What is known of steps with about so many rows. seconds: by nodes per row. wait, patience: steps until the next look at
    a size that does not pay, and how many it was made to wait."""

    seconds: dict[int, _Mean] = field(default_factory=dict)
    wait: int = _FIRST_LOOK
    patience: int = _FIRST_LOOK
    trying: int = 0
    tries: int = 0


class Pace:
    """sizes: the numbers of nodes to choose from, ascending, 0 among them; all are measured. fixed: always the largest."""

    def __init__(self, sizes: tuple[int, ...], *, fixed: bool = False) -> None:
        self.most = sizes[-1]
        self._sizes, self._fixed = sizes, fixed
        self._kept = {name: [_PRIOR ** (node + 1) for node in range(self.most)] for name in ("host", "device")}
        self._rows: dict[int, _Rows] = {}
        self._now = self._of(1)

    # --- what is known ----------------------------------------------------------------------------------------------

    def _of(self, rows: int) -> _Rows:
        """Batches of alike size, within a quarter."""
        bits = max(0, rows.bit_length() - 3)
        return self._rows.setdefault(rows >> bits << bits, _Rows())

    def learn(self, source: str, offered: int, kept: list[int], luck: float) -> float:
        """A draft of `offered` nodes came back. Returns the request's luck after it."""
        chances, hits = self._kept[source], set(kept)
        hoped = sum(chances[:offered])
        for node in range(offered):
            chances[node] += _MEMORY * ((node in hits) - chances[node])
        return min(2.0, max(0.1, luck + 0.1 * (len(kept) / max(hoped, 0.05) - luck)))

    def measure(self, rows: int, nodes: float, ahead: int, gained: float, seconds: float) -> float:
        """A step gave `rows` rows `gained` tokens each; `nodes` per row were verified and `ahead` drafted. Returns the seconds
        saved."""
        self._now = known = self._of(rows)
        size = round(nodes)
        if ahead in (0, size):
            known.seconds.setdefault(size, _Mean()).add(seconds)
        plain = known.seconds.get(0)
        if not nodes or plain is None or plain.count < _KNOWN:
            return 0.0
        return plain.value * gained - seconds

    # --- what to do -------------------------------------------------------------------------------------------------

    def ahead(self, rows: int) -> int:
        """Nodes that the device drafts at the end of a step with `rows` rows that draw."""
        self._now = self._of(rows)
        return self.nodes("device", 1.0)

    def nodes(self, source: str, luck: float) -> int:
        """The size that promises most, or one that must be looked at."""
        if self._fixed:
            return self.most
        known = self._now
        for size in self._sizes:
            mean = known.seconds.get(size)
            if mean is None or mean.count < _KNOWN:
                return self._unknown(size, source, luck)
        best = max(self._sizes, key=lambda size: self._rate(known, size, source, luck))
        if best and self._rate(known, best, source, luck) > _WORTH * self._rate(known, 0, source, luck):
            return best
        return self._look_again(known)

    def _unknown(self, size: int, source: str, luck: float) -> int:
        """A size whose time is not known is tried at once, unless so few are kept that hardly any time could be short enough."""
        return size if luck * self._kept[source][0] > 0.03 or size == 0 else 0

    def _look_again(self, known: _Rows) -> int:
        """Nothing pays: draft nothing, but look at the smallest size from time to time, a few steps long."""
        if known.trying:
            known.trying -= 1
            return self._sizes[min(1, len(self._sizes) - 1)]
        known.wait -= 1
        if known.wait <= 0:
            known.patience = min(_LAST_LOOK, 2 * known.patience)
            known.wait, known.trying = known.patience, 2
        return 0

    def _rate(self, known: _Rows, size: int, source: str, luck: float) -> float:
        """Tokens per second and row that steps with `size` nodes promise."""
        return (1 + luck * sum(self._kept[source][:size])) / known.seconds[size].value
