"""Memory of the front process while large bodies arrive, several at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import FLAGS
from .served import Served, growth, served

AT_ONCE = 4
BODY = 30_000_000


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with the default limit of bodies."""
    with served(tmp_path_factory.mktemp("memory"), *FLAGS, "--max-body-mb", "32") as server:
        yield server


def repeat(item: bytes) -> bytes:
    """About BODY bytes of items."""
    return b",".join([item] * max(1, BODY // (len(item) + 1)))


@pytest.mark.parametrize(
    ("start", "item", "end", "status", "most"),
    [
        pytest.param(b"[", b"{}", b"]", 413, 150, id="objects", marks=pytest.mark.long),
        pytest.param(b'{"prompt":[', b"{}", b"]}", 413, 150, id="field", marks=pytest.mark.long),
        pytest.param(b'{"prompt":[', b'"ab"', b"]}", 413, 150, id="strings", marks=pytest.mark.long),
        pytest.param(b"{", b'"ab":1', b"}", 413, 150, id="members", marks=pytest.mark.long),
        pytest.param(b'{"prompt":[', b"1234567", b"]}", 413, 150, id="ids", marks=pytest.mark.long),
        # Few enough to be decoded, one body at a time.
        pytest.param(b'{"prompt":[', b"123456789012", b"]}", 400, 300, id="fewer-ids", marks=pytest.mark.long),
        pytest.param(b'{"prompt":', b"[" * BODY, b"}", 413, 150, id="nested", marks=pytest.mark.long),
        pytest.param(b'{"prompt":"', b"a" * BODY, b'"}', 400, 300, id="text", marks=pytest.mark.long),
    ],
)
def test_large_bodies(roomy: Served, start: bytes, item: bytes, end: bytes, status: int, most: float) -> None:
    body = start + repeat(item) + end

    def ask(_: int) -> int:
        return roomy.send("POST", "/v1/completions", body).status

    def ask_at_once() -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            assert list(pool.map(ask, range(AT_ONCE))) == [status] * AT_ONCE

    assert growth(roomy, ask_at_once) < most
    assert roomy.complete(max_tokens=1).status == 200
