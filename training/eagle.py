"""Train an EAGLE-1 head for a model.

    python training/eagle.py --model FOLDER --corpus CORPUS --out OUT --seconds 300

The head (compress/eagle.py) has the target's embedding and unembedding. It trains on text of the corpus. Writes OUT/config.json and
OUT/model.safetensors, which `--speculate eagle:OUT` reads. `training/acceptance.py --eagle OUT` tells how often its drafts are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from random import Random

import torch
from corpus import read_split
from tokenizers import Tokenizer
from torch import Tensor

from ridgeline.compress.decoder import load_decoder
from ridgeline.compress.drafters import frequent
from ridgeline.compress.eagle import EagleModule, eagle_loss, save_eagle

OUTPUTS = 2048
"""The most frequent tokens, over which the loss compares."""
TOKENS = 256
"""Tokens of a row in training."""
DOCUMENT = 300
"""Fewer tokens than a document of the corpus has on average."""


def batches(corpus: Path, tokenizer: Path, rows: int, limit: int) -> Tensor:
    """int64 [batches, rows, TOKENS] with about `limit` tokens: documents of the training split's beginning, in random order."""
    encoder, ids = Tokenizer.from_file(str(tokenizer)), list[int]()
    encoder.encode_special_tokens = True
    documents = [document.text for document in islice(read_split(corpus, "train"), limit // DOCUMENT)]
    Random(1).shuffle(documents)
    for begin in range(0, len(documents), 64):
        for encoding in encoder.encode_batch(documents[begin : begin + 64]):
            ids += [*encoding.ids, 0]
        if len(ids) >= limit:
            break
    size = rows * TOKENS
    return torch.tensor(ids[: len(ids) // size * size]).view(-1, rows, TOKENS)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the teacher, a Hugging Face folder")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300, help="of training")
    parser.add_argument("--rows", type=int, default=2, help="rows of a batch")
    parser.add_argument("--corpus-tokens", type=int, default=1_000_000, help="of text to train on")
    return parser.parse_args()


def main() -> None:
    given = options()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher = load_decoder(given.model).to(device).requires_grad_(False)
    head, tokenizer = EagleModule(teacher).to(device), given.model / "tokenizer.json"
    rows = batches(given.corpus, tokenizer, given.rows, given.corpus_tokens).to(device)
    ids = frequent(rows, OUTPUTS, teacher.spec.vocab_size)
    rates = [1.5e-3 if parameter.dim() > 1 else 5e-4 for parameter in head.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": [parameter], "lr": rate} for parameter, rate in zip(head.parameters(), rates, strict=True)],
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    begin, computing, number = time.monotonic(), time.process_time(), 0
    while (seen := (time.monotonic() - begin) / given.seconds) < 1:
        warm, decay = min(1.0, (number + 1) / 30), min(1.0, (1 - seen) / 0.4)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * warm * decay
        with torch.autocast(device.type, torch.bfloat16):
            loss = eagle_loss(head, teacher, rows[number % len(rows)], ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 50 == 0:
            seconds = f"{time.monotonic() - begin:.0f} s ({time.process_time() - computing:.0f} s of a core)"
            print(f"{seconds}, batch {number}: {loss.item():.3f}", flush=True)
        number += 1
    save_eagle(head, given.out, json.loads((given.model / "config.json").read_text(encoding="utf-8")))
    spent = time.process_time() - computing
    print(
        f"trained on {number * given.rows * TOKENS} tokens, {len(rows)} batches of text, {spent:.0f} s of a core",
        flush=True,
    )


if __name__ == "__main__":
    main()
