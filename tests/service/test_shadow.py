"""A share of live answers scored again by a reference: what is compared, what is told, and what a bad reference does."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.quality.drift import token_drift
from ridgeline.quality.scores import Scores
from ridgeline.service import shadow
from ridgeline.service.reference import EngineReference, ServerReference, make_reference
from ridgeline.service.shadow import compare, divergence

from .live import Live, behaviour, counts, live


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "LOOK_S", 0.01)
    monkeypatch.setattr(shadow, "PAUSE_S", 0.01)


@contextmanager
def reference(status: int = 200, share: float = 0.5) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives every token `share` and the token after it the rest; its address, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body)
            rows = [
                {str(token): {"logprob": math.log(share)}, str(token + 1): {"logprob": math.log(1 - share)}}
                for token in body["prompt"][1:]
            ]
            text = json.dumps({"choices": [{"text": "", "prompt_logprobs": [None, *rows]}]}).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()


def metric(running: Live, name: str) -> float:
    match = re.search(rf"^ridgeline:{name}{{[^}}]*}} (\S+)$", running.server.front.metrics.render().decode(), re.M)
    assert match, name
    return float(match[1])


def test_divergence_is_that_of_fixed_texts() -> None:
    """The same numbers as quality.drift finds, where alternatives differ and where the token is none of them."""
    ids = {"ours": [[3, 1], [4, 9]], "theirs": [[1, 3], [9, 2]]}
    shares = {"ours": [[0.5, 0.25], [0.6, 0.2]], "theirs": [[0.4, 0.3], [0.7, 0.1]]}
    token = np.array([3, 9], np.int32)
    scores = {}
    for side in ids:
        values = np.log(np.array(shares[side], np.float32))
        logprobs = values[[0, 1], [ids[side][place].index(token_id) for place, token_id in enumerate(token)]]
        scores[side] = Scores(token, logprobs, np.array(ids[side], np.int32), values)
    want = token_drift(scores["theirs"], scores["ours"])
    scores_of_side = {
        side: [
            {i: math.log(x) for i, x in zip(*pair, strict=True)} for pair in zip(ids[side], shares[side], strict=True)
        ]
        for side in ids
    }
    comparison = compare(scores_of_side["ours"], scores_of_side["theirs"])
    assert comparison.nats == pytest.approx(want.kl.sum(), rel=1e-5) and comparison.nats > 0
    assert (comparison.tokens, comparison.same) == (2, int(want.same.sum()))
    assert divergence(scores_of_side["ours"][0], scores_of_side["ours"][0]) == 0.0


def test_an_answer_is_scored_on_both_sides_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The same model behind both: every token agrees, nothing is warned of."""
    with live(behaviour(counts)) as other:
        url = f"http://127.0.0.1:{other.port}/v1"
        with caplog.at_level(logging.WARNING), live(behaviour(counts), shadow_rate=1.0, shadow_url=url) as running:
            running.complete(max_tokens=5)
            running.until(lambda: metric(running, "shadow_answers_total") == 1)
            assert metric(running, "shadow_tokens_total") == metric(running, "shadow_same_tokens_total") == 5
            assert metric(running, "shadow_kl_nats_total") == metric(running, "shadow_kl") == 0.0
    assert "shadow" not in caplog.text


def test_drift_beyond_the_limit_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with (
        reference(share=0.3) as (url, asked),
        caplog.at_level(logging.WARNING),
        live(behaviour(counts), shadow_rate=1.0, shadow_url=url, shadow_model="big") as running,
    ):
        for count in (1, 2):
            running.complete(max_tokens=4)
            running.until(lambda count=count: metric(running, "shadow_answers_total") == count)
        assert metric(running, "shadow_same_tokens_total") == 0
        assert metric(running, "shadow_kl") == pytest.approx(metric(running, "shadow_kl_nats_total") / 8)
        assert metric(running, "shadow_kl") > 0.05
    assert asked[0]["model"] == "big" and asked[0]["prompt_logprobs"] == 20
    assert caplog.text.count("answers drift from") == 1


def test_a_reference_that_cannot_score_is_counted_and_harms_nobody() -> None:
    with reference(status=500) as (url, _), live(behaviour(counts), shadow_rate=1.0, shadow_url=url) as running:
        assert running.complete(max_tokens=3).status == 200
        running.until(lambda: metric(running, "shadow_failures_total") == 1)
        assert running.complete(max_tokens=3).status == 200
        assert metric(running, "shadow_answers_total") == 0


def test_answers_are_scored_again_after_a_restart() -> None:
    with reference() as (url, _), live(behaviour(counts), shadow_rate=1.0, shadow_url=url) as running:
        running.complete(max_tokens=4)
        running.until(lambda: metric(running, "shadow_answers_total") == 1)
        before = running.server.front.service().shadow
        running.run(running.engine.die())
        running.until(lambda: running.heard.words)
        engine = running.replace_engine()
        running.complete(max_tokens=4)
        running.until(lambda: metric(running, "shadow_answers_total") == 2)
        assert running.server.front.service().shadow is not before
        assert [submit.id.startswith("shadow") for submit in engine.submits] == [False, True]
        assert metric(running, "shadow_failures_total") == 0

        async def scoring() -> int:
            return sum(task.get_coro().__qualname__ == "Shadow.run" for task in asyncio.all_tasks())

        assert running.run(scoring()) == 1


def test_nothing_leaves_the_server_unasked() -> None:
    with reference() as (url, asked), live(behaviour(counts), shadow_url=url) as running:
        running.complete(max_tokens=3)
        assert running.server.front.service().shadow is None
    assert not asked


def test_options_that_cannot_be_followed_are_refused() -> None:
    def made(model: str = "", quantization: str = "", **said: Any) -> object:
        return make_reference(ServiceConfig(**said), ModelConfig(model, quantization=quantization), EngineConfig())

    with pytest.raises(ConfigError, match=r"shadow_rate is 1.5: give a share from 0 to 1"):
        made(shadow_rate=1.5, shadow_url="http://x")
    with pytest.raises(ConfigError, match="name their folder as shadow_model, or give a server's address"):
        made(shadow_rate=0.1)
    with pytest.raises(ConfigError, match="shadow_url is 'reference:8000'"):
        made(shadow_rate=0.1, shadow_url="reference:8000")
    assert made(shadow_url="http://x", shadow_model="m") is None
    assert isinstance(made(shadow_rate=0.1, shadow_url="http://x", shadow_model="m"), ServerReference)
    for reference in (made("folder", "int4", shadow_rate=0.1), made("small", shadow_rate=0.1, shadow_model="folder")):
        assert isinstance(reference, EngineReference) and reference.name == "folder"


def test_a_reference_that_does_not_start_is_said_once_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), live(behaviour(counts), shadow_rate=1.0, shadow_model="/nowhere") as running:
        running.until(lambda: metric(running, "shadow_failures_total") == 1, 60)
        assert running.complete(max_tokens=3).status == 200
    assert caplog.text.count("the reference does not start") == 1
