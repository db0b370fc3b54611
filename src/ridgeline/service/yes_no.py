"""Rerankers that answer yes or no: Qwen3-Reranker (Zhang et al. 2025, arXiv:2506.05176, section 2).

The score of a query and a document is the probability of "yes" against "no" as the first token of the answer. The difference of two
logits is the last hidden state times the difference of two rows of the head. So a pair is pooled like a text (service.pooling), and
the engine neither multiplies the whole head nor draws a token.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul, sub
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ConfigError
from ridgeline.text.prompts import ChatEncoder, ChatTemplates, Parsers
from ridgeline.text.tokenizer import Tokenizer

ARCHITECTURE = "Qwen3ForCausalLM"
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {{ messages[0].content }}\n<Document>: {{ messages[-1].content }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n{{ '' }}"
)
"""Prompt and instruction of the model card (huggingface.co/Qwen/Qwen3-Reranker-0.6B). The last expression keeps the line ends
before it, which Jinja removes from the end of a template."""
_INDEX, _FILE = "model.safetensors.index.json", "model.safetensors"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class YesNo:
    """encoder: makes the prompt of a pair. weights: [d_model], the row of "yes" in the head minus the row of "no"."""

    encoder: ChatEncoder
    weights: array[float]

    def ids(self, query: str, document: str, check: Callable[[str], None]) -> list[int]:
        """The prompt of a pair. Control tokens in texts stay text. check: called with the prompt's text; may raise."""
        messages = [{"role": "system", "content": query}, {"role": "user", "content": document}]
        return self.encoder.encode(messages, check=check).ids

    def score(self, hidden: Sequence[float]) -> float:
        """Probability of "yes" against "no" after the final hidden state of a prompt's last token."""
        return 0.5 + 0.5 * math.tanh(0.5 * sum(map(mul, self.weights, hidden)))


def read_yes_no(folder: Path, tokenizer: Tokenizer, tokens: tuple[Any, Any] | None = None) -> YesNo:
    """The judge of a model folder. tokens: ids of "yes" and "no"; None: the tokens with these texts.

    Raises ConfigError for another model, or a head that cannot be read.
    """
    named = map(tokenizer.token_id, ("yes", "no")) if tokens is None else tokens
    chosen = [token for token in named if type(token) is int]
    if len(chosen) < 2:
        raise ConfigError(f'{folder} has no tokens for "yes" and "no": give --pooling last.', param="pooling")
    try:
        yes, no = _head_rows(folder, chosen)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ConfigError(
            f"The rows of yes and no in the head of {folder} cannot be read ({error!r}): give the published safetensors files, or "
            "--pooling last.",
            param="pooling",
        ) from None
    templates = ChatTemplates(tokenizer, {"default": TEMPLATE}, parsers=Parsers("none", "none"))
    return YesNo(templates.choose(tools=False), array("d", map(sub, yes, no)))


def _head_rows(folder: Path, tokens: Sequence[int]) -> list[Sequence[float]]:
    """Rows of the output head, which may be the embeddings."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("architectures") != [ARCHITECTURE]:
        raise ConfigError(
            f"{folder} is a {', '.join(config.get('architectures') or ['model'])}, and only {ARCHITECTURE} answers yes or no to "
            "Qwen3-Reranker's question: give --pooling last.",
            param="pooling",
        )
    name, index = _EMBEDDING if config.get("tie_word_embeddings") else _HEAD, folder / _INDEX
    file = json.loads(index.read_text(encoding="utf-8"))["weight_map"][name] if index.is_file() else _FILE
    with (folder / file).open("rb") as data:
        (size,) = struct.unpack("<Q", data.read(8))
        tensor = json.loads(data.read(size))[name]
        (rows, width), kind = tensor["shape"], tensor["dtype"]
        stride, begin, texts = width * _BYTES[kind], 8 + size + tensor["data_offsets"][0], []
        for token in tokens:
            if not 0 <= token < rows:
                raise ValueError(f"token {token} of {rows}")
            data.seek(begin + token * stride)
            texts.append(data.read(stride))
    return [_floats(text, kind, width) for text in texts]


def _floats(data: bytes, kind: str, width: int) -> Sequence[float]:
    """Numbers of a little-endian safetensors row."""
    if kind == "BF16":  # the upper half of a float32
        halves = struct.unpack(f"<{width}H", data)
        return struct.unpack(f"<{width}f", struct.pack(f"<{width}I", *(half << 16 for half in halves)))
    return struct.unpack(f"<{width}{'e' if kind == 'F16' else 'f'}", data)
