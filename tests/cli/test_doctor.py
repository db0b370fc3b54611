"""`ridgeline doctor`: each check says what is wrong and what to do."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest

from ridgeline.cli import doctor
from ridgeline.cli.doctor_machine import (
    check_disk,
    check_gpus,
    check_limit,
    check_memory,
    check_python,
    check_shared_memory,
    check_torch,
    check_triton,
    driver_version,
)
from ridgeline.cli.doctor_model import check_model
from ridgeline.cli.doctor_server import Answer, check_clock, check_metrics, check_server, check_version
from ridgeline.cli.flags import read_flags
from ridgeline.hardware.probe import Device, Machine
from ridgeline.models.hub import shipped_model
from tests.service.live import MODEL, Live, behaviour, live, says

GIB = 1 << 30


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(behaviour(says("Hello")), api_key="key") as running:
        running.chat(headers={"x-api-key": "key"})
        yield running


def url(server: Live) -> str:
    return f"http://127.0.0.1:{server.port}"


def machine(*gpus: str) -> Machine:
    host = Device("cpu", "a processor", 8 * GIB, 8 * GIB)
    return Machine("a processor", 2, (), host, tuple(Device("cuda", name, 80 * GIB, 79 * GIB) for name in gpus))


def fake_torch(cuda: str | None, available: bool) -> SimpleNamespace:
    return SimpleNamespace(version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(is_available=lambda: available))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    return doctor.run(read_flags(doctor.parser(), words)), capsys.readouterr().out


def test_this_machine_a_model_and_a_server(server: Live, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, url(server), "--api-key", "key", "--model", str(shipped_model()), "--json")
    states = {check["name"]: check["state"] for check in json.loads(text)}
    assert {"python", "torch", "gpu", "triton", "cpu operations", "memory", "open files", "shared memory"} <= set(
        states
    )
    for name in ("python", "torch", "model", "model files", "server", "clock", "version", "models", "metrics"):
        assert states[name] == "ok", (name, text)
    assert status == int("fail" in states.values())
    for check in json.loads(text):
        assert bool(check["remedy"]) == (check["state"] != "ok")


def test_text_and_status(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, "http://127.0.0.1:9")
    assert status == 1 and "fail  server" in text and "connection refused\n" in text and "start it, or give" in text


def test_a_server_that_refuses_the_key(server: Live) -> None:
    states = {check.name: check for check in check_server(url(server))}
    assert states["server"].state == "ok" and states["models"].state == "fail" and states["metrics"].state == "warn"
    assert "RIDGELINE_API_KEY" in states["models"].remedy and MODEL not in states["models"].detail


def test_machine() -> None:
    assert check_python((3, 10, 1)).state == "fail" and check_python((3, 13, 0)).state == "ok"
    old, torch = check_torch("99.0", "100.0")
    assert old.state == "fail" and "torch>=99.0,<100.0" in old.remedy and torch is not None
    assert check_memory(GIB, 8 * GIB).state == "warn" and check_memory(4 * GIB, 8 * GIB).state == "ok"
    assert check_limit("open files", 1024, 4096, "ulimit -n 65536").remedy.startswith("ulimit -n 65536")
    assert check_limit("open files", -1, 4096, "ulimit -n 65536").detail == "limit unlimited"
    assert check_shared_memory(Path("/not/there"), 2).state == "warn"
    assert check_shared_memory(Path("/"), 2).state == "ok"


@pytest.mark.parametrize(
    ("gpus", "torch", "state", "words"),
    [
        ((), fake_torch(None, False), "ok", "none"),
        (("NVIDIA H100 80GB HBM3",), fake_torch("12.8", True), "ok", "driver 570.1"),
        (("NVIDIA H100 80GB HBM3",), fake_torch(None, False), "fail", "CPU build"),
        (("NVIDIA H100 80GB HBM3",), fake_torch("13.0", False), "fail", "cannot use it"),
        (("NVIDIA Toaster",), fake_torch("12.8", True), "warn", "not in the hardware table"),
    ],
)
def test_gpus(gpus: tuple[str, ...], torch: SimpleNamespace, state: str, words: str) -> None:
    check = check_gpus(machine(*gpus), torch, "570.1")
    assert check.state == state and words in check.detail


def test_triton_and_driver(tmp_path: Path) -> None:
    assert check_triton(machine(), "").state == "ok"
    assert check_triton(machine("a GPU"), "").state == check_triton(machine("a GPU"), "3.5.1").state == "fail"
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n")
    assert driver_version(file) == "570.124.06" and driver_version(tmp_path / "none") == ""


def test_disks(tmp_path: Path) -> None:
    assert str(tmp_path / "a/b") in check_disk("disk", tmp_path / "a/b").detail
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o500)
    if not os.access(sealed, os.W_OK):  # root may write everywhere
        assert check_disk("disk", sealed).state == "fail"


def test_models(tmp_path: Path) -> None:
    assert check_model("some/model")[0].state == "warn"
    assert check_model(str(tmp_path))[0].state == "fail"
    broken = tmp_path / "model"
    shutil.copytree(shipped_model(), broken)
    (broken / "model.safetensors").unlink()
    assert check_model(str(broken))[-1].state == "fail" and "*.safetensors" in check_model(str(broken))[-1].detail
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    (broken / "model-1.safetensors").write_bytes(b"")
    assert check_model(str(broken))[-1].detail == "missing: model-2.safetensors"


def test_clocks_and_versions() -> None:
    now = time.time()
    assert check_clock(Answer(200, "", formatdate(now, usegmt=True), now, now)).state == "ok"
    late = check_clock(Answer(200, "", formatdate(now - 60, usegmt=True), now, now))
    assert late.state == "warn" and "the clocks differ by" in late.detail
    assert check_clock(Answer(200, "", formatdate(now + 60, usegmt=True), now, now)).state == "warn"
    assert check_clock(Answer(200, "", "")).state == "warn"
    assert check_version(Answer(200, '{"version": "0.0.1"}')).state == "warn"
    assert check_version(Answer(200, "<html>")).state == "warn"


def test_metrics() -> None:
    signs = check_metrics(Answer(200, 'ridgeline:failed_steps_total{model_name="a b"} 2\nridgeline:x +Inf\n'))
    assert [(check.name, check.state) for check in signs] == [("metrics", "ok"), ("failed steps", "warn")]
    assert check_metrics(Answer(200, "ridgeline:kv_cache_usage_perc 1.5\n"))[0].state == "fail"
    assert check_metrics(Answer(200, "ridgeline:prompt_tokens_total -1\n"))[0].state == "fail"
    assert check_metrics(Answer(200, "<html>"))[0].state == "fail"
    assert check_metrics(Answer(200, ""))[0].state == "fail"
