"""Pages over TCP: what client and server say after their handshake (core.handshake). Integers are little endian.

    client: REQUEST   number of pages, then for each its number and its stamp
    server: PIECE     first page, number of pages; their bytes; one byte for each: 1 if it kept its stamp until it was sent

The stamp is compared after the bytes have left, as in kv.peer_pools: a page that was reused meanwhile does not count. Both ends
know the bytes of a page: the handshake covers them.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

COUNT = struct.Struct("<I")
PAGE = struct.Struct("<II")
PIECE = struct.Struct("<II")
MOST_PAGES = 1 << 16
"""Pages of a request."""
PIECE_BYTES = 4 << 20
"""Bytes that are sent between two looks at the stamps."""
_VECTORS = 512
"""Buffers of one call, below IOV_MAX (1024)."""


def topic(page_bytes: int) -> bytes:
    """What a connection is for."""
    return b"pages" + COUNT.pack(page_bytes)


def send_all(sock: socket.socket, parts: Sequence[memoryview | bytes]) -> None:
    """Send buffers in order, without a copy."""
    views = [memoryview(part).cast("B") for part in parts]
    while views:
        sent = sock.sendmsg(views[:_VECTORS])
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]
