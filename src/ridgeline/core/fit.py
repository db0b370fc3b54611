"""The memory plan of a model, or a refusal with the best command that works.

The search tries every number format of weights and cache that the device serves, memory and batch options, and context lengths.
Each candidate is planned by the same function that refused the user's options. A format in which nothing of this helps is tried
with weights in host memory. Other numbers of ranks are not among the candidates.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from itertools import product

from ridgeline.core.adapters import plan_adapters
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import CostModel, WorkMeter
from ridgeline.core.errors import DoesNotFit
from ridgeline.core.host_weights import least_host_bytes
from ridgeline.core.plural import counted
from ridgeline.core.quantization import quantized
from ridgeline.core.sizing import GIB, MIN_CONTEXT, DrafterMemory, Memory, MemoryPlan, Planner, hardware_defaults
from ridgeline.core.spec import KV_FORMATS, NUMBER_FORMATS, ModelSpec

REQUEST_TOKENS = 2048
"""Tokens of a request in predicted speeds, or the context if it is shorter."""
USEFUL_CONTEXT = 8192
"""Context, or the whole one if it is shorter, with which a larger device must hold the model so that a message names it."""


class Risk(IntEnum):
    """Risk to the quality of answers, compared with the model as the user configured it."""

    NONE = 0
    MINIMAL = 1
    SMALL = 2
    MEDIUM = 3
    LARGE = 4


WORTH = {Risk.NONE: 1.0, Risk.MINIMAL: 1.25, Risk.SMALL: 2.0, Risk.MEDIUM: 6.0, Risk.LARGE: 32.0}
"""How many times better than a candidate without risk a candidate must be to rank equal (see Candidate.value). A preference, not a
measurement: measured damage by format is in docs/compression.md."""


def format_risk(name: str) -> Risk:
    """Risk of quantizing weights to a format of NUMBER_FORMATS.

    8 bits: small (LLM.int8(), Dettmers et al. 2022); w8a8 without smoothing rounds outlier inputs: medium (SmoothQuant, Xiao et al.
    2022). 4 bits in groups: medium, 3 bits: large (GPTQ, Frantar et al. 2022; AWQ, Lin et al. 2023). One scale per channel below 8
    bits: large.
    """
    stored = NUMBER_FORMATS[name]
    if stored.bits >= 8:
        return Risk.MEDIUM if name == "w8a8" else Risk.SMALL
    return Risk.MEDIUM if stored.bits >= 4 and stored.group else Risk.LARGE


def cache_risk(name: str) -> Risk:
    """Risk of storing keys and values in a format of KV_FORMATS, by its bits as for weights."""
    bits = KV_FORMATS[name].bits
    return Risk.MINIMAL if bits >= 16 else Risk.SMALL if bits >= 8 else Risk.MEDIUM if bits >= 4 else Risk.LARGE


@dataclass(frozen=True, slots=True)
class Space:
    """What a device offers to a model.

    weight_formats: names of NUMBER_FORMATS that it serves, preferred ones first; empty for a checkpoint that is already quantized.
    kv_formats: names of KV_FORMATS that it serves beside the model's dtype. cost: cost model of a model as served; None for an
    unknown device, then candidates are compared by the bytes that their steps read. devices: memory bytes by name of devices that
    the message may name if nothing fits.
    """

    weight_formats: tuple[str, ...] = ()
    kv_formats: tuple[str, ...] = ()
    cost: Callable[[ModelSpec], CostModel] | None = None
    devices: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """Changes of options with which the model fits.

    change: configuration fields and their new values. asked_len: context that the user's options ask for. request_s: predicted
    seconds per token of one request. requests, tokens_s: requests of REQUEST_TOKENS that run at once (at least 1), and the output
    tokens per second of all of them.
    """

    change: Mapping[str, object]
    spec: ModelSpec
    plan: MemoryPlan
    risk: Risk
    asked_len: int
    request_s: float
    requests: int
    tokens_s: float

    @property
    def value(self) -> float:
        """Speed, times the share of the context that is kept, divided by what the risk must be worth.

        Speed is the geometric mean of the tokens per second of one request and of all requests that fit.
        """
        speed = math.sqrt(self.tokens_s / self.request_s)
        return speed * self.plan.max_len / self.asked_len / WORTH[self.risk]

    @property
    def grade(self) -> int:
        """Rank in steps of 2^(1/4) = 19 %. Candidates of one grade are equally good: then the milder one comes first."""
        return round(4 * math.log2(self.value))

    def __str__(self) -> str:
        """In words: "weights in int4 (medium risk to quality), a context of 93248 of 131072 tokens"."""
        formats = {
            name: str(self.change[name]) for name in ("dtype", "quantization", "kv_cache_dtype") if name in self.change
        }
        words = [f"{_FORMAT_NAMES[option]} in {name}" for option, name in formats.items()]
        if words:
            words[-1] += f" ({self.risk.name.lower()} risk to quality)"
        if self.plan.host_bytes and "cpu_offload_gb" in self.change:
            words.append(f"{_gib(self.plan.host_bytes)} of weights in host memory ({self.request_s:.2g} s per token)")
        if self.plan.max_len < self.asked_len:
            words.append(f"a context of {self.plan.max_len} of {self.asked_len} tokens")
        return ", ".join(words) or "other limits on memory or batch"


_FORMAT_NAMES = {"dtype": "computation", "quantization": "weights", "kv_cache_dtype": "KV cache"}


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model with the user's options on a device, or its part on each of several.

    spec: of the whole model, with the dtype, number formats and max_len as served. space: what may be changed if it does not fit.
    """

    spec: ModelSpec
    engine: EngineConfig
    memory: Memory
    model: ModelConfig = field(default_factory=ModelConfig)
    drafters: DrafterMemory = field(default_factory=DrafterMemory)
    space: Space = field(default_factory=Space)

    def planner(self, spec: ModelSpec, change: Mapping[str, object]) -> Planner:
        """Planner for one rank of another spec, with a change of memory or batch options."""
        engine = replace(self.engine, **change)  # type: ignore[arg-type]
        rank = spec.on_rank(engine.layer_ranks, engine.tensor_parallel_size)
        return Planner(rank, engine, self.memory, self.drafters)


