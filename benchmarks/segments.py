"""What answers lose when segments of a prompt are reused at other positions, by the share of tokens that is computed again.

    python benchmarks/segments.py [--segments 4] [--shares 0,5,10,20,40] [--out benchmarks/results/kv.json]

An experiment outside of the server, in plain PyTorch. A held-out text is divided into segments, and each is computed alone, as a
document that other prompts have used. Its keys are rotated on to the place where the segment stands in the prompt. Then a share of
the reused tokens is computed again with all tokens before them, layer by layer, and the other tokens keep their keys and values:

    first      the first tokens of each segment (EPIC, arXiv:2410.15332)
    deviation  those whose keys and values differ most in the second layer, for which the first one is computed for all tokens
               (CacheBlend, arXiv:2405.16444, section 4.3, with one choice for all later layers)
    unmoved    none, and keys keep the rotation of their old positions: what a plain copy does

The 128 tokens after the prompt are forced and scored: KL, perplexity and top-1 agreement against the prompt computed in full. The
first segment keeps its position and is exact, so shares count the tokens of the others. computed: (token, layer) pairs of them that
are computed, of all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import cpu_name, provenance, write_rows
from torch import Tensor

from ridgeline.compress.decoder import KeysValues, Layer, TrainableDecoder, load_decoder, rotate
from ridgeline.core.config import ModelConfig
from ridgeline.models.hub import resolve_model
from ridgeline.quality.drift import Estimate, TokenDrift, by_document, measure
from ridgeline.quality.texts import read_texts
from ridgeline.text.tokenizer import Tokenizer

TEXTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "heldout.jsonl"
PROMPT, ANSWER = 512, 128
METHODS = ("unmoved", "first", "deviation")


class Model:
    """A decoder that computes any tokens of a sequence over given keys and values."""

    def __init__(self, decoder: TrainableDecoder) -> None:
        self.decoder = decoder
        self._tables = [getattr(decoder, f"rotary_{index}") for index in decoder.rope_of]

    def alone(self, ids: Tensor) -> list[KeysValues]:
        """Keys, rotated from position 0 on, and values of each layer, [1, kv_heads, tokens, head_dim]."""
        x, made = self.decoder.embed_tokens(ids)[None], []
        for layer, table in zip(self.decoder.layers, self._tables, strict=True):
            x, keys_values = layer(x, table[: len(ids)])
            made.append(keys_values)
        return made

    def moved(self, made: Sequence[KeysValues], by: int) -> list[KeysValues]:
        """Rotate keys on by a number of positions: rotations add up."""
        return [(rotate(k, table[by : by + 1]), v) for (k, v), table in zip(made, self._tables, strict=True)]

    def fresh(self, number: int, x: Tensor, places: Tensor) -> KeysValues:
        """Keys and values of the tokens at `places` in a layer, from its input x [1, tokens, width]."""
        layer, table = self.decoder.layers[number], self._tables[number]
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        k = rotate(attention.k_norm(attention._heads(attention.k_proj, normed)), table[places])
        return k, attention._heads(attention.v_proj, normed)

    def step(self, number: int, x: Tensor, places: Tensor, keys_values: KeysValues) -> Tensor:
        """Output of a layer for the tokens at `places`, which attend to all keys up to their own."""
        layer: Layer = self.decoder.layers[number]
        attention, (k, v) = layer.self_attn, keys_values
        q = rotate(
            attention.q_norm(attention._heads(attention.q_proj, layer.input_layernorm(x))), self._tables[number][places]
        )
        seen = torch.arange(k.shape[2]) <= places[:, None]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=attention.scale, enable_gqa=True
        )
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def logits(self, x: Tensor) -> Tensor:
        return self.decoder.norm(x)[0] @ self.decoder.unembedding.T


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text in segments, and what follows it. ids: of all tokens. starts: first token of each segment. end: of the last one."""

    ids: Tensor
    starts: tuple[int, ...]
    end: int
    document: int = 0


def reused(model: Model, prompt: Prompt, moves: bool = True) -> list[KeysValues]:
    """The keys and values of all segments, each computed alone, with room for the answer."""
    bounds, room = [*prompt.starts, prompt.end], len(prompt.ids) - prompt.end
    parts = []
    for start, end in pairwise(bounds):
        made = model.alone(prompt.ids[start:end])
        parts.append(model.moved(made, start) if moves else made)
    layers = []
    for of_layer in zip(*parts, strict=True):
        k, v = (torch.cat(tensors, 2) for tensors in zip(*of_layer, strict=True))
        layers.append((torch.nn.functional.pad(k, (0, 0, 0, room)), torch.nn.functional.pad(v, (0, 0, 0, room))))
    return layers


def first_tokens(prompt: Prompt, count: int) -> Tensor:
    """As many of the first tokens of each segment but the first as `count` allows."""
    each = count // max(1, len(prompt.starts) - 1)
    bounds = [*prompt.starts[1:], prompt.end]
    return torch.cat([torch.arange(a, min(a + each, b)) for a, b in pairwise(bounds)])


