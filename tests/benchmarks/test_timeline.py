"""Increments of kernels add up to the time they were seen in, however they overlap."""

from __future__ import annotations

from typing import Any

import pytest
from timeline import Share, Span, shares, spans


def test_increments_count_what_ends_later_than_all_before() -> None:
    spans = [Span("a", 0.0, 4.0), Span("b", 1.0, 3.0), Span("c", 2.0, 7.0), Span("a", 9.0, 10.0)]
    assert shares(spans, 1) == [Share("a", 2, 7.0, 5.0), Share("c", 1, 3.0, 5.0), Share("b", 1, 0.0, 2.0)]


@pytest.mark.parametrize("steps", [1, 4])
def test_increments_add_up_to_the_time_from_begin_to_end(steps: int) -> None:
    spans = [Span(f"k{index % 3}", index * 1.5, index * 1.5 + index % 5) for index in range(1, 30)]
    total = sum(share.step_us for share in shares(reversed(spans), steps))
    assert total * steps == pytest.approx(max(span.end for span in spans) - 1.5)


def test_only_what_runs_on_the_device_counts() -> None:
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "name": "split_kernel", "ts": 5.0, "dur": 2.0, "args": {"grid": [8, 1, 1]}},
        {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1.0, "dur": 9.0},
        {"name": "process_name"},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 1.0, "dur": 3.0, "args": {}},
    ]
    assert spans(events) == [Span("split_kernel 8x1x1", 5.0, 7.0), Span("Memcpy HtoD", 1.0, 4.0)]
