"""Messages and collectives between CPU processes, with gloo."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed

from ridgeline.parallel.group import Group


class GlooGroup(Group):
    """A process group of gloo, without the default group of torch.distributed.

    address: of this host, at which the other ranks reach this one. timeout_s: of connecting, and of each collective. Raises
    RuntimeError if a rank cannot be reached.
    """

    def __init__(
        self, rank: int, size: int, store: torch.distributed.Store, timeout_s: float, address: str = "127.0.0.1"
    ) -> None:
        gloo = cast(
            Any, torch.distributed.ProcessGroupGloo
        )  # torch's stubs do not declare its options and its base class
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        store.set_timeout(options._timeout)
        # Without an address, gloo asks for that of the host's name, which need not be one that other hosts reach.
        options._devices = [gloo.create_device(hostname=address)]
        self._group = gloo(store, rank, size, options)
        self._muted = False
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        """Messages that the other side may not have received yet, which must stay in memory."""

    def all_reduce(self, x: torch.Tensor) -> None:
        self._run(lambda: self._group.allreduce([x]))

    def all_gather(self, parts: torch.Tensor, x: torch.Tensor) -> None:
        self._run(lambda: self._group.allgather([list(parts.unbind(0))], [x]), lambda: parts.copy_(x))

    def exchange(self, received: torch.Tensor, x: torch.Tensor) -> None:
        self._run(lambda: self._group.alltoall_base(received, x, [], []), lambda: received.copy_(x))

    def send(self, x: torch.Tensor, rank: int, tag: int) -> None:
        sending = self._sending
        while sending and sending[0][0].is_completed():
            sending.popleft()
        if not self._muted:
            sending.append((self._group.send([x], rank, tag), x))

    def receive(self, x: torch.Tensor, rank: int, tag: int) -> None:
        self._run(lambda: self._group.recv([x], rank, tag), x.zero_)

    def mute(self, muted: bool) -> None:
        self._muted = muted

    def abort(self) -> None:
        """Nothing: the connection to a process that ends breaks, and gloo has a timeout."""

    def close(self) -> None:
        """Nothing: torch frees the connections with the group, whose threads end at once."""

    def _run(self, begin: Callable[[], Any], alone: Callable[[], object] = lambda: None) -> None:
        """Begin a collective and wait for it. alone: what a muted group does."""
        if self._muted:
            alone()
        else:
            begin().wait()
