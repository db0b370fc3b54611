"""CUDA graphs of the decode step, keyed by how many rows they hold and nothing else.

A graph reads its rows from one static buffer; positions, lengths and page tables are device data already. Forward and
finish are two graphs: steps whose rows ask for more than a plain draw replay the first and finish eagerly. Both are
captures of DeviceStep, the same code that runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Protocol

import torch

from ridgeline.engine.batch import Batch, Shape
from ridgeline.engine.device import DeviceStep

Progress = Callable[[str, int, int], None]


def buckets(rows: int) -> list[int]:
    """Sizes of graphs for up to `rows` rows: fine where a token more costs most, relative to the step."""
    sizes = chain((1, 2, 4), range(8, 128, 8), range(128, 256, 16), range(256, rows + 32, 32))
    fitting = [size for size in sizes if size < rows]
    return [*fitting, rows]


class Replay(Protocol):
    def replay(self) -> None: ...


class CudaRecorder:
    """Captures work as a CUDA graph. All graphs share one memory pool: they run one after the other on one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph


class Graphs:
    """Graphs for up to `rows` rows, recorded by `capture` or when first needed.

    `record` turns work into something that repeats it. What comes out lies in static buffers: it must be copied, on the
    same stream, before the next replay.
    """

    def __init__(self, step: DeviceStep, rows: int, record: Callable[[Callable[[], object]], Replay]) -> None:
        self._step, self._record = step, record
        self._sizes = buckets(rows)
        device, embedding = step.rows.ints.device, step.decoder.embedding
        self._rows = torch.zeros(rows, dtype=torch.int32, device=device)
        self._scratch = torch.zeros(rows, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(rows, step.spec.d_model, dtype=embedding.dtype, device=device)
        self._packed = torch.zeros(rows, 3, dtype=torch.int32, device=device)
        self._forward: dict[int, Replay] = {}
        self._finish: dict[tuple[int, bool], Replay] = {}

    def bucket(self, rows: int) -> int:
        """The smallest graph that holds `rows` rows; 0 if none does."""
        return next((size for size in self._sizes if size >= rows), 0)

    def capture(self, progress: Progress) -> None:
        """Record every graph, the largest first so that the others fit into its memory."""
        for number, size in enumerate(reversed(self._sizes), 1):
            self._capture_forward(size)
            for greedy in (False, True):
                self._capture_finish(size, greedy)
            progress("graphs", number, len(self._sizes))

    def load(self, rows: torch.Tensor) -> None:
        """Set the rows of the next steps, int32 [bucket], padded with row 0."""
        self._rows[: len(rows)].copy_(rows)

    def forward(self, size: int) -> torch.Tensor:
        """Replay the forward pass of the loaded rows; hidden [size, d_model]."""
        if size not in self._forward:
            self._capture_forward(size)
        self._forward[size].replay()
        return self._hidden[:size]

    def finish(self, size: int, greedy: bool) -> torch.Tensor:
        """Replay draw and advance on the last forward's hidden states; Outcome.packed."""
        if (size, greedy) not in self._finish:
            self._capture_finish(size, greedy)
        self._finish[size, greedy].replay()
        return self._packed[:size]

    def _capture_forward(self, size: int) -> None:
        step, hidden = self._step, self._hidden[:size]
        # The first run compiles kernels and makes workspaces; neither may happen inside a capture.
        step.forward(_decode(self._scratch[:size], True), step.longest)
        batch = _decode(self._rows[:size], True)
        self._forward[size] = self._record(lambda: hidden.copy_(step.forward(batch, step.longest)))

    def _capture_finish(self, size: int, greedy: bool) -> None:
        step, hidden, packed = self._step, self._hidden[:size], self._packed[:size]
        step.finish(_decode(self._scratch[:size], greedy), hidden, 0)
        batch = _decode(self._rows[:size], greedy)

        def work() -> None:
            found = step.finish(batch, hidden, 0).packed
            assert found is not None
            packed.copy_(found)

        self._finish[size, greedy] = self._record(work)


def _decode(rows: torch.Tensor, greedy: bool) -> Batch:
    """A decode step of these rows whose draws are plain."""
    return Batch(Shape(len(rows), 1, 1, True, greedy, True, None), rows, rows)
