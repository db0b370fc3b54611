"""Recall over long contexts by format of the KV cache, retention policy and budget of selection.

    python benchmarks/recall.py STAGE ... --work WORK [--only retention,formats,selection] [--out benchmarks/results/kv.json]
    python benchmarks/recall.py train measure --work WORK --device cuda --longest 32768 --tokens 65536 --steps 400 \
        --lengths 1024,4096,8192,16384,32768 --policies window,snap --out benchmarks/results/kv.json

| stage | what it does |
| --- | --- |
| train | trains two models of 3 layers on the task, at mixed lengths up to --longest: a minute or two each on a CPU for 4,096 |
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
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
SHORT = (8, 16, 32)
"""Lengths of contexts at first. Later they are the powers of 2 from 64 to the longest."""
BASE_LENGTH, BASE_THETA = 4096, 1e7
"""The longest context of the first rows, and its base of the rotation. A longer context has a larger one, such that equally many
pairs of elements turn by less than a radian over it."""
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


def config_of(window: int | None, longest: int) -> dict[str, Any]:
    """config.json of a model of 3 layers that reads contexts of `longest` tokens and their questions."""
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
        "max_position_embeddings": 2 * longest,
        "rope_theta": BASE_THETA ** max(1.0, math.log(longest, BASE_LENGTH)),
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


class Lesson(NamedTuple):
    """What the training shows. short: batches of short contexts at first. tokens: of a batch, and at least one context."""

    short: int
    longest: int = BASE_LENGTH
    tokens: int = 2048

    def lengths(self, number: int) -> Sequence[int]:
        """Lengths of contexts in batch `number`."""
        return SHORT if number < self.short else [1 << bits for bits in range(6, self.longest.bit_length())]


def batch(number: int, lesson: Lesson) -> Tensor:
    """Batch `number` of the training: ids and the token to predict, -100 where none counts, int64 [2, rows, tokens]."""
    chance = np.random.default_rng(number)
    lengths = lesson.lengths(number)
    length = lengths[chance.integers(len(lengths))]
    ids, keys, values = contexts(max(1, lesson.tokens // length), length, min(PAIRS, length // 4), chance)
    questions = np.stack((np.full_like(keys, MARK), keys), 2).reshape(len(ids), -1)
    answers = np.stack((np.full_like(values, -100), values), 2).reshape(len(ids), -1)
    labels = np.concatenate((np.full_like(ids, -100), answers), 1)
    return torch.from_numpy(np.stack((np.concatenate((ids, questions), 1), labels)))


def start_with_heads(student: TrainableDecoder, look_back: float, longest: int) -> None:
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
        slow = torch.asin(rotary[1, 1]) * longest < 1
        same = MATCH * torch.diag(torch.cat((slow, slow)).float())
        last.q_proj.weight[:DIM, :DIM] = same
        last.k_proj.weight[:] = torch.cat((torch.zeros(DIM, DIM), same), 1)


def answer_loss(model: TrainableDecoder, rows: Tensor) -> Tensor:
    """Mean nats per answer."""
    asked = rows[1] >= 0
    return F.cross_entropy(model.logits(model.hidden(rows[0])[asked]), rows[1][asked])


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    lesson = Lesson(args.steps // 3, args.longest, args.tokens)
    for name in args.models.split(","):
        window, look_back = MODELS[name]
        folder, config = Path(args.work) / name, config_of(window, args.longest)
        if (folder / "model.safetensors").is_file():
            continue
        torch.manual_seed(0)
        student = TrainableDecoder(read_spec(config), 2 * args.longest)
        start_with_heads(student, look_back, args.longest)
        student.to(args.device)
        training = Training(Schedule(args.steps, 20), 5e-3, 5e-3, 0.01, log_every=20, save_every=40)

        def loss(rows: Tensor, student: nn.Module = student) -> Tensor:
            assert isinstance(student, TrainableDecoder)
            return answer_loss(student, rows)

        trainer = Trainer(
            student, loss, lambda number: batch(number, lesson).to(args.device), training, Path(f"{folder}.run")
        )
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
    engine: LocalEngine, length: int, lists: int, asked: bool = False, together: int = 1
) -> tuple[NDArray[np.float64], float, float]:
    """Share of right answers of each context; the mean probability of a right value (0 where it is none of the MAX_LOGPROBS most
    probable tokens); and the mean of the slots held at the end. together: requests at a time."""
    windows, values = windows_of(length, lists, asked)
    right, probable, held = [], [], []
    for first in range(0, lists, together):
        scored, slots = forced(engine, windows[first : first + together])
        held += [slots] * len(scored)
        for scores, wanted in zip(scored, values[first : first + together], strict=True):
            matches = scores.top_ids[2::2] == wanted[:, None]
            right.append(matches[:, 0].mean())
            probable.append((matches * np.exp(scores.top_logprobs[2::2])).sum(1).mean())
    return np.array(right), float(np.mean(probable)), float(np.mean(held))


class Served(NamedTuple):
    """What an engine serves."""

    model: str = "full"
    kv_format: str = "auto"
    selection: int = 0
    retention: str = "all"


class Case(NamedTuple):
    """A row of the results. asked: also measured with the questions at the end of the prompt."""

    name: str
    length: int
    served: Served
    asked: bool = False
    facts: Mapping[str, Any] = {}


def formats(args: argparse.Namespace) -> Iterator[Case]:
    for length in args.lengths:
        for kv_format in FORMATS:
            yield Case(kv_format, length, Served(kv_format=kv_format))


def retention(args: argparse.Namespace) -> Iterator[Case]:
    for length in args.lengths:
        for name in args.policies.split(","):
            for ratio in RATIOS:
                if (keep := length // ratio) < 4 * PAGE:
                    continue
                policy = POLICIES[name].format(keep)
                yield Case(f"{name}-{ratio}x", length, Served(retention=policy), True, {"retention": policy})


def selection(args: argparse.Namespace) -> Iterator[Case]:
    for length in args.lengths:
        yield Case("selection-all", length, Served("local"))
        for ratio in BUDGETS:
            if (budget := length // ratio) >= 4 * PAGE:
                yield Case(f"selection-{ratio}x", length, Served("local", selection=budget), False, {"budget": budget})


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Case]]] = {
    "formats": formats,
    "retention": retention,
    "selection": selection,
}


def start(served: Served, args: argparse.Namespace) -> LocalEngine:
    model = ModelConfig(
        f"{args.work}/{served.model}", max_model_len=2 * args.longest, kv_cache_dtype=served.kv_format,
        kv_selection=served.selection,
    )  # fmt: skip
    # Without graphs an engine starts sooner. The same kernels run.
    on_gpu = args.device == "cuda"
    config = EngineConfig(
        device=args.device, threads=1, kv_retention=served.retention, kv_cache_memory=(args.longest << 14), max_num_seqs=4,
        max_num_batched_tokens=2 * args.longest, block_size=PAGE, enforce_eager=on_gpu,
    )  # fmt: skip
    return LocalEngine.start(model, config)


def row_of(engine: LocalEngine, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    # A step that runs another prompt does not select.
    together = 1 if case.served.selection or args.device == "cpu" else 4
    shares, probability, slots = recall(engine, case.length, args.lists, together=together)
    estimate = bootstrap_mean(shares)
    trained = "" if args.longest == BASE_LENGTH else f"to-{args.longest}-"
    figures = {
        "row": f"recall-{trained}{case.name}-{case.length}", "value": round(estimate.value, 4), "unit": "share of right answers",
        "interval": interval(estimate), "probability": round(probability, 4), "context": case.length,
        "answers": shares.size * QUESTIONS, "slots": round(slots, 1),
    }  # fmt: skip
    if case.asked:
        asked = recall(engine, case.length, args.lists, asked=True, together=together)
        figures["recall_asked"] = round(float(asked[0].mean()), 4)
    return figures | {"model": f"recall-{trained}{case.served.model}"} | case.facts


def measure(args: argparse.Namespace) -> None:
    machine = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    facts, begin = provenance(machine, args.commit), time.monotonic()
    cases: dict[Served, list[Case]] = {}  # rows of equal settings have one engine
    for part in args.only.split(","):
        for case in PARTS[part](args):
            cases.setdefault(case.served, []).append(case)
    for served, group in cases.items():
        engine = start(served, args)
        try:
            for case in group:
                row = row_of(engine, case, args)
                print(f"{time.monotonic() - begin:.0f} s", json.dumps(row), flush=True)
                if args.out:
                    write_rows(args.out, [row | facts])
        finally:
            engine.close()


STAGES = {"train": train, "measure": measure}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--work", required=True, help="folder of the models")
    parser.add_argument("--models", default=",".join(MODELS), help=f"to train, of {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=160, help="of each training")
    parser.add_argument("--longest", type=int, default=BASE_LENGTH, help="tokens of the longest context, a power of 2")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step of the training")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--lengths", type=lambda text: [int(length) for length in text.split(",")], default=[512, 1024, 2048, 4096],
        help="tokens of the contexts that are measured, up to --longest",
    )  # fmt: skip
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--lists", type=int, default=16, help=f"contexts of a figure, each with {QUESTIONS} questions")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    args = parser.parse_args(words)
    if max(args.lengths) > args.longest:
        parser.error(f"--lengths has {max(args.lengths)}, more than the model is trained for: raise --longest")
    for stage in args.stages:
        STAGES[stage](args)


if __name__ == "__main__":
    sys.exit(main())
