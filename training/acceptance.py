"""How often a model says what its drafters guess, by kind of held-out text.

    python training/acceptance.py --model FOLDER --corpus CORPUS --draft DRAFT --medusa HEADS --recurrent DRAFT \
        --eagle HEAD --machine "..." --commit HASH --out benchmarks/results/drafters.json

Three ways to come by a text: `read`, the held-out text itself (the target is made to say it, as forced continuations are);
`sampled` and `greedy`, what the target says at temperature 0.8 and 0 after the first 64 tokens of each row. A draft is kept as
long as its guesses are the text's tokens, and it reads the same tokens before them as the target, so one pass of both over a
text tells what every chain would have kept. The draft draws with the noise that the target draws with (ops.noise). A recurrent
draft's `ranks` are, for each place of a chain, how often its best draws are right where the best ones of the places before were.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import torch
from corpus import KINDS, read_split
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from ridgeline.compress.acceptance import (
    LENGTH,
    PROMPT,
    TEMPERATURE,
    Text,
    chain_rates,
    draw,
    head_hits,
    recurrent_figures,
    scored,
    texts,
)
from ridgeline.compress.decoder import TrainableDecoder, load_decoder
from ridgeline.compress.distill import MedusaModule
from ridgeline.compress.eagle import eagle_figures, load_eagle
from ridgeline.compress.recurrent import RecurrentModule
from ridgeline.core.spec import ModelSpec
from ridgeline.speculation.recurrent import load_recurrent

DEPTH = 5
CUTS = (1024, 2048, 4096)


class Reader:
    """Rows of held-out text."""

    def __init__(self, corpus: Path, tokenizer: Path, split: str, count: int, device: torch.device) -> None:
        self.tokenizer, self.count, self.device = Tokenizer.from_file(str(tokenizer)), count, device
        self.tokenizer.encode_special_tokens = True
        self.documents = list(read_split(corpus, split))
        Random(0).shuffle(self.documents)

    def stream(self, kind: str) -> list[int]:
        encoded = self.tokenizer.encode_batch([document.text for document in self.documents if document.kind == kind])
        return [token for encoding in encoded for token in (*encoding.ids, 0)]

    def rows(self, kind: str) -> Tensor:
        """[count or fewer, PROMPT + LENGTH] int64: pieces at even distances of the documents in random order."""
        ids = torch.tensor(self.stream(kind))
        pieces = ids[: len(ids) // (PROMPT + LENGTH) * (PROMPT + LENGTH)].view(-1, PROMPT + LENGTH)
        return pieces[:: max(1, len(pieces) // self.count)][: self.count].to(self.device)

    def frequent(self) -> Tensor:
        """All ids, those most frequent in the split first, every kind of text counting alike."""
        total = torch.zeros(self.tokenizer.get_vocab_size(), dtype=torch.float64)
        for kind in KINDS:
            counts = torch.tensor(self.stream(kind)).bincount(minlength=len(total)).double()
            total += counts / counts.sum()
        return total.argsort(descending=True, stable=True).to(self.device)


@torch.no_grad()
def draft_figures(target: TrainableDecoder, draft: TrainableDecoder, text: Text, frequent: Tensor) -> dict[str, Any]:
    """One text's figures; see the README of the draft for their names."""
    kept, cut, sums = [], {size: [] for size in CUTS}, torch.zeros(3, dtype=torch.float64)
    temperature = text.temperature or 0.0
    for rows, keys in text.parts():
        p, q, said = scored(target, rows, text.prompt), scored(draft, rows, text.prompt), rows[:, text.prompt :]
        kept.append(draw(q, text.prompt, temperature, keys) == said)
        for size in CUTS:
            rare = torch.ones(q.shape[-1], dtype=torch.bool, device=q.device)
            rare[frequent[:size]] = False
            cut[size].append(draw(q.masked_fill(rare, float("-inf")), text.prompt, temperature, keys) == said)
        pick = q.argmax(-1, keepdim=True)
        coupled = draw(p, text.prompt, TEMPERATURE, keys) == draw(q, text.prompt, TEMPERATURE, keys)
        p, q = (p / TEMPERATURE).softmax(-1), (q / TEMPERATURE).softmax(-1)
        measured = (coupled.double(), torch.minimum(p, q).sum(-1), p.gather(-1, pick))
        sums += torch.tensor([float(tensor.double().sum()) for tensor in measured], dtype=torch.float64)
    right = torch.cat(kept)
    rates = chain_rates(right, DEPTH)
    whole = torch.tensor(rates).cumprod(0)
    coupled, overlap, likeliest = (sums / right.numel()).tolist()
    figures = {
        "kept": rates,
        "kept_of_5": float(whole.sum()),
        "coupled": coupled,
        "overlap": overlap,
        "likeliest": likeliest,
    }
    return figures | {f"kept_vocab_{size}": float(torch.cat(cut[size]).float().mean()) for size in CUTS}


