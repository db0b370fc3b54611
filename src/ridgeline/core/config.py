"""One frozen dataclass of configuration per room. Flags, environment and file keys are derived from these fields.

A field that is None means "choose from model and hardware"; `core.resolve` does so once, and prints the origin of each
value. Nothing changes afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, text: str, *flags: str) -> Any:
    """A configuration field: its default, one line of help, and further names users know for its flag."""
    return field(default=default, metadata={"help": text, "flags": flags})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how its weights are read."""

    model: str = option("", "folder, hub name, or empty for the shipped model", "--model-path", "-m")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    load_format: str = option("auto", "auto reads safetensors; dummy fills random weights from config.json alone")
    dtype: str = option("auto", "auto (the checkpoint's), bfloat16, float16 or float32")
    quantization: str = option(
        "",
        "layers quantized while loading: fp8, int8, int4, int3 (int4-g64, int4-channel-zp and so on), w8a8, llm-int8, fp8-weight",
        "-q",
    )
    max_model_len: int | None = option(None, "longest prompt plus answer in tokens", "--context-length", "-c")
    seed: int = option(0, "seed of dummy weights and of requests that bring none")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine batches, and how much memory it may hold."""

    device: str = option("auto", "auto, cpu or cuda")
    max_num_seqs: int | None = option(None, "most requests running at once", "-np")
    max_num_batched_tokens: int | None = option(None, "most query tokens in one step (the prefill chunk)")
    gpu_memory_utilization: float = option(0.90, "share of the GPU's memory to use", "--mem-fraction-static")
    kv_cache_memory: int | None = option(None, "bytes for the KV cache; None takes what the share leaves")
    block_size: int | None = option(None, "tokens in a block of KV cache")
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prefixes")
    batching: str = option("continuous", "continuous, static:N or dynamic:N,WINDOW_MS")
    steps_in_flight: int | None = option(None, "0: plan after each step; 1: plan while the device runs")
    speculate: str = option(
        "",
        "verify drafts: auto, reference[:FILE], lookahead, recycling, recurrent:FOLDER, draft:FOLDER, medusa:FOLDER; + joins",
        "--speculative-config",
    )
    draft_tokens: int | None = option(None, "most draft tokens of a request and step", "--num-speculative-tokens")
    enforce_eager: bool = option(False, "no CUDA graphs; on a CPU no compiled operations")
    deterministic: bool = option(False, "the same tokens whatever else is in the batch; slower")
    threads: int | None = option(None, "CPU threads for the model")
    calibration: str = option("", "file of `ridgeline calibrate`: step times are predicted by it, not guessed")


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Where and to whom the API answers."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    api_key: str | None = option(
        None, "key that every route asks for, except /health and the pages, whose data asks for it"
    )
    allowed_origins: str = option(
        "", "sites whose pages may call the server from a browser: https://a.example,https://b.example, or * for all"
    )
    allowed_hosts: str = option(
        "",
        "host names by which the server may be called, beside localhost: chat.example.org,10.0.0.5, or * for all; checked "
        "when it listens on loopback, or when this is given",
    )
    root_path: str = option(
        "", "path under which a proxy offers the server, as in /llm; the proxy may keep or strip it"
    )
    ssl_certfile: str | None = option(None, "PEM file of the certificate and its chain; the server then speaks HTTPS")
    ssl_keyfile: str | None = option(None, "PEM file of the certificate's key; None if ssl_certfile has it")
    ssl_keyfile_password: str | None = option(None, "password of an encrypted key")
    served_model_name: str | None = option(None, "name of the model in the API")
    chat_template: str | None = option(None, "Jinja file (or text) that replaces the model's chat template")
    allow_special_in_content: bool = option(
        False, "text in messages and tools that spells a special token becomes that token (default: it stays text)"
    )
    max_queue: int = option(1024, "requests that may wait; beyond it the answer is 429")
    max_body_mb: float = option(32.0, "largest request body in MiB")
    keep_alive_s: float = option(15.0, "seconds between keep-alive comments on a silent stream")
    drain_s: float = option(30.0, "seconds that SIGTERM lets running requests finish")
    engine_restarts: int = option(
        3,
        "restarts of a lost engine within engine_restart_minutes; beyond that the server ends with status 1; 0: no restart",
    )
    engine_restart_minutes: float = option(10.0, "minutes for which a restart of the engine counts")
    slo: str = option("", "limits of a good request, as ttft=200ms,tpot=100ms,e2e=5s or p95(ttft)<=200ms", "--goodput")
    price_per_hour: float | None = option(None, "what the device costs per hour in USD; None takes the table's price")
    metrics_alias: str = option(
        "", "emit metrics under other engines' names too: vllm, old (and what vLLM dropped), sglang"
    )
    shadow_rate: float = option(0.0, "share of answers that the reference weights score again, in idle time")
    shadow_url: str = option("", "server of these weights; the share's prompts and answers are sent there")
    shadow_model: str = option(
        "",
        "folder or hub name of these weights, run beside the served ones (default: the model before --quantization); with "
        "shadow_url its name there",
    )
    shadow_limit: float = option(0.05, "KL of the last answers, in nats per token, beyond which a warning is logged")
