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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from acceptance import RANKS, Reader, Text, head_hits, recurrent_figures, texts
from corpus import KINDS
from pools import CHAT, TEXT, Blend, load
from safetensors.torch import save_file
from torch import Tensor, nn

from ridgeline.compress.decoder import TrainableDecoder, load_decoder, save_decoder
from ridgeline.compress.distill import Distillation, LossWeights, MedusaModule, medusa_loss
from ridgeline.compress.generate import generate, noise_keys
from ridgeline.compress.job import copy_other_files
from ridgeline.compress.recurrent import RecurrentModule, depth_loss, recurrent_losses, save_recurrent, teacher_targets
from ridgeline.compress.train import Loss, Schedule, TokenRows, Trainer, Training
from ridgeline.core.spec import ModelSpec
from ridgeline.speculation.recurrent import load_recurrent

HEADS = 4
WRITTEN = 3  # rows the teacher wrote, for each of the corpus
STRIDE = 2  # every second place trains heads
PIECE = 512  # tokens of a prompt and what the teacher wrote after it
PROMPTS = (16, 48, 128)  # tokens of a prompt, batch by batch
HEATS = (0.7, 0.9)  # around the one that losses and benchmarks are taken at
STUDENTS = ("recurrent", "medusa", "draft")
RECIPE = LossWeights(logits=0.3, overlap=1.0, temperature=0.8)
OUTPUTS = 4096  # the most frequent tokens, which alone are drafted


@dataclass(frozen=True, slots=True)
class Rows:
    """A source of batches [rows, tokens]: those of the corpus, and WRITTEN times as many of pieces [n, PIECE] the teacher wrote."""

    corpus: TokenRows
    written: Tensor
    seed: int = 0

    def __call__(self, number: int) -> Tensor:
        read = self.corpus(number)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        pieces = WRITTEN * read.numel() // self.written.shape[1]
        some = torch.randint(len(self.written), (pieces,), generator=generator)
        return torch.cat((read, self.written[some.to(read.device)].view(-1, read.shape[1]).long()))


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


def teacher_writes(teacher: TrainableDecoder, stream: Tensor, batches: int, rows: int, seed: int = 0) -> Tensor:
    """int16 [batches * rows, PIECE]: prompts from the stream, every other one at the start of a document, and what the teacher says
    after them; a quarter greedy, the others at temperatures between HEATS."""
    device = stream.device
    temperature = torch.linspace(*HEATS, rows, device=device)
    temperature[::4] = 0
    starts = (stream == 0).nonzero().flatten() + 1
    results = []
    for index in range(seed * 1000, seed * 1000 + batches):
        length = PROMPTS[index % len(PROMPTS)]
        generator = torch.Generator().manual_seed(index)
        at = torch.randint(len(stream) - length, (rows,), generator=generator).to(device)
        begins = starts[torch.randint(len(starts), (rows,), generator=generator).to(device)]
        at = torch.where(torch.arange(rows, device=device) % 2 == 0, begins.clamp(max=len(stream) - length), at)
        prompts = stream[at[:, None] + torch.arange(length, device=device)].long()
        shuffled = temperature[torch.randperm(rows, generator=generator).to(device)]
        results.append(
            generate(teacher, prompts, PIECE - length, shuffled, noise_keys(1000 + index, rows, device)).short()
        )
    return torch.cat(results)


def frequent(text: Tensor, count: int, vocab: int) -> Tensor:
    """The `count` most frequent tokens of a text int16 [...], ascending, int64 [count]."""
    counts = text.flatten().int().bincount(minlength=vocab)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


