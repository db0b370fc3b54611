"""Mesh: the place of this process among all that run a model. How they connect: parallel.connect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ridgeline.parallel.axis import ALONE, Axis
from ridgeline.parallel.group import Group
from ridgeline.parallel.pipeline import WHOLE, Stage


@dataclass(frozen=True, slots=True)
class Mesh(Axis):
    """Rank of this process among the `size` ranks that share each layer (tensor parallelism), and its place on the other axes.

    context: ranks with the same share of each layer, each of which holds a part of every request's keys and values. stage: the
    layers that this rank holds. sequence: the ranks that share layers divide the residual stream by tokens.
    """

    context: Axis = ALONE
    stage: Stage = WHOLE
    sequence: bool = False

    @property
    def stream(self) -> Axis:
        """The ranks that divide the residual stream."""
        return Axis(self.rank, self.size, self.group) if self.sequence else ALONE

    @property
    def peers(self) -> Callable[[], Any] | None:
        """Group.peers of the ranks that share each layer; None also if the tokens of a step are divided."""
        divided = self.group is None or self.sequence or self.context.size > 1
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


ONE_DEVICE = Mesh()
