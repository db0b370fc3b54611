"""Catch-up of a draft model: it reads tokens that rows gained while drafting was off."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ridgeline.core.plan import StepPlan
from ridgeline.engine.batch import blank
from ridgeline.engine.shape import StepShape
from ridgeline.speculation.state import UNREAD_TAIL


def is_behind(plan: StepPlan) -> bool:
    """Whether a draft model must read skipped tokens of a row before it drafts."""
    return max(plan.unread, default=0) > UNREAD_TAIL


def unread_steps(plan: StepPlan, padded: StepShape | None) -> Iterator[tuple[np.ndarray, StepShape]]:
    """Packed steps, with their shapes, that read the unread tokens of the plan's rows, without each row's last UNREAD_TAIL tokens.

    padded: the shape of every step, which keeps one row for padding; None: one step without padding.
    """
    if not is_behind(plan):
        return
    rows = np.frombuffer(plan.rows, dtype=np.int32)[np.frombuffer(plan.samples, dtype=np.int8) > 0]
    counts = np.maximum(np.frombuffer(plan.unread, dtype=np.int32) - UNREAD_TAIL, 0)
    rows, counts = rows[counts > 0], counts[counts > 0]
    most = len(rows) if padded is None else padded.rows - 1
    for begin in range(0, len(rows), max(1, most)):
        part = slice(begin, begin + most)
        yield from _reading(rows[part], counts[part], padded or reading(len(rows), int(counts.sum())))


def reading(rows: int, tokens: int) -> StepShape:
    """Shape of a step in which only a draft model reads the query tokens and no row draws."""
    return StepShape(rows, 0, tokens, tokens)


def _reading(rows: np.ndarray, counts: np.ndarray, shape: StepShape) -> Iterator[tuple[np.ndarray, StepShape]]:
    """Packed steps that read `counts` tokens of device rows (both int32 [n]), those before the last UNREAD_TAIL."""
    row_of = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    # Tokens that are read again have places below 0 (ops.rows.Spread).
    place = np.arange(len(row_of)) - np.cumsum(counts)[row_of] - 1
    for first in range(0, len(row_of), shape.tokens):
        part = slice(first, first + shape.tokens)
        packed, into = blank(shape)
        count = len(row_of[part])
        into["rows"][: len(rows)] = rows
        into["q_start"][1:] = count
        into["q_start"][1 : len(rows) + 1] = np.cumsum(np.bincount(row_of[part], minlength=len(rows)))
        into["n_query"][row_of[part]] = place[part] + 1
        into["row_of"][:] = shape.rows - 1
        into["row_of"][:count], into["place"][:count] = row_of[part], place[part]
        yield packed, shape
