"""A model over two hosts, of which both are this one: the second is a process of the command, as on another machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.version import VERSION
from ridgeline.engine.hosts import accept_ranks, attach, check_address, check_hosts, first_address, gpu_of
from ridgeline.engine.rank_link import Link
from tests.models.families import save

from .test_group import CONFIG, answers, opened


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def two_hosts(**sizes: int) -> EngineConfig:
    return replace(CONFIG, nnodes=2, master_addr="127.0.0.1", master_port=free_port(), **sizes)  # type: ignore[arg-type]


@contextmanager
def second_host(config: EngineConfig, folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The command on the second host. It needs no option of the engine but those of the ranks. variables: of its environment."""
    command = [sys.executable, "-m", "ridgeline", "serve", str(folder), "--nnodes", "2", "--node-rank", "1"]
    axes = ("tensor", "pipeline", "context")
    sizes = [
        part for axis in axes for part in (f"--{axis}-parallel-size", str(getattr(config, f"{axis}_parallel_size")))
    ]
    place = ("--master-addr", config.master_addr, "--master-port", str(config.master_port))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), **variables}
    process = subprocess.Popen([*command, *sizes, *place], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=["a rank each", "a stage each", "two ranks each"],
)
def test_two_hosts_say_what_one_process_says(sizes: dict[str, int], tmp_path: Path) -> None:
    """The second host has its own copy of the model, at another path. A second engine finds it again."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        save("llama-gqa", folder)
    with opened(here, CONFIG) as single:
        expected = answers(single)
    config = two_hosts(**sizes)
    with second_host(config, there):
        for _ in range(2):
            with opened(here, config) as several:
                assert answers(several) == expected


def started(host: subprocess.Popen[str]) -> list[str]:
    """Lines of a second host until its rank has started, again or for the first time, and looks for the first host."""
    assert host.stderr is not None
    lines = [""]
    while "cannot reach host 0" not in lines[-1]:
        lines.append(host.stderr.readline())
        assert lines[-1], f"it has ended: {lines}"
    return lines


@pytest.mark.long
@pytest.mark.parametrize("axis", ["pipeline", "tensor", "context"])
def test_processes_of_both_hosts_end_without_a_crash(axis: str, tmp_path: Path) -> None:
    """The first host's process ends with status 0. The second host starts its rank again, and does not say that it crashed."""
    save("llama-gqa", tmp_path)
    config = two_hosts(**{f"{axis}_parallel_size": 2})
    names = ("device", f"{axis}_parallel_size", "nnodes", "master_addr", "master_port")
    job = {"folder": str(tmp_path), "sizes": {name: getattr(config, name) for name in names}}
    with second_host(config, tmp_path, PYTHONUNBUFFERED="1") as second:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        command = [sys.executable, "-m", "tests.engine.gpu_host", json.dumps(job)]
        started(second)
        first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert first.returncode == 0, first.stderr[-4000:]
        assert not any("ended with status" in line for line in started(second))
    said = json.loads(first.stdout.splitlines()[-1])
    assert said["answers"] == said["again"] and all(said["answers"].values())


