"""Published figures of accelerators, each with its source. Dense rates: sparsity doubles them on paper alone.

memory_bytes is what the driver reports, not the round number on the box. These are ceilings of the specification; what a
machine reaches is measured (`hardware.bandwidth`) and stands beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One kind of device.

    kind: "cuda" or "cpu". flops: dense operations per second by precision, products summed in float32 (int8: int32).
    bandwidth: bytes per second of its memory. link: bytes per second to its peers, both directions, 0 for PCIe alone.
    watts: board power. pattern: how its driver names it.
    """

    name: str
    kind: str
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    link: float
    watts: float
    pattern: str
    source: str

    def peak(self, dtype: str) -> float:
        """Operations per second in `dtype`, or in the fastest type it can be widened to."""
        for name in (dtype, *_WIDER[dtype]):
            if name in self.flops:
                return self.flops[name]
        raise KeyError(dtype)

    def ridge(self, dtype: str) -> float:
        """Operations per byte above which a kernel is bound by arithmetic (Williams et al. 2009)."""
        return self.peak(dtype) / self.bandwidth


_WIDER = {
    "float8_e4m3": ("bfloat16", "float32"),
    "int8": ("bfloat16", "float32"),
    "bfloat16": ("float32",),
    "float16": ("bfloat16", "float32"),
    "float32": (),
}


def _tera(bfloat16: float, *, float32: float, fp8: float = 0.0, int8: float = 0.0) -> Mapping[str, float]:
    """Rates given in TFLOP/s."""
    rates = {"bfloat16": bfloat16, "float16": bfloat16, "float32": float32, "float8_e4m3": fp8, "int8": int8}
    return {name: rate * 1e12 for name, rate in rates.items() if rate}


ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator(
        "NVIDIA B200 SXM", "cuda", 183_359 * MIB, 7.7e12, _tera(2250, float32=75, fp8=4500, int8=4500),
        1.8e12, 1000, r"B200", "NVIDIA HGX B200 data sheet (per GPU; 8 TB/s in some editions), driver total",
    ),
    Accelerator(
        "NVIDIA H200 SXM", "cuda", 143_771 * MIB, 4.8e12, _tera(989.4, float32=66.9, fp8=1978.9, int8=1978.9),
        0.9e12, 700, r"H200(?! NVL)", "NVIDIA H200 data sheet, driver total",
    ),
    Accelerator(
        "NVIDIA H100 SXM", "cuda", 81_559 * MIB, 3.35e12, _tera(989.4, float32=66.9, fp8=1978.9, int8=1978.9),
        0.9e12, 700, r"H100(?!.*(PCIe|NVL))", "NVIDIA H100 data sheet, driver total",
    ),
    Accelerator(
        "NVIDIA A100 SXM 80GB", "cuda", 81_920 * MIB, 2.039e12, _tera(312, float32=19.5, int8=624),
        0.6e12, 400, r"A100.*SXM.*80", "NVIDIA A100 data sheet, driver total",
    ),
    Accelerator(
        "NVIDIA L40S", "cuda", 46_068 * MIB, 0.864e12, _tera(362, float32=91.6, fp8=733, int8=733),
        0.0, 350, r"L40S", "NVIDIA L40S data sheet, driver total",
    ),
    Accelerator(
        "NVIDIA L4", "cuda", 23_034 * MIB, 0.3e12, _tera(121, float32=30.3, fp8=242.5, int8=242.5),
        0.0, 72, r"L4(?!\d)", "NVIDIA L4 data sheet, driver total",
    ),
    Accelerator(
        "NVIDIA A10", "cuda", 23_028 * MIB, 0.6e12, _tera(125, float32=31.2, int8=250),
        0.0, 150, r"A10(?![\dG])", "NVIDIA A10 data sheet, driver total",
    ),
    Accelerator(
        "NVIDIA RTX 4090", "cuda", 24_564 * MIB, 1.008e12, _tera(165.2, float32=82.6, fp8=330.3, int8=660.6),
        0.0, 450, r"RTX 4090(?! D)", "NVIDIA Ada architecture white paper, driver total",
    ),
    Accelerator(
        "CPU, 2 cores, AVX-512 and AMX", "cpu", 24_576 * MIB, 0.049e12, _tera(1.0, float32=0.2),
        0.0, 20, r"", "two cores of a server processor, measured: reads 49 GB/s, products 1 TFLOP/s in bf16; "
        "float32 and power are estimates",
    ),
)  # fmt: skip


def find(name: str) -> Accelerator | None:
    """The accelerator a driver or a user means by `name` ("NVIDIA H100 80GB HBM3", "h200"), or None."""
    for one in ACCELERATORS:
        if one.kind != "cpu" and re.search(rf"(?<![A-Za-z0-9]){one.pattern}", name, re.IGNORECASE):
            return one
    return None


def cpu() -> Accelerator:
    """The row that stands for a plain processor."""
    return next(one for one in ACCELERATORS if one.kind == "cpu")
