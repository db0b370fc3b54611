"""A thousand replicas and a day of traffic: how exact the surrogate of a replica is, and what of a large fleet breaks first.

    python benchmarks/thousand.py --trace mooncake_conversation.jsonl.gz --out benchmarks/results/simulation.json

Row `sim-surrogate-error`: eight replicas of Llama-3.1-8B on one H100 each serve an hour of Mooncake's conversations, with the real
scheduler and with planner.surrogate; the value is the largest difference of its figures.

Rows `sim-day-*`: replicas of a model of Llama-3.1-405B's shape in fp8 on 8 H200 each (uncalibrated) serve agents whose prompts grow
by turns and whose answers have 8k to 24k tokens. The rate follows the hours of a day, between a fifth and the whole of the peak,
with a surge of half within five minutes at 9:00. At 15:00 a tenth of the replicas is lost at once. Router and autoscaler are the
service's.

Rows `sim-router-decision-*`: CPU time of the router's decisions for a request among so many replicas, without HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import HERE, cpu_name, provenance, write_rows

from ridgeline.bench.traces import read_trace
from ridgeline.cli.main import main as ridgeline
from ridgeline.cli.simulate import server_of
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.core.workload import RequestSpec, Workload
from ridgeline.hardware.serving import cost_model
from ridgeline.hardware.table import lookup
from ridgeline.planner.cluster import read_cluster
from ridgeline.planner.fleet import Fleet, FleetFigures, Loss, simulate_fleet
from ridgeline.planner.layouts import Layout, replica
from ridgeline.planner.servers import replica_server
from ridgeline.planner.simulate import Outcome, Server, quantile
from ridgeline.service.autoscale import Scaling
from ridgeline.service.prefix_index import PrefixIndex
from ridgeline.service.routing import POLICIES, Demand, Router, State

HOUR_S, DAY_S = 3600.0, 86_400.0
TTFT_S, TPOT_S = 10.0, 0.05
"""Objectives of the day."""
COLD_START_S = 300.0
LIMIT = 24
"""Requests in flight at a replica."""
BLOCK = 4096
"""Tokens of a block of the agents' prompts."""
TURNS = 6
SURGE_S, LOSS_S = 9 * HOUR_S, 15 * HOUR_S


# --- the surrogate against the real scheduler ----------------------------------------------------------------------------


def surrogate_error(trace: Path, rate: float) -> dict[str, Any]:
    model = ModelConfig(str(HERE / "models" / "llama-3.1-8b"), load_format="dummy", max_model_len=32_768)
    server = server_of(model, EngineConfig(), lookup("h100"))
    load = an_hour(read_trace(trace).within(32_768), rate)
    figures, seconds = list[dict[str, float]](), list[float]()
    for surrogate in (False, True):
        began = time.process_time()
        figures.append(summary(simulate_fleet(Fleet(server, 8, surrogate=surrogate), load)))
        seconds.append(time.process_time() - began)
    errors = {name: round(value / figures[0][name] - 1, 4) for name, value in figures[1].items()}
    return {
        "row": "sim-surrogate-error", "value": max(map(abs, errors.values())), "unit": "relative", "target": 0.05,
        "errors": errors, "real": {name: round(value, 5) for name, value in figures[0].items()}, "requests": len(load.requests),
        "times_faster": round(seconds[0] / seconds[1], 1),
    }  # fmt: skip


def an_hour(trace: Workload, rate: float) -> Workload:
    """The trace at a rate, one time after the other, for an hour. Repeated prompts share no prefix with the first ones."""
    scaled = trace.at_rate(rate)
    requests, offset = list[RequestSpec](), 1 + max(block for request in trace.requests for block in request.blocks)
    for time_ in range(1 + math.ceil(HOUR_S / scaled.span_s)):
        for request in scaled.requests:
            blocks = tuple(block + time_ * offset for block in request.blocks)
            requests.append(replace(request, at_s=request.at_s + time_ * scaled.span_s, blocks=blocks))
    return replace(trace, requests=tuple(request for request in requests if request.at_s < HOUR_S))


def summary(result: FleetFigures) -> dict[str, float]:
    outcomes = list(result.outcomes.values())
    made = {"hit_rate": result.hit_rate, "busy_s": result.busy_s, "tokens_s": result.figures.tokens_s}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        values = sorted(value for outcome in outcomes if (value := getattr(outcome, name)) == value)
        made |= {f"{name[:-2]}_p50_s": quantile(values, 0.5), f"{name[:-2]}_p99_s": quantile(values, 0.99)}
    return made


