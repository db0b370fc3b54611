"""Steps that are run before requests come, so that none of them waits for a compiler, a library's kernel or an allocation.

Which variant of a kernel serves a step follows from its numbers of rows and of query tokens, in ranges: so few steps stand
for all, and tests hold them against many others. All run on the scratch row, and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from ridgeline.decoding.masks import mask_words
from ridgeline.engine.batch import Batch, Room, Shape, Wishes, packed_size, unpack, verify_step
from ridgeline.engine.device import DeviceStep
from ridgeline.engine.graphs import Graphs
from ridgeline.models.weights import Progress
from ridgeline.ops.step import SHORT
from ridgeline.speculation.build import LOGIT_ROWS

BESIDE = (1, 2, 4, 8, 16, 32, 64)
"""Query tokens of the one row that has more than the others: with any number of heads per KV head some fill each tile of the
attention, and some are a chunk. Beside them as many as a step takes, which are too many for a graph if any are."""
ODD = (3, 48, 65)
"""Numbers of rows that are tried beside the powers of two, where ranges are narrower than from one to the next."""
MOST_ASKING = 32
"""Rows that ask for more than a draw at once: what they ask for takes several times the memory of their logits."""
KNOWN = 64
"""Tokens whose penalties are rehearsed."""
PINNED = 1 << 20
"""Bytes of the largest upload or download that is allocated ahead."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What steps may hold: rows, query tokens, those of one row, its drafts, and how these hang together: forms has False if
    there are chains, True if there are trees."""

    rows: int
    tokens: int
    longest: int
    drafts: int = 0
    forms: tuple[bool, ...] = ()


def rehearse_all(step: DeviceStep, extent: Extent, graphs: Graphs | None, progress: Progress) -> None:
    """Run the steps within `extent` that none of `graphs` will serve, those with the most tokens first: the memory that these
    leave behind serves the others."""
    rows, longest = extent.rows, extent.longest
    work = [partial(rehearse, step, chunked(extent.tokens, longest), True)] if True in extent.forms else []
    work += [partial(rehearse, step, chunked(size, longest)) for size in chunk_sizes(extent.tokens)]
    for counts in mixes(rows, extent.tokens, longest):
        # Where a row of such a step has drafts, no graph serves it.
        if extent.forms or graphs is None or graphs.room(shape_of(counts)) is None:
            work += [partial(rehearse, step, counts, tree) for tree in extent.forms or (False,)]
    draws = [size for size in row_counts(rows) if graphs is None or size in (1, 3, MOST_ASKING)]
    work += [partial(rehearse_draws, step, size) for size in draws]
    for tree, nodes, count in product(extent.forms, draft_sizes(extent.drafts), reversed(row_counts(rows))):
        if count == 1 or count * (1 + nodes) <= LOGIT_ROWS:
            work.append(partial(rehearse_verify, step, count, 1 + nodes, tree))
    for number, run in enumerate(work, 1):
        run()
        progress("kernels", number, len(work))


def draft_sizes(most: int) -> list[int]:
    """Numbers of nodes of a row's draft that stand for all up to `most`: with the root they reach the next power of two."""
    sizes = [(1 << bits) - 1 for bits in range(1, most.bit_length() + 1)]
    return sizes if sizes[-1:] == [most] else [*sizes, most]


def chunk_sizes(most: int) -> list[int]:
    """Query tokens of steps that are mostly one prompt, the largest first. Libraries choose other kernels for other sizes,
    and load each when it is first asked for."""
    sizes = [half << bits for bits in range(most.bit_length() - 1, 4, -1) for half in (3, 2)]
    return [most, *(size for size in sizes if size < most)]


def row_counts(rows: int) -> list[int]:
    """Numbers of rows that stand for all: kernels change with the share of the processors that rows fill."""
    counts = {*ODD, *(1 << bits for bits in range(rows.bit_length()))}
    return [*sorted(count for count in counts if count < rows), rows]


def mixes(rows: int, tokens: int, longest: int) -> Iterator[list[int]]:
    """Steps of rows that decode beside one with more to compute, as query tokens per row; the most rows first. longest: query
    tokens that a row can have."""
    for count in reversed(row_counts(rows)):
        most = min(longest, tokens - count + 1)
        for size in {*BESIDE, most}:
            if 0 < size <= most:
                yield [1] * (count - 1) + [size]


