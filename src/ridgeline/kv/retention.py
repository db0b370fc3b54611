"""Retention: which slots of a request stay in the cache once its prompt is computed (`--kv-retention`).

A prompt is computed in full, so its blocks can be shared and published. Then a policy bounds the slots that a request holds. Keys
keep the rotation of the position at which they were said; the slots after a dropped block move up. This module decides only how
many blocks go: `engine.leases` releases them, and the plan tells the device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.errors import ConfigError

NEVER = 1 << 62


class Cut(NamedTuple):
    """The blocks `first` .. `stop` - 1 of a table go, and `kept` blocks of slots chosen from them take their place."""

    first: int
    stop: int
    kept: int


@dataclass(frozen=True, slots=True)
class Retention:
    """A policy; the default keeps everything.

    window  attention sinks and the most recent tokens (StreamingLLM, Xiao et al. 2023), in whole blocks: nothing is copied.
    snap    the prompt is compressed once: for each head the slots that its last tokens attend to most (SnapKV, Li et al. 2024).
    heavy   as snap, and the answer too, whenever a quarter more is there (heavy hitters, H2O, Zhang et al. 2023).

    adaptive  the prompt is compressed once, to the fewest blocks with which every head keeps a share of its attention. Each
            head has the cheaper of two policies (FastGen, Ge et al. 2023). The device says how many blocks those are.

    name: as in `--kv-retention`. keep: slots that stay at least. most: slots from which a request drops some. page_tokens: slots
    of a block. sinks: leading blocks that stay. observed: last tokens whose attention chooses, and which stay; 0: none chooses.
    once: nothing is dropped after the prompt. share: of its attention that each head keeps; 0: `keep` says how many
    slots stay.
    """

    name: str = "all"
    keep: int = NEVER
    most: int = NEVER
    page_tokens: int = 1
    sinks: int = 0
    observed: int = 0
    once: bool = False
    share: float = 0.0

    def due(self, prompt_len: int, dropped: int) -> int:
        """Number of computed tokens from which a request drops slots. dropped: those that it has dropped."""
        # One step after the prompt: until then other choices of the request may come to share its blocks.
        if self.once:
            return prompt_len + 1 if prompt_len >= self.most and not dropped else NEVER
        return max(prompt_len + 1, dropped + self.most)

    def cut(self, slots: int) -> Cut:
        """What a request with so many committed slots drops."""
        size = self.page_tokens
        if not self.observed:
            return Cut(self.sinks, self.sinks + (slots - self.keep) // size, 0)
        blocks = (slots - self.observed) // size
        return Cut(0, blocks, -(-(self.keep - (slots - blocks * size)) // size))


KEEP_ALL = Retention()
_EXAMPLES = "window:sinks=4,keep=1024, snap:window=32,keep=1024, heavy:window=32,keep=1024 or adaptive:0.95"
_OBSERVED = 32
"""Last tokens that choose, unless an option says how many."""
_DEFAULTS = {"window": {"sinks": 4}, "snap": {"window": _OBSERVED}, "heavy": {"window": _OBSERVED}}


def read_retention(text: str, page_tokens: int) -> Retention:
    """Read `--kv-retention`: all, or a policy with its numbers of tokens. Raises ConfigError with the nearest that works."""
    size = page_tokens
    kind, _, options = text.partition(":")
    if kind == "all" and not options:
        return KEEP_ALL
    if kind == "adaptive":
        if not re.fullmatch(r"0?\.\d+|1(\.0*)?", options) or not float(options):
            raise _bad(
                text, "give the share of attention that every head keeps, above 0 and at most 1, as in adaptive:0.95"
            )
        most = _OBSERVED + 2 * size
        return Retention(text, most, most, size, observed=_OBSERVED, once=True, share=float(options))
    if kind not in _DEFAULTS:
        raise _bad(text, f"use all, {_EXAMPLES}")
    sizes = _sizes(text, options, _DEFAULTS[kind])
    keep, sinks, observed = sizes["keep"], -(-sizes.get("sinks", 0) // size), sizes.get("window", 0)
    least = observed + 2 * size if observed else (sinks + 1) * size
    if keep < least or (kind != "window" and not observed):
        raise _bad(text, f"keep at least {least} tokens: the first or the observed ones, and a block more")
    slack = size if kind == "window" else -(-keep // (4 * size)) * size
    return Retention(text, keep, keep + slack, size, sinks, observed, once=kind == "snap")


def _sizes(text: str, options: str, defaults: dict[str, int]) -> dict[str, int]:
    """The numbers of tokens in `sinks=4,keep=1024`."""
    sizes: dict[str, int] = {}
    for option in options.split(","):
        name, _, value = option.partition("=")
        if name not in ("keep", *defaults) or name in sizes or not value.isdecimal():
            raise _bad(text, f"give numbers of tokens, as in {_EXAMPLES}")
        sizes[name] = int(value)
    if "keep" not in sizes:
        raise _bad(text, f"say how many tokens stay, as in {_EXAMPLES}")
    return defaults | sizes


def _bad(text: str, remedy: str) -> ConfigError:
    return ConfigError(f"--kv-retention is {text!r}: {remedy}.", param="kv_retention")
