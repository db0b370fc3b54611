"""Run a file of requests on a server when it has time: submit, status, get, cancel.

submit sends FILE, one JSON request per line as OpenAI's Batch API describes it, and prints the id of the new batch. status shows
one batch, or the latest ones without an id. get writes the results; cancel keeps those that are finished.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ridgeline.cli.client import ChatClient
from ridgeline.cli.flags import Arguments, Parser, parser_for
from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.core.reach import reason
from ridgeline.service.batches.objects import ENDED

URL = "http://127.0.0.1:8000"
_POLL_S = 1.0
_PART = 1 << 18


def parser() -> Parser:
    parser = parser_for("batch", __doc__ or "", (), model=False)
    parser.add_argument("action", choices=("submit", "status", "get", "cancel"), help="what to do")
    parser.add_argument(
        "target", nargs="?", metavar="FILE|ID", help="submit: the file of requests; otherwise a batch's id"
    )
    parser.add_argument("--url", metavar="URL", help=f"address of the server (default {URL})")
    parser.add_argument("--api-key", dest="key", metavar="TEXT", help="API key of the server")
    parser.add_argument(
        "--endpoint", metavar="PATH", help="submit: endpoint of the requests (default: that of the first line)"
    )
    parser.add_argument(
        "--completion-window", metavar="TIME", help="submit: time after which rows expire (default 24h)"
    )
    parser.add_argument(
        "--metadata", metavar="KEY=VALUE", action="append", help="submit: a pair to store with the batch"
    )
    parser.add_argument(
        "--wait", action="store_true", help="submit, get: wait for the end of the batch; submit then prints results"
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="get: file for the results (default: standard output)")
    parser.add_argument("--errors", action="store_true", help="get: the errors of rows instead of the answers")
    parser.add_argument("--json", action="store_true", help="print objects of the API as JSON")
    return parser


def run(args: Arguments) -> int:
    options = args.options
    server = Server(ChatClient(getattr(options, "url", URL), getattr(options, "key", None)))
    target = getattr(options, "target", None)
    if target is None and options.action != "status":
        what = "the file of requests" if options.action == "submit" else "the id of a batch"
        raise ConfigError(f"batch {options.action} needs {what}.", param="target")
    if target is None or options.action == "status":
        return _status(server, target, options)
    return {"submit": _submit, "get": _get, "cancel": _cancel}[options.action](server, target, options)


def _submit(server: Server, target: str, options: argparse.Namespace) -> int:
    path = Path(target)
    body = {
        "endpoint": getattr(options, "endpoint", None) or _first_url(path),
        "completion_window": getattr(options, "completion_window", "24h"),
        "metadata": dict(_pair(text) for text in getattr(options, "metadata", [])),
    }
    body["input_file_id"] = server.upload(path)["id"]
    batch = server.call("POST", "/v1/batches", body)
    if not hasattr(options, "wait"):
        print(json.dumps(batch) if hasattr(options, "json") else batch["id"])
        return 0
    print(batch["id"], file=sys.stderr)
    return _get(server, batch["id"], options)


def _first_url(path: Path) -> str:
    """The endpoint that the first line names."""
    with path.open("rb") as file:
        line = next((line for line in file if line.strip()), b"")
    try:
        return str(json.loads(line)["url"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"The first line of {path} names no url: give --endpoint.", param="endpoint") from None


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--metadata is {text!r}: give KEY=VALUE.", param="metadata")
    return key, value


def _status(server: Server, target: str | None, options: argparse.Namespace) -> int:
    if target is None:
        batches = server.call("GET", "/v1/batches?" + urlencode({"limit": 20}))["data"]
    else:
        batches = [server.batch(target)]
    for batch in batches:
        print(json.dumps(batch) if hasattr(options, "json") else summary(batch))
    return 0


def summary(batch: dict[str, Any]) -> str:
    """A batch in one line, and its problems below."""
    counts = batch["request_counts"]
    line = (
        f"{batch['id']}  {batch['status']:11}  {counts['completed']} of {counts['total']} done, {counts['failed']} failed, "
        f"{batch['usage']['total_tokens']} tokens  {batch['endpoint']}"
    )
    problems = (batch["errors"] or {"data": []})["data"]
    lines = [
        f"  line {problem['line']}: {problem['message']}" if problem["line"] else f"  {problem['message']}"
        for problem in problems
    ]
    return "\n".join([line, *lines])


def _get(server: Server, target: str, options: argparse.Namespace) -> int:
    """Write the results. Exit status 1 if there are none, or if the batch failed."""
    batch = server.batch(target)
    while hasattr(options, "wait") and batch["status"] not in ENDED:
        time.sleep(_POLL_S)
        batch = server.batch(target)
    if batch["status"] not in ENDED:
        raise RidgelineError(
            f"{summary(batch)}\nResults can be read when the batch has ended: add --wait, or try again later."
        )
    file_id = batch["error_file_id" if hasattr(options, "errors") else "output_file_id"]
    print(summary(batch), file=sys.stderr)
    if file_id is None:
        return 1
    output = getattr(options, "output", None)
    with Path(output).open("wb") if output else open(sys.stdout.fileno(), "wb", closefd=False) as file:
        for part in server.content(file_id):
            file.write(part)
    return 0 if batch["status"] == "completed" else 1


def _cancel(server: Server, target: str, options: argparse.Namespace) -> int:
    batch = server.call("POST", f"/v1/batches/{target}/cancel", {})
    print(json.dumps(batch) if hasattr(options, "json") else summary(batch))
    return 0


class Server:
    """The routes of files and batches."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self.call("GET", f"/v1/batches/{batch_id}")

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One request with a JSON body, and the JSON of its answer. Raises RidgelineError with the server's message."""
        data = None if body is None else json.dumps(body).encode()
        value: dict[str, Any] = json.loads(b"".join(self._send(method, path, data, "application/json")))
        return value

    def content(self, file_id: str) -> Iterator[bytes]:
        """The bytes of a file."""
        return self._send("GET", f"/v1/files/{file_id}/content")

    def upload(self, path: Path) -> dict[str, Any]:
        """Send a file of requests, part by part."""
        boundary = uuid.uuid4().hex
        name = path.name.replace("\\", "_").replace('"', "%22").replace("\n", "_").replace("\r", "_")
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        length = len(head) + path.stat().st_size + len(tail)

        def parts() -> Iterator[bytes]:
            yield head
            with path.open("rb") as file:
                while part := file.read(_PART):
                    yield part
            yield tail

        kind = f"multipart/form-data; boundary={boundary}"
        value: dict[str, Any] = json.loads(b"".join(self._send("POST", "/v1/files", parts(), kind, length)))
        return value

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        kind: str = "",
        length: int | None = None,
    ) -> Iterator[bytes]:
        """The parts of an answer's body. Raises RidgelineError if the status is not 200."""
        headers = {"content-type": kind} if kind else {}
        if length is not None:
            headers["content-length"] = str(length)
        connection = self._client.connection()
        try:
            response = self._client.request(connection, method, path, body, headers)
            while part := response.read(_PART):
                yield part
        except http.client.HTTPException as error:
            raise RidgelineError(f"The answer ended early: {reason(error)}.") from None
        finally:
            connection.close()
