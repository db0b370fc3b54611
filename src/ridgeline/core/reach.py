"""Error messages for a server that cannot be reached."""

from __future__ import annotations

import os
import socket
import ssl
from http.client import HTTPException
from urllib.error import URLError

from ridgeline.core.errors import ConfigError


def reason(error: Exception) -> str:
    """The cause of a failed connection or request, without a full stop."""
    cause: object = error.reason if isinstance(error, URLError) else error  # urllib wraps the exception, or its message
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    if isinstance(cause, socket.gaierror):
        return "the host name is not known"
    if isinstance(cause, ssl.SSLError):
        return f"TLS failed ({cause})"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno).lower()
    if isinstance(cause, HTTPException):
        return f"the answer is not HTTP ({type(cause).__name__})"
    return str(cause) or type(cause).__name__


def unreachable(url: str, error: Exception) -> ConfigError:
    """The error for a server that does not answer."""
    return ConfigError(
        f"Cannot reach {url}: {reason(error)}. Start the server, or give the address of one that runs.", param="url"
    )
