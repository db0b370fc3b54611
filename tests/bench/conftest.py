"""The tiny model of the commands' tests."""

from __future__ import annotations

from ..cli.conftest import tiny

__all__ = ["tiny"]
