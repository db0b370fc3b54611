"""Let a converted model write: samples of each kind, and how often greedy text ends in a loop.

    python training/samples.py --model FOLDER --corpus CORPUS --out samples.json

A continuation loops if its last 64 tokens repeat themselves with a period of at most 32 tokens. Each of 24 documents of
every kind of the test split gives its first 64 tokens as a prompt; up to 256 tokens follow, always the likeliest one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from corpus import KINDS, read_split
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

PROMPT, LENGTH, TAIL, PERIOD, PER_KIND = 64, 256, 64, 32, 24
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# No prompt ends in white space: the vocabulary joins it to what follows.
PLAIN = {
    "prose": "The old man opened the door and looked out at the snow.",
    "docs": "# Installing the command line tool\n\nThis page explains how",
    "code": "def count_words(text: str) -> dict[str, int]:",
    "math": "Question: Anna has 12 apples. She gives 5 of them to Tom and buys 8 more. How many apples does Anna have?\nAnswer:",
    "dialogue": "User: I would like to order a pizza, please.\nAssistant:",
}
CHATS = {
    "chat: greeting": "Hello!",
    "chat: identity": "Who are you?",
    "chat: story": "Tell me a short story.",
    "chat: code": "Write a Python function that returns the sum of the squares of a list of numbers.",
    "chat: docs": "What is a container image?",
    "chat: fact": "What is the capital of France?",
    "chat: sum": "Tom has 7 pens and buys 6 more. How many pens does he have?",
}


def loops(ids: list[int]) -> bool:
    """Whether the last TAIL tokens repeat with a period of at most PERIOD."""
    tail = ids[-TAIL:]
    return len(ids) >= TAIL and any(tail[period:] == tail[:-period] for period in range(1, PERIOD + 1))


@torch.no_grad()
def write(model: Any, rows: list[list[int]], length: int, **sampling: Any) -> list[list[int]]:
    """Continuations of equally long rows of ids, each cut before its first end token."""
    ids = torch.tensor(rows)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, **sampling)[:, ids.shape[1] :]
    ends = set(model.generation_config.eos_token_id)
    return [row[: next((i for i, token in enumerate(row) if token in ends), len(row))] for row in out.tolist()]


def loop_rates(model: Any, tokenizer: Any, corpus: Path) -> dict[str, dict[str, Any]]:
    """For each kind: continuations, how many loop, and how many end by themselves before LENGTH tokens."""
    documents = list(read_split(corpus, "test"))
    Random(0).shuffle(documents)
    result = {}
    for kind in KINDS:
        rows = [tokenizer(document.text[:2000])["input_ids"] for document in documents if document.kind == kind]
        rows = [row[:PROMPT] for row in rows if len(row) >= PROMPT][:PER_KIND]
        texts = write(model, rows, LENGTH, do_sample=False, temperature=None, top_p=None)
        looping = sum(map(loops, texts))
        ended = sum(len(text) < LENGTH for text in texts)
        result[kind] = {
            "continuations": len(rows),
            "looping": looping,
            "ended": ended,
            "loop_rate": round(looping / len(rows), 3),
        }
        print(kind, result[kind], flush=True)
    return result


def samples(model: Any, tokenizer: Any, length: int) -> list[dict[str, str]]:
    """One greedy and one sampled (temperature 0.8, top-p 0.95) continuation for every prompt above."""
    prompts = dict(PLAIN)
    for name, question in CHATS.items():
        turns = [{"role": "user", "content": question}]
        prompts[name] = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    turns = [{"role": "user", "content": "What is the weather in Madrid?"}]
    prompts["chat: tool call"] = tokenizer.apply_chat_template(
        turns, tools=[WEATHER], add_generation_prompt=True, tokenize=False
    )
    result = []
    for name, prompt in prompts.items():
        ids = tokenizer(prompt)["input_ids"]
        greedy = write(model, [ids], length, do_sample=False, temperature=None, top_p=None)[0]
        sampled = write(model, [ids], length, do_sample=True, temperature=0.8, top_p=0.95)[0]
        texts = {way: tokenizer.decode(row) for way, row in (("greedy", greedy), ("sampled", sampled))}
        result.append({"kind": name, "prompt": prompt, **texts})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=160, help="tokens of a sample")
    arguments = parser.parse_args()
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    written = samples(model, tokenizer, arguments.length)
    rates = loop_rates(model, tokenizer, arguments.corpus)
    content = {"loops": rates, "samples": written}
    arguments.out.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
