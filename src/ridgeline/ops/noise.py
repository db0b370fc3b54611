"""Stateless random numbers: a hash of the request, the position and the token.

A draw depends on (seed, choice, position, purpose, token id) only: not on the batch, the row, the rank, the device or the order of
the steps. A request's tokens are therefore reproducible, also after a preemption, and drafts are verified with the noise of
decoding without speculation.

Construction: additions, xor-shifts and odd multiplications modulo 2^32, as in MurmurHash3's finalizer (Appleby 2011), with
multipliers 0x21F0AAAD and 0x735A2D97, for which Wellons' hash-prospector search found little bias. The host turns (seed, choice)
into a row's two key words. Position and purpose turn them into the two words of a draw. A token's number is the first word hashed
with the token id; the second word is mixed in between the two multiplications, so that a draw has a 64-bit key. All arithmetic is
wrapping int32, which is the same on CPUs and GPUs.
"""

from __future__ import annotations

from enum import IntEnum

import torch

_MASK = 0xFFFFFFFF
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97
_GOLDEN = 0x9E3779B9
"""2^32 divided by the golden ratio: consecutive numbers map far apart (Knuth, TAOCP 3, section 6.4)."""
_LARGEST = 1.0 - 2.0**-24


class Purpose(IntEnum):
    """Purpose of a draw. Draws of different purposes at one position are independent."""

    TOKEN = 0
    DRAFT = 1


def _signed(word: int) -> int:
    word &= _MASK
    return word - (1 << 32) if word >> 31 else word


def _mix(word: int, key: int) -> int:
    word &= _MASK
    word ^= word >> 16
    word = word * _FIRST & _MASK
    word ^= key & _MASK
    word ^= word >> 15
    word = word * _SECOND & _MASK
    return word ^ (word >> 15)


def row_key(seed: int, choice: int) -> tuple[int, int]:
    """The two key words of a request's choice, as signed 32-bit integers. seed: any 64-bit integer."""
    low, high = seed & _MASK, seed >> 32 & _MASK
    first = _mix(low + _GOLDEN * choice, high)
    second = _mix(high + _GOLDEN * (choice + 1), low ^ first)
    return _signed(first), _signed(second)


def _mix_(words: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """`_mix` on int32 tensors, in place on `words`. One buffer serves all shifts, because new memory costs more than arithmetic on
    a CPU."""
    shifted = torch.empty_like(words)
    words ^= torch.bitwise_right_shift(words, 16, out=shifted).bitwise_and_(0xFFFF)
    words *= _FIRST
    words ^= key
    words ^= torch.bitwise_right_shift(words, 15, out=shifted).bitwise_and_(0x1FFFF)
    words *= _SECOND
    words ^= torch.bitwise_right_shift(words, 15, out=shifted).bitwise_and_(0x1FFFF)
    return words


def draw_key(key: torch.Tensor, position: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Key words of draws. key: int32 [N, 2] of the rows; position: int32 [N] -> int32 [N, 2]."""
    first, second = key[:, 0], key[:, 1]
    where = position * _signed(_GOLDEN) + _signed((purpose + 1) * 0x85EBCA6B)
    word_0 = _mix_(where + first, second)
    word_1 = _mix_(where + second, word_0)
    return torch.stack((word_0, word_1), dim=1)


def words(draw: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Uniform integers below 2^31, int32 [N, V]. draw: int32 [N, 2] (draw_key), tokens: int32 [V]."""
    hashed = (tokens * _signed(_GOLDEN)).unsqueeze(0) + draw[:, :1]
    return _mix_(hashed, draw[:, 1:]).bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)


def exponential(draw: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Exponential numbers of mean 1, float32 [N, V], positive and finite: -log(1 - u) with u in (0, 1) in steps of 2^-31. Small
    numbers, which win, are therefore fine-grained."""
    u = words(draw, tokens).float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=-_LARGEST)
    return u.log1p_().neg_()
