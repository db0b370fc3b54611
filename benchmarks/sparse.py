"""Whether the tensor cores' 2:4 sparse products pay, for the matrices of an 8B on one GPU:

    python benchmarks/sparse.py [--seconds 50] [--out benchmarks/results/sparse.json]

Two of every four weights are zero. cuSPARSELt (through torch) multiplies them packed, cuBLAS as they stand, in bfloat16 and
in e4m3 (one scale for all, which both libraries take for nothing). Every sparse product is first compared with float64. Times
are of CUDA graphs that go through enough copies of a matrix that none of it is found in the chip's cache; where a library
cannot be captured, of the calls one after another. `searched` is the fastest of the algorithms that cuSPARSELt offers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import provenance, write_rows

# name -> (outputs, inputs): the products of one layer.
SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336)}
TOKENS = (1, 16, 64, 256, 1024, 8192)
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
LEAST_TOKENS = 16
"""cuSPARSELt takes no fewer columns; the rest is padding."""
COLD_BYTES = 200e6
"""Bytes to go through between two uses of a matrix: several times the chip's cache."""
REPEATS = 7
ALLOWED = 4e-3
"""Largest relative error of a product rounded to bfloat16, whose rounding alone is 1.7e-3."""


Way = tuple[int, int, int]
"""How cuSPARSELt multiplies: algorithm, parts of the sum, and how these are added up."""
USUAL: Way = (0, 1, -1)


@dataclass(frozen=True, slots=True)
class Case:
    """One product. dense: weights [outputs, inputs] with two zeros in four; packed: the same as cuSPARSELt holds them.

    x: [tokens, inputs], at least LEAST_TOKENS of them.
    """

    dense: torch.Tensor
    packed: torch.Tensor
    x: torch.Tensor

    def by_cublas(self) -> torch.Tensor:
        """[tokens, outputs] in bfloat16."""
        if self.x.dtype == torch.bfloat16:
            return self.x @ self.dense.t()
        unit = torch.ones((), device=self.x.device)
        return torch._scaled_mm(self.x, self.dense.t(), unit, unit, out_dtype=torch.bfloat16)

    def by_cusparselt(self, way: Way) -> torch.Tensor:
        """[tokens, outputs] in bfloat16."""
        algorithm, split, mode = way
        return torch._cslt_sparse_mm(
            self.packed, self.x.t(), out_dtype=self._said(), transpose_result=True,
            alg_id=algorithm, split_k=split, split_k_mode=mode,
        )  # fmt: skip

    def search(self) -> Way:
        """The fastest of what cuSPARSELt offers, by its own measurement."""
        search = torch._C._cusparselt.mm_search  # type: ignore[attr-defined]
        tuned = search(self.packed, self.x.t(), None, None, self._said(), True)
        return int(tuned[0]), int(tuned[1]), int(tuned[2])

    def _said(self) -> torch.dtype | None:
        """The type of the result, which must not be said where it is that of the inputs."""
        return None if self.x.dtype == torch.bfloat16 else torch.bfloat16


def halved(shape: tuple[int, int]) -> torch.Tensor:
    """Random weights, bfloat16, the two smaller of every four zero."""
    weights = torch.randn(shape, device="cuda", dtype=torch.bfloat16).view(-1, 4)
    lesser = weights.abs().topk(2, dim=1, largest=False).indices
    return weights.scatter_(1, lesser, 0.0).view(shape)


def cases(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> list[Case]:
    """As many different matrices of a shape as the cache cannot hold packed."""
    copies = max(2, int(COLD_BYTES / (shape[0] * shape[1] * dtype.itemsize * 0.5)) + 1)
    x = torch.randn(max(tokens, LEAST_TOKENS), shape[1], device="cuda", dtype=torch.bfloat16).to(dtype)
    dense = [halved(shape).to(dtype) for _ in range(copies)]
    return [Case(matrix, torch._cslt_compress(matrix), x) for matrix in dense]


def microseconds(runs: Sequence[Callable[[], object]]) -> tuple[float, bool]:
    """Median time of one of the runs, and whether it is a graph's."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()

    def all_of_them() -> None:
        for run in runs:
            run()

    go: Callable[[], object] = all_of_them
    captured = True
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_of_them()
        go = graph.replay
    except RuntimeError:
        captured = False
        torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        go()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(runs))
    return statistics.median(times[1:]), captured


def error(case: Case, out: torch.Tensor) -> float:
    """Relative error of the first rows against float64."""
    want = case.x[:LEAST_TOKENS].double() @ case.dense.double().t()
    return float((out[:LEAST_TOKENS].double() - want).norm() / want.norm())


def measure(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Times and bytes of one product both ways. Raises ValueError for a sparse product that is wrong."""
    held = cases(shape, tokens, dtype)
    first = held[0]
    best = first.search()
    for way in {USUAL, best}:
        if not (off := error(first, first.by_cusparselt(way))) < ALLOWED:
            raise ValueError(f"algorithm {way}: relative error {off:.2g}")
    dense_us, _ = microseconds([case.by_cublas for case in held])
    usual_us, captured = microseconds([lambda case=case: case.by_cusparselt(USUAL) for case in held])  # type: ignore[misc]
    searched_us, _ = microseconds([lambda case=case: case.by_cusparselt(best) for case in held])  # type: ignore[misc]
    return {
        "dense_us": round(dense_us, 2),
        "sparse_us": round(usual_us, 2),
        "searched_us": round(searched_us, 2),
        "times_dense": round(dense_us / min(usual_us, searched_us), 3),
        "dense_bytes": first.dense.nbytes,
        "sparse_bytes": first.packed.nbytes,
        "way": best,
        "graph": captured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50.0, help="begin no product after so long")
    parser.add_argument("--commit", default="", help="what runs, where git cannot say")
    parser.add_argument("--out", help="where the rows go")
    given = parser.parse_args()
    torch.manual_seed(0)
    begun, rows = time.monotonic(), []
    facts = provenance(f"1x {torch.cuda.get_device_name()}, torch {torch.__version__}", given.commit)
    for kind, dtype in DTYPES.items():
        for tokens in sorted(TOKENS, reverse=True):
            said = []
            for name, shape in SHAPES.items():
                if time.monotonic() - begun > given.seconds:
                    break
                try:
                    measurement = measure(shape, tokens, dtype)
                except (RuntimeError, ValueError) as problem:
                    said.append(f"{name}: {' '.join(str(problem).split())[:90]}")
                    continue
                row = {"row": f"sparse-2:4-{kind}-{name}-{tokens}", "shape": shape, "tokens": tokens, "dtype": kind}
                rows.append(row | measurement | facts)
                said.append(
                    f"{name} {measurement['dense_us']:.0f}/{measurement['sparse_us']:.0f}/{measurement['searched_us']:.0f}"
                )
                torch.cuda.empty_cache()
            print(f"{kind} {tokens:5} dense/sparse/searched us: {', '.join(said)}", flush=True)
    if given.out:
        write_rows(given.out, rows)


if __name__ == "__main__":
    main()
