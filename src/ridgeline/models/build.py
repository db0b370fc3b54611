"""Builds a decoder from a model folder: reads the spec, allocates weights by format and rank, and loads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ridgeline.core.adapters import plan_adapters
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.expert_parallel import whole_experts
from ridgeline.core.gpu_blocks import converted
from ridgeline.core.host_weights import NO_HOST_WEIGHTS, HostTimes
from ridgeline.core.quantization import check_experts, with_format
from ridgeline.core.selection import select_pages
from ridgeline.core.spec import KV_FORMATS, NUMBER_FORMATS, QUANTIZED_KV, ModelSpec
from ridgeline.core.stages import stage_spec
from ridgeline.models.building import Build
from ridgeline.models.config import GenerationDefaults, drop_idle_windows, read_model, stored_as
from ridgeline.models.decoder import Decoder
from ridgeline.models.stored import StoredAs
from ridgeline.models.weights import Progress, load_checkpoint, load_dummy
from ridgeline.ops.blocks import kind_of
from ridgeline.ops.capture import Uncaptured
from ridgeline.ops.native_host import host_ops
from ridgeline.ops.selective import selecting
from ridgeline.ops.striped import striped
from ridgeline.ops.table import Ops
from ridgeline.parallel.mesh import ONE_DEVICE, Mesh
from ridgeline.quant.adapted import adapted
from ridgeline.quant.blocks import BlockFormat
from ridgeline.quant.format import WeightFormat
from ridgeline.quant.fp8 import Fp8Format
from ridgeline.quant.hosted import Host, streamed
from ridgeline.quant.integer import IntFormat
from ridgeline.quant.mixed import MixedFormat
from ridgeline.quant.unquantized import UnquantizedFormat

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
OLDEST_FP8 = (8, 9)
"""Lowest compute capability with e4m3 tensor cores (Ada)."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder that is ready to run. spec: of the whole model, with the served dtype and max_len. mesh: which rank's share this
    decoder holds. host_times: what its weights in host memory take."""

    spec: ModelSpec
    decoder: Decoder
    generation_defaults: GenerationDefaults
    ops: Ops
    mesh: Mesh = ONE_DEVICE
    host_times: HostTimes = NO_HOST_WEIGHTS

    @property
    def rank_spec(self) -> ModelSpec:
        """The spec of this rank's share: the layers and heads whose keys and values its KV cache stores."""
        spec = self.spec.on_rank(self.mesh.size, self.mesh.attention.size)
        return stage_spec(spec, self.mesh.stage.layers)


def served_spec(spec: ModelSpec, model: ModelConfig, kind: str = "cpu") -> ModelSpec:
    """The spec with the dtype, context length and quantization of `model`. kind: see ops.blocks.kind_of.

    A GPU converts linears in blocks to the dtype where that is faster (core.gpu_blocks). Raises ConfigError that names the option.
    """
    dtype = spec.dtype if model.dtype == "auto" else model.dtype
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} cannot be served: use one of {', '.join(DTYPES)}.", param="dtype")
    quantized = with_format(spec, model.quantization)
    longest = model.max_model_len or spec.max_len
    if not 1 <= longest <= spec.max_len:
        raise ConfigError(
            f"--max-model-len is {longest}: give 1 to {spec.max_len}, the context of the model.",
            param="max_model_len",
        )
    layers = drop_idle_windows(spec.layers, longest)
    if model.expert_parallel:
        layers = whole_experts(layers, model)
    served = replace(
        quantized,
        dtype=dtype,
        max_len=longest,
        layers=layers,
        host_bytes=int(model.cpu_offload_gb * (1 << 30)),
    )
    served = replace(served, kv_format=_kv_format(served, model.kv_cache_dtype))
    served = converted(served, kind)
    check_experts(served, kind)
    return select_pages(served, model.kv_selection) if model.kv_selection else served


def _kv_format(spec: ModelSpec, name: str) -> str:
    """The KV format that an option names. Raises ConfigError for an unknown one, and where heads are no multiple of a group."""
    name = {"auto": spec.dtype, "fp8_e4m3": "fp8"}.get(name, name)
    if name not in (spec.dtype, *QUANTIZED_KV):
        known = ", ".join(("auto", *QUANTIZED_KV))
        raise ConfigError(f"--kv-cache-dtype {name!r} is unknown: use one of {known}.", param="kv_cache_dtype")
    group = 0 if name == spec.dtype else KV_FORMATS[name].group
    if group and (odd := {layer.head_dim for layer in spec.layers if layer.head_dim % group}):
        raise ConfigError(
            f"--kv-cache-dtype {name} needs heads of a multiple of {group} elements, and the model has heads of {min(odd)}: "
            "use int8.",
            param="kv_cache_dtype",
        )
    return "" if name == spec.dtype else name


