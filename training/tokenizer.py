"""Train the byte-level BPE vocabulary of the shipped model on a balanced sample of the corpus.

python training/tokenizer.py --corpus CORPUS --out tokenizer.json
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from corpus import KINDS, Document, read_split
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 8192
END_OF_TEXT, TURN_START, TURN_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
# Control tokens vanish from decoded text; markup stays in it, because the server reads tool calls and thoughts from the text.
CONTROL = [END_OF_TEXT, TURN_START, TURN_END, PAD, *(f"<|reserved_{i}|>" for i in range(8))]
MARKUP = ["<tool_call>", "</tool_call>", "<think>", "</think>"]

# Words with their leading space, single digits, runs of signs; a line break takes the indentation that follows it
# (less one space, which the next word takes), so that an indented line of Python costs one token more than a flat one.
SPLIT = (
    r"'(?i:s|t|re|ve|m|ll|d)\b"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"| ?\p{N}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s*[\r\n]+(?:[ \t]+(?=[ \t]))?"
    r"|\s+(?!\S)"
    r"|\s+"
)
SAMPLE_BYTES = {"prose": 14e6, "docs": 13e6, "code": 13e6, "math": 3e6, "dialogue": 1.9e6}


def sample(documents: list[Document], budgets: dict[str, float], seed: int) -> Iterator[str]:
    """Texts in random order, of each kind until its budget of characters is spent."""
    left = dict(budgets)
    for index in random.Random(seed).sample(range(len(documents)), len(documents)):
        document = documents[index]
        if left[document.kind] > 0:
            left[document.kind] -= len(document.text)
            yield document.text


def build(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly VOCAB_SIZE entries, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=CONTROL + MARKUP,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Write tokenizer.json with the markup tokens kept in decoded text."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] not in MARKUP
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = build(sample(list(read_split(arguments.corpus, "train")), SAMPLE_BYTES, arguments.seed))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"vocabulary of {tokenizer.get_vocab_size()} instead of {VOCAB_SIZE}: the sample is too small")
    save(tokenizer, arguments.out)
    for kind in KINDS:
        texts = [document.text for document in read_split(arguments.corpus, "valid") if document.kind == kind]
        tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
        print(f"{kind:9} {sum(len(text.encode()) for text in texts) / tokens:.3f} bytes per token (valid)")


if __name__ == "__main__":
    main()
