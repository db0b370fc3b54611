"""What describes a model family: the keys of its config.json and its properties.

`fields` lists every key that affects the computation, with its default in the family (REQUIRED: the key must be present). `fixed`
lists keys that may be present, with their supported values. `traits` are ModelSpec fields of the whole family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The keys that state the fields of ExpertSpec. count: the first key that is present counts. normalized: may be a fixed value.
    shared_width: "" without an expert that all tokens use. bias: see ExpertSpec."""

    count: tuple[str, ...]
    width: str
    normalized: str | bool
    shared_width: str = ""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type` of Hugging Face's config.json.

    windows: which layers have a sliding window. "all": every layer if `sliding_window` is set (Mistral). "listed": those in
    `layer_types`. Without that key every `pattern`-th layer is global and the others have a window; for pattern 0 the layers from
    `max_window_layers` on have one if `use_sliding_window` is set (Qwen). None: the family has no windows. scaled_embedding:
    embeddings are multiplied by the root of the model's width. experts: None: the family has none.

    renamed: the family's name of a key -> its name in other families, which `fields` has. numbers: field of ModelSpec -> (key,
    power): the field is the key's value to this power; null: the field keeps its default. switches: field of ModelSpec -> key of a
    bool. rotated: layers with a rotary embedding. "windowed": in a model with windows, those with one. "none": a table of positions
    is learned instead.
    """

    label: str
    architectures: tuple[str, ...]
    fields: Mapping[str, Any]
    traits: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    scaled_embedding: bool = False
    experts: ExpertKeys | None = None
    windows: Literal["all", "listed"] | None = None
    pattern: int = 0
    renamed: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    rotated: Literal["all", "windowed", "none"] = "all"


SHAPE: dict[str, Any] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": REQUIRED,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "original_max_position_embeddings": None,
}
"""Keys that most families have."""
