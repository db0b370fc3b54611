"""Loads the weights of a decoder from safetensors files or a GGUF file, or creates dummy weights from config.json.

A checkpoint is read tensor by tensor in file order, directly into the weights on the device. Files are memory-mapped, a GPU
receives them through a few pinned buffers, and merged projections are filled in place. Besides the weights the device holds one
tensor of the checkpoint at a time. The names of tensors in checkpoints are data below.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.spec import ModelSpec
from ridgeline.gguf.folder import LINK, SUFFIX
from ridgeline.gguf.tensors import GgufTensors
from ridgeline.models.decoder import Decoder
from ridgeline.models.layers import DecoderLayer
from ridgeline.models.tensor_names import as_llama
from ridgeline.models.upload import Upload
from ridgeline.quant.bitmask import dense_tensors
from ridgeline.quant.format import Expected, max_abs

Progress = Callable[[str, int, int], None]
"""(stage, done, total) in bytes or elements of one stage."""

EMBEDDING, FINAL_NORM, HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"
POSITIONS = "embed_positions.weight"
LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# Linears that only some models have: of experts, and of a feed-forward block without a gate.
OTHER_LINEARS = {
    "up": ("mlp.up_proj",),
    "router": ("mlp.gate",),
    "shared_gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_down": ("mlp.shared_expert.down_proj",),
    "shared_gate": ("mlp.shared_expert_gate",),
}
EXPERTS = "mlp.experts"
# Mixtral's names of the block and of an expert's projections.
EXPERT_ALIASES = {"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
NORMS = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
POST_NORMS = {
    **NORMS,
    "attention_post_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}
# Prefixes of the decoder's tensors in checkpoints: multimodal models (old and new layout), causal language models.
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
# Tensors that a text decoder does not need: rotary tables of old exports, and the vision parts of Gemma 3.
UNUSED = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^(model\.)?(vision_tower|multi_modal_projector)\.")
# Published fp8 checkpoints use two names for the scale of a matrix. Both scales are multipliers.
SCALE_ALIASES = {".weight_scale_inv": ".weight_scale"}


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of a checkpoint tensor: expected shape and dtypes, kind, and the function that loads it."""

    expected: Expected
    kind: Literal["weight", "bias", "norm"]
    load: Callable[[torch.Tensor], object]


def targets(decoder: Decoder) -> dict[str, Target]:
    """Every tensor that the decoder needs, by its name in checkpoints without prefix."""
    spec, stage = decoder.spec, decoder.stage
    tensor_targets: dict[str, Target] = {}
    if len(decoder.embedding) or decoder.copies_embedding:
        tensor_targets[EMBEDDING] = Target(Expected((spec.vocab_size, spec.d_model)), "weight", decoder.load_embedding)
    if len(decoder.positions):
        tensor_targets[POSITIONS] = Target(Expected(tuple(decoder.positions.shape)), "weight", decoder.positions.copy_)
    if stage.last:
        tensor_targets.update(_norms("norm", decoder.final_norm))
    if decoder.head is not None and not (spec.shares_embedding or decoder.copies_embedding):
        dtypes = decoder.head.expects[0, "weight"].dtypes
        tensor_targets[HEAD] = Target(Expected((spec.vocab_size, spec.d_model), dtypes), "weight", decoder.load_head)
    for index, layer in enumerate(decoder.layers, stage.layers.start or 0):
        for name, target in layer_targets(layer, POST_NORMS if spec.post_norms else NORMS):
            tensor_targets[f"layers.{index}.{name}"] = target
    return tensor_targets


def layer_targets(layer: DecoderLayer, norms: Mapping[str, str]) -> Iterator[tuple[str, Target]]:
    """Every tensor of a layer, by its name in checkpoints behind that of the layer. norms: NORMS or POST_NORMS."""
    attention, feed_forward = layer.attention, layer.feed_forward
    for field, weight in (*attention.linears(), *feed_forward.linears()):
        names = _projections(field)
        for (part, suffix), expected in weight.expects.items():
            kind: Literal["weight", "bias"] = "bias" if suffix == "bias" else "weight"
            yield f"{names[part]}.{suffix}", Target(expected, kind, partial(weight.load, part, suffix))
    if (sinks := attention.sinks) is not None:
        heads = len(sinks) * attention.share.size
        held = attention.share.span(heads, heads)
        yield "self_attn.sinks", Target(Expected((heads,)), "bias", lambda tensor: sinks.copy_(tensor[held]))
    for field, name in norms.items():
        vector = getattr(attention if field in ("q_norm", "k_norm") else layer, field)
        if vector is not None:
            yield from _norms(name, vector, attention.norm_cuts.get(field))


def _projections(field: str) -> tuple[str, ...]:
    """Names of the projections that a weight merges. field: as the layer's `linears` name it, "3.down" for that of expert 3."""
    expert, dot, linear = field.partition(".")
    if not dot:
        return LINEARS.get(field) or OTHER_LINEARS[field]
    return tuple(name.replace("mlp.", f"{EXPERTS}.{expert}.") for name in LINEARS[linear])


