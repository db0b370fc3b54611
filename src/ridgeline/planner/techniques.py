"""The registry of techniques: what each one changes in a situation, its effort, its price, and its risk to the quality of answers.

A technique proposes changed situations, and the diagnosis simulates each of them. A technique whose effect the record does not
determine says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from ridgeline.core.fit import Risk, cache_risk, format_risk
from ridgeline.core.host_weights import LINK_SHARE
from ridgeline.core.quantization import quantized
from ridgeline.core.slo import reader_pace
from ridgeline.core.spec import KV_FORMATS, kv_layout
from ridgeline.hardware.serving import KV_FORMATS_SERVED, PREFERRED, weight_formats
from ridgeline.hardware.table import ACCELERATORS, Accelerator
from ridgeline.kv.retention import KEEP_ALL, read_retention
from ridgeline.planner.situation import Situation, slower


class Effort(IntEnum):
    """What applying a technique takes."""

    RESTART = 0
    CLIENTS = 1
    DEVICE = 2
    HARDWARE = 3

    def __str__(self) -> str:
        return ("a restart", "a change of the clients", "a second device", "other hardware")[self]


@dataclass(frozen=True, slots=True)
class Change:
    """A changed situation. unknown: why its effect cannot be predicted, or ""."""

    detail: str
    after: Situation
    risk: Risk = Risk.NONE
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Technique:
    """propose: the changes that apply to a situation. price: what it costs besides effort and risk. command: how it is applied
    where options of the server do not do it."""

    name: str
    propose: Callable[[Situation], Iterator[Change]]
    price: str
    effort: Effort = Effort.RESTART
    command: str = ""


# --- the model and its cache ---------------------------------------------------------------------------------------------


def _weights(now: Situation) -> Iterator[Change]:
    """The number formats that the device serves, for weights that are not quantized yet."""
    if now.spec.quantization:
        return
    for name in [
        name for name in weight_formats(now.kind, now.row, now.spec.has_experts) if name in PREFERRED[now.kind]
    ]:
        spec = quantized(now.spec, name)
        if spec.layer_bytes < now.spec.layer_bytes:
            unknown = "the step times of weights in host memory are not simulated" if spec.host_bytes else ""
            after = replace(now.served_as(spec), model=replace(now.model, quantization=name))
            yield Change(name, after, format_risk(name), unknown)


def _kv_cache(now: Situation) -> Iterator[Change]:
    """Formats of the cache with fewer bits: more pages in the same memory, and fewer bytes to read."""
    for name in KV_FORMATS_SERVED[now.kind]:
        if KV_FORMATS[name].bits < now.spec.kv.bits:
            spec = replace(now.spec, kv_format=name)
            layout = kv_layout(spec, now.server.layout.page_tokens)
            pages = now.server.pages * now.server.layout.page_bytes // layout.page_bytes
            server = replace(now.server, cost=replace(now.server.cost, spec=spec), layout=layout, pages=pages)
            yield Change(name, replace(now, server=server, spec=spec), cache_risk(name))


SHORTEST_KEPT = 512
"""Fewest tokens that a proposal keeps: below, answers suffer more than requests gain."""


def _retention(now: Situation) -> Iterator[Change]:
    """Sinks and recent tokens, a half or a quarter of the longest request, where a model and its options can drop any."""
    longest = max((spec.input + spec.output for spec in now.workload.requests), default=0)
    if now.engine.kv_retention != "all":
        yield _with(now, "all", {"kv_retention": "all"}, retention=KEEP_ALL)
        return
    for share, risk in ((2, Risk.MEDIUM), (4, Risk.LARGE)):
        text = f"window:sinks=4,keep={longest // share}"
        if longest // share < SHORTEST_KEPT:
            return
        retention = read_retention(text, now.server.layout.page_tokens)
        yield replace(_with(now, text, {"kv_retention": text}, retention=retention), risk=risk)


def _prefix_cache(now: Situation) -> Iterator[Change]:
    if not now.server.prefix_cache:
        yield _with(now, "on", {"enable_prefix_caching": True}, prefix_cache=True)


def _cache_memory(now: Situation) -> Iterator[Change]:
    """More pages: four times the bytes that the user set, or a larger share of the GPU."""
    engine, page_bytes = now.engine, now.server.layout.page_bytes
    if engine.kv_cache_memory is not None:
        pages = 4 * now.server.pages
        if now.row is None or pages * page_bytes < 0.9 * now.row.memory_bytes - now.spec.weight_bytes:
            yield _with(now, "4 times as much", {"kv_cache_memory": 4 * engine.kv_cache_memory}, pages=pages)
    elif now.row is not None and engine.gpu_memory_utilization < 0.95:
        added = (0.95 - engine.gpu_memory_utilization) * now.row.memory_bytes
        pages = now.server.pages + int(added) // page_bytes
        yield _with(now, "95% of the GPU", {"gpu_memory_utilization": 0.95}, pages=pages)


def _offload(now: Situation) -> Iterator[Change]:
    """Host memory of four times the cache below it. On a CPU both are the same memory."""
    if now.row is not None and now.row.host_link and now.server.prefix_cache and not now.server.tier_pages:
        pages = 4 * now.server.pages
        size = round(pages * now.server.layout.page_bytes / (1 << 30), 2)
        link = now.row.host_link * LINK_SHARE
        yield _with(now, f"{size:g} GiB", {"kv_offload_gb": size}, tier_pages=pages, link=link)


# --- batching ------------------------------------------------------------------------------------------------------------


def _continuous(now: Situation) -> Iterator[Change]:
    if now.server.batching != "continuous":
        yield _with(now, "continuous", {"batching": "continuous"}, batching="continuous")


def _rows(now: Situation) -> Iterator[Change]:
    limits = now.server.limits
    for count in (limits.rows // 2, 2 * limits.rows, 4 * limits.rows):
        if 1 <= count <= limits.step_tokens:
            yield _with(now, str(count), {"max_num_seqs": count}, limits=replace(limits, rows=count))


def _chunks(now: Situation) -> Iterator[Change]:
    limits, tokens = now.server.limits, now.server.limits.step_tokens
    for count in (tokens // 8, tokens // 4, tokens // 2, 2 * tokens, 4 * tokens):
        if max(limits.rows, 64) <= count <= max(limits.max_len, tokens):
            changed = replace(limits, step_tokens=count)
            yield _with(now, f"{count} tokens", {"max_num_batched_tokens": count}, limits=changed)


READER_PACE = "120ms"
"""Pace of a quick reader: 500 tokens per minute."""


def _reader_pace(now: Situation) -> Iterator[Change]:
    """Prompts instead of tokens that nobody reads yet. The record does not say which answers were streamed: all, it is assumed."""
    pace = "" if now.engine.reader_pace else READER_PACE
    limits = replace(now.server.limits, pace_s=reader_pace(pace))
    yield _with(now, pace or "off", {"reader_pace": pace}, limits=limits)


# --- drafts --------------------------------------------------------------------------------------------------------------


def _drafts(now: Situation) -> Iterator[Change]:
    if now.engine.speculate not in ("", "off"):
        undrafted = slower(now.server.cost, max(0.1, 1 + now.saved))
        changed = _with(now, "off", {"speculate": "", "draft_tokens": None}, cost=undrafted)
        yield replace(changed, after=replace(changed.after, saved=0.0))
    else:
        for name in ("reference", "lookahead"):
            after = replace(now, engine=replace(now.engine, speculate=name))
            yield Change(name, after, unknown="how often drafts are accepted on this text is not recorded")


GRAPH_OVERHEAD_S = 0.0005
"""Fixed time of a step that runs as a graph, as in the uncalibrated cost model."""


# --- how steps are run ---------------------------------------------------------------------------------------------------


def _overlap(now: Situation) -> Iterator[Change]:
    if now.server.steps_in_flight == 0 and now.kind == "cuda":
        yield _with(now, "1 step ahead", {"steps_in_flight": None}, steps_in_flight=1)


def _graphs(now: Situation) -> Iterator[Change]:
    if now.engine.enforce_eager:
        cost, unknown = (
            now.server.cost,
            "" if now.kind == "cuda" else "the speed of compiled operations here is not recorded",
        )
        fast = replace(cost, overhead_s=min(cost.overhead_s, GRAPH_OVERHEAD_S))
        yield replace(_with(now, "on", {"enforce_eager": False}, cost=fast), unknown=unknown)


def _nondeterministic(now: Situation) -> Iterator[Change]:
    if now.engine.deterministic:
        changed = _with(now, "off", {"deterministic": False})
        yield replace(changed, unknown="the speed of the other kernels for this model is not recorded")


# --- more and other hardware ---------------------------------------------------------------------------------------------


def _replica(now: Situation) -> Iterator[Change]:
    yield _with(now, "2", {}, replicas=2 * now.server.replicas)


def _hardware(now: Situation) -> Iterator[Change]:
    """The devices with the fastest memory and with the fastest products that the engine serves."""
    current = now.row
    if current is None:
        return
    served = [row for row in ACCELERATORS if row.kind == current.kind and row.serves and row.flops and row.bandwidth]
    dtype = now.spec.matrix_dtype
    fastest = max(served, key=lambda row: row.bandwidth), max(served, key=lambda row: row.peak(dtype))
    for row in {row.name: row for row in fastest}.values():
        if row.bandwidth > current.bandwidth or row.peak(dtype) > current.peak(dtype):
            yield _on(now, current, row)


def _on(now: Situation, current: Accelerator, row: Accelerator) -> Change:
    """Rates scale with the published peaks, and the cache grows with the memory."""
    cost, dtype = now.server.cost, now.spec.matrix_dtype
    moved = replace(
        cost,
        bytes_per_s=cost.bytes_per_s * row.bandwidth / current.bandwidth,
        flops_per_s=cost.flops_per_s * row.peak(dtype) / current.peak(dtype),
    )
    added = now.engine.gpu_memory_utilization * (row.memory_bytes - current.memory_bytes)
    pages = max(1, now.server.pages + int(added) // now.server.layout.page_bytes)
    return Change(row.name, replace(now, row=row, server=replace(now.server, cost=moved, pages=pages)))


# --- clients -------------------------------------------------------------------------------------------------------------


def _faster_client(now: Situation) -> Iterator[Change]:
    if now.server.outside_s > 0.02:
        yield _with(now, "nearer, or a faster reader", {}, outside_s=0.0)


def _fewer_samples(now: Situation) -> Iterator[Change]:
    requests = tuple({(spec.at_s, spec.input, spec.blocks): spec for spec in now.workload.requests}.values())
    if len(requests) < len(now.workload.requests):
        yield Change("one per request", replace(now, workload=replace(now.workload, requests=requests)), Risk.MEDIUM)


def _shorter_prompts(now: Situation) -> Iterator[Change]:
    requests = tuple(replace(spec, input=max(1, spec.input // 2)) for spec in now.workload.requests)
    yield Change("half", replace(now, workload=replace(now.workload, requests=requests)), Risk.MEDIUM)


def _with(now: Situation, detail: str, options: Mapping[str, object], **server: object) -> Change:
    """A change of options of the engine, and of the simulated server."""
    engine = replace(now.engine, **options)  # type: ignore[arg-type]
    return Change(detail, replace(now, engine=engine, server=replace(now.server, **server)))  # type: ignore[arg-type]


TECHNIQUES: tuple[Technique, ...] = (
    Technique("weight format", _weights, "answers drift: measure it on your texts with `ridgeline compare`"),
    Technique("KV cache format", _kv_cache, "answers drift: measure it on your texts with `ridgeline compare`"),
    Technique("KV retention", _retention, "what is dropped cannot be recalled: measure it on your texts"),
    Technique("prefix cache", _prefix_cache, "none"),
    Technique("memory for the KV cache", _cache_memory, "less memory for other programs on the device"),
    Technique("host memory for cached prefixes", _offload, "as much host memory"),
    Technique("batching policy", _continuous, "none"),
    Technique("requests at once", _rows, "more: each stream is slower; fewer: requests wait"),
    Technique("prompt chunk", _chunks, "smaller: later first tokens; larger: less steady streams"),
    Technique(
        "pace of readers",
        _reader_pace,
        "answers end later, at the pace of a reader; helps if they are streamed to people",
    ),
    Technique("speculation", _drafts, "none where it pays, some percent of the time elsewhere"),
    Technique("plan while the device runs", _overlap, "one step is wasted when a request ends"),
    Technique("CUDA graphs or compiled operations", _graphs, "some seconds of start-up"),
    Technique("deterministic mode", _nondeterministic, "the tokens of a request depend on the batch"),
    Technique(
        "replicas",
        _replica,
        "twice the price",
        Effort.DEVICE,
        "ridgeline serve MODEL --port 8001, behind any load balancer",
    ),
    Technique(
        "device",
        _hardware,
        "compare prices with `ridgeline calc cost`",
        Effort.HARDWARE,
        "ridgeline roofline MODEL --on NAME",
    ),
    Technique(
        "client",
        _faster_client,
        "none",
        Effort.CLIENTS,
        "ridgeline bench run --url URL says when the client is the limit",
    ),
    Technique(
        "samples per request", _fewer_samples, "fewer answers to choose from", Effort.CLIENTS, "the field n of requests"
    ),
    Technique("prompt length", _shorter_prompts, "the model sees less context", Effort.CLIENTS, "shorter prompts"),
)

NOT_PREDICTED: tuple[str, ...] = (
    "a KV cache of 8 or 4 bits (--kv-cache-dtype)",
    "files of cached prefixes (--kv-disk)",
    "chosen pages of the KV cache (--kv-selection)",
    "several GPUs or processes (--tensor-parallel-size, --pipeline-parallel-size, --context-parallel-size, --expert-parallel)",
    "weights in host memory (--cpu-offload-gb)",
    "prefill apart from decode (--prefill-engines)",
    "the batch lane (/v1/batches)",
)
"""Techniques that the engine has and the diagnosis cannot judge yet."""
