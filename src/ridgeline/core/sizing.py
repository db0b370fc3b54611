"""Memory planning from the model spec, before any weight is read. If the model does not fit, the error has a command that works.

The engine allocates by this plan, and `ridgeline fit` prints it. Each command in a message was checked by the same function
that refused the user's options.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError, DoesNotFit
from ridgeline.core.spec import DTYPE_BYTES, KvLayout, LayerSpec, ModelSpec, kv_layout

GIB = 1 << 30
CUDA_CONTEXT = GIB
"""Bytes of a process on a GPU before its first tensor: context, kernel modules, library workspaces."""
GRAPHS = GIB // 2
"""Bytes of captured CUDA graphs: their private pools and nodes."""
LOGIT_COPIES = 6
"""float32 copies of the logits at the peak of sampling: logits, noise, and a sort's values and indices."""
CPU_SHARE, CPU_KV_SHARE, CPU_KV_MAX = 0.9, 0.25, 16 * GIB
"""Shares of a CPU's free memory: in total, and for the KV cache by default; maximum bytes of the cache by default."""
MIN_CONTEXT = 256
"""Smallest context, in tokens, that a remedy suggests."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and the limits that follow from them.

    n_pages: pages that can be leased; kv_bytes also includes the scratch page. workspace_bytes: activations, logits, device
    rows and, on a GPU, its context. max_rows: maximum requests that run at once.
    """

    device_kind: str
    usable_bytes: int
    weight_bytes: int
    workspace_bytes: int
    graph_bytes: int
    kv_bytes: int
    layout: KvLayout
    n_pages: int
    max_len: int
    max_rows: int
    max_step_tokens: int
    steps_in_flight: int

    @property
    def page_tokens(self) -> int:
        return self.layout.page_tokens

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.workspace_bytes + self.graph_bytes + self.kv_bytes

    @property
    def sequences(self) -> int:
        """Number of sequences of max_len tokens that the cache holds at once."""
        return self.n_pages // self.layout.pages_for(self.max_len, self.max_step_tokens)

    @property
    def max_request_tokens(self) -> int:
        """Maximum tokens of one request when no other request runs."""
        return _max_tokens(self.layout, self.n_pages, self.max_step_tokens, self.max_len)

    @property
    def chosen(self) -> dict[str, int]:
        """The options that this plan determines, by the names of their configuration fields."""
        return {
            "max_model_len": self.max_len,
            "max_num_seqs": self.max_rows,
            "max_num_batched_tokens": self.max_step_tokens,
            "block_size": self.page_tokens,
            "kv_cache_memory": self.kv_bytes,
            "steps_in_flight": self.steps_in_flight,
        }


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """Memory that drafters and others take.

    layers: layers of a draft model in the model's cache. bytes: memory that others hold, drafters included. logit_rows: rows of
    logits of a step with drafts.
    """

    layers: tuple[LayerSpec, ...] = ()
    bytes: int = 0
    logit_rows: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory. total: bytes (on a CPU, of free memory). taken: bytes of them that others hold."""

    kind: str
    total: int
    taken: int = 0

    def usable(self, engine: EngineConfig) -> int:
        share = CPU_SHARE if self.kind == "cpu" else engine.gpu_memory_utilization
        return min(int(self.total * share), self.total - self.taken)


STEP_TOKENS = 8448
"""Query tokens of a step on a large GPU. In tiles of 128 x 256, products of an 8B model with so many tokens fill all 132
processors 8, 8, 12 and 56 times. Products with 8,192 tokens take 8, 8, 12 and 55 rounds."""


def hardware_defaults(device_kind: str, memory_bytes: int) -> dict[str, int]:
    """Values of the options that depend on the hardware, if the user does not set them."""
    if device_kind == "cpu":
        return {"max_num_seqs": 64, "max_num_batched_tokens": 512, "block_size": 16, "steps_in_flight": 0}
    large, medium = memory_bytes >= 64 * GIB, memory_bytes >= 32 * GIB
    return {
        "max_num_seqs": 512 if large else 256 if medium else 128,
        "max_num_batched_tokens": STEP_TOKENS if large else 2048,
        "block_size": 64,
        "steps_in_flight": 1,
    }


def size(
    spec: ModelSpec,
    engine: EngineConfig,
    memory_bytes: int,
    device_kind: str,
    *,
    model: ModelConfig = ModelConfig(),
    drafters: DrafterMemory = DrafterMemory(),
) -> MemoryPlan:
    """Plan the memory for serving `spec` (its dtype and max_len as served) on a device "cuda" or "cpu".

    memory_bytes: total memory of the GPU, or free memory of the CPU. drafters: memory that is not available to the model.
    model: the user's options, for the command in the message. Raises DoesNotFit.
    """
    memory = Memory(device_kind, memory_bytes, drafters.bytes)
    plan, missing = _plan(spec, engine, memory, drafters)
    if missing <= 0:
        return plan
    raise DoesNotFit(
        _shortage(plan, missing, memory, engine.kv_cache_memory) + " " + _remedy(spec, engine, memory, model)
    )


def working_change(spec: ModelSpec, engine: EngineConfig, memory: Memory) -> dict[str, object] | None:
    """The first change of options, mildest first, with which the model fits; None if there is none."""
    for candidate, changed, change in _changes(spec, engine, memory):
        if _plan(candidate, changed, memory)[1] <= 0:
            return change
    return None


# --- one plan ----------------------------------------------------------------------------------------------------------


def _plan(
    spec: ModelSpec, engine: EngineConfig, memory: Memory, drafters: DrafterMemory = DrafterMemory()
) -> tuple[MemoryPlan, int]:
    """The plan, and the bytes that are missing for one sequence of max_len tokens (0 or less: it fits)."""
    chosen = hardware_defaults(memory.kind, memory.total)
    options = {name: getattr(engine, name) for name in chosen}
    chosen.update({name: value for name, value in options.items() if value is not None})
    rows, step_tokens = chosen["max_num_seqs"], chosen["max_num_batched_tokens"]
    if engine.max_num_seqs is None:
        rows = min(rows, step_tokens)
    elif engine.max_num_batched_tokens is None:
        step_tokens = max(step_tokens, rows)
    elif rows > step_tokens:
        raise ConfigError(
            f"--max-num-batched-tokens {step_tokens} is below --max-num-seqs {rows}: a step could not give every running "
            f"request a token. Lower --max-num-seqs to {step_tokens} or raise --max-num-batched-tokens.",
            param="max_num_batched_tokens",
        )
    layout = kv_layout(spec, chosen["block_size"], drafter_layers=drafters.layers)
    usable = memory.usable(engine)
    workspace = workspace_bytes(spec, max(rows, drafters.logit_rows), step_tokens, memory.kind)
    graphs = GRAPHS if memory.kind == "cuda" and not engine.enforce_eager else 0
    available = usable - spec.weight_bytes - workspace - graphs
    sequence_bytes = (layout.pages_for(spec.max_len, step_tokens) + 1) * layout.page_bytes
    kv = _kv_bytes(layout, sequence_bytes, rows, engine.kv_cache_memory, available, memory)
    plan = MemoryPlan(
        device_kind=memory.kind,
        usable_bytes=usable,
        weight_bytes=spec.weight_bytes,
        workspace_bytes=workspace,
        graph_bytes=graphs,
        kv_bytes=kv,
        layout=layout,
        n_pages=max(0, kv // layout.page_bytes - 1),
        max_len=spec.max_len,
        max_rows=rows,
        max_step_tokens=step_tokens,
        steps_in_flight=chosen["steps_in_flight"],
    )
    requested = engine.kv_cache_memory
    return plan, sequence_bytes - available if requested is None else max(sequence_bytes - kv, kv - available)


def _kv_bytes(
    layout: KvLayout, sequence_bytes: int, rows: int, requested: int | None, available: int, memory: Memory
) -> int:
    """Bytes of the cache, a multiple of the page size. sequence_bytes: of the longest sequence and the scratch page."""
    if requested is not None:
        available = requested
    elif memory.kind == "cpu":
        default = min(int(memory.total * CPU_KV_SHARE), CPU_KV_MAX, sequence_bytes * rows)
        available = min(available, max(default, sequence_bytes))
    return max(0, available // layout.page_bytes * layout.page_bytes)


def workspace_bytes(spec: ModelSpec, rows: int, step_tokens: int, device_kind: str) -> int:
    """Bytes besides weights and cache: peak activations of a layer, logits, device rows, packed copies of weights."""
    width = DTYPE_BYTES[spec.dtype]
    widest = 0
    for layer in spec.layers:
        attention = (2 * layer.n_heads + 2 * layer.n_kv_heads) * layer.head_dim
        widest = max(widest, attention, 3 * layer.d_ff)
    activations = step_tokens * (4 * spec.d_model + widest) * width
    logits = LOGIT_COPIES * rows * spec.vocab_size * 4
    tokens = (rows + 1) * spec.max_len * 4
    ropes = len({layer.rope for layer in spec.layers}) * spec.max_len * max(layer.rope.dim for layer in spec.layers) * 4
    if device_kind == "cuda":
        fixed = CUDA_CONTEXT
    else:  # a tied head has a packed copy for its products; the embedding's rows stay too
        fixed = spec.embedding_params * width if spec.tied else 0
        if spec.quantization:  # the reference converts each linear to float32 while it runs
            fixed += 4 * max(_widest_linear(spec, layer) for layer in spec.layers)
    return activations + logits + tokens + ropes + fixed


def _widest_linear(spec: ModelSpec, layer: LayerSpec) -> int:
    """Elements of the largest matrix of a layer."""
    qkv = (layer.n_heads + 2 * layer.n_kv_heads) * layer.head_dim
    return spec.d_model * max(qkv, 2 * layer.d_ff)


# --- remedies ----------------------------------------------------------------------------------------------------------


def _changes(
    spec: ModelSpec, engine: EngineConfig, memory: Memory
) -> Iterator[tuple[ModelSpec, EngineConfig, dict[str, object]]]:
    """Changes to try, mildest first, each with the spec and configuration that it gives."""
    raised_memory: dict[str, object] = {}
    if memory.kind == "cuda" and engine.gpu_memory_utilization < 0.9:
        raised_memory = {"gpu_memory_utilization": 0.9}
    default_kv: dict[str, object] = {"kv_cache_memory": None} if engine.kv_cache_memory is not None else {}
    small_batch: dict[str, object] = {"max_num_seqs": 16, "max_num_batched_tokens": 512}
    maximum_memory: dict[str, object] = {"gpu_memory_utilization": 0.95} if memory.kind == "cuda" else {}
    changes = [
        raised_memory,
        {},
        default_kv,
        {**raised_memory, **default_kv},
        {**raised_memory, **default_kv, **small_batch},
        {**default_kv, **small_batch, **maximum_memory},
    ]
    for dtype in dict.fromkeys((spec.dtype, "bfloat16" if spec.dtype == "float32" else spec.dtype)):
        dtype_change: dict[str, object] = {} if dtype == spec.dtype else {"dtype": dtype}
        for change in changes:
            changed = replace(engine, **change)  # type: ignore[arg-type]
            candidate = replace(spec, dtype=dtype)
            yield candidate, changed, {**dtype_change, **change}
            context = _largest_context(candidate, changed, memory)
            if context is not None:
                yield replace(candidate, max_len=context), changed, {**dtype_change, **change, "max_model_len": context}


def _largest_context(spec: ModelSpec, engine: EngineConfig, memory: Memory) -> int | None:
    """The largest max_len below the spec's that fits, in steps of 64 tokens; None if not even MIN_CONTEXT fits."""
    low, high = MIN_CONTEXT // 64, (spec.max_len - 1) // 64
    if high < low or _plan(replace(spec, max_len=low * 64), engine, memory)[1] > 0:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if _plan(replace(spec, max_len=middle * 64), engine, memory)[1] > 0:
            high = middle - 1
        else:
            low = middle
    return low * 64


