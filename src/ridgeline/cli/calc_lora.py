"""`ridgeline calc lora`: memory of the slots of LoRA adapters of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.cli.calc_lines import Line, Option, gb
from ridgeline.cli.flags import Arguments, whole_number
from ridgeline.cli.roofline import read_spec
from ridgeline.cli.serve import resolve_arguments
from ridgeline.core.adapters import RANK, SLOTS, AdapterPlan, padded_rank
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted

OPTIONS: dict[str, Option] = {
    "max_loras": (whole_number, f"adapters that may be loaded at a time (default: {SLOTS})"),
    "max_lora_rank": (whole_number, f"their largest rank, up to 256 (default: {RANK})"),
    "tensor_parallel_size": (whole_number, "ranks that divide the model, and the adapters with it (default: 1)"),
}


def lora(args: Arguments, options: Mapping[str, Any]) -> list[Line]:
    """Memory of the slots of LoRA adapters on each rank, as --max-loras and --max-lora-rank reserve it at the start."""
    resolved = resolve_arguments(args)
    spec, ranks = read_spec(resolved.model), resolved.engine.tensor_parallel_size
    slots, rank = resolved.model.max_loras or SLOTS, resolved.model.max_lora_rank or RANK
    if spec.has_experts:
        raise ConfigError("Adapters change no experts so far: give a model without experts.", param="model")
    spec.on_rank(ranks)  # raises for heads that so many ranks cannot share
    each, all_slots = (AdapterPlan(number, rank).bytes(spec, ranks) for number in (1, slots))
    place = "" if ranks == 1 else f", on each of {counted(ranks, 'rank')}"
    share = all_slots / spec.on_rank(ranks).weight_bytes
    return [
        Line("adapter_bytes", f"one adapter of rank {padded_rank(rank)}{place}", each, gb(each)),
        Line("slots_bytes", counted(slots, "slot"), all_slots, gb(all_slots)),
        Line("share_of_weights", "slots / weights", share, f"{share:.1%}"),
    ]
