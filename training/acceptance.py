"""How often a model says what its drafters guess, by kind of held-out text.

    python training/acceptance.py --model FOLDER --corpus CORPUS --draft DRAFT --medusa HEADS --recurrent DRAFT \
        --machine "..." --commit HASH --out benchmarks/results/drafters.json

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
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import torch
from corpus import KINDS, read_split
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from ridgeline.compress.decoder import TrainableDecoder, load_decoder
from ridgeline.compress.distill import MedusaModule
from ridgeline.compress.generate import generate, noise_keys
from ridgeline.compress.recurrent import DEPTH as CHAIN
from ridgeline.compress.recurrent import RecurrentModule, teacher_targets
from ridgeline.core.spec import ModelSpec
from ridgeline.ops.noise import Purpose, draw_key, exponential
from ridgeline.ops.sample import sample
from ridgeline.speculation.recurrent import load_recurrent

PROMPT, LENGTH = 64, 256  # tokens
DEPTH = 5
RANKS = 10
DRAWS = 8
HEAT = 0.8
CUTS = (1024, 2048, 4096)
AT_ONCE = 32  # rows


@dataclass(frozen=True, slots=True)
class Text:
    """Rows [rows, PROMPT + LENGTH] int64 of which the tokens after the prompt count. temperature: at which the target said them;
    None: it was made to. keys: int32 [rows, 2], whose noise it drew with."""

    kind: str
    way: str
    rows: Tensor
    temperature: float | None
    keys: Tensor

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.rows.split(AT_ONCE), self.keys.split(AT_ONCE), strict=True)


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


def texts(target: TrainableDecoder, rows: dict[str, Tensor]) -> Iterator[Text]:
    """Of the rows of each kind: the text itself, and what the target says instead after its beginning, at HEAT and greedily."""
    every = torch.cat(list(rows.values()))
    keys = noise_keys(7, len(every), every.device)
    temperature = torch.tensor([HEAT, 0.0], device=every.device).repeat_interleave(len(every))
    said = generate(target, every[:, :PROMPT].repeat(2, 1), LENGTH, temperature, keys.repeat(2, 1))
    sizes = [len(row) for row in rows.values()]
    parts = zip(rows, keys.split(sizes), *(half.split(sizes) for half in (every, *said.chunk(2))), strict=True)
    for kind, noise, read, sampled, greedy in parts:
        yield Text(kind, "read", read, None, noise)
        yield Text(kind, "sampled", sampled, HEAT, noise)
        yield Text(kind, "greedy", greedy, 0.0, noise)


def draw(logits: Tensor, temperature_value: float, keys: Tensor) -> Tensor:
    """Draws at the places after the prompt, int32 [rows, LENGTH], of logits float32 [rows, LENGTH, vocab]."""
    rows = len(logits)
    position = torch.arange(PROMPT, PROMPT + LENGTH, dtype=torch.int32, device=keys.device).repeat(rows)
    temperature = torch.full((rows * LENGTH,), temperature_value, device=keys.device)
    return sample(logits.flatten(0, 1), temperature, keys.repeat_interleave(LENGTH, 0), position).view(rows, LENGTH)


def scored(model: TrainableDecoder, rows: Tensor) -> Tensor:
    """float32 [rows, LENGTH, vocab]: the logits for the tokens after the prompt."""
    return model.logits(model.hidden(rows)[:, PROMPT - 1 : -1]).float()


def chain(kept: Tensor) -> list[float]:
    """For each of DEPTH places of a chain: how often its token is kept where all before it were. kept: bool [rows, tokens],
    whether the guess at each token is right; chains begin everywhere."""
    starts = kept.shape[1] - DEPTH + 1
    alive = torch.ones_like(kept[:, :starts])
    rates = []
    for place in range(DEPTH):
        reached, alive = alive, alive & kept[:, place : place + starts]
        rates.append(float(alive.sum() / reached.sum().clamp(min=1)))
    return rates


@torch.no_grad()
def draft_figures(target: TrainableDecoder, draft: TrainableDecoder, text: Text, frequent: Tensor) -> dict[str, Any]:
    """One text's figures; see the README of the draft for their names."""
    kept, cut, sums = [], {size: [] for size in CUTS}, torch.zeros(3, dtype=torch.float64)
    temperature = text.temperature or 0.0
    for rows, keys in text.parts():
        p, q, said = scored(target, rows), scored(draft, rows), rows[:, PROMPT:]
        kept.append(draw(q, temperature, keys) == said)
        for size in CUTS:
            rare = torch.ones(q.shape[-1], dtype=torch.bool, device=q.device)
            rare[frequent[:size]] = False
            cut[size].append(draw(q.masked_fill(rare, float("-inf")), temperature, keys) == said)
        pick = q.argmax(-1, keepdim=True)
        coupled = draw(p, HEAT, keys) == draw(q, HEAT, keys)
        p, q = (p / HEAT).softmax(-1), (q / HEAT).softmax(-1)
        measured = (coupled.double(), torch.minimum(p, q).sum(-1), p.gather(-1, pick))
        sums += torch.tensor([float(tensor.double().sum()) for tensor in measured], dtype=torch.float64)
    right = torch.cat(kept)
    rates = chain(right)
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


