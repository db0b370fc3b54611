"""What serving launches beyond what warm-up has launched, found without a GPU: Triton picks each kernel's variant as
for a Hopper GPU, and nothing is compiled or run. In a process without Triton's interpreter (see test_warm_up)."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ridgeline.core.config import ModelConfig
from ridgeline.core.draft import DEVICE
from ridgeline.core.plan import Compaction, Join, Logits, StepPlan
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import kv_layout
from ridgeline.core.stages import stage_layout
from ridgeline.engine import runner, warm_up
from ridgeline.engine.device import DeviceStep
from ridgeline.engine.executor import Executor
from ridgeline.engine.graphs import GraphExecutor
from ridgeline.engine.shape import Sizes
from ridgeline.engine.stage import StageGraphs, runner_kind
from ridgeline.models.build import build
from ridgeline.ops.capture import Uncaptured
from ridgeline.ops.step import SHORT
from ridgeline.ops.triton import ahead, hopper, kernels, launch, table
from ridgeline.parallel.group import Group
from ridgeline.parallel.mesh import ONE_DEVICE, Mesh
from ridgeline.parallel.pipeline import Stage

PROCESSORS = 132
ROWS, STEP_TOKENS, MAX_LEN = 128, 2048, 4096
DRAFTS, QUOTES = (0, 1, 2, 3, 4), 8
"""Nodes of what the device drafts, and most of what the host drafts."""
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 1024,
    "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
"""One layer with the heads of an 8B: which variant of a kernel serves follows from these and from the step."""
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 4096}
"""Layers that are one kernel for one token, and of which no graph has as many tokens as a step."""
SEVEN = {"num_attention_heads": 28, "num_key_value_heads": 4}
GROUPED = {"num_attention_heads": 64, "num_key_value_heads": 8}
ALONE = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
WINDOWED = {"num_attention_heads": 16, "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 512,
            "layer_types": ["sliding_attention"]}  # fmt: skip
SELECTING = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 256,
             "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}  # fmt: skip
"""Only the last layer reads what has left the window, and it selects."""
BUDGET, CONTEXTS = 512, (400, 600, SHORT, 3000, MAX_LEN)
"""Slots that the cases of selection read, and contexts within the budget and above, of different sizes of kernels."""
LAST_STAGE = LARGE | {"num_hidden_layers": 2}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CASES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "8b": ({}, "", True),
    "8b-drafts": ({}, "", True),
    "8-heads-quotes": (GROUPED, "", True),
    "8b-eager": ({}, "", False),
    "8b-eager-drafts": ({}, "", False),
    "8b-one-kernel": (LARGE, "", True),
    "7-heads": (SEVEN, "", True),
    "8-heads": (GROUPED, "", True),
    "1-head": (ALONE, "", True),
    "window-eager": (WINDOWED, "", False),
    "8b-select": (SELECTING | LARGE, "", True),
    "8b-select-eager": (SELECTING, "", False),
    "last-stage": (LAST_STAGE, "", True),
    "fp8": ({}, "fp8", True),
    "int4": ({}, "int4-g128", True),
    "w8a8": ({}, "w8a8", True),
    "llm-int8": ({}, "llm-int8", True),
    "fp8-weight": ({}, "fp8-weight", True),
    "fp8-block": ({"quantization_config": BLOCKS}, "", True),
}
"""What differs from MODEL, quantization, whether graphs are captured."""


class NoRanks(Group):
    """Messages to ranks that are not there."""

    def send(self, x: torch.Tensor, rank: int, tag: int) -> None:
        pass

    def receive(self, x: torch.Tensor, rank: int, tag: int) -> None:
        x.zero_()


class PaperDriver:
    """A Hopper GPU that has nothing to run."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def pretend() -> None:
    """The CPU passes for an H200; products and made-up weights take no time."""
    driver.set_active(PaperDriver())
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=PROCESSORS)
    kernels._on_gpu = lambda device: True
    hopper.kernel, hopper.attend = lambda *_: object(), lambda *_: None
    pretended = {"overlap": {"PDL": True, "launch_pdl": True}, "is_hopper": True, "processors": PROCESSORS}
    for name, said in pretended.items():
        item = getattr(launch, name)
        for module in list(sys.modules.values()):
            if getattr(module, name, None) is item:
                setattr(module, name, lambda device, said=said: said)
    torch.nn.functional.linear = lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0])
    torch.Tensor.addmm_ = lambda stream, *_: stream
    torch.Tensor.uniform_ = lambda weight, *_, **__: weight.zero_()