def test_a_host_with_another_model_is_refused(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, family in ((here, "llama-gqa"), (there, "qwen3")):
        folder.mkdir()
        save(family, folder)
    config = two_hosts(tensor_parallel_size=2)
    with (
        second_host(config, there),
        pytest.raises(ConfigError, match="Rank 1 has the model .* all ranks need"),
        opened(here, config),
    ):
        pass


@pytest.mark.long
def test_a_host_with_another_version_is_refused(tmp_path: Path) -> None:
    folder, other = tmp_path / "model", tmp_path / "other"
    for made in (folder, other):
        made.mkdir()
    save("llama-gqa", folder)
    (other / "sitecustomize.py").write_text('from ridgeline.core import version\n\nversion.VERSION = "0.0.9"\n')
    path = os.pathsep.join([str(other), *(entry for entry in sys.path if entry)])
    config = two_hosts(tensor_parallel_size=2)
    with (
        second_host(config, folder, PYTHONPATH=path),
        pytest.raises(
            ConfigError, match=f"Rank 1 has ridgeline 0.0.9, rank 0 has {VERSION}: all ranks need the same versions"
        ),
        opened(folder, config),
    ):
        pass


def test_connections_that_are_no_missing_rank_are_closed() -> None:
    config = two_hosts(tensor_parallel_size=2, pipeline_parallel_size=2)
    address = f"127.0.0.1:{config.master_port}"
    links: dict[int, Link] = {}
    seen: list[tuple[int, int]] = []
    waiting = threading.Thread(target=lambda: links.update(accept_ranks(config, lambda *at: seen.append(at))))
    waiting.start()
    wrong = attach(address, 1)  # a rank of the first host
    first = attach(address, 2)
    again = attach(address, 2)
    with socket.create_connection(("127.0.0.1", config.master_port)) as junk:
        junk.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        last = attach(address, 3)
        waiting.join(10)
        assert not waiting.is_alive() and sorted(links) == [2, 3] and seen[0] == (0, 2) and seen[-1][0] == 1
        with suppress(ConnectionResetError):
            assert junk.recv(1) == b""
    assert wrong.receive() is None and again.receive() is None
    for link in (wrong, first, again, last, *links.values()):
        link.close()


def test_hosts_that_do_not_come_are_named() -> None:
    with pytest.raises(EngineFailed, match=r"Ranks \[1\] have not connected .* --node-rank 1 on"):
        accept_ranks(two_hosts(tensor_parallel_size=2), lambda *at: None, within_s=0.0)
    with pytest.raises(EngineFailed, match=r"No engine has listened on .* for 0 s \(Connection refused\)"):
        attach(f"127.0.0.1:{free_port()}", 1, within_s=0.0)


def test_why_the_first_host_cannot_be_reached_is_logged_at_once_and_once(caplog: pytest.LogCaptureFixture) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(EngineFailed):
        attach(address, 1, within_s=1.0)
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"rank 1 cannot reach host 0 at {address} (Connection refused) and tries again for 1 s" in line


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"nnodes": 0}, "nnodes"),
        ({"nnodes": 2}, "nnodes"),
        ({"nnodes": 2, "tensor_parallel_size": 3, "master_addr": "a"}, "nnodes"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "master_addr"),
        ({"node_rank": 1}, "node_rank"),
        ({"node_rank": -1}, "node_rank"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(changes: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_hosts(replace(CONFIG, **changes))  # type: ignore[arg-type]
    assert refused.value.param == param


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    config = replace(two_hosts(tensor_parallel_size=2), master_addr="192.0.2.1")
    with pytest.raises(ConfigError, match="give an address of this host"):
        accept_ranks(config, lambda *at: None)
    with pytest.raises(ConfigError, match="give an address of this host"):
        check_address(config)
    check_address(replace(config, nnodes=1))


def test_a_rank_of_the_first_host_is_reached_at_its_address() -> None:
    """Also those that the first rank starts, which other hosts could not reach on loopback."""
    assert first_address(replace(CONFIG, nnodes=2, master_addr="10.0.0.1")) == "10.0.0.1"
    assert first_address(CONFIG) == "127.0.0.1"


def test_a_rank_has_a_gpu_of_its_host() -> None:
    config = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=4, nnodes=2)
    assert [gpu_of(number, config, 8) for number in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "flags", "param"),
    [
        ({"tensor_parallel_size": 4}, "--tensor-parallel-size 4 needs 4 GPUs", "tensor_parallel_size"),
        (
            {"context_parallel_size": 2, "pipeline_parallel_size": 3},
            "--context-parallel-size 2 times --pipeline-parallel-size 3 needs 6 GPUs",
            "context_parallel_size",
        ),
    ],
)
def test_more_ranks_than_gpus_are_refused(sizes: dict[str, int], flags: str, param: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{flags} on this host, and torch finds 2: lower the sizes to a product of 2"
    ) as caught:
        gpu_of(1, EngineConfig(**sizes), 2)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_a_host_with_fewer_gpus_than_others_is_named() -> None:
    config = EngineConfig(tensor_parallel_size=4, pipeline_parallel_size=2, nnodes=2)
    assert [gpu_of(number, config, 4) for number in range(8)] == [0, 1, 2, 3] * 2
    with pytest.raises(
        ConfigError,
        match="--tensor-parallel-size 4 times --pipeline-parallel-size 2 needs 4 GPUs on each of --nnodes 2 hosts, and torch finds "
        "2 on host 1: lower the sizes to a product of 4 or less",
    ):
        gpu_of(6, config, 2)
