"""Profiles of the engine by the profiler of PyTorch, as operators order them. Only the first rank of several is recorded."""

from __future__ import annotations

import logging
import math
import os
import time
from typing import Any

import torch
from torch.autograd.profiler import profile

PROFILE_ORDERS = frozenset({"profile_start", "profile_stop"})
"""Orders of Control that a Profiler obeys."""
WITH_STACKS = "stacks"
"""Argument of profile_start: record the calls of Python functions, too."""
LONGEST_S = 120.0
"""Seconds after which a profile is dropped: the order that ends it did not come. Twice what the service lets a client ask for."""

log = logging.getLogger(__name__)


class Profiler:
    """Records between two steps and later ones. At most one profile at a time, for at most LONGEST_S."""

    def __init__(self) -> None:
        self._recording: profile | None = None
        self._deadline = math.inf
        """Of the profile, in the seconds of `time.monotonic`."""

    def check(self) -> None:
        """Drop a profile that is not ended in time. Call it before every step: without steps, a profile records nothing."""
        if self._recording is not None and time.monotonic() >= self._deadline:
            log.error("a profile is dropped: it was not ended within %g s", LONGEST_S)
            self.obey("profile_stop", "")

    def obey(self, order: str, argument: str) -> dict[str, Any]:
        """Run one of PROFILE_ORDERS in the thread of the engine's loop. Returns the reply, with "error" if the order failed."""
        try:
            return self._start(argument == WITH_STACKS) if order == "profile_start" else self._stop(argument)
        except Exception as error:
            log.exception("the order %s failed", order)
            return {"error": f"{order} failed: {type(error).__name__}: {error}", "status": 503}

    def _start(self, stacks: bool) -> dict[str, Any]:
        self.check()
        if self._recording is not None:
            return {"error": "A profile is being recorded: send the request again when it has ended.", "status": 409}
        # What torch.profiler.profile wraps. The wrapper imports torch._inductor, during which no step runs for seconds.
        device = "cuda" if torch.cuda.is_initialized() else None
        self._recording = profile(use_device=device, with_stack=stacks).__enter__()
        self._deadline = time.monotonic() + LONGEST_S
        return {}

    def _stop(self, path: str) -> dict[str, Any]:
        """End the profile and write it to a new file as a Chrome trace; "": drop it."""
        recording, self._recording = self._recording, None
        if recording is None:
            return {"error": "No profile is being recorded.", "status": 409}
        started = time.perf_counter()
        recording.__exit__(None, None, None)
        if path:
            recording.export_chrome_trace(path)  # which only logs that it cannot write
            os.stat(path)
        return {"seconds": round(time.perf_counter() - started, 3)}
