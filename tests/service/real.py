"""The real engine in a process of its own behind the real service, on a tiny random model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig
from ridgeline.metrics import Metrics
from ridgeline.service.launch import launch
from ridgeline.service.listen import bind
from ridgeline.service.server import Server
from ridgeline.service.supervisor import Supervisor

from .live import MODEL, Live, eos_id, tokenizer, write_model


def write_checkpoint(folder: Path, **changes: object) -> None:
    """A config.json beside the test tokenizer; the weights are random (load_format dummy)."""
    write_model(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 384,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": tokenizer().token_id("<|endoftext|>"),
        "eos_token_id": eos_id(),
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def model_of(folder: Path) -> ModelConfig:
    return ModelConfig(model=str(folder), load_format="dummy", dtype="float32")


@contextmanager
def real_server(
    folder: Path, config: ServiceConfig, engine: EngineConfig, model: ModelConfig | None = None
) -> Iterator[Live]:
    """A server with the model in `folder`, from start to drain. model: how it is read; None: with random weights."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start():
        metrics = Metrics(MODEL)
        begin = partial(launch, model or model_of(folder), engine, metrics.on_step)
        supervisor = Supervisor(await begin(), begin, config)
        server = Server(config, supervisor, metrics)
        await server.start(bind(config.host, config.port))
        await server.open(folder, MODEL)
        return supervisor, server, loop.create_task(server.keep_open())

    supervisor, server, keeping = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    running = Live(server.port, loop, server, supervisor.engine, keeping=keeping)

    async def stop() -> None:
        keeping.cancel()
        await asyncio.wait({keeping})
        await server.stop()
        await supervisor.stop()
        assert supervisor.engine.process.returncode is not None

    try:
        yield running
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
