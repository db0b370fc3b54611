"""Steps of many models' shapes against their floors: where a card is lost by a shape that no table was tuned for.

    python benchmarks/shapes.py --models qwen3-4b,qwen2.5-7b:fp8 --out shapes.json [--trace]

Models are known by what their config.json says, weights are random, and a few layers stand for all (`--layers`): a step is these
and the head, and its floor is theirs. A step is named as in benchmarks/ledger.py; chunks:4x2048 is four prompts at once. Floors
are bytes of weights, keys and values at READ_TB_S, or FLOPs at what the matrix units reach while they are cool, whichever takes
longer. Steps run as the engine runs them, but prompts one by one: what the host takes before the first kernel counts too, and
they are too short for a card to come to its power limit. `--trace`: the kernels that each step's time goes to, as in
benchmarks/timeline.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import provenance, write_rows
from ledger import Case, Ceilings, Whole, parse
from timeline import Span, shares, spans
from torch.profiler import ProfilerActivity, profile

from ridgeline.core.config import ModelConfig
from ridgeline.core.cost import step_work
from ridgeline.core.operations import operations
from ridgeline.engine.weight_memory import WeightMemory
from ridgeline.models.build import DTYPES, LoadedModel, build, served_spec
from ridgeline.models.config import read_model
from ridgeline.ops.choose import choose

READ_TB_S, TFLOP_S, TFLOP_S_8BIT = 4.26, 800.0, 1500.0
"""Of an H200: a plain read, products of 16 and of 8 bits."""
CACHE = 50 << 20
MARK = "triu"
"""In the name of the kernel that stands between two cases of a trace, which no step runs."""


def model_config(family: str, sizes: tuple[int, ...], **more: object) -> dict[str, object]:
    """sizes: d_model, d_ff, layers, heads, KV heads, head_dim, vocabulary."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    architecture = {
        "llama": "Llama",
        "mistral": "Mistral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "gemma2": "Gemma2",
        "gemma3_text": "Gemma3",
        "qwen3_moe": "Qwen3Moe",
    }
    return {
        "model_type": family,
        "architectures": [f"{architecture[family]}ForCausalLM"],
        **dict(zip((*names, "head_dim", "vocab_size"), sizes, strict=True)),
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **more,
    }


_GEMMA: dict[str, object] = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
MODELS = {
    "llama-3.2-1b": model_config("llama", (2048, 8192, 16, 32, 8, 64, 128_256), tie_word_embeddings=True),
    "llama-3.2-3b": model_config("llama", (3072, 8192, 28, 24, 8, 128, 128_256), tie_word_embeddings=True),
    "llama-3.1-8b": model_config("llama", (4096, 14_336, 32, 32, 8, 128, 128_256)),
    "llama-3.3-70b": model_config("llama", (8192, 28_672, 80, 64, 8, 128, 128_256)),
    "qwen3-0.6b": model_config("qwen3", (1024, 3072, 28, 16, 8, 128, 151_936), tie_word_embeddings=True),
    "qwen3-1.7b": model_config("qwen3", (2048, 6144, 28, 16, 8, 128, 151_936), tie_word_embeddings=True),
    "qwen3-4b": model_config("qwen3", (2560, 9728, 36, 32, 8, 128, 151_936), tie_word_embeddings=True),
    "qwen3-14b": model_config("qwen3", (5120, 17_408, 40, 40, 8, 128, 151_936)),
    "qwen3-32b": model_config("qwen3", (5120, 25_600, 64, 64, 8, 128, 151_936)),
    "qwen3-30b-a3b": model_config(
        "qwen3_moe",
        (2048, 6144, 48, 32, 4, 128, 151_936),
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "qwen2.5-7b": model_config("qwen2", (3584, 18_944, 28, 28, 4, 128, 152_064)),
    "mistral-7b": model_config("mistral", (4096, 14_336, 32, 32, 8, 128, 32_000), sliding_window=4096),
    "gemma-2-2b": model_config("gemma2", (2304, 9216, 26, 8, 4, 256, 256_000), **_GEMMA),
    "gemma-2-9b": model_config("gemma2", (3584, 14_336, 42, 16, 8, 256, 256_000), **_GEMMA),
    "gemma-3-4b": model_config("gemma3_text", (2560, 10_240, 34, 8, 4, 256, 262_208), **_GEMMA, sliding_window=1024),
}
BOTH = "-both"
"""End of the name of a model whose quantized linears are in 16 bits too: llama-3.1-8b-both:int8."""
for _kind in ("q4_k", "q6_k"):
    _blocks: dict[str, object] = {"quant_method": "gguf", "format": _kind, "layers": [], "head": "q6_k"}
    MODELS[f"llama-3.1-8b-{_kind}"] = MODELS["llama-3.1-8b"] | {"quantization_config": _blocks}
# Not powers of two alone: gate and up of 448 rows once took 1.6 times what 512 took.
STEPS = (
    *(f"decode:{rows}x256" for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 448)),
    *(f"decode:{rows}x4096" for rows in (1, 8, 64)),
    *(f"decode:{rows}x32000" for rows in (1, 8)),
    *(f"prefill:{tokens}" for tokens in (128, 256, 512, 640, 1024, 1400, 2048, 2700, 8192)),
    "chunks:4x2048",
)


