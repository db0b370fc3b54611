"""Start-up launches every kernel that serving launches, and what it missed is counted and named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.core.events import LateWork
from ridgeline.engine.late_compiles import LateCompiles
from ridgeline.engine.warm_up import chunk_sizes, chunked, length_bounds, mixes, row_counts, selecting_bounds


@pytest.mark.parametrize(
    "case",
    [
        "8b-drafts",
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                *("last-stage", "8b", "8b-one-kernel", "8-heads", "window-eager"),
                *("8b-eager-drafts", "8-heads-quotes", "8b-select", "8b-select-eager", "fp8-weight", "fp8-block"),
            )
        ),
    ],
)
def test_no_step_needs_a_kernel_that_start_up_has_not_launched(apart: Callable[..., Any], case: str) -> None:
    """For a Hopper GPU, on paper."""
    pytest.importorskip("triton")
    from .warmed_up import missed

    assert not apart(missed, case)


@pytest.mark.long
@pytest.mark.parametrize("case", ["8b-drafts", "8b-eager-drafts", "8-heads-quotes"])
def test_no_step_with_drafts_does_whatever_prompts_are_beside_it(apart: Callable[..., Any], case: str) -> None:
    pytest.importorskip("triton")
    from .warmed_up import missed

    assert not apart(missed, case, True)


@pytest.mark.parametrize(("tokens", "longest"), [(1, 4), (2, 4), (64, 64), (100, 7), (8192, 4096)])
def test_a_step_of_chunks_has_the_tokens_it_is_asked_for(tokens: int, longest: int) -> None:
    counts = chunked(tokens, longest)
    assert sum(counts) == tokens and counts[0] == 1 and max(counts) <= longest


def test_steps_stay_within_what_the_engine_takes() -> None:
    assert chunk_sizes(200)[0] == 200 and chunk_sizes(200) == sorted(set(chunk_sizes(200)), reverse=True)
    assert row_counts(1) == [1] and row_counts(65)[-2:] == [64, 65]
    for counts in mixes(40, 50, 20):
        assert len(counts) <= 40 and sum(counts) <= 50 and max(counts) <= 20


@pytest.mark.parametrize(("longest", "budget"), [(4096, 100), (5000, 2100), (640, 64), (100, 100)])
def test_start_up_chooses_from_every_power_of_two_of_pages(longest: int, budget: int) -> None:
    """The kernel that chooses pages holds a power of two of them."""
    layers = [SimpleNamespace(budget=None), SimpleNamespace(budget=budget)]
    step: Any = SimpleNamespace(
        longest=longest, rows=SimpleNamespace(page_tokens=16), spec=SimpleNamespace(layers=layers)
    )

    def sizes(bounds: Iterable[int]) -> set[int]:
        return {(-(-bound // 16) - 1).bit_length() for bound in bounds if bound > budget}

    assert sizes(selecting_bounds(step) + list(length_bounds(step))) == sizes(range(1, longest + 1))
    layers[1].budget = None
    assert not selecting_bounds(step) and length_bounds(step) == {min(longest, 2048), longest}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_work_after_ready_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    runtime = pytest.importorskip("triton").knobs.runtime
    clock = Clock()
    late = LateCompiles(clock)
    late.watch()
    try:
        with caplog.at_level(logging.WARNING):
            assert runtime.jit_cache_hook(key="k") is False
            clock.now += 1.5
            runtime.jit_post_compile_hook(key="k", fn=SimpleNamespace(name="split_kernel"))
    finally:
        late.pause()
    assert late.take() == [LateWork("compile", "split_kernel", 1.5)]
    assert late.take() == []
    assert (
        "Requests waited 1.500 s while the kernel split_kernel was compiled" in caplog.text and len(caplog.records) == 1
    )


def test_an_engine_that_starts_is_not_late_for_the_one_before_it() -> None:
    knobs = pytest.importorskip("triton").knobs
    first, second = LateCompiles(), LateCompiles()
    first.watch()
    try:
        knobs.runtime.jit_post_compile_hook(key="k", fn=SimpleNamespace(name="split_kernel"))
        assert [work.name for work in first.take()] == ["split_kernel"] and not second.take()
        second.pause()
        assert knobs.runtime.jit_cache_hook is None and knobs.runtime.jit_post_compile_hook is None
    finally:
        second.pause()
