"""Warm-up: runs steps before requests arrive, so that no request waits for a compiler, for the load of a kernel or for an
allocation.

The numbers of rows and query tokens of a step select the kernel variants, in ranges. So a few steps cover all variants; tests
compare them with many other steps. All of them run on the scratch row and change no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

CHUNK_TOKENS = (1, 2, 4, 8, 16, 32, 64)
"""Query tokens of the longest row of mixed steps. For any number of heads per KV head they cover each tile size of attention, and
some are a prompt chunk. The limit of a step is warmed up as well; it exceeds the graphs if any step does."""
EXTRA_ROWS = (3, 48, 65)
"""Numbers of rows besides the powers of two, for kernel ranges that lie between two powers."""
MOST_PROCESSED = 32
"""Most rows with logits processors in a warm-up step: processing takes several times the memory of the logits."""
KNOWN = 64
"""Known tokens per row for penalties in warm-up."""
PINNED = 1 << 20
"""Bytes of the largest pinned buffer that is allocated at start-up."""


def warm_up(step: DeviceStep, executor: Executor, sizes: Sizes, progress: Progress) -> None:
    """On a GPU, compile kernels, allocate memory and capture the graphs of `executor`.

    The largest step runs first, through all layers, so that its memory serves all later steps, which run one layer of each kind. A
    rank whose kernels are not on disk repeats its steps, so ranks run them alone; they capture the same graphs together. Graphs are
    captured while other kernels are being compiled.
    """

    def run() -> None:
        with step.mesh.muted():
            warm_up_forward(step, chunked(sizes.step_tokens, min(sizes.max_len, sizes.step_tokens)))
            warm_up_kernels(step.one_layer_of_each_kind(), executor, sizes, progress)

    def dry() -> None:
        with step.mesh.muted():
            launch_all(step.one_layer_of_each_kind(), executor, sizes)

    if find_spec("triton") is None:
        run()
        executor.capture(progress)
    else:
        # Imported here: Triton is an optional dependency, for GPUs only.
        from ridgeline.ops.triton.ahead import compiling

        with compiling(run, dry, progress):
            executor.capture(progress)
    allocate_pinned()


def launch_all(step: DeviceStep, executor: Executor, sizes: Sizes) -> None:
    """Launch each kernel of `warm_up` without capturing graphs, those of the smallest graphs first: some of them take longest to
    compile."""
    executor.launch_graphs()
    warm_up_kernels(step, executor, sizes, lambda *_: None)


def warm_up_kernels(step: DeviceStep, executor: Executor, sizes: Sizes, progress: Progress) -> None:
    """Run the steps within `sizes` that `executor` runs without a graph. Steps with the most tokens run first, because their memory
    serves the others."""
    rows, tokens, longest = sizes.rows, sizes.step_tokens, min(sizes.max_len, sizes.step_tokens)
    # Whether drafts are trees. Host drafts may be chains or trees.
    forms = (False, True) if sizes.host_drafts else (bool(step.drafter.parents),) if any(sizes.drafts) else ()
    work = [partial(warm_up_forward, step, chunked(tokens, longest), True)] if True in forms else []
    work += [partial(warm_up_forward, step, chunked(size, longest)) for size in chunk_sizes(tokens)]
    work += [partial(warm_up_forward, step, [1], bounds=[size]) for size in selecting_bounds(step)]
    for counts in mixes(rows, tokens, longest):
        # No graph fits a mixed step in which a row has drafts.
        if forms or executor.padded(shape_of(counts), fused_sampling=True) is None:
            work += [partial(warm_up_forward, step, counts, tree) for tree in forms or (False,)]
    padded = executor.padded(shape_of([1]), fused_sampling=True) is not None
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
    """Draft sizes that cover all sizes up to `most`: with the root they are powers of two."""
    sizes = [(1 << bits) - 1 for bits in range(1, most.bit_length() + 1)]
    return sizes if sizes[-1:] == [most] else [*sizes, most]


def chunk_sizes(most: int) -> list[int]:
    """Query tokens of steps that are mostly one prompt, the largest first. Libraries choose kernels by size and load each of them
    at its first use."""
    sizes = [half << bits for bits in range(most.bit_length() - 1, 4, -1) for half in (3, 2)]
    return [most, *(size for size in sizes if size < most)]


def row_counts(rows: int) -> list[int]:
    """Numbers of rows that cover all kernel variants, which depend on the share of the multiprocessors that the rows fill."""
    counts = {*EXTRA_ROWS, *(1 << bits for bits in range(rows.bit_length()))}
    return [*sorted(count for count in counts if count < rows), rows]


def mixes(rows: int, tokens: int, longest: int) -> Iterator[list[int]]:
    """Query tokens per row of mixed steps: rows that decode and one row with more query tokens. The most rows first. longest: most
    query tokens of a row."""
    for count in reversed(row_counts(rows)):
        most = min(longest, tokens - count + 1)
        for size in {*CHUNK_TOKENS, most}:
            if 0 < size <= most:
                yield [1] * (count - 1) + [size]


def shape_of(counts: Sequence[int]) -> StepShape:
    """Shape of a step whose rows have `counts` query tokens and all draw."""
    return StepShape(len(counts), len(counts), sum(counts), max(counts))


def chunked(tokens: int, longest: int) -> list[int]:
    """Query tokens per row of a step of `tokens` tokens: one row with a single token, and chunks of up to `longest`."""
    counts = [1, *[longest] * ((tokens - 1) // longest)]
    return counts + [tokens - sum(counts)] * (tokens > sum(counts))


def length_bounds(step: DeviceStep) -> set[int]:
    """Upper bounds of the slots of a row for which attention has kernels of its own: a row in a short context, a row that reads all
    of its context though the layer selects pages, and any row."""
    whole = min((step.longest, *(layer.budget for layer in step.spec.layers if layer.budget is not None)))
    return {min(whole, SHORT), whole, step.longest}


def selecting_bounds(step: DeviceStep) -> list[int]:
    """Upper bounds of the slots of a row for which the kernel that chooses pages is compiled: a power of two of pages each."""
    size, budgets = step.rows.page_tokens, [layer.budget for layer in step.spec.layers if layer.budget is not None]
    bounds = [size << bits for bits in range((step.longest // size).bit_length())]
    return [bound for bound in bounds if budgets and min(budgets) < bound]


def warm_up_forward(
    step: DeviceStep, counts: Sequence[int], tree: bool = False, bounds: Iterable[int] | None = None
) -> None:
    """Run the eager forward pass of a step whose rows have `counts` query tokens. tree: as if some were nodes of draft trees.
    bounds: of the slots of a row; None: length_bounds."""
    shape = replace(shape_of(counts), tree=tree)
    packed, part = blank(shape)
    if not shape.decode:
        pack_rows(part, np.zeros(len(counts), dtype=np.int32), np.array(counts, dtype=np.int32))
    batch = unpack(torch.from_numpy(packed).to(step.rows.ints.device), shape)
    if step.has_adapters:
        step.forward(replace(batch, adapted=True), step.longest)
    for bound in length_bounds(step) if bounds is None else bounds:
        step.forward(batch, bound)


def warm_up_draws(step: DeviceStep, rows: int) -> None:
    """Run eager sampling for `rows` rows: without logits processors, and for at most MOST_PROCESSED rows also with penalties,
    biases, masks and log-probabilities, sampled and greedy."""
    row_index = torch.arange(rows, dtype=torch.int32, device=step.rows.ints.device)
    zeros, vocab = torch.zeros_like(row_index), step.spec.vocab_size
    hidden = step.decoder.embedding.new_zeros(rows, step.state_width)
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
    step.ops.sampler.to_host(packed)  # not kept: the runner synchronizes before the buffer is reused
    if rows > MOST_PROCESSED:
        return
    for greedy in (False, True):
        step.finish(Batch(shape, zeros, zeros, zeros, inputs=all_inputs, greedy=greedy), hidden, KNOWN)


def warm_up_verification(step: DeviceStep, rows: int, width: int, tree: bool) -> None:
    """Run eager verification of drafts of `width` - 1 nodes in each row."""
    shape = StepShape.verifying(rows, width - 1, tree)
    packed = torch.zeros(packed_size(shape), dtype=torch.int32, device=step.rows.ints.device)
    batch = replace(unpack(packed, shape), ahead=1)
    step.finish(batch, step.decoder.embedding.new_zeros(shape.tokens, step.state_width), KNOWN)


def allocate_pinned() -> None:
    """Allocate the pinned host buffers of uploads and downloads. torch keeps them; allocating one takes a millisecond."""
    sizes = [1 << bits for bits in range(9, PINNED.bit_length())]
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes for _ in range(4)]
    buffers.clear()
