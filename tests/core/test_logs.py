"""Log lines as text and as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime

import pytest

from ridgeline.core.logs import REQUEST_ID, JsonFormatter, TextFormatter

SAYS = (
    "import logging; from ridgeline.core.logs import configure_logging as c; c({}); logging.getLogger('a').info('said')"
)


def record(text: str, *arguments: object, **extra: object) -> logging.LogRecord:
    log = logging.getLogger("ridgeline.test")
    return log.makeRecord(log.name, logging.WARNING, __file__, 1, text, arguments, None, extra=extra)


def test_json_line() -> None:
    line = json.loads(JsonFormatter().format(record('a "%s"\n', "ö", fields={"status": 200})))
    assert line["message"] == 'a "ö"\n' and line["level"] == "warning" and line["logger"] == "ridgeline.test"
    assert line["status"] == 200 and "request_id" not in line and "exception" not in line
    assert datetime.fromisoformat(line["time"]).utcoffset().total_seconds() == 0


def test_lines_of_a_request_have_its_id() -> None:
    token = REQUEST_ID.set("req_1")
    try:
        assert json.loads(JsonFormatter().format(record("a")))["request_id"] == "req_1"
        assert TextFormatter().format(record("a")) == "WARNING ridgeline.test: a [request req_1]"
    finally:
        REQUEST_ID.reset(token)
    assert TextFormatter().format(record("a")) == "WARNING ridgeline.test: a"


def test_exceptions_stay_in_their_line() -> None:
    failed = record("a")
    try:
        raise ValueError("wrong")
    except ValueError:
        failed.exc_info = sys.exc_info()
    text = JsonFormatter().format(failed)
    assert "\n" not in text and json.loads(text)["exception"].endswith("ValueError: wrong")


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ("'info', 'text'", {}, "INFO a: said\n"),
        ("'info'", {"_RIDGELINE_LOG_FORMAT": "json"}, '"said"}\n'),  # as in an engine process
        ("'warning', 'json'", {}, ""),
    ],
)
def test_processes(arguments: str, environment: dict[str, str], said: str) -> None:
    code = SAYS.format(arguments)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": "src", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.endswith(said) and bool(done.stderr) == bool(said)
