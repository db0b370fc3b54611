"""The Prometheus text format, version 0.0.4: metric families and their samples, one sample a line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def labelled(labels: Mapping[str, str]) -> str:
    """Format labels as they stand between braces."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def head(name: str, kind: str, text: str) -> str:
    """Format the HELP and TYPE lines of a family. kind: "gauge", "counter" or "histogram"."""
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


def gauge(name: str, text: str, samples: Iterable[tuple[str, float]]) -> str:
    """Format a gauge family from (labels, value) pairs."""
    return head(name, "gauge", text) + "".join(sample(name, labels, value) for labels, value in samples)


def sample(name: str, labels: str, value: float) -> str:
    return f"{name}{{{labels}}} {number(value)}\n"


def number(value: float) -> str:
    """Format a value, including infinities and NaN."""
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def merged(texts: Iterable[str]) -> str:
    """One text of several: the samples of a family stand together, as the format requires. Families of one name are of one kind."""
    families: dict[str, list[str]] = {}
    for text in texts:
        family: list[str] = []
        for line in text.splitlines(keepends=True):
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                known = name in families
                family = families.setdefault(name, [])
                if not known:
                    family.append(line)
            elif not line.startswith("# TYPE ") or not any(other.startswith("# TYPE ") for other in family[:2]):
                family.append(line)
    return "".join(line for family in families.values() for line in family)
