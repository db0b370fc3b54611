"""The Grafana dashboard asks for metrics and labels that a server and a router really have."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.service.live import behaviour, live, says
from tests.service.replicas import routed, streams

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/ridgeline.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
WITHOUT_SAMPLES = {"ridgeline:alert"}
"""Its label is not checked: no alert rule is violated here."""
_NAME = re.compile(r"ridgeline:\w+")
_TYPE = re.compile(r"^# TYPE (\S+) (\w+)$", re.M)
_SAMPLE = re.compile(r"^([\w:]+)\{(.*)\} \S+$", re.M)
_LABEL = re.compile(r'(\w+)="')


async def metrics() -> str:
    """Of a server and of a router, after a request, a refused one and one that was late."""
    with live(behaviour(says("Hello"), joules=1.0), slo="ttft=0.000001ms", max_queue=0) as server:
        await asyncio.to_thread(server.chat)
        server.server.front.metrics.aborted("overloaded")
        text = (await asyncio.to_thread(server.get, "/metrics")).data.decode()
    async with routed(streams) as fleet:
        await fleet.chat()
        return text + (await fleet.get("/metrics")).data.decode()


async def test_metrics_and_labels_exist() -> None:
    text = await metrics()
    kinds = dict(_TYPE.findall(text))
    labels: dict[str, set[str]] = defaultdict(set)
    for name, part in _SAMPLE.findall(text):
        labels[name] |= {*_LABEL.findall(part), "instance"}  # Prometheus adds instance
    known = set(kinds) | {f"{name}_bucket" for name, kind in kinds.items() if kind == "histogram"}
    for title, target in TARGETS:
        names = _NAME.findall(target["expr"])
        assert names and set(names) <= known, title
        assert all(
            ("rate(" in target["expr"] or "increase(" in target["expr"]) == (kinds.get(name) != "gauge")
            for name in names
        )
        wanted = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]), *re.findall(r"by \((\w+)\)", target["expr"])}
        for name in names:
            if labels[name]:
                assert wanted <= labels[name], (title, name)
    asked = {name for _, target in TARGETS for name in _NAME.findall(target["expr"])}
    assert {name for name in asked if not labels[name]} == WITHOUT_SAMPLES
    for variable in DASHBOARD["templating"]["list"]:
        assert set(_NAME.findall(str(variable["query"]))) <= known


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells and max(x for x, _ in mine) < 24, panel["title"]
        cells |= mine
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_queries_are_valid(tmp_path: Path) -> None:
    rules: list[Any] = []
    for number, (_, target) in enumerate(TARGETS):
        query = target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*").replace("$instance", ".*")
        rules.append({"record": f"query_{number}", "expr": query})
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", str(file)], check=True, capture_output=True)
