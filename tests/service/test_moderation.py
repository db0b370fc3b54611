"""Answers that a judge withdraws: three modes, judges that fail, several choices, tool calls, clients that leave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.service.moderation.judges import make_judge, read_results

from .conftest import CALL
from .live import MODEL, Reply, behaviour, counts, eos_id, ids, live, says

HERE = f"{__name__}:"
TEXT = "All is well. But then came the secret word, and so on to the end."
SEEN: list[str] = []


def secret(text: str) -> bool:
    """Flags a text with the word."""
    SEEN.append(text)
    return "secret" in text


async def replaced(text: str) -> bool | str:
    return "I cannot say that." if "secret" in text else False


def second(text: str) -> bool:
    """Flags the second choice of `counts`."""
    return text.startswith("b")


def asleep(text: str) -> bool:
    time.sleep(0.3)
    return False


def odd(text: str) -> object:
    return None


def broken(text: str) -> bool:
    raise LookupError("no list of words")


RELEASED = threading.Event()


def stuck(text: str) -> bool:
    return not RELEASED.wait(30)


def server(script: Any, judge: str, mode: str, **config: Any):
    judge = judge if "/" in judge else HERE + judge
    return live(behaviour(script), moderation=judge, moderation_mode=mode, **config)


def client_text(reply: Reply, index: int = 0) -> tuple[str, str, bool]:
    """(text, finish_reason, was text withdrawn) as a client has them that follows docs/moderation.md."""
    text, finish, taken_back = "", "", False
    for event in reply.events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice.get("delta") or choice
            text += delta.get("content") or delta.get("text") or ""
            finish = choice["finish_reason"] or finish
            if withdrawal := choice.get("withdrawal"):
                taken_back = text != withdrawal["replacement"]
                text = withdrawal["replacement"]
    return text, finish, taken_back


@pytest.mark.parametrize("mode", ["buffer", "window", "after"])
def test_a_flagged_answer_is_withdrawn(mode: str) -> None:
    with server(says(TEXT), "replaced", mode, moderation_window=20) as running:
        for send in (running.chat, running.complete):
            streamed, whole = send(stream=True, max_tokens=99), send(max_tokens=99)
            text, finish, taken_back = client_text(streamed)
            assert (text, finish) == ("I cannot say that.", "content_filter")
            assert taken_back == (mode != "buffer")
            choice = whole.json["choices"][0]
            shown = choice["message"]["content"] if "message" in choice else choice["text"]
            assert (shown, choice["finish_reason"]) == ("I cannot say that.", "content_filter")
            assert choice["withdrawal"] == {"reason": "flagged", "replacement": "I cannot say that."}
            for reply in (streamed, whole):
                assert mode == "after" or b"secret" not in reply.data
        counters = running.get("/metrics").data.decode()
        assert 'moderation_judgements_total{engine="0",model_name="tiny-test",result="flagged"} 4.0' in counters
        assert 'finished_reason="content_filter"} 4.0' in counters
        assert running.get("/requests").json["data"][0]["finish_reasons"] == ["content_filter"]


@pytest.mark.parametrize("mode", ["buffer", "window", "after"])
def test_an_answer_that_passes_arrives_unchanged(mode: str) -> None:
    with server(says(TEXT), "second", mode, moderation_window=7) as running:
        reply = running.chat(stream=True, max_tokens=99, stream_options={"include_usage": True})
        assert client_text(reply) == (TEXT, "stop", False)
        assert reply.events[-1]["usage"]["completion_tokens"] == len(ids(TEXT)) + 1
        body = running.chat(max_tokens=99, logprobs=True).json["choices"][0]
        assert body["message"]["content"] == TEXT and "withdrawal" not in body
        assert len(body["logprobs"]["content"]) == len(ids(TEXT))
        assert running.complete(max_tokens=0, echo=True, prompt="hi").json["choices"][0]["finish_reason"] == "length"


def test_when_a_text_is_judged() -> None:
    """buffer: once. window: at every window, from the beginning of the answer."""
    for mode, count in (("buffer", 1), ("window", 3)):
        SEEN.clear()
        with server(says("x" * 50), "secret", mode, moderation_window=20) as running:
            running.chat(max_tokens=99)
        assert len(SEEN) <= count and SEEN[-1] == "x" * 50
        assert all(len(text) >= 20 for text in SEEN) and all(text + "x" * (50 - len(text)) == "x" * 50 for text in SEEN)


def test_a_withdrawn_choice_ends_in_the_engine_and_the_others_go_on() -> None:
    with server(counts, "second", "window", moderation_window=10) as running:
        reply = running.complete(stream=True, n=2, max_tokens=60)
        assert client_text(reply, 0) == ("abc" * 20, "length", False)
        assert client_text(reply, 1) == ("", "content_filter", False)
        (finish,) = running.engine.finishes
        assert finish.choice == 1 and running.engine.open == 0 and not running.engine.cancels
        assert "b" not in "".join(
            choice["text"] for event in reply.events for choice in event["choices"] if choice["index"]
        )


def test_logprobs_of_a_withdrawn_text_are_withdrawn() -> None:
    with server(says(TEXT), "secret", "buffer") as running:
        chat = running.chat(max_tokens=99, logprobs=True).json["choices"][0]
        text = running.complete(max_tokens=99, logprobs=1, echo=True).json["choices"][0]
        assert chat["logprobs"]["content"] == [] and text["logprobs"]["tokens"] == [] and text["text"] == ""


def test_tool_calls_are_judged_and_withdrawn() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    SEEN.clear()
    with server(says(CALL.replace("Rome", "secret")), "secret", "after", moderation_window=1000) as running:
        reply = running.chat(stream=True, max_tokens=99, tools=tools)
        assert any(choice["delta"].get("tool_calls") for event in reply.events for choice in event["choices"])
        assert client_text(reply)[1] == "content_filter"  # and never tool_calls, by which a client would run it
        message = running.chat(max_tokens=99, tools=tools).json["choices"][0]["message"]
        assert "tool_calls" not in message and message["content"] == ""
    assert '"city": "secret"' in SEEN[-1]


# --- judges that fail -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("judge", ["asleep", "odd", "broken", "http://127.0.0.1:9/v1/moderations"])
def test_without_a_verdict_nothing_passes(judge: str) -> None:
    with server(says(TEXT), judge, "buffer", moderation_timeout_s=0.1) as running:
        choice = running.chat(max_tokens=99).json["choices"][0]
        assert choice["finish_reason"] == "content_filter" and choice["message"]["content"] == ""
        assert choice["withdrawal"] == {"reason": "unjudged", "replacement": ""}
        assert client_text(running.chat(stream=True, max_tokens=99)) == ("", "content_filter", False)
        assert 'result="failed"} 2.0' in running.get("/metrics").data.decode()


def test_functions_that_hang_take_no_more_than_their_threads() -> None:
    """More answers than threads: those without a thread end at their timeout, and no thread keeps the process alive."""
    with server(says("Hi"), "stuck", "buffer", moderation_timeout_s=0.1) as running:
        body = running.complete(n=12, max_tokens=9).json
        assert [choice["withdrawal"]["reason"] for choice in body["choices"]] == ["unjudged"] * 12
        threads = [thread for thread in threading.enumerate() if thread.name == "moderation"]
        assert len(threads) == 8 and all(thread.daemon for thread in threads)
        RELEASED.set()
        running.until(lambda: not any(thread.is_alive() for thread in threads))
        assert running.complete(max_tokens=9).json["choices"][0]["finish_reason"] == "stop"


def test_an_operator_may_let_answers_pass_without_a_verdict() -> None:
    with server(says(TEXT), "odd", "after", moderation_failure="open") as running:
        assert client_text(running.chat(stream=True, max_tokens=99)) == (TEXT, "stop", False)


def test_an_engine_that_fails_says_so() -> None:
    with live(behaviour(counts, fail_after=3), moderation=HERE + "secret") as running:
        assert running.chat(max_tokens=99).status == 500
        assert b'"error"' in running.chat(stream=True, max_tokens=99).data


def test_a_client_that_leaves_ends_the_request() -> None:
    with live(behaviour(counts, delay=0.01), moderation=HERE + "secret", moderation_mode="buffer") as running:
        connection = running.connect()
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 1500, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        running.until(lambda: running.engine.open == 1)
        connection.close()
        running.until(lambda: running.engine.open == 0 and len(running.engine.cancels) == 1)


def test_silence_is_kept_alive() -> None:
    script = [*ids("x" * 40), eos_id()]
    with live(
        behaviour(lambda submit, choice: script, delay=0.01), moderation=HERE + "secret", keep_alive_s=0.05
    ) as running:
        assert b": keep-alive\n\n" in running.chat(stream=True, max_tokens=99).data


# --- endpoints ------------------------------------------------------------------------------------------------------------


@contextmanager
def endpoint() -> Iterator[tuple[str, list[Any]]]:
    """A moderation endpoint that flags the word, and what it was sent."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"]
            received.append((text, self.headers["authorization"]))
            result = {"flagged": "secret" in text, "categories": {}, "replacement": "[removed]"}
            data = json.dumps({"id": "modr-1", "model": "m", "results": [result]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    judge = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=judge.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{judge.server_port}/v1/moderations", received
    finally:
        judge.shutdown()
        judge.server_close()


def test_an_endpoint_judges() -> None:
    with endpoint() as (url, received), server(says(TEXT), url, "buffer", moderation_api_key="sesame") as running:
        assert running.chat(max_tokens=99).json["choices"][0]["message"]["content"] == "[removed]"
        assert received == [(TEXT, "Bearer sesame")]


@pytest.mark.parametrize("body", [[], {}, {"results": []}, {"results": [{}]}, {"results": [{"flagged": "no"}]}])
def test_an_answer_without_a_verdict_is_an_error(body: Any) -> None:
    with pytest.raises(ValueError, match="result"):
        read_results(body)


@pytest.mark.parametrize(
    "name", ["judge", "nowhere:judge", "json:nothing", "json:__doc__", ":x", "json:a b", "ftp://x"]
)
def test_a_judge_that_is_missing_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match="--moderation .*module:function") as caught:
        make_judge(name, None)
    assert caught.value.param == "moderation"


# --- the official client --------------------------------------------------------------------------------------------------


def test_the_official_client_reads_withdrawals() -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with (
        server(says(TEXT), "replaced", "after", moderation_window=20) as running,
        openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0) as client,
    ):
        chunks = list(client.chat.completions.create(model=MODEL, messages=messages, stream=True))
        last = chunks[-1].choices[0]
        assert last.finish_reason == "content_filter"
        assert last.withdrawal == {"reason": "flagged", "replacement": "I cannot say that."}
        with client.chat.completions.stream(model=MODEL, messages=messages) as stream:
            assert list(stream)
            with pytest.raises(openai.ContentFilterFinishReasonError):  # as for every filtered answer
                stream.get_final_completion()
        whole = client.chat.completions.create(model=MODEL, messages=messages)
        assert whole.choices[0].message.content == "I cannot say that."


def test_the_terminal_client_forgets_a_withdrawn_text() -> None:
    from ridgeline.cli.chat import times
    from ridgeline.cli.client import ChatClient

    with server(says(TEXT), "replaced", "after", moderation_window=20) as running:
        client = ChatClient(f"http://127.0.0.1:{running.port}")
        pieces = list(client.stream([{"role": "user", "content": "hi"}], {"max_tokens": 99}))
        assert pieces[-1] == client.last.text == "I cannot say that."
        assert "withdrawn" in times(client.last)
