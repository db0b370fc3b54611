"""Every pair of features of the KV cache and what goes with it, as docs/compatibility.md shows them.

The pairs follow from the table in `ridgeline.core.compatibility`, which decides at start-up. Prints the tables of the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.core.compatibility import FEATURES, REFUSALS, Choice, Refusal, refusals
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.resolve import split_options
from ridgeline.core.spec import LayerSpec, Rope
from ridgeline.speculation.options import read_wanted


@dataclass(frozen=True, slots=True)
class Example:
    """Options that select a feature; FOLDER stands for the weights of a drafter. layers: what the served model's layers have.
    on_gpu: it needs a GPU."""

    options: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Any] = field(default_factory=dict)
    on_gpu: bool = False


EXAMPLES: Mapping[str, Example] = {
    "--kv-cache-dtype int8": Example({"kv_cache_dtype": "int8"}),
    "--kv-retention window": Example({"kv_retention": "window:sinks=4,keep=64"}),
    "--kv-retention snap, heavy": Example({"kv_retention": "heavy:window=8,keep=64"}),
    "--kv-retention adaptive": Example({"kv_retention": "adaptive:0.5"}),
    "--kv-selection": Example({"kv_selection": 64}),
    "--kv-offload-gb, --kv-disk": Example({"kv_offload_gb": 0.01}),
    "--cpu-offload-gb": Example({"cpu_offload_gb": 1.0}, on_gpu=True),
    "--no-enable-prefix-caching": Example({"enable_prefix_caching": False}),
    "--deterministic": Example({"deterministic": True}),
    "--speculate reference, lookahead": Example({"speculate": "reference"}),
    "--speculate recycling, medusa": Example({"speculate": "recycling"}),
    "--speculate recurrent": Example({"speculate": "recurrent:FOLDER"}),
    "--speculate draft": Example({"speculate": "draft:FOLDER"}),
    "--speculate eagle, mtp": Example({"speculate": "eagle:FOLDER"}),
    "--tensor-parallel-size 2": Example({"tensor_parallel_size": 2}),
    "--pipeline-parallel-size 2": Example({"pipeline_parallel_size": 2}),
    "--context-parallel-size 2": Example({"context_parallel_size": 2, "block_size": 16}),
    "layers with windows": Example(layers={"window": 64}),
    "layers that share a cache": Example(layers={"share_from": 0}),
    "a GPU": Example(on_gpu=True),
}


def pairs() -> list[tuple[str, str]]:
    """Every pair that one server can have: those that give one option two values are left out."""
    names = list(EXAMPLES)
    both = [(name, other) for index, name in enumerate(names) for other in names[index + 1 :]]
    return [pair for pair in both if not EXAMPLES[pair[0]].options.keys() & EXAMPLES[pair[1]].options.keys()]


def refused(names: Sequence[str]) -> Refusal | None:
    """Why a server with these features does not start."""
    examples = [EXAMPLES[name] for name in names]
    options, layers = (
        {key: value for example in examples for key, value in getattr(example, part).items()}
        for part in ("options", "layers")
    )
    model, engine = split_options(options, ModelConfig, EngineConfig)
    config = EngineConfig(**engine)
    wanted = read_wanted(config)
    choice = Choice(
        ModelConfig(**model),
        config,
        [LayerSpec(8, 4, 32, 1024, Rope(), **layers)],
        "cuda" if any(example.on_gpu for example in examples) else "cpu",
        wanted.names,
        bool(wanted.device),
        wanted.branch,
    )
    return next(refusals(choice), None)


def table() -> str:
    """Two tables in Markdown: every pair, and the reasons of refusals with the nearest that works."""
    names, possible = list(EXAMPLES), {frozenset(pair) for pair in pairs()}
    numbers = [str(number) for number in range(1, len(names))]
    lines = [f"| | | {' | '.join(numbers)} |", "|" + "---|" * (len(names) + 1)]
    for row, name in enumerate(names):
        cells = [
            "" if {name, other} not in possible else "**no**" if refused([name, other]) else "yes" for other in names
        ]
        lines.append(f"| {row + 1} | {name} | {' | '.join(cells[:row] + [''] * (len(names) - 1 - row))} |")
    lines += ["", "| refused | together with | because | nearest that works |", "|---|---|---|---|"]
    lines += [
        f"| {_title(refusal.feature)} | {_title(refusal.other)} | {refusal.reason} | {refusal.remedy} |"
        for refusal in REFUSALS
    ]
    return "\n".join(lines)


def _title(name: str) -> str:
    option = FEATURES[name].option.replace("_", "-")
    return f"{name} (`--{option}`)" if option else name


if __name__ == "__main__":
    print(table())
