"""Metric names of other engines, for their dashboards.

Current vLLM names equal Ridgeline's names under another prefix. Names that vLLM has dropped and SGLang's names are mapped one by
one. Names and labels follow the documentation of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Alias:
    """The metric names of one engine."""

    prefix: str
    stems: bool = False
    """Also export the metrics that have vLLM's names under this prefix."""
    gauges: Mapping[str, str] = field(default_factory=dict)
    """The engine's name -> a name in catalogue.GAUGES, catalogue.LIVE or DERIVED."""
    counters: Mapping[str, str] = field(default_factory=dict)
    """The engine's name -> a name in catalogue.COUNTERS."""
    histograms: Mapping[str, str] = field(default_factory=dict)
    """The engine's name -> a name in catalogue.HISTOGRAMS."""
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The engine's name -> further labels."""


DERIVED: Mapping[str, str] = {
    "used_tokens": "Slots of the KV cache held by running requests.",
    "preempted": "Requests preempted so far.",
    "swapped": "Requests swapped to host memory: always 0.",
    "mean_accepted_length": "Tokens per verified draft, the sampled token included.",
}
"""Gauges that only aliases use, with their help texts."""

ALIASES: Mapping[str, Alias] = {
    "vllm": Alias("vllm", stems=True),
    "old": Alias(
        "vllm",
        stems=True,
        gauges={"gpu_cache_usage_perc": "kv_cache_usage_perc", "num_requests_swapped": "swapped"},
        counters={"gpu_prefix_cache_queries": "prefix_cache_queries", "gpu_prefix_cache_hits": "prefix_cache_hits"},
        histograms={"time_per_output_token_seconds": "inter_token_latency_seconds"},
    ),
    "sglang": Alias(
        "sglang",
        gauges={
            "num_running_reqs": "num_requests_running",
            "num_queue_reqs": "num_requests_waiting",
            "token_usage": "kv_cache_usage_perc",
            "cache_hit_rate": "prefix_hit_rate",
            "gen_throughput": "output_tokens_per_second",
            "num_used_tokens": "used_tokens",
            "num_retracted_reqs": "preempted",
            "spec_accept_length": "mean_accepted_length",
        },
        counters={
            "prompt_tokens": "prompt_tokens",
            "generation_tokens": "generation_tokens",
            "cached_tokens": "prompt_tokens_cached",
        },
        histograms={
            "time_to_first_token_seconds": "time_to_first_token_seconds",
            "inter_token_latency_seconds": "inter_token_latency_seconds",
            "e2e_request_latency_seconds": "e2e_request_latency_seconds",
            "queue_time_seconds": "request_queue_time_seconds",
        },
        labels={"cached_tokens": {"cache_source": "device"}},
    ),
}