def case_of(name: str) -> Case:
    """One of --steps."""
    if name.startswith("chunks:"):
        rows, tokens = map(int, name.removeprefix("chunks:").split("x"))
        return Case(name, ((0, tokens),) * rows)
    return parse(name)


def load(name: str, layers: int, device: torch.device) -> LoadedModel:
    """A model "NAME" or "NAME:FORMAT" of so many layers at most, with random weights. NAME: of MODELS, or a folder with a
    config.json."""
    base, _, quantization = name.partition(":")
    known = MODELS.get(base.removesuffix(BOTH))
    facts = known or json.loads((Path(base) / "config.json").read_text())
    facts = facts | {"num_hidden_layers": min(layers, int(str(facts["num_hidden_layers"])))}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(facts))
        config = ModelConfig(folder, load_format="dummy", quantization=quantization)
        ops = choose(device, DTYPES[served_spec(read_model(Path(folder))[0], config).dtype])
        loaded = build(Path(folder), model=config, ops=ops, device=device)
    WeightMemory(loaded.decoder, expands=base.endswith(BOTH))
    return loaded


def floor_s(model: LoadedModel, case: Case) -> float:
    """Seconds below which a step cannot be, however it is run."""
    eight = TFLOP_S_8BIT if model.spec.quantization in ("fp8", "w8a8") else TFLOP_S
    ceilings = Ceilings(READ_TB_S * 1e12, TFLOP_S * 1e12, eight * 1e12, CACHE)
    return ceilings.step_floor_s(step_work(model.spec, case.shares), operations(model.spec, case.shares))


def free(device: torch.device) -> None:
    """Give back what nobody holds: models that run in one kernel hold their last cache, so these come and go with it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def traced(whole: Whole, cases: Sequence[Case], device: torch.device, steps: int = 2) -> dict[str, list[Any]]:
    """Of each case [kernel and grid, runs, us of a step, us alone], the largest first."""
    square = torch.ones(8, 8, device=device)

    def mark() -> None:
        torch.cuda.synchronize()
        square.triu_()
        torch.cuda.synchronize()

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for case in cases:
            if case.decode:
                whole.run(case, 0, 1)
            else:
                whole.seat(case)
            mark()
            if case.decode:
                whole.run(case, 1, steps)
            else:
                whole._run([whole._step(case)])
            mark()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    parts: list[list[Span]] = [[]]
    for span in sorted(spans(events), key=lambda span: span.begin):
        if MARK in span.name:
            parts.append([])
        else:
            parts[-1].append(span)
    traces = {}
    for case, part in zip(cases, parts[1::2], strict=False):
        lines = shares(part, steps if case.decode else 1)
        traces[case.name] = [
            [line.kernel, *(round(x, 2) for x in (line.runs, line.step_us, line.alone_us))] for line in lines
        ]
    return traces


def measure(name: str, model: LoadedModel, args: argparse.Namespace, about: dict[str, str]) -> None:
    """Every step of a model, into the result file one by one."""
    cases = [case_of(step) for step in args.steps.split(",")]
    whole, line = Whole(model, cases, args.repeats), []
    rows: dict[str, dict[str, Any]] = {}
    for case in cases:
        device_s, wall_s = whole.seconds(case)
        floor = floor_s(model, case)
        line.append(f"{case.name.partition(':')[2]} {device_s * 1e6:.0f}/{floor / device_s:.2f}")
        times = {"us": device_s, "step_to_step_us": wall_s, "floor_us": floor}
        rows[case.name] = {
            "row": f"{name}-{case.name}",
            "layers": len(model.spec.layers),
            **{key: round(value * 1e6, 1) for key, value in times.items()},
            "share": round(floor / device_s, 3),
            **about,
        }
        if args.out:
            write_rows(args.out, [rows[case.name]])
    print(f"{name}: {', '.join(line)}", flush=True)
    if args.trace and args.out:
        for case_name, kernels in traced(whole, cases, model.decoder.embedding.device).items():
            rows[case_name]["kernels"] = kernels
        write_rows(args.out, list(rows.values()))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default=",".join(MODELS), help="comma-separated, each NAME or NAME:FORMAT, or FOLDER"
    )
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--layers", type=int, default=8, help="of each model, at most")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--trace", action="store_true", help="add the kernels of each step to the result file")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no model is begun after so long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="", help="what was measured, where there is no .git to ask")
    args = parser.parse_args(words)
    started, device, names = time.perf_counter(), torch.device(args.device), args.models.split(",")
    about = provenance(torch.cuda.get_device_name() if device.type == "cuda" else "cpu", args.commit)
    with torch.inference_mode():
        for name in names:
            if time.perf_counter() - started < args.seconds:
                measure(name, load(name, args.layers, device), args, about)
                free(device)


if __name__ == "__main__":
    main()
