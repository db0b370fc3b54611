"""Least squares with no coefficient below zero, for a handful of columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def nnls(matrix: Array, target: Array) -> Array:
    """The vector x >= 0 [columns] that minimizes |matrix @ x - target|, matrix [rows, columns] float64.

    The active-set method on normal equations (Lawson, Hanson 1974, chapter 23; Bro, de Jong 1997): coefficients come in
    one at a time where they help most, and go out again where the free solution would be negative.
    """
    gram, right = matrix.T @ matrix, matrix.T @ target
    columns = len(right)
    found, free = np.zeros(columns), np.zeros(columns, dtype=bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(right).max(initial=0.0)))
    for _ in range(10 * columns):
        slope = right - gram @ found
        slope[free] = -np.inf
        if not columns or slope.max() <= tolerance:
            break
        free[int(slope.argmax())] = True
        while True:
            trial = np.zeros(columns)
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], right[free], rcond=None)[0]
            if (trial[free] > 0).all():
                found = trial
                break
            below = free & (trial <= 0)
            step = float((found[below] / (found[below] - trial[below])).min())
            found = found + step * (trial - found)
            free &= found > 1e-15
            found[~free] = 0.0
    return found
