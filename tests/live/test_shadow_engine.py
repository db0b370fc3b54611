"""Drift of what is served, measured beside it: int4 weights answer, the same model's bfloat16 weights score again, also after
a restart of the engine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from .served import served

WAIT_S = 120.0


@pytest.mark.long
def test_a_second_engine_scores_what_the_first_one_said(tmp_path: Path) -> None:
    words = ("--quantization", "int4", "--shadow-rate", "1", "--max-model-len", "512")
    with served(tmp_path, *words) as server:
        answer = server.complete("Once upon a time there was", max_tokens=24, temperature=0, ignore_eos=True)
        assert answer.status == 200
        until = time.monotonic() + WAIT_S
        while not server.metric("shadow_answers_total") and time.monotonic() < until:
            time.sleep(0.2)
        assert server.metric("shadow_answers_total") == 1, server.log.read_text()
        assert server.metric("shadow_tokens_total") == 24
        assert 0 < server.metric("shadow_same_tokens_total") <= 24
        assert 0.001 < server.metric("shadow_kl") < 2
        assert server.metric("shadow_failures_total") == 0

        first, second = server.children()
        os.kill(first, signal.SIGKILL)
        server.until_logged("ready again")
        assert server.complete("Once upon a time there was", max_tokens=8, ignore_eos=True).status == 200
        until = time.monotonic() + WAIT_S
        while server.metric("shadow_answers_total") < 2 and time.monotonic() < until:
            time.sleep(0.2)
        assert server.metric("shadow_answers_total") == 2, server.log.read_text()
        assert server.metric("shadow_failures_total") == 0
        assert len(server.children()) == 2 and not {first, second} & set(server.processes())