def load_draft(folder: Path, spec: ModelSpec) -> RecurrentModule:
    weights = load_recurrent(folder, spec)
    draft = RecurrentModule(spec, weights.ids.long(), weights.layer)
    draft.load(weights)
    return draft.requires_grad_(False)


def load_heads(folder: Path) -> MedusaModule:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = MedusaModule(config["hidden_size"], config["medusa_num_heads"], config["medusa_num_layers"])
    heads.load_state_dict(load_file(folder / "model.safetensors"))
    return heads


def rounded(value: Any) -> Any:
    return [rounded(number) for number in value] if isinstance(value, list) else round(value, 4)


def mean_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over kinds of every figure."""
    figures: dict[str, Any] = {}
    for name, value in rows[0].items():
        every = torch.tensor([row[name] for row in rows], dtype=torch.float64).mean(0)
        figures[name] = every.tolist() if isinstance(value, list) else float(every)
    return figures


def measure(given: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """Figures by "<drafter>-<way>-<kind>", kind "all" being the mean over kinds."""
    target = load_decoder(given.model).to(device).cast_parameters(torch.bfloat16)
    draft = load_decoder(given.draft).to(device).cast_parameters(torch.bfloat16) if given.draft else None
    heads = load_heads(given.medusa).to(device, torch.bfloat16) if given.medusa else None
    again = load_draft(given.recurrent, target.spec).to(device) if given.recurrent else None
    eagle = load_eagle(given.eagle, target).to(device, torch.bfloat16) if given.eagle else None
    reader = Reader(given.corpus, given.model / "tokenizer.json", "test", given.rows, device)
    frequent = Reader(given.corpus, given.model / "tokenizer.json", "valid", 1, device).frequent()
    figures: dict[str, dict[str, Any]] = {}
    for text in texts(target, {kind: reader.rows(kind) for kind in KINDS}):
        if draft is not None:
            figures[f"draft-{text.way}-{text.kind}"] = draft_figures(target, draft, text, frequent)
        if again is not None:
            figures[f"recurrent-{text.way}-{text.kind}"] = recurrent_figures(target, again, text)
        if eagle is not None:
            figures[f"eagle-{text.way}-{text.kind}"] = eagle_figures(eagle, target, text)
        if heads is not None:
            hits = head_hits(target, heads, text).cumsum(1)
            top = {f"head_{index + 1}_top": row[:3].tolist() for index, row in enumerate(hits)}
            figures[f"medusa-{text.way}-{text.kind}"] = top
    for name in list(figures):
        group = name.rsplit("-", 1)[0]
        figures[f"{group}-all"] = mean_of([figures[f"{group}-{kind}"] for kind in KINDS])
    return {name: {key: rounded(value) for key, value in row.items()} for name, row in figures.items()}


def write_rows(path: Path, figures: dict[str, dict[str, Any]], origin: dict[str, str]) -> None:
    """Merge rows into a result file, replacing those of the same name."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    rows = [row for row in old if row["row"] not in figures]
    rows += [{"row": name, **figures[name], **origin} for name in sorted(figures)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


def head_of_tree() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--medusa", type=Path)
    parser.add_argument("--recurrent", type=Path)
    parser.add_argument("--eagle", type=Path, help="a head of training/eagle.py")
    parser.add_argument("--rows", type=int, default=192, help="rows of text of each kind")
    parser.add_argument("--machine", default="unnamed")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures = measure(given, device)
    for name, row in sorted(figures.items()):
        if given.out is None or name.endswith("-all"):
            print(name, json.dumps(row), flush=True)
    if given.out:
        drafters = {name: vars(given)[name] for name in ("draft", "medusa", "recurrent", "eagle") if vars(given)[name]}
        ran = "".join(f" --{name} {folder}" for name, folder in drafters.items())
        origin = {
            "machine": given.machine,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "commit": given.commit or head_of_tree(),
            "command": f"python training/acceptance.py --model {given.model} --corpus CORPUS{ran} --rows {given.rows}",
        }
        write_rows(given.out, figures, origin)


if __name__ == "__main__":
    main()
