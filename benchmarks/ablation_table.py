"""The kernels of `ridgeline.ops.triton` that benchmarks/ablation.py switches off, and the rows on which each can show its gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

from ridgeline.ops.reference import qkv_write
from ridgeline.ops.triton.attention_launch import AttentionShape
from ridgeline.ops.triton.integer_shapes import IntStreamTile
from ridgeline.ops.triton.products import ProductShape
from ridgeline.ops.triton.registry import Registry

PACKAGE = "ridgeline.ops.triton"
SCALED = "cublasLt of 8 bits"
"""The name under which benchmarks/ablation.py counts products through cuBLASLt's C interface."""


@dataclass(frozen=True, slots=True)
class Switch:
    """path: "module:name" or "module:Class.name" below `package`. replace(original) stands there while the kernel is off."""

    path: str
    replace: Callable[[Any], Any]
    package: str = PACKAGE

    def place(self) -> tuple[Any, str]:
        """The object that holds the name, and the name. AttributeError if there is none."""
        module, _, names = self.path.partition(":")
        *owners, name = names.split(".")
        target: Any = import_module(f"{self.package}.{module}")
        for owner in owners:
            target = getattr(target, owner)
        getattr(target, name)
        return target, name


@dataclass(frozen=True, slots=True)
class Asked:
    """A row to measure. source: a model of benchmarks/shapes.py, "NAME" or "NAME:FORMAT", whose `row` is a step; or ENGINE before
    a model of benchmarks/gpu.py, whose `row` is one of its table. predicted: the gain in percent, written before the run."""

    source: str
    row: str
    predicted: float


ENGINE = "engine:"


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel that can be switched off.

    kernels: launch names. At least one is launched while the kernel is on, and none while it is off. Empty: the same kernels run
    with another grid or other constants, so the set of launches must differ.
    """

    name: str
    kernels: tuple[str, ...]
    switches: tuple[Switch, ...]
    rows: tuple[Asked, ...]
    shared: bool = False
    """Another product of the same step uses the same kernel, so off means fewer launches instead of none."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Take the next best path within the block; restore the product afterwards."""
        with ExitStack() as stack:
            for switch in self.switches:
                target, name = switch.place()
                stack.enter_context(patch.object(target, name, switch.replace(getattr(target, name))))
            yield


# --- what stands in a kernel's place ----------------------------------------------------------------------------------


def _returns(value: object) -> Callable[[Any], Any]:
    """A function that declines the work."""
    return lambda original: lambda *given, **named: value


def _value(value: object) -> Callable[[Any], Any]:
    return lambda original: value


def _without(*kernels: str) -> Callable[[Any], Any]:
    """A registry without these kernels: the next entries serve."""
    return lambda registry: registry.without(*kernels)


def _serving(serves: Callable[[Callable[[Any], Any], Any], Any]) -> Callable[[Any], Any]:
    """A registry whose entries serve as serves(its own predicate, shape) says."""
    return lambda registry: Registry(
        *(replace(entry, serves=partial(serves, entry.serves)) for entry in registry.entries)
    )


def _norms_apart(function: Callable[[ProductShape], Any], shape: ProductShape) -> Any:
    """No product norms its input."""
    return None if shape.norm else function(shape)


def _late(function: Callable[[AttentionShape], Any], shape: AttentionShape) -> Any:
    """Programs that share a processor ask for keys behind the wait."""
    config = function(shape)
    return config if config is None or config.registers is None else config._replace(ahead=0, registers=None)


def _streamed_further(original: Mapping[bool, Mapping[int, Any]]) -> dict[bool, dict[int, Any]]:
    """_STREAMS with tiles of 64 tokens for all products of 33 to 256 tokens, several tiles side by side beyond 64."""
    gates, others = (IntStreamTile(64, 2, 128, 2),), (IntStreamTile(64, 1, 128, 2),)
    return {narrow: {**table, 64: (gates, others), 256: (gates, others)} for narrow, table in original.items()}


GATED = Switch("kernels:PLAIN", _without("gated"))
INTEGER_RING = Switch("kernels:INTEGER", _without("integer_ring"))

LLAMA, QWEN, GEMMA = "llama-3.1-8b", "qwen3-0.6b", "gemma-2-9b"


def _rows(asked: Mapping[str, Mapping[str, float]]) -> tuple[Asked, ...]:
    """Source -> row -> predicted gain in percent."""
    return tuple(Asked(source, row, gain) for source, rows in asked.items() for row, gain in rows.items())


# --- the table --------------------------------------------------------------------------------------------------------

