"""On a GPU: products of the CPU take part in the order of the stream, also in CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.formats import NUMBER_FORMATS
from ridgeline.ops.capture import CudaCapture
from ridgeline.ops.choose import choose
from ridgeline.ops.native_host import host_ops
from ridgeline.ops.table import Normed, Ops
from ridgeline.ops.triton.rows import from_host
from ridgeline.quant.format import LinearShape, Part, Share, WeightFormat
from ridgeline.quant.hosted import SIZES, Host, HostedWeight
from ridgeline.quant.integer import IntFormat
from ridgeline.quant.streamed import CudaLane, HostMemory, WeightStream
from ridgeline.quant.unquantized import UnquantizedFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPE, CPU = torch.bfloat16, torch.device("cpu")
GATED, DOWN = LinearShape(512, (Part(768, 768), Part(768, 768))), LinearShape(768, (Part(512, 512),), bias=True)


def form_of(name: str, ops: Ops, device: torch.device) -> WeightFormat:
    if not name:
        return UnquantizedFormat(ops.matmul.unquantized, DTYPE, device)
    return IntFormat(ops.matmul.integer, NUMBER_FORMATS[name], DTYPE, device)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["", "int8", "int4"])
def test_a_block_of_linears_is_what_the_gpu_computes(name: str, captured: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ops, cpu = choose(device, DTYPE), host_ops()
    assert cpu is not None
    host = Host(cpu, form_of(name, cpu.ops, CPU), ops.tokenwise.rms_norm, from_host, "silu", DTYPE)
    base = form_of(name, ops, device)
    stream = WeightStream(2, CudaLane(device), HostMemory(pinned=True), frozenset((0, 1)), SIZES[-1])
    torch.manual_seed(1)
    pairs = []
    for number, shape in enumerate((GATED, DOWN)):
        moved = HostedWeight(host, stream, number, lambda shape=shape: base.create(shape, Share()), shape)
        plain = base.create(shape, Share())
        for (part, key), expected in plain.expects.items():
            tensor = torch.randn(expected.shape, dtype=DTYPE) * 0.05
            moved.load(part, key, tensor)
            plain.load(part, key, tensor)
        pairs.append((moved, plain))
    norm = torch.rand(512, dtype=DTYPE, device=device) + 0.5

    def block(weights: list, x: torch.Tensor) -> torch.Tensor:  # type: ignore[type-arg]
        up, down = weights
        gated = up.activate(Normed(x, norm, 1e-5, False), "silu")
        return down.add(gated, x.clone()) + down.apply(gated)

    with torch.inference_mode():
        for tokens in (1, 3, 4, 16, 17):
            x = torch.randn(tokens, 512, dtype=DTYPE, device=device)
            run = CudaCapture()(lambda x=x: block([moved for moved, _ in pairs], x)) if captured else None
            for _ in range(3):
                x.normal_()
                given = block([moved for moved, _ in pairs], x) if run is None else run.replay()
                wanted = block([plain for _, plain in pairs], x)
                torch.testing.assert_close(given.float(), wanted.float(), rtol=5e-2, atol=5e-2)
