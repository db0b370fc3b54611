"""Why a server cannot be reached, in the words of the commands that try."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import urllib.error

import pytest

from ridgeline.bench.target import Address, Client
from ridgeline.cli.main import main
from ridgeline.core.reach import reason, unreachable


@pytest.fixture
def closed() -> str:
    """The address of a port where nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)"), "connection refused"),
        (urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")), "connection refused"),
        (urllib.error.URLError("no host given"), "no host given"),
        (TimeoutError("timed out"), "no answer in time"),
        (socket.gaierror(-2, "Name or service not known"), "the host name is not known"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), "TLS failed"),
        (http.client.BadStatusLine("x"), "the answer is not HTTP (BadStatusLine)"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)
def test_reasons(error: Exception, words: str) -> None:
    assert reason(error).startswith(words)
    assert str(unreachable("http://a:1", error)).startswith(f"Cannot reach http://a:1: {words}")


def test_diagnose_says_why_it_cannot_reach_a_server(closed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", closed]) == 2
    assert f"Cannot reach {closed}/dashboard/data: connection refused." in capsys.readouterr().err


def test_bench_says_why_it_cannot_reach_a_server(closed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "run", closed, "--rate", "1"]) == 2
    assert f"Cannot reach {closed} (no connection: connection refused)" in capsys.readouterr().err


def test_a_failed_request_of_the_load_generator_has_its_reason(closed: str) -> None:
    async def send() -> str:
        client = Client(Address(closed), 1.0)
        await client.open()
        return (await client.send(client.address.request("/health", None))).error

    assert asyncio.run(send()) == "no connection: connection refused"
