"""A following rank: `python -m ridgeline.engine.follower FD`, where FD is one end of a socket pair, or on another host
`python -m ridgeline.engine.follower HOST:PORT RANK FOLDER`, with the address of the first rank and the model's folder on this host.

It loads its share of the model and runs the plans that the first rank sends, in their order. It ends when the first rank closes the
socket, and at its own first failed step: ranks that continued differently would compute different keys and values.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress

from msgspec.structs import replace

from ridgeline.core.errors import EngineFailed, RidgelineError
from ridgeline.core.logs import configure_logging
from ridgeline.engine.hosts import UNREACHABLE, attach, first_address, per_host
from ridgeline.engine.rank import StartTimes, load_rank, plan_rank
from ridgeline.engine.rank_link import (
    BEAT_S,
    CONNECT_S,
    Beat,
    Done,
    Hello,
    Link,
    Lost,
    Ready,
    checksum,
    decode_order,
    decode_step,
    encode,
)
from ridgeline.engine.runner import Runner
from ridgeline.engine.stage import EarlierRunner
from ridgeline.parallel.connect import Meeting, connect_mesh, open_store

log = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Follow until the first rank closes the socket; returns the exit status."""
    configure_logging(logging.INFO)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if len(arguments) == 1:
        link, folder = Link(socket.socket(fileno=int(arguments[0]))), None
    else:
        address, rank, folder = arguments
        try:
            link = attach(address, int(rank))
        except EngineFailed:
            return UNREACHABLE
    try:
        _serve(link, folder)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the first rank has closed the socket
    except RidgelineError as error:
        reason = error.message
    except Exception as error:
        log.exception("a following rank ends because of an unexpected error")
        reason = f"{type(error).__name__}: {error}"
    else:
        return 0
    if folder is not None:  # the first host says it, too, but this one has the cause
        log.error("rank %s of this host ends: %s", rank, reason)
    with suppress(OSError):
        link.send(encode(Lost(reason)))
    return 1


def _serve(link: Link, folder: str | None) -> None:
    """Run what the first rank orders. folder: of the model; None: the first rank's."""
    body = link.receive()
    if body is None:
        log.warning("host 0 gave no order: it has ended, or it has other sizes or another host with this --node-rank")
        return
    order = decode_order(body)
    address = first_address(order.engine)  # the rank may be on the first host
    if folder is not None:
        address = link.sock.getsockname()[0]
        order = replace(order, model=dataclasses.replace(order.model, model=folder))
    times = StartTimes(0.0, lambda stage, done, total: None)
    rank = plan_rank(order.model, order.engine, times, number=order.rank)
    link.send(encode(Hello(rank.identity)))
    store = open_store(order.store, order.engine.ranks)
    meeting = Meeting(store, CONNECT_S, address, rank.device, per_host(order.engine))
    mesh = connect_mesh(order.rank, rank.stages, order.engine, meeting)
    loaded = load_rank(rank, mesh, times)
    gc.freeze()
    link.send(encode(Ready()))
    threading.Thread(target=_beat, args=(link,), daemon=True).start()
    follow(link, loaded.runner, order.epoch, rank.plan.steps_in_flight)
    mesh.close()


def follow(link: Link, runner: Runner, epoch: str, steps_in_flight: int) -> None:
    """Run the plans that arrive until the socket is closed. Raises EngineFailed at a step that failed or was not the next one.

    A plan may need the tokens of the steps that the first rank had collected. A stage before the last learns them and launches at
    once; it collects these steps later, because its device is busy with a step in between.
    """
    number = collected = 0
    while (body := link.receive()) is not None:
        plan, needed = decode_step(body, epoch, number)
        if isinstance(runner, EarlierRunner):
            runner.learn(needed - collected)
        else:
            while collected < needed:
                collected = _collect(link, runner, collected)
        runner.launch(plan)
        number += 1
        while number - collected > steps_in_flight:
            collected = _collect(link, runner, collected)
    runner.close()


def _collect(link: Link, runner: Runner, number: int) -> int:
    """Report the oldest step, with this number. Returns the next number."""
    result = runner.collect()
    if result.error is not None:
        raise EngineFailed(f"step {number} failed: {result.error}")
    link.send(encode(Done(number, checksum(result))))
    return number + 1


def _beat(link: Link) -> None:
    """Send a Beat every BEAT_S seconds. Ends the process when the first rank is gone, even in the middle of a step."""
    pause = threading.Event()
    while not pause.wait(BEAT_S):
        try:
            link.send(encode(Beat()))
        except OSError:
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
