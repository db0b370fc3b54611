"""Workloads: requests with lengths and arrival times, from a trace or generated."""

from __future__ import annotations

import hashlib
import math
import random
import statistics
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise

from ridgeline.core.errors import ConfigError

PREFIX_BLOCK = -1
"""Id of the block that all prompts of a generated workload share."""


HASHED_TOKENS, MAX_HASHES = 64, 256
"""Tokens of a block of `prefix_hashes`, and blocks of a prompt that are hashed."""


def prefix_hashes(tokens: Sequence[int]) -> tuple[int, ...]:
    """A hash for each full block of a prompt's tokens, which covers all tokens before it. Equal prefixes have equal hashes, so
    recorded requests show what they share. They are CRC-32: they tell nothing about a prompt that is not known already."""
    hashes, value = [], 0
    for first in range(0, min(len(tokens), HASHED_TOKENS * MAX_HASHES) - HASHED_TOKENS + 1, HASHED_TOKENS):
        value = zlib.crc32(array("i", tokens[first : first + HASHED_TOKENS]).tobytes(), value)
        hashes.append(value)
    return tuple(hashes)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request to send."""

    at_s: float
    """Seconds after the start."""
    input: int
    """Prompt tokens."""
    output: int
    """Output tokens."""
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's first blocks. Equal ids stand for equal tokens. Tokens after the blocks are unique to the request."""
    block: int = 512
    """Tokens of a block. The last block is cut to `input`."""
    text: str = ""
    """The prompt, if the trace contains it."""
    session: int = -1
    """Number of the request's conversation, -1 for none. A turn is sent after the previous answer has ended."""
    history: tuple[str, ...] = ()
    """Messages before `text`; user and assistant alternate."""
    client: str = ""
    """Who sends it, in simulations: clients share the service when requests wait."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their times."""

    name: str
    requests: tuple[RequestSpec, ...]
    timed: bool = False
    """The requests have arrival times."""
    skipped: int = 0
    """Rows of the trace that are not requests, such as logged failures."""

    @property
    def span_s(self) -> float:
        """Seconds from the first request to the last."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    @property
    def rate(self) -> float:
        """Mean requests per second. Infinite if all requests arrive at once."""
        return (len(self.requests) - 1) / self.span_s if self.span_s > 0 else math.inf

    @property
    def fingerprint(self) -> str:
        """A hash of the requests without their times. Runs with equal fingerprints can be compared in pairs."""
        digest = hashlib.sha256()
        for request in self.requests:
            digest.update(
                repr(
                    (request.input, request.output, request.blocks, request.block, request.text, request.history)
                ).encode()
            )
        return digest.hexdigest()[:16]

    def within(self, context: int) -> Workload:
        """Keep the requests that fit the context. A conversation ends before the first turn that does not fit."""
        return replace(self, requests=tuple(compress(self.requests, fits(self.requests, context))))

    def first(self, count: int | None = None, seconds: float | None = None) -> Workload:
        """Keep the first `count` requests, and of these the ones within `seconds` after the first."""
        requests = self.requests[:count]
        if seconds is not None and requests:
            requests = tuple(request for request in requests if request.at_s - requests[0].at_s <= seconds)
        return replace(self, requests=requests)

    def time_scaled(self, scale: float) -> Workload:
        """Multiply all times, relative to the first one, by `scale` (0.5: twice as fast)."""
        start = self.requests[0].at_s if self.requests else 0.0
        return replace(
            self, requests=tuple(replace(request, at_s=(request.at_s - start) * scale) for request in self.requests)
        )

    def at_rate(self, rate: float) -> Workload:
        """Scale the times to a mean of `rate` requests per second. The burstiness stays."""
        return self.time_scaled(0.0 if math.isinf(rate) else self.rate / rate)

    def at(self, times: Sequence[float]) -> Workload:
        """Replace the times."""
        requests = tuple(replace(request, at_s=at) for request, at in zip(self.requests, times, strict=True))
        return replace(self, requests=requests, timed=True)


def fits(requests: Iterable[RequestSpec], context: float) -> list[bool]:
    """Return for each request whether it fits the context. Turns after one that does not fit do not fit either."""
    fitting: list[bool] = []
    ended: set[int] = set()
    for request in requests:
        fitting.append(request.session not in ended and request.input + request.output <= context)
        if not fitting[-1] and request.session >= 0:
            ended.add(request.session)
    return fitting


def conversations(requests: Sequence[RequestSpec]) -> list[list[int]]:
    """Group the indices of requests by conversation. A request without a conversation is a group of its own."""
    turns: list[list[int]] = []
    by_session: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        if request.session in by_session:
            by_session[request.session].append(index)
            continue
        turns.append([index])
        if request.session >= 0:
            by_session[request.session] = turns[-1]
    return turns


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Draw arrival times of `count` requests at a mean of `rate` per second. The first is 0.

    Args:
        burstiness: Shape of the gamma distribution of gaps, whose coefficient of variation is 1 / sqrt(shape). 1 is a Poisson
            process, less gives bursts, infinity a constant rate.
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
    """Generate `count` requests with random lengths.

    Args:
        lengths: (input, output), each "512" or "100-1000" (uniform).
        prefix: Length of a prefix that all prompts share, part of the input length.
    Raises:
        ConfigError: A length is invalid, or the prefix exceeds the input length.
    """
    source = random.Random(f"lengths {seed}")
    low_high = [_parse_range(name, text) for name, text in zip(("input_len", "output_len"), lengths, strict=True)]
    if prefix > low_high[0][0]:
        raise ConfigError(
            f"--prefix-len is {prefix}, which exceeds --input-len {lengths[0]}: lower it.", param="prefix_len"
        )
    requests = []
    for _ in range(count):
        n_input, n_output = (source.randint(low, high) for low, high in low_high)
        requests.append(RequestSpec(0.0, n_input, n_output, (PREFIX_BLOCK,) if prefix else (), prefix or 512))
    return Workload(f"random {lengths[0]}/{lengths[1]}", tuple(requests))


def _parse_range(name: str, text: str) -> tuple[int, int]:
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
    """Compute figures of a workload: quantiles of lengths, rate, burstiness and the hit rate of an unlimited prefix cache."""
    requests = workload.requests
    if not requests:
        return {"requests": 0}
    figures: dict[str, float] = {"requests": len(requests), "skipped": workload.skipped, "span_s": workload.span_s}
    if workload.timed:
        gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(requests)]
        mean = statistics.fmean(gaps) if gaps else 0.0
        figures |= {"rate": workload.rate, "gap_cv": statistics.pstdev(gaps) / mean if mean else 0.0}
    for name in ("input", "output"):
        lengths = sorted(getattr(request, name) for request in requests)
        figures[f"{name}_mean"] = statistics.fmean(lengths)
        for share in (50, 90, 99):
            figures[f"{name}_p{share}"] = lengths[min(len(lengths) - 1, len(lengths) * share // 100)]
    if any(request.session >= 0 for request in requests):
        figures["conversations"] = len({request.session for request in requests if request.session >= 0})
    if any(request.blocks for request in requests):
        figures |= endless_cache(requests)
    return figures


def endless_cache(requests: Iterable[RequestSpec]) -> dict[str, float]:
    """Compute the hit rate of an unlimited prefix cache, by blocks and by tokens. It is an upper bound for any router.

    A block id identifies its whole prefix, as in Mooncake's traces. So the hit of a request is its leading run of known ids.
    """
    seen: set[int] = set()
    hit_blocks = blocks = hit_tokens = tokens = 0
    for request in requests:
        hits = 0
        for block in request.blocks:
            if block not in seen:
                break
            hits += 1
        seen.update(request.blocks)
        hit_blocks += hits
        blocks += len(request.blocks)
        hit_tokens += min(hits * request.block, request.input)
        tokens += request.input
    return {"endless_cache_blocks": hit_blocks / max(1, blocks), "endless_cache_tokens": hit_tokens / max(1, tokens)}
