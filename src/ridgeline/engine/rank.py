"""One rank's part of an engine: the memory plan, made before any weight is read, then its share of the weights and its runner.

An engine on one device has one rank. With several, each process does all of this for itself; the first also has the scheduler
(`assemble`), and the others follow it (`follower`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ridgeline.core.adapters import with_adapters
from ridgeline.core.compatibility import check_together
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.expert_parallel import check_divided_requests, check_expert_ranks, hot_experts
from ridgeline.core.fit import Deployment, size
from ridgeline.core.selection import check_budget
from ridgeline.core.sizing import Memory, MemoryPlan
from ridgeline.core.spec import KvLayout, ModelSpec, kv_layout
from ridgeline.core.stages import rank_layout, stage_layout, stages
from ridgeline.core.ticket import NO_POOLS, Pools
from ridgeline.core.version import VERSION
from ridgeline.engine.adapters import Adapters, open_adapters
from ridgeline.engine.graph_shapes import draft_limits
from ridgeline.engine.hosts import check_hosts, gpu_of
from ridgeline.engine.runner import Runner, build_runner
from ridgeline.engine.shape import Sizes
from ridgeline.engine.stage import runner_kind
from ridgeline.engine.weight_memory import WeightMemory
from ridgeline.hardware.probe import host_memory
from ridgeline.hardware.serving import space_here
from ridgeline.models.build import DTYPES, LoadedModel, load, served_spec
from ridgeline.models.config import read_model
from ridgeline.models.fingerprint import content_hash
from ridgeline.models.hub import resolve_model
from ridgeline.models.weights import Progress
from ridgeline.ops.blocks import kind_of
from ridgeline.ops.choose import choose, choose_invariant
from ridgeline.ops.table import Ops
from ridgeline.parallel.connect import transport
from ridgeline.parallel.mesh import Mesh
from ridgeline.speculation.build import choice_of, memory_of_drafters, open_drafters
from ridgeline.speculation.device import DeviceDrafter
from ridgeline.speculation.interface import Speculation
from ridgeline.speculation.options import Wanted
from ridgeline.text.tokenizer import Tokenizer


class StartTimes:
    """Measures the stages of the start-up in seconds. A stage begins where the stage before it ends. A stage that reports progress
    ends with its last report."""

    def __init__(self, imports_s: float, tell: Progress) -> None:
        self.seconds = {"imports": round(imports_s, 3)} if imports_s else {}
        self._tell, self._last = tell, time.perf_counter()

    def ends(self, name: str) -> None:
        """All time since the last end was spent on `name`."""
        now = time.perf_counter()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._last, 3)
        self._last = now

    def progress(self, stage: str, done: int, total: int) -> None:
        """Forward the progress of a stage and extend the stage to now."""
        self.ends(stage)
        self._tell(stage, done, total)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What a rank knows before it reads weights.

    spec: of the whole model as served. plan: of a rank's memory, the same for all; its layout is that of the largest stage. stages:
    the layers of each stage. pools: of the engines that this one hands over to.
    """

    model: ModelConfig
    config: EngineConfig
    device: torch.device
    folder: Path
    spec: ModelSpec
    wanted: Wanted
    plan: MemoryPlan
    ops: Ops
    stages: tuple[slice, ...]
    pools: Pools = NO_POOLS

    @property
    def identity(self) -> dict[str, str]:
        """What must be equal on all ranks, by name."""
        weights = self.model.load_format != "dummy"
        return {
            "ridgeline": VERSION,
            "torch": str(torch.__version__),
            "the transport": transport(self.device),
            "the model": content_hash(self.folder, weights=weights).hex()[:16],
            "blocks": str(self.plan.n_pages),
            "the experts on every rank": hot_experts(self.spec.layers),
        }


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank that is ready to run steps. weights: their memory, which can be released with --enable-sleep-mode."""

    model: LoadedModel
    runner: Runner
    speculation: Speculation
    drafter: DeviceDrafter
    weights: WeightMemory
    adapters: Adapters = field(default_factory=Adapters)


def plan_rank(
    model: ModelConfig, config: EngineConfig, times: StartTimes, pools: Pools = NO_POOLS, number: int = 0
) -> RankPlan:
    """Read the model's config and plan the memory of rank `number`. Raises ConfigError, UnsupportedModel, DoesNotFit."""
    check_hosts(config)
    check_expert_ranks(model, config)
    device = _device(config, number)
    _finish(device)
    times.ends("device")
    folder = resolve_model(model)
    checkpoint, _ = read_model(folder)
    spec = served_spec(checkpoint, model, kind_of(device))
    check_divided_requests(spec.layers, config)
    wanted, drafter_memory = memory_of_drafters(config, spec, folder, device.type)
    choice = choice_of(model, config, spec, wanted, device.type)
    check_together(replace(choice, hands_over=pools.hands_over))
    drafter_memory = with_adapters(drafter_memory, model, spec, config.tensor_parallel_size)
    parts = stages(spec.on_rank(config.layer_ranks, config.tensor_parallel_size), config.pipeline_parallel_size)
    space = space_here(device.type, checkpoint)
    memory = _memory(device, len(config.host_ranks) * pools.engines_here)
    plan = size(Deployment(spec, config, memory, model, drafter_memory, space))
    if model.kv_selection:
        check_budget(model.kv_selection, plan.page_tokens)
    ops = operations(config, spec, device)
    times.ends("config")
    return RankPlan(model, config, device, folder, spec, wanted, plan, ops, parts, pools)


