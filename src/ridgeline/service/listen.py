"""The addresses that the server listens on, bound before anything slow begins."""

from __future__ import annotations

import errno
import socket

from ridgeline.core.errors import ConfigError


def bind(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of `host`, bound and not yet listening. host "": all interfaces. port 0: free ones.

    Raises ConfigError that names the option when the address is taken, unknown or not of this machine.
    """
    bound: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):  # some resolvers name an address twice
            listener = socket.socket(family, kind, protocol)
            bound.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # the IPv4 address of the same host has a socket of its own
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
    except OSError as error:
        for listener in bound:
            listener.close()
        raise cannot_listen(host, port, error) from error
    return bound


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Why nothing can listen on an address, and which option to change."""
    wrong = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
    return ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): choose another --{wrong}.", param=wrong)
