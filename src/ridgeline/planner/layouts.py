"""Parallel layouts of a model on several devices, what each rank holds, and the layouts that cannot be with the reason.

Ranks are numbered tensor (or experts) innermost, then context, pipeline and data: a tensor-parallel group lies in one host as
long as it fits.
One device is the identity: a layout of one rank has the figures of `core.sizing` and `core.cost`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeline.core.config import EngineConfig
from ridgeline.core.cost import WorkMeter
from ridgeline.core.errors import ConfigError
from ridgeline.core.sizing import GIB, Memory, MemoryPlan, Planner
from ridgeline.core.spec import DTYPE_BYTES, NUMBER_FORMATS, LayerSpec, ModelSpec
from ridgeline.planner.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ways each dimension is divided. tensor: within layers. pipeline: stages of layers. context: the tokens of a prompt
    and of its cache. data: replicas.

    experts: ranks that divide whole experts; 1: as the other matrices. Either the tensor-parallel ranks (--expert-parallel), or,
    with tensor 1, ranks that each have all of attention and requests of their own, and share all else (--data-parallel-size).
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    experts: int = 1

    @property
    def replica(self) -> int:
        """Devices of one replica."""
        return self.stage * self.pipeline

    @property
    def stage(self) -> int:
        """Devices of one stage."""
        return max(self.tensor, self.experts) * self.context

    @property
    def groups(self) -> int:
        """Parts of a replica's requests that have attention of their own, but share the experts."""
        return self.experts if self.experts > self.tensor else 1

    @property
    def devices(self) -> int:
        return self.replica * self.data

    def __str__(self) -> str:
        tensor = f"TP{self.tensor}+EP" if self.experts > 1 else f"TP{self.tensor}"
        first = f"EP{self.experts}" if self.groups > 1 else tensor if self.tensor > 1 else ""
        sizes = (("PP", self.pipeline), ("CP", self.context), ("DP", self.data))
        names = [first] * bool(first) + [f"{name}{size}" for name, size in sizes if size > 1]
        return " x ".join(names) or "1 device"


