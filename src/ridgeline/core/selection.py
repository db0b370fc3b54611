"""Selection of pages (`--kv-selection`): which layers select, and which budgets hold."""

from __future__ import annotations

from dataclasses import replace

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


def check_budget(budget: int, page_tokens: int) -> None:
    """Raise ConfigError for a budget that is too small to choose a page."""
    if budget < LEAST_PAGES * page_tokens:
        raise _bad(budget, f"give at least {LEAST_PAGES * page_tokens}, {LEAST_PAGES} blocks of {page_tokens} tokens")


def _bad(budget: int, remedy: str) -> ConfigError:
    return ConfigError(f"--kv-selection is {budget}: {remedy}.", param="kv_selection")
