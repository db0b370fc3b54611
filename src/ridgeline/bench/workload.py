"""What is asked: requests with their lengths and times, whatever trace or rule they come from."""

from __future__ import annotations

import hashlib
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise

from ridgeline.core.errors import ConfigError

PREFIX_BLOCK = -1
"""Id of the block that all prompts of a synthetic workload share."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to make. at_s: seconds after the start. input, output: tokens.

    blocks: ids of the prompt's blocks of `block` tokens each, the last one cut to `input`: equal ids are equal tokens, and
    what the ids do not cover is the request's own. text: the prompt itself, where a trace has it.
    session: number of the conversation that the request is a turn of, -1 for none: it is not sent before the answer to the
    turn before it has ended. history: what was said before `text`, user and assistant in turn.
    """

    at_s: float
    input: int
    output: int
    blocks: tuple[int, ...] = ()
    block: int = 512
    text: str = ""
    session: int = -1
    history: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their times. timed: the times mean something (a trace has them).

    skipped: rows of its source that are no request (failures that a trace logged).
    """

    name: str
    asks: tuple[Ask, ...]
    timed: bool = False
    skipped: int = 0

    @property
    def span_s(self) -> float:
        """Seconds from the first request to the last."""
        return self.asks[-1].at_s - self.asks[0].at_s if self.asks else 0.0

    @property
    def rate(self) -> float:
        """Mean requests per second; infinite when all come at once."""
        return (len(self.asks) - 1) / self.span_s if self.span_s > 0 else math.inf

    @property
    def fingerprint(self) -> str:
        """Equal for workloads that ask the same, whenever they ask it: runs of both can be compared pair by pair."""
        digest = hashlib.sha256()
        for ask in self.asks:
            digest.update(repr((ask.input, ask.output, ask.blocks, ask.block, ask.text, ask.history)).encode())
        return digest.hexdigest()[:16]

    def within(self, context: int) -> Workload:
        """Only what fits a context of so many tokens; a conversation ends before the turn that does not."""
        return replace(self, asks=tuple(compress(self.asks, fits(self.asks, context))))

    def first(self, count: int | None = None, seconds: float | None = None) -> Workload:
        """The first `count` requests, and of those what comes within `seconds` of the first."""
        asks = self.asks[:count]
        if seconds is not None and asks:
            asks = tuple(ask for ask in asks if ask.at_s - asks[0].at_s <= seconds)
        return replace(self, asks=asks)

    def paced(self, scale: float) -> Workload:
        """With all times from the first one on multiplied by `scale` (0.5: twice as fast)."""
        start = self.asks[0].at_s if self.asks else 0.0
        return replace(self, asks=tuple(replace(ask, at_s=(ask.at_s - start) * scale) for ask in self.asks))

    def at_rate(self, rate: float) -> Workload:
        """With the trace's own burstiness, at a mean of `rate` requests per second."""
        return self.paced(0.0 if math.isinf(rate) else self.rate / rate)

    def at(self, times: Sequence[float]) -> Workload:
        """With these times instead."""
        asks = tuple(replace(ask, at_s=at) for ask, at in zip(self.asks, times, strict=True))
        return replace(self, asks=asks, timed=True)


def fits(asks: Iterable[Ask], context: float) -> list[bool]:
    """Which requests fit a context; those behind one of their conversation that does not fit do not either."""
    found: list[bool] = []
    ended: set[int] = set()
    for ask in asks:
        found.append(ask.session not in ended and ask.input + ask.output <= context)
        if not found[-1] and ask.session >= 0:
            ended.add(ask.session)
    return found


