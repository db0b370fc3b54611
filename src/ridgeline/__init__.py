"""Ridgeline: an LLM inference server near the hardware's ridge."""

from importlib import import_module
from typing import Any

from ridgeline.core.version import VERSION as __version__

__all__ = ["LLM", "Completion", "LoRARequest", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "ridgeline.llm",
    "Completion": "ridgeline.llm",
    "LoRARequest": "ridgeline.llm",
    "SamplingParams": "ridgeline.core.sampling",
}


def __getattr__(name: str) -> Any:
    """Public names load where they are first used: the service imports ridgeline and must not load torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
