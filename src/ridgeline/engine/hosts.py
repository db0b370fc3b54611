"""A model over several hosts. The first host has the service and the first ranks; its engine listens for the ranks of the others.

`ridgeline serve MODEL --node-rank K` with K > 0 runs no service. It starts the ranks of its host, which connect to the first host.
When a group has ended they are started again, because the service starts another engine after a failure. All ranks are on CPUs or
all on GPUs, as the first host decides; parallel.wiring says how they are connected. Traffic between ranks is neither encrypted nor
authenticated: the hosts need a network of their own.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.plural import counted
from ridgeline.engine.rank_link import Attach, Link, decode_attach, encode

JOIN_S = 600.0
"""Seconds that ranks wait for one another to connect."""
UNREACHABLE = 3
"""Exit status of a rank that found no first host within JOIN_S."""
_ATTACH_S = 5.0
"""Seconds for a new connection to say which rank it is."""
_RETRY_S = 0.5
_LOOK_S = 0.2
_PR_SET_PDEATHSIG = 1
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 10_000}
"""A connection to a host that is gone without a word ends after about 10 s."""

log = logging.getLogger(__name__)


def check_hosts(config: EngineConfig) -> None:
    """Raise ConfigError for numbers of hosts and ranks that do not fit together."""
    if config.nnodes < 1:
        raise ConfigError(f"--nnodes is {config.nnodes}: give the number of hosts, 1 or more.", param="nnodes")
    if not 0 <= config.node_rank < config.nnodes:
        raise ConfigError(
            f"--node-rank is {config.node_rank}, but --nnodes is {config.nnodes}: give 0 to {config.nnodes - 1}.",
            param="node_rank",
        )
    if config.ranks % config.nnodes:
        raise ConfigError(
            f"--nnodes is {config.nnodes}, but the model has {config.ranks} processes (--tensor-parallel-size times "
            "--context-parallel-size times --pipeline-parallel-size): each host needs the same number.",
            param="nnodes",
        )
    if config.nnodes > 1 and not config.master_addr:
        raise ConfigError(
            "--nnodes needs --master-addr, the address of host 0 in the network of the hosts.", param="master_addr"
        )


def first_address(config: EngineConfig) -> str:
    """The address by which other ranks reach those of the first host."""
    return config.master_addr if config.nnodes > 1 else "127.0.0.1"


def per_host(config: EngineConfig) -> int | None:
    """Ranks of each host; None: there is one host."""
    return config.ranks // config.nnodes if config.nnodes > 1 else None


def gpu_of(number: int, config: EngineConfig, count: int) -> int:
    """The GPU of a rank among the `count` of its host, as CUDA_VISIBLE_DEVICES orders them. Raises ConfigError for too few."""
    needed = len(config.host_ranks)
    if needed > count:
        sizes = ("tensor_parallel_size", "data_parallel_size", "context_parallel_size", "pipeline_parallel_size")
        chosen = [name for name in sizes if getattr(config, name) > 1]
        flags = " times ".join(f"--{name.replace('_', '-')} {getattr(config, name)}" for name in chosen)
        where = f"this host, and torch finds {count}"
        if config.nnodes > 1:
            where = f"each of --nnodes {config.nnodes} hosts, and torch finds {count} on host {number // needed}"
        raise ConfigError(
            f"{flags} needs {counted(needed, 'GPU')} on {where}: lower the sizes to a product of {count * config.nnodes} or less, "
            "or use --device cpu.",
            param=chosen[0],
        )
    return number % needed


# --- the first host -----------------------------------------------------------------------------------------------------


def accept_ranks(
    config: EngineConfig, waiting: Callable[[int, int], None], within_s: float = JOIN_S
) -> dict[int, Link]:
    """The connections of all ranks on other hosts, by rank.

    waiting: called once a second with the number of connected ranks and of all. Raises ConfigError if the address cannot be used,
    EngineFailed if a rank does not connect in time.
    """
    wanted = set(range(len(config.host_ranks), config.ranks))
    links: dict[int, Link] = {}
    deadline = time.monotonic() + within_s
    try:
        with _listen(config.master_addr, config.master_port) as listener:
            listener.settimeout(1.0)
            while wanted - links.keys():
                waiting(len(links), len(wanted))
                if time.monotonic() > deadline:
                    raise EngineFailed(_missing(config, sorted(wanted - links.keys()), within_s))
                with suppress(TimeoutError):
                    sock, _ = listener.accept()
                    link = Link(sock)
                    rank = _attached(link)
                    if rank in wanted - links.keys():
                        links[rank] = link
                    else:
                        log.warning("a connection to --master-port was closed: it is not from a missing rank")
                        link.close()
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return links


def check_address(config: EngineConfig) -> None:
    """Raise ConfigError if the first host cannot listen on its address, which a store of torch would try for minutes."""
    if config.nnodes > 1:
        _listen(config.master_addr, config.master_port).close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise ConfigError(
            f"Host 0 cannot listen on {host}:{port} ({error.strerror}): give an address of this host as --master-addr, and a free "
            "--master-port.",
            param="master_addr",
        ) from error


def _attached(link: Link) -> int | None:
    """The rank that a new connection names; None if it names none."""
    _keep_alive(link.sock)
    link.sock.settimeout(_ATTACH_S)
    try:
        body = link.receive(max_bytes=64)
        return None if body is None else decode_attach(body).rank
    except (EngineFailed, msgspec.MsgspecError):
        return None
    finally:
        link.sock.settimeout(None)


def _missing(config: EngineConfig, ranks: list[int], seconds: float) -> str:
    nodes = sorted({rank // len(config.host_ranks) for rank in ranks})
    return (
        f"Ranks {ranks} have not connected to {config.master_addr}:{config.master_port} within {seconds:g} s: start the same "
        f"command with --node-rank {' or '.join(map(str, nodes))} on their hosts."
    )


# --- the other hosts ----------------------------------------------------------------------------------------------------


def run_host(config: EngineConfig, folder: Path, tell: Callable[[str], None]) -> int:
    """Run the ranks of a host other than the first, until SIGTERM or SIGINT; returns the exit status.

    folder: the model on this host. tell: shows a line. Ranks that have ended, for any reason, are started again together. The host
    gives up if the first one cannot be reached for JOIN_S.
    """
    stopped = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.append(True))
    address = f"{config.master_addr}:{config.master_port}"
    while not stopped:
        tell(f"ranks {list(config.host_ranks)} follow {address}")
        ranks = [_start(address, rank, folder) for rank in config.host_ranks]
        while not stopped and all(rank.poll() is None for rank in ranks):
            time.sleep(_LOOK_S)
        if UNREACHABLE in {rank.poll() for rank in ranks}:
            raise EngineFailed(
                f"No engine has listened on {address} for {JOIN_S:g} s: start host 0, or check --master-addr."
            )
        for rank, process in zip(config.host_ranks, ranks, strict=True):
            if (status := process.poll()) is not None and status < 0:
                log.error("rank %d of this host has ended with status %d", rank, status)
        _end(ranks)
        time.sleep(_RETRY_S)
    return 0


def _start(address: str, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ridgeline.engine.follower", address, str(rank), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)


def _end_with_parent() -> None:
    """Runs in the new process: the kernel ends it when the command that started it is killed (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(ranks: Iterable[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait()


def attach(address: str, rank: int, within_s: float = JOIN_S) -> Link:
    """Connect a rank to the first host, which may not listen yet. Raises EngineFailed if it does not in time.

    Each new reason why it cannot be reached is logged: a wrong address looks like a host that starts later.
    """
    host, _, port = address.rpartition(":")
    deadline, reason = time.monotonic() + within_s, ""
    while True:
        try:
            link = Link(socket.create_connection((host, int(port)), timeout=_ATTACH_S))
            link.sock.settimeout(None)
            _keep_alive(link.sock)
            link.send(encode(Attach(rank)))
            return link
        except OSError as error:
            before, reason = reason, error.strerror or str(error)
        if time.monotonic() > deadline:
            raise EngineFailed(f"No engine has listened on {address} for {within_s:g} s ({reason}).")
        if reason != before:
            log.warning(
                "rank %d cannot reach host 0 at %s (%s) and tries again for %g s: host 0 has not started, or --master-addr or "
                "--master-port is wrong",
                *(rank, address, reason, within_s),
            )
        time.sleep(_RETRY_S)


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
