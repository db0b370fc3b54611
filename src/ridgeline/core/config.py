"""Configuration: one frozen dataclass each for model, engine and service.

Flags, environment variables and file keys are derived from the fields. A field that is None is chosen from
model and hardware. `core.resolve` does so once at start-up and records the origin of each value. Values do not change afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, text: str, *flags: str) -> Any:
    """A configuration field: its default, one line of help, and further flags for it."""
    return field(default=default, metadata={"help": text, "flags": flags})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model, and how its weights are read."""

    model: str = option("", "model folder or hub name; empty: the shipped model", "--model-path", "-m")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    load_format: str = option("auto", "auto reads safetensors; dummy fills random weights from config.json alone")
    dtype: str = option("auto", "dtype of the model: auto (that of the checkpoint), bfloat16, float16 or float32")
    quantization: str = option(
        "",
        "number format to quantize the layers to while loading: fp8, fp8-weight, w8a8, llm-int8, int8, int4, int3 (with groups or "
        "zero points: int4-g64, int4-channel-zp)",
        "-q",
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache: auto (the model's dtype), fp8, int8 or int4",
        "--cache-type-k",
    )
    kv_selection: int = option(
        0, "tokens of the KV cache that a generated token reads per layer and head, in whole blocks; 0: all"
    )
    expert_parallel: bool = option(
        False,
        "the processes of --tensor-parallel-size divide the experts of a layer among them, instead of the width of each",
        "--enable-expert-parallel",
    )
    redundant_experts: int = option(
        0,
        "with --expert-parallel on CPUs: so many experts of each layer are on every rank, those with most tokens in --expert-load; "
        "the ranks divide their tokens",
    )
    expert_load: str = option(
        "", "file with the tokens of each expert: what /metrics of a server of the same model answers"
    )
    cpu_offload_gb: float = option(
        0.0,
        "GiB of the layers' weights that stay in host memory and are copied to the GPU in every step, for models larger than its "
        "memory (default: none)",
    )
    enable_lora: bool = option(
        False, "requests may name a LoRA adapter as their model; adapters are loaded and unloaded while the server runs"
    )
    lora_modules: str = option(
        "",
        "LoRA adapters to load at the start, NAME=FOLDER with a checkpoint of PEFT; repeat it, or separate by commas (implies "
        "--enable-lora)",
        "--lora",
    )
    max_loras: int | None = option(
        None, "LoRA adapters that may be loaded at a time (default: 8, or as many as --lora-modules names)"
    )
    max_lora_rank: int | None = option(
        None, "largest rank of a LoRA adapter, up to 256 (default: 16, or the largest of --lora-modules)"
    )
    max_model_len: int | None = option(
        None, "maximum tokens of prompt plus answer (default: the model's)", "--context-length", "-c"
    )
    seed: int = option(0, "seed for dummy weights and for requests without a seed")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Batching, memory and the device."""

    device: str = option("auto", "device that runs the model: auto, cpu or cuda")
    max_num_seqs: int | None = option(None, "maximum requests that run at once", "-np")
    max_num_batched_tokens: int | None = option(None, "maximum query tokens in one step (the prefill chunk)")
    gpu_memory_utilization: float = option(0.90, "share of the GPU's memory to use", "--mem-fraction-static")
    kv_cache_memory: int | None = option(None, "bytes for the KV cache (default: within --gpu-memory-utilization)")
    block_size: int | None = option(None, "tokens per block of the KV cache")
    enable_prefix_caching: bool = option(True, "reuse the KV cache of equal prompt prefixes")
    cache_pin_share: float = option(
        0.3, "largest share of the KV cache's blocks that requests may pin with cache_control; 0: none"
    )
    kv_retention: str = option(
        "all",
        "tokens whose keys and values stay once a prompt is computed: all, window:sinks=4,keep=1024, snap:window=32,keep=1024, "
        "heavy:window=32,keep=1024 or adaptive:0.95 (the share of attention that every head keeps)",
    )
    kv_offload_gb: float = option(
        0.0, "GiB of host memory for blocks of cached prefixes that the KV cache evicts (default: none)"
    )
    kv_disk: str = option("", "folder for such blocks below host memory; a restart finds them (default: none)")
    kv_disk_gb: float = option(10.0, "largest size of the files in --kv-disk in GiB")
    kv_offload_ttl: float = option(
        0.0, "seconds after which a block in host memory or on disk is dropped (default: never)"
    )
    batching: str = option("continuous", "batching policy: continuous, static:N or dynamic:N,WINDOW_MS")
    reader_pace: str = option(
        "",
        "time in which a person reads a token, as in 120ms: a streamed answer that is further ahead leaves its part of a step to "
        "prompts (default: answers are generated as fast as possible)",
    )
    steps_in_flight: int | None = option(
        None,
        "0: plan after each step; 1: plan while the device runs (default: 0 on a CPU, 1 on a GPU)",
    )
    speculate: str = option(
        "",
        "speculative decoding: auto, reference[:FILE], lookahead[:w=W,n=N,g=G], recycling, recurrent:FOLDER, "
        "draft:FOLDER, medusa:FOLDER, eagle:FOLDER, mtp; combine two of them with +",
        "--speculative-config",
    )
    draft_tokens: int | None = option(None, "maximum draft tokens per request and step", "--num-speculative-tokens")
    enforce_eager: bool = option(False, "run without CUDA graphs; on a CPU, without compiled operations")
    deterministic: bool = option(False, "the tokens of a request do not depend on other requests; slower")
    threads: int | None = option(None, "CPU threads of a process that runs the model (default: one per available core)")
    tensor_parallel_size: int = option(1, "processes that share each layer of the model", "-tp", "--tp", "--tp-size")
    data_parallel_size: int = option(
        1,
        "processes that divide the requests of a model with experts: each has whole attention and a KV cache of its own, and they "
        "share the experts",
        "-dp",
        "--dp",
        "--dp-size",
    )
    pipeline_parallel_size: int = option(
        1, "stages of layers, each of --tensor-parallel-size processes", "-pp", "--pp-size"
    )
    context_parallel_size: int = option(
        1, "processes that share the KV cache of each request, each an equal part of every block", "-cp", "--cp-size"
    )
    sequence_parallel: bool = option(
        False, "each of --tensor-parallel-size processes keeps the residual stream of its part of a step's tokens"
    )
    nnodes: int = option(1, "hosts that run the model together, each an equal part of its processes")
    node_rank: int = option(0, "number of this host, from 0; the service runs on host 0, and the others wait for it")
    master_addr: str = option("", "address of host 0 in the network of the hosts")
    master_port: int = option(29500, "port of host 0 for the processes on the other hosts")
    enable_sleep_mode: bool = option(
        False,
        "allow /sleep, which gives the memory of weights and KV cache back, /wake_up and /update_weights_from_disk",
    )
    calibration: str = option("", "file that `ridgeline calibrate` wrote, for accurate predictions of step times")

    @property
    def layer_ranks(self) -> int:
        """Processes that share each layer."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def ranks(self) -> int:
        """Processes that run the model together."""
        return self.layer_ranks * self.context_parallel_size * self.pipeline_parallel_size

    @property
    def host_ranks(self) -> range:
        """The ranks that run on this host."""
        count = self.ranks // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """The address of the API, who may use it, and its limits."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    api_key: str | None = option(
        None, "key that clients must send; only /health and the HTML pages without their data are open to everybody"
    )
    admin_api_key: str | None = option(
        None, "key of operators: with it, only this key may read other clients' requests and reset the prefix cache"
    )
    api_keys: str = option(
        "", "TOML, JSON or YAML file of API keys with their limits; it is read again when it changes"
    )
    isolate_keys: bool = option(False, "API keys share no cached prefixes, so that answer times show nothing of others")
    usage_file: str = option(
        "",
        "SQLite file of what each API key has used (default: one for each port in the user's state folder; none on port 0); off: "
        "in memory only",
    )
    allowed_origins: str = option(
        "", "web origins whose pages may call the API from a browser: https://a.example,https://b.example, or * for all"
    )
    allowed_hosts: str = option(
        "",
        "host names by which the server may be called, in addition to localhost: chat.example.org,10.0.0.5, or * for all; "
        "checked when the server listens on loopback, or when this option is set",
    )
    root_path: str = option(
        "", "path prefix under which a proxy serves this server, as in /llm; the proxy may keep or strip it"
    )
    ssl_certfile: str | None = option(None, "PEM file of the certificate and its chain; the server then speaks HTTPS")
    ssl_keyfile: str | None = option(
        None, "PEM file of the certificate's private key (default: --ssl-certfile contains it)"
    )
    ssl_keyfile_password: str | None = option(None, "password of an encrypted key")
    served_model_name: str | None = option(None, "name of the model in the API")
    chat_template: str | None = option(None, "Jinja file (or text) that replaces the model's chat template")
    allow_special_in_content: bool = option(
        False,
        "convert text in messages and tools that spells a special token to that token, instead of keeping it as text",
    )
    reasoning_parser: str = option(
        "auto",
        "format of reasoning: auto (by the chat template), none, qwen3, deepseek_r1, granite, mistral, cohere2, openai_gptoss, ...",
    )
    tool_call_parser: str = option(
        "auto",
        "format of tool calls: auto (by the chat template), none, hermes, llama3_json, pythonic, mistral, granite, deepseek_v3, "
        "cohere2, glm4, openai, ...",
    )
    max_queue: int = option(1024, "maximum requests that may wait; further requests get status 429")
    max_body_mb: float = option(32.0, "largest request body in MiB")
    batch_dir: str = option(
        "",
        "folder of the files and batches of /v1/files and /v1/batches (default: one for each port in the user's state folder; none "
        "on port 0); off: no files and no batches",
    )
    batch_window: str = option(
        "", "hours of the day, local time, in which rows of batches run, as in 22:00-06:00 (default: always)"
    )
    batch_impact: str = option(
        "",
        "share by which rows of batches may raise the p99 latency of online requests, as in 10% (default: up to --slo; without one "
        "10%)",
    )
    batch_max_gb: float = option(10.0, "space of uploaded files and results in GiB, beyond which uploads are refused")
    keep_alive_s: float = option(15.0, "seconds between keep-alive comments on a silent stream")
    drain_s: float = option(30.0, "seconds after SIGTERM in which running requests may finish")
    engine_restarts: int = option(
        3,
        "maximum restarts of a lost engine within --engine-restart-minutes; after them the server exits with status 1",
    )
    engine_restart_minutes: float = option(10.0, "minutes during which a restart counts towards --engine-restarts")
    moderation: str = option(
        "",
        "judge of answers: address of an endpoint with OpenAI's moderation API, or module:function; answers that it flags are "
        "withdrawn",
    )
    moderation_mode: str = option(
        "buffer",
        "buffer: send nothing before the whole answer has passed; window: send text that has passed; after: send text at once, and "
        "withdraw it later",
    )
    moderation_window: int = option(
        200, "characters of new text after which the modes window and after judge an answer again"
    )
    moderation_timeout_s: float = option(5.0, "seconds in which the judge must answer")
    moderation_failure: str = option(
        "closed", "what happens to an answer that the judge does not judge: closed withdraws it, open lets it pass"
    )
    moderation_api_key: str | None = option(None, "key that is sent to the endpoint of --moderation")
    prefill_engines: int = option(
        0, "engine processes that compute prompts for --decode-engines (default: one engine does both)"
    )
    decode_engines: int = option(0, "engine processes that draw the tokens after the first; with --prefill-engines")
    hand_over: str = option(
        "local",
        "how engines of --prefill-engines hand prompts over: local (shared memory on CPUs, CUDA IPC between GPUs of one host) or "
        "tcp (also between hosts, while a prompt is computed)",
    )
    remote_engines: str = option(
        "", "engines that run on other hosts, prefill or decode: they join --engine-address (default: none)"
    )
    engine_address: str = option("", "HOST:PORT of this host, for engines of other hosts; needs --engine-secret")
    engine_secret: str | None = option(None, "secret that the engines of all hosts have")
    join: str = option("", "run no service, but one engine for the service whose --engine-address is this")
    otlp_traces_endpoint: str = option(
        "",
        "address of an OpenTelemetry collector (OTLP over HTTP, as in http://localhost:4318) that receives traces of requests; "
        "needs ridgeline[otel] (default: none)",
    )
    log_format: str = option("text", "text, or json: log lines as one JSON object each, with request_id")
    log_level: str = option(
        "warning", "lowest level of log lines: debug, info (a line for each request), warning or error"
    )
    slo: str = option(
        "", "latency limits of a good request: ttft=200ms,publish=2s,tpot=100ms,e2e=5s or p95(ttft)<=200ms", "--goodput"
    )
    keep_slo: bool = option(
        False, "order prompts and size steps so that more requests meet the limits of ttft and tpot in --slo"
    )
    price_per_hour: float | None = option(
        None, "price of the device per hour in USD (default: the price in the hardware table)"
    )
    warm_prefix: str = option(
        "",
        "file of prefixes (JSON lines with messages or prompt, and ttl) that are computed and pinned before the server is ready",
    )
    response_store_mb: float = option(
        64.0,
        "memory in MiB of responses that /v1/responses can go on from; the oldest go first, and a restart drops them",
    )
    answer_cache_mb: float = option(
        0.0, "MiB of whole answers that identical requests with temperature 0 or a seed get again (default: none)"
    )
    token_prices: str = option(
        "",
        "prices of tokens for usage and /requests: input=0.2,output=0.6 in USD per million; read=0.1,write-5m=1.25,write-1h=2,"
        "storage=0 (per token-hour),answer=0.1 as factors of them (default: these factors, and no dollars)",
    )
    pooling: str = option(
        "auto",
        "tokens whose hidden states make an embedding: last, mean or cls; yes-no: last, and rerank and score ask the model as "
        "Qwen3-Reranker is asked (default: what the model's modules.json names, else last)",
    )
    models: str = option(
        "", "YAML, TOML or JSON file of several models, which are loaded when a request names them (default: one model)"
    )
    models_memory_gb: float | None = option(
        None, "GiB for the models of --models that are awake at a time (default: one of them is awake at a time)"
    )
    models_load_s: float = option(
        600.0, "seconds that a request waits for its model to be loaded; then it gets status 503"
    )
    idle_sleep_minutes: float = option(
        0.0, "minutes without a request after which a model goes to sleep; with --enable-sleep-mode (default: never)"
    )
    asleep_requests: str = option("wake", "what a request to a model that sleeps does: wake it, or refuse (status 503)")
    metrics_alias: str = option(
        "",
        "also export metrics under the names of another engine: vllm, old (vllm and names that vLLM has removed), sglang",
    )
    shadow_rate: float = option(0.0, "share of answers that the reference model scores again in idle time")
    shadow_url: str = option(
        "", "address of a server with the reference model; it receives the prompts and answers that are scored"
    )
    shadow_model: str = option(
        "",
        "folder or hub name of the reference model, which runs in a second engine (default: the served model without "
        "--quantization); with --shadow-url its name on that server",
    )
    shadow_limit: float = option(
        0.05, "log a warning if the KL divergence of the last answers is above this (nats per token)"
    )
