"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) as options and memory plan read them: their names, folders, ranks and bytes.

An adapter adds scale * B A x to the output of a linear, A [rank, inputs] and B [outputs, rank].
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.ranks import units_on_rank
from ridgeline.core.sizing import DrafterMemory
from ridgeline.core.spec import DTYPE_BYTES, LayerSpec, ModelSpec

CONFIG_FILE = "adapter_config.json"
SLOTS, RANK = 8, 16
"""Adapters that may be loaded, and their largest rank, if neither options nor adapters of the start say otherwise."""
RANK_STEP = 8
"""Ranks in memory are multiples of it; zeros fill them up."""


def read_modules(text: str) -> dict[str, str]:
    """The folder of each adapter by its name, of NAME=FOLDER,NAME=FOLDER. Raises ConfigError."""
    folders: dict[str, str] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, folder = (part.strip() for part in item.partition("="))
        if not (name and equals and folder):
            raise ConfigError(f"--lora-modules has {item!r}: give NAME=FOLDER.", param="lora_modules")
        if name in folders:
            raise ConfigError(f"--lora-modules names {name!r} twice: give each adapter a name.", param="lora_modules")
        folders[name] = folder
    return folders


def read_config(folder: Path) -> dict[str, Any]:
    """The content of an adapter's adapter_config.json. Raises ConfigError."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{folder} is not a LoRA adapter: {CONFIG_FILE} cannot be read ({error.strerror}). Give a folder that PEFT saved."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): save the adapter again.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object: save the adapter again.")
    return config


def largest_rank(config: dict[str, Any]) -> int:
    """The largest rank that an adapter_config.json names. Raises ConfigError for a rank that is no positive whole number."""
    pattern = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict):
        raise ConfigError(f"rank_pattern of {CONFIG_FILE} is {pattern!r}: it must be an object.")
    ranks = [config.get("r"), *pattern.values()]
    for rank in ranks:
        if type(rank) is not int or rank < 1:
            raise ConfigError(
                f"{CONFIG_FILE} has the rank {rank!r}: ranks (r, rank_pattern) are whole numbers from 1 on."
            )
    return max(ranks)


def padded_rank(rank: int) -> int:
    """The rank that an adapter has in memory."""
    return -(-rank // RANK_STEP) * RANK_STEP


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """Adapters that may be loaded at a time, and their largest rank. 0 slots: a server without adapters."""

    slots: int = 0
    rank: int = 0

    def bytes(self, spec: ModelSpec, ranks: int = 1) -> int:
        """Memory of all slots on each of `ranks` tensor ranks."""
        values = sum(_layer_values(spec, layer, ranks) for layer in spec.layers) if self.slots else 0
        return self.slots * padded_rank(self.rank) * values * DTYPE_BYTES[spec.dtype]


def plan_adapters(model: ModelConfig) -> AdapterPlan:
    """What the options allow. Raises ConfigError for adapters of the start that exceed them."""
    folders = read_modules(model.lora_modules)
    if not folders and not model.enable_lora:
        return AdapterPlan()
    needed = max((largest_rank(read_config(Path(folder))) for folder in folders.values()), default=0)
    slots, rank = model.max_loras or max(SLOTS, len(folders)), model.max_lora_rank or max(RANK, needed)
    if len(folders) > slots:
        raise ConfigError(
            f"--lora-modules names {len(folders)} adapters, and --max-loras is {slots}: raise it.", param="max_loras"
        )
    if needed > 256 or needed > rank:
        raise ConfigError(
            f"--lora-modules has an adapter of rank {needed}, and at most {min(rank, 256)} is possible: "
            "raise --max-lora-rank (up to 256), or leave the adapter out.",
            param="max_lora_rank",
        )
    return AdapterPlan(slots, rank)


def with_adapters(drafters: DrafterMemory, model: ModelConfig, spec: ModelSpec, ranks: int) -> DrafterMemory:
    """The memory that drafters take, and that of adapters beside it."""
    return replace(drafters, bytes=drafters.bytes + plan_adapters(model).bytes(spec, ranks))


def _layer_values(spec: ModelSpec, layer: LayerSpec, ranks: int) -> int:
    """Values of A and B in a layer for each unit of rank, on one of `ranks` tensor ranks."""
    parts = [(layer.n_heads, layer.head_dim)] + [(layer.n_kv_heads, layer.head_dim)] * 2 * bool(layer.written_heads)
    qkv = sum(spec.d_model + units_on_rank(units, ranks) * width for units, width in parts)
    out = units_on_rank(layer.n_heads, ranks) * layer.head_dim + spec.d_model
    inner = units_on_rank(layer.d_ff, ranks)
    return qkv + out + 2 * (spec.d_model + inner) + inner + spec.d_model
