"""Memory planning from the model spec, before any weight is read.

The engine allocates by this plan, and `ridgeline fit` prints it. `core.fit` refuses a model that does not fit, and searches
for options with which it does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.gpu_blocks import expanded_bytes, kept_bytes
from ridgeline.core.host_weights import check_gpu, host_weights
from ridgeline.core.spec import DTYPE_BYTES, KvLayout, LayerSpec, ModelSpec, kv_layout
from ridgeline.core.stages import rank_layout, stage_layout, stage_spec, stages

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
GATHERED_SLOTS = 1 << 18
"""Most slots whose keys and values of a layer a context-parallel rank holds at a time besides its cache (ops/gathered)."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and the limits that follow from them.

    n_pages: pages that can be leased; kv_bytes also includes the scratch page. weight_bytes: on the device. host_bytes: of weights
    in host memory, whose buffers count as weight_bytes. expanded_bytes: of weight_bytes, quantized linears that are in the model's
    dtype too (core.gpu_blocks). workspace_bytes: activations, logits, device rows and, on a GPU, its context. max_rows: maximum
    requests that run at once.
    """

    device_kind: str
    usable_bytes: int
    weight_bytes: int
    workspace_bytes: int
    graph_bytes: int
    kv_bytes: int
    host_bytes: int
    layout: KvLayout
    n_pages: int
    max_len: int
    max_rows: int
    max_step_tokens: int
    steps_in_flight: int
    expanded_bytes: int = 0

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

    def concurrency(self, tokens: int) -> int:
        """Number of requests of `tokens` tokens that run at once."""
        return min(self.max_rows, self.n_pages // self.layout.pages_for(tokens, self.max_step_tokens))

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
    """Memory that drafters take.

    layers: layers of a draft model in the model's cache. bytes: of weights and tables of drafters. logit_rows: rows of logits of a
    step with drafts.
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

    def usable(self, engine: EngineConfig, reserved: int = 0) -> int:
        """Bytes that the model may use. reserved: bytes that drafters will take."""
        share = CPU_SHARE if self.kind == "cpu" else engine.gpu_memory_utilization
        return min(int(self.total * share), self.total - self.taken - reserved)


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