# The first variants are those that the redesign asks for by name. Predictions:
# docs/log/2026-11-24-kernel-ablation-gains.md.
VARIANTS = (
    Variant(
        "gated",
        ("gated_product",),
        (GATED,),
        _rows(
            {
                ENGINE + LLAMA: {"8b-bf16-prefill-tok-s": 2.0},
                LLAMA: {"prefill:2048": 1.5, "prefill:2700": 2.3, "prefill:8192": 2.5},
                "qwen3-0.6b": {"prefill:8192": 4.0},
                "qwen3-1.7b": {"prefill:2048": 2.0, "prefill:8192": 2.6},
                "llama-3.2-1b": {"prefill:8192": 3.0},
            }
        ),
    ),
    Variant(
        "integer_ring",
        ("integer_ring.integer_ring_kernel",),
        (INTEGER_RING,),
        _rows(
            {
                LLAMA + ":int4": {"decode:64x256": 50.0, "decode:128x256": 75.0, "prefill:512": 30.0},
                LLAMA + ":int8": {"decode:64x256": 40.0, "decode:128x256": 65.0},
            }
        ),
    ),
    Variant(
        "integer_ring (streams to 256 tokens)",
        ("integer_ring.integer_ring_kernel",),
        (Switch("integer_shapes:_STREAMS", _streamed_further), INTEGER_RING),
        _rows(
            {
                LLAMA + ":int4": {"decode:64x256": 0.5, "decode:128x256": 17.0, "decode:256x256": 30.0},
                LLAMA + ":int8": {"decode:64x256": 0.5, "decode:128x256": 12.0},
                "qwen3-4b:int4": {"decode:64x256": 0.5},
            }
        ),
    ),
    Variant(
        "integer_stream",
        ("integer_product",),
        (Switch("kernels:INTEGER", _without("integer_stream")),),
        _rows(
            {
                LLAMA + ":int4": {
                    "decode:2x256": 18.0,
                    "decode:8x256": 8.0,
                    "decode:16x256": 7.5,
                    "decode:32x256": 5.5,
                },
                LLAMA + ":int8": {"decode:2x256": 4.0, "decode:16x256": 1.7},
                "qwen3-4b:int4": {"decode:2x256": 15.0, "decode:16x256": 4.5},
            }
        ),
    ),
    Variant(
        "hopper",
        ("attend_chunks",),
        (Switch("attention:CHUNK", _without("hopper")),),
        _rows(
            {
                ENGINE + LLAMA: {"8b-bf16-prefill-tok-s": 9.0},
                ENGINE + LLAMA + ":fp8": {"8b-fp8-prefill-tok-s": 14.0},
                LLAMA: {"prefill:512": 0.5, "prefill:2048": 3.0, "prefill:8192": 10.0},
                "llama-3.2-1b": {"prefill:8192": 20.0},
                GEMMA: {"prefill:2048": 6.0, "prefill:8192": 14.0},
            }
        ),
    ),
    Variant(
        "layers (one token, one kernel)",
        ("layers.layers_kernel",),
        (Switch("one_token:OneToken._attends", _returns(False)),),
        _rows(
            {
                ENGINE + LLAMA: {"8b-bf16-single128-tpot-ms": 4.0, "8b-bf16-single4096-tpot-ms": 2.0},
                ENGINE + LLAMA + ":fp8": {"8b-fp8-single128-tpot-ms": 20.0},
                LLAMA: {"decode:1x256": 3.0, "decode:1x4096": 2.0},
                LLAMA + ":fp8": {"decode:1x256": 16.0},
                LLAMA + ":int4": {"decode:1x256": 25.0},
                LLAMA + ":int8": {"decode:1x256": 18.0},
                "qwen3-4b:int4": {"decode:1x256": 39.0},
            }
        ),
    ),
    Variant(
        "wide",
        ("wide_product",),
        (Switch("kernels:PLAIN", _without("wide (gates)", "wide (sums)")),),
        _rows(
            {
                LLAMA: {"decode:96x256": 2.3, "decode:160x256": 2.4, "decode:256x256": 1.0, "prefill:256": 1.0},
                "qwen2.5-7b": {"decode:128x256": 2.5},
            }
        ),
    ),
    Variant(
        "ring",
        ("ring.ring_kernel",),
        (Switch("kernels:PLAIN", _without("ring")),),
        _rows(
            {
                ENGINE + LLAMA: {"8b-bf16-batch64-tpot-ms": 2.5},
                ENGINE + QWEN: {"0.6b-bf16-nano-tok-s": 6.0},
                LLAMA: {"decode:4x256": 2.0, "decode:16x256": 1.5, "decode:64x256": 3.0},
                QWEN: {"decode:64x256": 8.0},
            }
        ),
    ),
    Variant(
        "ring of 8 bits",
        ("ring.ring_kernel",),
        (Switch("kernels:FP8", _without("ring")),),
        _rows({LLAMA + ":fp8": {"decode:2x256": 20.0, "decode:16x256": 13.0, "decode:64x256": 12.0}}),
        shared=True,
    ),
    Variant(
        "cublas of 8 bits (joined stream)",
        (SCALED,),
        (Switch("cublas:product", _returns(False)),),
        _rows(
            {
                ENGINE + LLAMA + ":fp8": {"8b-fp8-prefill-tok-s": 2.2},
                LLAMA + ":fp8": {"decode:256x256": 1.0, "prefill:2048": 2.0, "prefill:8192": 2.0},
            }
        ),
    ),
    Variant(
        "gemm_small (matrix tiles)",
        ("gemm_small.matrix_kernel",),
        (Switch("kernels:PLAIN", _without("matrix")),),
        _rows({LLAMA: {"decode:96x256": 1.0, "decode:128x256": 1.0}, "qwen3-4b": {"decode:128x256": 1.0}}),
    ),
    Variant(
        "gemv (one token)",
        ("gemv.vector_kernel", "gemv.resident_kernel"),
        (Switch("kernels:PLAIN", _without("vector", "resident")),),
        _rows(
            {
                ENGINE + QWEN: {"0.6b-bf16-single128-tpot-ms": 70.0},
                LLAMA: {"decode:1x256": 1.0},
                QWEN: {"decode:1x256": 50.0},
                GEMMA: {"decode:1x256": 10.0},
            }
        ),
    ),
    Variant(
        "gemv with the norm inside",
        ("gemv.resident_kernel",),
        (Switch("kernels:PLAIN", _serving(_norms_apart)),),
        _rows({ENGINE + QWEN: {"0.6b-bf16-single128-tpot-ms": 10.0}, QWEN: {"decode:1x256": 7.0}}),
        shared=True,
    ),
    Variant(
        "fp8_vector",
        ("fp8_vector._kernel",),
        (Switch("kernels:FP8", _without("fp8_vector")),),
        _rows({QWEN + ":fp8": {"decode:1x256": 20.0}, GEMMA + ":fp8": {"decode:1x256": 8.0}}),
    ),
    Variant(
        "qkv_write",
        ("qkv._qkv_kernel",),
        (Switch("table:qkv_write", _value(qkv_write)),),
        _rows({LLAMA: {"decode:16x256": 20.0, "prefill:640": 4.0}}),
    ),
    Variant(
        "qkv_write by the token",
        (),
        (Switch("qkv:_kv_heads", _returns(1)),),
        _rows({QWEN: {"prefill:8192": 3.0}}),
    ),
    Variant(
        "walk: wide",
        (),
        (Switch("attention:SPLIT", _without("wide")),),
        _rows(
            {
                LLAMA: {"decode:8x256": 1.0, "decode:16x256": 2.0, "decode:8x4096": -1.5},
                LLAMA + ":fp8": {"decode:16x256": -2.0},
                QWEN: {"decode:4x256": -3.0, "decode:8x256": -1.0, "decode:16x256": -4.0, "decode:8x4096": 3.0},
                "llama-3.2-1b": {"decode:16x256": 0.0, "decode:8x4096": 0.0},
                "qwen2.5-7b": {"decode:32x256": -1.5, "decode:8x4096": -1.0},
                "gemma-2-2b": {
                    "decode:4x256": 1.0,
                    "decode:8x256": 1.5,
                    "decode:16x256": 0.0,
                    "decode:32x256": 2.0,
                    "decode:8x4096": 0.0,
                },
                "gemma-3-4b": {"decode:8x256": 1.0, "decode:16x256": 1.5, "decode:32x256": 1.5},
                GEMMA: {"decode:8x256": 0.3, "decode:16x256": 0.0, "decode:8x4096": 0.0},
            }
        ),
    ),
    Variant(
        "walk: lone",
        (),
        (Switch("attention:SPLIT", _without("lone")),),
        _rows({QWEN: {"decode:1x4096": 1.0}, LLAMA: {"decode:2x4096": 0.5}}),
    ),
    Variant(
        "walk: snug",
        (),
        (Switch("attention:SPLIT", _without("snug")),),
        _rows(
            {
                LLAMA: {"decode:64x256": 1.0, "decode:64x4096": 1.0},
                QWEN: {"decode:64x256": 2.8, "decode:64x4096": 1.5},
                "qwen2.5-7b": {"decode:128x256": 0.8},
            }
        ),
    ),
    Variant(
        "walk: early",
        (),
        (Switch("attention:SPLIT", _serving(_late)),),
        _rows(
            {
                LLAMA: {"decode:32x256": 0.5, "decode:64x256": 0.5},
                QWEN: {"decode:2x256": 0.5, "decode:32x256": 0.6, "decode:64x256": 3.0, "decode:128x256": 1.0},
                "qwen2.5-7b": {"decode:64x256": 0.5, "decode:128x256": 0.8},
                "qwen2.5-7b:fp8": {"decode:128x256": 2.3},
                "qwen3-4b:fp8": {"decode:64x256": 1.0, "decode:128x256": 1.0},
            }
        ),
    ),
    Variant(
        "walk: a kernel that combines",
        ("walk.combine_kernel",),
        (Switch("attention:SPLIT", _without("wide", "lone", "combined")),),
        _rows(
            {
                LLAMA: {"decode:2x4096": 2.0, "decode:8x4096": 3.0},
                QWEN: {"decode:1x4096": 5.0, "decode:2x256": 2.0, "decode:16x256": -3.0, "decode:8x4096": 5.0},
                "llama-3.2-1b": {"decode:8x4096": 0.0},
                GEMMA: {"decode:1x4096": 5.0, "decode:8x4096": 0.0},
            }
        ),
    ),
)
