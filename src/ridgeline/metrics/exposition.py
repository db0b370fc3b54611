"""Prometheus' text format, version 0.0.4, as far as we need it: families of samples, one line each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def labelled(labels: Mapping[str, str]) -> str:
    """Labels as they stand in braces."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def head(name: str, kind: str, text: str) -> str:
    """The lines before a family's samples. kind: "gauge", "counter" or "histogram"."""
    told = text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {told}\n# TYPE {name} {kind}\n"


def gauge(name: str, text: str, samples: Iterable[tuple[str, float]]) -> str:
    """A family of gauges from (labels, value) pairs."""
    return head(name, "gauge", text) + "".join(sample(name, labels, value) for labels, value in samples)


def sample(name: str, labels: str, value: float) -> str:
    return f"{name}{{{labels}}} {number(value)}\n"


def number(value: float) -> str:
    """A value as every reader of the format takes it."""
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