def layouts(devices: int, experts: bool = False) -> Iterator[Layout]:
    """All layouts that use every device. experts: also those that divide whole experts."""
    for tensor in _divisors(devices):
        for pipeline in _divisors(devices // tensor):
            for context in _divisors(devices // tensor // pipeline):
                layout = Layout(tensor, pipeline, context, devices // tensor // pipeline // context)
                yield layout
                if experts and tensor > 1:
                    yield replace(layout, experts=tensor)
                elif experts and context == 1:
                    for size in _divisors(layout.data)[1:]:
                        yield replace(layout, data=layout.data // size, experts=size)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """The layers of one pipeline stage on one of its tensor-parallel ranks.

    spec: without a vocabulary where the stage has no head, so that its work has none. embedding_bytes: of the embedding,
    less what `spec` counts for it. first, last: whether it embeds tokens, and draws them.
    """

    spec: ModelSpec
    embedding_bytes: int
    first: bool
    last: bool
    meter: WorkMeter


def rank_spec(spec: ModelSpec, ranks: int, attention_ranks: int | None = None) -> ModelSpec:
    """The model on one of `ranks` ranks, as ModelSpec.on_rank. Raises ConfigError where it cannot be divided."""
    part = spec.on_rank(ranks, attention_ranks)
    if ranks == 1 or spec.quantization not in NUMBER_FORMATS:
        return part
    for layer, held in zip(spec.layers, part.layers, strict=True):
        for matrix, share in zip(spec.matrices(layer), spec.matrices(held), strict=True):
            names = {name for _, name in matrix.parts} or {spec.quantization}
            for stored in (NUMBER_FORMATS[name] for name in names if name in NUMBER_FORMATS):
                unit = max(stored.group, stored.row if stored.in_blocks else 0)
                if share.inputs != matrix.inputs and unit and share.inputs % unit:
                    raise ConfigError(
                        f"{share.inputs} inputs on each of {ranks} devices are no multiple of the {unit} that share a scale in "
                        f"{spec.quantization}: use fewer devices or smaller groups."
                    )
    return part


def with_experts(spec: ModelSpec, layout: Layout) -> ModelSpec:
    """The model with experts that stay whole if the layout divides them so. Raises ConfigError if it has none, or too few."""
    layers, divided = list[LayerSpec](), layout.experts > 1
    for layer in spec.layers:
        if divided and layer.experts is not None and layer.experts.count < layout.experts:
            raise ConfigError(f"{layer.experts.count} experts cannot be divided among {layout.experts} devices.")
        layers.append(layer if layer.experts is None else replace(layer, experts=replace(layer.experts, whole=divided)))
    if divided and all(layer.experts is None for layer in layers):
        raise ConfigError("the model has no experts to divide.")
    return replace(spec, layers=tuple(layers))


def _rank(spec: ModelSpec, layout: Layout) -> ModelSpec:
    """The model on a rank of a stage, all layers of it."""
    return rank_spec(with_experts(spec, layout), layout.tensor * layout.groups, layout.tensor)


def stages(spec: ModelSpec, layout: Layout) -> tuple[Stage, ...]:
    """The stages of a layout. Raises ConfigError if the model cannot be divided so."""
    part = _rank(spec, layout)
    made, known, first = list[Stage](), dict[tuple[tuple[LayerSpec, ...], bool, bool], Stage](), 0
    for count in stage_sizes(part, layout.pipeline):
        end = first + count
        layers = part.layers[first:end]
        for index, layer in enumerate(layers, first):
            if layer.share_from is not None and not first <= layer.share_from < end:
                raise ConfigError(
                    f"layer {index} reads the keys of layer {layer.share_from}, which is in another of {layout.pipeline} stages."
                )
        key = layers, first == 0, end == len(part.layers)
        if key not in known:  # equal stages are one object, so that their times are computed once
            known[key] = _stage(part, *key)
        made.append(known[key])
        first = end
    return tuple(made)


def _stage(part: ModelSpec, layers: tuple[LayerSpec, ...], first: bool, last: bool) -> Stage:
    if first and last:
        return Stage(part, 0, True, True, WorkMeter(part))
    # tied: of embedding and head, a stage has at most one. Beside a head in a format of its own the spec counts an embedding.
    spec = replace(part, layers=layers, vocab_size=part.vocab_size if last else 0, tied=True)
    embedding = part.embedding_params * DTYPE_BYTES[part.dtype]
    counted = embedding if last and part.head_format else 0
    return Stage(spec, embedding * first - counted, first, last, WorkMeter(spec))


def stage_sizes(spec: ModelSpec, count: int) -> list[int]:
    """Layers of each of `count` stages, so that the largest stage reads as few bytes of weights as possible. The head counts for
    the last stage. Raises ConfigError if there are fewer layers than stages."""
    if count > len(spec.layers):
        raise ConfigError(
            f"{len(spec.layers)} layers cannot fill {count} stages: use at most {len(spec.layers)} stages."
        )
    kinds = {layer: sum(spec.matrix_bytes(matrix) for matrix in spec.matrices(layer)) for layer in set(spec.layers)}
    sizes = [kinds[layer] for layer in spec.layers]
    sizes[-1] += spec.head_bytes
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(sizes, middle, count)) <= count:
            high = middle
        else:
            low = middle + 1
    return _fill(sizes, low, count)


def _fill(sizes: list[int], limit: int, count: int) -> list[int]:
    """Elements of consecutive groups, each filled up to the limit. Groups end early where the rest is needed to fill `count`."""
    groups, filled, total = list[int](), 0, 0
    for index, size in enumerate(sizes):
        waiting = len(sizes) - index
        if filled and (total + size > limit or waiting <= count - len(groups) - 1):
            groups.append(filled)
            filled, total = 0, 0
        filled, total = filled + 1, total + size
    return [*groups, filled]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on the device of a replica that has the least room for requests, and what fits.

    tokens: of all requests of the replica together. requests: of the planned length that run at once in it. expanded_bytes: of
    weight_bytes, see MemoryPlan.
    """

    weight_bytes: int
    workspace_bytes: int
    cache_bytes: int
    tokens: int
    requests: int
    expanded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of a model on its devices: stages, rows of a step, and memory."""

    spec: ModelSpec
    layout: Layout
    cluster: Cluster
    stages: tuple[Stage, ...]
    rows: int
    chunk: int
    """Prompt tokens of a step. Each context-parallel rank runs its share of them; each group of a layout has as many of its own."""
    memory: RankMemory
    plan: MemoryPlan
    """Of the device that has the least room."""


def replica(spec: ModelSpec, layout: Layout, cluster: Cluster, length: int, engine: EngineConfig) -> Replica:
    """The replica of a layout for requests of `length` tokens. engine: rows and tokens of a step, share of the memory.

    Raises ConfigError, whose message is the reason, if the model cannot be divided, links are unknown or memory does not suffice.
    """
    if not cluster.fabric.reaches(layout.replica):
        raise ConfigError(f"the links between {layout.replica} devices are unknown.")
    # The engine's ranks on CPUs hold all of the vocabulary each.
    parts = stages(spec, layout)
    engine = replace(engine, context_parallel_size=layout.context)
    plans = {part: _plan(part, cluster, engine) for part in parts}
    memories = {part: _memory(part, plan, length, layout.groups) for part, plan in plans.items()}
    fullest = min(parts, key=lambda part: memories[part].requests)
    plan, memory = plans[fullest], memories[fullest]
    if not memory.requests:
        fixed, left = memory.weight_bytes + memory.workspace_bytes, max(0, memory.cache_bytes)
        raise ConfigError(
            f"memory: weights and workspace take {fixed / GIB:.1f} of {plan.usable_bytes / GIB:.1f} GiB of a device, which leaves "
            f"{left / GIB:.1f} GiB for the cache, too little for a request of {length:,} tokens."
        )
    if plan.expanded_bytes:
        spec = replace(spec, both_forms=True)
        parts = stages(spec, layout)
    return Replica(spec, layout, cluster, parts, plan.max_rows * layout.groups, plan.max_step_tokens, memory, plan)


def _plan(part: Stage, cluster: Cluster, engine: EngineConfig) -> MemoryPlan:
    kind = "cpu" if cluster.device.kind == "cpu" else "cuda"
    return Planner(part.spec, engine, Memory(kind, cluster.device.memory_bytes)).plan()[0]


def _memory(part: Stage, plan: MemoryPlan, length: int, groups: int) -> RankMemory:
    """length: tokens of a request. groups: see Layout."""
    layout, cache = plan.layout, plan.kv_bytes - part.embedding_bytes
    pages = max(0, cache // layout.page_bytes - 1)  # the engine keeps a page as scratch
    tokens = pages // len(layout.groups) * layout.page_tokens
    weights, workspace = plan.weight_bytes + part.embedding_bytes, plan.workspace_bytes + plan.graph_bytes
    requests = pages // layout.pages_for(length, plan.max_step_tokens)
    return RankMemory(weights, workspace, cache, groups * tokens, groups * requests, plan.expanded_bytes)


def with_context(spec: ModelSpec, length: int) -> ModelSpec:
    """The model with a context of at least `length` tokens: the same shape, for longer requests than it was made for."""
    return spec if length <= spec.max_len else replace(spec, max_len=length)
