"""Mesh: the place of this process among all that run a model. How they connect: parallel.connect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.parallel.axis import ALONE, Axis
from ridgeline.parallel.group import Group
from ridgeline.parallel.pipeline import WHOLE, Stage

_UNEVEN = 7
"""Rows by which a rank may exceed its share of any batch."""


@dataclass(frozen=True, slots=True)
class Mesh(Axis):
    """Rank of this process among the `size` ranks that share each layer (tensor parallelism), and its place on the other axes.

    context: ranks with the same share of each layer, each of which holds a part of every request's keys and values. stage: the
    layers that this rank holds. sequence: the ranks that share layers divide the residual stream by tokens. divides_requests: they
    divide it by requests, and each has whole attention (data parallelism); they share the other layers.
    """

    context: Axis = ALONE
    stage: Stage = WHOLE
    sequence: bool = False
    divides_requests: bool = False

    @property
    def stream(self) -> Axis:
        """The ranks that divide the residual stream."""
        divided = self.sequence or self.divides_requests
        return Axis(self.rank, self.size, self.group) if divided else ALONE

    def share(self, rows: int) -> int:
        """Most rows of a rank in a captured decode step of `rows` rows, if ranks divide requests: a quarter more than the mean,
        because ranks seldom have equally many. 0: they do not."""
        return min(rows, -(-5 * rows // (4 * self.size)) + _UNEVEN) * self.divides_requests

    @property
    def attention(self) -> Mesh:
        """The mesh of linears of attention."""
        return replace(self, rank=0, size=1, group=None) if self.divides_requests else self

    @property
    def peers(self) -> Callable[[], Any] | None:
        """Group.peers of the ranks that share each layer; None also if the tokens of a step are divided."""
        divided = self.group is None or self.stream.size > 1 or self.context.size > 1
        return None if divided or self.group is None else self.group.peers

    @property
    def groups(self) -> list[Group]:
        """The groups that this rank is connected by."""
        groups = self.group, self.context.group, self.stage.group, self.stage.host
        return [group for group in groups if group is not None]

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Within it this rank runs alone, see Group.mute."""
        for group in self.groups:
            group.mute(True)
        try:
            yield
        finally:
            for group in self.groups:
                group.mute(False)

    def abort(self) -> None:
        """End what waits for other ranks, see Group.abort."""
        for group in self.groups:
            group.abort()

    def close(self) -> None:
        """Free the connections, see Group.close."""
        for group in self.groups:
            group.close()


ONE_DEVICE = Mesh()