class ZeroedIndices(TorchFunctionMode):
    """ahead._Zeroed for integers alone: floats decide about no kernel, and zeroing them takes a third of the time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in ahead._UNSET and not out.is_floating_point() else out


def open_runner(
    model_facts: dict[str, Any], quantization: str, captured: bool, drafts: tuple[int, ...] = (), quotes: int = 0
) -> tuple[runner.Runner, DeviceStep, Sizes]:
    """A runner, the step that it runs and its sizes."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(MODEL | model_facts))
        config = ModelConfig(
            load_format="dummy",
            quantization=quantization,
            kv_selection=BUDGET if SELECTING.items() <= model_facts.items() else 0,
        )
        mesh = ONE_DEVICE
        if model_facts is LAST_STAGE:
            mesh = Mesh(stage=Stage(1, 2, slice(1, 2), (0, 1), NoRanks(), NoRanks()))
        model = build(Path(name), model=config, ops=table.TRITON, device=torch.device("cpu"), mesh=mesh)
    sizes = Sizes(ROWS, STEP_TOKENS, MAX_LEN, 64, drafts=drafts, host_drafts=quotes)
    steps: list[DeviceStep] = []

    def executor(step: DeviceStep) -> Executor:
        steps.append(step)
        graphs = GraphExecutor if mesh.stage.count == 1 else StageGraphs
        return graphs(step, sizes, Uncaptured) if captured else Executor(step)

    runner.CapturedExecutor = executor  # that of a CPU
    layout = kv_layout(model.spec, 64)
    layout = layout if mesh.stage.count == 1 else stage_layout(layout, mesh.stage.layers, model.spec)
    made = runner.build_runner(model, layout, sizes, kind=runner_kind(mesh))
    return made, steps[0], sizes


def plans(
    chunks: Sequence[Sequence[int]],
    decoding: Sequence[int],
    sampling: SamplingParams,
    drafts: tuple[int, ...] = (0,),
    tree: bool = False,
    contexts: tuple[int, ...] = (),
) -> Iterator[StepPlan]:
    """Steps of some rows that decode, with so many drafts each in turns, beside some chunks of prompts; few rows also in short
    contexts. tree: drafts are those of the host, and all hang on the last known token. contexts: steps in which rows hold at most
    so many slots."""
    sizes_of_steps = itertools.product(chunks, decoding, contexts or (SHORT, MAX_LEN))
    for step, (sizes, others, bound) in enumerate(sizes_of_steps, 1):
        if bound == SHORT and others > FEW and not contexts:
            continue
        made = StepPlan(step, bound=bound)
        for row, size in enumerate([1] * others + list(sizes), 1):
            tokens = [1] * max(2, size)
            computed = len(tokens) - size
            n_draft = drafts[row % len(drafts)] if row <= others else 0
            made.joins.append(Join(row, step, tokens, 1, computed, MAX_LEN, (), 0, 0, sampling))
            made.rows.append(row)
            made.generations.append(step)
            made.n_query.append(size + n_draft)
            made.n_draft.append(n_draft)
            made.drafts.extend(range(n_draft) if tree else [DEVICE] * n_draft)
            made.tree.extend([-1] * n_draft if tree else ())
            made.logits.append(Logits.LAST)
            made.samples.append(1)
        made.ahead = max(drafts) * (step % 2 and not tree)
        if made.rows and len(made.rows) <= ROWS and sum(made.n_query) <= STEP_TOKENS:
            yield made


