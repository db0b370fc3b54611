"""Warm-up through one layer of each kind calls the same operations, with tensors of the same form, as through all layers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.config import ModelConfig
from ridgeline.engine.warm_up import warm_up_forward
from ridgeline.models.build import build
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.step import KvView
from tests.engine.runners import make_step
from tests.models.families import save

Noted = set[str]


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), str(value.dtype)
    if isinstance(value, KvView):
        return _form(value.kv), _form(value.table), value.window, value.softcap, value.scale
    return value if isinstance(value, int | float | str) else type(value).__name__


def _noting(name: str, operation: Callable[..., Any], noted: Noted) -> Callable[..., Any]:
    @wraps(operation)
    def call(*given: Any, **named: Any) -> Any:
        noted.add(f"{name} {[_form(operand) for operand in (*given, *named.values())]}")
        return operation(*given, **named)

    return call


def _all_noting(interface: Any, noted: Noted) -> Any:
    """The interface with every operation noting its calls."""
    operations = {field.name: getattr(interface, field.name) for field in fields(interface)}
    return replace(
        interface,
        **{name: _noting(name, operation, noted) for name, operation in operations.items() if callable(operation)},
    )


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "gemma3", "cla"])
def test_one_layer_of_each_kind_launches_what_all_launch(family: str) -> None:
    noted: Noted = set()
    with tempfile.TemporaryDirectory() as name:
        save(family, Path(name))
        ops = replace(
            REFERENCE,
            tokenwise=_all_noting(REFERENCE.tokenwise, noted),
            attention=_all_noting(REFERENCE.attention, noted),
            matmul=replace(REFERENCE.matmul, unquantized=_all_noting(REFERENCE.matmul.unquantized, noted)),
        )
        model = build(Path(name), model=ModelConfig(max_model_len=192), ops=ops, device=torch.device("cpu"))
    step = make_step(model)
    few = step.one_layer_of_each_kind()
    assert len(few.decoder.layers) < len(step.decoder.layers)
    seen = []
    with torch.inference_mode():
        for work in (step, few):
            noted.clear()
            warm_up_forward(work, [1, 20, 7])
            seen.append(set(noted))
    assert seen[0] == seen[1] and seen[0]
    assert len(step.decoder.layers) == len(model.spec.layers)