def _max_tokens(layout: KvLayout, pages: int, chunk: int, limit: int) -> int:
    """Maximum tokens, up to `limit`, of a sequence in `pages` pages."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if layout.pages_for(middle, chunk) > pages:
            high = middle - 1
        else:
            low = middle
    return low


def _shortage(plan: MemoryPlan, missing: int, memory: Memory, requested: int | None) -> str:
    """What is missing, in words. requested: bytes of --kv-cache-memory, or None."""
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
        f"memory and {cache_text}, but only {_gib(plan.usable_bytes)} of {_gib(memory.total)} {memory_name} may be used: "
        f"{_gib(missing)} are missing."
    )


def _remedy(spec: ModelSpec, engine: EngineConfig, memory: Memory, model: ModelConfig) -> str:
    change = working_change(spec, engine, memory)
    if change is None:
        smallest = replace(engine, max_num_seqs=16, max_num_batched_tokens=512, kv_cache_memory=None)
        minimum, _ = _plan(replace(spec, max_len=min(spec.max_len, MIN_CONTEXT)), smallest, memory)
        fixed = minimum.weight_bytes + minimum.workspace_bytes + minimum.graph_bytes
        return f"No option makes it fit: use a smaller model, or a device with more than {_gib(int(fixed / 0.9))}."
    return f"This command works: {command(engine, memory, model, change)}"


def command(engine: EngineConfig, memory: Memory, model: ModelConfig, change: dict[str, object]) -> str:
    """`ridgeline serve` with the user's options and `change`. Options that equal the hardware's defaults are left out."""
    defaults = hardware_defaults(memory.kind, memory.total)
    values: dict[str, object] = {}
    for config in (model, engine):
        for field in fields(config):
            value = getattr(config, field.name)
            if value not in (field.default, defaults.get(field.name)):
                values[field.name] = value
    name = values.pop("model", None)
    values.update(change)
    words = ["ridgeline serve"] if name is None else ["ridgeline serve", shlex.quote(str(name))]
    for option, value in values.items():
        flag = option.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag} {shlex.quote(str(value))}")
    return " ".join(words)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
