"""Held-out loss of a trained model for each kind of text.

    python training/evaluate.py --model FOLDER --corpus CORPUS [--split test] [--out losses.json]

Every document is read after <|endoftext|> in windows of the model's context, each window alone; every token of the text
is scored. Bits per byte are the summed nats over ln 2 and over the bytes of the text in UTF-8.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import KINDS, read_split
from tokenizers import Tokenizer
from torch import Tensor

from ridgeline.compress.decoder import TrainableDecoder, load_decoder

SCORED_AT_ONCE = 65_536  # tokens


def windows(documents: Iterable[list[int]], context: int) -> list[list[int]]:
    """Pieces of at most context + 1 tokens; each begins with the token before its first scored one. Shortest first."""
    pieces = [ids[at : at + context + 1] for ids in documents for at in range(0, len(ids) - 1, context)]
    return sorted(pieces, key=len)


def batches(pieces: list[list[int]]) -> Iterator[Tensor]:
    """Pieces of like length side by side, padded by -1: [rows, tokens] int64."""
    batch: list[list[int]] = []
    for piece in pieces:
        if batch and (len(batch) + 1) * len(piece) > SCORED_AT_ONCE:
            yield padded(batch)
            batch = []
        batch.append(piece)
    yield padded(batch)


def padded(batch: list[list[int]]) -> Tensor:
    longest = max(map(len, batch))
    return torch.tensor([piece + [-1] * (longest - len(piece)) for piece in batch])


@torch.no_grad()
def total_nats(model: TrainableDecoder, documents: Iterable[list[int]], device: torch.device) -> tuple[float, int]:
    """Summed loss in nats over all tokens but each document's first, and the number of those tokens."""
    cuda = device.type == "cuda"
    precision: AbstractContextManager[object] = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()
    total, count = 0.0, 0
    for rows in batches(windows(documents, model.context)):
        rows = rows.to(device)
        with precision:
            logits = model(rows[:, :-1].clamp(min=0))
        total += F.cross_entropy(
            logits.flatten(0, 1).float(), rows[:, 1:].flatten(), ignore_index=-1, reduction="sum"
        ).item()
        count += int((rows[:, 1:] >= 0).sum())
    return total, count


def evaluate(
    model: TrainableDecoder, tokenizer: Tokenizer, corpus: Path, split: str, device: torch.device
) -> dict[str, dict[str, float]]:
    """For each kind of text: documents, tokens, nats per token, bits per byte."""
    tokenizer.encode_special_tokens = True
    start = tokenizer.token_to_id("<|endoftext|>")
    documents = list(read_split(corpus, split))
    result = {}
    for kind in KINDS:
        texts = [document.text for document in documents if document.kind == kind]
        ids = [[start, *encoding.ids] for encoding in tokenizer.encode_batch(texts)]
        nats, tokens = total_nats(model, ids, device)
        size = sum(len(text.encode()) for text in texts)
        result[kind] = {
            "documents": len(texts),
            "tokens": tokens,
            "nats_per_token": round(nats / tokens, 4),
            "bits_per_byte": round(nats / math.log(2) / size, 4),
        }
    return result


def load_model(folder: Path) -> tuple[TrainableDecoder, Tokenizer]:
    """The training model with the weights of a converted folder, in float32."""
    return load_decoder(folder).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(arguments.model)
    result = evaluate(model.to(device), tokenizer, arguments.corpus, arguments.split, device)
    for kind, row in result.items():
        print(kind, row)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
