"""What starts a layout of a plan: a command of `ridgeline serve`, or a fleet file of `ridgeline up`."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, fields, replace
from typing import Any

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.fit import Deployment, command
from ridgeline.core.sizing import Memory
from ridgeline.hardware.table import Accelerator
from ridgeline.planner.fleet import Fleet
from ridgeline.planner.layouts import with_experts
from ridgeline.planner.proposals import Proposal
from ridgeline.planner.ranking import Ranked

SIZES = ("tensor", "pipeline", "context")
FLEET_FILE = "fleet.json"


@dataclass(frozen=True, slots=True)
class Start:
    """command: starts the proposal, "" where Ridgeline cannot yet. fleet: the content of its fleet file, empty for one server. why:
    the reason if it cannot start."""

    command: str = ""
    fleet: dict[str, Any] | None = None
    why: str = ""

    @property
    def text(self) -> str:
        """One line for a shell, which writes the fleet file if there is one."""
        if self.fleet is None:
            return self.command
        return f"echo {shlex.quote(json.dumps(self.fleet))} > {FLEET_FILE}; {self.command}"


def layout_command(entry: Ranked, row: Accelerator, length: int, model: ModelConfig, engine: EngineConfig) -> str:
    """The command that starts one replica of a layout for requests of `length` tokens; "" where Ridgeline cannot yet.

    A replica of several hosts has a command for each, in which HOST0 stands for the address of the first and K for its number.
    """
    deployment = _deployment(entry, row, model, engine)
    change = _context(deployment, length) if deployment is not None else None
    if deployment is None or change is None:
        return ""
    words, hosts = command(deployment, change), _hosts(entry, row)
    return words if hosts == 1 else f"{words} --nnodes {hosts} --master-addr HOST0 --node-rank K"


def _hosts(entry: Ranked, row: Accelerator) -> int:
    """Hosts of a replica."""
    return 1 if row.kind == "cpu" else -(-entry.layout.replica // _of_host(row))


def _of_host(row: Accelerator) -> int:
    return row.links.devices if row.links else 8


def _deployment(entry: Ranked, row: Accelerator, model: ModelConfig, engine: EngineConfig) -> Deployment | None:
    """None where Ridgeline cannot start the layout yet."""
    layout, on_cpu = entry.layout, row.kind == "cpu"
    divided = layout.groups > 1
    if not row.serves or layout.replica % _hosts(entry, row) or (divided and layout.replica > layout.groups):
        return None
    kind, spec = "cpu" if on_cpu else "cuda", with_experts(entry.variant.spec, layout)
    sizes = {f"{name}_parallel_size": getattr(layout, name) for name in SIZES}
    sizes["data_parallel_size"] = layout.groups  # a replica is a server of its own
    cache = spec.kv_format or model.kv_cache_dtype
    quantization = spec.quantization or model.quantization
    served = replace(model, quantization=quantization, kv_cache_dtype=cache, expert_parallel=layout.experts > 1)
    return Deployment(spec, replace(engine, device=kind, **sizes), Memory(kind, row.memory_bytes), served)


def _context(deployment: Deployment, length: int) -> dict[str, object] | None:
    """A limit on the context where the cache cannot hold the model's, which the engine refuses. None: not even the requests fit."""
    planner = deployment.planner(deployment.spec, {})
    if planner.fits():
        return {}
    context = planner.largest_context()
    return {"max_model_len": context} if context and context >= length else None


def start(proposal: Proposal, model: ModelConfig) -> Start:
    """What starts a proposal."""
    unit, row = proposal.unit, proposal.unit.offer.cluster.device
    if unit.ratio.decode and row.kind != "cpu":
        return Start(why="prefill apart from decode starts on CPUs only")
    deployment = _deployment(unit.coarse, row, model, unit.engine)
    if deployment is None:
        unequal = f"{unit.coarse.layout.replica} devices are not equally many on hosts of {_of_host(row)}"
        return Start(why=unequal if row.serves else f"Ridgeline does not run on {row.name}")
    longest = max(request.input + request.output for request in proposal.task.workload.requests)
    change = _context(deployment, longest)
    if change is None:
        return Start(why="the longest request does not fit")
    if unit.ratio.decode:
        change |= {"prefill_engines": unit.ratio.prefill, "decode_engines": unit.ratio.decode}
    if proposal.copies == 1 and _hosts(unit.coarse, row) == 1:
        return Start(command(deployment, change))
    return Start(f"ridgeline up {FLEET_FILE}", _fleet(proposal, deployment, change))


def _fleet(proposal: Proposal, deployment: Deployment, change: dict[str, object]) -> dict[str, Any]:
    """The fleet file of several replicas, or of one on several hosts. More than one host needs Ray."""
    unit, cluster = proposal.unit, proposal.unit.offer.cluster
    serve: dict[str, Any] = {}
    for config in (deployment.model, deployment.engine):
        for entry in fields(config):
            if (value := getattr(config, entry.name)) != entry.default:
                serve[entry.name] = value
    capacity = Fleet(unit.server, proposal.copies, limit=unit.server.limits.rows).capacity
    router = {
        "replica_limit": capacity.limit,
        "prefill_rate": round(capacity.prefill_tokens_s),
        "cache_tokens": int(capacity.cache_tokens),
    }
    file: dict[str, Any] = {"replicas": proposal.copies, "serve": serve | change, "router": router}
    if cluster.device.kind == "cuda" and proposal.devices <= cluster.per_host:
        size = unit.coarse.layout.replica
        groups = (range(place * size, (place + 1) * size) for place in range(proposal.copies))
        file["gpus"] = [",".join(map(str, group)) for group in groups]
    elif proposal.devices > cluster.per_host:
        file |= {"launcher": "ray", "replica_gpus": unit.coarse.layout.replica if cluster.device.kind == "cuda" else 0}
    return file
