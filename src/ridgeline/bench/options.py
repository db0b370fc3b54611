"""Options of `ridgeline bench`: configuration classes with one flag per field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.bench.target import Address, Dialect
from ridgeline.bench.traces import read_trace
from ridgeline.core.config import option
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.core.workload import RequestSpec, Workload, arrivals, fits, synthetic

DEFAULT_REQUESTS = 200
DEFAULT_CONCURRENCY = 8
MAX_CLOSED_LOOP_REQUESTS = 20_000
"""Requests generated for a closed loop with a time limit."""
SHIPPED = "shipped"
"""Value of `--model-folder` for the shipped model."""
BOUNDS = {
    "max_requests": (1, 1 << 24),
    "concurrency": (1, 1 << 16),
    "prefix_len": (0, 1 << 24),
    "warmup": (0, 1 << 16),
    "timeout_s": (0.01, 1e6),
    "time_scale": (0.0, 1e9),
    "duration": (0.01, 1e7),
    "usd_hour": (1e-6, 1e6),
    "watts": (1e-3, 1e9),
}


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The server and the form of requests."""

    url: str = option("http://127.0.0.1:8000", "address of an OpenAI-compatible server", "--base-url")
    model: str = option("", "name of the model (default: the first model the server lists)", "-m")
    api_key: str | None = option(None, "API key of the server")
    endpoint: str = option("", "completions or chat (default: what the server supports)")
    prompts: str = option("", "ids (token ids) or text (default: ids if the server supports them)")
    context: int | None = option(
        None, "maximum number of tokens of prompt plus answer (default: what the server reports)", "--max-model-len"
    )
    ignore_eos: bool = option(True, "send ignore_eos, so that answers have the requested length")
    extra_body: str = option("", "JSON object with further fields for every request, as in '{\"temperature\": 0}'")
    timeout_s: float = option(600.0, "seconds after which a request counts as failed")


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """The requests: a trace or random lengths."""

    trace: str = option(
        "", "trace file: Azure, BurstGPT or Vidur CSV, Mooncake, WEKA or prompt JSONL, ShareGPT JSON", "--dataset-path"
    )
    input_len: str = option(
        "512", "prompt tokens per request if there is no trace: 512 or 100-1000", "--random-input-len"
    )
    output_len: str = option(
        "128", "answer tokens per request if there is no trace: 128 or 10-500", "--random-output-len"
    )
    prefix_len: int = option(
        0, "tokens of a prefix that all prompts share, if there is no trace", "--random-prefix-len"
    )
    run_ids: bool = option(
        False, "send the requests of one conversation of the trace as one agent run (header x-run-id)"
    )
    max_requests: int | None = option(
        None, f"maximum number of requests (default without a trace: {DEFAULT_REQUESTS})", "--num-prompts"
    )
    seed: int = option(0, "seed of arrival times and prompts")


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """When requests are sent: at a rate, at a concurrency or at the times of the trace."""

    rate: float | None = option(None, "requests per second; inf sends all at once", "--request-rate")
    burstiness: float | None = option(
        None,
        "burstiness of arrivals at --rate: 1 is Poisson, less is bursty, inf is constant (default: 1, or that of the trace)",
    )
    concurrency: int | None = option(
        None, f"maximum number of concurrent requests; without --rate, the end of an answer starts the next request "
        f"(default without rate and trace: {DEFAULT_CONCURRENCY})", "--max-concurrency"
    )  # fmt: skip
    time_scale: float = option(1.0, "factor on the times of a trace: 0.5 replays it twice as fast")
    duration: float | None = option(None, "seconds in which requests are sent")
    warmup: int = option(0, "warm-up requests before the run, sent together and not counted", "--num-warmups")


@dataclass(frozen=True, slots=True)
class ResultConfig:
    """How the result is judged and where it is written."""

    slo: str = option(
        "", "latency limits: ttft=200ms,publish=2s,tpot=100ms,e2e=5s or p95(ttft)<=200ms,attain>=0.95", "--goodput"
    )
    out: str = option("", "folder for run.json, requests.jsonl and report.html (default: bench-DATE-TIME)", "-o")
    usd_hour: float | None = option(
        None,
        "price of the server's device per hour in dollars, for cost per request (default: what the server reports)",
    )
    watts: float | None = option(
        None, "mean power of the server's device, for joules per request (default: the server's energy counter)"
    )
    label: str = option("", "name of this run in tables and plots")
    json: bool = option(False, "print run.json instead of a table")

    @property
    def prices(self) -> dict[str, float]:
        """Price and power that the user gave, as facts of a run."""
        given = {"usd_hour": self.usd_hour, "watts": self.watts}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class CurveConfig:
    """The concurrencies of a curve, and the model and hardware for MFU and MBU."""

    levels: str = option("1,2,4,8,16,32", "concurrent requests of the runs")
    model_folder: str = option(
        "", f"folder or hub name of the served model, for MFU and MBU ({SHIPPED}: the shipped model)"
    )
    on: str = option("", "accelerator that the server runs on, for MFU and MBU (h200, l4, cpu, ...)")


