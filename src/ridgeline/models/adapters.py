"""Reads LoRA adapters in PEFT's layout, and gives them to the linears of a decoder.

A folder has adapter_config.json and adapter_model.safetensors, with tensors PREFIX.MODULE.lora_A.weight [rank, inputs] and
lora_B.weight [outputs, rank]. The scale of a module is alpha / rank, or alpha / sqrt(rank) with use_rslora (Kalajdzievski 2023,
arXiv:2312.03732). What changes more than linears of the layers is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ridgeline.core.adapters import CONFIG_FILE, largest_rank, read_config
from ridgeline.core.errors import ConfigError
from ridgeline.models.decoder import Decoder
from ridgeline.models.weights import LINEARS, short_name
from ridgeline.quant.adapted import AdaptedWeight, Factors

WEIGHTS_FILE = "adapter_model.safetensors"
READ = frozenset(
    {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "init_lora_weights"}
)
WITHOUT_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path eva_config exclude_modules inference_mode layers_pattern layers_to_transform "
    "loftq_config lora_dropout megatron_core peft_version qalora_group_size revision runtime_config target_modules "
    "task_type".split()
)
"""Keys that say which modules were trained, and how: the tensors of the file show it. Any other key must be empty or false."""
PLAIN_STARTS = frozenset({"gaussian", "eva", "mica", "orthogonal"})
"""Values of init_lora_weights, beside true and false, that leave the base weights as they are."""
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")


class Adapter(NamedTuple):
    """An adapter in host memory. factors: by module, such as layers.3.self_attn.q_proj. fingerprint: hash of its files."""

    folder: Path
    rank: int
    fingerprint: str
    factors: Mapping[str, Factors]


@dataclass(frozen=True, slots=True)
class Linears:
    """The linears of a decoder that adapters change: weight, and the modules that are its parts."""

    weights: list[tuple[AdaptedWeight, tuple[str, ...]]]

    @staticmethod
    def of(decoder: Decoder) -> Linears:
        return Linears(list(_linears(decoder)))

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each module."""
        return {
            module: (rows, columns)
            for weight, modules in self.weights
            for module, (rows, columns) in zip(modules, weight.part_shapes, strict=True)
        }

    def store(self, slot: int, adapter: Adapter) -> None:
        """Write an adapter to a slot. No step that uses the slot may follow before it ends."""
        for weight, modules in self.weights:
            weight.store(slot, [adapter.factors.get(module) for module in modules])


def _linears(decoder: Decoder) -> Iterator[tuple[AdaptedWeight, tuple[str, ...]]]:
    for index, layer in enumerate(decoder.layers, decoder.stage.layers.start or 0):
        for field, weight in (*layer.attention.linears(), *layer.feed_forward.linears()):
            if isinstance(weight, AdaptedWeight):
                yield weight, tuple(f"layers.{index}.{name}" for name in LINEARS[field][: len(weight.part_shapes)])


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], most: int, dtype: torch.dtype) -> Adapter:
    """Read and check an adapter.

    Args:
        shapes: outputs and inputs of every module that an adapter may change.
        most: the largest rank (--max-lora-rank).
        dtype: of the factors.
    Raises:
        ConfigError: names what is wrong, and the remedy.
    """
    config = read_config(folder)
    _check_config(config, folder)
    if (rank := largest_rank(config)) > most:
        raise ConfigError(
            f"The adapter in {folder} has rank {rank}, and this server takes up to {most}: restart it with --max-lora-rank {rank}."
            if rank <= 256
            else f"The adapter in {folder} has rank {rank}: at most 256 is supported."
        )
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        old = " Convert adapter_model.bin to safetensors first." if (folder / "adapter_model.bin").is_file() else ""
        raise ConfigError(f"{folder} has no {WEIGHTS_FILE}: give a folder that PEFT saved.{old}")
    tensors = _read_tensors(path)
    factors = {}
    for module, (full_name, pair) in tensors.items():
        if module not in shapes:
            raise ConfigError(
                f"The adapter in {folder} changes {full_name}, which is not a linear of a layer of this model: adapters may change "
                f"{', '.join(name.rpartition('.')[2] for names in LINEARS.values() for name in names)}."
            )
        factors[module] = _scaled(pair, full_name, config, shapes[module], folder, dtype)
    if not factors:
        raise ConfigError(f"{path} has no tensors: save the adapter again.")
    with path.open("rb") as file:
        digest = sha256((folder / CONFIG_FILE).read_bytes())
        while block := file.read(1 << 22):
            digest.update(block)
    return Adapter(folder, rank, digest.hexdigest(), factors)


def _check_config(config: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError for what would change more than linears, or change them in another way."""
    start = config.get("init_lora_weights", True)
    wrong = {
        "peft_type": config.get("peft_type") not in ("LORA", None),
        "bias": config.get("bias", "none") != "none",
        "init_lora_weights": not isinstance(start, bool) and start is not None and start not in PLAIN_STARTS,
    }
    wrong |= {key: bool(value) for key, value in config.items() if key not in READ | WITHOUT_EFFECT}
    for key, refused in wrong.items():
        if refused:
            raise ConfigError(
                f"The adapter in {folder} has {key} = {str(config[key])[:80]!r} in {CONFIG_FILE}, which is not supported: only "
                "LoRA on linears of the layers is. Merge the adapter into the model, or train it without."
            )


def _read_tensors(path: Path) -> dict[str, tuple[str, dict[str, torch.Tensor]]]:
    """Module -> its name in the file, and its tensors A and B."""
    tensors: dict[str, tuple[str, dict[str, torch.Tensor]]] = {}
    try:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                match = _TENSOR.fullmatch(key)
                if match is None:
                    raise ConfigError(
                        f"{path} has the tensor {key}, which is not supported: only lora_A and lora_B of linears are. Train the "
                        "adapter without it."
                    )
                _, pair = tensors.setdefault(short_name(match[1]), (match[1], {}))
                pair[match[2]] = file.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): save the adapter again.") from None
    return tensors


def _scaled(
    pair: Mapping[str, torch.Tensor],
    module: str,
    config: Mapping[str, Any],
    shape: tuple[int, int],
    folder: Path,
    dtype: torch.dtype,
) -> Factors:
    """A and scale * B of a module. Raises ConfigError for shapes and values that cannot be."""
    rank = _of_pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _of_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise ConfigError(f"{folder / CONFIG_FILE} has the alpha {alpha!r}: it must be a number.")
    expected = {"A": (rank, shape[1]), "B": (shape[0], rank)}
    for letter, wanted in expected.items():
        if letter not in pair:
            raise ConfigError(f"The adapter in {folder} has no lora_{letter} of {module}: save it again.")
        if (got := tuple(pair[letter].shape)) != wanted:
            raise ConfigError(
                f"lora_{letter} of {module} in {folder} has the shape {list(got)}, and this model and the rank {rank} need "
                f"{list(wanted)}: use the base model that the adapter was trained on."
            )
    a, b = pair["A"].float(), pair["B"].float() * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    a, b = a.to(dtype), b.to(dtype)
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        raise ConfigError(
            f"The adapter in {folder} has values of {module} that are not finite in {dtype}: train it again."
        )
    return a, b


def _of_pattern(pattern: Any, module: str, default: Any) -> Any:
    """The value of the first key that ends the module's name, as a regular expression (peft.utils.get_pattern_key)."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
