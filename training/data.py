"""Turn the corpus into pools of token ids: one pool for each kind of text, one for each kind of conversation.

    python training/data.py --corpus CORPUS --tokenizer tokenizer.json --out POOLS

Every pool is saved as `<name>.ids.npy` (uint16, all documents in a row, each begun by <|endoftext|>) and
`<name>.lengths.npy` (int32, tokens per document).
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from chat import derive
from corpus import KINDS, Document, read_split
from jinja2.sandbox import ImmutableSandboxedEnvironment
from synthetic import Conversation, small_talk, tool_conversation
from tokenizers import Tokenizer

SYNTHETIC = {"chat-tools": (tool_conversation, 64_000), "chat-talk": (small_talk, 64_000)}
SYNTHETIC_PARTS = 64
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
Encoded = dict[str, list[np.ndarray]]  # pool name -> documents -> token ids, uint16


def load_template() -> Any:
    """The chat template, with JSON written as transformers and the server write it (keys in order, nothing escaped)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def render(template: Any, conversation: Conversation) -> str:
    text: str = template.render(
        messages=conversation["messages"], tools=conversation["tools"], add_generation_prompt=False
    )
    return text


def seeded(document: Document, seed: int) -> Random:
    return Random(zlib.crc32(document.source.encode()) ^ seed)


def encode_batch(documents: list[Document], tokenizer_path: Path, seed: int) -> Encoded:
    """Token ids of the documents and of the conversations derived from them, by pool."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    template = load_template()
    texts: dict[str, list[str]] = defaultdict(list)
    for document in documents:
        texts[document.kind].append(document.text)
        try:
            texts[f"chat-{document.kind}"] += [render(template, c) for c in derive(document, seeded(document, seed))]
        except (SyntaxError, RecursionError):  # code for another Python than this one, or nested too deep
            continue
    return {name: encode(tokenizer, name, batch) for name, batch in texts.items()}


def encode(tokenizer: Tokenizer, name: str, texts: list[str]) -> list[np.ndarray]:
    """Each text's ids after <|endoftext|>. In plain documents the names of control tokens are read as letters."""
    tokenizer.encode_special_tokens = not name.startswith("chat-")
    start = tokenizer.token_to_id("<|endoftext|>")
    return [np.array([start, *encoding.ids], dtype=np.uint16) for encoding in tokenizer.encode_batch(texts)]


def synthesize(part: int, tokenizer_path: Path) -> Encoded:
    """Part `part` of SYNTHETIC_PARTS of the made-up conversations."""
    tokenizer, template = Tokenizer.from_file(str(tokenizer_path)), load_template()
    pools: Encoded = {}
    for name, (make, count) in SYNTHETIC.items():
        rng = Random(f"{name}-{part}")
        texts = [render(template, make(rng)) for _ in range(count // SYNTHETIC_PARTS)]
        pools[name] = encode(tokenizer, name, texts)
    return pools


def batches(documents: list[Document], size: int) -> Iterator[list[Document]]:
    for start in range(0, len(documents), size):
        yield documents[start : start + size]


def prepare(corpus: Path, split: str, tokenizer_path: Path, limit: int | None, workers: int) -> Encoded:
    """All pools of `split`, its documents in random order, made by `workers` processes."""
    documents = list(read_split(corpus, split))
    Random(0).shuffle(documents)
    pools: Encoded = defaultdict(list)
    with ProcessPoolExecutor(workers, get_context("spawn")) as executor:  # a fork would copy the tokenizer's locks
        work = partial(encode_batch, tokenizer_path=tokenizer_path, seed=0)
        made: Iterator[Encoded] = iter(())
        if split == "train":
            parts = range(SYNTHETIC_PARTS if limit is None else 1)
            made = executor.map(partial(synthesize, tokenizer_path=tokenizer_path), parts)
        for encoded in chain(executor.map(work, batches(documents[:limit], 100)), made):
            for name, items in encoded.items():
                pools[name] += items
    return pools


def save(pools: Encoded, folder: Path, prefix: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in sorted(pools.items()):
        lengths = np.array([len(item) for item in items], dtype=np.int32)
        ids = np.concatenate(items)
        np.save(folder / f"{prefix}{name}.ids.npy", ids)
        np.save(folder / f"{prefix}{name}.lengths.npy", lengths)
        print(f"{prefix}{name:15} {len(items):7} documents {len(ids):10} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="use only so many training documents (dry runs)")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    pools = prepare(arguments.corpus, "train", arguments.tokenizer, arguments.limit, arguments.workers)
    save(pools, arguments.out, "train-")
    held_out = prepare(arguments.corpus, "valid", arguments.tokenizer, arguments.limit, arguments.workers)
    save({name: items for name, items in held_out.items() if name in KINDS}, arguments.out, "valid-")


if __name__ == "__main__":
    main()
