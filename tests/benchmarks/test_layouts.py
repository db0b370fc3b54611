"""The published tables are read and predicted; errors stay within what docs/layouts.md says of an uncalibrated plan."""

from __future__ import annotations

import json

import layouts
import pytest
from common import HERE


@pytest.fixture(scope="module")
def published() -> dict[str, object]:
    loaded: dict[str, object] = json.loads((HERE / "workloads" / "published_layouts.json").read_text())
    return loaded


def test_errors_against_published_tables(published: dict[str, list[dict[str, object]]]) -> None:
    rows = layouts.compare(published["rows"])
    gains = layouts.scaling(rows)
    summary = {entry["row"]: entry for entry in layouts.summary([*rows, *gains], published["tables"])}  # type: ignore[arg-type]
    assert len(rows) == len(published["rows"]) and len(gains) > 60
    assert summary["summary: saturated"]["median_size"] < 0.2
    assert summary["summary: scaling"]["median_size"] < 0.1
    assert summary["summary: NIM"]["largest"] < 0.2
    refused = [row for row in rows if "refused" in row]
    assert all(row["tp"] == 1 and row["device"] == "h100" for row in refused) and len(refused) == 7


def test_every_table_has_its_source(published: dict[str, dict[str, dict[str, str]]]) -> None:
    tables = {row["table"] for row in published["rows"]}
    assert tables == set(published["tables"])
    assert all(entry["source"] and entry["read"] >= "2026" for entry in published["tables"].values())
