"""What memory will hold, from the spec alone and before any weight is read; and, when it cannot, one command that works.

The engine allocates by this plan, `ridgeline fit` prints it. The advice is never guessed: every command in a message
has been sized by the same function that refused the first one.
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
"""Bytes a process holds on a GPU before its first tensor: context, modules of kernels, library workspaces."""
GRAPHS = GIB // 2
"""Bytes of captured CUDA graphs: their private pools and nodes."""
LOGIT_COPIES = 6
"""float32 copies of the logits at the worst moment of sampling: logits, noise, and a sort's values and indices."""
CPU_SHARE, CPU_KV_SHARE, CPU_KV_MOST = 0.9, 0.25, 16 * GIB
"""Of a CPU's free memory: the share we use at all, and for the cache unless told; and the most the cache takes untold."""
SHORTEST = 256
"""Tokens below which a context is no use to anybody; no advice goes lower."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and the sizes they allow.

    n_pages: pages that can be leased (kv_bytes holds the scratch page too). workspace_bytes: activations, logits, device
    rows and, on a GPU, its context. max_rows: requests running at once.
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
        """Sequences of max_len tokens that the cache holds at once."""
        return self.n_pages // self.layout.pages_for(self.max_len, self.max_step_tokens)

    @property
    def max_request_tokens(self) -> int:
        """Most tokens one request can hold when it is alone."""
        return _longest(self.layout, self.n_pages, self.max_step_tokens, self.max_len)

    @property
    def chosen(self) -> dict[str, int]:
        """The options this plan settles, by the names of their configuration fields."""
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
    """What is taken beside a model: layers of a draft model in its cache, bytes that others hold of the memory, drafters
    among them, and rows of logits that a step with drafts has."""

    layers: tuple[LayerSpec, ...] = ()
    bytes: int = 0
    logit_rows: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory: `total` bytes (on a CPU: what is free now), of which others hold `taken`."""

    kind: str
    total: int
    taken: int = 0

    def usable(self, engine: EngineConfig) -> int:
        share = CPU_SHARE if self.kind == "cpu" else engine.gpu_memory_utilization
        return min(int(self.total * share), self.total - self.taken)


STEP_TOKENS = 8448
"""Query tokens of a step on a large GPU. In tiles of 128 x 256, an 8B's products of so many fill 132 processors 8, 8, 12 and 56
times, to the last one; those of 8,192 tokens take 8, 8, 12 and 55 turns."""


def hardware_defaults(device_kind: str, memory_bytes: int) -> dict[str, int]:
    """Values of the options that are left to the hardware."""
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
    beside: DrafterMemory = DrafterMemory(),
) -> MemoryPlan:
    """The plan for serving `spec` (its dtype and max_len as served) on a device "cuda" or "cpu".

    memory_bytes: of the whole GPU, or what is free in a CPU's memory. beside: what is taken already.
    model: what the user asked for, for the command in the message. Raises DoesNotFit.
    """
    memory = Memory(device_kind, memory_bytes, beside.bytes)
    plan, missing = _plan(spec, engine, memory, beside)
    if missing <= 0:
        return plan
    raise DoesNotFit(
        _refusal(plan, missing, memory, engine.kv_cache_memory) + " " + _remedy(spec, engine, memory, model)
    )


def working_change(spec: ModelSpec, engine: EngineConfig, memory: Memory) -> dict[str, object] | None:
    """The first change of options, from the mildest on, with which the model fits; None when none does."""
    for other, changed, change in _changes(spec, engine, memory):
        if _plan(other, changed, memory)[1] <= 0:
            return change
    return None


# --- one plan ----------------------------------------------------------------------------------------------------------


def _plan(
    spec: ModelSpec, engine: EngineConfig, memory: Memory, beside: DrafterMemory = DrafterMemory()
) -> tuple[MemoryPlan, int]:
    """The plan, and the bytes it lacks for one sequence of max_len tokens (0 or less: it fits)."""
    chosen = hardware_defaults(memory.kind, memory.total)
    given = {name: getattr(engine, name) for name in chosen}
    chosen.update({name: value for name, value in given.items() if value is not None})
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
    layout = kv_layout(spec, chosen["block_size"], guests=beside.layers)
    usable = memory.usable(engine)
    workspace = workspace_bytes(spec, max(rows, beside.logit_rows), step_tokens, memory.kind)
    graphs = GRAPHS if memory.kind == "cuda" and not engine.enforce_eager else 0
    left = usable - spec.weight_bytes - workspace - graphs
    one = (layout.pages_for(spec.max_len, step_tokens) + 1) * layout.page_bytes
    kv = _kv_bytes(layout, one, rows, engine.kv_cache_memory, left, memory)
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
    asked = engine.kv_cache_memory
    return plan, one - left if asked is None else max(one - kv, kv - left)


