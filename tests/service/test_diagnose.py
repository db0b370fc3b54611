"""`ridgeline diagnose` against a server that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.bench.server_state import DIAGNOSIS_KEYS
from ridgeline.cli.main import main

from .live import Live, behaviour, live, says


def test_a_running_server_is_diagnosed(polite: Live, capsys: pytest.CaptureFixture[str]) -> None:
    polite.chat()
    assert main(["diagnose", f"http://127.0.0.1:{polite.port}/v1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["bottleneck"] == "none" and "busy" in content["evidence"][0]
    assert main(["diagnose", f"http://127.0.0.1:{polite.port}"]) == 0
    assert "Bottleneck: none" in capsys.readouterr().out


def test_a_run_is_diagnosed(endless: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By what the server said in the middle of it and at its end."""
    folder, url = str(tmp_path / "run"), f"http://127.0.0.1:{endless.port}"
    asked = ["--num-prompts", "6", "--input-len", "8", "--output-len", "4", "--concurrency", "2", "--out", folder]
    main(["bench", "run", url, *asked])  # not valid, maybe, beside other tests
    file = tmp_path / "run" / "run.json"
    held = json.loads(file.read_text())
    state = held["ridgeline"]["facts"]["server"]
    assert set(state) == {*DIAGNOSIS_KEYS, "requests"} and state["figures"]["requests_per_second"] > 0
    # The server may write the last record after the client has read the last answer.
    assert len(state["requests"]) >= 5 and {request["output_tokens"] for request in state["requests"]} == {4}
    held["ridgeline"] |= {"loop_lag_s": [], "cpu_s": 0.0}
    file.write_text(json.dumps(held))
    capsys.readouterr()
    assert main(["diagnose", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bottleneck"] in ("none", "queue", "client", "decode bandwidth")
    held["ridgeline"]["cpu_s"] = 100 * held["ridgeline"]["seconds"]
    file.write_text(json.dumps(held))
    assert main(["diagnose", folder]) == 0
    out = capsys.readouterr().out
    assert "Bottleneck: client" in out and "the client was busy" in out
    state["latencies"] = {}
    file.write_text(json.dumps(held))
    assert main(["diagnose", folder, "--json"]) == 0
    text = capsys.readouterr().out
    assert "NaN" not in text and "does not report its cost" in json.loads(text)["no_predictions"]
    assert main(["diagnose", folder, "--apply", "1"]) == 2
    error = capsys.readouterr().err
    assert "--apply 1: there are no remedies" in error and "restart it with this version" in error
    held["ridgeline"]["facts"]["server"] = None
    file.write_text(json.dumps(held))
    assert main(["diagnose", folder]) == 2
    assert "has no figures of its server" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["nothing here", "ftp://x", "/no/such/folder"])
def test_what_is_neither_a_run_nor_an_address_is_refused(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", place]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_what_cannot_be_asked_says_how_to_mend_it(capsys: pytest.CaptureFixture[str]) -> None:
    with live(behaviour(says("hi")), api_key="sesame") as server:
        url = f"http://127.0.0.1:{server.port}"
        assert main(["diagnose", url]) == 2
        assert "--api-key" in capsys.readouterr().err
        assert main(["diagnose", url, "--api-key", "sesame"]) == 0
    assert main(["diagnose", url]) == 2
    assert "connection refused. Start the server" in capsys.readouterr().err
