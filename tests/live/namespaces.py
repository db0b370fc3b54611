"""Two hosts on one machine: network namespaces that a virtual Ethernet link connects, each with its own loopback and /dev/shm."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from .served import MARK, TIMEOUT_S, Served

_MOUNT_SHM = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
"""Run by sh in a new mount namespace: an empty /dev/shm, then the command in the arguments."""


@dataclass
class Host:
    """name: of the namespace. address: on the link to the other host. device: the host's end of that link."""

    name: str
    address: str
    device: str

    def command(self, *words: str) -> list[str]:
        """A command that runs on this host."""
        return ["ip", "netns", "exec", self.name, "unshare", "--mount", "sh", "-c", _MOUNT_SHM, "sh", *words]

    def cut_link(self) -> None:
        """Packets between the hosts are lost from now on. Neither end gets an error."""
        _ip(f"-n {self.name} link set {self.device} down")


@dataclass
class Hosts:
    """client_address: of the first host for this process, which is on neither host."""

    first: Host
    second: Host
    client_address: str


@dataclass
class HostServed(Served):
    """A server of the first host. address: the `client_address` of that host."""

    address: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, self.port, timeout=TIMEOUT_S)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Skips the test where namespaces are not permitted."""
    if not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("the commands ip and unshare are missing (iproute2, util-linux)")
    with ExitStack() as stack:
        try:
            hosts = _make_hosts(os.getpid() % 10_000, stack)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {(error.stderr or str(error)).strip()}")
        yield hosts


def _make_hosts(number: int, stack: ExitStack) -> Hosts:
    """number: keeps the names and addresses of test processes on one machine apart. stack: removes the hosts at its end."""
    first = Host(f"rl{number}a", "10.77.0.1", f"rll{number}a")
    second = Host(f"rl{number}b", "10.77.0.2", f"rll{number}b")
    outside, inside = f"rlc{number}o", f"rlc{number}i"
    client_net = f"10.213.{number % 250}"
    for host in (first, second):
        _ip(f"netns add {host.name}")
        stack.callback(_remove, f"netns del {host.name}")
        _ip(f"-n {host.name} link set lo up")
    ends = [f"{host.device} netns {host.name}" for host in (first, second)]
    _ip(f"link add {ends[0]} type veth peer name {ends[1]}")
    _ip(f"link add {outside} type veth peer name {inside} netns {first.name}")
    stack.callback(_remove, f"link del {outside}")
    for host, device, address in (
        (first, first.device, f"{first.address}/24"),
        (second, second.device, f"{second.address}/24"),
        (first, inside, f"{client_net}.1/30"),
    ):
        _ip(f"-n {host.name} address add {address} dev {device}")
        _ip(f"-n {host.name} link set {device} up")
    _ip(f"address add {client_net}.2/30 dev {outside}")
    _ip(f"link set {outside} up")
    subprocess.run(first.command("true"), check=True, capture_output=True, text=True)
    return Hosts(first, second, f"{client_net}.1")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


def _remove(words: str) -> None:
    with suppress(subprocess.CalledProcessError):
        _ip(words)


@contextmanager
def running(host: Host, log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`ridgeline ...` on a host, until the end of the block."""
    command = host.command(sys.executable, "-m", "ridgeline", *words)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", MARK: str(log)}
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(TIMEOUT_S)
            finally:
                process.kill()


@contextmanager
def served_on_first(hosts: Hosts, port: int, log: Path, *words: str) -> Iterator[HostServed]:
    """`ridgeline ...` on the first host: a server on this port of all addresses, ready."""
    with running(hosts.first, log, *words, "--host", "0.0.0.0", "--port", str(port)) as process:
        server = HostServed(process, port, log, hosts.client_address)
        server.until_ready()
        yield server
