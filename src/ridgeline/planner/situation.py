"""A server with the load that it had: what a diagnosis reads, what a technique changes, and what a simulation needs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import Any

from ridgeline.core.calibration import read_cost
from ridgeline.core.compatibility import Choice, refusals
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import CostModel
from ridgeline.core.errors import ConfigError
from ridgeline.core.fit import Deployment, flags
from ridgeline.core.host_weights import LINK_SHARE
from ridgeline.core.sizing import Memory
from ridgeline.core.slo import reader_pace
from ridgeline.core.spec import ModelSpec, kv_layout
from ridgeline.core.workload import HASHED_TOKENS, RequestSpec, Workload
from ridgeline.engine.policy import Limits
from ridgeline.hardware.serving import in_format
from ridgeline.hardware.table import Accelerator, find
from ridgeline.kv.retention import read_retention
from ridgeline.planner.simulate import Figures, Outcome, Server

MAX_REQUESTS = 200
"""Recorded requests that a simulation replays: the newest ones."""
RECORD = (
    "arrived_at", "prompt_tokens", "cached_tokens", "output_tokens", "finish_reasons", "e2e_s", "ttft_s", "tpot_s", "prefix_hashes",
    "decoding", "spent",
)  # fmt: skip
"""Fields of a row of GET /requests that `read_situation` and `prices.token_costs` read. A run keeps them."""
DOUBTFUL = 2.0
"""Factor between recorded and modelled times beyond which `Situation.doubts` warns."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A server and its recorded workload.

    model, engine: its options. spec: the model as served. kind: "cuda" or "cpu". row: its row in the hardware table, None if it is
    unknown. concurrency: as in `simulate`. recorded: figures that its clients saw. saved: device time that drafts saved, as a share
    of the device time; below 0: they cost more than they saved. step_ratio: measured over modelled time of a decode step, before
    `measured_cost` scales the model.
    """

    model: ModelConfig
    engine: EngineConfig
    spec: ModelSpec
    server: Server
    workload: Workload
    recorded: Figures
    kind: str = "cuda"
    row: Accelerator | None = None
    concurrency: int | None = None
    saved: float = 0.0
    step_ratio: float = 1.0

    def doubts(self, times: Mapping[str, tuple[float, float]]) -> list[str]:
        """Why not to trust a simulation. times: name -> (recorded, simulated) seconds of the load as it was."""
        compared = {"decode steps": (self.step_ratio, 1.0), **times}
        far = [
            f"{name}: {recorded / simulated:.2g} times the modelled time"
            for name, (recorded, simulated) in compared.items()
            if recorded > 0 < simulated and not 1 / DOUBTFUL <= recorded / simulated <= DOUBTFUL
        ]
        if not far:
            return []
        remedy = (
            "Other processes may have used the machine: record again while it is idle, or serve with --calibration."
        )
        return [
            f"Recorded and modelled times differ by more than a factor of {DOUBTFUL:g} ({'; '.join(far)}). {remedy}"
        ]

    def served_as(self, spec: ModelSpec) -> Situation:
        """With another number format of weights or of the cache: step times, and on a GPU more or fewer pages in the same memory.
        It has both forms of linears if the engine would keep them on a GPU that it has for itself (core.gpu_blocks)."""
        before = self._expanded(self.spec) if self.spec.both_forms else 0
        same = spec.quantization == self.spec.quantization
        expanded = before if same else self._expanded(spec)
        spec = replace(spec, both_forms=self.spec.both_forms if same else expanded > 0)
        cost, layout = in_format(self.server.cost, spec, self.kind), kv_layout(spec, self.server.layout.page_tokens)
        memory = self.server.pages * self.server.layout.page_bytes
        if self.kind == "cuda" and self.engine.kv_cache_memory is None:
            memory += self.spec.weight_bytes + before - spec.weight_bytes - expanded
        server = replace(self.server, cost=cost, layout=layout, pages=max(1, memory // layout.page_bytes))
        return replace(self, server=server, spec=spec)

    def _expanded(self, spec: ModelSpec) -> int:
        """Bytes of the linears that would be there in the dtype too. 0: none, also on an unknown GPU."""
        if self.kind != "cuda" or self.row is None:
            return 0
        served = replace(spec, max_len=min(spec.max_len, self.server.limits.max_len))
        deployment = Deployment(served, self.engine, Memory(self.kind, self.row.memory_bytes))
        return deployment.planner(served, {}).plan()[0].expanded_bytes

    def options(self) -> dict[str, object]:
        """Options that differ from their defaults, by configuration field."""
        return {
            entry.name: value
            for config in (self.model, self.engine)
            for entry in fields(config)
            if (value := getattr(config, entry.name)) != entry.default
        }

    def flags(self) -> list[str]:
        """Words of `ridgeline serve` with these options."""
        return [word for flag in flags(self.options()) for word in flag.split(" ", 1)]

    def starts(self) -> bool:
        """Whether its options hold together."""
        drafters = [part.partition(":")[0] for part in self.engine.speculate.split("+") if part not in ("", "off")]
        trees = not {"draft", "recurrent"}.issuperset(drafters)
        choice = Choice(
            self.model, self.engine, self.spec.layers, self.kind, drafters, drafts_branch=trees, gated=self.spec.gated
        )
        return not any(refusals(choice))

    def changes(self, before: Situation) -> dict[str, object]:
        """Options that differ from those of another situation. None: the default."""
        old, new = before.options(), self.options()
        return {name: new.get(name) for name in (*new, *old) if new.get(name) != old.get(name)}


def slower(cost: CostModel, factor: float) -> CostModel:
    """A cost model whose steps take `factor` times as long."""
    times = {name: getattr(cost, name) * factor for name in ("overhead_s", "expert_s", "row_s", "token_s", "launch_s")}
    return replace(cost, flops_per_s=cost.flops_per_s / factor, bytes_per_s=cost.bytes_per_s / factor, **times)


def read_situation(
    snapshot: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    spec: ModelSpec,
    concurrency: int | None = None,
    most: int = MAX_REQUESTS,
) -> Situation:
    """A situation from a server's figures (GET /dashboard/data) and ended requests (GET /requests).

    spec: the model as served, but for both_forms. most: requests, the newest ones. Raises ConfigError if no request is recorded, or
    the server is too old to state its options.
    """
    facts, figures = snapshot["facts"], snapshot["figures"]
    missing = {"model_options", "options", "cost", "max_num_batched_tokens"} - facts.keys()
    if missing:
        raise ConfigError(
            f"The server does not report its {', '.join(sorted(missing))}, which predictions need: restart it with this version.",
            param="url",
        )
    model, engine = ModelConfig(**facts["model_options"]), EngineConfig(**facts["options"])
    kind = "cpu" if facts["device"] == "cpu" else "cuda"
    layout, spec = kv_layout(spec, facts["page_tokens"]), replace(spec, both_forms=facts.get("expanded_bytes", 0) > 0)
    limits = Limits(
        facts["max_num_seqs"], facts["max_num_batched_tokens"], facts["max_len"], reader_pace(engine.reader_pace)
    )
    ended = _ended(rows, most)
    row = find(facts["device"]) if kind == "cuda" else None
    tier_pages = int(engine.kv_offload_gb * (1 << 30)) // layout.page_bytes
    saved = figures.get("draft_saved_share", 0.0)
    cost = measured_cost(read_cost(spec, facts["cost"]), figures, eager=engine.enforce_eager and kind == "cuda")
    return Situation(
        model=model,
        engine=engine,
        spec=spec,
        server=Server(
            cost=slower(cost, 1 / max(0.1, 1 + saved)),  # steps without drafts stand for those with drafts
            layout=layout,
            pages=facts["blocks"],
            limits=limits,
            prefix_cache=engine.enable_prefix_caching,
            retention=read_retention(engine.kv_retention, layout.page_tokens),
            batching=engine.batching,
            steps_in_flight=facts["steps_in_flight"],
            host_s=figures.get("host_seconds_per_step", 0.0),
            outside_s=snapshot["latencies"].get("outside", {}).get("p50", 0.0),
            tier_pages=tier_pages if row is not None else 0,
            link=row.host_link * LINK_SHARE if row is not None else 0.0,
        ),
        workload=workload_of(ended),
        recorded=figures_of(ended),
        kind=kind,
        row=row,
        concurrency=concurrency,
        saved=saved,
        step_ratio=_step_ratio(figures),
    )


def _ended(rows: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """The newest requests. Raises ConfigError if there are none."""
    ended = newest(rows, most)
    if not ended:
        raise ConfigError(
            "No request has ended lately, so there is no load to predict for: run `ridgeline diagnose` while the usual load is on "
            "the server, or give a run of `ridgeline bench run`.",
            param="url",
        )
    return ended


def _step_ratio(figures: Mapping[str, float]) -> float:
    """Measured over predicted time of decode steps; 1 where one of them is unknown."""
    decode, predicted = (figures.get(f"decode_step_{name}", 0.0) for name in ("seconds", "predicted_seconds"))
    return decode / predicted if decode and predicted else 1.0


def measured_cost(cost: CostModel, figures: Mapping[str, float], eager: bool = False) -> CostModel:
    """The cost model scaled so that its steps take as long as the measured ones, apart for steps with and without prompt tokens.

    Steps with prompts change the rate of arithmetic, but not so far that it would bind decode steps, whose time is known: what
    that does not explain is a fixed time of each step with prompts.

    eager: kernels are launched one by one, so what a step takes longer is overhead and not a lower rate.
    """
    decode, predicted = (figures.get(f"decode_step_{name}", 0.0) for name in ("seconds", "predicted_seconds"))
    ratio = _step_ratio(figures)
    scaled = replace(cost, overhead_s=cost.overhead_s + max(0.0, decode - predicted)) if eager else slower(cost, ratio)
    prompt, predicted = (figures.get(f"prompt_step_{name}", 0.0) for name in ("seconds", "predicted_seconds"))
    rest = prompt / predicted / ratio if prompt and predicted and not eager else 1.0
    rows = max(1, round(figures.get("mean_running", 1.0)))
    arithmetic = cost.spec.linear_flops(rows, rows) / (scaled.flops_per_s * scaled.compute_share)
    most = max(1.0, cost.spec.step_weight_bytes / (scaled.bytes_per_s * scaled.memory_share) / arithmetic)
    if rest > most:
        rest, scaled = most, replace(scaled, launch_s=max(scaled.launch_s, prompt - scaled.overhead_s))
    share = scaled.compute_share / rest
    return replace(scaled, compute_share=share, attention_share=(cost.attention_share or cost.compute_share) / rest)


def newest(rows: Sequence[Mapping[str, Any]], most: int = MAX_REQUESTS) -> list[Mapping[str, Any]]:
    """The newest `most` requests that got a token, in order of arrival. rows: of GET /requests, in any order."""
    return sorted((row for row in rows if row["ttft_s"] is not None), key=itemgetter("arrived_at"))[-most:]


def workload_of(ended: Sequence[Mapping[str, Any]]) -> Workload:
    """Recorded requests as a workload. Each choice of a request becomes a request with the same prompt."""
    requests = (spec for row in ended for spec in _requests(row, ended[0]["arrived_at"]))
    return Workload("recorded requests", tuple(requests), timed=True)


def figures_of(ended: Sequence[Mapping[str, Any]]) -> Figures:
    """Figures that the clients of recorded requests saw."""
    seconds = max(row["arrived_at"] + row["e2e_s"] for row in ended) - ended[0]["arrived_at"]
    return Figures.of([outcome_of(row) for row in ended], seconds)


def outcome_of(row: Mapping[str, Any]) -> Outcome:
    """What the client of a recorded request saw."""
    tpot = math.nan if row["tpot_s"] is None else row["tpot_s"]
    return Outcome(row["ttft_s"], tpot, row["e2e_s"], math.nan, row["output_tokens"])


def _requests(row: Mapping[str, Any], begin: float) -> Iterator[RequestSpec]:
    choices = max(1, len(row["finish_reasons"]))
    for _ in range(choices):
        yield RequestSpec(
            at_s=row["arrived_at"] - begin,
            input=max(1, row["prompt_tokens"]),
            output=max(1, row["output_tokens"] // choices),
            blocks=tuple(row.get("prefix_hashes", ())),
            block=HASHED_TOKENS,
        )


def cached_share(rows: Sequence[Mapping[str, Any]]) -> float:
    """Share of prompt tokens that came from the prefix cache. NaN without requests."""
    tokens = sum(row["prompt_tokens"] for row in rows)
    return sum(row["cached_tokens"] for row in rows) / tokens if tokens else math.nan


def blocked_share(rows: Sequence[Mapping[str, Any]]) -> float:
    """Median over requests of the share of their decoding time in steps that computed prompts. NaN if unknown."""
    shares = [
        row["decoding"]["mixed_s"] / row["decoding"]["device_s"] for row in rows if row["decoding"]["device_s"] > 0
    ]
    return statistics.median(shares) if shares else math.nan
