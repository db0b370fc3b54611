"""Steps that are run before requests come, so that none of them waits for a compiler, a library's kernel or an allocation.

Which variant of a kernel serves a step follows from its numbers of rows and of query tokens, in ranges: so few steps stand
for all, and tests hold them against many others. All run on the scratch row, and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product

import numpy as np
import torch

from ridgeline.decoding.masks import mask_words
from ridgeline.engine.batch import Batch, blank, pack_rows, packed_size, unpack
from ridgeline.engine.device import DeviceStep
from ridgeline.engine.executor import Executor
from ridgeline.engine.logits_inputs import LogitsInputs
from ridgeline.engine.shape import Sizes, StepShape
from ridgeline.models.weights import Progress
from ridgeline.ops.step import SHORT
from ridgeline.speculation.build import LOGIT_ROWS

BESIDE = (1, 2, 4, 8, 16, 32, 64)
"""Query tokens of the one row that has more than the others: with any number of heads per KV head some fill each tile of the
attention, and some are a chunk. Beside them as many as a step takes, which are too many for a graph if any are."""
ODD = (3, 48, 65)
"""Numbers of rows that are tried beside the powers of two, where ranges are narrower than from one to the next."""
MOST_PROCESSED = 32
"""Rows that ask for more than a draw at once: what they ask for takes several times the memory of their logits."""
KNOWN = 64
"""Tokens of which warm-up computes penalties."""
PINNED = 1 << 20
"""Bytes of the largest upload or download that is allocated ahead."""


def warm_up(step: DeviceStep, executor: Executor, sizes: Sizes, progress: Progress) -> None:
    """On a GPU, run what serving would otherwise compile and allocate, and capture the graphs of `executor`. The largest step comes
    first, through all layers: the memory that it leaves behind serves all others, which run through one layer of each kind."""

    def run() -> None:
        warm_up_forward(step, chunked(sizes.step_tokens, min(sizes.max_len, sizes.step_tokens)))
        warm_up_kernels(step.one_layer_of_each_kind(), executor, sizes, progress)

    if find_spec("triton") is None:
        run()
    else:
        # Only here: Triton is an extra that a machine without a GPU need not have.
        from ridgeline.ops.triton.ahead import with_kernels

        with_kernels(run, lambda: launch_all(step.one_layer_of_each_kind(), executor, sizes), progress)
    executor.capture(progress)
    allocate_pinned()


def launch_all(step: DeviceStep, executor: Executor, sizes: Sizes) -> None:
    """Launch each kernel of `warm_up` and capture nothing."""
    warm_up_kernels(step, executor, sizes, lambda *_: None)
    executor.launch_graphs()


def warm_up_kernels(step: DeviceStep, executor: Executor, sizes: Sizes, progress: Progress) -> None:
    """Run the steps within `sizes` that `executor` will run without a graph. Steps with the most tokens come first, because their
    memory serves the others."""
    rows, tokens, longest = sizes.rows, sizes.step_tokens, min(sizes.max_len, sizes.step_tokens)
    # Whether drafts are trees: those of the host may be either.
    forms = (False, True) if sizes.host_drafts else (bool(step.drafter.parents),) if any(sizes.drafts) else ()
    work = [partial(warm_up_forward, step, chunked(tokens, longest), True)] if True in forms else []
    work += [partial(warm_up_forward, step, chunked(size, longest)) for size in chunk_sizes(tokens)]
    for counts in mixes(rows, tokens, longest):
        # Where a row of such a step has drafts, no graph serves it.
        if forms or executor.padded(shape_of(counts), plain=True) is None:
            work += [partial(warm_up_forward, step, counts, tree) for tree in forms or (False,)]
    padded = executor.padded(shape_of([1]), plain=True) is not None
    draws = [size for size in row_counts(rows) if not padded or size in (1, 3, MOST_PROCESSED)]
    work += [partial(warm_up_draws, step, size) for size in draws]
    most = max((*sizes.drafts, sizes.host_drafts), default=0)
    for tree, nodes, count in product(forms, draft_sizes(most), reversed(row_counts(rows))):
        if count == 1 or count * (1 + nodes) <= LOGIT_ROWS:
            work.append(partial(warm_up_verification, step, count, 1 + nodes, tree))
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


def shape_of(counts: Sequence[int]) -> StepShape:
    """The shape of a step whose rows have these query tokens and all draw."""
    return StepShape(len(counts), len(counts), sum(counts), max(counts))


def chunked(tokens: int, longest: int) -> list[int]:
    """A step of `tokens` query tokens: one row with a single one, and chunks of up to `longest`."""
    counts = [1, *[longest] * ((tokens - 1) // longest)]
    return counts + [tokens - sum(counts)] * (tokens > sum(counts))


def warm_up_forward(step: DeviceStep, counts: Sequence[int], tree: bool = False) -> None:
    """Run the eager forward pass of a step whose rows have these query tokens. tree: some of them are drafts, in a tree."""
    shape = replace(shape_of(counts), tree=tree)
    packed, part = blank(shape)
    if not shape.decode:
        pack_rows(part, np.zeros(len(counts), dtype=np.int32), np.array(counts, dtype=np.int32))
    batch = unpack(torch.from_numpy(packed).to(step.rows.ints.device), shape)
    for longest in {step.longest, min(step.longest, SHORT)}:
        step.forward(batch, longest)


def warm_up_draws(step: DeviceStep, rows: int) -> None:
    """Run the eager end of a step in which `rows` rows draw: plainly, and if they are not too many also asking for all there
    is, penalties, biases, masks and log-probabilities, once of them greedily."""
    row_index = torch.arange(rows, dtype=torch.int32, device=step.rows.ints.device)
    zeros, vocab = torch.zeros_like(row_index), step.spec.vocab_size
    hidden = step.decoder.embedding.new_zeros(rows, step.spec.d_model)
    all_inputs = LogitsInputs(
        penalized=row_index,
        early=row_index,
        bias=(row_index, zeros, zeros.float()),
        masked=row_index,
        words=zeros.unsqueeze(1).expand(-1, mask_words(vocab)) - 1,
        logprobs=row_index,
        tops=(5,) * rows,
        places=tuple(range(rows)),
        nodes=(1,) * rows,
    )
    shape = shape_of([1] * rows)
    packed = step.finish(Batch(shape, zeros, zeros, zeros), hidden, KNOWN)[0].packed
    assert packed is not None
    step.ops.sampler.to_host(packed)  # not held: nothing is sent before the runner has waited for all of this
    if rows > MOST_PROCESSED:
        return
    for greedy in (False, True):
        step.finish(Batch(shape, zeros, zeros, zeros, inputs=all_inputs, greedy=greedy), hidden, KNOWN)


def warm_up_verification(step: DeviceStep, rows: int, wide: int, tree: bool) -> None:
    """Run the eager end of a step that verifies drafts of `wide` - 1 nodes in each row."""
    shape = StepShape.verifying(rows, wide - 1, tree)
    packed = torch.zeros(packed_size(shape), dtype=torch.int32, device=step.rows.ints.device)
    batch = replace(unpack(packed, shape), ahead=1)
    step.finish(batch, step.decoder.embedding.new_zeros(shape.tokens, step.spec.d_model), KNOWN)


def allocate_pinned() -> None:
    """Allocate the host's buffers for what steps send and bring back: torch keeps them, and making one takes a millisecond."""
    sizes = [1 << bits for bits in range(9, PINNED.bit_length())]
    held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes for _ in range(4)]
    held.clear()
