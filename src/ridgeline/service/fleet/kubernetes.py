"""Writes the Kubernetes objects of a fleet: plain Deployments, no operator. Kubernetes starts, replaces and updates what it lists.

The replicas are a StatefulSet, whose pods have names that the router can be given before they run. Its update replaces one pod
at a time and waits until the next is ready; SIGTERM drains a pod.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.service.batches.settings import OFF
from ridgeline.service.fleet.file import FleetFile
from ridgeline.service.fleet.options import SHARED, RouterConfig

PORT = 8000
_CONFIG = "/etc/ridgeline"
_PROBE_S = 5
_END_S = 15
"""Seconds beyond the drain until Kubernetes kills a pod."""
_OWN_OPTIONS = ("host", "port", "batch_dir", "api_key", "admin_api_key")


def manifest(file: FleetFile, image: str, name: str = "ridgeline") -> dict[str, Any]:
    """A List of a ConfigMap, the replicas' StatefulSet and Service, the router's Deployment and Service.

    image: a container image with Ridgeline. If the file has keys, the objects read them from `api-key` and `admin-api-key` of a
    Secret `name`. Raises ConfigError for options that name files of this machine.
    """
    if file.service.ssl_certfile:
        raise ConfigError(
            "ssl_certfile (router) is a file of this machine, which no pod has: leave it out, and terminate TLS in an Ingress.",
            param="ssl_certfile",
        )
    if file.service.batch_dir not in ("", OFF):
        raise ConfigError(
            "batch_dir (router) is a folder of this machine, which no pod has: leave it out.", param="batch_dir"
        )
    if "api_keys" in file.serve:
        raise ConfigError(
            "api_keys (serve) is a file of this machine, which no pod has: leave it out.", param="api_keys"
        )
    most = max(file.fleet.replicas, file.scaling.most if file.scaling else 0)
    serve = {key: value for key, value in file.serve.items() if key not in _OWN_OPTIONS}
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(name, name),
        "data": {"replica.json": json.dumps(serve)},
    }
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            config,
            _service(f"{name}-replicas", "replica", name, clusterIP="None", publishNotReadyAddresses=True),
            _replicas(file, image, name),
            _router(file, image, name, most),
            _service(name, "router", name),
        ],
    }


def _replicas(file: FleetFile, image: str, name: str) -> dict[str, Any]:
    arguments = [
        "serve",
        "--config",
        f"{_CONFIG}/replica.json",
        "--host",
        "0.0.0.0",
        "--port",
        str(PORT),
        "--batch-dir",
        OFF,
    ]
    container = _container(file, image, name, "server", arguments)
    container["volumeMounts"] = [{"name": "config", "mountPath": _CONFIG}]
    container["startupProbe"] = _probe(max(1, round(file.fleet.ready_s / _PROBE_S)))
    if file.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": file.gpus[0].count(",") + 1}}
    drain_s = file.serve.get("drain_s", ServiceConfig().drain_s)
    spec = {
        "serviceName": f"{name}-replicas",
        "replicas": file.fleet.replicas,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate"},
        **_pods(name, "replica", container, float(drain_s), volumes=[{"name": "config", "configMap": {"name": name}}]),
    }
    return _object("StatefulSet", f"{name}-replica", name, spec)


def _router(file: FleetFile, image: str, name: str, most: int) -> dict[str, Any]:
    urls = [f"http://{name}-replica-{number}.{name}-replicas:{PORT}" for number in range(most)]
    arguments = ["route", "--host", "0.0.0.0", "--port", str(PORT), "--batch-dir", OFF]
    arguments += [word for url in urls for word in ("--replica", url)]
    for config, names in ((file.router, [field.name for field in fields(RouterConfig)]), (file.service, SHARED)):
        for key in names:
            value, default = getattr(config, key), getattr(type(config)(), key)
            if key not in _OWN_OPTIONS and value != default:
                arguments += [f"--{key.replace('_', '-')}", str(value)]
    container = _container(file, image, name, "router", arguments)
    spec = {
        "replicas": 1,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        **_pods(name, "router", container, file.service.drain_s),
    }
    return _object("Deployment", f"{name}-router", name, spec)


def _container(file: FleetFile, image: str, name: str, kind: str, arguments: list[str]) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": kind,
        "image": image,
        "command": ["ridgeline"],
        "args": arguments,
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": _probe(1),
    }
    keys = [key for key in ("api_key", "admin_api_key") if getattr(file.service, key) is not None]
    if keys:
        container["env"] = [
            {
                "name": f"RIDGELINE_{key.upper()}",
                "valueFrom": {"secretKeyRef": {"name": name, "key": key.replace("_", "-")}},
            }
            for key in keys
        ]
    return container


def _probe(failures: int) -> dict[str, Any]:
    """No liveness probe: a server restarts its engine itself, and ends when that does not help."""
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _PROBE_S, "timeoutSeconds": 2}
    return {**probe, "failureThreshold": failures}


def _pods(name: str, kind: str, container: dict[str, Any], drain_s: float, **more: Any) -> dict[str, Any]:
    spec = {"terminationGracePeriodSeconds": round(drain_s) + _END_S, "containers": [container], **more}
    template = {"metadata": {"labels": _labels(name, kind)}, "spec": spec}
    return {"selector": {"matchLabels": _labels(name, kind)}, "template": template}


def _service(service: str, kind: str, name: str, **more: Any) -> dict[str, Any]:
    ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
    spec = {"selector": _labels(name, kind), "ports": ports, **more}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(service, name), "spec": spec}


def _object(kind: str, title: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": _metadata(title, name), "spec": spec}


def _metadata(title: str, name: str) -> dict[str, Any]:
    return {"name": title, "labels": {"app.kubernetes.io/part-of": name}}


def _labels(name: str, kind: str) -> dict[str, str]:
    return {"app.kubernetes.io/part-of": name, "app.kubernetes.io/component": kind}
