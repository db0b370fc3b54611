"""Device times of steps with known composition, measured on an engine in this process.

A `Recorder` wraps the runner and reads the plans. `measure` makes the engine run steps of chosen shapes.
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
"""Decode steps that a shape runs. Their median is the result."""
MARGIN = 64
"""Tokens by which a sequence may grow during the measurement."""


class Device(Protocol):
    """The interface of the engine's runner that a Recorder wraps."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...


class Recorder:
    """Wraps a runner and records the composition and the device seconds of each step.

    It tracks the lengths of rows from the plans. It does not support speculation.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.steps: list[Measured] = []
        self._lengths: dict[int, int] = {}
        self._in_flight: deque[Measured] = deque()

    def launch(self, plan: StepPlan) -> None:
        for row in plan.leaves:
            self._lengths.pop(row, None)
        for join in plan.joins:
            self._lengths[join.row] = join.computed
        decode, chunks = [], []
        for row, n_query in zip(plan.rows, plan.n_query, strict=True):
            length = self._lengths[row]
            if n_query == 1:
                decode.append(length)
            else:
                chunks.append((length, n_query))
            self._lengths[row] = length + n_query
        self._in_flight.append(Measured(tuple(decode), tuple(chunks), sum(plan.samples), 0.0))
        self.device.launch(plan)

    def collect(self) -> StepResult:
        result = self.device.collect()
        step = self._in_flight.popleft()
        if result.error is None and result.device_s > 0:
            self.steps.append(replace(step, seconds=result.device_s))
        return result

    def close(self) -> None:
        self.device.close()


@dataclass(frozen=True, slots=True)
class Shape:
    """The composition of a measured step."""

    rows: int
    """Decoding sequences."""
    context: int
    """Tokens in the cache of each decoding sequence."""
    prompt: int = 0
    """Tokens of a prompt in the same step, 0 for none."""

    @property
    def tokens(self) -> int:
        """KV cache tokens that the shape needs."""
        return self.rows * (self.context + MARGIN) + self.prompt


@dataclass(frozen=True, slots=True)
class ShapeGrid:
    """Sizes from which shapes are built."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]


FIT_SHAPES = ShapeGrid(
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    (64, 512, 2048, 8192),
    (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
)
VALIDATION_SHAPES = ShapeGrid(
    (1, 3, 12, 24, 48, 96, 192, 384), (200, 1100, 5000), (12, 48, 100, 200, 400, 700, 1500, 3000, 6000, 12000)
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on shapes."""

    rows: int
    max_len: int
    tokens: int
    """Tokens of all sequences of a shape."""


def shapes(grid: ShapeGrid, bounds: Bounds) -> list[Shape]:
    """Build shapes within `bounds`: decoding at all sizes, prompts of all lengths, and mixed steps."""
    longest = bounds.max_len - MARGIN
    decode = [Shape(rows, context) for rows in grid.rows for context in grid.contexts]
    prefill = [Shape(0, 0, prompt) for prompt in grid.prompts]
    mixed = [
        Shape(rows, grid.contexts[index % len(grid.contexts)], prompt)
        for index, (rows, prompt) in enumerate(zip(grid.rows[1:], grid.prompts[1:], strict=False))
    ]
    selected = [shape for shape in [*decode, *prefill, *mixed] if max(shape.context, shape.prompt) <= longest]
    return [
        shape for shape in selected if shape.rows + (shape.prompt > 0) <= bounds.rows and shape.tokens <= bounds.tokens
    ]


def measure(
    local: LocalEngine, wanted: Sequence[Shape], repeats: int = 3, progress: Callable[[int, int], None] | None = None
) -> list[Measured]:
    """Run each shape and return one step per composition with the median of its device seconds.

    Each shape's prompt runs `repeats` times after one warm-up.
    """
    loop = local.engine.loop
    runner = loop.runner
    loop.runner = recorder = Recorder(runner)
    steps: dict[tuple[object, ...], Measured] = {}
    try:
        for shape in wanted[:1]:  # warm-up: the first steps of an engine are slow
            _Run(local, shape, 1).steps(recorder)
        for number, shape in enumerate(wanted, 1):
            for step in _medians(_Run(local, shape, repeats + 1).steps(recorder)):
                steps.setdefault((step.decode, step.chunks, step.logits), step)
            if progress is not None:
                progress(number, len(wanted))
    finally:
        loop.runner = runner
    return list(steps.values())


_numbers = count(1)


class _Run:
    """One shape on an engine: sequences decode while the shape's prompt arrives repeatedly."""

    def __init__(self, local: LocalEngine, shape: Shape, arrivals: int) -> None:
        self._local, self._shape = local, shape
        self._arrivals = arrivals if shape.prompt else 0
        self._name, self._rng = next(_numbers), random.Random(1)

    def steps(self, recorder: Recorder) -> list[Measured]:
        """Run the shape and return the steps that match it."""
        recorder.steps.clear()
        facts = self._local.engine.setup.facts
        prefill = -(-self._shape.prompt // max(1, facts["max_num_batched_tokens"] - self._shape.rows))
        outputs = min(MARGIN - 1, OUTPUTS + self._arrivals * (prefill + 2))
        for row in range(self._shape.rows):
            self._submit(f"{self._name}-row-{row}", self._shape.context, outputs)
        if not self._shape.rows:
            self._arrive()
        started: set[str] = set()
        for delta in self._local.deltas():
            if delta.error:
                raise EngineFailed(f"Measuring a step failed: {delta.error}")
            first = delta.id not in started
            started.add(delta.id)
            if (first and len(started) == self._shape.rows) or (delta.finish and "prompt" in delta.id):
                self._arrive()
        return [step for step in recorder.steps if _matches(step, self._shape)]

    def _arrive(self) -> None:
        """Submit the prompt if arrivals are left."""
        if self._arrivals:
            self._arrivals -= 1
            self._submit(f"{self._name}-prompt-{self._arrivals}", self._shape.prompt, 1)

    def _submit(self, name: str, length: int, outputs: int) -> None:
        vocab = self._local.engine.setup.vocab_size
        tokens = [self._rng.randrange(vocab) for _ in range(length)]
        sampling = SamplingParams(temperature=1.0, max_tokens=outputs, ignore_eos=True, seed=1)
        self._local.submit(Submit(name, tokens, sampling, time.monotonic(), cache=False))


def _matches(step: Measured, shape: Shape) -> bool:
    """Whether a step has the shape's rows, each with at least its context, and a prompt chunk if the shape has a prompt."""
    if len(step.decode) != shape.rows or bool(step.chunks) != bool(shape.prompt):
        return False
    return min(step.decode, default=shape.context) >= shape.context


def _medians(steps: Iterable[Measured]) -> list[Measured]:
    """Return one step per composition, regardless of row lengths, with the median of its seconds."""
    groups: dict[tuple[object, ...], list[Measured]] = {}
    for step in steps:
        groups.setdefault((len(step.decode), step.chunks, step.logits), []).append(step)
    medians = []
    for group in groups.values():
        middle = sorted(group, key=lambda step: sum(step.decode))[len(group) // 2]
        medians.append(replace(middle, seconds=statistics.median(step.seconds for step in group)))
    return medians
