"""Questions with known answers: what a file may say, what counts as right, and how it is counted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.cli.main import main
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.quality.served import Endpoint
from ridgeline.quality.tasks import Question, ask, count, read_tasks, shipped_tasks

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"name": "look", "arguments": {"city": "Rome"}}
BIRDS = "The bird sat on"
CHAT = [{"role": "user", "content": "Where?"}]


def quiet(stage: str, done: int, total: int) -> None: ...


class Scripted(BaseHTTPRequestHandler):
    """Says `answer` to whatever is asked; echoed prompts have one token per character, likelier ones in `likely`."""

    answer: dict[str, Any]
    likely: str
    asked: list[dict[str, Any]]

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._send({"data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        if body.get("echo"):
            text = body["prompt"] + "!"
            values = [None, *(-0.1 if token in self.likely else -1.0 for token in text[1:])]
            scores = {"token_logprobs": values, "text_offset": list(range(len(text)))}
            self._send({"choices": [{"text": text, "logprobs": scores}]})
        else:
            self._send({"choices": [{"finish_reason": "stop", **self.answer}]})

    def _send(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def scripted(likely: str = "", **answer: Any) -> Iterator[tuple[Endpoint, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    facts = {"answer": answer, "likely": likely, "asked": asked}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Scripted,), facts))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield Endpoint(f"http://127.0.0.1:{server.server_port}"), asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("right", "text", "accepted"),
    [
        ({"exact": ["on a wall", "a wall"]}, " a wall\n", True),
        ({"exact": ["a wall"]}, "a wall.", False),
        ({"pattern": r"(?<!\d)13\D*$"}, "7 + 6 = 13.", True),
        ({"pattern": r"(?<!\d)13\D*$"}, "113", False),
    ],
)
def test_texts(tmp_path: Path, right: dict[str, Any], text: str, accepted: bool) -> None:
    questions = read_tasks(written(tmp_path, {"prompt": BIRDS, "max_tokens": 9, **right}))
    with scripted(text=text) as (endpoint, asked):
        assert ask(endpoint, questions, quiet) == [accepted]
    assert asked == [{"model": "scripted", "prompt": BIRDS, "max_tokens": 9, "temperature": 0.0}]


@pytest.mark.parametrize(
    ("message", "finish", "accepted"),
    [
        ({"tool_calls": [{"function": {"name": "look", "arguments": '{"city": "Rome"}'}}]}, "tool_calls", True),
        ({"tool_calls": [{"function": {"name": "look", "arguments": '{"city": "Oslo"}'}}]}, "tool_calls", False),
        ({"tool_calls": [{"function": {"name": "seek", "arguments": '{"city": "Rome"}'}}]}, "tool_calls", False),
        ({"tool_calls": [{"function": {"name": "look", "arguments": '{"city": "Ro'}}]}, "tool_calls", False),
        ({"content": "look at Rome"}, "stop", False),
    ],
)
def test_tool_calls(tmp_path: Path, message: dict[str, Any], finish: str, accepted: bool) -> None:
    questions = read_tasks(written(tmp_path, {"messages": CHAT, "tools": TOOLS, "call": CALL}))
    with scripted(message=message, finish_reason=finish) as (endpoint, asked):
        assert ask(endpoint, questions, quiet) == [accepted]
    assert asked[0]["tools"] == TOOLS and asked[0]["messages"] == CHAT


def test_a_chat_answer_must_end(tmp_path: Path) -> None:
    questions = read_tasks(written(tmp_path, {"messages": CHAT, "pattern": "Rome"}))
    for finish, accepted in (("stop", True), ("length", False)):
        with scripted(message={"content": "Rome Rome Rome"}, finish_reason=finish) as (endpoint, _):
            assert ask(endpoint, questions, quiet) == [accepted]


def test_choices_are_weighed_by_their_own_tokens(tmp_path: Path) -> None:
    """Longer choices have more to lose; what stands in the prompt, or is written behind the choice, counts for none."""
    row: dict[str, Any] = {"prompt": BIRDS, "choices": [" xyz", " ab", " abcdefgh"], "answer": 1}
    questions = read_tasks(written(tmp_path, row))
    with scripted(likely="ab!") as (endpoint, asked):
        assert ask(endpoint, questions, quiet) == [True]
    assert sorted(request["prompt"] for request in asked) == sorted(BIRDS + choice for choice in row["choices"])
    assert all(request["echo"] and request["logprobs"] == 1 and request["max_tokens"] == 1 for request in asked)
    with scripted(likely="xyz") as (endpoint, _):
        assert ask(endpoint, questions, quiet) == [False]


def test_a_server_that_scores_nothing_is_named(tmp_path: Path) -> None:
    questions = read_tasks(written(tmp_path, {"prompt": BIRDS, "exact": ["x"]}))
    with scripted(nothing=1) as (endpoint, _), pytest.raises(EngineFailed, match="is not an answer of the OpenAI API"):
        ask(endpoint, questions, quiet)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a"}, "line 1: give one of exact, pattern, call, choices"),
        ({"prompt": "a", "exact": ["b"], "pattern": "c"}, "give one of exact, pattern"),
        ({"exact": ["b"]}, 'give either "prompt" or "messages"'),
        ({"prompt": "a", "exact": "b"}, "exact must be a list of texts"),
        ({"prompt": "a", "exact": ["b"], "max_token": 3}, "the key 'max_token' is unknown"),
        ({"prompt": "a", "exact": ["b"], "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "a", "pattern": "(b"}, "not a regular expression"),
        ({"prompt": "a", "choices": ["b", "c"]}, "answer is None"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": 2}, "answer is 2"),
        ({"messages": CHAT, "choices": ["b", "c"], "answer": 0}, 'choices need "prompt"'),
        ({"messages": CHAT, "call": CALL}, 'the line needs "messages" and "tools"'),
    ],
)
def test_questions_that_cannot_be_asked(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_tasks(written(tmp_path, row))


def test_files_without_questions(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="contains no questions"):
        read_tasks(empty)
    with pytest.raises(ConfigError, match="Cannot read the questions of --tasks .*none.jsonl: No such file"):
        read_tasks(tmp_path / "none.jsonl")


def test_a_question_may_hold_other_separators_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b", "exact": ["\u0085"]}\r\n', encoding="utf-8")
    assert len(read_tasks(path)) == 1


def test_the_shipped_questions() -> None:
    tasks = read_tasks(shipped_tasks())
    assert len(tasks) > 150 and {task.rule for task in tasks} == {"exact", "pattern", "call", "choices"}


def test_shares_and_drop_with_intervals() -> None:
    questions = [Question("even" if place % 2 == 0 else "odd", {}, "exact", ["x"]) for place in range(100)]
    reference = [True] * 80 + [False] * 20
    right = [True] * 70 + [False] * 30
    actual = count(questions, right, reference)
    assert actual.by_task == {"even": (50, 40, 35), "odd": (50, 40, 35)}
    accuracy, drop = actual.figures["task_accuracy"], actual.figures["task_drop"]
    # Wilson's interval of 70 in 100, worked out by hand.
    assert (accuracy.value, accuracy.low, accuracy.high) == pytest.approx((0.7, 0.6042, 0.7811), abs=1e-4)
    # The same questions go wrong, so the drop is known better than two shares of 100 would say.
    assert drop.value == pytest.approx(0.1)
    assert drop.low is not None and drop.high is not None
    assert np.isclose(drop.high - drop.low, 2 * 1.96 * np.sqrt(0.1 * 0.9 / 100), atol=0.02)
    alone = count(questions, right, None)
    assert set(alone.figures) == {"task_accuracy"} and alone.by_task["odd"] == (50, None, 35)
    none = count(questions[:2], [False, False], None).figures["task_accuracy"]
    assert none.low == 0.0 and none.high is not None and 0.5 < none.high < 1


def test_compare_holds_tasks_against_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = str(written(tmp_path, {"prompt": "a", "exact": ["b"]}, {"prompt": "a", "exact": ["b", "c"]}))
    with scripted(text="b") as (good, _), scripted(text="c") as (worse, _):
        words = ["--tasks", tasks, "--json", "--max-task-drop", "0.6", "--min-task-accuracy"]
        assert main(["compare", good.url, worse.url, *words, "0.5"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["figures"]["task_drop"]["value"] == 0.5 and facts["questions"] == 2
        assert facts["tasks"]["all"] == {"asked": 2, "right_reference": 2, "right": 1}
        assert main(["compare", good.url, worse.url, *words, "0.9"]) == 1
        capsys.readouterr()
        assert main(["compare", good.url, worse.url, "--tasks", tasks]) == 0
        assert "all 2 to 1 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-task-drop", "0.1", "--text", "{file}"), "--max-task-drop needs questions: give --tasks FILE"),
        (("--max-kl", "0.1", "--tasks", "{file}"), "--max-kl needs texts: give --text FILE"),
    ],
)
def test_limits_of_what_is_not_measured(
    tmp_path: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, {"prompt": "a", "exact": ["b"]})
    assert main(["compare", "http://a", "http://b", *(word.format(file=file) for word in words)]) == 2
    assert said in capsys.readouterr().err
