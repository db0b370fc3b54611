"""The package's public names: what users import, and nothing by accident."""

from __future__ import annotations

import ridgeline

PUBLIC = {"LLM", "Completion", "LoRARequest", "SamplingParams", "__version__"}


def test_names() -> None:
    assert set(ridgeline.__all__) == PUBLIC


def test_every_name_exists_and_says_what_it_is() -> None:
    for name in PUBLIC - {"__version__"}:
        assert getattr(ridgeline, name).__doc__


def test_version_is_a_version() -> None:
    assert all(part.isdigit() for part in ridgeline.__version__.split("."))
