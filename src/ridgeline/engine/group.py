"""Several processes that share one model (tensor and pipeline parallelism). The first rank has the scheduler. It starts the others,
sends them every plan, and watches them.

All ranks draw the same tokens: noise depends on seed and position alone, and sums over ranks are bitwise equal on each. So the
first rank's results stand for all. Each rank reports a checksum of its tokens, and a difference ends the group. A rank that ends,
stops or differs loses the engine, whose requests end with the reason; the service starts another one.
"""

from __future__ import annotations

import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.engine.hosts import accept_ranks, check_address, first_address, per_host
from ridgeline.engine.loop import Runner
from ridgeline.engine.rank import RankPlan, StartTimes
from ridgeline.engine.rank_link import (
    CONNECT_S,
    Done,
    FromRank,
    Hello,
    Link,
    Lost,
    RankOrder,
    Ready,
    checksum,
    decode_up,
    encode,
    encode_step,
)
from ridgeline.parallel.connect import Meeting, connect_mesh, open_store, start_store
from ridgeline.parallel.mesh import ONE_DEVICE, Mesh
from ridgeline.wire.frames import FrameBuffer

SILENT_S = 4.0
"""Seconds without a message after which a rank that was ready counts as lost."""
_REASON_S, _END_S = 1.0, 5.0
"""Seconds to wait for the reason of a failed step, and for a rank to end."""


class Group:
    """The ranks of an engine. This one is a single rank: nobody follows. As a context it closes the group if its body fails."""

    mesh: Mesh = ONE_DEVICE

    def lead(self, runner: Runner) -> Runner:
        """The runner of all ranks, from the first rank's own. Waits until all ranks have loaded their shares."""
        return runner

    def check(self) -> None:
        """Raise EngineFailed if a rank is lost."""

    def close(self) -> None:
        """End the other ranks."""

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.close()


def start_group(rank: RankPlan, times: StartTimes) -> Group:
    """Start the following ranks of an engine, and connect to them. Raises EngineFailed or ConfigError if one does not start."""
    return Group() if rank.config.ranks == 1 else RankGroup(rank, times)