def shape_of(counts: Sequence[int]) -> Shape:
    """The shape of a step whose rows have these query tokens and plain draws."""
    rows, most = len(counts), max(counts)
    return Shape(sum(counts), rows, rows, most, 1, most == 1, False, True, None, chunked=most > 1)


def chunked(tokens: int, longest: int) -> list[int]:
    """A step of `tokens` query tokens: one row with a single one, and chunks of up to `longest`."""
    counts = [1, *[longest] * ((tokens - 1) // longest)]
    return counts + [tokens - sum(counts)] * (tokens > sum(counts))


def rehearse(step: DeviceStep, counts: Sequence[int], tree: bool = False) -> None:
    """Run the eager forward pass of a step whose rows have these query tokens. tree: some of them are drafts, in a tree."""
    shape, device = replace(shape_of(counts), deep=int(tree)), step.rows.ints.device
    room = Room(shape.n_rows, shape.n_draws, shape.n_tokens)
    if shape.decode:
        packed = torch.zeros(shape.n_rows, dtype=torch.int32)
    else:
        n_query = torch.tensor(counts, dtype=torch.int32)
        packed = torch.zeros(packed_size(room, tree), dtype=torch.int32)
        ragged = unpack(packed, shape, room).ragged
        assert ragged is not None
        ragged.n_query.copy_(n_query)
        ragged.q_start[1:].copy_(n_query.cumsum(0))
        ragged.row_of.copy_(torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), n_query))
        ragged.place.copy_(torch.arange(shape.n_tokens, dtype=torch.int32) - ragged.q_start[ragged.row_of])
    batch = unpack(packed.to(device), shape, room)
    for longest in {step.longest, min(step.longest, SHORT)} if shape.decode else (step.longest,):
        step.forward(batch, longest)


def rehearse_draws(step: DeviceStep, rows: int) -> None:
    """Run the eager end of a step in which `rows` rows draw: plainly, and if they are not too many also asking for all there
    is, penalties, biases, masks and log-probabilities, once of them greedily."""
    every = torch.arange(rows, dtype=torch.int32, device=step.rows.ints.device)
    own, vocab = torch.zeros_like(every), step.spec.vocab_size
    hidden = step.decoder.embedding.new_zeros(rows, step.spec.d_model)
    asking = Wishes(
        penalized=every,
        early=every,
        bias=(every, own, own.float()),
        masked=every,
        words=own.unsqueeze(1).expand(-1, mask_words(vocab)) - 1,
        logprobs=every,
        tops=(5,) * rows,
        places=tuple(range(rows)),
        nodes=(1,) * rows,
    )
    shape = shape_of([1] * rows)
    told = step.finish(Batch(shape, own, own, packed=own), hidden, KNOWN)[0].packed
    assert told is not None
    step.ops.to_host(told)  # not held: nothing is sent before the runner has waited for all of this
    if rows > MOST_ASKING:
        return
    for greedy in (False, True):
        asked = replace(shape, greedy=greedy, plain=False)
        step.finish(Batch(asked, own, own, wishes=asking, packed=own), hidden, KNOWN)


def rehearse_verify(step: DeviceStep, rows: int, wide: int, tree: bool) -> None:
    """Run the eager end of a step that verifies drafts of `wide` - 1 nodes in each row."""
    room = Room(rows, rows, rows * wide, wide, rows * (wide - 1))
    packed = torch.zeros(packed_size(room, tree), dtype=torch.int32, device=step.rows.ints.device)
    batch = replace(unpack(packed, verify_step(room, tree), room), ahead=1)
    step.finish(batch, step.decoder.embedding.new_zeros(room.tokens, step.spec.d_model), KNOWN)


def rehearse_pinned() -> None:
    """Allocate the host's buffers for what steps send and bring back: torch keeps them, and making one takes a millisecond."""
    sizes = [1 << bits for bits in range(9, PINNED.bit_length())]
    held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes for _ in range(4)]
    held.clear()
