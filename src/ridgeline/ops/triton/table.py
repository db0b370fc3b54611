"""The table of Triton operations."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.spec import QUANTIZED_KV
from ridgeline.ops.reference import mixed_inputs
from ridgeline.ops.table import (
    AttentionOps,
    LayerParts,
    MatmulOps,
    Ops,
    Programs,
    RunLayers,
    SamplerOps,
    TokenwiseOps,
)
from ridgeline.ops.triton.activation import activate, capped
from ridgeline.ops.triton.adapters import TritonAdapters
from ridgeline.ops.triton.attention import attention
from ridgeline.ops.triton.blocks import BLOCK_TRITON
from ridgeline.ops.triton.experts import TritonExperts
from ridgeline.ops.triton.launch import gluon
from ridgeline.ops.triton.linears import FP8_TRITON, FP8_WEIGHT_TRITON, INT_TRITON, UNQUANTIZED, W8A8_TRITON
from ridgeline.ops.triton.norm import norm_add, place, rms_norm
from ridgeline.ops.triton.qkv import qkv_write
from ridgeline.ops.triton.rows import advance, from_host, gather, to_host
from ridgeline.ops.triton.sample import draw, sample, sample_among
from ridgeline.ops.triton.selective import selecting
from ridgeline.ops.triton.verify import last, verify
from ridgeline.ops.triton.w8a8 import round_inliers


def layers(parts: Sequence[LayerParts], run: RunLayers) -> RunLayers:
    """See Programs. Large layers run one token in a single kernel (one_token)."""
    module = gluon(parts[0].attention_norm.device, "one_token")
    return run if module is None or not module.knows(parts) else module.OneToken(parts, run)


TOKENWISE = TokenwiseOps(rms_norm, norm_add, activate, place, cap=capped)
TRITON = Ops(
    name="triton",
    tokenwise=TOKENWISE,
    attention=AttentionOps(qkv_write, attention, frozenset(QUANTIZED_KV), selecting),
    matmul=MatmulOps(
        unquantized=UNQUANTIZED,
        fp8=FP8_TRITON,
        fp8_weight=FP8_WEIGHT_TRITON,
        integer=INT_TRITON,
        w8a8=W8A8_TRITON,
        mixed=mixed_inputs(INT_TRITON, UNQUANTIZED, TOKENWISE, round_inliers),
        blocks=BLOCK_TRITON,
    ),
    adapters=lambda dtype: TritonAdapters(),
    sampler=SamplerOps(
        sample=sample,
        sample_among=sample_among,
        draw=draw,
        gather=gather,
        advance=advance,
        verify=verify,
        last=last,
        to_host=to_host,
    ),
    programs=Programs(layers=layers),
    experts=TritonExperts(),
    from_host=from_host,
)