def chains(asks: Sequence[Ask]) -> list[list[int]]:
    """Places in `asks` of what must be sent one after the other: the turns of each conversation, each other request alone."""
    found: list[list[int]] = []
    of: dict[int, list[int]] = {}
    for place, ask in enumerate(asks):
        if ask.session in of:
            of[ask.session].append(place)
            continue
        found.append([place])
        if ask.session >= 0:
            of[ask.session] = found[-1]
    return found


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Times of `count` requests at a mean of `rate` per second, the first at 0.

    burstiness: shape of the gamma distribution of the gaps, whose coefficient of variation is then 1 / sqrt(shape):
    1 is a Poisson process, below 1 comes in bursts, infinite is a constant rate.
    """
    if rate <= 0:
        raise ConfigError(
            f"--rate is {rate:g}: give requests per second above 0, or inf for all at once.", param="rate"
        )
    if burstiness <= 0:
        raise ConfigError(f"--burstiness is {burstiness:g}: give 1 (Poisson), less (bursts) or inf (constant).")
    source = random.Random(f"arrivals {seed}")
    times = [0.0]
    for _ in range(count - 1):
        if math.isinf(rate):
            gap = 0.0
        elif math.isinf(burstiness):
            gap = 1 / rate
        else:
            gap = source.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(times[-1] + gap)
    return times[:count]


def synthetic(count: int, lengths: tuple[str, str], prefix: int, seed: int) -> Workload:
    """`count` requests with drawn lengths. lengths: (input, output), each "512" or "100-1000" (uniform).

    prefix: tokens that all prompts begin with, part of the input length. Raises ConfigError for lengths that are none.
    """
    source = random.Random(f"lengths {seed}")
    low_high = [_range(name, text) for name, text in zip(("input_len", "output_len"), lengths, strict=True)]
    if prefix > low_high[0][0]:
        raise ConfigError(
            f"--prefix-len is {prefix}, which exceeds --input-len {lengths[0]}: lower it.", param="prefix_len"
        )
    asks = []
    for _ in range(count):
        asked, wanted = (source.randint(low, high) for low, high in low_high)
        asks.append(Ask(0.0, asked, wanted, (PREFIX_BLOCK,) if prefix else (), prefix or 512))
    return Workload(f"random {lengths[0]}/{lengths[1]}", tuple(asks))


def _range(name: str, text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    try:
        low, high = int(first), int(last if dash else first)
    except ValueError:
        low = high = 0
    if not 1 <= low <= high:
        raise ConfigError(
            f"--{name.replace('_', '-')} is {text!r}: give a number of tokens (512) or a range (100-1000).", param=name
        )
    return low, high


def describe(workload: Workload) -> dict[str, float]:
    """Figures of a workload: lengths by quantile, rate, burstiness, and what an endless prefix cache would hit."""
    asks = workload.asks
    if not asks:
        return {"requests": 0}
    found: dict[str, float] = {"requests": len(asks), "skipped": workload.skipped, "span_s": workload.span_s}
    if workload.timed:
        gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(asks)]
        mean = statistics.fmean(gaps) if gaps else 0.0
        found |= {"rate": workload.rate, "gap_cv": statistics.pstdev(gaps) / mean if mean else 0.0}
    for name in ("input", "output"):
        lengths = sorted(getattr(ask, name) for ask in asks)
        found[f"{name}_mean"] = statistics.fmean(lengths)
        for share in (50, 90, 99):
            found[f"{name}_p{share}"] = lengths[min(len(lengths) - 1, len(lengths) * share // 100)]
    if any(ask.session >= 0 for ask in asks):
        found["conversations"] = len({ask.session for ask in asks if ask.session >= 0})
    if any(ask.blocks for ask in asks):
        found |= endless_cache(asks)
    return found


def endless_cache(asks: Iterable[Ask]) -> dict[str, float]:
    """Hit rate of a prefix cache that forgets nothing, by blocks and by tokens: the most any router can reach.

    An id stands for its whole prefix, as in Mooncake's traces, so a hit is the leading run of ids seen before.
    """
    seen: set[int] = set()
    hit_blocks = blocks = hit_tokens = tokens = 0
    for ask in asks:
        hits = 0
        for block in ask.blocks:
            if block not in seen:
                break
            hits += 1
        seen.update(ask.blocks)
        hit_blocks += hits
        blocks += len(ask.blocks)
        hit_tokens += min(hits * ask.block, ask.input)
        tokens += ask.input
    return {"endless_cache_blocks": hit_blocks / max(1, blocks), "endless_cache_tokens": hit_tokens / max(1, tokens)}
