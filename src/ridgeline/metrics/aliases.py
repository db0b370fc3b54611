"""Names that dashboards of other engines ask for, and what of ours answers them. vLLM's present names are ours under another
prefix; what it has dropped since, and SGLang's, are renamed one by one. Names and labels as both document them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Alias:
    """stems: our own names with vLLM's stems are shown under the prefix too. gauges, counters, histograms: their name -> ours;
    a gauge may be one of metrics.catalogue's GAUGES or LIVE, or of DERIVED. labels: further labels of a name.
    """

    prefix: str
    stems: bool = False
    gauges: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, str] = field(default_factory=dict)
    histograms: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


DERIVED: Mapping[str, str] = {
    "used_tokens": "Slots of the KV cache held by running requests.",
    "preempted": "Requests preempted so far.",
    "swapped": "Requests swapped to host memory: always 0.",
    "mean_accepted_length": "Tokens per verified draft, the sampled token included.",
}
"""Gauges that only other engines' dashboards ask for."""

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