# --- a day of a thousand replicas ----------------------------------------------------------------------------------------


def large_server() -> Server:
    layer = LayerSpec(128, 8, 128, 53_248, Rope(500_000.0, 128))
    spec = ModelSpec("LlamaForCausalLM", 128_256, 16_384, (layer,) * 126, 262_144, quantization="fp8")
    cluster = read_cluster("8xh200")
    engine = EngineConfig(max_num_seqs=LIMIT)
    made = replica(spec, Layout(tensor=8), cluster, 160_000, engine)
    return replica_server(made, cost_model(cluster.device, spec), engine, 60_000)


def share_of_peak(second: float) -> float:
    """The rate at a time of the day: lowest at 3:00, highest at 15:00, with a surge that begins at 9:00 and fades in two hours."""
    wave = 0.5 - 0.5 * math.cos(2 * math.pi * (second - 3 * HOUR_S) / DAY_S)
    since = second - SURGE_S
    surge = min(1.0, since / 300) * math.exp(-max(0.0, since - 300) / HOUR_S) if since > 0 else 0.0
    return min(1.0, (0.2 + 0.8 * wave) * (1 + 0.5 * surge))


def agents(peak: float, seconds: float, seed: int) -> Workload:
    """Sessions of TURNS requests; each turn has the prompt of the one before and more. peak: requests per second."""
    source, requests, now, session = random.Random(seed), list[RequestSpec](), 0.0, 0
    while True:
        now += source.expovariate(peak / TURNS)
        if now >= seconds:
            break
        if source.random() > share_of_peak(now):
            continue
        at, blocks = now, source.randint(3, 8)
        for _turn in range(TURNS):
            ids = tuple(session * 64 + block for block in range(blocks))
            requests.append(RequestSpec(at, blocks * BLOCK, source.randint(8_000, 24_000), ids, BLOCK))
            at += source.uniform(240, 900)  # the answer, and what the agent does with it
            blocks += source.randint(1, 4)
            if at >= seconds:
                break
        session += 1
    requests.sort(key=lambda request: request.at_s)
    return Workload("agents", tuple(requests), timed=True)


