"""A planted bottleneck is named, and its first remedy helps when it is applied."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "diagnose.py"


@pytest.mark.long
def test_a_planted_queue_is_named_and_cured(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--only", "queue", "prompts delay decoding", "--out", str(out)]
    subprocess.run(command, check=True, timeout=300)
    rows = json.loads(out.read_text())
    assert [row["right"] for row in rows] == [True, True]
    assert all(row["helps"] and row["predicted_change"] < -0.2 for row in rows)
