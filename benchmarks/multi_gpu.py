"""A model over two GPUs of one host against one of them, and the time of a sum by its size.

    python benchmarks/multi_gpu.py --out benchmarks/results/multi_gpu.json [--only sums,tensor,tensor-fp8,stages,context]
    python benchmarks/multi_gpu.py --out benchmarks/results/multi_gpu.json --only context-one,context [--longest]
    python benchmarks/multi_gpu.py --out benchmarks/results/multi_gpu.json --only hosts_tensor,hosts_stages,sockets_stages

Random weights. decode-N: milliseconds per token of N requests that run together, after the last first token. prefill: prompt tokens
per second of 16 prompts of 8,192 tokens. prompt-N: seconds until the first token of one prompt of N tokens. sums: microseconds of a
sum of bfloat16 numbers in a CUDA graph of 64 of them, by each kernel. hosts_WAY: two ranks are two hosts of --nnodes,
which are this machine, so NCCL copies between the GPUs as it finds best, and kernels of our own share no memory. sockets_WAY: the
same, and NCCL uses TCP on loopback only. Rows are written after each part; parts whose rows are in the file already are left out
with --resume.

Predicted before the first run, for two H100 (3.0 TB/s read, 600 TFLOP/s) and Llama 3.1 8B in bf16, layers and head 15.0 GB:

- one request: 7.5 GB a rank take 2.5 ms, 65 sums of 8 KB at 5 us 0.3 ms, gathered logits and gaps between kernels 0.3 ms: 3.1 ms
  against 5.0 ms. 64 requests: sums of 512 KB at 9 us: 3.6 ms against 5.6 ms.
- prefill: a step of 8,448 tokens computes for 112 ms a rank, and sums 65 times 69 MB at 300 GB/s, 15 ms: 1.75 times one rank.
- stages: 64 requests are two steps of 32, each of which reads half of the weights on each stage: 1.0 times; prefill 1.8 times.
- context: keys travel (docs/log/2026-11-27-context-parallel-prompts-gpus.md): 1.8 times at 8k and 32k tokens.
- experts (Qwen3-30B-A3B, 3.3 GB of weights per token, two H200): one request is bound by launches, 1.1 times either way. 64
  requests read nearly all experts: 1.6 times. Whole experts: the same bytes in the mean, but a step waits for the rank with more of
  them: 64 requests times 8 choices over 2 ranks deviate by 4 %. Prompts 1.7 times, and whole experts gain by wider products.
- experts-requests (docs/log/2026-11-28-requests-divided-by-rank.md): 64 requests 12.4 ms, one 5.2 ms, 45,000 prompt tokens/s.
- sums: one shot 4 us for 8 KB, NCCL 12 us; equal at 1 MB.
- hosts: docs/log/2026-11-28-gpus-of-several-hosts.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import HERE, lens, provenance, read_rows, timed, write_rows
from shapes import MODELS

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.engine.local import LocalEngine
from ridgeline.parallel.connect import Meeting, connect
from ridgeline.parallel.gpu import GpuGroup

SIZES = [1 << bits for bits in range(12, 27)]
"""Bytes of sums: 4 KB to 64 MB."""
IN_GRAPH = 64
LONGEST = 131_072
CONTEXT_PROMPTS = {"8k": 8192, "32k": 32_768, "128k": LONGEST - 16}
CONTEXT_TARGET = 1.7
SLOWEST_S = 60.0
"""A longer prompt is left out if the shorter one predicts that it takes longer."""
NETWORKS: Mapping[str, Mapping[str, str]] = {
    "hosts": {},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"},
}
"""Variables of NCCL between two hosts that are this machine."""
HOSTS_S = 420.0
"""A part with two hosts ends after so long at most."""
Row = dict[str, Any]


# --- sums -------------------------------------------------------------------------------------------------------------


def graph_us(add: Callable[[torch.Tensor], object], x: torch.Tensor) -> float | None:
    """Microseconds of one call in a graph of IN_GRAPH; None if the kernel does not take x."""
    if add(x) is False:
        return None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(IN_GRAPH):
            add(x)
    best = float("inf")
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / IN_GRAPH)
    return best


def run_rank(rank: int, size: int, place: str) -> None:
    """A rank of the sums. Rank 0 writes the rows."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = connect(rank, size, Meeting(torch.distributed.FileStore(f"{place}/store", size), 60.0, device=device))
    group = mesh.group
    assert isinstance(group, GpuGroup)
    ways: dict[str, Callable[[torch.Tensor], object]] = {"nccl": group.nccl.all_reduce}
    if group.sums is not None:
        ways |= {"one-shot": group.sums.one_shot, "two-shot": group.sums.two_shot}
    rows = []
    for nbytes in SIZES:
        x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        times = {way: graph_us(add, x) for way, add in ways.items()}
        rows.append(
            {"row": f"sums-{nbytes}", "bytes": nbytes}
            | {f"{way}_us": round(us, 2) for way, us in times.items() if us is not None}
        )
    if rank == 0:
        write_rows(f"{place}/rows.json", rows)
    torch.cuda.synchronize()
    os._exit(0)  # the communicator has graphs


