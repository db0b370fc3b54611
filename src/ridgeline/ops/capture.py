"""Capture work on tensors with fixed addresses and replay it without Python: as a CUDA graph, or on a CPU as a list of foreign
calls (ops.native.capture)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch

ERROR_MODE = "thread_local"
"""Only this thread must not call what a capture does not allow."""
PART_ENDS = frozenset({1, 4, 13})
"""Numbers of layers after which a graph of a prompt ends. A layer takes the device at least three times as long as its launch takes
the host, so a part may have three times as many layers as the part before it."""


class Captured(Protocol):
    """Captured work."""

    def replay(self, *arguments: Any) -> Any:
        """Run the work again. Returns its result, in memory that is valid until the next replay."""


class Capture(Protocol):
    """Captures work that depends only on the contents of its tensors."""

    def __call__(self, work: Callable[..., Any]) -> Captured:
        """May capture lazily: the first replays may run the work itself, with the `arguments` of `replay`."""


class Uncaptured:
    """Run the work itself at each replay. Implements Capture."""

    __slots__ = ("replay",)

    def __init__(self, work: Callable[..., Any]) -> None:
        self.replay = work


class CudaCapture:
    """Capture work as CUDA graphs, immediately. All graphs share one memory pool, because they run in order on one stream.

    Work in `parts` becomes several graphs. The device runs one while the host launches the next, which takes some microseconds per
    kernel.
    """

    _capturing: ClassVar[_Parts | None] = None

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[..., Any]) -> Captured:
        parts = CudaCapture._capturing = _Parts(self._pool)
        try:
            with parts.context:
                result = work()
        finally:
            CudaCapture._capturing = None
        return _CudaGraphs(parts.graphs, result)

    @staticmethod
    def layer_ends(layers: int) -> None:
        """`layers` layers of the work have been captured. Begin the next graph if a part ends here."""
        if CudaCapture._capturing is not None and layers in CudaCapture._capturing.ends:
            CudaCapture._capturing.next()

    @staticmethod
    def in_parts() -> None:
        """End the graph that is being captured after each number of layers in PART_ENDS."""
        if CudaCapture._capturing is not None:
            CudaCapture._capturing.ends = PART_ENDS


class _Parts:
    """The graphs of work that is being captured."""

    def __init__(self, pool: Any) -> None:
        self.graphs, self.ends, self._pool = [torch.cuda.CUDAGraph()], frozenset[int](), pool
        self.context = torch.cuda.graph(self.graphs[0], pool=pool, capture_error_mode=ERROR_MODE)

    def next(self) -> None:
        self.graphs[-1].capture_end()
        self.context.cuda_graph = torch.cuda.CUDAGraph()
        self.graphs.append(self.context.cuda_graph)
        self.graphs[-1].capture_begin(self._pool, capture_error_mode=ERROR_MODE)


class _CudaGraphs:
    """Captured graphs. Keeps `result` alive, so that later graphs of the pool do not reuse its memory."""

    __slots__ = ("_graphs", "_result")

    def __init__(self, graphs: Sequence[torch.cuda.CUDAGraph], result: Any) -> None:
        self._graphs, self._result = graphs, result

    def replay(self, *arguments: Any) -> Any:
        for graph in self._graphs:
            graph.replay()
        return self._result