def day(load: Workload, replicas: int, index_mb: int, suffix: str = "") -> Iterator[dict[str, Any]]:
    fleet = Fleet(large_server(), replicas // 4, limit=LIMIT, surrogate=True, index_bytes=index_mb << 20)
    rates = fleet.capacity.prefill_tokens_s, LIMIT
    scaling = Scaling(replicas // 10, replicas, *rates, ttft_s=TTFT_S, cold_start_s=COLD_START_S, calm_s=900.0)
    losses = [Loss(LOSS_S, place, down_s=COLD_START_S) for place in range(replicas // 10)]
    began = time.process_time()
    result = simulate_fleet(replace(fleet, scaling=scaling, losses=losses), load)
    seconds = time.process_time() - began
    hourly = list(by_hour(load.requests, result.outcomes))
    good = sum(map(meets, result.outcomes.values())) / result.requests
    hours_used = result.replica_s / HOUR_S
    yield {
        "row": f"sim-day{suffix}-attainment",
        "value": round(good, 4), "unit": f"share within ttft={TTFT_S:g}s,tpot={TPOT_S * 1e3:g}ms",
        "requests": result.requests, "failed": result.failed, "retried": result.retried, "refused": result.refused,
        "most_replicas": result.most, "hit_rate": round(result.hit_rate, 4), "replica_hours": round(hours_used),
        "worst_hour": min(hourly, key=lambda row: row["good"]), "tokens_s": round(result.figures.tokens_s),
        **{name: round(value, 4) for name, value in summary(result).items() if name.endswith("_s")},
    }  # fmt: skip
    if not suffix:
        yield {"row": "sim-day-hours", "value": len(hourly), "unit": "hours", "by_hour": hourly}
    yield {
        "row": f"sim-day{suffix}-seconds", "value": round(seconds), "unit": "CPU seconds", "target": 600,
        "requests_per_minute": round(result.requests / seconds * 60),
    }  # fmt: skip


def meets(outcome: Outcome) -> bool:
    return outcome.ttft_s <= TTFT_S and not outcome.tpot_s > TPOT_S


def by_hour(requests: Sequence[RequestSpec], outcomes: dict[int, Outcome]) -> Iterator[dict[str, float]]:
    hours: dict[int, list[Outcome | None]] = {}
    for number, request in enumerate(requests):
        hours.setdefault(int(request.at_s / HOUR_S), []).append(outcomes.get(number))
    for hour, ended in sorted(hours.items()):
        answered = [outcome for outcome in ended if outcome is not None]
        ttft = sorted(outcome.ttft_s for outcome in answered)
        good = sum(map(meets, answered)) / len(ended)
        yield {
            "hour": hour,
            "requests": len(ended),
            "good": round(good, 4),
            "ttft_p99_s": round(quantile(ttft, 0.99), 2),
        }


# --- the router alone ----------------------------------------------------------------------------------------------------


def decisions(trace: Path, replicas: int) -> dict[str, Any]:
    """CPU time of arrival, first token and end in the router, for the trace's requests."""
    requests = [request for request in read_trace(trace).requests if request.blocks][:6000]
    router = Router(POLICIES["prefix"], PrefixIndex(), seed=0, max_waiting=1 << 20)
    capacity = Fleet(large_server(), limit=64).capacity
    for number in range(replicas):
        router.add(f"replica {number}", capacity)
        router.set_state(f"replica {number}", State.UP, 0.0)
    demands = [Demand(request.input, request.blocks) for request in requests]
    began, open_ = time.process_time(), []
    for number, demand in enumerate(demands):
        now = number * 0.01
        ticket = router.arrive(demand, now)
        router.first_token(ticket, now + 0.5)
        open_.append(ticket)
        if len(open_) > 8 * replicas:
            router.finish(open_.pop(0), now)
    each = (time.process_time() - began) / len(demands)
    return {
        "row": f"sim-router-decision-{replicas}", "value": round(each * 1e6, 1), "unit": "us of a core for each request",
        "requests_s_core": round(1 / each),
    }  # fmt: skip


# --- a plan --------------------------------------------------------------------------------------------------------------


PLANS = {
    "plan-seconds": "--candidates h100,h200,l40s --formats fp8 --rate 20 --slo p99(ttft)<=1s,tpot=30ms",
    "plan-256-seconds": "--gpus 256xh100 --rate 400",
}


def plan_seconds(row: str) -> dict[str, Any]:
    """CPU time of `ridgeline plan` for three kinds of cards and two formats of weights, or for 256 cards."""
    model = str(HERE / "models" / "llama-3.1-8b")
    began, out = time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(out):
        ridgeline(["plan", model, *PLANS[row].split(), "--json"])
    answer = json.loads(out.getvalue())
    return {
        "row": row, "value": round(time.process_time() - began, 1), "unit": "CPU seconds", "target": 60,
        "layouts": answer["considered"], "proposals": len(answer["proposals"]), "best": answer["proposals"][0]["name"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second of the hour")
    parser.add_argument("--peak", type=float, default=16.0, help="requests per second of the day's peak")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--parts", default="error,day,index,more,sessions,plan,router")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    rows = list[dict[str, Any]]()
    if "error" in args.parts:
        rows.append(surrogate_error(args.trace, args.rate))
    if "day" in args.parts:
        rows += day(agents(args.peak, args.hours * HOUR_S, 0), args.replicas, 64)
    if "index" in args.parts:
        rows += day(agents(args.peak, args.hours * HOUR_S, 0), args.replicas, 1024, "-large-index")
    if "more" in args.parts:
        rows += day(agents(args.peak, args.hours * HOUR_S, 0), args.replicas * 3 // 2, 64, "-more-replicas")
    if "sessions" in args.parts:
        named = agents(args.peak, args.hours * HOUR_S, 0)
        sessions = tuple(replace(request, session=request.blocks[0] // 64) for request in named.requests)
        rows += day(replace(named, requests=sessions), args.replicas, 64, "-sessions")
    if "plan" in args.parts:
        rows += map(plan_seconds, PLANS)
    if "router" in args.parts:
        rows += [decisions(args.trace, replicas) for replicas in (8, 100, 1000)]
    for row in rows:
        print(json.dumps(row))
    write_rows(args.out, [{**row, **provenance(cpu_name())} for row in rows])


if __name__ == "__main__":
    main()
