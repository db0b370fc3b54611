"""Prefill apart from decode, ranks of two nodes and batches of a router on two hosts that share no loopback and no /dev/shm."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ridgeline.models.hub import shipped_model

from .namespaces import Hosts, running, served_on_first, two_hosts
from .served import TIMEOUT_S, served
from .test_batches import client_of, results, row, start, until
from .test_prefill_decode import FLAGS, PROMPT, ask

pytestmark = pytest.mark.long
MODEL = str(shipped_model())
ONE_THREAD = ("--threads", "1")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def one_server_answer(folder: Path) -> str:
    """The answer of one server on this host."""
    folder.mkdir()
    with served(folder, *FLAGS) as server:
        return ask(server, PROMPT * 3, temperature=1, seed=3)[0]


def test_the_hosts_share_nothing(hosts: Hosts) -> None:
    """Neither has the loopback or the /dev/shm of this process, so the tests below use the link."""
    connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1)"
    with tempfile.NamedTemporaryFile(dir="/dev/shm"), socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        for host in (hosts.first, hosts.second):
            shm = subprocess.run(host.command("ls", "/dev/shm"), check=True, capture_output=True, text=True)
            assert not shm.stdout
            tried = subprocess.run(host.command(sys.executable, "-c", connect, "127.0.0.1", port), capture_output=True)
            assert b"ConnectionRefusedError" in tried.stderr


def test_pages_go_from_host_to_host(hosts: Hosts, tmp_path: Path) -> None:
    want = one_server_answer(tmp_path / "one")
    address = f"{hosts.first.address}:9000"
    options = ("--prefill-engines", "1", "--decode-engines", "1", "--hand-over", "tcp", "--remote-engines", "prefill")
    options += ("--engine-address", address, "--engine-secret", "secret", "--max-num-batched-tokens", "64")
    with (
        running(hosts.second, tmp_path / "other.log", "serve", MODEL, "--join", address, "--engine-secret", "secret"),
        served_on_first(hosts, 8000, tmp_path / "serve.log", "serve", MODEL, *ONE_THREAD, *FLAGS, *options) as server,
    ):
        assert ask(server, PROMPT * 3, temperature=1, seed=3)[0] == want
        assert server.metric("hand_overs_total") == 1 and server.metric("hand_over_failures_total") == 0
        assert server.metric("hand_over_bytes_total") > 0
        hosts.second.cut_link()
        began = time.monotonic()
        assert ask(server, "another one: " + PROMPT * 3, temperature=0)[0], "the other engine computes the prompt"
        assert time.monotonic() - began < 45, "an engine that sends nothing counts as lost after 30 s"


@pytest.mark.parametrize("sizes", [("-tp", "2"), ("-pp", "2")])
def test_ranks_of_two_nodes_answer_as_one_process(hosts: Hosts, sizes: tuple[str, str], tmp_path: Path) -> None:
    want = one_server_answer(tmp_path / "one")
    place = (*sizes, "--nnodes", "2", "--master-addr", hosts.first.address, "--master-port", "9001")
    with (
        running(hosts.second, tmp_path / "other.log", "serve", MODEL, *place, "--node-rank", "1"),
        served_on_first(hosts, 8000, tmp_path / "serve.log", "serve", MODEL, *ONE_THREAD, *FLAGS, *place) as server,
    ):
        assert ask(server, PROMPT * 3, temperature=1, seed=3)[0] == want


def test_a_batch_completes_when_a_host_is_lost(hosts: Hosts, tmp_path: Path) -> None:
    """Both hosts run rows until the link is cut. Only the router's health checks notice it."""
    urls = [f"http://{host.address}:8000" for host in (hosts.first, hosts.second)]
    replicas = [word for url in urls for word in ("--replica", url)]
    address = ("--host", "0.0.0.0", "--port", "8000", "--batch-dir", "off")
    with (
        running(hosts.first, tmp_path / "one.log", "serve", *ONE_THREAD, *FLAGS, *address),
        running(hosts.second, tmp_path / "two.log", "serve", *ONE_THREAD, *FLAGS, *address),
        served_on_first(
            hosts, 8100, tmp_path / "route.log", "route", *replicas, "--batch-dir", str(tmp_path / "state")
        ) as router,
        client_of(router) as client,
    ):
        names = {entry["name"] for entry in router.send("GET", "/admin/replicas").json["data"]}
        wait_until(lambda: {entry["state"] for entry in router.send("GET", "/admin/replicas").json["data"]} == {"up"})
        rows = [row(str(number), f"Tell me about the number {number}.", max_tokens=200) for number in range(80)]
        batch_id = start(client, rows).id
        wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed >= 20)
        used = {entry["replica"] for entry in router.send("GET", "/requests?order=batch&limit=100").json["data"]}
        assert used == names
        hosts.second.cut_link()
        batch = until(client, batch_id)
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 80, 80, 0)
        assert {line["custom_id"] for line in results(client, batch.output_file_id)} == {str(n) for n in range(80)}
