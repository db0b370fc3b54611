"""Capture work on tensors with fixed addresses and replay it without Python: as a CUDA graph, or on a CPU as a list of foreign
calls (ops.native.capture)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


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
    """Capture work as a CUDA graph, immediately. All graphs share one memory pool, because they run in order on one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[..., Any]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return _CudaGraph(graph, result)


class _CudaGraph:
    """A captured graph. Keeps `result` alive, so that later graphs of the pool do not reuse its memory."""

    __slots__ = ("_graph", "_result")

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Any) -> None:
        self._graph, self._result = graph, result

    def replay(self, *arguments: Any) -> Any:
        self._graph.replay()
        return self._result