def most_deviating(fresh: KeysValues, old: KeysValues, prompt: Prompt, count: int) -> Tensor:
    """The `count` tokens behind the first segment whose keys and values differ most."""
    begin = prompt.starts[1]
    differences = [
        (new - past)[0, :, begin : prompt.end].square().sum((0, 2)) for new, past in zip(fresh, old, strict=True)
    ]
    return begin + torch.stack(differences).sum(0).topk(count).indices.sort().values


def answer_logits(model: Model, prompt: Prompt, method: str, share: float) -> tuple[Tensor, float]:
    """Logits at the last token of the prompt and at those after it but the last, and the share of (token, layer) pairs of reused
    tokens that were computed."""
    kept = reused(model, prompt, moves=method != "unmoved")
    total, layers = prompt.end - prompt.starts[1], len(kept)
    count = round(share * total)
    answer = torch.arange(prompt.end - 1, len(prompt.ids) - 1)
    places = torch.arange(len(prompt.ids) - 1) if method == "deviation" else answer
    if method == "first":
        places = torch.cat((first_tokens(prompt, count), answer)).unique()
    x, computed = model.decoder.embed_tokens(prompt.ids[places])[None], 0
    for number, (k, v) in enumerate(kept):
        new = model.fresh(number, x, places)
        if number == 1 and method == "deviation":
            whole = tuple(tensor[:, :, : prompt.end] for tensor in new), tuple(t[:, :, : prompt.end] for t in (k, v))
            chosen = torch.cat((most_deviating(*whole, prompt, count), answer)).unique()
            x, new, places = x[:, chosen], (new[0][:, :, chosen], new[1][:, :, chosen]), chosen
        k[:, :, places], v[:, :, places] = new
        x = model.step(number, x, places, (k, v))
        computed += int(((places >= prompt.starts[1]) & (places < prompt.end - 1)).sum())
    return model.logits(x[:, -len(answer) :]), computed / (total * layers)


def drift(reference: Tensor, candidate: Tensor, targets: Tensor) -> TokenDrift:
    """Over the whole vocabulary."""
    p, q = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
    at = targets[:, None]
    return TokenDrift(
        (p.exp() * (p - q)).sum(-1).numpy(),
        (p.argmax(-1) == q.argmax(-1)).double().numpy(),
        p.gather(1, at)[:, 0].numpy(),
        q.gather(1, at)[:, 0].numpy(),
    )


def prompts(segments: int) -> list[Prompt]:
    tokenizer, length = Tokenizer.load(resolve_model(ModelConfig())), PROMPT + ANSWER
    starts = tuple(range(0, PROMPT, PROMPT // segments))
    return [
        Prompt(torch.tensor(ids[begin : begin + length]), starts, PROMPT, document)
        for document, text in enumerate(read_texts(TEXTS))
        if (ids := tokenizer.encode(text, add_special_tokens=True))
        for begin in range(0, len(ids) - length + 1, length)
    ]


def interval(estimate: Estimate) -> list[float]:
    return [round(estimate.low or 0.0, 5), round(estimate.high or 0.0, 5)]


@torch.inference_mode()
def rows(segments: int, shares: Sequence[float]) -> Iterator[dict[str, Any]]:
    model, texts = Model(load_decoder(resolve_model(ModelConfig())).float()), prompts(segments)
    full = [model.decoder(prompt.ids[None, :-1])[0, prompt.end - 1 :] for prompt in texts]
    for method in METHODS:
        for share in (0.0,) if method == "unmoved" else shares:
            if share == 0 and method == "deviation":
                continue
            parts, computed = [], 0.0
            for prompt, reference in zip(texts, full, strict=True):
                logits, computed = answer_logits(model, prompt, method, share)
                parts.append(drift(reference, logits, prompt.ids[prompt.end :]))
            measured = measure(by_document(parts, [prompt.document for prompt in texts]))
            figures = measured.figures
            yield {
                "row": f"segments-{segments}-{method}-{share:.0%}".replace("%", "pct"),
                "value": round(figures["kl"].value, 5), "unit": "KL, nats per token", "interval": interval(figures["kl"]),
                "method": method, "share": share, "computed": round(computed, 4), "segments": segments,
                "prompt_tokens": PROMPT, "perplexity_change": round(figures["perplexity_change"].value, 4),
                "top1": round(figures["top1"].value, 4), "tokens": measured.tokens, "documents": measured.documents,
                "model": "ridgeline-14m",
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=4, help="segments of a prompt, of equal length")
    parser.add_argument("--shares", default="0,5,10,20,40", help="percent of the reused tokens that are computed again")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    args = parser.parse_args()
    facts = provenance(cpu_name(), args.commit)
    for row in rows(args.segments, [float(share) / 100 for share in args.shares.split(",")]):
        print(row, flush=True)
        if args.out:
            write_rows(args.out, [row | facts])


if __name__ == "__main__":
    main()
