"""Non-negative least squares for a small number of columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def nnls(matrix: Array, target: Array) -> Array:
    """Find x >= 0 that minimizes |matrix @ x - target|.

    Active-set method on the normal equations. A coefficient with the steepest gradient becomes free in each iteration. It returns
    to zero if the unconstrained solution makes it negative.

    Args:
        matrix: [rows, columns] float64.
        target: [rows] float64.
    Returns: x [columns].
    Source: Lawson, Hanson 1974, chapter 23; Bro, de Jong 1997.
    """
    gram, moment = matrix.T @ matrix, matrix.T @ target
    columns = len(moment)
    solution, free = np.zeros(columns), np.zeros(columns, dtype=bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(moment).max(initial=0.0)))
    for _ in range(10 * columns):
        gradient = moment - gram @ solution
        gradient[free] = -np.inf
        if not columns or gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            candidate = np.zeros(columns)
            candidate[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free], rcond=None)[0]
            if (candidate[free] > 0).all():
                solution = candidate
                break
            infeasible = free & (candidate <= 0)
            step = float((solution[infeasible] / (solution[infeasible] - candidate[infeasible])).min())
            solution = solution + step * (candidate - solution)
            free &= solution > 1e-15
            solution[~free] = 0.0
    return solution
