"""Ridgeline: an LLM inference server near the hardware's ridge."""

__version__ = "0.1.0"