def _norms(name: str, norm: torch.Tensor, cut: tuple[int, slice] | None = None) -> Iterator[tuple[str, Target]]:
    """The weight of a norm, and its bias if it has one, see Build.norm. cut: see Attention.norm_cuts."""
    size, held = cut or (norm.shape[-1], slice(None))
    weight, *bias = norm if norm.dim() == 2 else (norm,)
    yield f"{name}.weight", Target(Expected((size,)), "norm", lambda tensor: weight.copy_(tensor[held]))
    for vector in bias:
        yield f"{name}.bias", Target(Expected((size,)), "bias", vector.copy_)


def short_name(name: str) -> str:
    """The name of a checkpoint tensor without the prefix of the model, with one name for scales."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    if ".experts." in name or "block_sparse_moe." in name:
        for theirs, ours in EXPERT_ALIASES.items():
            name = name.replace(theirs, ours)
    for suffix, ours in SCALE_ALIASES.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix) + ours
    return name


Tensors = Iterator[tuple[str, Callable[[], torch.Tensor]]]
"""(name in the checkpoint, function that reads the tensor)."""


def separate_experts(tensors: Tensors) -> Tensors:
    """Yield the tensors of a checkpoint with one tensor for each projection of each expert.

    Some checkpoints store an `experts.gate_up_proj` [experts, 2 width, d_model] and an `experts.down_proj` for all experts.
    """
    for name, get in tensors:
        block, _, projection = name.rpartition(".experts.")
        if projection not in ("gate_up_proj", "down_proj"):
            yield name, get
            continue
        for number, expert in enumerate(get()):
            halves = expert.chunk(2) if projection == "gate_up_proj" else (expert,)
            names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
            for linear, half in zip(names, halves, strict=True):
                yield f"{block}.experts.{number}.{linear}.weight", partial(_unchanged, half)


# --- reading ----------------------------------------------------------------------------------------------------------


def checkpoint_files(folder: Path) -> tuple[Path, ...]:
    """The files of a model folder: those of model.safetensors.index.json, model.safetensors, a linked GGUF file, or all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = tuple(folder / name for name in sorted(set(named.values())))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} is not a safetensors index ({error!r}): download the model again.") from None
    elif (folder / "model.safetensors").is_file():
        files = (folder / "model.safetensors",)
    elif (folder / LINK).is_file():
        files = (folder / LINK,)
    else:
        files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        others = sorted(path.name for pattern in ("*.bin", "*.gguf", "*.pt", "*.pth") for path in folder.glob(pattern))
        remedy = (
            f" Convert {', '.join(others[:4])} to safetensors first (a *.gguf is served by its path)." if others else ""
        )
        raise ConfigError(f"{folder} has no *.safetensors.{remedy} For random weights use --load-format dummy.")
    lost = [path.name for path in files if not path.is_file()]
    if lost:
        raise ConfigError(f"{folder} lacks {', '.join(lost)}, which its index lists: download the model again.")
    return files


@contextmanager
def opened(path: Path) -> Iterator[safe_open | GgufTensors]:
    """Open a safetensors or GGUF file, memory-mapped. Raises ConfigError with the remedy if it cannot be read."""
    if path.suffix == SUFFIX:
        yield GgufTensors(path)
        return
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except SafetensorError as error:
        raise ConfigError(f"{path} is not a complete safetensors file ({error}): download it again.") from None
    except (
        FileNotFoundError,
        PermissionError,
    ) as error:  # safetensors raises FileNotFoundError for missing permission, too
        remedy = "give this user the right to read it" if path.is_file() else "download it again"
        raise ConfigError(f"{path} cannot be opened ({error}): {remedy}.") from None


