"""The catalogue of metrics: stem, help text and, for histograms, bucket edges.

Where vLLM has the metric, stem and edges are vLLM's. So a dashboard needs only another prefix, and metrics of mixed fleets can be
summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
HOST_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
CHOICES = (1, 2, 5, 10, 20)


@dataclass(frozen=True, slots=True)
class Entry:
    """One metric."""

    text: str
    """Help text."""
    label: str = ""
    """Name of a further label, or ""."""
    ours: bool = False
    """vLLM has no such metric."""
    edges: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets. Empty: 1, 2, 5, 10, ... up to the model's context."""


GAUGES: Mapping[str, Entry] = {
    "num_requests_running": Entry("Requests on the device."),
    "num_requests_waiting": Entry("Requests that wait to be admitted."),
    "kv_cache_usage_perc": Entry("Share of KV blocks held by running requests, 0 to 1."),
    "expert_imbalance": Entry(
        "Tokens of a layer's busiest expert over the mean of its experts, averaged over layers, of the last reading. 1: even.",
        ours=True,
    ),
    "expert_rank_imbalance": Entry(
        "The same of the ranks that divide the experts (--expert-parallel): a layer takes as long as its busiest rank. 1: even.",
        ours=True,
    ),
    "kv_cache_cached_perc": Entry("Share of KV blocks that are free but still cache a prefix, 0 to 1.", ours=True),
    "kv_waste_inside_perc": Entry("Share of leased token slots that hold no token.", ours=True),
    "kv_waste_between_perc": Entry("Share of the cache's bytes that unequal groups of layers waste.", ours=True),
    "prompt_cache_pinned_blocks": Entry("KV blocks that breakpoints pin.", ours=True),
    "prompt_cache_pinned_prefixes": Entry("Prefixes that breakpoints pin.", ours=True),
    "answer_cache_bytes": Entry("Bytes of the answers in the answer cache, at the last lookup.", ours=True),
    "batch_rows_queued": Entry("Rows of batches that wait for the batch lane.", ours=True),
    "batch_rows_running": Entry("Rows of batches in flight.", ours=True),
    "batches_open": Entry("Batches that have not ended.", ours=True),
    "shadow_kl": Entry(
        "KL divergence from the reference model over the last shadowed answers, in nats per token.", ours=True
    ),
}
COUNTERS: Mapping[str, Entry] = {
    "batch_rows": Entry("Rows of batches that have ended, by result.", label="result", ours=True),
    "moderation_judgements": Entry(
        "Judgements of texts by the judge of --moderation: passed, flagged, or failed without a verdict.",
        label="result",
        ours=True,
    ),
    "shadow_answers": Entry("Answers that the reference model scored again.", ours=True),
    "shadow_tokens": Entry("Tokens of these answers.", ours=True),
    "shadow_same_tokens": Entry(
        "Tokens of these answers for which both models have the same most probable token.", ours=True
    ),
    "shadow_kl_nats": Entry("KL divergence from the reference model, summed over these tokens, in nats.", ours=True),
    "shadow_failures": Entry("Answers that the reference model or the engine could not score.", ours=True),
    "prompt_tokens": Entry("Prompt tokens computed."),
    "generation_tokens": Entry("Tokens generated."),
    "prompt_tokens_cached": Entry("Prompt tokens taken from the prefix cache."),
    "prefix_cache_queries": Entry("Tokens looked up in the prefix cache."),
    "prefix_cache_hits": Entry("Tokens found in the prefix cache."),
    "num_preemptions": Entry("Requests that were preempted and recomputed."),
    "expert_tokens": Entry(
        "Tokens that each expert got, read every 64 steps. Layers with experts and their experts are numbered from 0.",
        label="expert",
        ours=True,
    ),
    "expert_rank_tokens": Entry(
        "Tokens that each rank multiplied by its experts, with --expert-parallel, over all layers.",
        label="rank",
        ours=True,
    ),
    "answer_cache_hits": Entry("Requests answered from the answer cache.", ours=True),
    "answer_cache_misses": Entry("Deterministic requests whose answer the answer cache lacked.", ours=True),
    "prompt_cache_write_tokens": Entry("Prompt tokens computed and pinned, by lifetime.", label="ttl", ours=True),
    "prompt_cache_pins_written": Entry("Prefixes that a breakpoint pinned.", ours=True),
    "prompt_cache_pins_renewed": Entry("Breakpoints that prolonged the lifetime of a pinned prefix.", ours=True),
    "prompt_cache_pins_refused": Entry(
        "Breakpoints whose prefix was not pinned, by reason.", label="reason", ours=True
    ),
    "prompt_cache_pins_lost": Entry("Pinned prefixes that were lost, by reason.", label="reason", ours=True),
    "kv_tier_stored_blocks": Entry(
        "Evicted blocks of the prefix cache that were copied to a tier.", label="tier", ours=True
    ),
    "kv_tier_loaded_blocks": Entry("Blocks that were copied from a tier instead of computed.", label="tier", ours=True),
    "kv_tier_dropped_blocks": Entry("Blocks that a tier removed, or could not take.", label="tier", ours=True),
    "spec_decode_num_drafts": Entry("Drafts verified."),
    "spec_decode_num_draft_tokens": Entry("Draft tokens verified."),
    "spec_decode_num_accepted_tokens": Entry("Draft tokens accepted."),
    "spec_decode_num_accepted_tokens_per_pos": Entry(
        "Draft tokens accepted, by position in the draft, starting at 0.", label="position"
    ),
    "spec_decode_saved_seconds": Entry(
        "Seconds saved by drafts compared with steps without drafts, minus the cost of rejected drafts.", ours=True
    ),
    "hand_overs": Entry("Prompts of one engine that another engine went on with.", ours=True),
    "hand_over_seconds": Entry(
        "Seconds from the first token of such a prompt to the next one, summed over hand-overs.", ours=True
    ),
    "hand_over_bytes": Entry("Bytes of keys and values that engines pulled from others.", ours=True),
    "hand_over_failures": Entry(
        "Prompts that were computed instead: their engine was lost (prefill) or none was ready (no engine), pages were lost "
        "(pages), or the engine that went on was lost (decode).",
        label="reason",
        ours=True,
    ),
    "engine_restarts": Entry("Engine processes started to replace one that had ended or was stuck.", ours=True),
    "request_success": Entry("Finished choices.", label="finished_reason"),
    "aborted_requests": Entry(
        "Requests that were refused or ended before their answer was complete.", "reason", ours=True
    ),
    "steps": Entry("Steps run.", ours=True),
    "failed_steps": Entry("Steps that failed.", ours=True),
    "generation_tokens_dropped": Entry(
        "Tokens sampled for choices that had already ended, by a stop string or a cancellation.", ours=True
    ),
    "scheduler_host_part_seconds": Entry("Seconds the scheduler spent on steps, by part.", label="part", ours=True),
    "estimated_flops_per_gpu": Entry("FLOPs of all query tokens, by the formula of the model."),
    "useful_flops_per_gpu": Entry(
        "The part of estimated_flops_per_gpu for tokens that count: without rejected drafts, tokens after an end, and tokens "
        "computed again after a preemption.",
        ours=True,
    ),
    "draft_flops_per_gpu": Entry("FLOPs of the drafter on the device.", ours=True),
    "draft_moved_bytes_per_gpu": Entry("Bytes that the drafter on the device had to move.", ours=True),
    "estimated_moved_bytes_per_gpu": Entry(
        "Bytes that all steps had to move: weights as they are stored, keys and values read and written.", ours=True
    ),
    "energy_joules": Entry("Energy used by the device in joules, measured or estimated.", ours=True),
    "prompt_energy_joules": Entry("Energy of steps for their prompt tokens in joules, without idle power.", ours=True),
    "output_energy_joules": Entry("Energy of steps for their other tokens in joules, without idle power.", ours=True),
    "late_compiles": Entry("Kernels compiled after start-up, while requests waited.", ours=True),
    "late_captures": Entry("CUDA graphs captured after start-up; expected to be 0.", ours=True),
    "late_seconds": Entry("Seconds spent on kernels and graphs after start-up, by kind.", label="kind", ours=True),
    "step_device_seconds": Entry("Seconds the device spent on steps.", ours=True),
}
HISTOGRAMS: Mapping[str, Entry] = {
    "time_to_first_token_seconds": Entry("Seconds from arrival to the first token.", edges=FIRST_TOKEN_SECONDS),
    "time_to_first_visible_token_seconds": Entry(
        "Time to publish: seconds from arrival to the first visible content, which is text that is not hidden reasoning, or a tool "
        "call.",
        ours=True,
        edges=FIRST_TOKEN_SECONDS,
    ),
    "inter_token_latency_seconds": Entry("Seconds between tokens, weighted by token.", edges=TOKEN_SECONDS),
    "request_time_per_output_token_seconds": Entry("Mean seconds per token after the first.", edges=TOKEN_SECONDS),
    "e2e_request_latency_seconds": Entry("Seconds from arrival to the last token.", edges=REQUEST_SECONDS),
    "request_queue_time_seconds": Entry("Seconds a request waited.", edges=REQUEST_SECONDS),
    "request_prefill_time_seconds": Entry("Seconds from admission to the first token.", edges=REQUEST_SECONDS),
    "request_decode_time_seconds": Entry("Seconds from the first token to the last.", edges=REQUEST_SECONDS),
    "request_inference_time_seconds": Entry("Seconds from admission to the last token.", edges=REQUEST_SECONDS),
    "request_prompt_tokens": Entry("Tokens of a prompt."),
    "request_generation_tokens": Entry("Tokens generated for a request."),
    "request_params_max_tokens": Entry("max_tokens of a request."),
    "request_params_n": Entry("n of a request.", edges=CHOICES),
    "iteration_tokens_total": Entry("Tokens of a step.", edges=STEP_TOKENS),
    "scheduler_host_seconds": Entry("Seconds the scheduler spent on a step.", ours=True, edges=HOST_SECONDS),
}

