"""The address is bound before anything begins, and a wrong one names its option."""

from __future__ import annotations

import socket

import pytest

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.metrics import Metrics
from ridgeline.service.listen import bind
from ridgeline.service.server import Server
from ridgeline.service.supervisor import Supervisor
from ridgeline.wire.client import EngineClient

from .fake_engine import FakeEngine
from .live import FakeProcess, behaviour, counts


def test_a_free_port_is_chosen_and_not_yet_listened_on() -> None:
    (listener,) = bind("127.0.0.1", 0)
    with listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1" and port > 0
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
        assert not listener.get_inheritable(), "the engine's process must not hold the port"


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_host_may_have_several_addresses(host: str) -> None:
    listeners = bind(host, 0)
    families = [listener.family for listener in listeners]
    assert socket.AF_INET in families and len(set(families)) == len(families)
    for listener in listeners:
        listener.close()


def test_a_taken_port_names_the_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"cannot listen on 127.0.0.1:{port} \(.*\): choose another --port"
        ) as error:
            bind("127.0.0.1", port)
    assert error.value.param == "port"


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_a_host_that_is_not_ours_names_the_option(host: str) -> None:
    with pytest.raises(ConfigError, match="choose another --host") as error:
        bind(host, 0)
    assert error.value.param == "host"


async def test_a_port_that_was_taken_after_it_was_bound_names_the_option() -> None:
    """Two servers that start together may both bind it; only one can listen."""
    listeners = bind("127.0.0.1", 0)
    config = ServiceConfig(port=listeners[0].getsockname()[1])
    engine, reader, writer = await FakeEngine.connect(behaviour(counts))
    process = FakeProcess(engine, EngineClient(reader, writer), writer)
    server = Server(config, Supervisor(process, lambda: None, config), Metrics("m"))
    with bind("127.0.0.1", config.port)[0] as other:
        other.listen()
        with pytest.raises(ConfigError, match="choose another --port"):
            await server.start(listeners)
    await server.stop()
    await process.stop()