def sums(args: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, str(Path(__file__).resolve()), "--place", place, "--ranks", str(args.ranks)]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(args.ranks)]
        try:
            for process in ranks:
                if status := process.wait(120):
                    raise RuntimeError(f"a rank of the sums ended with status {status}")
        finally:
            for process in ranks:
                process.kill()
        yield from read_rows(f"{place}/rows.json")


# --- a model ----------------------------------------------------------------------------------------------------------


def started(
    model: Path,
    quantization: str,
    options: Mapping[str, Any],
    whole_experts: bool = False,
    rows: int = 64,
    most: int = LONGEST,
) -> tuple[LocalEngine, float]:
    """An engine, and the seconds of its start."""
    began = time.perf_counter()
    longest = min(most, json.loads((model / "config.json").read_text())["max_position_embeddings"])
    served = ModelConfig(
        str(model),
        load_format="dummy",
        quantization=quantization,
        max_model_len=longest,
        expert_parallel=whole_experts,
    )
    config = EngineConfig(device="cuda", enable_prefix_caching=False, max_num_seqs=rows, **options)  # type: ignore[arg-type]
    engine = LocalEngine.start(served, config)
    return engine, time.perf_counter() - began


def decode_ms(engine: LocalEngine, rows: int, output: int = 128) -> float:
    """Milliseconds per token, the best of three runs."""
    best = float("inf")
    for _ in range(3):
        run = timed(engine, [(256, output)] * rows, engine.engine.setup.vocab_size)
        best = min(best, (run.seconds - max(run.ttft_s)) / (output - 1) * 1e3)
    return best


def prefill(engine: LocalEngine, prompts: int = 16, length: int = 8192) -> float:
    """Prompt tokens per second, the better of two runs."""
    vocab = engine.engine.setup.vocab_size
    return max(prompts * length / timed(engine, [(length, 1)] * prompts, vocab).seconds for _ in range(2))


def prompts(engine: LocalEngine) -> Iterator[tuple[int, float]]:
    """(tokens, seconds until the first token) of lone prompts."""
    vocab, before = engine.engine.setup.vocab_size, 0.0
    for length in (8192, 32_768, LONGEST - 16):
        if 12 * before > SLOWEST_S:
            return
        before = timed(engine, [(length, 1)], vocab).seconds
        yield length, before


