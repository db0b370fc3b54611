"""Orders to record a profile: none leaves the profiler on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from ridgeline.engine import profiler as module
from ridgeline.engine.profiler import LONGEST_S, Profiler


def test_a_profile_that_is_never_ended_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = Profiler()
    assert profiler.obey("profile_start", "") == {}
    now = time.monotonic()
    profiler.check()
    assert torch.autograd._profiler_enabled() and profiler.obey("profile_start", "")["status"] == 409
    monkeypatch.setattr(module.time, "monotonic", lambda: now + LONGEST_S + 1)
    profiler.check()
    assert not torch.autograd._profiler_enabled()
    assert profiler.obey("profile_stop", "")["status"] == 409


def test_a_trace_that_cannot_be_written_ends_the_profile(tmp_path: Path) -> None:
    profiler = Profiler()
    profiler.obey("profile_start", "")
    assert profiler.obey("profile_stop", str(tmp_path / "none" / "trace.json"))["status"] == 503
    assert not torch.autograd._profiler_enabled()
    assert profiler.obey("profile_start", "") == {} and "seconds" in profiler.obey("profile_stop", "")
