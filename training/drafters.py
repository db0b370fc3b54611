"""Train what drafts for a model: a recurrent draft and Medusa heads, which read its hidden states, and a draft model.

    python training/drafters.py --model FOLDER --pools POOLS --corpus CORPUS --out OUT --students recurrent medusa --seconds 150
    python training/drafters.py ... --students draft --draft SMALL_MODEL

The teacher writes first: continuations of pieces of the pools, greedy and at temperatures around 0.8. Three quarters of every batch
are such text, the rest is text of the pools. Writes OUT/recurrent/, OUT/medusa/, OUT/draft/, OUT/log.jsonl and OUT/state.pt; a run
that was stopped goes on. The draft model is distilled from a converted folder that train.py trained before. `--stream FILE.npy` keeps
the text of the pools, for a machine that has none. `--tiny` with `data.py --limit 300` runs on a CPU in a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from acceptance import Reader
from corpus import KINDS
from pools import CHAT, END_OF_TEXT, TEXT, Blend, load
from torch import Tensor

from ridgeline.compress.acceptance import Text, texts
from ridgeline.compress.decoder import TrainableDecoder, load_decoder, save_decoder
from ridgeline.compress.drafters import (
    OUTPUTS,
    WRITTEN,
    MixedRows,
    Stream,
    Students,
    frequent,
    save_calibrated_heads,
    save_calibrated_recurrent,
    teacher_writes,
)
from ridgeline.compress.job import copy_other_files
from ridgeline.compress.recurrent import save_recurrent
from ridgeline.compress.train import Loss, Schedule, TokenRows, Trainer, Training
from ridgeline.speculation.recurrent import load_recurrent

PIECE = 512  # tokens of a prompt and what the teacher wrote after it
STUDENTS = ("recurrent", "medusa", "draft")


def corpus_stream(pools: Path, tokens: int, device: torch.device, kept: Path | None) -> Tensor:
    """int16 [about `tokens`]: documents of all kinds, and a third as many tokens of conversations, in random order; kept: a file of them."""
    if kept is not None and kept.is_file():
        return torch.from_numpy(np.load(kept)).to(device)
    shares = {name: (3 * TEXT.get(name, 0) + CHAT.get(name, 0)) / 4 for name in TEXT}
    stream, _ = Blend(load(pools, device), shares, 1024, seed=5, whole=0).stream(tokens)
    stream = torch.where(stream < 0, ~stream, stream)
    if kept is not None:
        np.save(kept, stream.cpu().numpy())
    return stream


def pieces(teacher: TrainableDecoder, stream: Tensor, given: argparse.Namespace) -> Tensor:
    """[n, PIECE] that the teacher writes."""
    documents = Stream(stream, (stream == END_OF_TEXT).nonzero().flatten() + 1)
    batches = range(given.written_batches)
    return torch.cat(
        [teacher_writes(teacher, documents, batch, given.written_rows, PIECE, given.seed) for batch in batches]
    )


def save(students: Students, teacher: TrainableDecoder, given: argparse.Namespace) -> None:
    """Write all students. The trees of heads and recurrent draft are calibrated if there is a corpus; heads need that."""
    held_out: list[Text] = []
    if given.corpus is not None:
        tokenizer, device = given.model / "tokenizer.json", teacher.norm.weight.device
        reader = Reader(given.corpus, tokenizer, "valid", given.held_out, device)
        held_out = list(texts(teacher, {kind: reader.rows(kind) for kind in KINDS}))
    if students.recurrent is not None and held_out:
        save_calibrated_recurrent(students.recurrent, teacher, given.out / "recurrent", held_out)
    elif students.recurrent is not None:
        save_recurrent(students.recurrent, given.out / "recurrent", teacher.spec)
    if students.draft is not None:
        config = json.loads((given.draft / "config.json").read_text(encoding="utf-8"))
        save_decoder(students.draft, given.out / "draft", config)
        copy_other_files(given.draft, given.out / "draft")
    if students.heads is not None:
        save_calibrated_heads(students.heads, teacher, given.out / "medusa", held_out)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the teacher, a Hugging Face folder")
    parser.add_argument("--pools", type=Path, help="of data.py; or --stream alone")
    parser.add_argument("--stream", type=Path, help="a file of the pools' text, written if it is not there")
    parser.add_argument(
        "--corpus", type=Path, help="to calibrate the trees of Medusa heads, which need it, and recurrent draft"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=STUDENTS[:2])
    parser.add_argument("--attend", type=int, default=-1, help="layer that the recurrent draft attends to")
    parser.add_argument("--start", type=Path, help="a recurrent draft to go on from")
    parser.add_argument(
        "--draft", type=Path, help="the draft model to distil, a converted folder with the model's tokenizer"
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=150, help="of all but the saving; training gets what is left")
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--corpus-tokens", type=int, default=24_000_000)
    parser.add_argument("--written-batches", type=int, default=3, help="batches of pieces that the teacher writes")
    parser.add_argument("--written-rows", type=int, default=8192, help="pieces in such a batch")
    parser.add_argument("--held-out", type=int, default=64, help="rows of each kind that calibrate the heads' tree")
    parser.add_argument("--matrix-lr", type=float, default=5e-3)
    parser.add_argument("--vector-lr", type=float, default=1e-3)
    parser.add_argument("--keep-every", type=int, default=2000, help="steps after which the draft is saved as it is")
    parser.add_argument("--seed", type=int, default=0, help="of the text and its order")
    parser.add_argument("--tiny", action="store_true", help="small batches (dry runs)")
    given = parser.parse_args()
    for student, option in (("medusa", "corpus"), ("draft", "draft")):
        if student in given.students and vars(given)[option] is None:
            parser.error(f"--students {student} needs --{option}")
    if given.tiny:
        given.rows, given.tokens, given.corpus_tokens, given.written_batches, given.written_rows = 4, 512, 20_000, 1, 8
        given.held_out = 2
    return given


def compile_backward(students: Students, loss: Loss, rows: Tensor) -> None:
    """Run forward and backward once, so that the CUDA kernels are compiled."""
    with torch.autocast("cuda", torch.bfloat16):
        loss(rows).backward()
    students.zero_grad()
    torch.cuda.synchronize()


def main() -> None:
    given = options()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin = time.monotonic()
    teacher = load_decoder(given.model).to(device).requires_grad_(False)
    if device.type == "cuda":
        teacher.cast_parameters(torch.bfloat16)
    stream = corpus_stream(given.pools, given.corpus_tokens, device, given.stream)
    print(f"{len(stream)} tokens of text after {time.monotonic() - begin:.1f} s", flush=True)
    written = pieces(teacher, stream, given)
    print(f"{written.numel()} tokens by the teacher after {time.monotonic() - begin:.1f} s", flush=True)
    source = MixedRows(TokenRows(stream, given.rows // (1 + WRITTEN), given.tokens, given.seed), written, given.seed)
    ids, attended = frequent(torch.cat((stream, written.flatten())), OUTPUTS, teacher.spec.vocab_size), given.attend
    before = load_recurrent(given.start, teacher.spec) if given.start else None
    if before is not None:
        attended = before.layer
        ids = before.ids.long() if len(before.ids) == OUTPUTS else ids  # its head knows those
    small = load_decoder(given.draft) if "draft" in given.students else None
    students = Students(teacher, given.students, ids, attended % len(teacher.spec.layers), small).to(device)
    if students.recurrent is not None:
        with torch.no_grad():
            students.recurrent.init_from_teacher(teacher, teacher.hidden(source(0)[:2]))
        if before is not None:
            students.recurrent.load(before)
    loss = students.loss(teacher)
    if device.type == "cuda":
        compile_backward(students, loss, source(0))  # before the clock of the schedule starts
        print(f"compiled after {time.monotonic() - begin:.1f} s", flush=True)
    left = max(1.0, given.seconds - (time.monotonic() - begin))  # a slow machine trains a step too
    schedule = Schedule(given.steps, decay_from=0.15, seconds=left)
    training = Training(schedule, given.matrix_lr, given.vector_lr, log_every=50, check_every=given.keep_every)

    def keep() -> dict[str, float]:
        if students.recurrent is not None:
            save_recurrent(students.recurrent, given.out / "recurrent", teacher.spec)
        return {"seconds": time.monotonic() - begin}

    last = Trainer(students, loss, source, training, given.out).run(keep)
    print(f"{json.dumps(last)} after {time.monotonic() - begin:.1f} s", flush=True)
    save(students, teacher, given)
    print(f"saved after {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
