"""The Kubernetes manifest and the output of the Helm chart: commands that our own readers accept, and names that fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ridgeline.cli import route, serve
from ridgeline.cli.flags import read_flags
from ridgeline.core.resolve import resolve
from ridgeline.core.version import VERSION
from ridgeline.service.fleet.options import read_router, read_url

from .go_template import render

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm/ridgeline"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
EVERYTHING = {
    **VALUES,
    "replicas": 3,
    "gpus": 2,
    "args": ["--tensor-parallel-size", "2"],
    "keysSecret": "keys",
    "otlpTracesEndpoint": "http://collector:4318",
    "router": {"enabled": True, "args": ["--replica-limit", "64"]},
    "serviceMonitor": {"enabled": True, "interval": "30s"},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}
NO_GPU = {**VALUES, "gpus": 0}


def chart(values: Mapping[str, Any]) -> list[Any]:
    files = sorted((CHART / "templates").glob("*.yaml"))
    documents = [yaml.safe_load_all(render(file.read_text(), values, "llm")) for file in files]
    return [item for items in documents for item in items if item is not None]


def manifest() -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes/ridgeline.yaml").read_text()))


SETS = {
    "manifest": manifest(),
    "chart": chart(VALUES),
    "everything": chart(EVERYTHING),
    "without GPUs": chart(NO_GPU),
}


def workloads(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Each workload with its container."""
    for item in items:
        if item["kind"] in ("Deployment", "StatefulSet"):
            (container,) = item["spec"]["template"]["spec"]["containers"]
            yield item, container


@pytest.mark.parametrize("name", SETS)
def test_names_fit_together(name: str) -> None:
    items = SETS[name]
    secrets = {"ridgeline", "keys"}
    volumes = {item["metadata"]["name"] for item in items if item["kind"] == "PersistentVolumeClaim"}
    labels = []
    for item, container in workloads(items):
        spec, pods = item["spec"], item["spec"]["template"]
        labels.append(pods["metadata"]["labels"])
        assert spec["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
        has = {volume["name"] for volume in pods["spec"].get("volumes", ())}
        has |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} == has
        for volume in pods["spec"].get("volumes", ()):
            assert volume.get("persistentVolumeClaim", {}).get("claimName", next(iter(volumes), None)) in (
                *volumes,
                None,
            )
        for variable in container.get("env", ()):
            if "valueFrom" in variable:
                reference = variable["valueFrom"]["secretKeyRef"]
                assert reference["name"] in secrets
                assert variable["name"] == "RIDGELINE_" + reference["key"].upper().replace("-", "_")
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"http": 8000} and "livenessProbe" not in container
        assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
        assert pods["spec"]["enableServiceLinks"] is False
    services = [item for item in items if item["kind"] == "Service"]
    for service in services:
        assert service["spec"]["ports"][0]["targetPort"] == "http"
        assert any(service["spec"]["selector"].items() <= pod.items() for pod in labels)
    names = {service["metadata"]["name"] for service in services}
    assert all(item["spec"].get("serviceName", next(iter(names))) in names for item, _ in workloads(items))


@pytest.mark.parametrize("name", SETS)
def test_commands_are_read_by_ridgeline(name: str) -> None:
    for item, container in workloads(SETS[name]):
        command, *words = container["args"]
        grace = item["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        args = read_flags({"serve": serve, "route": route}[command].parser(), words)
        if command == "serve":
            resolved = resolve(args.flags)
            assert resolved.model.model and resolved.service.port == 8000 and resolved.service.log_format == "json"
            assert resolved.service.drain_s < grace
            gpus = container["resources"].get("limits", {}).get("nvidia.com/gpu", 0)
            assert gpus == resolved.engine.ranks or not gpus
        else:
            options = vars(args.options)
            pods = [re.escape(read_url(url)) for url in options.pop("replica")]
            assert pods == [re.escape(f"http://llm-server-{number}.llm-servers:8000") for number in range(3)]
            assert read_router(options, "flag").replica_limit == 64
            assert resolve(args.flags).service.otlp_traces_endpoint == "http://collector:4318"


def test_the_service_leads_to_the_router_if_there_is_one() -> None:
    for name, component in (("chart", "server"), ("everything", "router")):
        service = next(item for item in SETS[name] if item["kind"] == "Service" and item["metadata"]["name"] == "llm")
        assert service["spec"]["selector"]["app.kubernetes.io/component"] == component
    assert not any(item["kind"] == "ServiceMonitor" for item in SETS["chart"])
    monitor = next(item for item in SETS["everything"] if item["kind"] == "ServiceMonitor")
    scraped = monitor["spec"]["selector"]["matchExpressions"][0]["values"]
    matched = [
        item["metadata"]["name"]
        for item in SETS["everything"]
        if item["kind"] == "Service" and item["metadata"]["labels"]["app.kubernetes.io/component"] in scraped
    ]
    assert sorted(matched) == ["llm", "llm-servers"]


def test_each_value_is_used() -> None:
    text = "".join(file.read_text() for file in (CHART / "templates").glob("*.yaml"))

    def leaves(values: Mapping[str, Any], path: str) -> Iterator[str]:
        for key, value in values.items():
            nested = isinstance(value, dict) and value and path == "" and key != "resources"
            yield from leaves(value, f"{path}{key}.") if nested else (f"{path}{key}",)

    for leaf in leaves(VALUES, ""):
        assert f".Values.{leaf}" in text, leaf
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == VERSION


@pytest.mark.long
@pytest.mark.parametrize("name", SETS)
def test_schemas_of_kubernetes(name: str) -> None:
    import kubernetes_validate

    for item in SETS[name]:
        if item["kind"] != "ServiceMonitor":  # of the Prometheus operator
            kubernetes_validate.validate(item, "1.34", strict=True)
