"""--warm-prefix: lines are checked, and computed before the server is ready. test_prompt_cache.py has the real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.service.warm_prefixes import read_prefixes

from .live import Live, behaviour, counts, live

SYSTEM = {"role": "system", "content": "You answer questions about mountain ridges. " * 3}


def write(folder: Path, *lines: Any) -> str:
    path = folder / "prefixes.jsonl"
    path.write_text("\n\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "either messages or prompt"),
        ({"messages": [SYSTEM], "prompt": "a"}, "either messages or prompt"),
        ({"prompt": "a", "ttl": "2h"}, "5m or 1h"),
        ({"prompt": "a", "stream": True}, "'stream'"),
        ({"messages": "a"}, "messages"),
        ({"prompt": "a", "cache_control": {"type": "x"}}, "cache_control.type"),
    ],
    ids=str,
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_prefixes(Path(write(tmp_path, {"prompt": "fine"}, line)))
    assert "prefixes.jsonl, line 3" in caught.value.message and words in caught.value.message
    assert caught.value.param == "warm_prefix"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read --warm-prefix"):
        read_prefixes(tmp_path / "none.jsonl")


def test_a_line_that_the_model_cannot_take_ends_the_start(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "x" * 4000})
    with (
        pytest.raises(ConfigError, match="line 1: The prompt has 4000 tokens"),
        live(behaviour(counts), warm_prefix=path),
    ):
        pass


def test_health_is_503_until_prefixes_are_computed(tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": [SYSTEM], "cache_salt": "a"}, {"prompt": [1, 2, 3], "ttl": "1h"})
    with live(behaviour(counts, loading=True, stuck=True), warm_prefix=path) as server:
        server.run(_ready(server))
        server.until(lambda: server.engine.submits)
        assert server.get("/health").status == 503
        assert server.complete().status == 503
        (submit,) = server.engine.submits
        assert submit.salt == "a" and submit.sampling.max_tokens == 1
        assert submit.breakpoints[0][1] == float("inf")
        assert 0 < submit.breakpoints[0][0] < len(submit.tokens), "the assistant's turn is not part of the prefix"


async def _ready(server: Live) -> None:
    server.engine.ready()


def test_a_prefix_that_fails_is_logged_and_the_server_opens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    with live(behaviour(counts, fail_after=0), warm_prefix=path) as server:
        assert server.get("/health").status == 200
    assert sum("was not computed" in record.getMessage() for record in caplog.records) == 2