def measured(args: argparse.Namespace, quantization: str, way: str, options: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of one engine, by name."""
    engine, start_s = started(args.model, quantization, options)
    name = f"{way}-{quantization or 'bf16'}"
    try:
        timed(engine, [(256, 8)] * 64, engine.engine.setup.vocab_size)
        yield {"row": f"{name}-decode-64", "ms": round(decode_ms(engine, 64), 3)}
        yield {"row": f"{name}-prefill", "tok_s": round(prefill(engine))}
        if way != "stages":
            yield {"row": f"{name}-decode-1", "ms": round(decode_ms(engine, 1), 3)}
        if way == "one" and not quantization:
            for length, seconds in prompts(engine):
                yield {"row": f"{name}-prompt-{length}", "s": round(seconds, 3)}
        yield {"row": f"{name}-start", "s": round(start_s, 1)}
    finally:
        engine.close()


def context(args: argparse.Namespace, way: str, options: Mapping[str, int]) -> Iterator[Row]:
    """Seconds until the first token of lone prompts, the best of three, and of decode steps of one request behind 8,192 tokens."""
    lengths = {name: length for name, length in CONTEXT_PROMPTS.items() if args.longest or length < LONGEST - 16}
    engine, start_s = started(args.model, "", options, rows=4, most=max(lengths.values()) + 256)
    try:
        vocab = engine.engine.setup.vocab_size
        yield {"row": f"{way}-bf16-start", "s": round(start_s, 1)}
        for name, length in lengths.items():
            seconds = min(timed(engine, [(length, 1)], vocab).seconds for _ in range(3))
            yield {"row": f"{way}-bf16-prompt-{name}", "s": round(seconds, 4)}
        run = timed(engine, [(8192, 128)], vocab)
        yield {"row": f"{way}-bf16-decode-1-8k", "ms": round((run.seconds - max(run.ttft_s)) / 127 * 1e3, 3)}
    finally:
        engine.close()


def conversations(args: argparse.Namespace, quantization: str, way: str, options: Mapping[str, int]) -> Iterator[Row]:
    """Requests per second of 1,000 conversations of the Azure trace, all sent at once."""
    engine, _ = started(args.model, quantization, options, rows=256)
    try:
        lengths, vocab = lens("azure_conv_1000"), engine.engine.setup.vocab_size
        timed(engine, lengths[:64], vocab)
        yield {
            "row": f"{way}-{quantization or 'bf16'}-conv",
            "req_s": round(len(lengths) / timed(engine, lengths, vocab).seconds, 2),
        }
    finally:
        engine.close()


def experts(args: argparse.Namespace, way: str, options: Mapping[str, int]) -> Iterator[Row]:
    """The rows of a model of 128 experts (Qwen3-30B-A3B), by name."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(MODELS["qwen3-30b-a3b"]))
        engine, start_s = started(Path(place), "", options, whole_experts=way in ("whole", "requests"))
        try:
            timed(engine, [(256, 8)] * 64, engine.engine.setup.vocab_size)
            for rows in (64, 1):
                yield {"row": f"experts-{way}-decode-{rows}", "ms": round(decode_ms(engine, rows), 3)}
            yield {"row": f"experts-{way}-prefill", "tok_s": round(prefill(engine))}
            yield {"row": f"experts-{way}-start", "s": round(start_s, 1)}
        finally:
            engine.close()


def between_hosts(args: argparse.Namespace, way: str) -> Iterator[Row]:
    """The rows of two ranks on two hosts, from a process of their own, because NCCL reads its variables once. way: HOSTS_AXIS."""
    with tempfile.TemporaryDirectory() as place:
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--model",
            str(args.model),
            "--place",
            place,
            "--way",
            way,
        ]
        first, second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
        variables = {
            **os.environ,
            **NETWORKS[way.partition("_")[0]],
            "CUDA_VISIBLE_DEVICES": first,
            "OTHER_GPU": second,
        }
        try:
            subprocess.run(command, env=variables, check=True, timeout=HOSTS_S)
        finally:  # rows of before a failure count
            yield from read_rows(f"{place}/rows.json")


def run_hosts(args: argparse.Namespace) -> None:
    """The first host, which sees one GPU and starts the second host with OTHER_GPU."""
    axis = {"tensor": "tensor", "stages": "pipeline"}[args.way.partition("_")[2]]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = {f"{axis}_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [
        sys.executable,
        "-m",
        "ridgeline",
        "serve",
        str(args.model),
        "--load-format",
        "dummy",
        "--node-rank",
        "1",
        *flags,
    ]
    second = subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": os.environ["OTHER_GPU"]})
    try:
        for row in measured(args, "", args.way, options):
            write_rows(f"{args.place}/rows.json", [row])
    finally:
        second.terminate()
        second.wait(20)


