"""What fp8 does to the shipped model's answers, on held-out text:

    python benchmarks/fp8_quality.py [--out benchmarks/results/fp8_quality.json] [--model FOLDER] [--device cuda]

Every token of every document is scored by the plain model and by its fp8 form, over the same past: KL(plain || fp8) in
nats, how often both would say the same next token, and the loss of each. Intervals are 1.96 standard errors over
documents, because tokens of one document are not independent.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import cpu_name, provenance, write_rows

from ridgeline.core.config import ModelConfig
from ridgeline.core.spec import kv_layout
from ridgeline.kv.store import KvStore
from ridgeline.models.build import DTYPES, LoadedModel, build
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model
from ridgeline.ops.choose import choose
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.text.tokenizer import Tokenizer

TEXTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "heldout.jsonl"
PAGE = 64


@dataclass(frozen=True, slots=True)
class Drift:
    """Sums over one document's tokens."""

    kind: str
    tokens: int
    kl: float
    same: int
    plain_loss: float
    loss: float


class Scorer:
    """Logits of whole documents, each a row of its own over a fresh cache."""

    def __init__(self, model: LoadedModel, device: torch.device, longest: int) -> None:
        self.model, self.device = model, device
        pages = -(-longest // PAGE)
        layout = kv_layout(model.spec, PAGE)
        self.store = KvStore(layout, model.spec.layers, pages * len(layout.groups), device)
        count = torch.arange(1, pages * len(layout.groups) + 1, dtype=torch.int32, device=device)
        self.tables = [torch.stack((torch.zeros_like(part), part)) for part in count.split(pages)]

    def __call__(self, ids: list[int]) -> torch.Tensor:
        """float32 [T, vocab]."""
        spec, device = self.model.spec, self.device
        position = torch.arange(len(ids), dtype=torch.int32, device=device)
        ints = {"dtype": torch.int32, "device": device}
        step = StepInputs(
            rows=torch.ones(1, **ints),
            q_start=torch.tensor([0, len(ids)], **ints),
            length=torch.tensor([len(ids)], **ints),
            position=position,
            row_of=torch.zeros(len(ids), **ints),
            max_query=len(ids),
            max_length=len(ids),
        )
        views = []
        for layer, kv, group in zip(spec.layers, self.store.kv, self.store.groups, strict=True):
            table = self.tables[group]
            slots = table[1, position.long() // PAGE].long() * PAGE + position % PAGE
            views.append(KvView(kv, table, slots, layer.window, layer.softcap, spec.scale_of(layer)))
        decoder = self.model.decoder
        return decoder.logits(decoder.forward(torch.tensor(ids, **ints), views, step))


def drift(kind: str, ids: list[int], plain: torch.Tensor, other: torch.Tensor) -> Drift:
    """Both models' logits [T, vocab] of ids [T] compared; the loss is that of each next token."""
    ours, theirs = F.log_softmax(plain, -1), F.log_softmax(other, -1)
    following = torch.tensor(ids[1:], device=plain.device).unsqueeze(1)
    return Drift(
        kind,
        len(ids) - 1,
        float(F.kl_div(theirs[:-1], ours[:-1], reduction="sum", log_target=True)),
        int((plain[:-1].argmax(-1) == other[:-1].argmax(-1)).sum()),
        -float(ours[:-1].gather(1, following).sum()),
        -float(theirs[:-1].gather(1, following).sum()),
    )


def documents(path: Path, tokenizer: Tokenizer, longest: int, most: int) -> Iterator[tuple[str, list[int]]]:
    """(kind, ids) of each document, cut to `longest` tokens, at most `most` of a kind."""
    seen: dict[str, int] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        seen[record["kind"]] = seen.get(record["kind"], 0) + 1
        ids = tokenizer.encode(record["text"], add_special_tokens=True)[:longest]
        if len(ids) > 1 and seen[record["kind"]] <= most:
            yield record["kind"], ids


def rows_of(name: str, drifts: list[Drift], about: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of one kind as rows."""
    tokens = sum(drift.tokens for drift in drifts)

    def row(metric: str, values: list[float], unit: str, **more: Any) -> dict[str, Any]:
        mean = sum(values) / tokens
        # Of a ratio of sums over documents (Cochran 1977, 6.4).
        spread = sum((value - mean * drift.tokens) ** 2 for value, drift in zip(values, drifts, strict=True))
        interval = 1.96 * math.sqrt(spread * len(drifts) / max(1, len(drifts) - 1)) / tokens
        figures = {"row": f"fp8-{name}-{metric}", "value": round(mean, 6), "unit": unit, "interval": round(interval, 6)}
        return figures | more | {"tokens": tokens, "documents": len(drifts)} | about

    plain = sum(drift.plain_loss for drift in drifts) / tokens
    return [
        row("kl", [drift.kl for drift in drifts], "nats/token"),
        row("top1", [float(drift.same) for drift in drifts], "share"),
        row("loss", [drift.loss for drift in drifts], "nats/token", reference=round(plain, 6)),
        row("loss-change", [drift.loss - drift.plain_loss for drift in drifts], "nats/token"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--model", default="", help="model folder; empty is the shipped model")
    parser.add_argument("--texts", type=Path, default=TEXTS, help="JSON lines with kind and text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a document that count")
    parser.add_argument("--most", type=int, default=1 << 30, help="documents of a kind")
    options = parser.parse_args()
    device = torch.device(options.device)
    config = ModelConfig(model=options.model)
    folder = resolve_model(config)
    spec = read_model(folder)[0]
    longest = min(options.longest, spec.max_len)
    ops = choose(device, DTYPES[spec.dtype])
    models = [
        build(folder, model=replace(config, quantization=name, max_model_len=longest), ops=ops, device=device)
        for name in ("", "fp8")
    ]
    plain, fp8 = (Scorer(model, device, longest) for model in models)
    drifts: list[Drift] = []
    with torch.inference_mode():
        for kind, ids in documents(options.texts, Tokenizer.load(folder), longest, options.most):
            drifts.append(drift(kind, ids, plain(ids), fp8(ids)))
    machine = torch.cuda.get_device_name() if device.type == "cuda" else cpu_name()
    sizes = {"bytes": models[1].spec.weight_bytes, "bytes_reference": models[0].spec.weight_bytes}
    about = sizes | provenance(machine)
    kinds = {"all": drifts} | {
        kind: [drift for drift in drifts if drift.kind == kind] for kind in {d.kind for d in drifts}
    }
    rows = [row for kind, mine in sorted(kinds.items()) for row in rows_of(kind, mine, about)]
    for row in rows:
        print(f"{row['row']:28} {row['value']:10.5f} ± {row['interval']:.5f} {row['unit']}")
    if options.out:
        write_rows(options.out, rows)


if __name__ == "__main__":
    main()
