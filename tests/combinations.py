"""Combinations of values, some of which `make test` runs and the others `make test-long`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest


def crossed(*values: Sequence[Any], quick: Callable[..., bool]) -> list[Any]:
    """All combinations of `values` as parameters of a test.

    quick: takes the index of each value in its sequence. A combination for which it is false carries the marker `long`.
    """
    return [
        pytest.param(
            *(each[index] for each, index in zip(values, indices, strict=True)),
            marks=[] if quick(*indices) else [pytest.mark.long],
        )
        for indices in product(*(range(len(each)) for each in values))
    ]