def size(deployment: Deployment) -> MemoryPlan:
    """Plan the memory of a deployment. Raises DoesNotFit with the best command that works."""
    plan, missing = deployment.planner(deployment.spec, {}).plan()
    if missing <= 0:
        return plan
    candidates = alternatives(deployment)
    if candidates:
        remedy = f"It fits with {candidates[0]}. This command works: {command(deployment, candidates[0].change)}"
    else:
        remedy = _no_remedy(deployment)
    raise DoesNotFit(f"{_shortage(plan, missing, deployment)} {remedy}")


# --- search ------------------------------------------------------------------------------------------------------------


def alternatives(deployment: Deployment, host_weights: bool = True) -> tuple[Candidate, ...]:
    """Changes with which the model fits, best first: the best one for each dtype, number of bits of weights, and KV format.

    Candidates that keep a context that the user set (--max-model-len) come first. Of one grade, milder changes come first.
    host_weights: formats that do not fit otherwise may leave weights in host memory.
    """
    groups: dict[tuple[str, int, str], list[Candidate]] = {}
    for served, change, risk in _formats(deployment.spec, deployment.space):
        bits = NUMBER_FORMATS[served.quantization].bits if served.quantization else 0
        group = groups.setdefault((served.dtype, bits, served.kv_format), [])
        if served.weight_bytes - served.host_bytes < deployment.memory.total:
            group += _candidates(deployment, served, change, risk)
        if not group and host_weights:
            group += _split(deployment, served, change, risk)
    asked = deployment.model.max_model_len or 0
    best = [_mildest(group, asked) for group in groups.values() if group]
    return tuple(sorted(best, key=lambda candidate: (candidate.plan.max_len < asked, -candidate.grade)))


def _mildest(candidates: Sequence[Candidate], asked: int) -> Candidate:
    """The first candidate that is at most one grade below the best.

    Only candidates of the least risk count, and of these the ones that keep a context of `asked` tokens, if there are any.
    """
    risk = min(candidate.risk for candidate in candidates)
    safe = [candidate for candidate in candidates if candidate.risk == risk]
    safe = [candidate for candidate in safe if candidate.plan.max_len >= asked] or safe
    best = max(candidate.grade for candidate in safe)
    return next(candidate for candidate in safe if candidate.grade >= best - 1)


