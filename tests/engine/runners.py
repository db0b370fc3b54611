"""A real runner on the CPU around a tiny random checkpoint, with or without the scheduler before it."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.config import ModelConfig
from ridgeline.core.plan import StepResult, TokenLogprobs
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import KvLayout, kv_layout
from ridgeline.engine.device import DeviceStep
from ridgeline.engine.graphs import GraphExecutor
from ridgeline.engine.leases import Leases
from ridgeline.engine.loop import Loop
from ridgeline.engine.policy import Limits, admission
from ridgeline.engine.request import Constraint, Request
from ridgeline.engine.runner import Runner, build_runner
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.shape import Sizes
from ridgeline.kv.prefix import chain_root
from ridgeline.kv.retention import KEEP_ALL, Retention
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops.capture import Capture
from ridgeline.ops.choose import choose
from ridgeline.ops.reference import REFERENCE
from ridgeline.speculation.device import DeviceDrafter, NoDrafter
from ridgeline.speculation.interface import NO_SPECULATION, Speculation
from tests.models.families import save

MAX_LEN = 192
PAGE = 8
PROMPT = [5, 9, 2, 77, 41, 200, 13, 8, 300, 11, 6]


@cache
def pair(family: str, device: str = "cpu") -> tuple[torch.nn.Module, LoadedModel]:
    """(transformers' model, ours) of one tiny random checkpoint in float32."""
    # Whoever asks first may be in inference mode, in which the next one must not be.
    with torch.inference_mode(False), tempfile.TemporaryDirectory() as name:
        theirs = save(family, Path(name))
        config = ModelConfig(max_model_len=MAX_LEN)
        place = torch.device(device)
        ops = REFERENCE if device == "cpu" else choose(place, torch.float32)
        ours = build(Path(name), model=config, ops=ops, device=place)
    return theirs, ours


def layout_of(model: LoadedModel, drafter: DeviceDrafter = NoDrafter()) -> KvLayout:
    return kv_layout(model.spec, PAGE, drafter_layers=drafter.layers)


def make_runner(
    model: LoadedModel,
    sizes: Sizes = Sizes(6, 64, MAX_LEN, 200, False),
    drafter: DeviceDrafter = NoDrafter(),
) -> Runner:
    return build_runner(model, layout_of(model, drafter), sizes, drafter=drafter)


def make_step(
    model: LoadedModel, runner: Runner | None = None, drafter: DeviceDrafter = NoDrafter(), step_tokens: int = 64
) -> DeviceStep:
    """A device step as the runner's, on the runner's rows and cache."""
    made = runner or make_runner(model)
    return DeviceStep(model, made.rows, made.store, step_tokens, drafter)


@dataclass(frozen=True, slots=True)
class Engine:
    """How a DeviceBench is built. depth: steps in flight. model: instead of the family's."""

    family: str = "llama-gqa"
    device: str = "cpu"
    blocks: int = 200
    rows: int = 6
    step_tokens: int = 64
    depth: int = 0
    graphs: bool = False
    prefix_cache: bool = True
    retention: Retention = KEEP_ALL
    speculation: Speculation = NO_SPECULATION
    drafter: DeviceDrafter = field(default_factory=NoDrafter)
    drafts: tuple[int, ...] = ()
    host_drafts: int = 0
    model: LoadedModel | None = None
    clock: Callable[[], float] = field(default=lambda: 0.0)


class Recorded:
    """A runner that keeps the results that were collected."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.results: list[StepResult] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def collect(self) -> StepResult:
        self.results.append(self._runner.collect())
        return self.results[-1]


class DeviceBench:
    """Scheduler, loop and a real runner. Collects what each choice was told, and in `results` what each step gave."""

    def __init__(self, family: str = "llama-gqa", **facts: object) -> None:
        how = Engine(family, **facts)  # type: ignore[arg-type]
        self.model = how.model or pair(family, how.device)[1]
        layout = layout_of(self.model, how.drafter)
        self.leases = Leases(layout, how.blocks, prefix_cache=how.prefix_cache, retention=how.retention)
        limits = Limits(how.rows, how.step_tokens, MAX_LEN)
        self.scheduler = Scheduler(layout, self.leases, limits, admission("continuous"), how.speculation)
        sizes = Sizes(how.rows, how.step_tokens, MAX_LEN, how.blocks, how.graphs, how.drafts, how.host_drafts)
        self.runner = make_runner(self.model, sizes, how.drafter)
        recorded: Any = Recorded(self.runner)
        self.results: list[StepResult] = recorded.results
        self.loop = Loop(self.scheduler, recorded, steps_in_flight=how.depth, clock=how.clock)
        self.how = how
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprobs]] = {}
        self.scores: dict[str, list[TokenLogprobs]] = {}
        self.finish: dict[tuple[str, int], str] = {}
        self.errors: dict[tuple[str, int], str] = {}
        self.preempted = 0
        self._arrivals = 0

    def use_graphs(self, capture: Capture) -> None:
        """Run steps through graphs that `capture` captures: on a CPU a runner makes none."""
        how = self.how
        with torch.inference_mode():
            step = make_step(self.model, self.runner, how.drafter, how.step_tokens)
            sizes = Sizes(how.rows, how.step_tokens, MAX_LEN, how.blocks, True, how.drafts, how.host_drafts)
            self.runner.executor = GraphExecutor(step, sizes, capture)
            self.runner.executor.capture(lambda stage, done, total: None)

    def submit(
        self,
        name: str,
        prompt: Sequence[int] = PROMPT,
        *,
        stop_ids: Sequence[int] = (),
        constraint: Constraint | None = None,
        **options: object,
    ) -> None:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **options})  # type: ignore[arg-type]
        assert sampling.max_tokens is not None
        for choice in range(sampling.n):
            self._arrivals += 1
            self.tokens[name, choice] = []
            self.logprobs[name, choice] = []
            self.scheduler.add(
                Request(
                    id=name,
                    choice=choice,
                    tokens=array("i", prompt),
                    prompt_len=len(prompt),
                    sampling=sampling,
                    limit=min(MAX_LEN, len(prompt) + sampling.max_tokens),
                    stop_ids=tuple(stop_ids),
                    seed=sampling.seed or 0,
                    order=(0, self._arrivals),
                    arrival=0.0,
                    root=chain_root("", "tiny"),
                    cache=True,
                    constraint=constraint,
                )
            )

    def turn(self) -> None:
        for update in self.loop.turn().each():
            key = update.id, update.choice
            self.tokens[key].extend(update.tokens)
            self.logprobs[key].extend(update.logprobs or [])
            if update.prompt_logprobs:
                self.scores[update.id] = list(update.prompt_logprobs)
            if update.finish:
                self.finish[key] = update.finish
                self.errors[key] = update.error

    def run(self) -> None:
        for _ in range(4000):
            if self.scheduler.idle:
                break
            self.turn()
        assert self.scheduler.idle, "requests hang"
        self.preempted = self.scheduler.counts.preempted


def alone(prompt: Sequence[int] = PROMPT, family: str = "llama-gqa", **options: object) -> list[int]:
    """The tokens of one request with nobody beside it; computed once for all tests."""
    return list(_alone(tuple(prompt), family, tuple(options.items())))


@cache
def _alone(prompt: tuple[int, ...], family: str, options: tuple[tuple[str, object], ...]) -> list[int]:
    return answer(prompt, family, **dict(options))


def answer(prompt: Sequence[int] = PROMPT, family: str = "llama-gqa", **options: object) -> list[int]:
    """The same, computed now."""
    bench = DeviceBench(family)
    bench.submit("one", prompt, **options)  # type: ignore[arg-type]
    bench.run()
    return bench.tokens["one", 0]


def theirs_greedy(family: str, prompt: Sequence[int], n: int) -> list[int]:
    """What transformers generates, one forward pass over everything per token."""
    model, _ = pair(family)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def run_plan(runner: Runner, plan: object) -> StepResult:
    runner.launch(plan)  # type: ignore[arg-type]
    return runner.collect()
