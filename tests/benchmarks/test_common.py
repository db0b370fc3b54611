"""What benchmarks write about themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import common

import ridgeline


def test_a_commit_can_be_given_where_there_is_no_git(tmp_path: Path) -> None:
    program = tmp_path / "gpu.py"
    program.write_text(
        "import json, os, common\n"
        "rows = [common.provenance('card', commit) for commit in ('abc', '')]\n"
        "del os.environ['BENCHMARK_COMMIT']\n"
        "print(json.dumps([*rows, common.provenance('card')]))\n"
    )
    path = os.pathsep.join(map(str, (common.HERE, Path(ridgeline.__file__).parents[1])))
    environ = {**os.environ, "PYTHONPATH": path, "PATH": str(tmp_path), "BENCHMARK_COMMIT": "def"}
    words = [sys.executable, str(program), "--rows", "a", "--commit", "abc", "--repeats", "3"]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, env=environ)
    rows = json.loads(ended.stdout)
    assert [row["commit"] for row in rows] == ["abc", "def", "unknown"]
    assert rows[0]["command"] == "python benchmarks/gpu.py --rows a --repeats 3"


def test_rows_of_the_same_name_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.json"
    common.write_rows(path, [{"row": "a", "value": 1}, {"row": "b", "value": 2}])
    common.write_rows(path, [{"row": "a", "value": 3}])
    assert json.loads(path.read_text()) == [{"row": "b", "value": 2}, {"row": "a", "value": 3}]
