"""Decodes JSON from callers."""

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

    Numbers with a fraction or an exponent are parsed by Python: msgspec takes 30 us for a number such as 1e308, so 2 MB of them
    would block all streams for seconds.
    """
    return _DECODER.decode(data)


def encode_arguments(text: str) -> msgspec.Raw:
    """The arguments of a tool call as a JSON object on one line: {} for text that is incomplete or something else.

    The text is the model's: it may be nested deeper than JSON is read.
    """
    try:
        value = decode_json(text)
        return msgspec.Raw(msgspec.json.encode(value if isinstance(value, dict) else {}))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return msgspec.Raw(b"{}")
