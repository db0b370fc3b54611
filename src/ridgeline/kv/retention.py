"""Retention: which slots of a request stay in the cache once its prompt is computed (`--kv-retention`).

A prompt is computed in full, so its blocks can be shared and published. From its last token on, a policy bounds the slots that a
request holds. Keys keep the rotation of the position at which they were said; the slots after a dropped block move up.
This module decides only; `engine.leases` releases the blocks, and the plan tells the device (`StepPlan.drops`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import KvLayout

_UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Retention:
    """Attention sinks and the most recent tokens (StreamingLLM, Xiao et al. 2023), in whole blocks, so that nothing is copied.

    name: as in `--kv-retention`; the default keeps everything. sinks: leading blocks that stay. keep: slots that stay at least.
    most: slots from which a request drops blocks. page_tokens: slots of a block.
    """

    name: str = "all"
    sinks: int = 0
    keep: int = _UNBOUNDED
    most: int = _UNBOUNDED
    page_tokens: int = 1

    def dropped(self, slots: int) -> range:
        """The blocks, by index in its tables, that a request with this many committed slots drops."""
        return range(self.sinks, self.sinks + max(0, slots - self.keep) // self.page_tokens)


KEEP_ALL = Retention()


def read_retention(config: EngineConfig, layout: KvLayout, drafter: str) -> Retention:
    """Read `--kv-retention`: all, or window:keep=TOKENS[,sinks=TOKENS].

    Args:
        drafter: name of the drafter on the device, or "".
    Raises:
        ConfigError: names the option and the nearest that works.
    """
    text = config.kv_retention
    kind, _, options = text.partition(":")
    if kind == "all" and not options:
        return KEEP_ALL
    if kind != "window":
        raise _bad(text, "use all, or window:sinks=4,keep=1024")
    sizes = {"sinks": 4} | _sizes(text, options)
    size = layout.page_tokens
    sinks = -(-sizes["sinks"] // size)
    least = (sinks + 1) * size
    if sizes["keep"] < least:
        raise _bad(text, f"keep at least {least} tokens, the blocks of the sinks and one more")
    if any(group.window is not None for group in layout.groups):
        raise _bad(text, "layers of this model have windows of their own, which bound their cache already: use all")
    if config.deterministic:
        raise _bad(text, "a preempted request is computed again with all its keys, so --deterministic needs all")
    if drafter == "draft":
        raise _bad(text, "a draft model may read tokens later, when they are dropped: use --speculate reference")
    return Retention(text, sinks, sizes["keep"], sizes["keep"] + size, size)


def _sizes(text: str, options: str) -> dict[str, int]:
    """The numbers of tokens in `sinks=4,keep=1024`."""
    sizes: dict[str, int] = {}
    for option in options.split(","):
        name, _, value = option.partition("=")
        if name not in ("sinks", "keep") or name in sizes or not value.isdecimal():
            raise _bad(text, "give numbers of tokens, as in window:sinks=4,keep=1024")
        sizes[name] = int(value)
    if "keep" not in sizes:
        raise _bad(text, "say how many tokens stay, as in window:sinks=4,keep=1024")
    return sizes


def _bad(text: str, remedy: str) -> ConfigError:
    return ConfigError(f"--kv-retention is {text!r}: {remedy}.", param="kv_retention")
