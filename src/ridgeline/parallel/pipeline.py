"""Pipeline parallelism: runs of layers on different ranks, and what passes between them (Huang et al. 2019, Narayanan et al. 2021).

A stage takes the residual stream of a step from the stage before it and hands it to the next. The last stage draws the tokens and
announces them to the others, because every stage keeps the rows of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ridgeline.core.errors import EngineFailed
from ridgeline.parallel.group import Group

_STREAM, _DRAWN = 1, 2
"""Tags of messages between ranks."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a pipeline. The default is the whole model, which sends nothing.

    layers: which of the model's. ranks: the rank of each stage in the groups, in order, for this place within the stages. group: of
    all ranks, for streams. host: of all ranks, for drawn tokens, which go from host to host: the last stage copies them to the host
    anyway, and on a GPU a message behind the next stream would wait for it.
    """

    index: int = 0
    count: int = 1
    layers: slice = field(default_factory=lambda: slice(None))
    ranks: Sequence[int] = (0,)
    group: Group | None = None
    host: Group | None = None

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def receive(self, stream: torch.Tensor) -> torch.Tensor:
        """Fill `stream` with what the stage before this one sent."""
        self._pass(self.group, lambda group: group.receive(stream, self.ranks[self.index - 1], _STREAM))
        return stream

    def send(self, stream: torch.Tensor) -> None:
        """Send the stream to the next stage. It must not change afterwards."""
        stream = stream.contiguous()
        self._pass(self.group, lambda group: group.send(stream, self.ranks[self.index + 1], _STREAM))

    def announce(self, drawn: torch.Tensor) -> None:
        """Tell the drawn tokens, int32 on the host, to the stages before this one, the last."""
        sent = drawn.clone()
        for rank in self.ranks[:-1]:
            self._pass(self.host, lambda group, rank=rank: group.send(sent, rank, _DRAWN))  # type: ignore[misc]

    def learn(self, drawn: torch.Tensor) -> torch.Tensor:
        """Fill `drawn` with the tokens that the last stage drew, steps in order. Does not wait for the device."""
        received = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=drawn.is_cuda)
        self._pass(self.host, lambda group: group.receive(received, self.ranks[-1], _DRAWN))
        return drawn.copy_(received, non_blocking=True)

    def _pass(self, group: Group | None, message: Callable[[Group], None]) -> None:
        assert group is not None
        try:
            message(group)
        except RuntimeError as error:
            raise EngineFailed(f"Stage {self.index} of {self.count} lost another stage: {error}") from error


WHOLE = Stage()
