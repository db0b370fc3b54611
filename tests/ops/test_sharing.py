"""Layers that read another layer's keys and values: queries alone are projected, and no operation changes the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.core.spec import KV_FORMATS, KvGroup, KvLayout, LayerSpec, Rope
from ridgeline.kv.store import KvStore
from ridgeline.ops import stored
from ridgeline.ops.cpu import CPU
from ridgeline.ops.cpu_invariant import CPU_INVARIANT
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.step import KvView
from ridgeline.ops.table import LayerParts, Ops
from tests.combinations import crossed
from tests.ops.test_native import MIXED, close, layer_parts, refuse, run_layers

ROWS = [(40, 7), (3, 1), (20, 20)]


def queries(
    ops: Ops, batch: Callable[..., Any], qkv_shape: Callable[..., Any], norms: bool, device: str = "cpu"
) -> None:
    """q is that of a layer that writes, without its writes; attention reads what that layer wrote."""
    case = batch(ROWS).to(device, torch.float32)
    shape = qkv_shape(6, 2, 32, 24, norms, device)
    qkv = torch.randn(28, 10 * 32, device=device)
    q, k, v = REFERENCE.attention.qkv_write(qkv.clone(), shape, case.view, case.step)
    want, _ = REFERENCE.attention.attend(q, k, v, case.view, case.step)
    before = case.view.kv.clone()
    alone = replace(shape, n_kv_heads=0, k_norm=None)
    ours, no_k, no_v = ops.attention.qkv_write(qkv[:, : 6 * 32].contiguous(), alone, case.view, case.step)
    assert no_k is None and no_v is None
    close(ours, q, torch.float32)
    out, _ = ops.attention.attend(ours, no_k, no_v, case.view, case.step)
    close(out, want, torch.float32)
    assert torch.equal(case.view.kv, before)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("table", [REFERENCE, CPU, CPU_INVARIANT], ids=lambda table: table.name)
def test_queries_in_pytorch(table: Ops, batch: Callable[..., Any], qkv_shape: Callable[..., Any], norms: bool) -> None:
    queries(table, batch, qkv_shape, norms)


@pytest.mark.parametrize("norms", [False, True])
def test_queries_in_compiled_operations(
    ops: Ops, batch: Callable[..., Any], qkv_shape: Callable[..., Any], norms: bool
) -> None:
    queries(ops, batch, qkv_shape, norms)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_queries_in_triton(
    batch: Callable[..., Any], qkv_shape: Callable[..., Any], norms: bool, kv_heads: int
) -> None:
    """kv_heads: of a program, whose queries it turns."""
    pytest.importorskip("triton")
    from ridgeline.ops.triton.qkv import qkv_write
    from ridgeline.ops.triton.table import TRITON

    def write(*arguments: Any) -> Any:
        return qkv_write(*arguments, kv_heads=kv_heads)

    table = replace(TRITON, attention=replace(TRITON.attention, qkv_write=write))
    queries(table, batch, qkv_shape, norms, "cuda" if torch.cuda.is_available() else "cpu")


def sharing(parts: LayerParts, pack: Callable[[torch.Tensor], torch.Tensor]) -> LayerParts:
    """The layer with a projection of queries alone, and random weights in it."""
    packed = pack((torch.randn(6 * 32, 96) * 96**-0.5).to(parts.attention_norm.dtype))
    bias = None if parts.qkv.bias is None else parts.qkv.bias[: 6 * 32].clone()
    shape = replace(parts.shape, n_kv_heads=0, k_norm=None)
    return replace(parts, qkv=replace(parts.qkv, packed=packed, bias=bias), shape=shape)


LAYERS = [LayerSpec(6, 2, 32, 128, Rope(), share_from=source) for source in (None, 0, None, 2)]


@pytest.mark.parametrize("name", ["float32", "int8", "int4"])
@pytest.mark.parametrize(
    ("options", "rows", "threads"),
    crossed([{}, {"bias": True, "norms": True}], [[(37, 1)], MIXED], (1, 2), quick=lambda *at: sum(at) % 2 == 0),
    indirect=["threads"],
)
def test_layers_in_one_call(
    ops: Ops,
    threads: int,
    batch: Callable[..., Any],
    rows: list[tuple[int, int]],
    options: dict[str, Any],
    name: str,
) -> None:
    """The second and the fourth layer read the caches of the first and the third."""
    case = batch(rows).to("cpu", torch.float32)
    packed, apart = [], []
    for seed in range(4):
        for kept, pack in ((packed, ops.matmul.unquantized.pack), (apart, REFERENCE.matmul.unquantized.pack)):
            torch.manual_seed(seed)
            parts = layer_parts(torch.float32, pack, options)
            kept.append(sharing(parts, pack) if seed % 2 else parts)
    stream = torch.randn(len(case.q), 96)
    views, twins = views_of(case.view, name), views_of(case.view, name)
    want = run_layers(REFERENCE, apart, stream.clone(), twins, case.step)
    out = ops.programs.layers(packed, refuse)(stream, views, case.step)
    # A sum in another order may round to the next code.
    most = 1e-6 if name == "float32" else 5e-3
    assert (out - want).norm() <= most * want.norm()
    pages = torch.arange(1, case.view.kv.shape[0])  # page 0 is where padding writes
    for view, twin in zip(views, twins, strict=True):
        ours, theirs = stored.pages_of(view, pages), stored.pages_of(twin, pages)
        assert (ours - theirs).norm() <= most * theirs.norm()


def views_of(view: KvView, name: str) -> list[KvView]:
    """The view with the zeroed caches of the four layers."""
    kv_format, tokens = KV_FORMATS[name], view.page_tokens
    group = KvGroup((0, 2), None, sum(layer.kv_bytes(kv_format) for layer in LAYERS))
    layout = KvLayout((group,), tokens, group.token_bytes * tokens, kv_format)
    store = KvStore(layout, LAYERS, view.kv.shape[0] - 1, torch.device("cpu"))
    caches = zip(store.kv, store.scales, strict=True)
    return [replace(view, kv=kv, scales=scales, format=kv_format) for kv, scales in caches]
