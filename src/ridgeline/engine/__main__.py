"""The engine's process: `python -m ridgeline.engine FD`, where FD is one end of a socket pair. The first frame that comes in
is the configuration; what it asks for and waits for nothing begins before torch is imported."""

from __future__ import annotations

import gc
import signal
import socket
import sys
from importlib import import_module

from ridgeline.core.bytecode import keep_bytecode
from ridgeline.hardware.context import open_context
from ridgeline.wire.config import receive_config


def main(fd: int) -> int:
    """Serve until the service has gone; returns the exit status."""
    keep_bytecode("torch")
    gc.disable()  # what a start makes stays: looking through it for garbage took a seventh of the imports
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    config = receive_config(sock)
    if config.engine.device != "cpu":
        open_context()
    return int(import_module("ridgeline.engine.process").run(sock, config))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
