"""Ours beside llama.cpp on this machine's CPU, in one run: `python benchmarks/cpu_peers.py --llama-python PYTHON --out FILE`.

PYTHON is that of an environment with llama-cpp-python, built on this machine so that it uses the instructions of its CPU:

    python3.11 -m venv llama && CMAKE_ARGS=-DGGML_NATIVE=ON llama/bin/pip install llama-cpp-python

SmolLM-135M shape, random weights, greedy, one request, all cores on both sides. b1: 128 tokens in, 128 out, milliseconds a token
behind the first. prefill512: prompt tokens per second up to the first token. For each format a GGUF file is written. llama.cpp runs
it in its own process, with and without flash attention; the faster counts. bf16 is the same file on both sides. 8bit is int8
beside Q8_0, 4bit is int4 beside Q4_0. The rows q8_0 and q4_0 are Ridgeline on llama.cpp's files. Sides alternate; ours and peer
are the best of the rounds, because other work on the machine only slows a run, and the medians stand beside them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import HERE, cpu_name, provenance, write_rows
from gguf import GGMLQuantizationType as Kind
from gguf_shape import write_gguf

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.local import LocalEngine
from ridgeline.gguf.folder import model_folder
from ridgeline.wire.messages import Submit

SHAPE = HERE / "models" / "smollm-135m"
PROMPT, OUTPUT, PREFILL = 128, 128, 512
PROMPTS = 32
PAUSE_S = 0.3
"""Between turns: threads of the side that has ended stop waiting actively."""
FORMATS = {"bf16": (Kind.BF16, "", 1.8), "8bit": (Kind.Q8_0, "int8", 2.0), "4bit": (Kind.Q4_0, "int4", 2.3)}
"""Name: llama.cpp's type, our --quantization (none: the same file) and the target for b1."""
PREFILL_TARGET = 2.0


@dataclass(frozen=True, slots=True)
class Run:
    """first: seconds to the first token; rest: from there to the last."""

    first: float
    rest: float
    tokens: list[int]


class Ours:
    _runs = iter(range(1 << 30))

    def __init__(self, model: ModelConfig, threads: int) -> None:
        self._engine = LocalEngine.start(model, EngineConfig(device="cpu", threads=threads, kv_cache_memory=1 << 28))
        self.close = self._engine.close

    def run(self, prompt: list[int], outputs: int) -> Run:
        sampling = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        self._engine.submit(Submit(str(next(self._runs)), prompt, sampling, time.monotonic(), cache=False))
        tokens: list[int] = []
        started = first = time.perf_counter()
        for delta in self._engine.deltas():
            if delta.error:
                raise RuntimeError(delta.error)
            if not tokens:
                first = time.perf_counter()
            tokens += delta.tokens
        return Run(first - started, time.perf_counter() - first, tokens)


