"""LocalEngine: an engine in the caller's process, with the messages of the wire, for offline work, evaluation and benchmarks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import EngineFailed
from ridgeline.core.interrupt import UninterruptedCalls
from ridgeline.engine.assemble import assemble
from ridgeline.engine.engine import Engine
from ridgeline.wire.messages import Cancel, Delta, Deltas, Down, Finish, StepStats, Submit


class LocalEngine:
    """Runs requests in the caller's thread: call `submit` at any time, iterate `deltas` until all requests have ended.

    on_step: called with the record of every step.
    """

    def __init__(self, engine: Engine, on_step: Callable[[StepStats], None] | None = None) -> None:
        self._engine: Engine | None = engine
        self._on_step = on_step
        self._open: dict[str, int] = {}

    @classmethod
    def start(
        cls,
        model: ModelConfig,
        config: EngineConfig,
        progress: Callable[[str, int, int], None] | None = None,
        on_step: Callable[[StepStats], None] | None = None,
    ) -> LocalEngine:
        return cls(assemble(model, config, progress or (lambda stage, done, total: None)), on_step)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineFailed("This engine is closed: start a new one.")
        return self._engine

    def submit(self, request: Submit) -> None:
        """Queue a request. It runs when `deltas` is iterated."""
        self.engine.handle(request)
        self._open[request.id] = request.sampling.n

    def finish(self, request_id: str, choice: int, reason: str, kept: int) -> None:
        """End a choice early (a stop string was seen). It sends no more deltas."""
        self.engine.handle(Finish(request_id, choice, reason, kept))
        self._ended(request_id)

    def deltas(self) -> Iterator[Delta]:
        """Deltas of all open requests until the last one ends. Closing the iterator cancels the open requests. So
        does Ctrl-C, between two steps: the engine stays usable."""
        with UninterruptedCalls() as uninterrupted:
            try:
                while self._open:
                    frame = uninterrupted(self.engine.turn)
                    if frame is None:
                        time.sleep(self.engine.wait_seconds())
                        continue
                    for delta in self._deltas(frame):
                        if delta.finish:
                            self._ended(delta.id)
                        yield delta
            finally:
                for request_id in list(self._open):
                    self.engine.handle(Cancel(request_id))
                self._open.clear()
                while self._engine is not None and not self._engine.idle:
                    uninterrupted(self._engine.turn)

    def run(self, requests: Iterable[Submit]) -> Iterator[Delta]:
        """Submit all requests and yield their deltas."""
        for request in requests:
            self.submit(request)
        yield from self.deltas()

    def close(self) -> None:
        """Release the device memory. Open requests end, and the engine cannot be used any more."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self._open.clear()
        try:
            engine.close()
        finally:
            del engine
            gc.collect()  # graphs and their step are a reference cycle
            torch.cuda.empty_cache()

    def _ended(self, request_id: str) -> None:
        left = self._open.get(request_id, 0) - 1
        if left > 0:
            self._open[request_id] = left
        else:
            self._open.pop(request_id, None)

    def _deltas(self, frame: Down) -> list[Delta]:
        if not isinstance(frame, Deltas):
            return []
        if frame.stats is not None and self._on_step is not None:
            self._on_step(frame.stats)
        return list(frame.each())
