"""The table of formats: the reference does not drift from itself, and a failing format does not lose the others."""

from __future__ import annotations

import json
from pathlib import Path

import formats
import pytest


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, dict]]:
    small = "--tokens 200 --prompts 1 --repeats 1 --batch 2 --threads 1 --calibration-tokens 200".split()
    out = tmp_path / "rows.json"
    status = formats.main(["--work", str(tmp_path / "work"), "--out", str(out), *small, *words])
    return status, {row["method"]: row for row in json.loads(out.read_text())}


@pytest.mark.long
def test_rows_state_bytes_speed_and_drift(tmp_path: Path) -> None:
    status, rows = run(tmp_path, "--formats", "int4", "--recipes", "rtn-int3-g128")
    plain, int4, int3 = (rows[name] for name in ("unquantized", "int4", "rtn-int3-g128"))
    assert status == 0
    assert plain["kl"] == 0 and plain["top1"] == 1 and plain["speedup"] == 1
    assert 0 < int4["kl"] < int3["kl"]
    assert int3["weight_bytes"] < int4["weight_bytes"] < plain["weight_bytes"]
    assert all(row["tok_s"] > 0 and row["tok_s_batch"] > 0 and row["commit"] for row in rows.values())


@pytest.mark.long
def test_a_failing_format_is_reported_and_rows_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = run(tmp_path, "--formats", "int5,int8", "--recipes", "")
    assert status == 1 and set(rows) == {"unquantized", "int8"}
    assert "int5: ConfigError" in capsys.readouterr().err
    capsys.readouterr()
    assert run(tmp_path, "--formats", "int8", "--recipes", "") == (0, rows)
    assert capsys.readouterr().out == "", "rows that the file has are not measured again"
