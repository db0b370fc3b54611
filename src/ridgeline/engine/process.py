"""Main function of the engine process. It sends Loading, then Ready or Failed, and runs the loop until the service stops it or
disconnects."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time

from ridgeline.core.errors import EngineFailed, RidgelineError
from ridgeline.core.logs import configure_logging
from ridgeline.engine.assemble import assemble
from ridgeline.engine.engine import Engine
from ridgeline.hardware.probe import process_age_s
from ridgeline.wire.config import EngineOrder
from ridgeline.wire.inbox import Inbox
from ridgeline.wire.messages import Failed, Heartbeat, Loading, Ready

HEARTBEAT_S = 0.5
"""Seconds between two Heartbeat messages, which /health reads."""

log = logging.getLogger(__name__)


def run(sock: socket.socket, config: EngineOrder) -> int:
    """Serve until the service stops the engine or disconnects; returns the exit status."""
    configure_logging(logging.INFO)
    inbox = Inbox(sock)
    try:
        engine = assemble(
            config.model, config.engine, lambda *at: inbox.report(Loading(*at)), process_age_s(), config.pools
        )
        # The objects of the start-up live as long as the engine. A full collection over torch's objects takes a tenth of a second.
        # 3 % of the objects are garbage that is never freed.
        gc.freeze()
        gc.enable()
        inbox.send(Ready(engine.setup.facts))
        serve(engine, inbox)
    except RidgelineError as error:
        inbox.send(Failed(error.message, type(error).__name__))
        inbox.close(linger_s=2.0)
        return 2
    except Exception as error:
        log.exception("the engine ends because of an unexpected error")
        inbox.send(Failed(f"{type(error).__name__}: {error}"))
        inbox.close(linger_s=2.0)
        return 1
    inbox.close(linger_s=2.0)
    return 0


def serve(engine: Engine, inbox: Inbox) -> None:
    """Run the loop while there is work, sleep while there is none, and send a Heartbeat every HEARTBEAT_S seconds."""
    ended = threading.Event()
    pulse = threading.Thread(target=_beat, args=(engine, inbox, ended), daemon=True)
    pulse.start()
    try:
        while not (engine.stopped or inbox.gone):
            for message in inbox.drain():
                for answer in engine.handle(message):
                    inbox.send(answer)
            deltas = engine.turn()
            if deltas is not None:
                started = time.perf_counter()
                inbox.send(deltas)
                engine.reply_s += time.perf_counter() - started
            elif (wait_seconds := engine.wait_seconds()) > 0:
                inbox.wait(min(wait_seconds, HEARTBEAT_S))
    finally:
        ended.set()
        pulse.join()
    engine.close()


def _beat(engine: Engine, inbox: Inbox, ended: threading.Event) -> None:
    """Send a Heartbeat with the number of turns every HEARTBEAT_S seconds, also during a long step.

    Ends the process if the loop waits in a collective for a rank that is lost. On this host such a rank is killed, which ends the
    collective; a host that is gone without a word does not.
    """
    while not ended.wait(HEARTBEAT_S):
        inbox.send(Heartbeat(engine.loop.turns, not engine.idle))
        try:
            engine.setup.check()
        except EngineFailed as error:
            if not ended.wait(HEARTBEAT_S):
                inbox.send(Failed(error.message, type(error).__name__))
                inbox.close(linger_s=HEARTBEAT_S)
                os._exit(2)
