"""Log lines of every process of a server: as text, or as JSON with one object a line."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
FORMAT_VARIABLE = "_RIDGELINE_LOG_FORMAT"
"""Environment variable by which the processes that a server starts learn its format. Options begin with RIDGELINE_: it is none."""

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task answers; "" outside of requests."""


def configure_logging(
    level: int | str, form: str | None = None, environ: MutableMapping[str, str] = os.environ
) -> logging.Handler:
    """Write log lines to standard error. Returns the handler.

    level: the lowest level that is written. form: one of FORMATS, which processes started later inherit; None: the inherited one.
    """
    if form is not None:
        environ[FORMAT_VARIABLE] = form
    is_json = environ.get(FORMAT_VARIABLE) == "json"
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter())
    logging.basicConfig(level=level.upper() if isinstance(level, str) else level, handlers=[handler])
    return handler


class TextFormatter(logging.Formatter):
    """Level, logger, message, and the id of the request if there is one."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        request = REQUEST_ID.get()
        return super().formatMessage(record) + (f" [request {request}]" if request else "")


class JsonFormatter(logging.Formatter):
    """One JSON object: time (UTC, RFC 3339), level, logger, process, message, request_id within a request, the members of `fields`
    if the call of the logger has them in `extra`, and exception with the traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if request := REQUEST_ID.get():
            line["request_id"] = request
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