def load_rank(rank: RankPlan, mesh: Mesh, times: StartTimes) -> LoadedRank:
    """Load the rank's share of the weights, and make its drafters and its runner."""
    plan, wanted, device = rank.plan, rank.wanted, rank.device
    loaded = load(rank.folder, model=rank.model, ops=rank.ops, device=device, mesh=mesh, progress=times.progress)
    loaded.decoder.group_experts()
    weights = WeightMemory(loaded.decoder, plan.expanded_bytes > 0, rank.config.enable_sleep_mode)
    loaded.decoder.finish_loading()
    adapters = open_adapters(loaded.decoder, rank.model, mesh.size)
    sizes = Sizes(
        plan.max_rows,
        plan.max_step_tokens,
        plan.max_len,
        plan.n_pages,
        graphs=device.type == "cuda" and not rank.config.enforce_eager,
        drafts=wanted.sizes if wanted.device else (),
        host_drafts=wanted.max_nodes if wanted.host else 0,
        pool=rank.pools.local_descriptor,
        releasable=rank.config.enable_sleep_mode,
    )
    speculation, drafter = open_drafters(
        wanted, loaded, _encoder(rank.folder), draft_limits(sizes, rank.spec), rank.model.load_format == "dummy"
    )
    _finish(device)
    times.ends("weights")
    runner = build_runner(loaded, _layout(rank, mesh), sizes, times.progress, drafter, runner_kind(mesh))
    times.ends("runner")
    return LoadedRank(loaded, runner, speculation, drafter, weights, adapters)


def _layout(rank: RankPlan, mesh: Mesh) -> KvLayout:
    """The layout of the cache of a rank, drafters included."""
    if mesh.stage.count == 1:
        return rank.plan.layout
    spec = rank.spec.on_rank(mesh.size, mesh.attention.size)
    layout = rank_layout(kv_layout(spec, rank.plan.page_tokens), mesh.context.size)
    return stage_layout(layout, mesh.stage.layers, spec)


def _device(config: EngineConfig, number: int) -> torch.device:
    """The device of a rank, which becomes torch's current device."""
    available = "cuda" if torch.cuda.is_available() else "cpu"
    kind = available if config.device == "auto" else config.device
    if kind == "cuda" and available == "cpu":
        raise ConfigError("--device is cuda, but torch finds no GPU: use --device cpu.", param="device")
    if kind == "cpu":
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(config.threads or max(1, cores // max(1, len(config.host_ranks))))
        return torch.device("cpu")
    if config.ranks == 1:
        return torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(gpu_of(number, config, torch.cuda.device_count()))
    return torch.device("cuda", torch.cuda.current_device())


def operations(config: EngineConfig, spec: ModelSpec, device: torch.device) -> Ops:
    """The operations for the spec's dtype. Raises ConfigError if `deterministic` needs operations that do not exist."""
    dtype = DTYPES[spec.dtype]
    if not config.deterministic:
        return choose(device, dtype, eager=config.enforce_eager)
    ops = choose_invariant(device, dtype)
    if spec.quantization and not ops.matmul.has_kernel(spec.quantization):
        others = [f"--quantization {name}" for name in ("fp8", "int8") if ops.matmul.has_kernel(name)]
        raise ConfigError(
            f"--deterministic does not support --quantization {spec.quantization} on {device.type}: use "
            f"{' or '.join([*others, 'no quantization'])}.",
            param="deterministic",
        )
    return ops


def _finish(device: torch.device) -> None:
    """Wait for enqueued work, so that its time counts for the stage that enqueued it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device, processes: int) -> Memory:
    """Memory of the device. Of a CPU only free memory counts, of which each of the host's ranks, of each engine, has an equal
    part."""
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (host_memory()[1] // processes,) * 2
    return Memory(device.type, total, total - free)


def _encoder(folder: Path) -> Callable[[str], list[int]]:
    """A function that encodes text without special tokens. It loads the tokenizer when it is called."""
    return lambda text: Tokenizer.load(folder).encode(text, add_special_tokens=False)
