"""A scheduler with a fake device around it, and what the toy model would say on its own."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.draft import Draft
from ridgeline.core.events import PinOutcome
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import KV_FORMATS, KvGroup, KvLayout
from ridgeline.engine.leases import Leases
from ridgeline.engine.loop import Loop
from ridgeline.engine.policy import Limits, admission
from ridgeline.engine.request import Request
from ridgeline.engine.scheduler import Scheduler
from ridgeline.kv.prefix import chain_root
from ridgeline.speculation.interface import NO_SPECULATION, Speculation
from tests.engine.fake import FakeRunner, next_token

VOCAB = 97
PLAIN = KvLayout((KvGroup((0, 1), None, 8),), 4, 64, KV_FORMATS["float32"])
WINDOWED = KvLayout((KvGroup((0,), None, 8), KvGroup((1,), 6, 8)), 4, 64, KV_FORMATS["float32"])


def counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """The function, whose calls add its name to `calls`, with any arguments."""

    def call(*given: Any, **named: Any) -> Any:
        calls.append(function.__name__)
        return function(*given, **named)

    return call


class Clock:
    """A virtual clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


@dataclass(frozen=True)
class Shape:
    """Sizes of a toy engine."""

    layout: KvLayout = PLAIN
    blocks: int = 64
    rows: int = 8
    step_tokens: int = 16
    batching: str = "continuous"
    depth: int = 0
    prefix_cache: bool = True
    speculation: Speculation = NO_SPECULATION
    fail_at: Sequence[int] = ()
    luck: float = 0.0
    parents: tuple[int, ...] = ()
    pace_s: float = 0.0
    stages: int = 1
    pin_share: float = 0.0


class Bench:
    """An engine without a device. Collects what each choice was told."""

    def __init__(self, **options: Any) -> None:
        shape = Shape(**options)
        self.clock = Clock()
        self.leases = Leases(shape.layout, shape.blocks, prefix_cache=shape.prefix_cache, pin_share=shape.pin_share)
        limits = Limits(shape.rows, shape.step_tokens, 256, shape.pace_s, shape.stages)
        self.scheduler = Scheduler(shape.layout, self.leases, limits, admission(shape.batching), shape.speculation)
        self.runner = FakeRunner(
            shape.layout,
            shape.blocks,
            vocab=VOCAB,
            fail_at=frozenset(shape.fail_at),
            luck=shape.luck,
            parents=shape.parents,
        )
        self.loop = Loop(self.scheduler, self.runner, steps_in_flight=shape.depth, clock=self.clock)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finish: dict[tuple[str, int], str] = {}
        self.cached: dict[tuple[str, int], int] = {}
        self.pins: dict[str, list[PinOutcome]] = {}
        self.scores: dict[str, int] = {}
        self._arrivals = 0

    def submit(
        self, name: str, prompt: Sequence[int], *, n: int = 1, priority: int = 0, **options: object
    ) -> list[Request]:
        """Add the choices of a request; returns them."""
        cache, salt = bool(options.pop("cache", True)), str(options.pop("salt", ""))
        has_reader = bool(options.pop("has_reader", False))
        breakpoints: Any = options.pop("breakpoints", ())
        client = str(options.pop("client", ""))
        sampling = SamplingParams(n=n, **options)  # type: ignore[arg-type]
        assert sampling.max_tokens is not None
        made = []
        for choice in range(n):
            self._arrivals += 1
            request = Request(
                id=name,
                choice=choice,
                tokens=array("i", prompt),
                prompt_len=len(prompt),
                sampling=sampling,
                limit=len(prompt) + sampling.max_tokens,
                stop_ids=sampling.stop_token_ids,
                seed=sampling.seed or 0,
                order=(priority, self._arrivals),
                arrival=self.clock.now,
                root=chain_root(salt, "toy"),
                cache=cache,
                has_reader=has_reader,
                breakpoints=() if choice else breakpoints,
                client=client,
            )
            self.tokens[name, choice] = []
            self.scheduler.add(request)
            made.append(request)
        return made

    def turn(self) -> None:
        for update in self.loop.turn().each():
            key = update.id, update.choice
            assert key not in self.finish, f"news of {key} after its end"
            self.tokens[key].extend(update.tokens)
            if update.cached >= 0:
                self.cached[key] = update.cached
                if update.pins is not None:
                    self.pins[update.id] = update.pins
            if update.prompt_logprobs:
                self.scores[update.id] = len(update.prompt_logprobs)
            if update.finish:
                self.finish[key] = update.finish
        self.leases.pool.check()
        assert self.leases.pool.free + self.leases.pool.used == self.leases.pool.total

    def run(self, turns: int = 5000) -> None:
        for _ in range(turns):
            if self.scheduler.idle:
                break
            self.turn()
        assert self.scheduler.idle, "requests hang"
        assert self.leases.pool.used == 0


class Guesser(Speculation):
    """Drafts chains, or trees, whose nodes are right with a given chance if those above them are."""

    idle = False

    def waits(self, request: Any) -> bool:
        return True

    def __init__(self, chance: float, most: int, seed: int, *, trees: bool = False) -> None:
        self._random = random.Random(seed)
        self._chance, self.max_nodes, self._trees = chance, most, trees

    def propose(self, request: Any, nodes: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(min(nodes, request.limit - request.expected - 1, self._random.randint(0, self.max_nodes))):
            parent = self._random.randint(-1, node - 1) if self._trees else node - 1
            path, up = [], parent
            while up >= 0:
                path.append(tokens[up])
                up = parents[up]
            right = next_token([*request.tokens, *path[::-1]], request.seed, request.choice, VOCAB)
            taken = {tokens[sibling] for sibling in range(node) if parents[sibling] == parent}
            hit = self._random.random() < self._chance and right not in taken
            tokens.append(right if hit else next(token for token in range(right + 1, 3 * VOCAB) if token not in taken))
            parents.append(parent)
        return Draft(tuple(tokens), tuple(parents) if self._trees else ())


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of mixed lengths, half of which share a beginning."""
    chance = random.Random(seed)
    common = [chance.randrange(VOCAB) for _ in range(13)]
    made = []
    for index in range(count):
        suffix = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 25))]
        made.append(common + suffix if index % 2 else suffix)
    return made


def oracle(
    prompt: Sequence[int], max_tokens: int, *, seed: int = 0, choice: int = 0, stop: Sequence[int] = ()
) -> list[int]:
    """What the toy model says when asked one token at a time."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, seed, choice, VOCAB))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]
