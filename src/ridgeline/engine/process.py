"""The engine process: `python -m ridgeline.engine.process FD`, where FD is one end of a socket pair.

The first frame that comes in is the configuration; Loading, then Ready or Failed go out; then the heart beats until the
service says stop or has gone.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
import time

from ridgeline.core.errors import RidgelineError
from ridgeline.engine.assemble import assemble
from ridgeline.engine.engine import Engine
from ridgeline.wire.config import receive_config
from ridgeline.wire.inbox import Inbox
from ridgeline.wire.messages import Beat, Failed, Loading, Ready

BEAT_S = 0.5
"""Longest silence while idle: /health reads the beats."""
STALL_S = 0.002
"""Pause while requests wait for a batch to open."""

log = logging.getLogger(__name__)


def main(fd: int) -> int:
    """Serve until the service has gone; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    config = receive_config(sock)
    inbox = Inbox(sock)
    try:
        engine = assemble(
            config.model, config.engine, lambda stage, done, total: inbox.send(Loading(stage, done, total))
        )
        inbox.send(Ready(engine.setup.facts))
        gc.collect()
        gc.freeze()
        serve(engine, inbox)
    except RidgelineError as error:
        inbox.send(Failed(error.message, type(error).__name__))
        inbox.close(linger_s=2.0)
        return 2
    except Exception as error:
        log.exception("the engine ends")
        inbox.send(Failed(f"{type(error).__name__}: {error}"))
        inbox.close(linger_s=2.0)
        return 1
    inbox.close(linger_s=2.0)
    return 0


def serve(engine: Engine, inbox: Inbox) -> None:
    """Turn the heart while there is work, beat while there is none."""
    last_beat = 0.0
    while not (engine.stopped or inbox.gone):
        for message in inbox.drain():
            for answer in engine.handle(message):
                inbox.send(answer)
        news = engine.turn()
        if news is not None:
            inbox.send(news)
        elif engine.idle or engine.stalled:
            if time.monotonic() - last_beat >= BEAT_S:
                last_beat = time.monotonic()
                inbox.send(Beat(engine.loop.scheduler.last_step, not engine.idle))
            inbox.wait(BEAT_S if engine.idle else STALL_S)
    engine.loop.runner.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sys.exit(main(int(sys.argv[1])))
