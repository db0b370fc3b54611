"""Attention on any device equals a plain softmax written out token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ridgeline.ops.cpu import CPU
from ridgeline.ops.reference import REFERENCE

DECODE = [(1, 1), (17, 1), (64, 1), (33, 1)]
MIXED = [(40, 7), (1, 1), (90, 90), (33, 1), (70, 5), (100, 68)]

CASES: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "decode": (DECODE, {}),
    "decode-padded": ([*DECODE, (0, 1)], {}),
    "mixed": (MIXED, {"padding": 3}),
    "whole-prompts": ([(20, 20), (31, 31)], {}),
    "one-row": ([(37, 1)], {}),
    "verify": ([(40, 5), (60, 5), (9, 5)], {}),
    "mha": (MIXED, {"heads": 2, "kv_heads": 2}),
    "mqa": (MIXED, {"heads": 5, "kv_heads": 1, "head_dim": 40}),
    "window": (MIXED, {"window": 19}),
    "window-decode": (DECODE, {"window": 19}),
    "softcap": (MIXED, {"softcap": 2.0}),
    "softcap-window": (MIXED, {"softcap": 2.0, "window": 9}),
    "tree": (MIXED, {"tree": True}),
    "tree-64": ([(80, 64), (64, 64)], {"tree": True}),
    "tree-window": (MIXED, {"tree": True, "window": 9}),
    "compacted-window": (MIXED, {"compacted": True, "window": 30}),
    "layer-major": (MIXED, {"layer_major": True}),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, batch: Callable[..., Any]) -> Any:
    rows, fields = CASES[request.param]
    return batch(rows, **fields)


def by_hand(case: Any, token: int) -> tuple[torch.Tensor, float]:
    """One query token of one head at a time, keys looked up slot by slot: (out [Hq, d], lse of head 0)."""
    step, view = case.step, case.view
    index = int(step.row_of[token])
    first, stop = int(step.q_start[index]), int(step.q_start[index + 1])
    row, length = int(step.rows[index]), int(step.length[index])
    start, place = length - (stop - first), token - first
    slots = []
    for slot in range(start + place + 1):
        among = slot - start
        said = slot if step.key_positions is None else int(step.key_positions[row, slot])
        if among >= 0:
            said = int(step.position[first + among])
            narrowed = step.ancestors is not None and among != place and among < 64
            if narrowed and not int(step.ancestors[token]) >> among & 1:
                continue
        if view.window is None or int(step.position[token]) - said < view.window:
            slots.append(slot)
    heads, kv_heads = case.q.shape[1], view.kv.shape[2]
    out, first_lse = [], 0.0
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores, values = [], []
        for slot in slots:
            page = int(view.table[row, slot // view.page_tokens])
            key, value = view.kv[page, :, kv_head, slot % view.page_tokens].double()
            score = float(case.q[token, head].double() @ key) * view.scale
            scores.append(score if view.softcap is None else view.softcap * math.tanh(score / view.softcap))
            values.append(value)
        weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)
        out.append((weights.unsqueeze(1) * torch.stack(values)).sum(0))
        if head == 0:
            first_lse = float(torch.logsumexp(torch.tensor(scores, dtype=torch.float64), 0))
    return torch.stack(out), first_lse


def test_reference_equals_attention_by_hand(case: Any) -> None:
    out, lse = REFERENCE.attention.attend(case.q, case.k, case.v, case.view, case.step)
    assert lse is not None
    owned = int(case.step.q_start[-1])
    for token in [*range(0, owned, 7), owned - 1]:
        if case.step.length[case.step.row_of[token]] == 0:
            continue
        want, want_lse = by_hand(case, token)
        torch.testing.assert_close(out[token].double(), want, atol=2e-5, rtol=1e-4)
        assert float(lse[token, 0]) == pytest.approx(want_lse, abs=1e-4)


def test_cpu_attention_equals_reference(case: Any) -> None:
    want, lse = REFERENCE.attention.attend(case.q, case.k, case.v, case.view, case.step)
    for _ in range(2):  # the second time from what the step derived
        out, _ = CPU.attention.attend(case.q, case.k, case.v, case.view, case.step)
        assert lse is not None
        seen = torch.isfinite(lse[:, 0])
        torch.testing.assert_close(out[seen], want[seen], atol=2e-5, rtol=1e-4)


def test_cpu_attention_in_bf16(case: Any) -> None:
    low = case.to("cpu", torch.bfloat16)
    want, lse = REFERENCE.attention.attend(*(tensor.double() for tensor in (low.q, low.k, low.v)), low.view, low.step)
    out, _ = CPU.attention.attend(low.q, low.k, low.v, low.view, low.step)
    assert lse is not None
    seen = torch.isfinite(lse[:, 0])
    assert (out[seen].double() - want[seen]).norm() < 1e-2 * want[seen].norm()


def test_slots_nobody_sees_may_hold_anything(batch: Callable[..., Any]) -> None:
    """Pages of others, of nobody and behind the window are never mixed in, not even with weight 0 times NaN."""
    clean = batch(MIXED, window=9, junk=0.0)
    dirty = batch(MIXED, window=9, junk=float("nan"))
    want, _ = REFERENCE.attention.attend(clean.q, clean.k, clean.v, clean.view, clean.step)
    out, _ = REFERENCE.attention.attend(dirty.q, dirty.k, dirty.v, dirty.view, dirty.step)
    assert torch.equal(out, want)
