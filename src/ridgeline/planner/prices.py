"""Prices of input, cached and output tokens that follow from one measured load: together they are its bill.

A device sells two things, its time and the space of its cache. A second of the entire device and a second of the entire cache count
the same here, and each token counts with what it occupies of both:

- input token: its share of the steps that compute the prompt, and its place in the cache until the request ends,
- cached token: its place in the cache likewise. It is not computed,
- output token: its share of the steps after the first token, and its place from then on, half of that time on average,
- each prompt token, cached or not: the lookup of its prefix.

Blocks of the prefix cache that no request holds cost nothing: they are free for any request. Idle time is paid for in proportion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import ConfigError

LOOKUP_S = 5e-8
"""Seconds to look up a prompt token: hash of its block and search (benchmarks/economics.py, row prefix-lookup)."""
_REMEDY = "record it again: `ridgeline bench run URL` against a Ridgeline server of this version"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a load."""

    input: int
    """Prompt tokens without the cached ones."""
    cached: int
    output: int


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Seconds of the device (or of its entire cache) that one token of each kind occupies."""

    input_s: float
    cached_s: float
    output_s: float

    def total_s(self, tokens: Tokens) -> float:
        """Seconds of all tokens of a load."""
        return tokens.input * self.input_s + tokens.cached * self.cached_s + tokens.output * self.output_s


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per million tokens."""

    input: float
    cached: float
    output: float

    def bill(self, tokens: Tokens) -> float:
        """Dollars of a load."""
        return (tokens.input * self.input + tokens.cached * self.cached + tokens.output * self.output) / 1e6


def prices(bill: float, tokens: Tokens, costs: TokenCosts) -> Prices:
    """Divide a bill, in dollars, among the tokens of a load. Raises ConfigError if no token costs anything."""
    total_s = costs.total_s(tokens)
    if total_s <= 0:
        raise ConfigError(f"The run has no tokens with a measured device time: {_REMEDY}.", param="run")
    usd = bill / total_s * 1e6
    return Prices(usd * costs.input_s, usd * costs.cached_s, usd * costs.output_s)


def token_costs(records: Sequence[Mapping[str, Any]], cache_tokens: float, lookup_s: float = LOOKUP_S) -> TokenCosts:
    """Mean cost of the tokens of recorded requests.

    A request's device seconds are its shares of steps, by query tokens; those until its first token belong to its prompt.

    Args:
        records: rows of GET /requests.
        cache_tokens: tokens that the KV cache of the device holds.
        lookup_s: seconds to look up one prompt token.
    Raises:
        ConfigError: no request has tokens, or an older version recorded them, without device seconds.
    """
    if any("spent" not in record for record in records):
        raise ConfigError(f"The run lacks the device seconds of its requests: {_REMEDY}.", param="run")
    prompts, cached, outputs = (sum(record[name] for record in records) for name in _COUNTS)
    if prompts <= cached or not outputs or cache_tokens <= 0:
        raise ConfigError(f"The run has no request with prompt and output tokens in a cache: {_REMEDY}.", param="run")
    prompt_s = sum(record["spent"]["prompt_device_s"] for record in records)
    output_s = sum(_output_s(record["spent"]) for record in records)
    # Cached and computed prompt tokens are held alike, so a cached token never costs more than a computed one.
    held_s = _mean((_held_s(record), record["prompt_tokens"]) for record in records) / cache_tokens
    output_held_s = (
        _mean((record["spent"]["decode_s"] / 2, record["output_tokens"]) for record in records) / cache_tokens
    )
    return TokenCosts(
        input_s=prompt_s / (prompts - cached) + held_s + lookup_s,
        cached_s=held_s + lookup_s,
        output_s=output_s / outputs + output_held_s,
    )


_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens")


def _output_s(spent: Mapping[str, float]) -> float:
    """Device seconds of a request after its first token."""
    return max(0.0, spent["device_s"] - spent["prompt_device_s"])


def _held_s(record: Mapping[str, Any]) -> float:
    """Seconds that a request holds its prompt in the cache: from its admission to its end."""
    return max(0.0, record["e2e_s"] - record["spent"]["queue_s"])


def _mean(pairs: Iterable[tuple[float, int]]) -> float:
    """Mean of values by weight. pairs: (value, weight)."""
    values = list(pairs)
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
