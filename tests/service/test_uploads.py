"""Uploads of files: odd forms, slow clients, bounded space."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from .live import behaviour, live, says
from .test_batch_lane import form, upload, valid


@pytest.mark.filterwarnings("ignore")  # aiohttp warns about headers that end early
def test_odd_uploads(tmp_path: Path):
    file, purpose = ("file", b"{}", "a.jsonl"), ("purpose", b"batch", "")
    seconds, anchor = ("expires_after[seconds]", b"7", ""), ("expires_after[anchor]", b"created_at", "")
    cases: list[tuple[Any, str | None]] = [
        (form(purpose), "file"),
        (form(file), "purpose"),
        (form(file, ("purpose", b"vision", "")), "purpose"),
        (form(file, file, purpose), "file"),
        (form(file, purpose, seconds), "expires_after.anchor"),
        (form(file, purpose, seconds, anchor), "expires_after.seconds"),
        ((b"{}", {"content-type": "application/json"}), "file"),
        ((b"junk", {"content-type": "multipart/form-data; boundary=edge"}), "file"),
        ((b"--edge\r\nbroken", {"content-type": "multipart/form-data; boundary=edge"}), "file"),
        ((b"", {"content-type": "multipart/form-data"}), "file"),
    ]
    with live(behaviour(says("done")), batch_dir=str(tmp_path)) as server:
        for (body, headers), param in cases:
            answer = server.send("POST", "/v1/files", body, headers)
            assert answer.status == 400 and answer.error["param"] == param, (body, answer.data)
        whole, kind = form(file, purpose)
        for size in range(len(whole) - 12):  # a form that ends early
            assert server.send("POST", "/v1/files", whole[:size], kind).status == 400, size
        assert server.get("/v1/files").json["data"] == [] and not list((tmp_path / "files").iterdir())
        good = form(("file", b"{}", "../../etc/passwd"), purpose)
        assert server.send("POST", "/v1/files", *good).json["filename"] == "passwd"
        page = server.get("/v1/files").json
        valid("Files", page)
        deleted = server.send("DELETE", f"/v1/files/{page['first_id']}")
        valid("DeletedFile", deleted.json)
        valid("Batches", server.get("/v1/batches").json)
        for path in ("/v1/files/..%2Fstate.sqlite/content", "/v1/files/state.sqlite", "/v1/batches/none"):
            assert server.get(path).status == 404


def test_space_for_files_is_bounded(tmp_path: Path):
    with live(behaviour(says("done")), batch_dir=str(tmp_path), batch_max_gb=0.001) as server:
        assert upload(server, b"x" * (1 << 20)).status == 200
        assert upload(server, b"x" * (1 << 20)).error["code"] == "body_too_large"
        assert upload(server, b"x" * 20_000).status == 200
        assert upload(server, b"x" * 20_000).status == 413


def test_uploads_at_the_same_time_stay_within_the_space(tmp_path: Path):
    """The space was looked at when an upload began, so that two of them could have it twice."""
    body, headers = form(("purpose", b"batch", ""), ("file", b"x" * 900_000, "rows.jsonl"))
    with live(behaviour(says("done")), batch_dir=str(tmp_path), batch_max_gb=0.001) as server:
        first = server.connect()
        first.putrequest("POST", "/v1/files")
        for name, value in {**headers, "content-length": str(len(body))}.items():
            first.putheader(name, value)
        first.endheaders(body[:-600_000])
        server.until(lambda: any((tmp_path / "files").glob("*")))
        assert upload(server, b"x" * 600_000).error["code"] == "body_too_large"
        assert upload(server, b"x" * 100_000).status == 200
        first.send(body[-600_000:])
        assert first.getresponse().status == 200
        assert upload(server, b"x" * 100_000).status == 413


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_slow_client_may_send_a_form_byte_by_byte(tmp_path: Path, order: str):
    parts = [
        ("purpose", b"batch", ""),
        ("expires_after[anchor]", b"created_at", ""),
        ("expires_after[seconds]", b"3600", ""),
    ]
    file = ("file", b'{"a": 1}\n', "rows.jsonl")
    body, headers = form(*([*parts, file] if order == "before" else [file, *parts]))
    with live(behaviour(says("done")), batch_dir=str(tmp_path)) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: {headers['content-type']}\r\n"
        sock.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
        for index in range(len(body)):
            sock.sendall(body[index : index + 1])
            time.sleep(0.001)
        data = b""
        while part := sock.recv(65536):
            data += part
        answer, _, stored = data.partition(b"\r\n\r\n")
        assert b" 200 " in answer.splitlines()[0], stored
        file_id = json.loads(stored)["id"]
        assert server.get(f"/v1/files/{file_id}/content").data == file[1]


@pytest.mark.filterwarnings("ignore")
def test_names_in_the_headers_of_a_form_that_are_no_text(tmp_path: Path):
    file, purpose = ("file", b"{}", "NAME"), ("purpose", b"batch", "")
    body, headers = form(purpose, file)
    changes = [
        (body.replace(b"NAME", b"\xff.jsonl"), "file"),
        (body.replace(b'name="purpose"', b'name="purp\xffose"'), "purpose"),
        (form(("_charset_", b"x" * 40, ""), purpose, file)[0], "file"),
        (form(("purpose", b"b" * 5000, ""), file)[0], "purpose"),
    ]
    with live(behaviour(says("done")), batch_dir=str(tmp_path)) as server:
        for changed, param in changes:
            answer = server.send("POST", "/v1/files", changed, headers)
            assert answer.status == 400 and answer.error["param"] == param, (changed, answer.data)
        assert not list((tmp_path / "files").iterdir())
