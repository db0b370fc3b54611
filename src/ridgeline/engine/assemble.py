"""Builds an Engine from its configuration: device, spec, memory plan, weights, runner, scheduler, engine, in that order."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.calibration import cost_values
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.fit import Deployment, size
from ridgeline.core.sizing import Memory, MemoryPlan
from ridgeline.core.slo import reader_pace
from ridgeline.core.spec import KvLayout, ModelSpec
from ridgeline.engine.engine import Engine, Setup
from ridgeline.engine.graph_shapes import draft_limits
from ridgeline.engine.leases import Leases
from ridgeline.engine.loop import Loop
from ridgeline.engine.policy import Limits, admission
from ridgeline.engine.runner import build_runner
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.shape import Sizes
from ridgeline.hardware.ceilings import read_ceilings
from ridgeline.hardware.probe import host_memory
from ridgeline.hardware.serving import space_here
from ridgeline.metrics.account import DeviceAccount
from ridgeline.models.build import DTYPES, LoadedModel, build, served_spec
from ridgeline.models.config import read_model
from ridgeline.models.fingerprint import content_hash
from ridgeline.models.hub import resolve_model
from ridgeline.models.weights import Progress
from ridgeline.ops.choose import choose, choose_invariant
from ridgeline.ops.table import Ops
from ridgeline.speculation.build import draft_model, memory_of_drafters, open_drafters
from ridgeline.speculation.options import Wanted
from ridgeline.text.grammar import GrammarCompiler
from ridgeline.text.grammar_cache import GrammarCache
from ridgeline.text.tokenizer import TOKENIZER_FILE, Tokenizer

log = logging.getLogger(__name__)


class _Stages:
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


def assemble(model: ModelConfig, config: EngineConfig, progress: Progress, imports_s: float = 0.0) -> Engine:
    """Build an engine that is ready to serve.

    Args:
        imports_s: seconds that this process spent on imports, reported with the other stages.
    Raises:
        ConfigError, UnsupportedModel, DoesNotFit: before any weight is read.
    """
    stages = _Stages(imports_s, progress)
    policy = admission(config.batching)
    device = _device(config)
    _finish(device)
    stages.ends("device")
    folder = resolve_model(model)
    checkpoint, _ = read_model(folder)
    spec = served_spec(checkpoint, model)
    wanted, drafter_memory = memory_of_drafters(config, spec, folder, device.type)
    space = space_here(device.type, checkpoint.quantization)
    plan = size(Deployment(spec, config, _memory(device), model, drafter_memory, space))
    ops = _operations(config, spec, device)
    stages.ends("config")
    cost, power, ceilings = read_ceilings(spec, device, config.calibration)
    stages.ends("ceilings")
    loaded = build(folder, model=model, ops=ops, device=device, progress=stages.progress)
    sizes = Sizes(
        plan.max_rows,
        plan.max_step_tokens,
        plan.max_len,
        plan.n_pages,
        graphs=device.type == "cuda" and not config.enforce_eager,
        drafts=wanted.sizes if wanted.device else (),
        host_drafts=wanted.max_nodes if wanted.host else 0,
    )
    encode, dummy = _encoder(folder), model.load_format == "dummy"
    speculation, drafter = open_drafters(wanted, loaded, encode, draft_limits(sizes, spec), dummy)
    _finish(device)
    stages.ends("weights")
    runner = build_runner(loaded, plan.layout, sizes, stages.progress, drafter)
    stages.ends("runner")
    grammars = _grammars(folder, spec)
    stages.ends("grammar")
    leases = Leases(plan.layout, plan.n_pages, prefix_cache=config.enable_prefix_caching)
    limits = Limits(plan.max_rows, plan.max_step_tokens, plan.max_len, reader_pace(config.reader_pace))
    scheduler = Scheduler(plan.layout, leases, limits, policy, speculation)
    setup = Setup(
        max_len=plan.max_len,
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_ids,
        fingerprint=_fingerprint(folder, model, spec, plan.layout, wanted),
        seed=model.seed,
        facts=_facts(folder, loaded, plan, device)
        | {"speculate": [*wanted.host, *filter(None, [wanted.device])]}
        | {"model_options": asdict(model), "options": asdict(config), "cost": cost_values(cost)}
        | {"ops": ops.name, "startup_s": stages.seconds, "ceilings": ceilings},
        grammars=grammars,
        account=DeviceAccount(cost, power, drafter.work),
        late=runner.late,
    )
    log.debug("ready: %s", setup.facts)
    return Engine(Loop(scheduler, runner, steps_in_flight=plan.steps_in_flight), setup)


def _fingerprint(folder: Path, model: ModelConfig, spec: ModelSpec, layout: KvLayout, wanted: Wanted) -> str:
    """Hash of everything that determines the content of KV pages: model weights, how they are served, page layout."""
    dummy = model.load_format == "dummy"
    digest = sha256(repr((spec, layout, dummy and model.seed)).encode() + content_hash(folder, weights=not dummy))
    if wanted.device == "draft":
        digest.update(content_hash(draft_model(wanted, spec, model.load_format)[0], weights=not dummy))
    return digest.hexdigest()


def _device(config: EngineConfig) -> torch.device:
    available = "cuda" if torch.cuda.is_available() else "cpu"
    kind = available if config.device == "auto" else config.device
    if kind == "cuda" and available == "cpu":
        raise ConfigError("--device is cuda, but torch finds no GPU: use --device cpu.", param="device")
    if kind == "cpu":
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _operations(config: EngineConfig, spec: ModelSpec, device: torch.device) -> Ops:
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


def _memory(device: torch.device) -> Memory:
    """Memory of the device. Of a CPU only free memory counts."""
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (host_memory()[1],) * 2
    return Memory(device.type, total, total - free)


def _encoder(folder: Path) -> Callable[[str], list[int]]:
    """A function that encodes text without special tokens. It loads the tokenizer when it is called."""
    return lambda text: Tokenizer.load(folder).encode(text, add_special_tokens=False)


def _grammars(folder: Path, spec: ModelSpec) -> GrammarCache | None:
    """The grammar cache for the model's vocabulary; None for a folder without a tokenizer (benchmarks on a config.json)."""
    if not (folder / TOKENIZER_FILE).is_file():
        return None
    compiler = GrammarCompiler(Tokenizer.load(folder), vocab_size=spec.vocab_size, end_ids=spec.eos_ids)
    return GrammarCache(compiler)


def _facts(folder: Path, loaded: LoadedModel, plan: MemoryPlan, device: torch.device) -> dict[str, Any]:
    """The facts that Ready and the "stats" reply report."""
    spec = loaded.spec
    defaults = asdict(loaded.generation_defaults)
    return {
        "root": str(folder),
        "architecture": spec.architecture,
        "params": spec.params,
        "dtype": spec.dtype,
        "quantization": spec.quantization,
        "matrix_dtype": spec.matrix_dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "vocab_size": spec.vocab_size,
        "eos_ids": list(spec.eos_ids),
        "max_len": plan.max_len,
        "max_num_seqs": plan.max_rows,
        "max_num_batched_tokens": plan.max_step_tokens,
        "max_request_tokens": plan.max_request_tokens,
        "kv_groups": len(plan.layout.groups),
        "page_tokens": plan.page_tokens,
        "blocks": plan.n_pages,
        "kv_bytes_per_token": spec.kv_bytes_per_token(),
        "weight_bytes": sum(tensor.nbytes for tensor in loaded.decoder.tensors()),
        "steps_in_flight": plan.steps_in_flight,
        "chosen": plan.chosen,
        "generation_defaults": {name: value for name, value in defaults.items() if value is not None},
    }
