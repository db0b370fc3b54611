"""Work on tensors that stay where they are, captured once and repeated without Python: as a CUDA graph, or on a CPU as the list
of foreign calls that it made (ops.native.capture)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Captured(Protocol):
    """Captured work."""

    def replay(self, *arguments: Any) -> Any:
        """Repeat it. -> what the work returned, in memory that holds until the next replay."""


class Capture(Protocol):
    """Captures work that depends on nothing but what its tensors hold, and may do so late: the first replays may be the work as
    it stands, with the `arguments` of `replay`."""

    def __call__(self, work: Callable[..., Any]) -> Captured: ...


class Uncaptured:
    """Work that runs each time as it stands. Is a Capture."""

    __slots__ = ("replay",)

    def __init__(self, work: Callable[..., Any]) -> None:
        self.replay = work


class CudaCapture:
    """Captures work as a CUDA graph, at once. All graphs share one memory pool: they run one after the other on one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[..., Any]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return _CudaGraph(graph, result)


class _CudaGraph:
    """result: held, so that no later graph of the pool is given its memory."""

    __slots__ = ("_graph", "_result")

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Any) -> None:
        self._graph, self._result = graph, result

    def replay(self, *arguments: Any) -> Any:
        self._graph.replay()
        return self._result
