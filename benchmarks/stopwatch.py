"""What calls take on one device: time, memory and, where the board counts it, energy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from pieces import Call

BATCHED = 16
"""Least calls that are timed together on a GPU, so that one launch is not what is measured."""
LEAST_ROUNDS, LONG_S = 3, 0.5
"""Rounds are timed until they have taken this long together, but at least so many."""


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules that the board has taken so far, and seconds of a measurement. Rounds run for settling_s before energy is counted,
    so that clocks are those of this work, and then for counted_s: the counter moves some ten times a second."""

    joules: Callable[[], float]
    settling_s: float = 0.4
    counted_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one round of all calls; peak_bytes: of the first. None: what does not fit into memory, and joules that nobody counts."""

    seconds: float | None = None
    peak_bytes: int | None = None
    joules: float | None = None


class Stopwatch:
    """Times calls on one device: the median of up to `repeats` rounds, after those that warm up. energy: how joules are
    counted, if they are to be counted too."""

    def __init__(self, device: torch.device, repeats: int, energy: Energy | None = None) -> None:
        self._cuda, self._repeats, self._energy = device.type == "cuda", repeats, energy

    def read(self, make: Callable[[], Sequence[Call]]) -> Reading:
        """All of one line. What `make` and the calls hold is given back."""
        try:
            calls = make()
            return Reading(peak_bytes=self.peak_bytes(calls[0]), seconds=self.seconds(calls), joules=self.joules(calls))
        except torch.OutOfMemoryError:
            return Reading()
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def seconds(self, calls: Sequence[Call]) -> float:
        """Seconds of one round of all calls. On a GPU they are replayed from a CUDA graph, so that the host is not seen."""
        return self._device_seconds(calls) if self._cuda else self._wall_seconds(calls)

    def joules(self, calls: Sequence[Call]) -> float | None:
        """Joules of one round while rounds follow each other; None where they are not counted."""
        if self._energy is None:
            return None
        again, turns = self._again(calls)
        self._spend(again, 1)
        one_s = self._spend(again, 1)
        self._spend(again, int(self._energy.settling_s / one_s))
        number = 1 + int(self._energy.counted_s / one_s)
        before = self._energy.joules()
        self._spend(again, number)
        return (self._energy.joules() - before) / (number * turns)

    def _again(self, calls: Sequence[Call]) -> tuple[Callable[[], object], int]:
        """(what runs some rounds of all calls, how many)."""
        if not self._cuda:
            return lambda: [call() for call in calls], 1
        graph, turns = _captured(calls)
        return graph.replay, turns

    def _spend(self, again: Callable[[], object], number: int) -> float:
        """Seconds of so many calls."""
        started = time.perf_counter()
        for _ in range(number):
            again()
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _rounds(self, first_s: float) -> int:
        """How many rounds to time: fewer of those that take long."""
        return min(self._repeats, max(LEAST_ROUNDS, int(LONG_S / first_s)))

    def _wall_seconds(self, calls: Sequence[Call]) -> float:
        def turn() -> float:
            started = time.perf_counter()
            for call in calls:
                call()
            return time.perf_counter() - started

        turn()
        return statistics.median(turn() for _ in range(self._rounds(turn())))

    def _device_seconds(self, calls: Sequence[Call]) -> float:
        graph, turns = _captured(calls)

        def replays(number: int) -> float:
            """Median; all are enqueued before the first is waited for."""
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(number)]
            for begin, end in events:
                begin.record()
                graph.replay()
                end.record()
            torch.cuda.synchronize()
            return statistics.median(begin.elapsed_time(end) * 1e-3 for begin, end in events)

        replays(1)
        return replays(self._rounds(replays(1))) / turns

    def peak_bytes(self, call: Call) -> int:
        """Memory of torch's allocator that one call needs beyond what is held before it, its result included."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            call()
            return torch.cuda.max_memory_allocated() - held
        with torch.autograd.profiler.profile(profile_memory=True) as seen:
            call()
        assert seen.kineto_results is not None
        changes = [event.nbytes() for event in seen.kineto_results.events() if event.name() == "[memory]"]
        return max(accumulate(changes, initial=0))


def _captured(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
    """(a graph of some rounds of all calls, how many)."""
    turns = -(-BATCHED // len(calls))
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls] * turns:
            call()
    return graph, turns
