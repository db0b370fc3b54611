"""Dockerfiles, compose file, systemd unit and Slurm script, as far as they can be checked without what runs them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ridgeline.cli import serve
from ridgeline.cli.flags import read_flags
from ridgeline.cli.main import COMMANDS
from ridgeline.core.resolve import option_fields, resolve

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def ridgeline_options(environment: dict[str, str]) -> dict[str, str]:
    """The options among environment variables; each of them exists."""
    options = {name[10:].lower(): value for name, value in environment.items() if name.startswith("RIDGELINE_")}
    assert set(options) <= set(option_fields())
    return options


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_dockerfiles(file: Path) -> None:
    lines = instructions(file)
    values = dict(lines)
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert set(values) == known and lines[0][0] == "FROM"
    assert values["USER"] == "1000" and json.loads(values["CMD"])[0] in COMMANDS
    packed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for _, arguments in (line for line in lines if line[0] == "COPY"):
        *sources, target = [word for word in arguments.split() if not word.startswith("--")]
        assert all((ROOT / source).exists() and source in packed for source in sources), arguments
        if target.endswith("ridgeline-entrypoint"):
            assert json.loads(values["ENTRYPOINT"]) == [Path(target).name]
    runs = " ".join(arguments for name, arguments in lines if name == "RUN")
    pinned = re.search(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert pinned is not None and pinned[1] in runs.split()
    variables = dict(pair.split("=") for pair in values["ENV"].split())
    assert ridgeline_options(variables) == {"host": "0.0.0.0"}
    health = json.loads(values["HEALTHCHECK"].partition("CMD ")[2])
    compile(health[2], "HEALTHCHECK", "exec")


@pytest.mark.parametrize(("wanted", "built"), [("1", True), ("0", False)])
def test_entrypoint(wanted: str, built: bool, tmp_path: Path) -> None:
    for program in ("python", "ridgeline"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho {program} "$@"\n')
        (tmp_path / program).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "COMPILE_CPU_OPERATIONS": wanted}
    script = DEPLOY / "docker/entrypoint.sh"
    done = subprocess.run([script, "serve", "a b"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["python -m ridgeline.ops.native.build"] * built + ["ridgeline serve a b"]


def test_compose() -> None:
    services: dict[str, Any] = COMPOSE["services"]
    server = services["ridgeline"]
    assert (DEPLOY / server["build"]["context"]).resolve() == ROOT
    assert ROOT / server["build"]["dockerfile"] in DOCKERFILES
    options = ridgeline_options(server["environment"])
    assert resolve({**options, "otlp_traces_endpoint": ""}).service.log_level == "info"
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": ["ridgeline:8000"]}]
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/ridgeline.yaml").read_text())["providers"]
    assert any(
        volume.split(":")[1].startswith(provider["options"]["path"]) for volume in services["grafana"]["volumes"]
    )


def test_systemd_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd/ridgeline.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
    program, name, *words = shlex.split(command)
    assert Path(program).name == "ridgeline" and name in COMMANDS
    assert read_flags(serve.parser(), words).config == Path("/etc/ridgeline/serve.toml")
    (variables,) = re.findall(r"^Environment=(.*)$", text, re.M)
    assert ridgeline_options(dict(pair.split("=") for pair in variables.split())) == {"log_format": "json"}
    if shutil.which("systemd-analyze") is None:
        return
    unit = tmp_path / "ridgeline.service"
    unit.write_text(text.replace(program, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_slurm_script(tmp_path: Path) -> None:
    """Its command is one that `ridgeline serve` reads; without a key it ends."""
    script = DEPLOY / "slurm/ridgeline.sbatch"
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "hostname").write_text("#!/bin/sh\necho node7\n")
    (tmp_path / "hostname").chmod(0o755)
    job = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "123456", "SLURM_GPUS_ON_NODE": "2"}
    run = ["bash", str(script), "some/model", "--max-num-seqs", "8"]
    done = subprocess.run(run, env={**job, "RIDGELINE_API_KEY": "key"}, capture_output=True, text=True, check=True)
    address, option, program, name, *words = done.stdout.splitlines()
    assert (
        address == "http://node7:23456/v1" and option.startswith("--kill") and (program, name) == ("ridgeline", "serve")
    )
    resolved = resolve(read_flags(serve.parser(), words).flags)
    assert (resolved.model.model, resolved.service.port, resolved.engine.tensor_parallel_size) == (
        "some/model",
        23456,
        2,
    )
    for arguments, environment in ((run, job), (run[:2], {**job, "RIDGELINE_API_KEY": "key"})):
        ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode != 0 and ("export RIDGELINE_API_KEY" in ended.stderr or "give a model" in ended.stderr)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_scripts() -> None:
    scripts = [str(DEPLOY / name) for name in ("docker/entrypoint.sh", "slurm/ridgeline.sbatch")]
    subprocess.run(["shellcheck", *scripts], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_configuration() -> None:
    subprocess.run(
        ["promtool", "check", "config", str(DEPLOY / "prometheus/prometheus.yml")], check=True, capture_output=True
    )


@pytest.mark.long
def test_hadolint() -> None:
    subprocess.run(["hadolint", *map(str, DOCKERFILES)], check=True, capture_output=True)
