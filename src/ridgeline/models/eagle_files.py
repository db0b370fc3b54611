"""Reads published EAGLE-1 and EAGLE-3 heads, and MTP layers of a model's own checkpoint, into one form.

EAGLE-1 (Li et al. 2024, arXiv:2401.15077) and EAGLE-3 (Li et al. 2025, arXiv:2503.01840) are folders of their own, in the names of
the authors' files, of SGLang, of vLLM or of the speculators library. MTP layers (multi-token prediction, DeepSeek-AI 2024,
arXiv:2412.19437, section 2.2) stand in the checkpoint behind the last layer (DeepSeek, GLM) or under `mtp_layers` (MiMo).
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from os import SEEK_END
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.core.spec import DTYPE_BYTES, LayerSpec, ModelSpec
from ridgeline.models.config import read_spec
from ridgeline.models.fingerprint import content_hash
from ridgeline.models.tensor_names import as_llama
from ridgeline.models.weights import UNUSED, checkpoint_files, opened, separate_experts, short_name

PUBLISHED = "pytorch_model.bin"
"""File name of published heads that are not in safetensors."""
DIRECTORY = 1 << 16
"""Bytes at the end of it that hold at least the directory of its zip file."""
LAYER = "layer."
"""Prefix of the layer's tensors in HeadFiles.tensors."""
_EAGLE_NAMES = (
    (r"^model\.", ""),
    (r"^fusion_fc\.", "fc."),
    (r"^embedding_layernorm\.", "embed_norm."),
    (r"^hidden_states_layernorm\.", "hidden_norm."),
    (r"^lm_head\.", "head."),
    (r"^(layers\.0|transformer)\.", LAYER),
)
_EAGLE3_NAMES = (
    (r"^model\.", ""),
    (r"^layers\.0\.", "midlayer."),
    (r"^midlayer\.hidden_norm\.", "hidden_norm."),
    (r"^midlayer\.input_layernorm\.", "embed_norm."),
    (r"^midlayer\.", LAYER),
    (r"^norm\.", "final_norm."),
    (r"^lm_head\.", "head."),
)
_MTP_NAMES = (
    (r"^(eh_proj|input_proj)\.", "fc."),
    (r"^(enorm|token_layernorm)\.", "embed_norm."),
    (r"^(hnorm|hidden_layernorm)\.", "hidden_norm."),
    (r"^(shared_head\.norm|final_layernorm)\.", "final_norm."),
    (r"^shared_head\.head\.", "head."),
    (r"^(?!fc\.|embed_norm\.|hidden_norm\.|final_norm\.|head\.|embed_tokens\.)", LAYER),
)
_KEYS_OF_HEADS = frozenset(
    (
        "bias",
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
        "embed_requires_grad",
        "fusion_bias",
        "has_no_defaults_at_init",
        "layernorms",
        "norm_before_residual",
        "qkv_bias",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "target_hidden_size",
        "transformer_layer_architecture",
        "transformer_layer_config",
        "add_para_norm",
    )
)
"""Keys of a head's config.json that a model's does not have. The tensors say which norms and biases there are."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head as its files describe it.

    form: its inputs, see models.eagle. spec: of its layer, the only one. taps: layers of the target before which EAGLE-3 reads
    the residual stream. tensors: by the names of _EAGLE_NAMES' replacements; LAYER and the names of models.weights for the layer.
    ids: int32 [N], the tokens of its own head; None: all. norm_before_residual: the normed features are the layer's residual stream
    (EAGLE-3). state_first: the features come before the embedding (MiMo), whose next state is behind the final norm.
    """

    form: Literal["eagle", "eagle3", "mtp"]
    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    taps: tuple[int, ...] = ()
    ids: Tensor | None = None
    norm_before_residual: bool = False
    state_first: bool = False


def read_eagle(folder: Path, target: ModelSpec) -> HeadFiles:
    """The EAGLE head in `folder` for `target`. Raises ConfigError for files that are missing, broken, of another format, or for
    another model."""
    config, spec = eagle_spec(folder, target)
    raw = {name: tensor for name, tensor in _stored(folder).items() if not UNUSED.search(name)}
    third = any(re.search(r"(^|\.)(midlayer|hidden_norm)\.", name) for name in raw)
    tensors = {_renamed(name, _EAGLE3_NAMES if third else _EAGLE_NAMES): tensor for name, tensor in raw.items()}
    if "fc.weight" not in tensors:
        raise _refused(
            folder,
            f"it has no tensor fc.weight, but {_listed(sorted(raw))}: give a folder with an EAGLE-1 or EAGLE-3 head",
        )
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if not third:
        return HeadFiles("eagle", spec, tensors)
    ids = None if d2t is None else _ids(folder, d2t, t2d, target.vocab_size)
    before = bool(config.get("norm_before_residual", False))
    return HeadFiles("eagle3", spec, tensors, _taps(folder, config, len(target.layers)), ids, before)


