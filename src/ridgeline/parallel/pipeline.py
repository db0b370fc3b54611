"""Pipeline parallelism: runs of layers on different ranks, and what passes between them (Huang et al. 2019, Narayanan et al. 2021).

A stage takes the residual stream of a step from the stage before it and hands it to the next. The last stage draws the tokens and
announces them to the others, because every stage keeps the rows of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed

from ridgeline.core.errors import EngineFailed

_STREAM, _DRAWN = 1, 2
"""Tags of messages between ranks."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a pipeline. The default is the whole model, which sends nothing.

    layers: which of the model's. ranks: the rank of each stage in `group`, in order, for this place within the stages.
    """

    index: int = 0
    count: int = 1
    layers: slice = field(default_factory=lambda: slice(None))
    ranks: Sequence[int] = (0,)
    group: torch.distributed.ProcessGroup | None = None
    _sending: deque[tuple[Any, torch.Tensor]] = field(default_factory=deque, compare=False, repr=False)
    """Messages that the other side may not have received yet, which must stay in memory."""

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def receive(self, stream: torch.Tensor) -> torch.Tensor:
        """Fill `stream` with what the stage before this one sent."""
        return self._take(stream, self.index - 1, _STREAM)

    def send(self, stream: torch.Tensor) -> None:
        """Send the stream to the next stage. It must not change afterwards."""
        self._give(stream, self.index + 1, _STREAM)

    def announce(self, drawn: torch.Tensor) -> None:
        """Tell the drawn tokens, int32, to the stages before this one, the last."""
        for stage in range(self.count - 1):
            self._give(drawn.clone(), stage, _DRAWN)

    def learn(self, drawn: torch.Tensor) -> torch.Tensor:
        """Fill `drawn` with the tokens that the last stage drew, steps in order."""
        return self._take(drawn, self.count - 1, _DRAWN)

    def _give(self, tensor: torch.Tensor, stage: int, tag: int) -> None:
        sending = self._sending
        while sending and sending[0][0].is_completed():
            sending.popleft()
        tensor = tensor.contiguous()
        sending.append((self._pass(lambda group: group.send([tensor], self.ranks[stage], tag)), tensor))

    def _take(self, tensor: torch.Tensor, stage: int, tag: int) -> torch.Tensor:
        self._pass(lambda group: group.recv([tensor], self.ranks[stage], tag).wait())
        return tensor

    def _pass(self, message: Callable[[Any], Any]) -> Any:
        try:
            return message(self.group)
        except RuntimeError as error:
            raise EngineFailed(f"Stage {self.index} of {self.count} lost another stage: {error}") from error


WHOLE = Stage()
