"""Grammars that no limit of the library bounds end with their process, and the next one is judged by another."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.core.errors import EngineFailed, UnsupportedField
from ridgeline.core.sampling import Grammar
from ridgeline.text.grammar import MAX_SOURCE
from ridgeline.text.grammar_worker import GrammarWorker
from tests.text.conftest import byte_level_backend

INTERSECTED = Grammar(
    "json_schema",
    json.dumps({"allOf": [{"type": "string", "pattern": f".*{123456789 + i * 7654321}.{{20}}"} for i in range(24)]}),
)
"""1.5 kB that took 4 GB and did not end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_level_backend().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The processes that the test starts."""
    processes: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *given, **named: processes.append(popen(*given, **named)) or processes[-1]
    )
    return processes


@pytest.fixture
def worker(folder: Path) -> Iterator[GrammarWorker]:
    worker = GrammarWorker(folder, vocab_size=471, end_ids=[2])
    yield worker
    worker.close()


def test_verdicts(worker: GrammarWorker) -> None:
    assert worker.judge(Grammar("regex", "[ab]+\n\ud7ff")) == ""
    assert worker.judge(Grammar("regex", "(")) == "The regex does not compile: unclosed group."
    assert "surrogate" in worker.judge(Grammar("regex", "a\ud800"))
    assert f"more than {MAX_SOURCE}" in worker.judge(Grammar("regex", "a" * (MAX_SOURCE + 1)))


def test_a_grammar_that_takes_too_much_is_refused_and_the_next_one_is_judged(
    worker: GrammarWorker, started: list[subprocess.Popen[str]]
) -> None:
    assert worker.judge(INTERSECTED) == (
        "This schema is too large: shorten its patterns, enums and limits, and combine fewer of them."
    )
    assert worker.judge(INTERSECTED) and worker.judge(Grammar("json_schema", '{"type": "integer"}')) == ""
    assert len(started) == 1, "what was read of the model is not read again"


def test_a_process_that_was_killed_is_no_verdict_and_is_started_again(
    worker: GrammarWorker, started: list[subprocess.Popen[str]]
) -> None:
    worker.judge(Grammar("regex", "a"))
    started[0].kill()
    with pytest.raises(EngineFailed, match="killed: send the request again"):
        worker.judge(Grammar("regex", "a"))
    assert worker.judge(Grammar("regex", "a")) == ""


def test_a_model_without_an_end_token_takes_no_grammar(folder: Path) -> None:
    worker = GrammarWorker(folder, vocab_size=471, end_ids=[])
    with pytest.raises(UnsupportedField, match="end token"):
        worker.judge(Grammar("regex", "a"))
    worker.close()


def test_a_process_that_cannot_start_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="cannot start"):
        GrammarWorker(tmp_path, vocab_size=471, end_ids=[2]).judge(Grammar("regex", "a"))


def test_closing_ends_a_compilation_and_the_process(
    worker: GrammarWorker, started: list[subprocess.Popen[str]]
) -> None:
    worker.judge(Grammar("regex", "a"))
    errors: list[Exception] = []

    def judge() -> None:
        try:
            worker.judge(INTERSECTED)
        except EngineFailed as error:
            errors.append(error)

    thread = threading.Thread(target=judge)
    thread.start()
    time.sleep(0.1)
    worker.close()
    thread.join(10)
    assert len(started) == 1 and started[0].wait(10) != 0
    assert not thread.is_alive() and len(errors) <= 1
    with pytest.raises(EngineFailed):
        worker.judge(Grammar("regex", "b"))