def _kv_bytes(layout: KvLayout, one: int, rows: int, asked: int | None, left: int, memory: Memory) -> int:
    """Bytes for the cache, whole pages. `one`: bytes of the longest sequence and the scratch page."""
    if asked is not None:
        left = asked
    elif memory.kind == "cpu":
        untold = min(int(memory.total * CPU_KV_SHARE), CPU_KV_MOST, one * rows)
        left = min(left, max(untold, one))
    return max(0, left // layout.page_bytes * layout.page_bytes)


def workspace_bytes(spec: ModelSpec, rows: int, step_tokens: int, device_kind: str) -> int:
    """Bytes beside weights and cache: the widest moment of a layer, logits, the device's rows, packed copies."""
    width = DTYPE_BYTES[spec.dtype]
    widest = 0
    for layer in spec.layers:
        attention = (2 * layer.n_heads + 2 * layer.n_kv_heads) * layer.head_dim
        widest = max(widest, attention, 3 * layer.d_ff)
    activations = step_tokens * (4 * spec.d_model + widest) * width
    logits = LOGIT_COPIES * rows * spec.vocab_size * 4
    tokens = (rows + 1) * spec.max_len * 4
    ropes = len({layer.rope for layer in spec.layers}) * spec.max_len * max(one.rope.dim for one in spec.layers) * 4
    if device_kind == "cuda":
        fixed = CUDA_CONTEXT
    else:  # a tied head is packed for its products, and the embedding's rows stay beside it
        fixed = spec.embedding_params * width if spec.tied else 0
        if spec.quantization:  # the reference widens the linear at hand to float32, at each use
            fixed += 4 * max(_widest_linear(spec, layer) for layer in spec.layers)
    return activations + logits + tokens + ropes + fixed


def _widest_linear(spec: ModelSpec, layer: LayerSpec) -> int:
    """Elements of the largest matrix of a layer."""
    qkv = (layer.n_heads + 2 * layer.n_kv_heads) * layer.head_dim
    return spec.d_model * max(qkv, 2 * layer.d_ff)


# --- what helps --------------------------------------------------------------------------------------------------------


def _changes(
    spec: ModelSpec, engine: EngineConfig, memory: Memory
) -> Iterator[tuple[ModelSpec, EngineConfig, dict[str, object]]]:
    """Changes to try, the mildest first, each with the spec and configuration it makes."""
    roomy: dict[str, object] = {}
    if memory.kind == "cuda" and engine.gpu_memory_utilization < 0.9:
        roomy = {"gpu_memory_utilization": 0.9}
    untold: dict[str, object] = {"kv_cache_memory": None} if engine.kv_cache_memory is not None else {}
    small: dict[str, object] = {"max_num_seqs": 16, "max_num_batched_tokens": 512}
    tight: dict[str, object] = {"gpu_memory_utilization": 0.95} if memory.kind == "cuda" else {}
    steps = [roomy, {}, untold, {**roomy, **untold}, {**roomy, **untold, **small}, {**untold, **small, **tight}]
    for dtype in dict.fromkeys((spec.dtype, "bfloat16" if spec.dtype == "float32" else spec.dtype)):
        typed: dict[str, object] = {} if dtype == spec.dtype else {"dtype": dtype}
        for change in steps:
            changed = replace(engine, **change)  # type: ignore[arg-type]
            other = replace(spec, dtype=dtype)
            yield other, changed, {**typed, **change}
            shorter = _shorter(other, changed, memory)
            if shorter is not None:
                yield replace(other, max_len=shorter), changed, {**typed, **change, "max_model_len": shorter}


def _shorter(spec: ModelSpec, engine: EngineConfig, memory: Memory) -> int | None:
    """The largest max_len below the spec's with which it fits, in steps of 64 tokens; None when even SHORTEST does not."""
    low, high = SHORTEST // 64, (spec.max_len - 1) // 64
    if high < low or _plan(replace(spec, max_len=low * 64), engine, memory)[1] > 0:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if _plan(replace(spec, max_len=middle * 64), engine, memory)[1] > 0:
            high = middle - 1
        else:
            low = middle
    return low * 64


def _longest(layout: KvLayout, pages: int, chunk: int, limit: int) -> int:
    """Most tokens, up to `limit`, of a sequence that `pages` pages hold."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if layout.pages_for(middle, chunk) > pages:
            high = middle - 1
        else:
            low = middle
    return low


def _refusal(plan: MemoryPlan, missing: int, memory: Memory, asked: int | None) -> str:
    """asked: bytes of kv_cache_memory where it was given."""
    need = plan.weight_bytes + plan.workspace_bytes + plan.graph_bytes
    cache = (plan.layout.pages_for(plan.max_len, plan.max_step_tokens) + 1) * plan.layout.page_bytes
    where = "free memory" if memory.kind == "cpu" else "GPU memory"
    if asked is not None and asked < cache:
        return f"--kv-cache-memory is {asked} bytes, but one sequence of {plan.max_len} tokens takes {cache} bytes."
    held = f"{_gib(cache)} for the KV cache of one sequence of {plan.max_len} tokens"
    if asked is not None:
        held = f"{_gib(asked)} for --kv-cache-memory"
    return (
        f"The model does not fit: it needs {_gib(plan.weight_bytes)} for weights, {_gib(need - plan.weight_bytes)} for working "
        f"memory and {held}, but only {_gib(plan.usable_bytes)} of {_gib(memory.total)} {where} may be used: "
        f"{_gib(missing)} are missing."
    )


def _remedy(spec: ModelSpec, engine: EngineConfig, memory: Memory, model: ModelConfig) -> str:
    change = working_change(spec, engine, memory)
    if change is None:
        smallest = replace(engine, max_num_seqs=16, max_num_batched_tokens=512, kv_cache_memory=None)
        least, _ = _plan(replace(spec, max_len=min(spec.max_len, SHORTEST)), smallest, memory)
        need = least.weight_bytes + least.workspace_bytes + least.graph_bytes
        return f"No option helps: use a smaller model, or a device with more than {_gib(int(need / 0.9))}."
    return f"This works: {command(engine, memory, model, change)}"


def command(engine: EngineConfig, memory: Memory, model: ModelConfig, change: dict[str, object]) -> str:
    """`ridgeline serve` with the user's options and `change`; what the hardware would choose anyway is left out."""
    untold = hardware_defaults(memory.kind, memory.total)
    values: dict[str, object] = {}
    for config in (model, engine):
        for one in fields(config):
            value = getattr(config, one.name)
            if value not in (one.default, untold.get(one.name)):
                values[one.name] = value
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
