"""Sums over the ranks of one host in the kernel of all layers.

A row of a product that ranks divide by inputs is a term of the residual stream. A program sends each row that it has computed to
all ranks at once, into their memory over NVLink, so messages travel while other rows are computed. A word of 32 bits holds a number
of 16 bits and the low bits of the number of the sum. So the words themselves show whether they have arrived, without a fence or a
flag (protocol LL of NCCL; see peers.cu). Each program adds the terms of all ranks, in rank order, where it reads the stream. The
first rank's term includes the stream before. Sums have the same bits on all ranks.

Sums alternate between two halves of the memory: 0 behind the output projection, 1 behind the feed-forward. A rank writes a half
again after all rows of the other half have arrived from each rank, which began to send them after a grid barrier behind its last
read of this half.

`peers` of the functions: ((addresses of all ranks' memory and of the host's flag, own memory, rank), number of the sum).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from ridgeline.ops.triton.peers import WIDEST

ROOM = gl.constexpr(WIDEST)
"""Words of one rank's terms."""
UNASKED = gl.constexpr(256)
"""Looks at the words between two looks at whether the host has ended the group."""


@jit
def links(ranks, SIZE: gl.constexpr):
    """The first part of `peers`. ranks: see layers_kernel."""
    if SIZE == 1:
        return ()
    else:
        addresses = ()
        for rank in gl.static_range(SIZE + 1):
            addresses += (gl.load(ranks[0] + rank).to(gl.pointer_type(gl.int32)),)  # type: ignore[assignment]
        own_ptr = gl.multiple_of(gl.load(ranks[0] + ranks[2]).to(gl.pointer_type(gl.int32)), 16)
        return addresses, own_ptr, ranks[2]


@jit
def sums_before(ranks, SIZE: gl.constexpr):
    """Number of the last sum of the launch before."""
    if SIZE == 1:
        return gl.to_tensor(0)
    else:
        return gl.load(ranks[1])


@jit
def _word(value, peers, dtype: gl.constexpr):
    return (value.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) << 16) | (peers[1] & 0xFFFF)


@jit
def _value(word, dtype: gl.constexpr):
    return (word >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)


@jit
def send(peers, value, row, real, HALF: gl.constexpr, dtype: gl.constexpr, SIZE: gl.constexpr):
    """Send rows of this rank's term to all ranks."""
    word = _word(value, peers, dtype)
    for rank in gl.static_range(SIZE):
        gl.store(peers[0][0][rank] + (HALF * SIZE + peers[0][2]) * ROOM + row, word, mask=real)


@jit
def begin(stream_ptr, peers, size, dtype: gl.constexpr, SIZE: gl.constexpr):
    """Write the stream before the first layer, which is equal on all ranks, as if it were the last sum of the launch before."""
    EACH: gl.constexpr = 256
    at = gl.arange(0, EACH, gl.BlockedLayout([1], [32], [8], [0]))
    for first in range(gl.program_id(0) * EACH, size, gl.num_programs(0) * EACH):
        x = gl.load(stream_ptr + first + at, mask=first + at < size, other=0.0)
        for rank in gl.static_range(SIZE):
            term = x if rank == 0 else gl.zeros_like(x)
            to_ptr = peers[0][1] + (SIZE + rank) * ROOM + first
            gl.store(to_ptr + at, _word(term, peers, dtype), mask=first + at < size)


@jit
def stream_rows(peers, row, real, HALF: gl.constexpr, dtype: gl.constexpr, SIZE: gl.constexpr):
    """Rows of a sum that this program has waited for, in float32; zeros except on the first rank."""
    real &= peers[0][2] == 0
    total = gl.zeros_like(row).to(gl.float32)
    for rank in gl.static_range(SIZE):
        words_ptr = peers[0][1] + (HALF * SIZE + rank) * ROOM
        total += _value(gl.load(words_ptr + row, mask=real, other=0, cache_modifier=".cg"), dtype)
    return total.to(dtype).to(gl.float32)


@jit
def received(peers, at, real, HALF: gl.constexpr, dtype: gl.constexpr, SIZE: gl.constexpr):
    """Wait for a sum, and return its elements `at` (two dimensions) in float32, rounded to `dtype`."""
    stopped, looks = gl.to_tensor(0), gl.to_tensor(0)
    total, missing = _look(peers, at, real, HALF, dtype, SIZE)
    while (missing != 0) & (stopped == 0):
        total, missing = _look(peers, at, real, HALF, dtype, SIZE)
        looks += 1
        if looks % UNASKED == 0:
            stopped = gl.load(peers[0][0][SIZE], volatile=True)
    return total.to(dtype).to(gl.float32)


@jit
def _look(peers, at, real, HALF: gl.constexpr, dtype: gl.constexpr, SIZE: gl.constexpr):
    """The sum of what has arrived, and 0 if all has."""
    total, missing = gl.zeros_like(at).to(gl.float32), gl.zeros_like(at)
    for rank in gl.static_range(SIZE):
        words = gl.load(peers[0][1] + (HALF * SIZE + rank) * ROOM + at, mask=real, other=0, volatile=True)
        missing |= gl.where(real, (words ^ peers[1]) & 0xFFFF, 0)
        total += _value(words, dtype)
    return total, gl.max(gl.max(missing, 1), 0)