def _formats(spec: ModelSpec, space: Space) -> Iterator[tuple[ModelSpec, dict[str, object], Risk]]:
    """Number formats that make the model smaller, mildest first: the spec as served, the changes, their risk."""
    dtypes = [("", Risk.NONE)] + [("bfloat16", Risk.MINIMAL)] * (spec.dtype == "float32")
    weights = [("", Risk.NONE), *((name, format_risk(name)) for name in space.weight_formats)]
    smaller = (name for name in space.kv_formats if KV_FORMATS[name].bits < spec.kv.bits)
    caches = [("", Risk.NONE), *((name, cache_risk(name)) for name in smaller)]
    for choice in product(caches, dtypes, weights):
        cache, dtype, weight = (name for name, _ in choice)
        names = {"dtype": dtype, "quantization": weight, "kv_cache_dtype": cache}
        names = {option: name for option, name in names.items() if name}
        served, change = _served(spec, names), dict[str, object](names)
        if spec.host_bytes and names:  # another format is tried without weights in host memory first
            served, change["cpu_offload_gb"] = replace(served, host_bytes=0), None
        if not weight or served.layer_bytes < replace(served, quantization=spec.quantization).layer_bytes:
            yield served, change, max(risk for _, risk in choice)


def _served(spec: ModelSpec, change: Mapping[str, str]) -> ModelSpec:
    if weights := change.get("quantization"):
        spec = quantized(spec, weights)
    return replace(spec, dtype=change.get("dtype", spec.dtype), kv_format=change.get("kv_cache_dtype", spec.kv_format))


def _candidates(
    deployment: Deployment, spec: ModelSpec, formats: Mapping[str, object], risk: Risk
) -> Iterator[Candidate]:
    """Candidates with these formats, mildest change of other options first."""
    for options in _memory_changes(deployment.engine, deployment.memory):
        planner, change = deployment.planner(spec, options), {**formats, **options}
        if planner.fits():
            yield _candidate(deployment, spec, planner.plan()[0], change, risk)
        elif (context := planner.largest_context()) is not None:
            change["max_model_len"] = context
            yield _candidate(deployment, spec, planner.plan(context)[0], change, risk)


def _split(deployment: Deployment, spec: ModelSpec, formats: Mapping[str, object], risk: Risk) -> Iterator[Candidate]:
    """The candidate that leaves as few weights as possible in host memory, at most as many as the device has memory for."""
    memory, cost = deployment.memory, deployment.space.cost
    if memory.kind == "cpu" or cost is None or spec.has_experts:
        return
    spec = replace(spec, host_bytes=0)
    _, missing = deployment.planner(spec, {}).plan()
    host_bytes = least_host_bytes(spec, missing)
    served = replace(spec, host_bytes=host_bytes)
    if 0 < host_bytes <= memory.total and math.isfinite(cost(served).host.copies_s):
        planner, change = deployment.planner(served, {}), {**formats, "cpu_offload_gb": host_bytes / GIB}
        yield _candidate(deployment, served, planner.plan()[0], change, risk)


def _memory_changes(engine: EngineConfig, memory: Memory) -> Iterable[dict[str, object]]:
    """Changes of memory and batch options, mildest first."""
    raised: dict[str, object] = {}
    if memory.kind == "cuda" and engine.gpu_memory_utilization < 0.9:
        raised = {"gpu_memory_utilization": 0.9}
    default_kv: dict[str, object] = {"kv_cache_memory": None} if engine.kv_cache_memory is not None else {}
    small_batch: dict[str, object] = {"max_num_seqs": 16, "max_num_batched_tokens": 512}
    maximum: dict[str, object] = {"gpu_memory_utilization": 0.95} if memory.kind == "cuda" else {}
    changes = [
        raised,
        {},
        default_kv,
        {**raised, **default_kv},
        {**raised, **default_kv, **small_batch},
        {**default_kv, **maximum},
        {**default_kv, **small_batch, **maximum},
    ]
    return [change for index, change in enumerate(changes) if change not in changes[:index]]


def _candidate(
    deployment: Deployment, spec: ModelSpec, plan: MemoryPlan, change: Mapping[str, object], risk: Risk
) -> Candidate:
    spec = replace(spec, max_len=plan.max_len, both_forms=plan.expanded_bytes > 0)
    # For an unknown device, a step takes as long as the bytes that it reads.
    make = deployment.space.cost or (lambda served: CostModel(served, math.inf, 1.0, overhead_s=0.0))
    cost, meter, tokens = make(spec), WorkMeter(spec), min(REQUEST_TOKENS, plan.max_len)
    requests = max(1, plan.concurrency(tokens))
    request_s, step_s = (cost.step_s(meter.work([tokens] * rows, [1] * rows, rows)) for rows in (1, requests))
    return Candidate(change, spec, plan, risk, deployment.spec.max_len, request_s, requests, requests / step_s)


