"""`ridgeline diagnose` against a server that runs."""

from __future__ import annotations

import json

import pytest

from ridgeline.cli.main import main

from .live import Live, behaviour, live, says


def test_a_running_server_is_diagnosed(polite: Live, capsys: pytest.CaptureFixture[str]) -> None:
    polite.chat()
    assert main(["diagnose", f"http://127.0.0.1:{polite.port}/v1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bottleneck"] == "none" and "busy" in found["evidence"][0]
    assert main(["diagnose", f"http://127.0.0.1:{polite.port}"]) == 0
    assert "Bottleneck: none" in capsys.readouterr().out


def test_what_cannot_be_asked_says_how_to_mend_it(capsys: pytest.CaptureFixture[str]) -> None:
    with live(behaviour(says("hi")), api_key="sesame") as server:
        url = f"http://127.0.0.1:{server.port}"
        assert main(["diagnose", url]) == 2
        assert "--api-key" in capsys.readouterr().err
        assert main(["diagnose", url, "--api-key", "sesame"]) == 0
    assert main(["diagnose", url]) == 2
    assert "start a server" in capsys.readouterr().err