def _weight_format(name: str, spec: ModelSpec, ops: Ops, device: torch.device, stored: StoredAs) -> WeightFormat:
    """Weight format of linears in `name` of NUMBER_FORMATS; "": unquantized. Raises ConfigError if the device lacks it."""
    dtype, matmul = DTYPES[spec.dtype], ops.matmul
    if not name:
        return UnquantizedFormat(matmul.unquantized, dtype, device)
    numbers = NUMBER_FORMATS[name]
    if name in ("fp8-weight", "fp8-block"):
        return Fp8Format(matmul.fp8_weight, dtype, device, stored.scales, False, numbers.group)
    if name != "fp8":
        if stored.blocks or numbers.in_blocks:
            held = {spec.quantization, spec.head_format, *(name for layer in spec.layers for name in layer.formats)}
            forms = {
                (form.bits, form.scaling)
                for name, form in NUMBER_FORMATS.items()
                if form.in_blocks and name not in held
            }
            return BlockFormat(matmul, dtype, device, None if stored.blocks else numbers, frozenset(forms))
        if numbers.kept:
            return MixedFormat(ops, numbers, dtype, device)
        integer = matmul.w8a8 if numbers.inputs_8bit else matmul.integer
        return IntFormat(integer, numbers, dtype, device, stored.integers, matmul.unquantized)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_FP8:
        raise ConfigError(
            "--quantization fp8 needs a GPU of compute capability 8.9 or newer (L4, RTX 4090, H100): use another format.",
            param="quantization",
        )
    return Fp8Format(matmul.fp8, dtype, device, stored.scales, of_experts=matmul.fp8_weight if ops.experts else None)


def _host(spec: ModelSpec, ops: Ops, mesh: Mesh, stored: StoredAs) -> Host | None:
    """The CPU, if it can multiply linears that stay in host memory; they must read activations as the device leaves them."""
    rounds_inputs = spec.quantization and (
        spec.quantization not in NUMBER_FORMATS or NUMBER_FORMATS[spec.quantization].inputs_8bit
    )
    plain = spec.gated and not rounds_inputs and not stored.blocks and not spec.has_experts
    if not spec.host_bytes or not ops.from_host or mesh.size > 1 or mesh.stage.count > 1 or not plain:
        return None
    if (host := host_ops()) is None:
        return None
    host_format = _weight_format(spec.quantization, spec, host.ops, torch.device("cpu"), stored)
    return Host(host, host_format, ops.tokenwise.rms_norm, ops.from_host, spec.activation, DTYPES[spec.dtype])


def build(
    model_dir: Path,
    *,
    model: ModelConfig,
    ops: Ops,
    device: torch.device,
    mesh: Mesh = ONE_DEVICE,
    progress: Progress | None = None,
) -> LoadedModel:
    """A model that is ready to run: `load`, whose decoder then chooses its programs."""
    loaded = load(model_dir, model=model, ops=ops, device=device, mesh=mesh, progress=progress)
    loaded.decoder.finish_loading()
    return loaded


def load(
    model_dir: Path,
    *,
    model: ModelConfig,
    ops: Ops,
    device: torch.device,
    mesh: Mesh = ONE_DEVICE,
    progress: Progress | None = None,
) -> LoadedModel:
    """Build a decoder on `device` with its weights, in model.dtype (auto: the checkpoint's) and up to model.max_model_len.

    A rank of a mesh builds and loads only its share of the layers. load_format dummy needs only config.json. On the meta device
    nothing is allocated or read. Raises ConfigError or UnsupportedModel. Weights may
    still be moved, until `Decoder.finish_loading`.
    """
    checkpoint, defaults = read_model(model_dir)
    spec = served_spec(checkpoint, model, kind_of(device))
    dtype = DTYPES[spec.dtype]
    recorded = spec.plain and not spec.has_experts
    if mesh.size > 1 or mesh.stage.count > 1 or (device.type == "cpu" and not recorded):
        # A CPU captures only kernel calls: neither collectives nor PyTorch nor which experts the next step's tokens choose.
        ops = replace(ops, capture=Uncaptured)
    if any(layer.budget is not None for layer in spec.layers):
        ops = selecting(ops)
    if mesh.context.size > 1:
        ops = striped(ops, mesh.context)
    dummy = model.load_format == "dummy" or device.type == "meta"
    stored = StoredAs() if dummy else stored_as(model_dir)
    weight_format, host_times = streamed(
        _weight_format(spec.quantization, spec, ops, device, stored), spec, device, _host(spec, ops, mesh, stored)
    )
    weight_format, ops = adapted(weight_format, ops, plan_adapters(model), dtype, device)
    shared = Build(spec, ops, weight_format, mesh, dtype, device)
    decoder = Decoder(shared, spec.max_len, _weight_format(spec.head_format, spec, ops, device, stored))
    if dummy:
        load_dummy(decoder, model.seed, progress)
    elif model.load_format == "auto":
        load_checkpoint(decoder, model_dir, progress)
    else:
        raise ConfigError(f"--load-format {model.load_format!r} is unknown: use auto or dummy.", param="load_format")
    return LoadedModel(spec, decoder, defaults, ops, mesh, host_times)
