"""Builds an Engine from its configuration: device, spec, memory plan, weights, runner, scheduler, engine, in that order."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.calibration import cost_values
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.expert_parallel import experts_of
from ridgeline.core.slo import reader_pace
from ridgeline.core.spec import KvLayout, ModelSpec
from ridgeline.core.ticket import NO_POOLS, Pools
from ridgeline.engine.deadlines import Deadlines
from ridgeline.engine.divided_leases import open_leases
from ridgeline.engine.engine import Engine, Setup
from ridgeline.engine.expert_load import ExpertLoad
from ridgeline.engine.group import start_group
from ridgeline.engine.handover import open_hand_over, take_gpu
from ridgeline.engine.loop import Loop
from ridgeline.engine.policy import Limits, admission
from ridgeline.engine.rank import RankPlan, StartTimes, load_rank, plan_rank
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.sleep import open_sleeper
from ridgeline.engine.tiers import check_tiers, keep_pool, open_tiers
from ridgeline.hardware.ceilings import read_ceilings
from ridgeline.kv.retention import read_retention
from ridgeline.metrics.account import DeviceAccount
from ridgeline.models.build import LoadedModel
from ridgeline.models.eagle_files import head_hash
from ridgeline.models.fingerprint import content_hash
from ridgeline.models.weights import Progress
from ridgeline.speculation.build import HEADS, draft_model
from ridgeline.speculation.options import Wanted
from ridgeline.text.grammar import GrammarCompiler
from ridgeline.text.grammar_cache import GrammarCache
from ridgeline.text.tokenizer import TOKENIZER_FILE, Tokenizer

log = logging.getLogger(__name__)


def assemble(
    model: ModelConfig, config: EngineConfig, progress: Progress, imports_s: float = 0.0, pools: Pools = NO_POOLS
) -> Engine:
    """Build an engine that is ready to serve.

    Args:
        imports_s: seconds that this process spent on imports, reported with the other stages.
        pools: shared memory of the engines that this one hands over to.
    Raises:
        ConfigError, UnsupportedModel, DoesNotFit: before any weight is read.
    """
    times = StartTimes(imports_s, progress)
    take_gpu(pools, config)
    policy = admission(config.batching)
    rank = plan_rank(model, config, times, pools)
    folder, spec, wanted, plan = rank.folder, rank.spec, rank.wanted, rank.plan
    retention = read_retention(config.kv_retention, plan.page_tokens)
    check_tiers(config, plan.layout, plan.host_bytes)
    prints = partial(_fingerprint, model=model, spec=spec, layout=plan.layout, wanted=wanted)
    fingerprint = prints(folder)
    cost, power, ceilings = read_ceilings(
        replace(spec, both_forms=plan.expanded_bytes > 0), rank.device, config.calibration
    )
    times.ends("ceilings")
    with start_group(rank, times) as group:
        loaded = load_rank(rank, group.mesh, times)
        cost, runner = replace(cost, host=loaded.model.host_times), group.lead(loaded.runner)
        grammars = _grammars(folder, spec)
        times.ends("grammar")
        source, loaded.runner.transfers = open_tiers(
            config, plan.layout, loaded.runner.store, f"{fingerprint} {rank.ops.name}", cost
        )
        leases = open_leases(config, plan, source, retention)
        pace_s, n_stages = reader_pace(config.reader_pace), config.pipeline_parallel_size
        limits = Limits(plan.max_rows, plan.max_step_tokens, plan.max_len, pace_s, n_stages)
        scheduler = Scheduler(plan.layout, leases, limits, policy, loaded.speculation, Deadlines(cost))
        facts = _facts(rank, loaded.model) | {"fingerprint": fingerprint, "cost": cost_values(cost)}
        facts |= {"startup_s": times.seconds, "ceilings": ceilings, "adapters": loaded.adapters.listed()}
        setup = Setup(
            max_len=plan.max_len,
            vocab_size=spec.vocab_size,
            eos_ids=spec.eos_ids,
            fingerprint=fingerprint,
            seed=model.seed,
            facts=facts,
            grammars=grammars,
            account=DeviceAccount(cost, power, loaded.drafter.work),
            late=loaded.runner.late,
            expert_load=ExpertLoad(
                loaded.model.decoder.expert_loads(), list(experts_of(loaded.model.rank_spec.layers))
            ),
            check=group.check,
            hand_overs=open_hand_over(pools, leases, loaded.runner, fingerprint),
            adapters=loaded.adapters,
            sleeper=open_sleeper(rank, loaded, prints, facts),
            closing=partial(keep_pool, leases, loaded.runner.transfers),
        )
        log.debug("ready: %s", setup.facts)
        return Engine(Loop(scheduler, runner, steps_in_flight=plan.steps_in_flight), setup)


def _fingerprint(folder: Path, model: ModelConfig, spec: ModelSpec, layout: KvLayout, wanted: Wanted) -> str:
    """Hash of everything that determines the content of KV pages: model weights, how they are served, page layout."""
    dummy = model.load_format == "dummy"
    digest = sha256(repr((spec, layout, dummy and model.seed)).encode() + content_hash(folder, weights=not dummy))
    if wanted.device == "draft":
        digest.update(content_hash(draft_model(wanted, spec, model.load_format)[0], weights=not dummy))
    if wanted.device in HEADS and wanted.folder is not None:
        digest.update(head_hash(wanted.folder))
    return digest.hexdigest()


def _grammars(folder: Path, spec: ModelSpec) -> GrammarCache | None:
    """The grammar cache for the model's vocabulary; None for a folder without a tokenizer (benchmarks on a config.json)."""
    if not (folder / TOKENIZER_FILE).is_file():
        return None
    compiler = GrammarCompiler(Tokenizer.load(folder), vocab_size=spec.vocab_size, end_ids=spec.eos_ids)
    return GrammarCache(compiler)


def _facts(rank: RankPlan, loaded: LoadedModel) -> dict[str, Any]:
    """The facts that Ready and the "stats" reply report."""
    spec, plan, device, wanted = loaded.spec, rank.plan, rank.device, rank.wanted
    defaults = asdict(loaded.generation_defaults)
    return {
        "root": str(rank.folder),
        "architecture": spec.architecture,
        "params": spec.params,
        "dtype": spec.dtype,
        "quantization": spec.quantization,
        "matrix_dtype": spec.matrix_dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "vocab_size": spec.vocab_size,
        "d_model": spec.d_model,
        "eos_ids": list(spec.eos_ids),
        "max_len": plan.max_len,
        "max_num_seqs": plan.max_rows,
        "max_num_batched_tokens": plan.max_step_tokens,
        "max_request_tokens": plan.max_request_tokens,
        "kv_groups": len(plan.layout.groups),
        "page_tokens": plan.page_tokens,
        "page_bytes": plan.layout.page_bytes,
        "blocks": plan.n_pages,
        "kv_bytes_per_token": spec.kv_bytes_per_token(),
        "weight_bytes": sum(tensor.nbytes for tensor in loaded.decoder.tensors()),
        "expanded_bytes": plan.expanded_bytes,
        "steps_in_flight": plan.steps_in_flight,
        "chosen": plan.chosen,
        "generation_defaults": {name: value for name, value in defaults.items() if value is not None},
        "speculate": [*wanted.host, *filter(None, [wanted.device])],
        "model_options": asdict(rank.model),
        "options": asdict(rank.config),
        "ops": rank.ops.name,
    }
