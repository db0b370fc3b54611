"""FLOPs and cache reads of the one formula in core.spec, against what transformers multiplies and what a mask lets through."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.core.config import ModelConfig
from ridgeline.core.cost import step_work
from ridgeline.core.operations import operations
from ridgeline.core.spec import DTYPE_BYTES, LayerSpec, ModelSpec
from ridgeline.models.build import build
from ridgeline.ops.reference import REFERENCE
from tests.models.families import FAMILIES, SHARING, save

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_linear_flops_are_those_of_the_products(name, tmp_path):
    theirs = save(name, tmp_path)
    spec = build(tmp_path, model=ModelConfig(), ops=REFERENCE, device=torch.device("meta")).spec
    tokens = 19
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        theirs(torch.arange(3, 3 + tokens)[None])
    counted = counter.get_flop_counts()["Global"]
    # Attention is batched there (bmm) and not causal; the pairs of a causal mask are counted below.
    assert sum(counted.get(name, 0) for name in PRODUCTS) == spec.linear_flops(tokens, tokens)


def pairs(layer: LayerSpec, start: int, tokens: int) -> list[tuple[int, int]]:
    """(query, key) positions that the layer's mask lets through."""
    return [
        (query, key)
        for query in range(start, start + tokens)
        for key in range(query + 1)
        if layer.window is None or query - key < layer.window
    ]


@pytest.mark.parametrize("name", sorted([*FAMILIES, *SHARING]))
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 40), (17, 9), (60, 1)])
def test_attention_is_what_the_mask_lets_through(name, start, tokens, tmp_path):
    save(name, tmp_path)
    spec: ModelSpec = build(tmp_path, model=ModelConfig(), ops=REFERENCE, device=torch.device("meta")).spec
    for wanted in (0, 1, tokens):
        flops = read = 0
        for index, layer in enumerate(spec.layers):
            seen = pairs(layer, start, tokens)
            if index == len(spec.layers) - 1 and 16 * wanted <= tokens:
                seen = [(query, key) for query, key in seen if query >= start + tokens - wanted]
            flops += 4 * len(seen) * layer.n_heads * layer.head_dim
            read += 2 * len({key for _, key in seen}) * layer.n_kv_heads * layer.head_dim
        work = step_work(spec, [(start, tokens)], wanted)
        assert work.attention_flops == flops and work.flops == flops + spec.linear_flops(tokens, wanted)
        assert work.kv_bytes == read * DTYPE_BYTES[spec.dtype] + tokens * spec.kv_bytes_per_token()
        parts = operations(spec, [(start, tokens)], wanted)
        assert (sum(part.flops for part in parts), sum(part.bytes for part in parts)) == (work.flops, work.bytes)
    assert spec.kv_read_bytes(start, tokens) == read * DTYPE_BYTES[spec.dtype]
