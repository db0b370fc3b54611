"""Recall over long contexts by format of the KV cache, retention policy and budget of selection, on a CPU.

    python benchmarks/recall.py STAGE ... --work WORK [--only retention,formats,selection] [--out benchmarks/results/kv.json]

| stage | what it does |
| --- | --- |
| train | trains two models of 3 layers on the task, at mixed lengths, a minute or two of processor time each |
| measure | recall of both, served by the engine, at each length |

The task: a context of random filler has 16 pairs (a key, its value) at random places; then come questions (a mark and a key), and
the token after the key should be its value. One of 64 values is right by chance.

One model has three layers that read everything; it shows formats and retention. In the other one the first two layers have a
window of 16 tokens, so that only the last one can reach the pairs: it shows selection, which leaves the first two layers alone.
A stopped training goes on from its last state, and a finished model is not trained again.

Retention drops slots once the prompt is computed. `value` is the recall of questions that come after that; `recall_asked` is that
of the same questions if the prompt ends with them too, so that the last tokens of the prompt look at the pairs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import cpu_name, provenance, write_rows
from numpy.typing import NDArray
from retention import POLICIES, forced, interval
from torch import Tensor, nn

from ridgeline.compress.decoder import TrainableDecoder, save_decoder
from ridgeline.compress.job import copy_other_files
from ridgeline.compress.train import Schedule, Trainer, Training
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.engine.local import LocalEngine
from ridgeline.models.config import read_spec
from ridgeline.quality.drift import bootstrap_mean
from ridgeline.quality.texts import Window

MODEL = Path(__file__).resolve().parents[1] / "src" / "ridgeline" / "assets" / "model"
"""The shipped model, whose tokenizer the models have."""
BEGIN, MARK, KEYS, VALUES, FILLER = 0, 5, range(100, 228), range(300, 364), range(400, 464)
"""Token ids of the task: before the context, before a key that is asked for, and the ranges of the others."""
PAIRS, QUESTIONS = 16, 8
"""Pairs of a context, and questions about them."""
SHORT, LONG = (8, 16, 32), (64, 128, 256, 512, 1024, 2048, 4096)
"""Lengths of contexts in training: at first, and later."""
BATCH = 2048
"""Tokens of a step in training."""
WIDTH, DIM = 128, 64
"""Of the residual stream and of a head."""
MATCH = 1.4
"""Size of the head that the training starts with in the last layer."""
MODELS = {"full": (None, 8.0), "local": (16, 5.0)}
"""Model -> window of its first two layers, and the size of the head that its training starts with in the first layer: without a
window it has to be ahead of all other tokens."""
FORMATS = ("auto", "fp8", "int8", "int4")
RATIOS, BUDGETS = (2, 4, 8), (2, 4, 8, 16, 32, 64)
PAGE = 16


def config_of(window: int | None) -> dict[str, Any]:
    """config.json of a model of 3 layers."""
    shipped = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    near = "full_attention" if window is None else "sliding_attention"
    return shipped | {
        "architectures": ["RidgelineForCausalLM"],
        "model_type": "ridgeline",
        "vocab_size": 512,
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": DIM,
        "intermediate_size": 128,
        "max_position_embeddings": 8192,
        "rope_theta": 1e7,
        "attention_bias": True,
        "sliding_window": window,
        "layer_types": [near, near, "full_attention"],
    }


def contexts(rows: int, length: int, pairs: int, chance: np.random.Generator) -> tuple[NDArray[np.int64], ...]:
    """Contexts with their pairs: ids [rows, length], keys and values [rows, pairs]."""
    ids = chance.integers(FILLER.start, FILLER.stop, (rows, length))
    keys = chance.permuted(np.tile(np.array(KEYS), (rows, 1)), axis=1)[:, :pairs]
    values = chance.integers(VALUES.start, VALUES.stop, (rows, pairs))
    # pairs places of two tokens that do not overlap: distinct numbers in order, each moved by those before it.
    free = np.tile(np.arange(length - pairs), (rows, 1))
    places = np.sort(chance.permuted(free, axis=1)[:, :pairs], axis=1) + np.arange(pairs)
    each = np.arange(rows)[:, None]
    order = chance.permuted(np.tile(np.arange(pairs), (rows, 1)), axis=1)
    ids[each, places], ids[each, places + 1] = keys[each, order], values[each, order]
    ids[:, 0] = np.where(places[:, 0] > 0, BEGIN, ids[:, 0])
    return ids, keys, values


def batch(number: int, short: int) -> Tensor:
    """Batch `number` of the training: ids and the token to predict, -100 where none counts, int64 [2, rows, tokens]. The first
    `short` batches have short contexts."""
    chance = np.random.default_rng(number)
    lengths = SHORT if number < short else LONG
    length = lengths[chance.integers(len(lengths))]
    ids, keys, values = contexts(max(1, BATCH // length), length, min(PAIRS, length // 4), chance)
    questions = np.stack((np.full_like(keys, MARK), keys), 2).reshape(len(ids), -1)
    answers = np.stack((np.full_like(values, -100), values), 2).reshape(len(ids), -1)
    labels = np.concatenate((np.full_like(ids, -100), answers), 1)
    return torch.from_numpy(np.stack((np.concatenate((ids, questions), 1), labels)))


def start_with_heads(student: TrainableDecoder, look_back: float) -> None:
    """Start the training with the two attention heads that recall consists of, because they take longest to learn (induction heads,
    Olsson et al. 2022): a head of the first layer looks at the previous token and writes its embedding beside that of its own
    token, and a head of the last layer looks for this copy. What a token answers is learned, and all of it goes on learning."""
    first, last = student.layers[0].self_attn, student.layers[-1].self_attn
    rotary = student.rotary_0
    assert isinstance(rotary, Tensor)
    with torch.no_grad():
        student.embed_tokens.weight[:, DIM:] = 0.0
        # Queries look where keys are turned back by one position.
        first.q_proj.bias[: DIM // 2] = look_back
        first.k_proj.bias[:] = look_back * rotary[1].flatten()
        first.v_proj.weight[:] = torch.eye(DIM, WIDTH)
        first.o_proj.weight[DIM:, :DIM] = 0.02 * torch.eye(DIM)
        # Only pairs of elements that turn little over the whole context compare tokens.
        slow = torch.acos(rotary[1, 0].double()) * max(LONG) < 1
        same = MATCH * torch.diag(torch.cat((slow, slow)).float())
        last.q_proj.weight[:DIM, :DIM] = same
        last.k_proj.weight[:] = torch.cat((torch.zeros(DIM, DIM), same), 1)


def answer_loss(model: TrainableDecoder, rows: Tensor) -> Tensor:
    """Mean nats per answer."""
    asked = rows[1] >= 0
    return F.cross_entropy(model.logits(model.hidden(rows[0])[asked]), rows[1][asked])


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for name in args.models.split(","):
        window, look_back = MODELS[name]
        folder, config = Path(args.work) / name, config_of(window)
        if (folder / "model.safetensors").is_file():
            continue
        torch.manual_seed(0)
        student = TrainableDecoder(read_spec(config), 2 * max(LONG))
        start_with_heads(student, look_back)
        training = Training(Schedule(args.steps, 20), 5e-3, 5e-3, 0.01, log_every=20, save_every=40)

        def loss(rows: Tensor, student: nn.Module = student) -> Tensor:
            assert isinstance(student, TrainableDecoder)
            return answer_loss(student, rows)

        trainer = Trainer(student, loss, lambda number: batch(number, args.steps // 3), training, Path(f"{folder}.run"))
        print(name, trainer.run(), flush=True)
        save_decoder(student, folder, config)
        copy_other_files(MODEL, folder)


# --- recall of what the engine serves ---------------------------------------------------------------------------------


def windows_of(length: int, lists: int, asked: bool) -> tuple[list[Window], NDArray[np.int64]]:
    """`lists` contexts of so many tokens with their questions, scored from the first question on, and the values [lists,
    QUESTIONS]. asked: the questions stand at the end of the prompt too."""
    ids, keys, values = contexts(lists, length, PAIRS, np.random.default_rng(length + 10**6))
    questions = np.stack((np.full_like(keys, MARK), keys), 2)[:, :QUESTIONS].reshape(lists, -1)
    prompt = np.concatenate((ids, questions), 1) if asked else ids
    # A token after the last key: its scores are those of the last answer.
    end = np.full((lists, 1), MARK)
    whole = np.concatenate((prompt, questions, end), 1).tolist()
    return [Window(tuple(row), prompt.shape[1], n) for n, row in enumerate(whole)], values[:, :QUESTIONS]


def recall(
    engine: LocalEngine, length: int, lists: int, asked: bool = False
) -> tuple[NDArray[np.float64], float, float]:
    """Share of right answers of each context; the mean probability of a right value (0 where it is none of the MAX_LOGPROBS most
    probable tokens); and the mean of the slots held at the end. One request at a time, because a step that runs another prompt does
    not select."""
    windows, values = windows_of(length, lists, asked)
    right, probable, held = [], [], []
    for window, wanted in zip(windows, values, strict=True):
        (scores,), slots = forced(engine, [window])
        matches = scores.top_ids[2::2] == wanted[:, None]
        right.append(matches[:, 0].mean())
        probable.append((matches * np.exp(scores.top_logprobs[2::2])).sum(1).mean())
        held.append(slots)
    return np.array(right), float(np.mean(probable)), float(np.mean(held))


class Measurement:
    def __init__(self, args: argparse.Namespace) -> None:
        self.work, self.lists = Path(args.work), args.lists
        self.lengths = [int(length) for length in args.lengths.split(",")]

    def served(self, model: str, kv_format: str = "auto", selection: int = 0, retention: str = "all") -> LocalEngine:
        wanted = ModelConfig(
            str(self.work / model), max_model_len=2 * max(LONG), kv_cache_dtype=kv_format, kv_selection=selection
        )
        config = EngineConfig(
            device="cpu", threads=1, kv_retention=retention, kv_cache_memory=64 << 20, max_num_seqs=4,
            max_num_batched_tokens=2 * max(LONG), block_size=PAGE,
        )  # fmt: skip
        return LocalEngine.start(wanted, config)

    def row(self, name: str, length: int, asked: bool, **served: Any) -> dict[str, Any]:
        engine = self.served(**served)
        try:
            shares, probability, slots = recall(engine, length, self.lists)
            estimate = bootstrap_mean(shares)
            figures = {
                "row": f"recall-{name}-{length}", "value": round(estimate.value, 4), "unit": "share of right answers",
                "interval": interval(estimate), "probability": round(probability, 4), "context": length,
                "answers": shares.size * QUESTIONS, "slots": round(slots, 1),
            }  # fmt: skip
            if asked:
                figures["recall_asked"] = round(float(recall(engine, length, self.lists, asked=True)[0].mean()), 4)
            return figures | {"model": f"recall-{served['model']}"}
        finally:
            engine.close()

    def formats(self) -> Iterator[dict[str, Any]]:
        for length in self.lengths:
            for kv_format in FORMATS:
                yield self.row(kv_format, length, False, model="full", kv_format=kv_format)

    def retention(self) -> Iterator[dict[str, Any]]:
        for length in self.lengths:
            for name, text in POLICIES.items():
                for ratio in RATIOS:
                    policy = text.format(length // ratio)
                    yield self.row(f"{name}-{ratio}x", length, True, model="full", retention=policy) | {
                        "retention": policy
                    }

    def selection(self) -> Iterator[dict[str, Any]]:
        for length in self.lengths:
            yield self.row("selection-all", length, False, model="local")
            for ratio in BUDGETS:
                if (budget := length // ratio) >= 4 * PAGE:
                    row = self.row(f"selection-{ratio}x", length, False, model="local", selection=budget)
                    yield row | {"budget": budget}


PARTS: dict[str, Callable[[Measurement], Iterator[dict[str, Any]]]] = {
    "formats": Measurement.formats,
    "retention": Measurement.retention,
    "selection": Measurement.selection,
}


def measure(args: argparse.Namespace) -> None:
    facts, measurement = provenance(cpu_name(), args.commit), Measurement(args)
    for part in args.only.split(","):
        for row in PARTS[part](measurement):
            print(json.dumps(row), flush=True)
            if args.out:
                write_rows(args.out, [row | facts])


STAGES = {"train": train, "measure": measure}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--work", required=True, help="folder of the models")
    parser.add_argument("--models", default=",".join(MODELS), help=f"to train, of {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=160, help="of each training")
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="tokens of the contexts that are measured")
    parser.add_argument("--lists", type=int, default=16, help=f"contexts of a figure, each with {QUESTIONS} questions")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    args = parser.parse_args(words)
    for stage in args.stages:
        STAGES[stage](args)


if __name__ == "__main__":
    sys.exit(main())
