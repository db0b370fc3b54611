"""A cache more than twenty times smaller: siblings of one size with ever smaller caches, their held-out loss and their speed.

    python benchmarks/small_cache.py STAGE ... --corpus CORPUS --work WORK [--tokens 6e7] [--only mha,gqa] [--tiny]

| stage | what it does | predicted on one H200 |
| --- | --- | --- |
| data | tokenizes the corpus and draws held-out texts (training/data.py, training/heldout.py) | 25 s |
| train | trains each sibling on the same batches; a stopped training goes on from its last state | 140 s each |
| loss | held-out loss of each sibling, by the engine with the cache it is served with | 120 s |
| speed | tokens per second with as many sequences as a cache of one size holds, at two contexts | 60 s each |
| table | rows of OUT/small_cache.json and `small-cache-ratio` of OUT/kv.json: sizes, and what the other stages measured | 1 s |

The siblings have the same number of parameters (the MLP takes what attention gives up) and see the same tokens: multi-head
attention; grouped heads; one KV head; then windows in five of six layers; then pairs of layers that share a cache; then int8.
WORK/NAME is a model folder for `ridgeline serve`. One call takes at most ten minutes: name few siblings with --only. Finished
siblings are not trained again, and rows in WORK/loss.json and WORK/speed.json are not measured again. --tiny runs all of it on a
CPU in a minute with models that learn nothing: it tests the path.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import cpu_name, provenance, read_rows, timed, write_rows
from gpu import Composition
from torch import Tensor, nn

from ridgeline.compress.decoder import TrainableDecoder, save_decoder
from ridgeline.compress.job import copy_other_files
from ridgeline.compress.train import Schedule, Trainer, Training
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.spec import KvLayout, ModelSpec, kv_layout
from ridgeline.engine.local import LocalEngine
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_spec
from ridgeline.quality.drift import by_document, measure, token_drift
from ridgeline.quality.scores import EngineScorer, Scores
from ridgeline.quality.texts import Window, read_texts, windows
from ridgeline.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "src" / "ridgeline" / "assets" / "model"
"""The shipped model, whose tokenizer the siblings have."""
KINDS = {"prose": 0.38, "docs": 0.3, "code": 0.28, "math": 0.02, "dialogue": 0.02}
"""Shares of the rows, by pool of training/data.py."""
STEP = 16
"""MLP widths are multiples of it."""
BASE = "mha"
TOP = 20
"""Alternatives of each scored token."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What differs between the real run and a dry run.

    hidden: MLP width of the sibling with multi-head attention. rows, length: of a batch. context: of the model. contexts: those
    of which speed is measured. cache: bytes of the KV cache there. chunk: most tokens of a step. most: most sequences. held_out:
    how many times the usual number of held-out bytes are drawn. documents: most of them that are scored.
    """

    width: int
    layers: int
    heads: int
    hidden: int
    window: int
    rows: int
    length: int
    context: int
    contexts: tuple[int, int]
    cache: int
    page: int
    chunk: int
    most: int
    data: str
    held_out: int
    documents: int


FULL = Sizes(512, 12, 8, 640, 256, 32, 2048, 40_960, (4096, 32_768), 1 << 30, 64, 8192, 512, "--workers 16", 8, 10_000)
TINY = Sizes(64, 6, 4, 96, 32, 2, 64, 1024, (64, 256), 1 << 20, 16, 128, 16, "--workers 2 --limit 60", 1, 4)


@dataclass(frozen=True, slots=True)
class Sibling:
    """kv_heads 0: one for each query head. group: layers of one kind that share a cache."""

    text: str
    kv_heads: int = 0
    windows: bool = False
    group: int = 1


SIBLINGS = {
    "mha": Sibling("multi-head attention"),
    "gqa": Sibling("a KV head for 4 query heads", 2),
    "mqa": Sibling("one KV head", 1),
    "local": Sibling("one KV head, windows in 5 of 6 layers", 1, True),
    "shared": Sibling("the same, and pairs of layers share a cache", 1, True, 2),
}
SERVED = {**{name: (name, "auto") for name in SIBLINGS}, "all": ("shared", "int8")}
"""Row -> (sibling, format of the cache)."""


def config_of(sibling: Sibling, sizes: Sizes, hidden: int = 0) -> dict[str, Any]:
    """config.json of a sibling. hidden 0: the MLP width with which it has the parameters of multi-head attention."""
    kinds = [
        "sliding_attention" if sibling.windows and (index + 1) % 6 else "full_attention"
        for index in range(sizes.layers)
    ]
    shipped = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    config = shipped | {
        "architectures": ["RidgelineForCausalLM"],
        "model_type": "ridgeline",
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sibling.kv_heads or sizes.heads,
        "head_dim": sizes.width // sizes.heads,
        "intermediate_size": hidden or sizes.hidden,
        "max_position_embeddings": sizes.context,
        "sliding_window": sizes.window if sibling.windows else None,
        "layer_types": kinds,
        "cla_share_factor": sibling.group,
    }
    if hidden or sibling == SIBLINGS[BASE]:
        return config
    wanted, given = read_spec(config_of(SIBLINGS[BASE], sizes)).params, read_spec(config).params
    more = (wanted - given) / (3 * sizes.width * sizes.layers)
    return config_of(sibling, sizes, sizes.hidden + STEP * round(more / STEP))


# --- stages -------------------------------------------------------------------------------------------------------------


class Rows:
    """Batches of rows from the pools: batch `number` is always the same, int64 [rows, length + 1]."""

    def __init__(self, pools: Path, sizes: Sizes, device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._ids = [
            torch.from_numpy(np.load(pools / f"train-{kind}.ids.npy").astype(np.int16)).to(device) for kind in KINDS
        ]
        self._shares = torch.tensor([*KINDS.values()])

    def __call__(self, number: int) -> Tensor:
        chance = torch.Generator().manual_seed(number)
        kinds = torch.multinomial(self._shares, self._sizes.rows, replacement=True, generator=chance)
        place = torch.rand(self._sizes.rows, generator=chance)
        span = torch.arange(self._sizes.length + 1, device=self._device)
        rows = []
        for kind, share in zip(kinds.tolist(), place.tolist(), strict=True):
            ids = self._ids[kind]
            rows.append(ids[int(share * (len(ids) - self._sizes.length - 1)) + span])
        return torch.stack(rows).long()


def next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean nats per token of rows [batch, tokens + 1]."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())


class Run:
    """The places, sizes and options of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work, self.sizes = args, Path(args.work), TINY if args.tiny else FULL
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.wanted = args.only.split(",") if args.only else [*SERVED]
        self.siblings = {SERVED[row][0] for row in self.wanted}

    def data(self) -> None:
        pools, held_out = self.work / "pools", self.work / "heldout.jsonl"
        if not pools.is_dir():
            options = ("--tokenizer", MODEL / "tokenizer.json", "--out", pools, *self.sizes.data.split())
            self._script("data.py", *options)
        if not held_out.is_file():
            self._script("heldout.py", "--out", held_out, "--times", self.sizes.held_out)

    def _script(self, name: str, *options: object) -> None:
        command = [sys.executable, str(ROOT / "training" / name), "--corpus", self.args.corpus, *map(str, options)]
        subprocess.run(command, check=True)

    def train(self) -> None:
        batches = Rows(self.work / "pools", self.sizes, self.device)
        steps = max(1, round(self.args.tokens / (self.sizes.rows * self.sizes.length)))
        for name, sibling in SIBLINGS.items():
            if name in self.siblings and not (self.work / name / "model.safetensors").is_file():
                self._train(name, config_of(sibling, self.sizes), batches, steps)

    def _train(self, name: str, config: dict[str, Any], batches: Rows, steps: int) -> None:
        torch.manual_seed(0)
        student = TrainableDecoder(read_spec(config), self.sizes.length).to(self.device)
        compiled = torch.compile(next_token_loss, dynamic=False) if self.device.type == "cuda" else next_token_loss
        # The rates of the shipped model (training/train.py); a weak decay, because tokens are seen few times.
        training = Training(Schedule(steps, min(100, steps // 4)), 5e-3, 3e-3, save_every=200)
        trainer = Trainer(student, lambda batch: compiled(student, batch), batches, training, self.work / f"{name}.run")
        print(name, trainer.run(), flush=True)
        save_decoder(student, self.work / name, config)
        copy_other_files(MODEL, self.work / name)

    def loss(self) -> None:
        """Loss of each served row, and its difference from that of multi-head attention."""
        tokenizer = Tokenizer.load(MODEL)
        texts = read_texts(self.work / "heldout.jsonl")[: self.sizes.documents]
        parts = windows(texts, lambda text: tokenizer.encode(text, add_special_tokens=False), self.sizes.length, 0)
        if not (rows := self._left("loss")):
            return
        base = self._scores(BASE, parts)
        for row in rows:
            scores = base if row == BASE else self._scores(row, parts)
            drifts = [token_drift(*pair) for pair in zip(base, scores, strict=True)]
            self._keep("loss", row, loss_figures(drifts, parts))

    def _scores(self, row: str, parts: Sequence[Window]) -> list[Scores]:
        engine = self._engine(row, self.sizes.length + 1, 16, eager=True)
        try:
            return EngineScorer(row, engine).score(parts, TOP, lambda stage, done, total: None)
        finally:
            engine.close()

    def speed(self) -> None:
        for row in self._left("speed"):
            layout, figures = kv_layout(spec_of(row, self.sizes), self.sizes.page), dict[str, Any]()
            for length in self.sizes.contexts:
                figures |= {f"{key}_{length}": value for key, value in self._decode(row, layout, length).items()}
            self._keep("speed", row, figures)

    def _decode(self, row: str, layout: KvLayout, length: int) -> dict[str, float]:
        """Output tokens per second of steps in which all sequences that fit decode, after `length` tokens each."""
        sizes = self.sizes
        rows, out = sequences_that_fit(layout, sizes, length)
        local = self._engine(row, length + out, rows)
        try:
            composition = Composition(local.engine.setup.account)
            local.engine.setup = replace(local.engine.setup, account=composition)
            timed(local, [(length, out)] * rows, local.engine.setup.vocab_size)
            steps = [step for step in composition.steps["start"] if not step[1]]
        finally:
            local.close()
        most = max(len(step[0]) for step in steps)
        seconds = statistics.median(step[3] for step in steps if len(step[0]) == most)
        return {
            "sequences": most,
            "that_fit": rows,
            "tok_s": round(most / seconds, 1),
            "step_ms": round(seconds * 1e3, 3),
        }

    def _engine(self, row: str, longest: int, rows: int, eager: bool = False) -> LocalEngine:
        name, kv_format = SERVED[row]
        model = ModelConfig(str(self.work / name), max_model_len=longest, kv_cache_dtype=kv_format)
        config = EngineConfig(
            device=self.device.type, kv_cache_memory=self.sizes.cache, max_num_seqs=rows, block_size=self.sizes.page,
            max_num_batched_tokens=max(rows, self.sizes.chunk), enable_prefix_caching=False,
            enforce_eager=eager and self.device.type == "cuda", threads=None if self.device.type == "cuda" else 1,
        )  # fmt: skip
        return LocalEngine.start(model, config)

    def _left(self, stage: str) -> list[str]:
        """The wanted rows that the stage has not measured."""
        known = {row["row"] for row in read_rows(self.work / f"{stage}.json")}
        return [row for row in SERVED if row in self.wanted and row not in known]

    def _keep(self, stage: str, row: str, figures: dict[str, Any]) -> None:
        print(stage, row, json.dumps(figures), flush=True)
        write_rows(self.work / f"{stage}.json", [{"row": row, **figures}])

    def table(self) -> None:
        """Write the rows: sizes, which are counted, and loss and speed where they have been measured."""
        loss, speed = (
            {row["row"]: row for row in read_rows(self.work / f"{stage}.json")} for stage in ("loss", "speed")
        )
        measured = torch.cuda.get_device_name() if self.device.type == "cuda" else cpu_name()
        facts = provenance(measured if loss or speed else "any: counted", self.args.commit)
        rows: list[dict[str, Any]] = []
        for row in SERVED:
            figures = kv_figures(spec_of(row, self.sizes), self.sizes) | speed.get(row, {}) | loss.get(row, {})
            trained = {"tokens_trained": self.args.tokens} if row in loss else {}
            rows.append({**figures, "row": f"small-cache-{row}", "text": text_of(row), **trained} | facts)
        rows.append(ratio(self.sizes) | facts)
        print(*map(json.dumps, rows), sep="\n")
        if self.args.out:
            write_rows(Path(self.args.out) / "small_cache.json", rows[:-1])
            write_rows(Path(self.args.out) / "kv.json", rows[-1:])


def spec_of(row: str, sizes: Sizes) -> ModelSpec:
    """The model of a row as it is served."""
    name, kv_format = SERVED[row]
    return served_spec(read_spec(config_of(SIBLINGS[name], sizes)), ModelConfig(kv_cache_dtype=kv_format))


def text_of(row: str) -> str:
    name, kv_format = SERVED[row]
    return SIBLINGS[name].text + ("" if kv_format == "auto" else f", in {kv_format}")


def loss_figures(drifts: Sequence[Any], parts: Sequence[Window]) -> dict[str, Any]:
    """Nats per token and what they cost against multi-head attention, with 95 % intervals over documents."""
    documents = by_document(drifts, [window.document for window in parts])
    figures = measure(documents).figures
    perplexity, change = figures["perplexity"], figures["logprob_change"]
    low, high = (float("nan") if bound is None else bound for bound in (change.low, change.high))
    return {
        "loss": round(math.log(perplexity.value), 4),
        "loss_cost": round(-change.value, 4) + 0.0,
        "loss_cost_interval": [round(-high, 4) + 0.0, round(-low, 4) + 0.0],
        "loss_interval": [round(math.log(bound), 4) if bound else None for bound in (perplexity.low, perplexity.high)],
        "documents": len(documents),
        "tokens": sum(window.tokens for window in parts),
    }


def kv_figures(spec: ModelSpec, sizes: Sizes) -> dict[str, Any]:
    """Parameters, and bytes of cache per token of a sequence, by context; paged: in complete pages."""
    layout = kv_layout(spec, sizes.page)
    figures: dict[str, Any] = {"params": spec.params}
    for length in sizes.contexts:
        figures[f"kv_bytes_{length}"] = round(spec.kv_bytes(length) / length, 1)
        figures[f"paged_bytes_{length}"] = round(layout.pages_for(length, 1) * layout.page_bytes / length, 1)
    return figures


def sequences_that_fit(layout: KvLayout, sizes: Sizes, length: int) -> tuple[int, int]:
    """(sequences of `length` tokens and their output that the cache holds at once, tokens of output of each).

    Prompts are read one after the other, while the first ones write: the output lasts until all have been read. Beside the pages
    of sequences that write, prompts in a step hold pages of a window for all tokens of the step.
    """
    pages, rows = sizes.cache // layout.page_bytes - 1, 1
    while rows < sizes.most:
        end = length + outputs(sizes, length, rows + 1)
        reading = layout.pages_for(end, sizes.chunk) - layout.pages_for(end, 1)
        if (rows + 1) * layout.pages_for(end, 1) + reading > pages:
            break
        rows += 1
    return rows, outputs(sizes, length, rows)


def outputs(sizes: Sizes, length: int, rows: int) -> int:
    return -(-rows * length // max(1, sizes.chunk - rows)) + 48


def ratio(sizes: Sizes) -> dict[str, Any]:
    """`small-cache-ratio`: bytes of multi-head attention over those of all measures together, at the shorter context."""
    short, long = sizes.contexts
    base, small = (kv_figures(spec_of(row, sizes), sizes) for row in (BASE, "all"))
    times = {length: round(base[f"kv_bytes_{length}"] / small[f"kv_bytes_{length}"], 2) for length in sizes.contexts}
    return {
        "row": "small-cache-ratio", "value": times[short], "unit": f"times fewer bytes per token at {short} tokens", "target": 20,
        f"at_{long}": times[long],
    }  # fmt: skip


STAGES: dict[str, Callable[[Run], None]] = {
    "data": Run.data,
    "train": Run.train,
    "loss": Run.loss,
    "speed": Run.speed,
    "table": Run.table,
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--corpus", default="", help="folder of the corpus; stage data")
    parser.add_argument("--work", required=True, help="folder of pools, siblings and their figures")
    parser.add_argument("--tokens", type=float, default=6e7, help="training tokens of each sibling")
    parser.add_argument("--only", default="", help="rows to train and measure, with commas (default: all)")
    parser.add_argument("--tiny", action="store_true", help="the path on a CPU in a minute")
    parser.add_argument("--out", default=None, help="folder of the result files; None prints only")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    args = parser.parse_args(words)
    if args.tiny and args.out:
        parser.error("--tiny measures nothing to keep: leave --out away")
    torch.set_float32_matmul_precision("high")
    run = Run(args)
    run.work.mkdir(parents=True, exist_ok=True)
    for stage in args.stages:
        STAGES[stage](run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