def check(configs: tuple[Any, ...]) -> None:
    """Raise ConfigError for a value outside BOUNDS."""
    for config in configs:
        for name, (low, high) in BOUNDS.items():
            value = getattr(config, name, None)
            if value is not None and not low <= value <= high:
                shown = [f"{number:,}" if isinstance(number, int) else f"{number:g}" for number in (value, low, high)]
                raise ConfigError(f"{_flag(name)} is {shown[0]}: give {shown[1]} to {shown[2]}.", param=name)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def dialect(config: TargetConfig) -> tuple[Dialect, bool | None, bool | None]:
    """Return (dialect, ids, chat): ids and chat are True or False if the user chose, else None."""
    try:
        extra = msgspec.json.decode(config.extra_body.encode(), type=dict) if config.extra_body else {}
    except msgspec.DecodeError as error:
        raise ConfigError(f"--extra-body is not a JSON object ({error}).", param="extra_body") from None
    endpoint = _choice("endpoint", config.endpoint, ("completions", "chat"))
    prompts = _choice("prompts", config.prompts, ("ids", "text"))
    if endpoint == "chat" and prompts == "ids":
        raise ConfigError(
            "--endpoint chat does not accept token ids: use --endpoint completions, or --prompts text.", param="prompts"
        )
    fields = {"ignore_eos": True, **extra} if config.ignore_eos else extra
    base = Dialect(config.model, fields=fields)
    return base, None if not prompts else prompts == "ids", None if not endpoint else endpoint == "chat"


def address(config: TargetConfig, url: str | None = None) -> Address:
    return Address(url or config.url, config.api_key)


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value and value not in allowed:
        raise ConfigError(f"{_flag(name)} is {value!r}: give {' or '.join(allowed)}.", param=name)
    return value


def source(config: WorkloadConfig, load: LoadConfig) -> Workload:
    """Read the trace, or generate enough requests for the load. Raises ConfigError if both a trace and lengths are given."""
    if config.trace:
        defaults = WorkloadConfig()
        for name in ("input_len", "output_len", "prefix_len"):
            if getattr(config, name) != getattr(defaults, name):
                raise ConfigError(
                    f"{_flag(name)} applies to random requests, and --trace replaces them: leave one of the two out.",
                    param=name,
                )
        return read_trace(Path(config.trace))
    count = config.max_requests or DEFAULT_REQUESTS
    if load.duration is not None and config.max_requests is None:  # enough requests for the duration
        open_loop = load.rate is not None and math.isfinite(load.rate)
        count = math.ceil((load.rate or 0.0) * load.duration * 1.5) + 50 if open_loop else MAX_CLOSED_LOOP_REQUESTS
    return synthetic(count, (config.input_len, config.output_len), config.prefix_len, config.seed)


def check_conversations(workload: Workload) -> None:
    """Raise ConfigError for --run-ids with a workload that has no conversations."""
    if all(request.session < 0 for request in workload.requests):
        raise ConfigError(
            f"--run-ids needs conversations, and {workload.name} has none: give a --trace with several turns (ShareGPT, WEKA).",
            param="run_ids",
        )


def schedule(workload: Workload, context: int | None, config: WorkloadConfig, load: LoadConfig) -> tuple[Workload, int]:
    """Select the requests to send and set their times.

    With a rate, a trace keeps its own burstiness unless `load.burstiness` is set. With a concurrency and no rate, the times of a
    trace are ignored.

    Returns:
        The scheduled workload and the number of requests that exceed the context.
    """
    uses_trace_times = workload.timed and load.rate is None and load.concurrency is None
    if not uses_trace_times and load.time_scale != 1.0:
        raise ConfigError(
            "--time-scale applies to the times of a trace: give --trace, and neither --rate nor --concurrency.",
            param="time_scale",
        )
    if load.rate is None and load.burstiness is not None:
        raise ConfigError("--burstiness applies to arrivals at a rate: give --rate too.", param="burstiness")
    if uses_trace_times:
        workload = workload.time_scaled(load.time_scale)
    limit, context_limit = config.max_requests or len(workload.requests), context or math.inf
    requests: list[RequestSpec] = []
    dropped = 0
    for request, fit in zip(workload.requests, fits(workload.requests, context_limit), strict=True):
        if len(requests) == limit or (uses_trace_times and load.duration is not None and request.at_s > load.duration):
            break
        if fit:
            requests.append(request)
        else:
            dropped += 1
    if not requests:
        dropped_words = f"{counted(dropped, 'request')} dropped"
        raise ConfigError(
            f"No request fits into the context of {context} tokens ({dropped_words}): lower --input-len or --output-len, or "
            "give another --trace.",
            param="context",
        )
    is_closed_loop = load.rate is None and load.concurrency is not None
    scheduled = Workload(workload.name, tuple(requests), workload.timed and not is_closed_loop, workload.skipped)
    if load.rate is None:
        return scheduled, dropped
    if load.rate <= 0:
        raise ConfigError(f"--rate is {load.rate:g}: give requests per second above 0, or inf.", param="rate")
    if scheduled.timed and load.burstiness is None:
        scheduled = scheduled.at_rate(load.rate)
    else:
        burstiness = 1.0 if load.burstiness is None else load.burstiness
        scheduled = scheduled.at(arrivals(len(requests), load.rate, burstiness, config.seed))
    return scheduled.first(seconds=load.duration), dropped
