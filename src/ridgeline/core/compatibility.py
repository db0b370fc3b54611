"""Which options and models exclude one another: one table, which the start-up and the planner read.

Only pairs are refused. What an option cannot do by itself (a size, a name, a folder) is refused where it is read.
docs/compatibility.md shows the table and every pair of features, and a test runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import QUANTIZED_KV, LayerSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """What a server is started with.

    layers: of the model as served. device: "cpu" or "cuda". drafters: names in `--speculate`. drafts_on_device: one of them runs on
    the device. drafts_branch: one of them proposes trees. hands_over: it is one of several engines that hand prompts over. gated:
    see ModelSpec.
    """

    model: ModelConfig
    engine: EngineConfig
    layers: Sequence[LayerSpec]
    device: str
    drafters: Sequence[str] = ()
    drafts_on_device: bool = False
    drafts_branch: bool = False
    hands_over: bool = False
    gated: bool = True


class Feature(NamedTuple):
    """A feature that may exclude others. option: the field that selects it; empty: the model or the machine does."""

    option: str
    is_chosen: Callable[[Choice], bool]


FEATURES: Mapping[str, Feature] = {
    "retention": Feature("kv_retention", lambda choice: choice.engine.kv_retention != "all"),
    "retention by attention": Feature(
        "kv_retention", lambda choice: choice.engine.kv_retention.startswith(("snap", "heavy", "adaptive"))
    ),
    "adaptive retention": Feature("kv_retention", lambda choice: choice.engine.kv_retention.startswith("adaptive")),
    "selection": Feature("kv_selection", lambda choice: choice.model.kv_selection > 0),
    "weights in host memory": Feature("cpu_offload_gb", lambda choice: choice.model.cpu_offload_gb > 0),
    "host memory": Feature("kv_offload_gb", lambda choice: choice.engine.kv_offload_gb > 0),
    "no prefix cache": Feature("enable_prefix_caching", lambda choice: not choice.engine.enable_prefix_caching),
    "deterministic": Feature("deterministic", lambda choice: choice.engine.deterministic),
    "drafts": Feature("speculate", lambda choice: bool(choice.drafters)),
    "drafts as trees": Feature("speculate", lambda choice: choice.drafts_branch),
    "a drafter on the device": Feature("speculate", lambda choice: choice.drafts_on_device),
    "a draft model": Feature("speculate", lambda choice: "draft" in choice.drafters),
    "a recurrent draft": Feature("speculate", lambda choice: "recurrent" in choice.drafters),
    "a head that follows the model": Feature("speculate", lambda choice: bool({"eagle", "mtp"} & {*choice.drafters})),
    "tensor parallelism": Feature("tensor_parallel_size", lambda choice: choice.engine.tensor_parallel_size > 1),
    "more than two tensor ranks": Feature(
        "tensor_parallel_size", lambda choice: choice.engine.tensor_parallel_size > 2
    ),
    "data parallelism": Feature("data_parallel_size", lambda choice: choice.engine.data_parallel_size > 1),
    "a pipeline": Feature("pipeline_parallel_size", lambda choice: choice.engine.pipeline_parallel_size > 1),
    "context parallelism": Feature("context_parallel_size", lambda choice: choice.engine.context_parallel_size > 1),
    "context parallelism on GPUs": Feature(
        "context_parallel_size", lambda choice: choice.engine.context_parallel_size > 1 and choice.device == "cuda"
    ),
    "several hosts": Feature("nnodes", lambda choice: choice.engine.nnodes > 1),
    "sequence parallelism": Feature("sequence_parallel", lambda choice: choice.engine.sequence_parallel),
    "steps in flight": Feature("steps_in_flight", lambda choice: choice.engine.steps_in_flight is not None),
    "layers with windows": Feature("", lambda choice: any(layer.window is not None for layer in choice.layers)),
    "layers that share a cache": Feature(
        "", lambda choice: any(layer.share_from is not None for layer in choice.layers)
    ),
    "copies of experts": Feature("redundant_experts", lambda choice: choice.model.redundant_experts > 0),
    "experts": Feature("", lambda choice: any(layer.experts for layer in choice.layers)),
    "layers without a gate": Feature("", lambda choice: not choice.gated),
    "adapters": Feature("enable_lora", lambda choice: choice.model.enable_lora or bool(choice.model.lora_modules)),
    "sleep": Feature("enable_sleep_mode", lambda choice: choice.engine.enable_sleep_mode),
    "prefill apart from decode": Feature("", lambda choice: choice.hands_over),
    "a GPU": Feature("", lambda choice: choice.device == "cuda"),
    "a KV format on a GPU": Feature(
        "kv_cache_dtype",
        lambda choice: choice.device == "cuda" and choice.model.kv_cache_dtype in ("fp8_e4m3", *QUANTIZED_KV),
    ),
}


class Refusal(NamedTuple):
    """Two features that exclude each other, the reason, and what to do instead. The error blames the option of `feature`."""

    feature: str
    other: str
    reason: str
    remedy: str


_TENSOR_PARALLEL, _PIPELINE, _CONTEXT_PARALLEL = "tensor parallelism", "a pipeline", "context parallelism"
_APART, _DATA_PARALLEL = "prefill apart from decode", "data parallelism"
REFUSALS: Sequence[Refusal] = (
    Refusal("sleep", _TENSOR_PARALLEL, "several ranks do not sleep together so far", "leave the parallel sizes out"),
    Refusal("sleep", _PIPELINE, "several ranks do not sleep together so far", "leave the parallel sizes out"),
    Refusal("sleep", _CONTEXT_PARALLEL, "several ranks do not sleep together so far", "leave the parallel sizes out"),
    Refusal("sleep", _APART, "several engines do not sleep together so far", "leave it out"),
    Refusal("sleep", "weights in host memory", "these weights have no memory on the GPU to release", "leave it out"),
    Refusal("adapters", "experts", "adapters change no experts so far", "merge the adapter into the model"),
    Refusal(
        "adapters",
        "layers without a gate",
        "adapters of OPT and GPT-2 name other linears",
        "merge the adapter into the model",
    ),
    Refusal(
        "adapters",
        "deterministic",
        "a step with adapters runs other kernels for all of its requests",
        "leave --deterministic out",
    ),
    Refusal("adapters", "sleep", "adapters would be lost with the memory", "leave --enable-sleep-mode out"),
    Refusal("adapters", _PIPELINE, "each stage would need a part of the adapter", "use --tensor-parallel-size"),
    Refusal(
        "adapters", _CONTEXT_PARALLEL, "these ranks divide tokens, and adapters with them", "use --tensor-parallel-size"
    ),
    Refusal(
        "adapters",
        "sequence parallelism",
        "these ranks divide tokens, and adapters with them",
        "leave --sequence-parallel out",
    ),
    Refusal("adapters", _APART, "the engines would have to load each adapter", "leave --prefill-engines out"),
    Refusal("retention", "layers with windows", "the windows bound the cache already", "use --kv-retention all"),
    Refusal(
        "retention",
        "deterministic",
        "a preempted request is computed again with all its keys, so its tokens would depend on others",
        "use --kv-retention all, or leave --deterministic out",
    ),
    Refusal(
        "retention",
        "a draft model",
        "a draft model may read tokens later, when they are dropped",
        "use --speculate reference",
    ),
    Refusal(
        "retention",
        "a head that follows the model",
        "the head's keys and values are not moved when tokens are dropped",
        "use --speculate reference",
    ),
    Refusal(
        "retention by attention",
        _PIPELINE,
        "a stage of a pipeline cannot run the observed tokens again",
        "use --kv-retention window:sinks=4,keep=1024",
    ),
    Refusal(
        "retention by attention",
        _CONTEXT_PARALLEL,
        "each rank has a part of the keys that are compared",
        "use --kv-retention window:sinks=4,keep=1024",
    ),
    Refusal(
        "adaptive retention",
        _TENSOR_PARALLEL,
        "each rank would choose another number of blocks",
        "use --kv-retention snap:window=32,keep=1024",
    ),
    Refusal("selection", "retention", "selection needs all blocks of a request", "use --kv-retention all"),
    Refusal(
        "selection",
        "deterministic",
        "what a token reads depends on the other rows of its step",
        "leave --deterministic out",
    ),
    Refusal("selection", "drafts", "a step with drafts reads every block", "leave --speculate out"),
    Refusal("selection", _TENSOR_PARALLEL, "pages are selected in one process so far", "leave the parallel sizes out"),
    Refusal("selection", _PIPELINE, "pages are selected in one process so far", "leave the parallel sizes out"),
    Refusal("selection", _CONTEXT_PARALLEL, "pages are selected in one process so far", "leave the parallel sizes out"),
    Refusal(
        "selection",
        "a KV format on a GPU",
        "a GPU selects pages of keys in the model's dtype only so far",
        "use --kv-cache-dtype auto, or --device cpu",
    ),
    Refusal(
        "host memory",
        "no prefix cache",
        "the tiers keep blocks of the prefix cache",
        "leave out --no-enable-prefix-caching",
    ),
    Refusal("host memory", _TENSOR_PARALLEL, "several ranks have no tiers", "leave it out, or use one process"),
    Refusal("host memory", _PIPELINE, "several ranks have no tiers", "leave it out, or use one process"),
    Refusal("host memory", _CONTEXT_PARALLEL, "several ranks have no tiers", "leave it out, or use one process"),
    Refusal(
        "weights in host memory",
        "experts",
        "a copy of all experts would be made for the few that a token uses",
        "leave --cpu-offload-gb out, or use --quantization",
    ),
    Refusal("copies of experts", "a GPU", "its kernels know no copies so far", "leave it out, or use --device cpu"),
    Refusal(
        "drafts as trees",
        "deterministic",
        "--deterministic verifies chains only, and these drafters propose trees",
        "use --speculate recurrent:FOLDER or draft:FOLDER, or leave it out",
    ),
    Refusal(
        _TENSOR_PARALLEL,
        "a recurrent draft",
        "a recurrent draft reads all heads, and each rank has a part of them",
        "use --speculate reference",
    ),
    Refusal(
        "more than two tensor ranks",
        "deterministic",
        "the order of a longer sum depends on the batch",
        "use --tensor-parallel-size 2",
    ),
    Refusal(
        "sequence parallelism",
        "deterministic",
        "whether a step is divided, and so the order of its sums, depends on the batch",
        "leave --sequence-parallel out",
    ),
    *(
        Refusal(
            _CONTEXT_PARALLEL,
            drafter,
            "the drafter attends to keys of which each rank has a part",
            "use --speculate reference",
        )
        for drafter in ("a draft model", "a recurrent draft", "a head that follows the model")
    ),
    Refusal(
        _TENSOR_PARALLEL,
        "a head that follows the model",
        "the head reads the whole embedding, and each rank has a part of it",
        "use --speculate reference",
    ),
    Refusal(
        "context parallelism on GPUs",
        "drafts",
        "the host moves accepted tokens of drafts between ranks so far",
        "leave --speculate out, or use --tensor-parallel-size",
    ),
    Refusal(
        _PIPELINE,
        "a drafter on the device",
        "it drafts on one stage, and all need its drafts",
        "use --speculate reference",
    ),
    Refusal(_PIPELINE, "steps in flight", "each stage has a step of its own", "leave --steps-in-flight out"),
    Refusal(
        _PIPELINE,
        "layers that share a cache",
        "one stage would have the keys and values that another needs",
        "use --tensor-parallel-size",
    ),
    Refusal("retention", _APART, "the engine that goes on would drop tokens one token later", "use --kv-retention all"),
    Refusal("selection", _APART, "what a token reads depends on its step", "leave --kv-selection out"),
    Refusal(_TENSOR_PARALLEL, _APART, "several ranks hand nothing over", "leave --prefill-engines out"),
    Refusal(_CONTEXT_PARALLEL, _APART, "several ranks hand nothing over", "leave --prefill-engines out"),
    Refusal(_PIPELINE, _APART, "several ranks hand nothing over", "leave --prefill-engines out"),
    Refusal(_CONTEXT_PARALLEL, _APART, "several ranks hand nothing over", "leave --prefill-engines out"),
    Refusal("host memory", _APART, "engines that hand prompts over have no tiers", "leave --prefill-engines out"),
    *(
        Refusal(_DATA_PARALLEL, other, reason, remedy)
        for other, reason, remedy in (
            (_TENSOR_PARALLEL, "ranks divide either requests or heads so far", "leave one of them out"),
            (_PIPELINE, "the stages would have to divide requests alike", "leave --pipeline-parallel-size out"),
            (_CONTEXT_PARALLEL, "the ranks of a request would share its keys", "leave --context-parallel-size out"),
            ("sequence parallelism", "the ranks divide the stream already", "leave --sequence-parallel out"),
            ("several hosts", "ranks of one host divide requests so far", "leave --nnodes out"),
            ("copies of experts", "a copy is chosen by positions that a rank does not have", "leave the copies out"),
            ("retention", "slots are dropped on all ranks alike so far", "use --kv-retention all"),
            ("selection", "pages are selected in one process so far", "leave --kv-selection out"),
            ("host memory", "several ranks have no tiers", "leave the tiers out"),
            ("a drafter on the device", "it would need the keys of all ranks", "use --speculate lookahead"),
            ("adapters", "these ranks divide tokens, and adapters with them", "use --tensor-parallel-size"),
            ("sleep", "several ranks do not sleep together so far", "leave --enable-sleep-mode out"),
            (_APART, "several ranks hand nothing over", "leave --prefill-engines out"),
        )
    ),
    Refusal(
        "no prefix cache",
        _APART,
        "blocks are handed over by their prefix",
        "leave out --no-enable-prefix-caching",
    ),
)


def refusals(choice: Choice) -> Iterator[Refusal]:
    """The pairs in `choice` that exclude each other."""
    chosen = {name for name, feature in FEATURES.items() if feature.is_chosen(choice)}
    return (refusal for refusal in REFUSALS if chosen.issuperset(refusal[:2]))


def check_together(choice: Choice) -> None:
    """Raise ConfigError for options that exclude each other: it names both, and the nearest that works."""
    for refusal in refusals(choice):
        both = " with ".join(_shown(name, choice) for name in refusal[:2])
        remedy = refusal.remedy[0].upper() + refusal.remedy[1:]
        raise ConfigError(
            f"{both} is not possible: {refusal.reason}. {remedy}.", param=FEATURES[refusal.feature].option
        )


def _shown(name: str, choice: Choice) -> str:
    """A feature as a user gives it: the option with its value, or what the model or the machine has."""
    option = FEATURES[name].option
    if not option:
        return name
    if option == "enable_lora" and choice.model.lora_modules:  # implies it
        option = "lora_modules"
    value = getattr(choice.model if hasattr(choice.model, option) else choice.engine, option)
    flag = f"--{option.replace('_', '-')}"
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-")
    return f"{flag} {value}"
