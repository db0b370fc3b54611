"""The real engine in its own process, on a tiny random model: it answers, and its death is told."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig
from ridgeline.core.errors import UnsupportedModel
from ridgeline.metrics import Metrics
from ridgeline.service.launch import launch
from ridgeline.service.listen import bind
from ridgeline.service.server import Server

from .live import EOS, MODEL, Live, eos_id, tokenizer, write_model


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


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start():
        metrics = Metrics(MODEL)
        process = await launch(model_of(folder), EngineConfig(device="cpu", max_num_seqs=4, threads=1), metrics.on_step)
        config = ServiceConfig(port=0, served_model_name=MODEL, drain_s=1.0)
        server = Server(config, process.client, metrics)
        await server.start(bind(config.host, config.port))
        await server.open(folder, MODEL)
        return process, server

    process, server = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    running = Live(server.port, loop, server, process)

    async def stop() -> None:
        await server.stop()
        await process.stop()

    yield running
    asyncio.run_coroutine_threadsafe(stop(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)


def test_answers(real: Live):
    body = real.chat(max_tokens=6, ignore_eos=True, logprobs=True).json
    assert body["usage"]["completion_tokens"] == 6 == len(body["choices"][0]["logprobs"]["content"])
    first, second = (real.complete(temperature=0, max_tokens=12).json["choices"][0]["text"] for _ in range(2))
    assert first == second
    choice = real.complete(prompt="hello the", echo=True, logprobs=1, max_tokens=0).json["choices"][0]
    assert choice["text"] == "hello the" and len(choice["logprobs"]["token_logprobs"]) == 6
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert real.chat(structured_outputs={"choice": ["yes", "no"]}).json["choices"][0]["message"]["content"] in (
        "yes",
        "no",
    )


def test_the_prefix_cache_shows_in_usage_and_can_be_reset(real: Live):
    prompt = [7] * 100
    assert real.complete(prompt=prompt, max_tokens=2).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert real.complete(prompt=prompt, max_tokens=2).json["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    other = real.complete(prompt=prompt, max_tokens=2, cache_salt="other").json
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert real.send("POST", "/reset_prefix_cache").json["forgotten"] > 0
    assert real.complete(prompt=prompt, max_tokens=2).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_nothing_is_held_when_nobody_asks(real: Live):
    assert real.complete(prompt=["a", "b", "c"], n=2, max_tokens=5, stop=EOS).status == 200
    stats = real.send("GET", "/admin/stats").json
    assert stats["free"] + stats["used"] == stats["total"]
    assert (stats["running"], stats["waiting"]) == (0, 0)


def test_a_model_that_cannot_be_served_is_named(tmp_path: Path):
    write_checkpoint(tmp_path, architectures=["MambaForCausalLM"], model_type="mamba")

    async def start() -> None:
        process = await launch(model_of(tmp_path), EngineConfig(device="cpu"))
        try:
            with pytest.raises(UnsupportedModel, match="Mamba"):
                await process.client.wait_ready()
        finally:
            await process.stop()
        assert process.process.returncode == 2

    asyncio.run(asyncio.wait_for(start(), 60))


def test_zz_a_killed_engine_is_told_by_stream_and_health(real: Live):
    """The last test of the module: the engine does not come back."""
    seen: list[bytes] = []

    def ask() -> None:
        seen.append(real.complete(max_tokens=400, ignore_eos=True, stream=True, n=4).data)

    asking = threading.Thread(target=ask)
    asking.start()
    real.until(lambda: real.server.front.client.open_choices > 0)
    real.engine.process.send_signal(signal.SIGKILL)
    asking.join(20)
    assert b'"error"' in seen[0] and b"[DONE]" not in seen[0]
    health = real.send("GET", "/health")
    assert health.status == 503 and "SIGKILL" in health.error["message"]
    assert real.complete().status == 500
