"""The kernel of all layers over several GPUs, for gpu_rank: each rank has the share of three layers that it would load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import torch

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Fp8Matrix, LayerParts, Matrix, QkvShape
from ridgeline.ops.triton import one_token
from ridgeline.ops.triton.layers_keys import streamable
from ridgeline.ops.triton.layers_table import places
from ridgeline.parallel.gpu import GpuGroup
from tests.ops.conftest import Case, Shape, build
from tests.ops.test_one_token import off, one_after_the_other, random_layer

HEADS, KV_HEADS, DIM, MODEL, FEATURES = 32, 8, 128, 4096, 14336
LENGTHS = (1, 190, 1300)
LAUNCHES = 200


def refused(stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
    """In the place of the layers one after the other: says what the kernel's conditions depend on."""
    caches = [view.kv for view in views]
    facts = {
        "stream": tuple(stream.shape),
        "caches": [(cache.dtype, tuple(cache.shape), cache.stride(), hex(cache.data_ptr())) for cache in caches],
        "places": (places(caches).step, places(caches).places),
        "streamable": streamable(caches),
        "positions of keys": step.key_positions is not None,
        "others": [(view.softcap, view.scale, view.page_tokens, view.table.stride()) for view in views],
    }
    raise AssertionError(f"the kernel took nothing: {facts}")


def cut(matrix: Matrix, rank: int, size: int, parts: tuple[int, ...]) -> Matrix:
    """This rank's share. parts: rows of the merged matrices of which each rank has a share; none: it has a share of the inputs."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        if not parts:
            return tensor
        return torch.cat([part.chunk(size)[rank] for part in tensor.split(parts)]).contiguous()

    def shared(tensor: torch.Tensor) -> torch.Tensor:
        return rows(tensor) if parts else tensor.chunk(size, 1)[rank].contiguous()

    packed = matrix.packed
    bias = None if matrix.bias is None or (rank and not parts) else rows(matrix.bias)
    bias = torch.zeros_like(matrix.bias) if bias is None and matrix.bias is not None else bias
    if isinstance(packed, Fp8Matrix):
        return Matrix(Fp8Matrix(shared(packed.values), rows(packed.scales), packed.counters), bias)
    assert isinstance(packed, torch.Tensor)
    return Matrix(shared(packed), bias)


def share(layer: LayerParts, group: GpuGroup, rank: int, size: int) -> LayerParts:
    heads, kv = HEADS * DIM, KV_HEADS * DIM
    return replace(
        layer,
        qkv=cut(layer.qkv, rank, size, (heads, kv, kv)),
        shape=replace(layer.shape, n_heads=HEADS // size, n_kv_heads=KV_HEADS // size),
        out=cut(layer.out, rank, size, ()),
        gate_up=cut(layer.gate_up, rank, size, (FEATURES, FEATURES)),
        down=cut(layer.down, rank, size, ()),
        peers=group.peers,
    )


def launches(run: one_token.OneToken, stream: torch.Tensor, views: list[Any], case: Case, rank: int) -> torch.Tensor:
    """Results of many launches without a pause, then of a graph. The ranks are late by turns."""
    results = []
    for turn in range(LAUNCHES):
        if turn % 3 == rank % 3:
            torch.cuda._sleep(20_000 * (turn % 7))
        results.append(run(stream.clone(), views, case.step))
    torch.cuda.synchronize()
    graph, static = torch.cuda.CUDAGraph(), stream.clone()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run(static, views, case.step)
    for _ in range(LAUNCHES):
        static.copy_(stream)
        graph.replay()
        results.append(static.clone())
    torch.cuda.synchronize()
    return torch.cat(results)


def layers(group: GpuGroup, rank: int, size: int) -> dict[str, tuple[float, int, bool]]:
    """By number format, biases and length: the distance to float64 on one GPU, a CRC, and whether all launches gave the same."""
    results = {}
    for form, bias in (("bf16", False), ("fp8", False), ("bf16", True)):
        torch.manual_seed(0)
        turning = torch.randn(26 * 256, 2, DIM // 2, device="cuda")
        shape = QkvShape(HEADS, KV_HEADS, DIM, turning, None, None, 1e-6, False)
        whole = [random_layer(MODEL, FEATURES, shape, form, bias) for _ in range(3)]
        parts = [share(layer, group, rank, size) for layer in whole]
        assert one_token.knows(parts)
        run, stream = one_token.OneToken(parts, refused), torch.randn(1, MODEL, device="cuda").to(torch.bfloat16)
        for length in LENGTHS:
            case = build([(length, 1)], Shape(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, junk=1.0))
            case = case.to("cuda", torch.bfloat16)
            twins = [replace(case.view, kv=case.view.kv.clone()) for _ in whole]
            # In one piece of memory, as the pool of an engine: the kernel addresses all caches from the lowest one.
            pool = torch.stack([case.view.kv.chunk(size, 2)[rank]] * len(whole))
            views = [replace(case.view, kv=kv) for kv in pool]
            if length == LENGTHS[0]:
                group.mute(True)  # alone, nothing waits for another rank, and nothing changes for later launches
                if rank == 0:
                    run(stream.clone(), views, case.step)
                    torch.cuda.synchronize()
                group.mute(False)
            joined = launches(run, stream, views, case, rank)
            want = one_after_the_other(whole, stream[0].double(), twins, case.step)
            crc = crc32(joined[0].view(torch.uint8).cpu().numpy().tobytes())
            case_name = f"{form}{' with biases' if bias else ''}, {length} tokens"
            results[case_name] = (off(joined[0], want), crc, bool((joined == joined[0]).all()))
    return results


def waiting(group: GpuGroup, size: int) -> Callable[[], object]:
    """A function that launches the kernel on the first rank, which then waits for the others. It allocates and copies nothing."""
    turning = torch.randn(256, 2, DIM // 2, device="cuda")
    shape = QkvShape(HEADS, KV_HEADS, DIM, turning, None, None, 1e-6, False)
    parts = [share(random_layer(MODEL, FEATURES, shape, "bf16", False), group, 0, size)]
    case = build([(1, 1)], Shape(heads=HEADS // size, kv_heads=KV_HEADS // size, head_dim=DIM, junk=1.0))
    case = case.to("cuda", torch.bfloat16)
    stream = torch.zeros(1, MODEL, dtype=torch.bfloat16, device="cuda")
    launch = partial(one_token.OneToken(parts, refused), stream, [case.view], case.step)
    group.mute(True)
    launch()
    group.mute(False)
    torch.cuda.synchronize()
    return launch