@torch.no_grad()
def head_hits(target: TrainableDecoder, heads: MedusaModule, text: Text) -> Tensor:
    """float64 [heads, RANKS]: how often the text's token is each head's candidate of each rank."""
    hits = torch.zeros(len(heads), RANKS, dtype=torch.float64)
    places = LENGTH - len(heads)
    for rows, _ in text.parts():
        hidden = target.hidden(rows)[:, PROMPT - 1 : PROMPT - 1 + places]
        for index, head in enumerate(heads):
            guesses = target.logits(head(hidden)).topk(RANKS, -1).indices
            said = rows[:, PROMPT + index + 1 : PROMPT + index + 1 + places]
            hits[index] += (guesses == said.unsqueeze(-1)).double().sum((0, 1)).cpu()
    return hits / (len(text.rows) * places)


@torch.no_grad()
def recurrent_figures(target: TrainableDecoder, draft: RecurrentModule, text: Text) -> dict[str, Any]:
    """Of chains behind every token of a text: how often each place is kept where all before it were, and the tokens kept of CHAIN."""
    drawn_ranks = torch.cat(
        [draw_ranks(target, draft, rows, keys, text.temperature or 0.0) for rows, keys in text.parts()]
    )
    kept, ranks = torch.ones(len(drawn_ranks), dtype=torch.bool, device=drawn_ranks.device), []
    whole = 0.0
    for place in range(CHAIN):
        here = drawn_ranks[kept, place]
        ranks.append([float((here == rank).double().sum()) / max(1, len(here)) for rank in range(DRAWS)])
        kept &= drawn_ranks[:, place] == 0
        whole += float(kept.double().mean())
    return {"kept": [row[0] for row in ranks], f"kept_of_{CHAIN}": whole, "ranks": ranks}


def draw_ranks(
    target: TrainableDecoder, draft: RecurrentModule, rows: Tensor, keys: Tensor, temperature: float
) -> Tensor:
    """int64 [chains, CHAIN]: how many of its tokens a draft would say rather than the text's; all of them where it cannot say that."""
    given, state, ranks = teacher_targets(target, draft, rows, HEAT), None, []
    last = torch.arange(PROMPT - 1, rows.shape[1] - CHAIN, device=rows.device)  # known tokens
    for depth in range(1, CHAIN + 1):
        here = given.at(depth)
        state = draft(
            given.hidden.float() if state is None else state, here.text, here.k.float(), here.v.float(), here.rotary
        )
        wanted = here.next_index[:, last - 1]
        for row, key in enumerate(keys):
            logits = draft.lm_head(state[row, last - 1]).float()
            if temperature:
                noise = draw_key(key.expand(len(last), 2), (last + depth).int(), Purpose.TOKEN)
                logits -= temperature * exponential(noise, draft.ids.int()).log()
            score = logits.gather(1, wanted[row].clamp(min=0).unsqueeze(1)).masked_fill(
                (wanted[row] < 0).unsqueeze(1), -torch.inf
            )
            ranks.append((logits > score).sum(1))
    return torch.stack(ranks).view(CHAIN, -1).T


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
    reader = Reader(given.corpus, given.model / "tokenizer.json", "test", given.rows, device)
    frequent = Reader(given.corpus, given.model / "tokenizer.json", "valid", 1, device).frequent()
    figures: dict[str, dict[str, Any]] = {}
    for text in texts(target, {kind: reader.rows(kind) for kind in KINDS}):
        if draft is not None:
            figures[f"draft-{text.way}-{text.kind}"] = draft_figures(target, draft, text, frequent)
        if again is not None:
            figures[f"recurrent-{text.way}-{text.kind}"] = recurrent_figures(target, again, text)
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
        drafters = {name: vars(given)[name] for name in ("draft", "medusa", "recurrent") if vars(given)[name]}
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
