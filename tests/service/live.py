"""The real app over real HTTP on loopback, with a fake engine behind it, in a thread of its own."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig
from ridgeline.core.errors import EngineFailed
from ridgeline.core.slo import Slo
from ridgeline.metrics import Metrics
from ridgeline.service.listen import bind
from ridgeline.service.reference import make_reference
from ridgeline.service.server import Quiet, Server
from ridgeline.service.supervisor import Supervisor
from ridgeline.text.pieces import byte_letters
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.wire.client import EngineClient
from ridgeline.wire.messages import Submit

from .fake_engine import Behaviour, FakeEngine

EOS = "<|im_end|>"
SPECIALS = ("<|endoftext|>", "<|im_start|>", EOS)
MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>")
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "a"), ("l", "l"))
MODEL = "tiny-test"

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }} Call with <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}{# <think></think> #}{% endif %}"
)


def write_model(folder: Path) -> None:
    """A byte-level tokenizer with ChatML specials, one token per byte but for a few merges."""
    letters = byte_letters()
    words = [*letters, *("".join(pair) for pair in MERGES)]
    backend = Backend(models.BPE({word: index for index, word in enumerate(words)}, list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@lru_cache(1)
def model_folder() -> Path:
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="ridgeline-test-"))
    write_model(folder)
    return folder


@lru_cache(1)
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_folder())


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def says(text: str, *, end: bool = True) -> Any:
    """A script: every choice says this."""
    tokens = ids(text) + ([eos_id()] if end else [])
    return lambda submit, choice: tokens


def counts(submit: Submit, choice: int) -> list[int]:
    """A script without end: choice 0 says abcabc..., choice 1 bcabca... ."""
    letters = ids("abc" * 1000)
    return letters[choice:]


def eos_id() -> int:
    eos = tokenizer().eos_id
    assert eos is not None
    return eos


def behaviour(script: Any, **changes: Any) -> Behaviour:
    return Behaviour(script=script, eos=eos_id(), vocab=tokenizer().vocab_size, **changes)


class FakeProcess:
    """A fake engine as a supervisor sees an engine's process."""

    def __init__(self, engine: FakeEngine, client: EngineClient, writer: asyncio.StreamWriter) -> None:
        self.engine = engine
        self.client = client
        self.writer = writer  # of the client
        self.killed = False

    async def stop(self) -> None:
        await self.client.close()
        await self.engine.die()

    async def kill(self) -> None:
        self.killed = True
        await self.stop()


class FakeEngines:
    """Starts fake engines for a supervisor: the first one at once, each later one when `allowed` is set, which it clears."""

    def __init__(self, plan: Behaviour, metrics: Metrics) -> None:
        self._plan, self._metrics = plan, metrics
        self.processes: list[FakeProcess] = []
        self.allowed = asyncio.Event()

    async def __call__(self) -> FakeProcess:
        if self.processes:
            await self.allowed.wait()
            self.allowed.clear()
        engine, reader, writer = await FakeEngine.connect(self._plan)
        client = EngineClient(reader, writer, on_step=self._metrics.on_step, silence_s=self._plan.silence_s)
        self.processes.append(FakeProcess(engine, client, writer))
        return self.processes[-1]


class Heard(Quiet):
    """Keeps what a server announces."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def restarting(self, lost: str) -> None:
        self.words.append(f"restarting: {lost}")

    def restarted(self, url: str) -> None:
        self.words.append(f"restarted: {url}")


def json_headers(method: str, headers: Mapping[str, str] | None) -> dict[str, str]:
    """Headers of a request: a POST says that it sends JSON unless `headers` names another type."""
    given = {name.lower(): value for name, value in (headers or {}).items()}
    return {"content-type": "application/json", **given} if method == "POST" else given


@dataclass
class Caller:
    """Sends requests to a port of this machine."""

    port: int

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        connection = self.connect()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, json_headers(method, headers))
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, text)

    def get(self, path: str) -> Reply:
        return self.send("GET", path)

    def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.send("POST", "/v1/chat/completions", body, headers)

    def complete(self, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        return self.send("POST", "/v1/completions", {"model": MODEL, "prompt": "hi", **fields}, headers)


@dataclass
class Live(Caller):
    """A running server. Its event loop lives in another thread.

    engine: the first one. engines: of a supervised server, all of them. keeping: the server's task that replaces lost engines.
    """

    loop: asyncio.AbstractEventLoop
    server: Server
    engine: FakeEngine
    engines: FakeEngines | None = None
    keeping: asyncio.Task[None] | None = None
    heard: Heard = field(default_factory=Heard)

    def replace_engine(self) -> FakeEngine:
        """Let the server start the engine that it waits for; returns it when the server answers again."""
        engines, count = self.engines, len(self.engines.processes)
        self.loop.call_soon_threadsafe(engines.allowed.set)
        self.until(lambda: len(engines.processes) > count and self.server.front.trouble is None)
        return engines.processes[-1].engine

    def run(self, work: Coroutine[Any, Any, Any], timeout: float = 10.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def until(self, condition: Any, timeout: float = 5.0) -> None:
        """Wait until `condition()` holds in the server's thread."""

        async def wait() -> None:
            async with asyncio.timeout(timeout):
                while not condition():
                    await asyncio.sleep(0.005)

        self.run(wait(), timeout + 5)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[Any]:
        """Data of all events; the last must be [DONE] and is left out."""
        lines = [line for line in self.data.decode().split("\n\n") if line and not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines), lines
        assert lines[-1] == "data: [DONE]", lines[-1]
        return [json.loads(line[6:]) for line in lines[:-1]]

    @property
    def error(self) -> Any:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@contextmanager
def live(plan: Behaviour, **config: Any) -> Iterator[Live]:
    """A server with this engine, from start to drain."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    settings = ServiceConfig(**{"port": 0, "drain_s": 1.0, "served_model_name": MODEL, **config})

    async def start() -> tuple[Live, Supervisor]:
        metrics, heard = Metrics(MODEL, slo=Slo.parse(settings.slo)), Heard()
        engines = FakeEngines(plan, metrics)
        first = await engines()
        supervisor = Supervisor(first, engines, settings)
        reference = make_reference(settings, ModelConfig(), EngineConfig())
        server = Server(settings, supervisor, metrics, reference)
        await server.start(bind(settings.host, settings.port))
        opening = loop.create_task(server.open(model_folder(), "root/tiny-test"))
        if not plan.loading:
            await opening

        async def keep() -> None:
            await opening
            await server.keep_open(heard)

        keeping = loop.create_task(keep())
        return Live(server.port, loop, server, first.engine, engines, keeping, heard), supervisor

    async def stop(running: Live, supervisor: Supervisor) -> None:
        running.keeping.cancel()
        with suppress(asyncio.CancelledError, EngineFailed):
            await running.keeping
        await running.server.stop()
        await supervisor.stop()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    running, supervisor = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield running
    finally:
        asyncio.run_coroutine_threadsafe(stop(running, supervisor), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()
