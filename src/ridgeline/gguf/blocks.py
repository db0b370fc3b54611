"""Blocks of ggml's types to numbers.

A block stores neighbouring elements of a row with their scales. Source: ggml-quants.c of llama.cpp. K types: a super-block of 256
elements has a float16 scale (and, in Q4_K and Q5_K, a float16 minimum), and each 16 or 32 of them integer multiples of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Blocks = torch.Tensor
"""uint8 [blocks, bytes of a block]."""
_CHUNK = 1 << 18
"""Blocks that are converted at a time, which bounds temporary memory."""


def dequantize(kind: str, blocks: Blocks) -> torch.Tensor:
    """float32 [blocks, elements of a block]. kind: a key of READERS."""
    parts = [READERS[kind](chunk) for chunk in blocks.split(_CHUNK)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def signed_codes(kind: str, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [blocks, 32], scales float16 [blocks, 1]) of Q8_0 or Q4_0. weight = (code - 128 or 8) * scale."""
    scales, codes = _half(blocks, 0).half(), blocks[:, 2:]
    # An int8 plus 128 is its bits with the highest one inverted.
    return (codes ^ 0x80 if kind == "Q8_0" else _nibbles(codes)), scales


def _half(blocks: Blocks, start: int) -> torch.Tensor:
    """The float16 at byte `start`, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes: those in the low halves of the bytes, then those in the high halves. [B, n] -> [B, 2 n]."""
    return torch.cat((codes & 15, codes >> 4), -1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Bits, lowest first: [B, n] -> [B, 8 n]."""
    return (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _q8_0(blocks: Blocks) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q4_0(blocks: Blocks) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Blocks) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Blocks) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Blocks) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _scales_and_minima(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the eight runs of 32 elements in Q4_K and Q5_K, float32 [B, 8, 1]. Both are stored in 6 bits."""
    low, middle, high = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), 1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), 1)
    return (_half(blocks, 0) * scales.float()).unsqueeze(-1), (_half(blocks, 2) * minima.float()).unsqueeze(-1)


def _four_bits(packed: torch.Tensor) -> torch.Tensor:
    """Codes of eight runs of 32: 32 bytes hold two runs. [B, 128] -> [B, 8, 32]."""
    return _nibbles(packed.unflatten(1, (4, 32))).unflatten(-1, (2, 32)).flatten(1, 2)


def _q4_k(blocks: Blocks) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    return (scales * _four_bits(blocks[:, 16:]).float() - minima).flatten(1)


def _q5_k(blocks: Blocks) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks)
    # Bit i of byte k is the highest bit of element k of run i.
    fifth = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1) & 1
    return (scales * (_four_bits(blocks[:, 48:]) | fifth << 4).float() - minima).flatten(1)


def _q6_k(blocks: Blocks) -> torch.Tensor:
    low, high = blocks[:, :128].unflatten(1, (2, 1, 64)), blocks[:, 128:192].unflatten(1, (2, 1, 32))
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().unsqueeze(-1)
    four = (low >> torch.tensor([0, 4], dtype=torch.uint8).view(1, 1, 2, 1) & 15).reshape(-1, 16, 16)
    two = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1) & 3).reshape(-1, 16, 16)
    return (_half(blocks, 208).unsqueeze(-1) * scales * ((four | two << 4).float() - 32)).flatten(1)


READERS: Mapping[str, Callable[[Blocks], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