PARTS: Mapping[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "sums": sums,
    "tensor": lambda args: measured(args, "", "tensor", {"tensor_parallel_size": args.ranks}),
    "one": lambda args: measured(args, "", "one", {}),
    "stages": lambda args: measured(args, "", "stages", {"pipeline_parallel_size": args.ranks}),
    "tensor-fp8": lambda args: measured(args, "fp8", "tensor", {"tensor_parallel_size": args.ranks}),
    "one-fp8": lambda args: measured(args, "fp8", "one", {}),
    "conv-one": lambda args: conversations(args, "", "one", {}),
    "conv-tensor": lambda args: conversations(args, "", "tensor", {"tensor_parallel_size": args.ranks}),
    "conv-one-fp8": lambda args: conversations(args, "fp8", "one", {}),
    "conv-tensor-fp8": lambda args: conversations(args, "fp8", "tensor", {"tensor_parallel_size": args.ranks}),
    "experts-one": lambda args: experts(args, "one", {}),
    "experts-tensor": lambda args: experts(args, "tensor", {"tensor_parallel_size": args.ranks}),
    "experts-whole": lambda args: experts(args, "whole", {"tensor_parallel_size": args.ranks}),
    "experts-requests": lambda args: experts(args, "requests", {"data_parallel_size": args.ranks}),
    "context-one": lambda args: context(args, "context-one", {}),
    "context": lambda args: context(args, "context", {"context_parallel_size": args.ranks}),
    **{
        f"{network}_{way}": partial(between_hosts, way=f"{network}_{way}")
        for network in NETWORKS
        for way in ("stages", "tensor")
    },
}


def shares(rows: Mapping[str, Row]) -> Iterator[Row]:
    """Ratios of two ranks to one, and the share of sums in a decode step of a model of 32 layers of 4,096 features."""
    for name, row in rows.items():
        way, _, rest = name.partition("-")
        single = rows.get(f"one-{rest}")
        value = next((key for key in ("ms", "tok_s", "req_s", "s") if key in row), "")
        if way not in ("one", "sums", "share", "gain") and single and value in single and not rest.endswith("start"):
            gain = row[value] / single[value] if value in ("tok_s", "req_s") else single[value] / row[value]
            yield {"row": f"gain-{name}", "gain": round(gain, 3)}
    for name in CONTEXT_PROMPTS:
        single, divided = (rows.get(f"{way}-bf16-prompt-{name}") for way in ("context-one", "context"))
        if single and divided:
            gain = round(single["s"] / divided["s"], 3)
            yield {"row": f"cp2-prefill-{name}-speedup", "value": gain, "target": CONTEXT_TARGET}
    added = rows.get(f"sums-{8192 * 64}")
    for form in ("bf16", "fp8"):  # with one request the kernel of all layers adds
        step = rows.get(f"tensor-{form}-decode-64")
        if added and step:
            least = min(value for key, value in added.items() if key.endswith("_us"))
            yield {"row": f"share-{form}-decode-64", "share": round(65 * least / step["ms"] / 1e3, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="leave out parts whose last row is in the file")
    parser.add_argument("--longest", action="store_true", help="prompts of 131,056 tokens in the parts `context` too")
    parser.add_argument("--seconds", type=float, default=460.0, help="no part is begun after so long")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--place", default="", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        run_rank(args.rank, args.ranks, args.place)
        return
    if args.way:
        run_hosts(args)
        return
    began, about = time.perf_counter(), provenance(f"{args.ranks} x {torch.cuda.get_device_name()}", args.commit)
    rows: dict[str, Row] = {row["row"]: row for row in read_rows(args.out)} if args.out else {}
    for part in args.only.split(","):
        dtype = "" if part.startswith("experts") else "-fp8" if "fp8" in part else "-bf16"
        if part.startswith("conv"):
            last = f"{part.removeprefix('conv-').removesuffix('-fp8')}{dtype}-conv"
        else:
            last = "sums-67108864" if part == "sums" else f"{part.removesuffix('-fp8')}{dtype}-start"
            last = last.replace("-start", "-decode-1-8k") if part.startswith("context") else last
        if time.perf_counter() - began > args.seconds or (args.resume and last in rows):
            continue
        try:
            for row in PARTS[part](args):
                rows[row["row"]] = row
                print(row, flush=True)
                if args.out:
                    write_rows(args.out, [row | about])
        except Exception as error:  # the other parts do not need this one
            print(f"{part}: {type(error).__name__}: {error}", flush=True)
    for row in list(shares(rows)):
        print(row, flush=True)
        if args.out:
            write_rows(args.out, [row | about])


if __name__ == "__main__":
    main()
