"""Installing with uvx is measured from an empty cache, without a compiler in sight, up to the first token."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from benchmarks.installing import served_by_uvx

SERVER = """
import http.server, json, os, shutil, sys, time

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices":[{"delta":{"content":""}}]}\\n\\n')
        self.wfile.flush()
        time.sleep(0.2)
        self.wfile.write(b'data: {"choices":[{"delta":{"content":"Once"}}]}\\n\\n')

    def log_message(self, *_):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
seen = {"words": sys.argv[1:], "cc": shutil.which("cc"), "port": server.server_port}
with open(os.environ["UV_SEEN"], "w") as file:
    json.dump(seen | {"cached": os.path.exists(os.environ["UV_CACHE_DIR"])}, file)
print(f"listening on http://127.0.0.1:{server.server_port}; Ctrl-C ends it", flush=True)
server.serve_forever()
"""


def ends(port: int) -> bool:
    """Whether nothing listens any more, within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return True
        time.sleep(0.05)
    return False


def test_uvx_installs_and_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with its children, and the empty piece that opens an answer is no token."""
    programs, scratch = tmp_path / "programs", tmp_path / "scratch"
    programs.mkdir()
    scratch.mkdir()
    (tmp_path / "server.py").write_text(SERVER)
    (programs / "uvx").write_text(f'#!/bin/sh\n"{sys.executable}" "{tmp_path}/server.py" "$@"\n')
    (programs / "uvx").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("UV_SEEN", str(tmp_path / "seen.json"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path))

    ready, token = served_by_uvx(Path("dist/some.whl"), ["--with", "torch==2.13.0"], scratch)

    seen = json.loads((tmp_path / "seen.json").read_text())
    assert token > ready + 0.2
    assert seen["words"] == [
        "--python", sys.executable, "--with", "torch==2.13.0", "--from", "dist/some.whl", "ridgeline", "serve", "--port", "0"
    ]  # fmt: skip
    assert seen["cc"] is None and not seen["cached"]
    assert ends(seen["port"])


def test_uvx_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="uvx"):
        served_by_uvx(Path("dist/some.whl"), [], tmp_path)