# --- messages ----------------------------------------------------------------------------------------------------------


def command(deployment: Deployment, change: Mapping[str, object]) -> str:
    """`ridgeline serve` with the user's options and `change`. Options that equal the hardware's defaults are left out."""
    defaults = hardware_defaults(deployment.memory.kind, deployment.memory.total)
    values: dict[str, object] = {}
    for config in (deployment.model, deployment.engine):
        for entry in fields(config):
            value = getattr(config, entry.name)
            if value not in (entry.default, defaults.get(entry.name)):
                values[entry.name] = value
    name = values.pop("model", None)
    values.update(change)
    words = ["ridgeline serve"] if name is None else ["ridgeline serve", shlex.quote(str(name))]
    return " ".join([*words, *flags(values)])


def flags(values: Mapping[str, object]) -> Iterator[str]:
    """Command-line flags that set configuration fields. A value of None needs no flag: it is the default."""
    for option, value in values.items():
        flag = option.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield f"--{flag} {shlex.quote(str(value))}"


def _shortage(plan: MemoryPlan, missing: int, deployment: Deployment) -> str:
    """What is missing, in words."""
    memory, requested = deployment.memory, deployment.engine.kv_cache_memory
    fixed = plan.weight_bytes + plan.workspace_bytes + plan.graph_bytes
    cache = (plan.layout.pages_for(plan.max_len, plan.max_step_tokens) + 1) * plan.layout.page_bytes
    memory_name = "free memory" if memory.kind == "cpu" else "GPU memory"
    if requested is not None and requested < cache:
        return f"--kv-cache-memory is {requested} bytes, but one sequence of {plan.max_len} tokens takes {cache} bytes."
    cache_text = f"{_gib(cache)} for the KV cache of one sequence of {plan.max_len} tokens"
    if requested is not None:
        cache_text = f"{_gib(requested)} for --kv-cache-memory"
    return (
        f"The model does not fit: it needs {_gib(plan.weight_bytes)} for weights, {_gib(fixed - plan.weight_bytes)} for working "
        f"memory and {cache_text}, but only {_gib(max(0, plan.usable_bytes))} of {_gib(memory.total)} {memory_name} may be used: "
        f"{_gib(missing)} are missing.{_adapters(deployment)}"
    )


def _adapters(deployment: Deployment) -> str:
    """What slots of LoRA adapters take, in words."""
    adapters = plan_adapters(deployment.model)
    if not adapters.slots:
        return ""
    taken = _gib(adapters.bytes(deployment.spec, deployment.engine.tensor_parallel_size))
    size = f"{counted(adapters.slots, 'slot')} of rank {adapters.rank}"
    return f" {size} for LoRA adapters take {taken} of it: lower --max-loras or --max-lora-rank."


def _no_remedy(deployment: Deployment) -> str:
    """The device that would be large enough, and how to use several."""
    spec, space = deployment.spec, deployment.space
    smallest = min((served for served, _, _ in _formats(spec, space)), key=lambda served: served.weight_bytes)
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "kv_cache_memory": None}
    plan, _ = deployment.planner(smallest, options).plan(min(spec.max_len, MIN_CONTEXT))
    fixed = plan.weight_bytes + plan.workspace_bytes + plan.graph_bytes
    larger = f"a device with more than {_gib(int(fixed / 0.9))}"
    for name, count in sorted((space.devices or {}).items(), key=lambda device: device[1]):
        larger_one = replace(deployment, memory=Memory("cuda", count))
        candidates = alternatives(larger_one, host_weights=False)
        if candidates and candidates[0].plan.max_len >= min(spec.max_len, USEFUL_CONTEXT):
            larger = f"{name} ({_gib(count)})"
            larger += f", which holds it with {candidates[0]}" if candidates[0].change else ""
            break
    more = "several hosts with --nnodes" if deployment.memory.kind == "cpu" else "more GPUs with --tensor-parallel-size"
    return f"No option makes it fit: use a smaller model, {larger}, or {more}; `ridgeline plan` compares layouts."


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