class Llama:
    """llama.cpp in a process of its own (llama_peer.py)."""

    def __init__(self, python: str, path: Path, threads: int, *, flash: bool) -> None:
        command = [python, str(HERE / "llama_peer.py"), str(path), str(threads), str(int(flash))]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        facts = self._read()
        self.name = f"llama.cpp (llama-cpp-python {facts['version']}, built on this machine)"
        self.system: str = facts["system"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp's process ended: its error stands above. --llama-python names its Python.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, prompt: list[int], outputs: int) -> Run:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompt, outputs]) + "\n")
        self._process.stdin.flush()
        return Run(**self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def alternate(sides: dict[str, Ours | Llama], vocabulary: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Side -> case -> values of the rounds, after one to warm up: ms a token (b1), tokens/s (prefill512)."""
    chance = random.Random(1)
    short, long = ([chance.randrange(vocabulary) for _ in range(length)] for length in (PROMPT, PREFILL))
    values: dict[str, dict[str, list[float]]] = {name: {"b1": [], "prefill512": []} for name in sides}
    for repeat in range(rounds + 1):
        for name, side in sides.items():
            time.sleep(PAUSE_S)
            decoded, prefilled = side.run(short, OUTPUT), side.run(long, 1)
            if repeat:
                values[name]["b1"].append(1e3 * decoded.rest / (OUTPUT - 1))
                values[name]["prefill512"].append(PREFILL / prefilled.first)
    return values


def equal_tokens(sides: dict[str, Ours | Llama], vocabulary: int) -> tuple[int, int]:
    """Of PROMPTS prompts of 16 tokens: how many have the same greedy token on both sides, for the same file; different tokens."""
    chance = random.Random(2)
    prompts = [[chance.randrange(vocabulary) for _ in range(16)] for _ in range(PROMPTS)]
    ours, theirs = ([sides[name].run(prompt, 1).tokens[0] for prompt in prompts] for name in ("file", "llama"))
    return sum(mine == its for mine, its in zip(ours, theirs, strict=True)), len(set(theirs))


def compare(form: str, folder: Path, python: str, rounds: int) -> list[dict[str, Any]]:
    kind, quantization, _ = FORMATS[form]
    config, threads = json.loads((SHAPE / "config.json").read_text()), len(os.sched_getaffinity(0))
    path = folder / f"{form}.gguf"
    write_gguf(path, config, kind)
    peers = {name: Llama(python, path, threads, flash=name == "flash") for name in ("llama", "flash")}
    ours = {"file": Ours(ModelConfig(model=str(model_folder(path, folder / "cache"))), threads)}
    if quantization:
        model = ModelConfig(model=str(SHAPE), load_format="dummy", quantization=quantization)
        ours["quantized"] = Ours(model, threads)
    sides: dict[str, Ours | Llama] = {**ours, **peers}
    equal, different = equal_tokens(sides, config["vocab_size"])
    values = alternate(sides, config["vocab_size"], rounds)
    print(f"equal tokens {equal} of {PROMPTS} ({different} different ones). {peers['llama'].system}")
    rows = []
    for name, case in itertools.product(ours, ("b1", "prefill512")):
        row = row_of(form, case, name, values)
        row["peer_name"] = peers["llama"].name
        if name == "file":
            row |= {"prompts": PROMPTS, "equal_tokens": equal, "different_tokens": different}
        rows.append(row)
        print(
            f"{row['row']}: ours {row['ours']} {row['unit']}, llama.cpp {row['peer']}, ratio {row['ratio']}", flush=True
        )
    for side in sides.values():
        side.close()
    return rows


def row_of(form: str, case: str, name: str, values: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """name: whose values are ours. The target belongs to the row of the format, not to llama.cpp's file if that is another."""
    (kind, quantization, target), faster = FORMATS[form], min if case == "b1" else max
    flash = faster(values["flash"][case]) == faster(values["flash"][case] + values["llama"][case])
    mine, its = values[name][case], values["flash" if flash else "llama"][case]
    ratio = faster(mine) / faster(its)
    same_file = name == "file" and quantization != ""
    return {
        "row": f"smollm135m-{kind.name.lower() if same_file else form}-{case}",
        "ours": round(faster(mine), 3),
        "peer": round(faster(its), 3),
        "ratio": round(1 / ratio if case == "b1" else ratio, 3),
        **({} if same_file else {"target": target if case == "b1" else PREFILL_TARGET}),
        "unit": "ms" if case == "b1" else "tok/s",
        "ours_median": round(statistics.median(mine), 3),
        "peer_median": round(statistics.median(its), 3),
        "ours_format": kind.name if name == "file" else quantization,
        "peer_format": kind.name,
        "peer_flash_attention": flash,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", required=True, help="Python of the environment with llama-cpp-python")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    facts = provenance(cpu_name(), arguments.commit)
    facts["command"] = facts["command"].replace(arguments.llama_python, "PYTHON")
    print(f"load of the last minute: {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory() as folder:
        for form in arguments.formats.split(","):
            rows = compare(form, Path(folder), arguments.llama_python, arguments.rounds)
            if arguments.out:
                write_rows(arguments.out, [row | facts for row in rows])


if __name__ == "__main__":
    main()
