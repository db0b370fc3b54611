"""Pruned models served by this machine's CPU: `python benchmarks/pruned.py --out benchmarks/results/pruned.json`.

Two models: the shipped one as recipes of `ridgeline compress` prune it, and the SmolLM-135M shape with random weights of which a
share is 0. Each is served in bfloat16, pruned linears packed ("packed") or dense ("dense"), and in int8, beside the model without
zeros in bfloat16 ("original"). Engines take turns on one thread, and seconds are those of its processor time, so that other work on
the machine counts little. tok_s: 128 tokens of a greedy request behind its first, the best of the turns. prefill_tok_s: a prompt of
512 tokens up to its first. weight_bytes: of all weights in memory. ratio, prefill_ratio: median over the turns of the rate relative
to the original's in the same turn. bytes_ratio: relative to the original.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import HERE, cpu_name, provenance, timed, write_rows
from safetensors.torch import save_file

from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.job import Job
from ridgeline.compress.recipes import read_recipe
from ridgeline.compress.texts import calibration_rows, default_calibration
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.engine.local import LocalEngine
from ridgeline.models.hub import resolve_model
from ridgeline.ops import native_cpu
from ridgeline.quality.texts import read_texts
from ridgeline.text.tokenizer import Tokenizer

SHAPE = HERE / "models" / "smollm-135m"
SHARES = (0.7, 0.5, 0.3)
"""Of non-zero weights of the shape."""
RECIPES = ("sparsegpt-50", "sparsegpt-2:4", "neurons-25", "heads-25", "layers-2")
BEGINNING, DECODE, PREFILL = (16, 1), (16, 129), (512, 1)
"""Tokens of a prompt and of its answer."""
SEED = 3


@dataclass(frozen=True, slots=True)
class Served:
    """How a model is served. most: see native_cpu.MOST_NONZERO."""

    name: str
    quantization: str = ""
    most: float = native_cpu.MOST_NONZERO


FORMS = (Served("packed"), Served("dense", most=0.0), Served("int8", "int8"))
ORIGINAL = "original"


def random_model(folder: Path, share: float) -> Path:
    """A checkpoint of SHAPE with random weights, of whose linears this share is not 0."""
    folder.mkdir()
    shutil.copy(SHAPE / "config.json", folder)
    config, noise = json.loads((SHAPE / "config.json").read_text()), torch.Generator().manual_seed(SEED)
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_width = width // heads * config["num_key_value_heads"]

    def made(rows: int, columns: int, kept: float = share) -> torch.Tensor:
        dense = torch.randn(rows, columns, generator=noise) * 0.02
        return (dense * (torch.rand(rows, columns, generator=noise) < kept)).bfloat16()

    tensors = {
        "model.embed_tokens.weight": made(config["vocab_size"], width, 1.0),
        "model.norm.weight": torch.ones(width),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(width)
        for name, rows in (("q", width), ("k", kv_width), ("v", kv_width), ("o", width)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = made(rows, width)
        for name, rows, columns in (("gate", inner, width), ("up", inner, width), ("down", width, inner)):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = made(rows, columns)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def models(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """(name, model folder, folder of the original) of everything that is measured."""
    source = Checkpoint(resolve_model(ModelConfig()))
    tokenizer = Tokenizer.load(source.folder)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=True)

    texts = calibration_rows(read_texts(default_calibration()), encode, 512, 8_192)
    for recipe in RECIPES:
        place = folder / recipe.replace(":", "-")
        Job(source, read_recipe(recipe), texts, place).run(lambda stage, done, total: None)
        yield f"shipped-{recipe}", place, source.folder
    original = random_model(folder / "random", 1.0)
    for share in SHARES:
        name = f"smollm135m-{round(100 - 100 * share)}-percent-zeros"
        yield name, random_model(folder / f"random-{share}", share), original


def started(form: Served, folder: Path) -> LocalEngine:
    native_cpu.MOST_NONZERO = form.most
    config = EngineConfig(device="cpu", threads=1, kv_cache_memory=1 << 28, max_num_seqs=8)
    return LocalEngine.start(ModelConfig(str(folder), quantization=form.quantization, dtype="bfloat16"), config)


def seconds(engine: LocalEngine, shape: tuple[int, int]) -> float:
    """Processor time of a request."""
    before = time.process_time()
    timed(engine, [shape], engine.engine.setup.facts["vocab_size"], temperature=0.0)
    return time.process_time() - before


def measured(folder: Path, original: Path, repeats: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(form, figures) of a model, as FORMS serve it."""
    engines = {form.name: started(form, folder) for form in FORMS}
    engines[ORIGINAL] = started(FORMS[0], original)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(repeats + 1):
        for name, engine in engines.items():
            beginning, whole, prompt = (seconds(engine, shape) for shape in (BEGINNING, DECODE, PREFILL))
            rates[name].append(((DECODE[1] - BEGINNING[1]) / (whole - beginning), PREFILL[0] / prompt))
    sizes = {name: engine.engine.setup.facts["weight_bytes"] for name, engine in engines.items()}
    for name, engine in engines.items():
        engine.close()
        figures: dict[str, Any] = {"weight_bytes": sizes[name], "bytes_ratio": round(sizes[name] / sizes[ORIGINAL], 3)}
        for kind, (rate, ratio) in enumerate((("tok_s", "ratio"), ("prefill_tok_s", "prefill_ratio"))):
            turns = list(zip(rates[name], rates[ORIGINAL], strict=True))[1:]
            figures[rate] = round(max(mine[kind] for mine, _ in turns), 1)
            figures[ratio] = round(statistics.median(mine[kind] / original[kind] for mine, original in turns), 3)
        yield name, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about = provenance(cpu_name(), arguments.commit)
    with tempfile.TemporaryDirectory() as folder:
        for name, place, original in models(Path(folder)):
            for form, figures in measured(place, original, arguments.repeats):
                row = {"row": f"pruned-{name}-{form}", "model": name, "served": form, **figures, **about}
                print(f"{row['row']:52} {figures}", flush=True)
                if arguments.out:
                    write_rows(arguments.out, [row])


if __name__ == "__main__":
    main()