class Follower:
    """The first rank's record of another rank. process: None on another host, where it ends when its link is closed."""

    def __init__(self, link: Link, process: subprocess.Popen[bytes] | None = None) -> None:
        self.link, self.process = link, process
        self.frames = FrameBuffer()
        self.identity: Mapping[str, str] | None = None
        self.ready = False
        self.heard = time.monotonic()

    def hang_up(self) -> None:
        """Close the connection in both directions, which ends the rank between two steps."""
        with suppress(OSError):  # it has ended
            self.link.sock.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End the rank at once, as far as this host can."""
        self.hang_up()
        if self.process is not None:
            self.process.kill()

    def wait(self, deadline: float) -> None:
        """Wait for the end of its process until time.monotonic() is `deadline`, then kill it."""
        if self.process is not None:
            try:
                self.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.link.close()


class RankGroup(Group):
    """Followers are processes on this host, and on others (`hosts`). A thread reads what they send."""

    def __init__(self, rank: RankPlan, times: StartTimes) -> None:
        check_address(rank.config)
        self.failure = ""
        """Why a rank is lost. Once set, every step fails with it."""
        self._epoch = secrets.token_hex(4)
        self._changed = threading.Condition()
        self._checksums: dict[int, int] = {}
        self._closing = False
        self._folder = Path(tempfile.mkdtemp(prefix="ridgeline-ranks-"))
        size, hosts, address = rank.config.ranks, rank.config.nnodes, first_address(rank.config)
        place = str(self._folder / "store")
        store, place = (open_store(place, size), place) if hosts == 1 else start_store(address)
        meeting = Meeting(store, CONNECT_S, address, rank.device, per_host(rank.config))
        # The device and the sizes that this rank chose, so that all ranks connect alike and agree on every block.
        names = {entry.name for entry in fields(EngineConfig)} - {"steps_in_flight"}
        chosen = {name: value for name, value in rank.plan.chosen.items() if name in names}
        here = replace(rank.config, device=rank.device.type, threads=torch.get_num_threads())
        engine = replace(here, **chosen)  # type: ignore[arg-type]
        model = replace(rank.model, max_model_len=rank.plan.max_len, model=str(rank.folder))
        orders = [RankOrder(model, engine, number, place, self._epoch) for number in range(size)]
        self.followers = [_start(order) for order in orders[1 : len(rank.config.host_ranks)]]
        try:
            links = accept_ranks(rank.config, partial(times.progress, "hosts")) if hosts > 1 else {}
            self.followers += [_order(Follower(links[number]), orders[number]) for number in sorted(links)]
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
            self._wait(lambda follower: follower.identity is not None)
            self._compare(rank.identity)
            self.mesh = connect_mesh(0, rank.stages, rank.config, meeting)
            self.check()  # from here on a lost rank aborts the mesh
        except EngineFailed as error:
            reason = self.reason(error.message)  # a rank that fails while others connect says why
            self.close()
            raise EngineFailed(reason) from None
        except BaseException:
            self.close()
            raise

    def lead(self, runner: Runner) -> Runner:
        self._wait(lambda follower: follower.ready)
        shutil.rmtree(self._folder)  # all are connected: nothing is left behind if this process is killed
        blocking = self.mesh.stage.group is not None and self.mesh.stage.group is self.mesh.stage.host
        return PipelineRunner(runner, self) if blocking else GroupRunner(runner, self)

    def check(self) -> None:
        if self.failure:
            raise EngineFailed(self.failure)

    def send(self, number: int, collected: int, plan: StepPlan) -> None:
        """Send a plan to every follower. Raises EngineFailed."""
        body = encode_step(self._epoch, number, collected, plan)
        try:
            for follower in self.followers:
                follower.link.send(body)
        except OSError as error:
            raise EngineFailed(self.reason(f"a rank does not take step {number}: {error}")) from None

    def reason(self, otherwise: str) -> str:
        """Why a step failed: what the lost rank said, which may arrive a moment after its connection broke."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, _REASON_S)
        return self.failure or otherwise

    def record(self, number: int, result: StepResult) -> None:
        """Compare the first rank's tokens of a step with the others'. Raises EngineFailed."""
        if not self._agrees(number, checksum(result)):
            self._fail(f"rank 0 drew other tokens than another rank in step {number}")
        self._checksums.pop(number - 256, None)
        self.check()

    def close(self) -> None:
        self._closing = True
        self.mesh.abort()
        for follower in self.followers:
            follower.hang_up()
        deadline = time.monotonic() + _END_S
        for follower in self.followers:
            follower.wait(deadline)
        self.mesh.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- watching ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Read what the followers send until one is lost or the group closes."""
        with selectors.DefaultSelector() as selector:
            for number, follower in enumerate(self.followers, 1):
                selector.register(follower.link.sock, selectors.EVENT_READ, (number, follower))
            while not (self.failure or self._closing):
                try:
                    for key, _ in selector.select(SILENT_S / 4):
                        self._read(*key.data)
                except (OSError, ValueError):  # closed meanwhile
                    return
                for number, follower in enumerate(self.followers, 1):
                    if follower.ready and time.monotonic() - follower.heard > SILENT_S:
                        self._fail(f"rank {number} has sent nothing for {SILENT_S:g} s")

    def _read(self, number: int, follower: Follower) -> None:
        try:
            data = follower.link.sock.recv(1 << 16)
        except (ConnectionResetError, TimeoutError):
            data = b""
        follower.heard = time.monotonic()
        if not data:
            if not self._closing:
                self._fail(f"rank {number} has ended{_status(follower.process)}")
            return
        follower.frames.feed(data)
        for body in follower.frames.take():
            self._take(number, follower, decode_up(body))

    def _take(self, number: int, follower: Follower, message: FromRank) -> None:
        if isinstance(message, Lost):
            self._fail(f"rank {number}: {message.reason}")
        elif isinstance(message, Done) and not self._agrees(message.number, message.checksum):
            self._fail(f"rank {number} drew other tokens than another rank in step {message.number}")
        with self._changed:
            if isinstance(message, Hello):
                follower.identity = message.identity
            follower.ready = follower.ready or isinstance(message, Ready)
            self._changed.notify_all()

    def _agrees(self, number: int, value: int) -> bool:
        """Whether the checksum of a rank's step equals the first one that arrived for the step."""
        return self._checksums.setdefault(number, value) == value

    def _fail(self, reason: str) -> None:
        """A rank is lost: end all of them, which also ends a collective in which this rank waits for one. On a GPU the wait is a
        kernel, which only an abort ends."""
        with self._changed:
            self.failure = self.failure or f"A rank of the model is lost: {reason}."
            self._changed.notify_all()
        for follower in self.followers:
            follower.kill()
        self.mesh.abort()

    def _wait(self, reached: Callable[[Follower], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure or all(map(reached, self.followers)))
        self.check()

    def _compare(self, first: Mapping[str, str]) -> None:
        for number, follower in enumerate(self.followers, 1):
            for name, value in first.items():
                other = (follower.identity or {}).get(name)
                if other != value:
                    raise ConfigError(
                        f"Rank {number} has {name} {other}, rank 0 has {value}: all ranks need the same versions and the same "
                        "model."
                    )


class GroupRunner:
    """The runner of all ranks: every plan goes to the followers, then to the first rank's own runner."""

    def __init__(self, runner: Runner, group: RankGroup) -> None:
        self._runner, self._group = runner, group
        self._launched = self._collected = 0

    def launch(self, plan: StepPlan) -> None:
        self._group.check()
        self._group.send(self._launched, self._collected, plan)
        self._launched += 1
        self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        with self._with_reason():
            self._runner.launch(plan)

    @contextmanager
    def _with_reason(self) -> Iterator[None]:
        """If a rank is lost, replace an error by the reason: to this rank, an abort may look as if the device were lost."""
        try:
            yield
        except EngineFailed as error:
            raise EngineFailed(self._group.reason(error.message)) from error

    def collect(self) -> StepResult:
        """Raises EngineFailed for a failed step: another rank may have gone on from it."""
        with self._with_reason():
            result = self._runner.collect()
        if result.error is not None:
            raise EngineFailed(self._group.reason(f"A step failed on rank 0: {result.error}"))
        self._group.record(self._collected, result)
        self._collected += 1
        return result

    def close(self) -> None:
        self._runner.close()
        self._group.close()


class PipelineRunner(GroupRunner):
    """The runner of all stages on CPUs. The last stage, which is the first rank, runs a step when it is collected: until then it
    would wait for the stages before it, which could not be given the next step. A GPU waits for them by itself (GroupRunner)."""

    def __init__(self, runner: Runner, group: RankGroup) -> None:
        super().__init__(runner, group)
        self._sent: deque[StepPlan] = deque()

    def _launch(self, plan: StepPlan) -> None:
        self._sent.append(plan)

    def collect(self) -> StepResult:
        super()._launch(self._sent.popleft())
        return super().collect()


def _start(order: RankOrder) -> Follower:
    """Start a process and send it its order."""
    leading, following = socket.socketpair()
    with following:
        command = [sys.executable, "-m", "ridgeline.engine.follower", str(following.fileno())]
        process = subprocess.Popen(command, pass_fds=[following.fileno()], stdin=subprocess.DEVNULL)
    return _order(Follower(Link(leading), process), order)


def _order(follower: Follower, order: RankOrder) -> Follower:
    """Tell a rank what it is."""
    with suppress(OSError):  # it has ended: the watcher says so
        follower.link.send(encode(order))
    return follower


def _status(process: subprocess.Popen[bytes] | None) -> str:
    """How a process of this host ended, in words; empty if it still runs."""
    if process is None:
        return ", or its host cannot be reached any more"
    try:
        return f" with status {process.wait(_REASON_S)}"
    except subprocess.TimeoutExpired:
        return ""