class Students(nn.Module):
    """What is trained, by name, of STUDENTS. ids: what a recurrent draft may say; attended: the layer that it attends to; draft: the
    draft model, None without it."""

    def __init__(
        self,
        teacher: TrainableDecoder,
        names: Sequence[str],
        ids: Tensor,
        attended: int,
        draft: TrainableDecoder | None = None,
    ) -> None:
        super().__init__()
        self.recurrent = RecurrentModule(teacher.spec, ids, attended) if "recurrent" in names else None
        self.heads = MedusaModule(teacher.spec.d_model, HEADS) if "medusa" in names else None
        self.draft = draft

    def loss(self, teacher: TrainableDecoder) -> Loss:
        """The sum of all students' losses; they share no parameter."""
        distillation = None if self.draft is None else Distillation(self.draft, teacher, RECIPE)

        def of_logits(rows: Tensor) -> Tensor:
            """The loss of heads and draft model, which share the teacher's logits."""
            with torch.no_grad():
                hidden = teacher.hidden(rows)
                wanted = teacher.logits(hidden)
            loss = torch.zeros((), device=rows.device)
            if self.heads is not None:
                loss = loss + medusa_loss(self.heads, hidden, wanted, teacher.logits, STRIDE)
            return loss if distillation is None else loss + distillation.compare(rows, wanted)

        outputs, learn, place = of_logits, teacher_targets, depth_loss
        if teacher.norm.weight.is_cuda:
            outputs, learn, place = (torch.compile(part, dynamic=False) for part in (outputs, learn, place))

        def total(rows: Tensor) -> Tensor:
            loss = torch.zeros((), device=rows.device)
            if self.heads is not None or self.draft is not None:
                loss = outputs(rows)
            if self.recurrent is not None:
                loss = loss + recurrent_losses(self.recurrent, teacher, rows, RECIPE, (learn, place)).sum()
            return loss

        return total


def save_heads(heads: MedusaModule, folder: Path, spec: ModelSpec, accuracies: list[list[float]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in heads.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "medusa_num_heads": len(heads),
        "medusa_num_layers": len(heads[0]),
        "hidden_size": spec.d_model,
        "vocab_size": spec.vocab_size,
        "shares_unembedding": True,
        "torch_dtype": "bfloat16",
        "accuracies": accuracies,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def calibrate(rows_of: Callable[[Text], Tensor], kinds: Sequence[Text]) -> list[list[float]]:
    """accuracies[head or place][rank]: the chance that the target says the candidate of that rank, the mean over kinds of text of the
    valid split: read as it is, continued greedily and at temperature 0.8."""
    return [[round(float(value), 5) for value in row] for row in torch.stack([rows_of(text) for text in kinds]).mean(0)]


def save(students: Students, teacher: TrainableDecoder, given: argparse.Namespace) -> None:
    """Write all students. The trees of heads and recurrent draft are calibrated if there is a corpus; heads need that."""
    kinds: list[Text] = []
    if given.corpus is not None:
        tokenizer, device = given.model / "tokenizer.json", teacher.norm.weight.device
        reader = Reader(given.corpus, tokenizer, "valid", given.held_out, device)
        kinds = list(texts(teacher, {kind: reader.rows(kind) for kind in KINDS}))
    if (recurrent := students.recurrent) is not None:
        save_recurrent(recurrent, given.out / "recurrent", teacher.spec)
        if kinds:
            path = given.out / "recurrent" / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            config["accuracies"] = calibrate(
                lambda text: torch.tensor(recurrent_figures(teacher, recurrent, text)["ranks"]), kinds
            )
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if students.draft is not None:
        config = json.loads((given.draft / "config.json").read_text(encoding="utf-8"))
        save_decoder(students.draft, given.out / "draft", config)
        copy_other_files(given.draft, given.out / "draft")
    if students.heads is not None:
        heads = students.heads.to(teacher.norm.weight.dtype)
        accuracies = calibrate(lambda text: head_hits(teacher, heads, text)[:, :RANKS], kinds)
        save_heads(heads, given.out / "medusa", teacher.spec, accuracies)


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
    written = teacher_writes(teacher, stream, given.written_batches, given.written_rows, given.seed)
    print(f"{written.numel()} tokens by the teacher after {time.monotonic() - begin:.1f} s", flush=True)
    source = Rows(TokenRows(stream, given.rows // (1 + WRITTEN), given.tokens, given.seed), written, given.seed)
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
