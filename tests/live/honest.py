"""Honest requests, whose answers under abuse must be what they are alone."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .served import Served

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _said(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields}


def _written(prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": prompt, **fields}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": _said("Tell me a story about a lighthouse.", max_tokens=60, temperature=0),
    "streamed": _said("Tell me a story about a fox.", max_tokens=40, temperature=0, stream=True),
    "seeded": _said("Tell me a joke.", max_tokens=50, temperature=0.9, top_p=0.9, seed=7),
    "several": _written("Once upon a time", max_tokens=30, n=3, temperature=0.8, seed=11),
    "stopped": _written("Once upon a time", max_tokens=60, temperature=0, stop=["."]),
    "bound": _said(
        "Who are you?",
        max_tokens=80,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    ),
    "called": _said("The weather in Rome?", max_tokens=60, temperature=0, tools=[WEATHER], tool_choice="required"),
    "scored": _written("def add(a, b):\n    return a + b\n", max_tokens=8, temperature=0, echo=True, logprobs=2),
}


def answer(server: Served, name: str) -> Any:
    """What a request is answered, without what differs each time. After a 429 it is sent again."""
    path, body = REQUESTS[name]
    while (reply := server.send("POST", path, body)).status == 429:
        time.sleep(min(1.0, int(reply.headers["retry-after-ms"]) / 1000))  # the server may say a minute
    assert reply.status == 200, reply.data
    if body.get("stream"):
        events = reply.events
        return "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    return [_content(choice) for choice in reply.json["choices"]]


def _content(choice: dict[str, Any]) -> Any:
    """Text, calls and the tokens' scores (to 2 digits: sums in another order move the last of seven)."""
    message = choice.get("message", choice)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    scores = (choice["logprobs"] or {}).get("token_logprobs", ())
    rounded = [None if score is None else round(score, 2) + 0.0 for score in scores]
    return choice["finish_reason"], message.get("text", message.get("content")), calls, rounded


class Honest:
    """Asks what is honest in turn, in a thread, while others misbehave; every answer must be what it was `alone`."""

    def __init__(self, server: Served, alone: dict[str, Any]) -> None:
        self._server = server
        self._alone = alone
        self._names = itertools.cycle(REQUESTS)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """While the block runs, and at least once."""
        over = threading.Event()
        answers: list[tuple[str, Any]] = []
        thread = threading.Thread(target=self._ask, args=(over, answers))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        for name, answer in answers:
            assert answer == self._alone[name], name

    def _ask(self, over: threading.Event, answers: list[tuple[str, Any]]) -> None:
        while not (over.is_set() and answers):
            name = next(self._names)
            try:
                answers.append((name, answer(self._server, name)))
            except Exception as error:  # whatever it is, the test shows it beside what was expected
                answers.append((name, error))
                return
