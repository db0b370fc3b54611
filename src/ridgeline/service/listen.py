"""Binds the server's addresses before any slow work begins."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from typing import NamedTuple

from ridgeline.core.errors import ConfigError


class Probes(NamedTuple):
    """When the system asks whether the other end of a silent connection is there: after `idle_s` seconds, then every `pause_s`.
    After `most` questions without an answer the connection ends. The system's own values find a lost host after two hours."""

    idle_s: int
    pause_s: int
    most: int

    def set(self, sock: socket.socket) -> None:
        """Probe this connection, or all that a listening socket accepts. Not every system has all options."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), self, strict=True):
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


_LAST_DATA = struct.Struct("52xI")
"""Of struct tcp_info (linux/tcp.h): tcpi_last_data_recv, in milliseconds."""

CLIENTS = Probes(60, 10, 6)
"""A client may be out of reach for a while."""


def bind(host: str, port: int) -> list[socket.socket]:
    """One bound socket, not yet listening, for each address of `host`. host "": all interfaces. port 0: free ports.

    Raises ConfigError naming the option if an address is in use, unknown or not of this machine.
    """
    bound: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):  # some resolvers return an address twice
            listener = socket.socket(family, kind, protocol)
            bound.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            CLIENTS.set(listener)
            if family == socket.AF_INET6:  # the host's IPv4 address has a separate socket
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
    except OSError as error:
        for listener in bound:
            listener.close()
        raise cannot_listen(host, port, error) from error
    return bound


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """The error for an address that cannot be used. It names the option to change."""
    option = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
    return ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): choose another --{option}.", param=option)


def waited_s(connection: asyncio.BaseTransport) -> float:
    """Seconds for which a new connection, or the first bytes that came on it, waited in the system. 0.0: it does not say."""
    sock = connection.get_extra_info("socket")
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        return float(_LAST_DATA.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA.size))[0]) / 1000
    except (OSError, struct.error):
        return 0.0
