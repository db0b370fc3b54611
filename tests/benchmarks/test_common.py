"""What benchmarks write about themselves."""

from __future__ import annotations

import json
from pathlib import Path

import common
import pytest


def test_a_commit_can_be_given_where_there_is_no_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/gpu.py", "--rows", "a", "--commit", "abc", "--repeats", "3"])
    said = common.provenance("card", "abc")
    assert said["commit"] == "abc"
    assert said["command"] == "python benchmarks/gpu.py --rows a --repeats 3"
    monkeypatch.setenv("BENCHMARK_COMMIT", "def")
    assert common.provenance("card")["commit"] == "def"
    monkeypatch.delenv("BENCHMARK_COMMIT")
    monkeypatch.setattr(common, "HERE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert common.provenance("card")["commit"] == "unknown"


def test_rows_of_the_same_name_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.json"
    common.write_rows(path, [{"row": "a", "value": 1}, {"row": "b", "value": 2}])
    common.write_rows(path, [{"row": "a", "value": 3}])
    assert json.loads(path.read_text()) == [{"row": "b", "value": 2}, {"row": "a", "value": 3}]