def eagle_spec(folder: Path, target: ModelSpec) -> tuple[dict[str, Any], ModelSpec]:
    """(config.json of the head, spec of its layer), without reading weights. Raises ConfigError."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        inner = config.get("transformer_layer_config") or (config if config.get("model_type") != "eagle" else {})
        layer = dict(inner or config.get("model") or {})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _refused(folder, f"config.json cannot be read ({error}): give a folder with an EAGLE head") from None
    layer = {key: value for key, value in layer.items() if key not in _KEYS_OF_HEADS}
    layer |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    layer.setdefault("max_position_embeddings", target.max_len)
    layer.setdefault("vocab_size", target.vocab_size)
    layer.setdefault("num_hidden_layers", 1)
    try:
        spec = read_spec(layer)
    except RidgelineError as error:
        raise _refused(folder, error.message) from None
    if len(spec.layers) != 1:
        raise _refused(
            folder,
            f"num_hidden_layers is {len(spec.layers)}, but only heads of one layer are supported: use another head",
        )
    third = {"draft_vocab_size", "target_hidden_size", "eagle_config"} & config.keys()
    width = config.get("target_hidden_size") or spec.d_model
    for key, value, wanted in (
        ("hidden_size", width, target.d_model),
        ("vocab_size", spec.vocab_size, target.vocab_size),
    ):
        if value != wanted and not (key == "hidden_size" and third and not config.get("target_hidden_size")):
            raise _refused(folder, f"{key} is {value}, but {wanted} in the served model: use a head for this model")
    return config, replace(spec, dtype=target.dtype, max_len=target.max_len, kv_format=target.kv_format)


def mtp_spec(target: ModelSpec) -> ModelSpec:
    """Spec of the target's first MTP layer, which is like its last layer. Raises ConfigError for a model without one."""
    if not target.mtp_layers:
        raise ConfigError(
            "--speculate mtp: config.json of the served model has no num_nextn_predict_layers, so the checkpoint has no layers for "
            "multi-token prediction: use --speculate reference, or eagle:FOLDER.",
            param="speculate",
        )
    return replace(target, layers=(replace(target.layers[-1], share_from=None),), quantization="", mtp_layers=0)


def read_mtp(folder: Path, target: ModelSpec) -> HeadFiles:
    """The first MTP layer of the checkpoint in `folder`. Raises ConfigError."""
    spec, stored = mtp_spec(target), dict[str, Tensor]()
    pattern = _mtp_prefix(target)
    for path in checkpoint_files(folder):
        with opened(path) as shard:
            tensors = (
                (name, lambda name=name: shard.get_tensor(name)) for name in shard.offset_keys() if pattern.match(name)
            )
            for name, get in separate_experts(as_llama(target, iter(tensors))):
                stored[pattern.sub("", short_name(name))] = get()
    if not stored:
        raise _refused(
            folder,
            f"the checkpoint has neither model.layers.{len(target.layers)}.* nor model.mtp_layers.0.*, "
            "although config.json has num_nextn_predict_layers: download it again",
        )
    state_first = "input_proj.weight" in stored
    return HeadFiles(
        "mtp", spec, {_renamed(name, _MTP_NAMES): tensor for name, tensor in stored.items()}, state_first=state_first
    )


def mtp_bytes(folder: Path, target: ModelSpec) -> int:
    """Bytes of the first MTP layer on the device, without reading weights. Raises ConfigError."""
    spec, width = mtp_spec(target), DTYPE_BYTES[target.dtype]
    names = (
        [name for path in checkpoint_files(folder) for name in _names(path)]
        if any(folder.glob("*.safetensors"))
        else []
    )
    copies = sum(
        bool(re.search(r"(embed_tokens|shared_head\.head)\.weight$", name))
        for name in names
        if _mtp_prefix(target).match(name)
    )
    return spec.layer_bytes + (2 * spec.d_model**2 + 3 * spec.d_model + copies * spec.embedding_params) * width


