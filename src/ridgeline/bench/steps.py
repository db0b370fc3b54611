"""Steps of known composition on an engine in this process: what ran in each, and how long the device took.

A `Recorder` stands between loop and runner and reads the plans; `measure` makes the engine run steps of chosen shapes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from ridgeline.core.errors import EngineFailed
from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.planner.calibrate import Measured
from ridgeline.wire.messages import Submit

OUTPUTS = 10
"""Decode steps that a shape runs; their median counts."""
MARGIN = 64
"""Tokens by which a sequence may grow while it is measured."""


class Device(Protocol):
    """What a Recorder records: the engine's runner."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...


class Recorder:
    """A runner that passes everything on, and notes the composition and the device seconds of each step. It knows what
    rows hold because it sees every plan; drafts are not followed."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.steps: list[Measured] = []
        self._held: dict[int, int] = {}
        self._flight: deque[Measured] = deque()

    def launch(self, plan: StepPlan) -> None:
        for row in plan.leaves:
            self._held.pop(row, None)
        for join in plan.joins:
            self._held[join.row] = join.computed
        decode, chunks = [], []
        for row, n_query in zip(plan.rows, plan.n_query, strict=True):
            held = self._held[row]
            if n_query == 1:
                decode.append(held)
            else:
                chunks.append((held, n_query))
            self._held[row] = held + n_query
        self._flight.append(Measured(tuple(decode), tuple(chunks), sum(plan.samples), 0.0))
        self.device.launch(plan)

    def collect(self) -> StepResult:
        result = self.device.collect()
        step = self._flight.popleft()
        if result.error is None and result.device_s > 0:
            self.steps.append(replace(step, seconds=result.device_s))
        return result

    def close(self) -> None:
        self.device.close()


@dataclass(frozen=True, slots=True)
class Shape:
    """What a measured step holds: `rows` sequences that decode behind `context` tokens each, and a prompt of `prompt`
    tokens that comes in beside them (0: none)."""

    rows: int
    context: int
    prompt: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of cache that it needs."""
        return self.rows * (self.context + MARGIN) + self.prompt


@dataclass(frozen=True, slots=True)
class Ladder:
    """Sizes that shapes are made of."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]


FIT = Ladder(
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    (64, 512, 2048, 8192),
    (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
)
JUDGE = Ladder(
    (1, 3, 12, 24, 48, 96, 192, 384), (200, 1100, 5000), (12, 48, 100, 200, 400, 700, 1500, 3000, 6000, 12000)
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the engine and the patience allow. tokens: of all sequences of a shape together."""

    rows: int
    max_len: int
    tokens: int


def shapes(ladder: Ladder, bounds: Bounds) -> list[Shape]:
    """Decoding at all sizes, prompts at all lengths, and both together, within `bounds`."""
    longest = bounds.max_len - MARGIN
    decode = [Shape(rows, context) for rows in ladder.rows for context in ladder.contexts]
    prefill = [Shape(0, 0, prompt) for prompt in ladder.prompts]
    mixed = [
        Shape(rows, ladder.contexts[index % len(ladder.contexts)], prompt)
        for index, (rows, prompt) in enumerate(zip(ladder.rows[1:], ladder.prompts[1:], strict=False))
    ]
    found = [one for one in [*decode, *prefill, *mixed] if max(one.context, one.prompt) <= longest]
    return [one for one in found if one.rows + (one.prompt > 0) <= bounds.rows and one.tokens <= bounds.tokens]


def measure(
    local: LocalEngine, wanted: Sequence[Shape], repeats: int = 3, progress: Callable[[int, int], None] | None = None
) -> list[Measured]:
    """Run each shape, its prompt `repeats` times after one to warm up; a step of each composition, with the median of its
    seconds."""
    loop = local.engine.loop
    plain = loop.runner
    loop.runner = recorder = Recorder(plain)
    found: dict[tuple[object, ...], Measured] = {}
    try:
        for shape in wanted[:1]:  # an engine's first steps are slow ones
            _Run(local, shape, 1).steps(recorder)
        for number, shape in enumerate(wanted, 1):
            for one in _medians(_Run(local, shape, repeats + 1).steps(recorder)):
                found.setdefault((one.decode, one.chunks, one.logits), one)
            if progress is not None:
                progress(number, len(wanted))
    finally:
        loop.runner = plain
    return list(found.values())


_numbers = count(1)


class _Run:
    """One shape on an engine: sequences that go on decoding while its prompt comes in, again and again."""

    def __init__(self, local: LocalEngine, shape: Shape, arrivals: int) -> None:
        self._local, self._shape = local, shape
        self._arrivals = arrivals if shape.prompt else 0
        self._name, self._chance = next(_numbers), random.Random(1)

    def steps(self, recorder: Recorder) -> list[Measured]:
        """The steps that hold what the shape says."""
        recorder.steps.clear()
        facts = self._local.engine.setup.facts
        prefill = -(-self._shape.prompt // max(1, facts["max_num_batched_tokens"] - self._shape.rows))
        outputs = min(MARGIN - 1, OUTPUTS + self._arrivals * (prefill + 2))
        for row in range(self._shape.rows):
            self._submit(f"{self._name}-row-{row}", self._shape.context, outputs)
        if not self._shape.rows:
            self._arrive()
        started: set[str] = set()
        for delta in self._local.news():
            if delta.error:
                raise EngineFailed(f"Measuring a step failed: {delta.error}")
            first = delta.id not in started
            started.add(delta.id)
            if (first and len(started) == self._shape.rows) or (delta.finish and "prompt" in delta.id):
                self._arrive()
        return [one for one in recorder.steps if _belongs(one, self._shape)]

    def _arrive(self) -> None:
        """The prompt comes in, if it has not come often enough."""
        if self._arrivals:
            self._arrivals -= 1
            self._submit(f"{self._name}-prompt-{self._arrivals}", self._shape.prompt, 1)

    def _submit(self, name: str, length: int, outputs: int) -> None:
        vocab = self._local.engine.setup.vocab_size
        tokens = [self._chance.randrange(vocab) for _ in range(length)]
        sampling = SamplingParams(temperature=1.0, max_tokens=outputs, ignore_eos=True, seed=1)
        self._local.submit(Submit(name, tokens, sampling, time.time(), cache=False))


def _belongs(step: Measured, shape: Shape) -> bool:
    """Whether a step is one that the shape is for: all its rows decode behind their contexts, and its prompt is there."""
    if len(step.decode) != shape.rows or bool(step.chunks) != bool(shape.prompt):
        return False
    return min(step.decode, default=shape.context) >= shape.context


def _medians(steps: Iterable[Measured]) -> list[Measured]:
    """One step for each composition (lengths of decoding rows aside), with the median of its seconds."""
    groups: dict[tuple[object, ...], list[Measured]] = {}
    for one in steps:
        groups.setdefault((len(one.decode), one.chunks, one.logits), []).append(one)
    found = []
    for group in groups.values():
        middle = sorted(group, key=lambda one: sum(one.decode))[len(group) // 2]
        found.append(replace(middle, seconds=statistics.median(one.seconds for one in group)))
    return found
