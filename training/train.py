"""Train a model of one of the shapes of model.py within a budget of tokens or of time, whichever is used up first.

    python training/train.py --pools POOLS --out RUN --seconds 1000
    python training/train.py --pools POOLS --out RUN --init FOLDER --seconds 140   # goes on from a converted model
    python training/train.py --pools POOLS --out RUN --shape 107m --seconds 450

Writes RUN/model.safetensors (bfloat16, every two minutes and at the end), RUN/shape.json for convert.py, and RUN/log.jsonl.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from evaluate import load_model, total_nats
from model import SHAPES, next_token_loss
from pools import CHAT, FINAL, MAIN, TEXT, Blend, Mixture, load
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.muon import Muon


@dataclass(frozen=True, slots=True)
class Plan:
    """Warm-up, constant steps, a linear decay to nothing. A first run has its last part on longer rows and the mixture with more
    conversations; a run that goes on from a model takes half of every batch from rows of documents, half from conversations."""

    seconds: float
    tokens: float
    batch_tokens: int
    micro_tokens: int
    main_context: int
    final_context: int
    matrix_lr: float
    vector_lr: float
    matrix_decay: float
    chat_context: int
    decay_from: float
    warmup_steps: int
    final_from: float = 0.6

    def rate(self, step: int, progress: float) -> float:
        """Share of the full step size."""
        falling = (1 - progress) / (1 - self.decay_from)
        return max(0.0, min(1.0, falling, (step + 1) / self.warmup_steps))


class Trainer:
    def __init__(self, plan: Plan, model: TrainableDecoder, pools: Path, out: Path, second: bool) -> None:
        self.plan, self.out, self.pools, self.second = plan, out, pools, second
        self.model = model.train()
        self.device = device = model.norm.weight.device
        self.loss = torch.compile(next_token_loss, dynamic=False) if device.type == "cuda" else next_token_loss
        matrices = [p for name, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in name]
        vectors = [p for name, p in self.model.named_parameters() if p.dim() != 2 or "embed" in name]
        self.muon = Muon(matrices, plan.matrix_lr, weight_decay=plan.matrix_decay)
        self.adam = torch.optim.AdamW(
            vectors, plan.vector_lr, (0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.data = load(pools, device)
        self.rows: dict[str, Mixture | Blend] = {}
        if second:
            self.rows["text"] = Blend(self.data, TEXT, plan.final_context, seed=2, whole=0.25)
            self.rows["chat"] = Blend(self.data, CHAT, plan.chat_context, seed=3, whole=0.85)
        else:
            self.rows["main"] = Mixture(self.data, MAIN, plan.main_context, seed=1)
            self.rows["final"] = Mixture(self.data, FINAL, plan.final_context, seed=1)
        self.held_out = {name: self.documents(name) for name in ("prose", "docs", "code", "math", "dialogue")}
        out.mkdir(parents=True, exist_ok=True)

    def documents(self, name: str) -> list[list[int]]:
        ids, lengths = (np.load(self.pools / f"valid-{name}.{part}.npy") for part in ("ids", "lengths"))
        return [document.tolist() for document in np.split(ids, np.cumsum(lengths)[:-1])]

    def parts(self, progress: float) -> list[str]:
        """Which rows each part of a batch is made of."""
        count = self.plan.batch_tokens // self.plan.micro_tokens
        if self.second:
            return ["text", "chat"] * (count // 2)
        return ["main" if progress < self.plan.final_from else "final"] * count

    def gradients(self, parts: list[str]) -> Tensor:
        """Add up the gradients of one batch; the mean of its parts' losses."""
        total = torch.zeros((), device=self.device)
        for name in parts:
            rows = self.rows[name]
            batch = rows.batch(self.plan.micro_tokens // rows.tokens)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = self.loss(self.model, batch)
            (loss / len(parts)).backward()
            total += loss.detach() / len(parts)
        return total

    def update(self, rate: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.lr = self.plan.matrix_lr * rate
        self.adam.param_groups[0]["lr"] = self.plan.vector_lr * rate
        self.muon.step()
        self.adam.step()
        self.model.zero_grad()

    def validate(self) -> dict[str, float]:
        """Nats per token of the held-out documents of each kind."""
        self.model.eval()
        result = {}
        for name, documents in self.held_out.items():
            nats, tokens = total_nats(self.model, documents, self.device)
            result[name] = round(nats / tokens, 4)
        self.model.train()
        return result

    def save(self) -> None:
        weights = {name: tensor.detach().bfloat16().contiguous() for name, tensor in self.model.state_dict().items()}
        save_file(weights, self.out / "part.safetensors")
        (self.out / "part.safetensors").rename(self.out / "model.safetensors")

    def log(self, row: dict[str, object]) -> None:
        print(json.dumps(row), flush=True)
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def warm_up(self) -> None:
        """Compile every shape before the clock starts."""
        for name in self.rows:
            self.gradients([name])
            self.model.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def run(self) -> None:
        plan = self.plan
        begin = time.monotonic()
        self.warm_up()
        self.log(
            {
                "plan": asdict(plan),
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "warm_up_s": time.monotonic() - begin,
            }
        )
        start = reported = checked = time.monotonic()
        step, seen, running = 0, 0, torch.zeros((), device=self.device)
        while (progress := max((time.monotonic() - start) / plan.seconds, seen / plan.tokens)) < 1:
            running += self.gradients(self.parts(progress))
            self.update(plan.rate(step, progress))
            step, seen = step + 1, seen + plan.batch_tokens
            if step % 50 == 0:
                loss, now = running.item() / 50, time.monotonic()
                row: dict[str, object] = {
                    "step": step,
                    "progress": round(progress, 4),
                    "tokens": seen,
                    "loss": round(loss, 4),
                }
                row |= {
                    "tokens_per_s": round(50 * plan.batch_tokens / (now - reported)),
                    "seconds": round(now - start, 1),
                }
                running.zero_()
                if now - checked > min(60, plan.seconds / 4):
                    self.save()
                    row["valid"], checked = self.validate(), now
                self.log(row)
                reported = time.monotonic()
        self.save()
        epochs = {name: pool.epochs for name, pool in self.data.items()}
        elapsed = time.monotonic() - start
        self.log(
            {
                "step": step,
                "tokens": seen,
                "seconds": round(elapsed, 1),
                "valid": self.validate(),
                "epochs": epochs,
                "done": True,
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1000)
    parser.add_argument("--tokens", type=float, default=1e12)
    parser.add_argument("--batch-tokens", type=int, default=262_144)
    parser.add_argument("--micro-tokens", type=int, default=131_072)
    parser.add_argument("--main-context", type=int, default=2048)
    parser.add_argument("--final-context", type=int, default=4096)
    parser.add_argument("--chat-context", type=int, default=1024)
    parser.add_argument("--init", type=Path, help="go on from this converted model, on rows that mix all kinds")
    parser.add_argument("--decay-from", type=float, default=0.3, help="share of the run before the step size falls")
    parser.add_argument("--warmup-steps", type=int, default=150)
    parser.add_argument("--matrix-lr", type=float, default=5e-3)
    parser.add_argument(
        "--matrix-decay", type=float, default=0.3, help="strong, because every token is seen some twenty times"
    )
    parser.add_argument("--vector-lr", type=float, default=3e-3)
    parser.add_argument("--shape", choices=SHAPES, default="14m", help="of a new model; tiny: for dry runs")
    given = vars(parser.parse_args())
    shape, init, pools, out = (given.pop(name) for name in ("shape", "init", "pools", "out"))
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = load_model(init)[0] if init else TrainableDecoder(SHAPES[shape].spec())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(Plan(**given), model.to(device), pools, out, second=init is not None)
    if init is None:
        (out / "shape.json").write_text(json.dumps(asdict(SHAPES[shape])) + "\n", encoding="utf-8")
    trainer.run()


if __name__ == "__main__":
    main()
