"""Checks the header `Host` against the names by which callers may address the server.

A page of another site can point its host name at 127.0.0.1 (DNS rebinding). The browser then treats the server's answers as
that site's. Only `Host` shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from ridgeline.core.errors import ConfigError, HostNotAllowed

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?")
_HEADER = re.compile(r"(?P<name>\[[^\]]*\]|[^:\[\]]*)(:\d*)?")


def is_loopback(name: str) -> bool:
    """Whether a host name or address (IPv6 without brackets) is a loopback of this machine. Does not query a name server."""
    if name.lower() == "localhost":
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


@dataclass(frozen=True, slots=True)
class Hosts:
    """names: allowed in addition to loopback, in lower case, IPv6 without brackets. checked: whether `Host` is checked."""

    names: frozenset[str]
    checked: bool

    @classmethod
    def parse(cls, text: str, listen: str) -> Hosts:
        """Read the option allowed_hosts. listen: the address the server listens on.

        Raises ConfigError for an entry that is not a host name.
        """
        names = frozenset(_read(name) for name in text.split(",")) if text.strip() else frozenset()
        return cls(names, "*" not in names and (bool(names) or is_loopback(listen)))

    def check(self, header: str) -> None:
        """Raises HostNotAllowed for a value of `Host` (or the authority of a request's target) that is not allowed."""
        if self.checked and not self._allows(header):
            raise HostNotAllowed(
                f"The host {header[:100]!r} is not allowed: call the server as localhost, or add the name to --allowed-hosts.",
                param="host",
            )

    def _allows(self, header: str) -> bool:
        parts = _HEADER.fullmatch(header.strip().lower())
        if parts is None:
            return False
        name = parts["name"].strip("[]").removesuffix(".")
        return is_loopback(name) or name in self.names


def _read(entry: str) -> str:
    """An entry of allowed_hosts, normalized for comparison."""
    name = entry.strip().lower()
    if name == "*" or _NAME.fullmatch(name):
        return name
    try:
        return str(ip_address(name.strip("[]")))
    except ValueError:
        pass
    raise ConfigError(
        f"allowed_hosts has {entry.strip()!r}: give host names without scheme and port, as in chat.example.org, "
        "separated by commas, or * for all.",
        param="allowed_hosts",
    )