def load_checkpoint(decoder: Decoder, folder: Path, progress: Progress | None = None) -> None:
    """Load the decoder from `folder`. Raises UnsupportedModel that names missing, unknown or misshapen tensors."""
    files = checkpoint_files(folder)
    device = decoder.embedding.device
    upload = Upload(device) if device.type == "cuda" else _unchanged
    wanted, unknown = targets(decoder), []
    sizes: dict[str, torch.Tensor] = {}
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        with opened(path) as shard:
            for name, get in separate_experts(
                as_llama(decoder.spec, dense_tensors(shard.offset_keys(), shard.get_tensor))
            ):
                key = short_name(name)
                target = wanted.pop(key, None)
                if target is None:
                    elsewhere = (
                        (key == HEAD and decoder.spec.tied)
                        or _of_another_rank(key, decoder)
                        or predicts(key, decoder.spec)
                    )
                    if not UNUSED.search(name) and not elsewhere and not _no_bias(key, get()):
                        unknown.append(name)
                    continue
                tensor = get()
                _check(name, tensor, target.expected)
                uploaded = upload(tensor)
                if uploaded.is_floating_point():
                    sizes[name] = max_abs(uploaded)
                _take(name, uploaded, target)
                done += tensor.nbytes
                if progress is not None:
                    progress("weights", min(done, total), total)
    if wanted or unknown:
        parts = [("lacks the tensors", sorted(wanted)), ("has the unknown tensors", sorted(unknown))]
        problems = " and ".join(f"{verb} {_listed(names)}" for verb, names in parts if names)
        raise UnsupportedModel(f"The checkpoint {folder} {problems}. Check that config.json belongs to these weights.")
    _refuse_odd(sizes, decoder.embedding.dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # return the memory of temporary tensors, for the KV cache
    if progress is not None:
        progress("weights", total, total)


def _of_another_rank(name: str, decoder: Decoder) -> bool:
    """Whether a tensor that the decoder does not need belongs to another stage of its pipeline, or to experts of another rank."""
    layers = range(len(decoder.spec.layers))
    layer = re.match(r"layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?", name)
    if layer is not None and layer[2] is not None and int(layer[1]) in layers:
        experts = decoder.spec.layers[int(layer[1])].experts
        if experts is not None and experts.whole and int(layer[2]) < experts.count:
            return True
    if decoder.stage.count == 1:
        return False
    others = set(layers) - set(layers[decoder.stage.layers])
    return name in (EMBEDDING, POSITIONS, FINAL_NORM, "norm.bias", HEAD) if layer is None else int(layer[1]) in others


def predicts(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor, by its short name, is of a layer for multi-token prediction, which only a drafter reads (models.eagle)."""
    layer = re.match(r"(mtp_)?layers\.(\d+)\.", name)
    return layer is not None and int(layer[2]) - (0 if layer[1] else len(spec.layers)) in range(spec.mtp_layers)


def _no_bias(name: str, tensor: torch.Tensor) -> bool:
    """Whether the tensor is a bias of zeros, which some GPTQ checkpoints have for layers without biases."""
    return name.endswith("_proj.bias") and not bool(tensor.any())


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _check(name: str, tensor: torch.Tensor, expected: Expected) -> None:
    """Raise UnsupportedModel for a tensor of another shape or dtype."""
    shape, dtypes = expected.shape, expected.dtypes
    is_scalar = tensor.numel() == math.prod(shape) == 1
    if expected.shape_of(tensor) != shape and not is_scalar:
        raise UnsupportedModel(
            f"The tensor {name} has shape {list(tensor.shape)}, but config.json requires {list(shape)}."
        )
    if tensor.dtype not in dtypes:
        raise UnsupportedModel(
            f"The tensor {name} has dtype {tensor.dtype}, but config.json requires {' or '.join(map(str, dtypes))}."
        )


def _refuse_odd(sizes: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Raise UnsupportedModel for tensors with NaN, infinity or values beyond `dtype`. sizes: largest magnitude of each tensor."""
    largest = torch.stack(list(sizes.values())).tolist()
    odd = [name for name, size in zip(sizes, largest, strict=True) if not size <= torch.finfo(dtype).max]
    if odd:
        raise UnsupportedModel(
            f"The checkpoint has values that are NaN, infinite or beyond {str(dtype).removeprefix('torch.')} in {_listed(odd)}: "
            "download it again, use another checkpoint, or use --dtype bfloat16 if they are beyond float16."
        )


def _take(name: str, tensor: torch.Tensor, target: Target) -> None:
    """Load one tensor. Errors name it."""
    try:
        target.load(tensor)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"The tensor {name} {error.message}") from None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


# --- dummy weights ----------------------------------------------------------------------------------------------------


def load_dummy(decoder: Decoder, seed: int, progress: Progress | None = None) -> None:
    """Load random weights that keep activations of order one. They are determined by seed, device type and spec.

    Matrices and biases are uniform with standard deviation 0.02, as at the start of most trainings; norms multiply by 1.
    """
    wanted = targets(decoder)
    total, done = sum(math.prod(target.expected.shape) for target in wanted.values()), 0
    for name, target in wanted.items():
        target.load(_dummy_tensor(name, target, seed, decoder))
        done += math.prod(target.expected.shape)
        if progress is not None:
            progress("weights", done, total)


def _dummy_tensor(name: str, target: Target, seed: int, decoder: Decoder) -> torch.Tensor:
    like = decoder.embedding
    tensor = torch.empty(target.expected.shape, dtype=like.dtype, device=like.device)
    if target.kind == "norm":
        return tensor.fill_(0.0 if decoder.spec.norm_offset else 1.0)
    if tensor.is_meta:
        return tensor
    noise = torch.Generator(device=like.device)
    noise.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    bound = 0.02 * math.sqrt(3.0)
    return tensor.uniform_(-bound, bound, generator=noise)
