"""Entry point of the engine process: `python -m ridgeline.engine FD [CONFIG]`, where FD is one end of a connection. The first
frame received, from CONFIG if it is given, is the configuration. The GPU context is opened before torch is imported."""

from __future__ import annotations

import gc
import signal
import socket
import sys
from importlib import import_module

from ridgeline.core.bytecode import keep_bytecode
from ridgeline.hardware.context import open_context
from ridgeline.wire.config import receive_config


def main(fd: int, config_fd: int | None = None) -> int:
    """Serve until the service stops the engine or disconnects; returns the exit status."""
    keep_bytecode("torch", "triton", "numpy")
    gc.disable()  # objects of the start-up are permanent: collections took a seventh of the import time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    config = receive_config(sock if config_fd is None else socket.socket(fileno=config_fd))
    if config.engine.device != "cpu":
        open_context(number=config.pools.local)
    return int(import_module("ridgeline.engine.process").run(sock, config))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
