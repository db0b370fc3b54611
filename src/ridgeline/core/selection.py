"""Selection of pages (`--kv-selection`): which layers select, and which other options hold with it."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import ModelSpec

FULL_LAYERS = 2
"""First layers that read every slot, because their attention is spread over the whole context (Quest, Tang et al. 2024)."""
LEAST_PAGES = 4
"""Pages of the smallest budget: the first, the two newest, and one that is chosen."""


def select_pages(spec: ModelSpec, budget: int) -> ModelSpec:
    """The spec with a budget of slots in each layer that selects: those after the first ones that have no window."""
    if budget < 0:
        raise _bad(budget, "give a number of tokens, or 0 to read all")
    layers = tuple(
        replace(layer, budget=budget) if index >= FULL_LAYERS and layer.window is None else layer
        for index, layer in enumerate(spec.layers)
    )
    if layers == spec.layers:
        raise _bad(budget, f"this model has no layer without a window after its first {FULL_LAYERS}: leave it out")
    return replace(spec, layers=layers)


def check_selection(budget: int, config: EngineConfig, page_tokens: int, device: str) -> None:
    """Raise ConfigError for options that selection does not hold with; each message names the nearest that works."""
    if budget < LEAST_PAGES * page_tokens:
        raise _bad(budget, f"give at least {LEAST_PAGES * page_tokens}, {LEAST_PAGES} blocks of {page_tokens} tokens")
    if device != "cpu":
        raise _bad(budget, "pages are selected on CPUs only so far: leave it out, or use --device cpu")
    if config.ranks > 1:
        raise _bad(budget, "pages are selected in one process so far: leave the parallel sizes out")
    if config.speculate not in ("", "off"):
        raise _bad(budget, "a step with drafts reads every block: leave --speculate out")
    if config.deterministic:
        raise _bad(budget, "what a token reads depends on the other rows of its step: leave --deterministic out")
    if config.kv_retention != "all":
        raise _bad(budget, "it needs all blocks of a request: use --kv-retention all")


def _bad(budget: int, remedy: str) -> ConfigError:
    return ConfigError(f"--kv-selection is {budget}: {remedy}.", param="kv_selection")
