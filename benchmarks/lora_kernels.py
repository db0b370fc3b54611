"""What the adapters' kernel takes for each linear of a layer, alone, against the time of its bytes.

    python benchmarks/lora_kernels.py --set MAKER_ELEMENTS=8192 --set MANY_PIECES=2

Random adapters in slots of the largest rank, tokens in turn; CUDA graphs of many layers, each with adapters of its own, so that the
L2 cache does not hold them. The result of the first layer is compared with products of PyTorch. --set tries another value of a
constant of ops.triton.adapters in a run of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median

import torch

from ridgeline.core.adapters import padded_rank
from ridgeline.ops.adapters import Bank, Pairs
from ridgeline.ops.step import StepInputs
from ridgeline.ops.triton import adapters as kernels
from ridgeline.ops.triton.adapters import TritonAdapters

LINEARS = {
    "qkv": (4096, (4096, 1024, 1024), None),
    "out": (4096, (4096,), None),
    "gate_up": (4096, (14336, 14336), "silu"),
    "down": (14336, (4096,), None),
}
"""Inputs, outputs of each part, and activation of the linears of an 8B."""
BYTES_S = 4.2e12
"""Bytes that an H200 reads per second in a long kernel."""
REPEATS = 12


def layers(name: str, args: argparse.Namespace) -> Iterator[Pairs]:
    """The adapters of each layer."""
    inputs, outputs, _ = LINEARS[name]
    rank, most, ends = padded_rank(args.rank), padded_rank(args.most), []
    for part in outputs:
        ends.append(sum(outputs[: len(ends)]) + part)
    slots = args.adapters + 1
    for _ in range(args.layers):
        a = torch.randn(slots, len(outputs) * most * inputs, device="cuda").mul_(inputs**-0.5).bfloat16()
        b = torch.randn(slots, ends[-1] * most, device="cuda").bfloat16()
        ranks = torch.tensor([0] + [rank] * args.adapters, dtype=torch.int32, device="cuda")
        yield Pairs(a, b, inputs, tuple(ends), ranks.tolist(), ranks)


def check(got: torch.Tensor, y: torch.Tensor, x: torch.Tensor, pairs: Pairs, slots: list[int]) -> None:
    """Compare what the kernel made of y and x with products of each token, computed in float32. Raises AssertionError."""
    tokens, parts = [], len(pairs.ends)
    for token, slot in enumerate(slots):
        a, b = pairs.of(slot)
        inner = (a.float() @ x[token].float()).bfloat16().float().view(parts, -1)
        pieces = b.float().split([end - begin for begin, end in zip((0, *pairs.ends), pairs.ends, strict=False)])
        tokens.append(y[token].float() + torch.cat([piece @ inner[part] for part, piece in enumerate(pieces)]))
    expected = torch.stack(tokens)
    if got.shape != y.shape:
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(got.float(), expected, rtol=3e-2, atol=6e-2)


def kernel_us(name: str, args: argparse.Namespace) -> float:
    """Median microseconds of the kernel of one layer."""
    inputs, outputs, kind = LINEARS[name]
    ops, many = TritonAdapters(), list(layers(name, args))
    count = torch.arange(args.batch + 1, dtype=torch.int32, device="cuda")
    slots = (count[:-1] % args.adapters + 1).int()
    step = StepInputs(count[:-1], count, count[1:], count[1:], count[:-1], 1, 1, adapters=slots)
    group = ops.group(Bank(args.adapters, args.most), step)
    assert group is not None
    x = torch.randn(args.batch, inputs, device="cuda").bfloat16()
    y = torch.randn(args.batch, sum(outputs), device="cuda").bfloat16()

    got = ops.add(y.clone(), x, many[0], group) if kind is None else ops.activate(y, x, many[0], group, kind)
    check(got, y, x, many[0], slots.tolist())

    def work() -> None:
        for pairs in many:
            if kind is None:
                ops.add(y, x, pairs, group)
            else:
                ops.activate(y, x, pairs, group, kind)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / args.layers)
    assert not group.arrivals.any()
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--most", type=int, default=64, help="the largest rank of a slot")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    for setting in ["", *args.set]:
        name, _, value = setting.partition("=")
        before = getattr(kernels, name) if name else None
        if name:
            setattr(kernels, name, int(value))
        took = {linear: kernel_us(linear, args) for linear in LINEARS}
        ideal = {
            linear: args.adapters * padded_rank(args.rank) * 2 * (len(outputs) * inputs + sum(outputs)) / BYTES_S * 1e6
            for linear, (inputs, outputs, _) in LINEARS.items()
        }
        texts = [f"{linear} {took[linear]:.1f} us (bytes {ideal[linear]:.1f})" for linear in LINEARS]
        print(f"{setting or 'as it is'}: {', '.join(texts)}; layer {sum(took.values()):.1f}", flush=True)
        if name:
            setattr(kernels, name, before)


if __name__ == "__main__":
    main()