CHUNKS: Sequence[list[int]] = (
    [],
    [2],
    [5],
    [10],
    [17],
    [31],
    [40, 3],
    [100],
    [255, 9],
    [257],
    [600],
    [1337],
    [300, 300, 300],
    [1900],
)
BESIDE_DRAFTS: Sequence[list[int]] = ([], [10], [255, 9], [1900])
"""Chunks in steps with drafts. They ask for every variant that all of CHUNKS ask for there; the long tests run all of these."""
ASKING: Sequence[list[int]] = ([], [40, 3], [600])
"""Beside rows that ask for more than a draw: what these ask for follows from the number of draws alone."""
FEW = 4
"""Rows up to which a kernel is another one in short contexts (see attention.SPLIT)."""
DECODING = (0, 1, 2, 3, 4, 6, 9, 14, 16, 17, 25, 31, 33, 40, 49, 50, 60, 64, 65, 66, 80, 100, 120)
SPREAD: list[tuple[int, ...]] = [(0,), (1,), (3, 0), (4, 1, 2)]
"""Drafts of rows, in turns."""
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=1),
    SamplingParams(temperature=1.0, logprobs=3, presence_penalty=1.0, min_tokens=2, logit_bias=((3, 1.0),)),
)


def missed(case: str, every: bool = False) -> list[str]:
    """Variants of kernels that steps ask for and warm-up did not, each with the first step that did. every: steps with
    drafts have all of CHUNKS beside them."""
    pretend()
    texts: list[str] = []
    with torch.inference_mode(), ZeroedIndices():
        drafting, quoting = case.endswith("drafts"), case.endswith("quotes")
        made, device_step, sizes = open_runner(*CASES[case], DRAFTS if drafting else (), QUOTES if quoting else 0)
        with ahead._unlaunched(lambda kernel, wanted: texts.append(_words(kernel, wanted))):
            warm_up.launch_all(device_step.one_layer_of_each_kind(), made.executor, sizes)
            assert len(texts) > 10, "warm-up launched nothing"
            texts.clear()
            made.executor.capture(lambda *_: None)
            assert not texts, "a capture runs what warm-up has run"
            late = []
            selecting, staged = SELECTING.items() <= CASES[case][0].items(), CASES[case][0] is LAST_STAGE
            spread = [*SPREAD, (8, 0, 5)][: 5 if quoting else 4] if drafting or quoting else [(0,)]
            decoding = DECODING[:: 4 if drafting or quoting or selecting or staged else 1]
            few, contexts = (drafting or quoting or selecting or staged) and not every, CONTEXTS if selecting else ()
            chunks, asking = (BESIDE_DRAFTS, ASKING[:2]) if few else (CHUNKS, ASKING)
            for (place, sampling), drafts, tree in itertools.product(
                enumerate(SAMPLINGS), spread, (False, True) if quoting else (False,)
            ):
                if tree and not any(drafts):
                    continue  # the same steps as without a tree
                for plan in plans(asking if place else chunks, decoding, sampling, drafts, tree, contexts):
                    texts.clear()
                    made.launch(plan)
                    error = made.collect().error
                    assert error is None, error
                    late += [f"{_step(plan)} at {sampling.temperature}: {text}" for text in texts]
            if not (selecting or staged):
                texts.clear()
                device_step.compact(Compaction(1, 300, 300, 32, 4, [[1, 2, 3, 4, 5]], [[6, 7]]))
                late += [f"a compaction: {text}" for text in texts]
    return late


def _step(plan: StepPlan) -> str:
    sizes = [f"{n_query} ({n_draft})" for n_query, n_draft in zip(plan.n_query, plan.n_draft, strict=True)]
    return f"{len(sizes)} rows: {', '.join([*sizes[:3], '...', *sizes[-3:]] if len(sizes) > 7 else sizes)}"


def _words(kernel: Any, wanted: dict[str, Any]) -> str:
    fixed = {kernel.arg_names[path[0]]: value for path, value in wanted["constants"].items()}
    texts = [f"{name}={value}" for name, value in fixed.items()]
    return " ".join([kernel.fn.__name__, *map(str, wanted["signature"].values()), *texts])


if __name__ == "__main__":
    print("\n".join(missed(sys.argv[1])))
