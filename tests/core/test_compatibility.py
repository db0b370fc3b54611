"""The table of refusals: every error names both options and a remedy, and the documentation shows every pair."""

from __future__ import annotations

import pytest

from ridgeline.core.compatibility import FEATURES, REFUSALS, Choice, Refusal, check_together
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.experts import ExpertSpec
from ridgeline.core.resolve import split_options
from ridgeline.core.spec import LayerSpec, Rope
from tools.compatibility import table
from tools.imports import ROOT

CHOSEN: dict[str, dict[str, object]] = {
    "retention": {"kv_retention": "window:keep=64"},
    "retention by attention": {"kv_retention": "snap:keep=64"},
    "adaptive retention": {"kv_retention": "adaptive:0.9"},
    "selection": {"kv_selection": 64},
    "weights in host memory": {"cpu_offload_gb": 1.0},
    "host memory": {"kv_offload_gb": 1.0},
    "no prefix cache": {"enable_prefix_caching": False},
    "deterministic": {"deterministic": True},
    "drafts": {"speculate": "reference"},
    "drafts as trees": {"speculate": "reference"},
    "a drafter on the device": {"speculate": "recycling"},
    "a draft model": {"speculate": "draft:FOLDER"},
    "a recurrent draft": {"speculate": "recurrent:FOLDER"},
    "a head that follows the model": {"speculate": "eagle:FOLDER"},
    "tensor parallelism": {"tensor_parallel_size": 2},
    "more than two tensor ranks": {"tensor_parallel_size": 4},
    "context parallelism": {"context_parallel_size": 2},
    "context parallelism on GPUs": {"context_parallel_size": 2},
    "several hosts": {"nnodes": 2},
    "sequence parallelism": {"sequence_parallel": True},
    "data parallelism": {"data_parallel_size": 2},
    "a pipeline": {"pipeline_parallel_size": 2},
    "steps in flight": {"steps_in_flight": 1},
    "sleep": {"enable_sleep_mode": True},
    "adapters": {"enable_lora": True},
    "copies of experts": {"redundant_experts": 2},
    "a KV format on a GPU": {"kv_cache_dtype": "int8"},
}
"""Feature -> options of a server that has it. Models and machines have the others."""


def choice(*names: str) -> Choice:
    options = {key: value for name in names for key, value in CHOSEN.get(name, {}).items()}
    model, engine = split_options(options, ModelConfig, EngineConfig)
    layer = LayerSpec(
        8,
        4,
        32,
        64,
        Rope(),
        window=64 if "layers with windows" in names else None,
        share_from=0 if "layers that share a cache" in names else None,
        experts=ExpertSpec(8, 2, 16) if "experts" in names else None,
    )
    drafter = str(options.get("speculate", "")).partition(":")[0]
    return Choice(
        ModelConfig(**model),
        EngineConfig(**engine),
        [layer],
        "cuda" if {"a GPU", "a KV format on a GPU", "context parallelism on GPUs"} & set(names) else "cpu",
        (drafter,) if drafter else (),
        drafts_on_device=drafter in ("recycling", "draft", "recurrent", "eagle"),
        drafts_branch=drafter in ("reference", "recycling"),
        hands_over="prefill apart from decode" in names,
        gated="layers without a gate" not in names,
    )


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_alone_is_possible(name: str) -> None:
    assert FEATURES[name].is_chosen(choice(name)) and not FEATURES[name].is_chosen(choice())
    check_together(choice(name))


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: " + ".join(refusal[:2]))
def test_a_refusal_names_both_options_and_the_nearest_that_works(refusal: Refusal) -> None:
    with pytest.raises(ConfigError) as caught:
        check_together(choice(refusal.feature, refusal.other))
    message = caught.value.message
    for name in refusal[:2]:
        assert FEATURES[name].option.replace("_", "-") in message if FEATURES[name].option else name in message
    assert refusal.reason in message and message.lower().endswith(f"{refusal.remedy.lower()}.")
    assert caught.value.param == FEATURES[refusal.feature].option


def test_values_are_shown_as_they_are_given() -> None:
    with pytest.raises(ConfigError, match=r"^--kv-offload-gb 1.0 with --no-enable-prefix-caching is not possible: "):
        check_together(choice("host memory", "no prefix cache"))
    with pytest.raises(ConfigError, match=r"^--kv-retention window:keep=64 with --deterministic is not possible: "):
        check_together(choice("retention", "deterministic"))


def test_the_documentation_has_every_pair() -> None:
    """`tools/compatibility.py` prints the tables."""
    assert f"\n{table()}\n" in (ROOT / "docs/compatibility.md").read_text()
