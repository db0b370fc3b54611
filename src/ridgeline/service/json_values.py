"""JSON of callers as Python values."""

from __future__ import annotations

import math
from typing import Any

import msgspec


def _read_float(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise ValueError(f"the number {literal[:40]} is out of range")
    return value


_DECODER = msgspec.json.Decoder(float_hook=_read_float)


def decode_json(data: bytes | bytearray | str) -> Any:
    """The value of a JSON text. Raises as msgspec.json.decode does.

    Python reads the numbers with a fraction or an exponent: msgspec takes 30 us for one such as 1e308, so that 2 MB of them
    would stop every stream for seconds.
    """
    return _DECODER.decode(data)
