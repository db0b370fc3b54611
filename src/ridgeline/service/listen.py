"""Binds the server's addresses before any slow work begins."""

from __future__ import annotations

import errno
import socket

from ridgeline.core.errors import ConfigError


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