class Planner:
    """Plans the memory of a model with given options on a device, for any context length.

    expandable_bytes: what its quantized linears take in the model's dtype, if the options allow both forms (core.gpu_blocks).
    """

    def __init__(
        self, spec: ModelSpec, engine: EngineConfig, memory: Memory, drafters: DrafterMemory = DrafterMemory()
    ) -> None:
        """spec: with the dtype, number formats and max_len as served. With several stages each has the memory that the largest one
        needs, so that all have as many blocks. Raises ConfigError for options that contradict each other."""
        self._spec, self._engine, self._memory, self._drafters = spec, engine, memory, drafters
        self._options = _options(engine, memory)
        layout = kv_layout(spec, self._options["block_size"], drafter_layers=drafters.layers)
        layout = rank_layout(layout, engine.context_parallel_size)
        parts = stages(spec, engine.pipeline_parallel_size)
        if len(parts) > 1:
            layout = max((stage_layout(layout, part, spec) for part in parts), key=lambda cut: cut.page_bytes)
        self._layout = layout
        self._weight_bytes = max(stage_spec(spec, part).weight_bytes for part in parts)
        check_gpu(spec, memory.kind)
        moved = host_weights(spec)
        self._host_bytes = moved.bytes
        self._weight_bytes -= moved.saved_bytes
        # Deterministic products dequantize each time. Where weights lie in host memory, there is no room for a second form.
        both = memory.kind == "cuda" and not engine.deterministic and not spec.host_bytes
        self.expandable_bytes = max(expanded_bytes(stage_spec(spec, part)) for part in parts) if both else 0

    def plan(self, max_len: int | None = None) -> tuple[MemoryPlan, int]:
        """The plan, and the bytes that are missing for one sequence of max_len tokens (0 or less: it fits).

        max_len: None for the spec's.
        """
        spec = self._spec if max_len is None else replace(self._spec, max_len=max_len)
        engine, memory, layout = self._engine, self._memory, self._layout
        rows, step_tokens = self._options["max_num_seqs"], self._options["max_num_batched_tokens"]
        usable = memory.usable(engine, self._drafters.bytes)
        logit_rows = max(rows, self._drafters.logit_rows)
        workspace = workspace_bytes(spec, logit_rows, step_tokens, memory.kind, engine.context_parallel_size)
        graphs = GRAPHS if memory.kind == "cuda" and not engine.enforce_eager else 0
        available = usable - self._weight_bytes - workspace - graphs
        sequence_bytes = (layout.pages_for(spec.max_len, step_tokens) + 1) * layout.page_bytes
        expanded = kept_bytes(self.expandable_bytes, available, sequence_bytes, engine.kv_cache_memory)
        available -= expanded
        kv = _kv_bytes(layout, sequence_bytes, rows, engine.kv_cache_memory, available, memory)
        plan = MemoryPlan(
            device_kind=memory.kind,
            usable_bytes=usable,
            weight_bytes=self._weight_bytes + expanded,
            expanded_bytes=expanded,
            workspace_bytes=workspace,
            graph_bytes=graphs,
            kv_bytes=kv,
            host_bytes=self._host_bytes,
            layout=layout,
            n_pages=max(0, kv // layout.page_bytes - 1),
            max_len=spec.max_len,
            max_rows=rows,
            max_step_tokens=step_tokens,
            steps_in_flight=self._options["steps_in_flight"],
        )
        requested = engine.kv_cache_memory
        return plan, sequence_bytes - available if requested is None else max(sequence_bytes - kv, kv - available)

    def fits(self, max_len: int | None = None) -> bool:
        return self.plan(max_len)[1] <= 0

    def largest_context(self) -> int | None:
        """The largest max_len below the spec's that fits, in steps of 64 tokens; None if not even MIN_CONTEXT fits."""
        low, high = MIN_CONTEXT // 64, (self._spec.max_len - 1) // 64
        if high < low or not self.fits(low * 64):
            return None
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(middle * 64):
                low = middle
            else:
                high = middle - 1
        return low * 64


def _options(engine: EngineConfig, memory: Memory) -> dict[str, int]:
    """Values of the options that depend on the hardware: the user's, otherwise the defaults."""
    chosen = hardware_defaults(memory.kind, memory.total)
    chosen["steps_in_flight"] += engine.pipeline_parallel_size - 1
    for name in ("block_size", "max_num_batched_tokens"):  # each rank holds and multiplies a part
        chosen[name] *= engine.context_parallel_size
    chosen.update({name: value for name in chosen if (value := getattr(engine, name)) is not None})
    rows, step_tokens = chosen["max_num_seqs"], chosen["max_num_batched_tokens"]
    if chosen["block_size"] % engine.context_parallel_size:
        raise ConfigError(
            f"--block-size {chosen['block_size']} cannot be divided by --context-parallel-size {engine.context_parallel_size}: "
            "each process holds an equal part of every block. Leave --block-size out, or give a multiple.",
            param="block_size",
        )
    if engine.max_num_seqs is None:
        chosen["max_num_seqs"] = min(rows, step_tokens)
    elif engine.max_num_batched_tokens is None:
        chosen["max_num_batched_tokens"] = max(step_tokens, rows)
    elif rows > step_tokens:
        raise ConfigError(
            f"--max-num-batched-tokens {step_tokens} is below --max-num-seqs {rows}: a step could not give every running "
            f"request a token. Lower --max-num-seqs to {step_tokens} or raise --max-num-batched-tokens.",
            param="max_num_batched_tokens",
        )
    return chosen


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


def workspace_bytes(spec: ModelSpec, rows: int, step_tokens: int, device_kind: str, ranks: int = 1) -> int:
    """Bytes besides weights and cache: peak activations of a layer, logits, device rows, packed copies of weights. ranks: of
    context parallelism, each of which multiplies a part of the tokens and attends for all of them (ops/striped), or gathers
    the keys of prompts (ops/gathered)."""
    width = DTYPE_BYTES[spec.dtype]
    widest = gathered = keys = 0
    for layer in spec.layers:
        attention = (2 * layer.n_heads + 2 * layer.n_kv_heads) * layer.head_dim
        widest = max(widest, attention, 3 * layer.d_ff)
        results = 3 * layer.n_heads * (layer.head_dim + 1) * 4  # computed, sent and received
        gathered = max(gathered, attention * width + results)
        keys = max(keys, 2 * layer.n_kv_heads * layer.head_dim * width)
    activations = -(-step_tokens // ranks) * (4 * spec.d_model + widest) * width
    if ranks > 1:
        slots = min(GATHERED_SLOTS, rows * spec.max_len)
        activations += max(step_tokens * gathered, slots * keys * (ranks + 1) // ranks)  # those of all, and those sent
    logits = LOGIT_COPIES * rows * spec.vocab_size * 4
    tokens = (rows + 1) * spec.max_len * 4
    ropes = len({layer.rope for layer in spec.layers}) * spec.max_len * max(layer.rope.dim for layer in spec.layers) * 4
    if device_kind == "cuda":
        fixed = CUDA_CONTEXT
    else:  # a tied head has a packed copy for its products; the embedding's rows stay too
        fixed = spec.embedding_params * width if spec.shares_embedding else 0
        if spec.quantization:  # the reference converts each linear to float32 while it runs
            fixed += 4 * max(_widest_linear(spec, layer) for layer in spec.layers)
    return activations + logits + tokens + ropes + fixed


def _widest_linear(spec: ModelSpec, layer: LayerSpec) -> int:
    """Elements of the largest matrix of a layer."""
    qkv = (layer.n_heads + 2 * layer.n_kv_heads) * layer.head_dim
    return spec.d_model * max(qkv, 2 * layer.d_ff)


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