LIVE: Mapping[str, Entry] = {
    "prompt_tokens_per_second": Entry("Prompt tokens computed per second.", ours=True),
    "output_tokens_per_second": Entry("Tokens generated per second.", ours=True),
    "requests_per_second": Entry("Requests ended per second.", ours=True),
    "arriving_requests_per_minute": Entry(
        "Valid requests that arrived per minute, including those refused because the queue was full.", ours=True
    ),
    "completed_requests_per_minute": Entry("Requests answered completely per minute.", ours=True),
    "open_agent_runs": Entry("Agent runs (calls with one x-run-id) that have not ended.", ours=True),
    "agent_runs_per_minute": Entry("Agent runs ended per minute.", ours=True),
    "prefix_hit_rate": Entry("Share of looked-up prompt tokens found in the prefix cache.", ours=True),
    "goodput_requests_per_second": Entry("Requests per second within their SLO.", ours=True),
    "slo_attainment": Entry(
        "Share of judged requests that met their SLO. Judged are all ended requests that have an SLO, including failed ones, "
        "except those whose client disconnected before a limit was missed.",
        ours=True,
    ),
    "slo_met": Entry("1 if the last minutes meet the percentiles and shares of the SLO, else 0.", ours=True),
    "device_busy": Entry("Share of time the device was running a step (GPU utilization).", ours=True),
    "mfu_wall_clock": Entry(
        "Useful FLOP/s over all time, as a share of the specified peak: the MFU of the system.", ours=True
    ),
    "mbu_wall_clock": Entry(
        "Bytes that the model moved per second over all time, as a share of the specified bandwidth.", ours=True
    ),
    "mfu": Entry("Useful FLOP/s while busy, as a share of the specified peak.", ours=True),
    "mbu": Entry("Bytes moved per second while busy, as a share of the specified bandwidth.", ours=True),
    "mfu_executed": Entry(
        "As mfu, with rejected drafts, tokens computed again and the drafter on the device.", ours=True
    ),
    "mbu_executed": Entry("As mbu, with the bytes of the drafter on the device.", ours=True),
    "mfu_measured": Entry(
        "mfu relative to the matrix product rate measured on this machine; 1 where steps exceed it.", ours=True
    ),
    "mbu_measured": Entry(
        "mbu relative to the read bandwidth measured on this machine; 1 where steps exceed it.", ours=True
    ),
    "bubble": Entry("Share of time the device waited for the host although there was work.", ours=True),
    "prompt_share": Entry("Share of busy time in steps that computed prompt tokens.", ours=True),
    "host_seconds_per_step": Entry("Seconds the scheduler spent per step.", ours=True),
    "mean_running": Entry("Mean number of requests on the device while it was busy.", ours=True),
    "mean_kv_used": Entry("Mean share of KV blocks held by running requests while the device was busy.", ours=True),
    "decode_step_seconds": Entry("Device seconds of a step without prompt tokens.", ours=True),
    "decode_step_bytes": Entry("Bytes that a step without prompt tokens had to move.", ours=True),
    "decode_step_predicted_seconds": Entry("Predicted device seconds of a step without prompt tokens.", ours=True),
    "prompt_step_seconds": Entry("Mean device seconds of a step with prompt tokens.", ours=True),
    "prompt_step_predicted_seconds": Entry("Predicted device seconds of a step with prompt tokens.", ours=True),
    "draft_saved_share": Entry(
        "Device time that drafts saved, less the drafter's part of prompt steps, as a share of the device time.",
        ours=True,
    ),
    "step_prediction_error": Entry("Median relative error of the predicted step time.", ours=True),
    "input_tokens_per_output_token": Entry(
        "Prompt tokens that cost as much latency as one output token (medians).", ours=True
    ),
    "watts": Entry("Power of the device in watts, idle time included.", ours=True),
    "busy_watts": Entry("Power of the device in watts while steps ran.", ours=True),
    "joules_per_token": Entry("Joules per token, prompt and output, idle time included.", ours=True),
    "joules_per_prompt_token": Entry("Joules of steps per prompt token computed, without idle power.", ours=True),
    "joules_per_output_token": Entry("Joules of steps per token generated, without idle power.", ours=True),
    "cost_per_million_tokens": Entry("Dollars per million tokens, prompt and output, idle time included.", ours=True),
    "cost_per_million_output_tokens": Entry("Dollars per million output tokens, idle time included.", ours=True),
}
"""Gauges over the last minutes (metrics.live). A gauge without a known value is not exported."""


def one_two_five(limit: int) -> Iterator[float]:
    """Yield 1, 2, 5, 10, 20, 50, ... up to `limit`."""
    scale = 1
    while scale <= limit:
        for digit in (1, 2, 5):
            if digit * scale <= limit:
                yield digit * scale
        scale *= 10