def _mtp_prefix(target: ModelSpec) -> re.Pattern[str]:
    return re.compile(rf"^(model\.)?(layers\.{len(target.layers)}|mtp_layers\.0)\.")


def _names(path: Path) -> Sequence[str]:
    with opened(path) as shard:
        return list(shard.offset_keys())


def _taps(folder: Path, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Layers before which the residual stream is read. The key at the top counts hidden states, of which the embedding is the first
    (vLLM, speculators); in eagle_config it counts layers, after which it is read (SGLang, Model Optimizer)."""
    nested = config.get("eagle_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None and (after := nested.get("eagle_aux_hidden_state_layer_ids")) is not None:
        ids = [number + 1 for number in after]
    if nested.get("use_aux_hidden_state") is False:
        raise _refused(
            folder,
            "eagle_config.use_aux_hidden_state is false, so it reads the last state alone in EAGLE-3's form, which is not "
            "supported: use a head that reads several layers",
        )
    ids = (2, layers // 2, layers - 3) if ids is None else ids
    if not ids or not all(type(number) is int and 0 <= number < layers for number in ids):
        raise _refused(
            folder,
            f"the layers {list(ids)} that it reads (eagle_aux_hidden_state_layer_ids) are not all from 0 to {layers - 1}, the "
            "layers of the served model: use a head for this model",
        )
    return tuple(ids)


def _ids(folder: Path, d2t: Tensor, t2d: Tensor | None, vocab: int) -> Tensor:
    """The token of each logit. d2t: differences between token and index. t2d: bool [vocab], the tokens that have a logit."""
    ids = d2t.long() + torch.arange(len(d2t))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < len(ids):
        raise _refused(
            folder, f"the tensor d2t does not give {len(ids)} different tokens from 0 to {vocab - 1}: download it again"
        )
    if t2d is not None and (t2d.shape != (vocab,) or int(t2d.sum()) != len(ids) or not bool(t2d[ids].all())):
        raise _refused(
            folder, f"the tensor t2d {list(t2d.shape)} does not mark the {len(ids)} tokens of d2t: download it again"
        )
    return ids.int()


def head_hash(folder: Path) -> bytes:
    """Content hash of a folder with a head, see models.fingerprint. Of pytorch_model.bin the end counts: the directory of the zip
    file, with a CRC-32 of every tensor."""
    if any(folder.glob("*.safetensors")) or not (folder / PUBLISHED).is_file():
        return content_hash(folder)
    with (folder / PUBLISHED).open("rb") as file:
        file.seek(-min(DIRECTORY, file.seek(0, SEEK_END)), SEEK_END)
        return sha256((folder / "config.json").read_bytes() + file.read()).digest()


def _stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a head's folder."""
    if any(folder.glob("*.safetensors")):
        return dict(_read(checkpoint_files(folder)))
    if not (folder / PUBLISHED).is_file():
        raise _refused(folder, f"it has neither *.safetensors nor {PUBLISHED}: give a folder with an EAGLE head")
    try:
        tensors: dict[str, Tensor] = torch.load(folder / PUBLISHED, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise _refused(folder, f"{PUBLISHED} cannot be read ({error}): download it again") from None
    return tensors


def _read(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        with opened(path) as shard:
            for name in shard.offset_keys():
                yield name, shard.get_tensor(name)


def _renamed(name: str, patterns: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def check_tensors(folder: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError that names tensors which are missing, unknown, of another shape or not floating-point."""
    lacking, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if lacking or unknown:
        parts = [("it lacks the tensors", lacking), ("it has the unknown tensors", unknown)]
        reason = " and ".join(f"{verb} {_listed(names)}" for verb, names in parts if names)
        raise _refused(folder, f"{reason}: download it again, or use another head")
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise _refused(
                folder,
                f"the tensor {name} is {list(tensor.shape)} of {tensor.dtype}, but the served model needs {list(shape)}, not "
                "quantized: use a head for this model",
            )


def head_layers(form: str, folder: Path, target: ModelSpec) -> tuple[LayerSpec, ...]:
    """The layer that a head adds to the target's pages."""
    return (mtp_spec(target) if form == "mtp" else eagle_spec(folder, target)[1]).layers


def _refused(folder: Path, reason: str) -> ConfigError:
    return ConfigError(f"--speculate: {folder} cannot be used as a head: {reason.rstrip('.')}.", param="speculate")
