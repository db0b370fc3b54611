"""What a budget of reasoning costs the host: time to compile its grammar, and time of a token's mask, beside a tool grammar.

    python benchmarks/reasoning_budget.py --out benchmarks/results/reasoning_budget.json

The vocabularies are byte-level: the 256 bytes and random words of 2 to 12 letters as added merges would make them. Each row is the
median of the rounds. No model runs: a mask is computed on the host, beside the step of the device.
"""

from __future__ import annotations

import argparse
import random
import statistics
import string
import tempfile
import time
from pathlib import Path

from common import cpu_name, provenance, write_rows
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ridgeline.core.sampling import Grammar
from ridgeline.text.grammar import GrammarCompiler
from ridgeline.text.pieces import byte_letters
from ridgeline.text.reasoning import REASONING_FORMATS
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.text.tool_formats import HERMES
from ridgeline.text.tool_grammar import TextTags, bound_reasoning, tool_grammar
from ridgeline.text.tools import ToolChoice, read_tools

TAGS = REASONING_FORMATS["qwen3"]
TAG_TEXTS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"city": {"type": "string"}}}}}


def make_tokenizer(folder: Path, size: int) -> Tokenizer:
    """A tokenizer with about this number of tokens."""
    rng = random.Random(0)
    words = dict.fromkeys(byte_letters())
    while len(words) < size:
        words["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 12)))] = None
    backend = Backend(models.BPE({word: index for index, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAG_TEXTS])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return Tokenizer.load(folder)


def measure(tokenizer: Tokenizer, grammar: Grammar, start: list[int], tokens: int) -> tuple[float, float]:
    """Seconds to compile, the vocabulary's own time left out, and seconds of a mask after each of `tokens` tokens."""
    end = tokenizer.token_id("<|end|>")
    assert end is not None
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_ids=[end])
    compiler.compile(Grammar("choice", '["a"]'))
    begun = time.perf_counter()
    compiled = compiler.compile(grammar)
    compile_s = time.perf_counter() - begun
    state = compiled.start()
    state.accept(start)
    words = tokenizer.encode("lorem ipsum dolor sit amet " * tokens, add_special_tokens=False)[:tokens]
    begun = time.perf_counter()
    for word in words:
        state.accept([word])
        state.mask()
    return compile_s, (time.perf_counter() - begun) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--out")
    options = parser.parse_args()
    origin = provenance(cpu_name())
    rows = []
    for size in (49_152, 151_936):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = make_tokenizer(Path(folder), size)
        think = tokenizer.encode("<think>", add_special_tokens=False)
        close = tokenizer.encode("</think>", add_special_tokens=False)
        tools = tool_grammar(
            HERMES, ToolChoice(read_tools([TOOL]), False), tokenizer, tags=TextTags.of(TAGS, bounded=True)
        )
        budget = bound_reasoning(None, TAGS, tokenizer, inside=False, budget=8192)
        both = bound_reasoning(tools, TAGS, tokenizer, inside=False, budget=8192)
        cases = {
            "reasoning": (budget, think),
            "answer": (budget, think + close),
            "tools-reasoning": (both, think),
            "tools-answer": (both, think + close),
        }
        for name, (grammar, start) in cases.items():
            runs = [measure(tokenizer, grammar, start, options.tokens) for _ in range(options.rounds)]
            for kind, values in zip(("compile", "mask"), zip(*runs, strict=True), strict=True):
                row = {"row": f"{size}-{name}-{kind}-s", "value": round(statistics.median(values), 8), "unit": "s"}
                rows.append({**row, "target": None, **origin})
                print(rows[-1]["row"], rows[-1]["value"])
    if options.out:
        write_rows(options.out, rows)


if __name__ == "__main__":
    main()
