"""The Kubernetes objects of a fleet file: commands that our own readers accept, and names that fit together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli import route
from ridgeline.cli.flags import read_flags
from ridgeline.cli.main import main
from ridgeline.core.resolve import resolve
from ridgeline.service.fleet.file import FleetFile, read_fleet
from ridgeline.service.fleet.kubernetes import manifest
from ridgeline.service.fleet.options import read_router, read_url

CONTENT = {
    "replicas": 2,
    "gpus": ["0,1", "2,3", "4,5"],
    "ready_s": 600,
    "serve": {"model": "some/model", "max-num-seqs": "1k", "drain_s": 45},
    "router": {"policy": "least-work", "replica_limit": 32, "api_key": "only-here", "port": 9000, "drain_s": 60},
    "autoscale": {"most": 3},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps(CONTENT))
    return path


@pytest.fixture
def file(path: Path) -> FleetFile:
    return read_fleet(path, {})


@pytest.fixture
def objects(file: FleetFile) -> dict[tuple[str, str], Any]:
    return {(item["kind"], item["metadata"]["name"]): item for item in manifest(file, "image:1", "llm")["items"]}


def container(workload: Any) -> Any:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container


def test_the_replicas_command_is_that_of_the_file(objects: dict[tuple[str, str], Any], tmp_path: Path) -> None:
    replicas = objects["StatefulSet", "llm-replica"]
    arguments = container(replicas)["args"]
    assert arguments[:3] == ["serve", "--config", "/etc/ridgeline/replica.json"]
    options = tmp_path / "replica.json"
    options.write_text(objects["ConfigMap", "llm"]["data"]["replica.json"])
    flags = {key[2:].replace("-", "_"): value for key, value in zip(arguments[3::2], arguments[4::2], strict=True)}
    resolved = resolve(flags, file=options)
    assert (resolved.model.model, resolved.engine.max_num_seqs) == ("some/model", 1000)
    assert (resolved.service.host, resolved.service.port, resolved.service.batch_dir) == ("0.0.0.0", 8000, "off")
    assert container(replicas)["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert replicas["spec"]["replicas"] == 2
    assert replicas["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 60
    probe = container(replicas)["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] == 600


def test_the_router_knows_every_pod_there_may_be(objects: dict[tuple[str, str], Any]) -> None:
    router = objects["Deployment", "llm-router"]
    args = read_flags(route.parser(), container(router)["args"][1:])
    options = vars(args.options)
    urls = [read_url(url) for url in options.pop("replica")]
    assert urls == [f"http://llm-replica-{number}.llm-replicas:8000" for number in range(3)]
    assert read_router(options, "flag").policy == "least-work" and read_router(options, "flag").replica_limit == 32
    service = resolve(args.flags).service
    assert (service.host, service.port, service.drain_s, service.batch_dir) == ("0.0.0.0", 8000, 60.0, "off")
    assert "only-here" not in json.dumps(list(objects.values()))


def test_names_and_labels_fit_together(objects: dict[tuple[str, str], Any]) -> None:
    assert objects["StatefulSet", "llm-replica"]["spec"]["serviceName"] == "llm-replicas"
    assert objects["Service", "llm-replicas"]["spec"]["clusterIP"] == "None"
    for kind, name, service in (("StatefulSet", "llm-replica", "llm-replicas"), ("Deployment", "llm-router", "llm")):
        workload = objects[kind, name]["spec"]
        labels = workload["template"]["metadata"]["labels"]
        assert labels == workload["selector"]["matchLabels"] == objects["Service", service]["spec"]["selector"]
        assert container(objects[kind, name])["env"][0]["valueFrom"]["secretKeyRef"] == {
            "name": "llm",
            "key": "api-key",
        }
    assert all(re.fullmatch(r"[a-z][a-z0-9-]{0,62}", name) for _, name in objects)


def test_the_command_prints_them(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(path), "--kubernetes", "image:1"]) == 0
    assert len(json.loads(capsys.readouterr().out)["items"]) == 5
