"""Speculation at a chosen acceptance, for models with random weights, whose text nobody can draft.

The target computes everything and then says what a hash of (row, place) dictates. A drafter that knows the hash is right with
the chosen chance, given that its drafts before were; it is free, or pays for a real draft model or a real EAGLE-3 head first. All
else is the engine as it serves: chunks, cache, graphs, verification, commit.

tok_s, ratio: while all rows decode, which is what a batch of that many is. With drafts rows end at different steps, and
ratio_to_end counts those in which ever fewer are left. Both are against decoding without a drafter. step_ms: of a step, with all
it drafts. draft_ms: what a drafted token costs more than one of the free drafter; a head's keys and values are in it.
idle_ratio: speed with the drafter loaded while nothing is drafted.

    python benchmarks/controlled.py --out benchmarks/results/speculation.json
    python benchmarks/controlled.py --drafters free,head --acceptances 0.6,0.7,0.8 --out benchmarks/results/eagle.json
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import HERE, cpu_name, provenance, timed, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.engine import assemble, device, rank
from ridgeline.engine.local import LocalEngine
from ridgeline.models.build import LoadedModel
from ridgeline.models.config import read_model
from ridgeline.models.eagle import EagleHead
from ridgeline.models.eagle_files import HeadFiles, eagle_spec
from ridgeline.ops.rows import Int, RowState
from ridgeline.speculation import build
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.device import DeviceDrafter, DraftRows, NoDrafter, QueryTokens, Views
from ridgeline.speculation.eagle import Eagle
from ridgeline.speculation.interface import NO_SPECULATION, Speculation
from ridgeline.speculation.options import Wanted
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from ridgeline.speculation.state import DraftLimits
from ridgeline.wire.messages import StepStats

NODES = 4
PLACES = 2048


def _mixed(rows: int, places: int, salt: int) -> torch.Tensor:
    """A hash of each row and place, int64 [rows, places] below 2^31."""
    value = torch.arange(rows).unsqueeze(1) * 1_000_003 + torch.arange(places) * 7919 + salt
    for _ in range(2):
        value = (value ^ value >> 13) * 1_103_515_245 & 0x7FFFFFFF
    return value


@dataclass(frozen=True, slots=True)
class Script:
    """What rows say at each place, int32 [rows * places]; luck: the thousandths, int32, that a draft must stay below to be
    right there. One kernel looks them up (scripted.py), so that saying what is dictated takes next to no time."""

    said: torch.Tensor
    luck: torch.Tensor
    places: int

    @classmethod
    def write(cls, rows: int, places: int, vocab: int, device: torch.device) -> Script:
        said, luck = _mixed(rows, places, 0) % vocab, _mixed(rows, places, 77) % 1000
        return cls(said.int().flatten().to(device), luck.int().flatten().to(device), places)


class Controlled(DeviceDrafter):
    """share: thousandths of nodes that are right; inner: what is paid for."""

    def __init__(self, inner: DeviceDrafter, share: torch.Tensor, script: Script) -> None:
        self._inner, self._share, self._script = inner, share, script
        self.layers, self.attended, self.extra = inner.layers, inner.attended, inner.extra
        self.catches_up, self.work = inner.catches_up, inner.work
        self.states, self.follow = inner.states, inner.follow  # type: ignore[method-assign]

    def learns(self) -> bool:
        return self._inner.learns()

    def read(self, query: QueryTokens, views: Views) -> None:
        self._inner.read(query, views)

    def see(self, state: RowState, rows: torch.Tensor, place: torch.Tensor, logits: torch.Tensor) -> None:
        self._inner.see(state, rows, place, logits)

    def draft(self, behind: DraftRows, count: int, views: Views) -> None:
        self._inner.draft(behind, count, views)
        script, rows = self._script, behind.rows
        if rows.is_cuda:
            return kernels().draft(behind.state, rows, count, script, self._share)
        place = behind.known.unsqueeze(1) + torch.arange(count, dtype=torch.int32)
        at = torch.add(place, rows.unsqueeze(1), alpha=script.places)
        # A token's low bit turned over is another token.
        behind.write(place, script.said[at] ^ (script.luck[at] >= self._share))
        return None


@contextmanager
def dictated(script: Script) -> Iterator[None]:
    """Chains are drawn as ever, and then replaced."""
    plain = device.DeviceStep._drawn

    def drawn(self: Any, batch: Any, hidden: torch.Tensor, bound: int, learn: bool | None) -> Any:
        tokens, logprobs = plain(self, batch, hidden, bound, learn)
        rows, depth = batch.owners, torch.zeros_like(tokens) if batch.nodes is None else batch.nodes.depth
        if rows.is_cuda:
            return kernels().said(self.rows.state, rows, depth, tokens, script), logprobs
        known = self.rows.ints[:, Int.KNOWN].index_select(0, rows) + depth
        return script.said[torch.add(known, rows, alpha=script.places)], logprobs

    device.DeviceStep._drawn = drawn  # type: ignore[method-assign]
    try:
        yield
    finally:
        device.DeviceStep._drawn = plain  # type: ignore[method-assign]


def kernels() -> ModuleType:
    """Only where there is a GPU, since Triton is an extra."""
    return import_module("scripted")


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine whose way of speculating is changed between runs. share: see Controlled, in thousandths."""

    local: LocalEngine
    share: torch.Tensor
    traits: DeviceTraits
    vocab: int

    def use(self, sizes: tuple[int, ...], *, fixed: bool, share: float) -> None:
        """Draft up to sizes[-1] nodes; (0,): as without any drafter."""
        scheduler = self.local.engine.loop.scheduler
        self.share.fill_(round(share * 1000))
        drafts = Speculator(None, self.traits, Controller(sizes, fixed), DraftLimits(build.LOGIT_ROWS))
        scheduler._speculation = drafts if sizes[-1] else NO_SPECULATION

    def decode(self, batch: int, prompt: int, repeats: int, output: int = 257) -> Decoded:
        """Medians of `repeats` runs, after one that is not looked at."""
        results = []
        for _ in range(repeats + 1):
            _STEPS.clear()
            timed(self.local, [(prompt, output)] * batch, self.vocab)
            results.append(Decoded.of(_STEPS, batch))
        tok_s, to_end, gained = (statistics.median(part) for part in zip(*map(astuple, results[1:]), strict=True))
        return Decoded(tok_s, to_end, gained)


@dataclass(frozen=True, slots=True)
class Decoded:
    """tok_s: tokens per second while all rows decode; to_end: from then on to the last one's end. gained: tokens per row that
    verified drafts."""

    tok_s: float
    to_end: float
    gained: float

    @classmethod
    def of(cls, steps: Sequence[tuple[float, StepStats]], batch: int) -> Decoded:
        """steps: when each was committed, and its record."""
        full = [at for at, (_, step) in enumerate(steps) if step.running == batch and not step.prompt_tokens]

        def rate(last: int) -> float:
            tokens = sum(step.output_tokens for _, step in steps[full[0] + 1 : last + 1])
            return tokens / (steps[last][0] - steps[full[0]][0])

        drafts, accepted = sum(step.drafts for _, step in steps), sum(step.accepted for _, step in steps)
        return cls(rate(full[-1]), rate(len(steps) - 1), 1 + accepted / max(1, drafts))


_STEPS: list[tuple[float, StepStats]] = []


def _note(stats: StepStats) -> None:
    if stats.steps:
        _STEPS.append((time.perf_counter(), stats))


def random_head(folder: Path, target: LoadedModel) -> Eagle:
    """An EAGLE-3 head with the sizes of config.json in `folder` and random weights."""
    config, spec = eagle_spec(folder, target.spec)
    device, layers = target.decoder.embedding.device, len(target.spec.layers)
    names = [f"{name}.weight" for name in ("fc", "embed_norm", "hidden_norm", "final_norm", "head")]
    ids = torch.arange(config["draft_vocab_size"], dtype=torch.int32)
    taps = tuple(min(max(tap, 0), layers - 1) for tap in (2, layers // 2, layers - 3))
    files = HeadFiles("eagle3", spec, dict.fromkeys(names, torch.empty(0)), taps, ids)
    head = EagleHead(files, target)
    for wanted in head.targets().values():
        wanted.load(0.02 * torch.randn(wanted.expected.shape, device=device))
    head.finish_loading()
    return Eagle(head, target)


def start(model: Path, paid: str, folder: Path, config: EngineConfig, script: Script) -> Engine:
    """An engine on random weights. paid: whose time is paid, a "draft" or "head" of the shape in `folder`, or of none ("free")."""
    share = torch.zeros((), dtype=torch.int32, device=script.said.device)
    kinds = {"free": "recycling", "draft": "draft", "head": "eagle"}
    wanted = Wanted(device=kinds[paid], folder=None if paid == "free" else folder, max_nodes=NODES)

    def opened(
        asked: Wanted, target: LoadedModel, encode: object, limits: object, dummy: bool
    ) -> tuple[Speculation, DeviceDrafter]:
        inner: DeviceDrafter = NoDrafter()
        if paid == "draft":
            inner, _ = build.DEVICE_DRAFTERS[asked.device](asked, target, folder, dummy)
        if paid == "head":
            inner = random_head(folder, target)
        return NO_SPECULATION, Controlled(inner, share, script)

    build.wanted_by = lambda *_: wanted
    rank.open_drafters = opened  # type: ignore[assignment]
    assemble.head_hash = lambda folder: b""  # there are no files to hash
    local = LocalEngine.start(
        ModelConfig(model=str(model), load_format="dummy", max_model_len=PLACES, dtype="bfloat16"),
        config,
        on_step=_note,
    )
    traits = DeviceTraits(NODES, reads_tokens=paid == "draft", follows_target=paid == "head")
    return Engine(local, share, traits, local.engine.setup.vocab_size)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--draft", type=Path, default=HERE / "models" / "llama-3.2-1b")
    parser.add_argument("--head", type=Path, default=HERE / "models" / "eagle3-llama-3.1-8b")
    parser.add_argument("--drafters", default="free,draft", help="of free, draft and head; free first")
    parser.add_argument("--acceptances", default="0.8", help="shares of nodes that are right; 0.05 is always measured")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--draft-batches", default="", help="those of the real draft model; empty: the same")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=257)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache-gib", type=float, default=20)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default="benchmarks/results/speculation.json")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    cuda = torch.cuda.is_available()
    place = torch.cuda.get_device_name() if cuda else cpu_name()
    common = {"device": place, "model": f"{args.model.name} shape, random weights", **provenance(place, args.commit)}
    batches, drafted = (
        [int(batch) for batch in given.split(",")] for given in (args.batches, args.draft_batches or args.batches)
    )
    config = EngineConfig(
        max_num_seqs=max(batches), enable_prefix_caching=False, kv_cache_memory=int(args.cache_gib * (1 << 30))
    )
    rows: list[dict[str, Any]] = []
    free: dict[int, Free] = {}
    for paid in args.drafters.split(","):
        folder = args.head if paid == "head" else args.draft
        vocab = read_model(args.model)[0].vocab_size
        script = Script.write(max(batches) + 1, PLACES + 64, vocab, torch.device("cuda" if cuda else "cpu"))
        with dictated(script):  # from the start on, because graphs record what is drawn
            engine = start(args.model, paid, folder, config, script)
            name = "free" if paid == "free" else f"{folder.name} shape"
            for batch in drafted if paid == "draft" else batches:
                rows += measured(engine, name, batch, free, args)
                write_rows(args.out, [row | common for row in rows])
        del engine
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Free:
    """What decoding takes without a drafter, and with one that costs nothing. step_ms: by number of nodes."""

    plain: Decoded
    step_ms: dict[int, float]


def measured(
    engine: Engine, name: str, batch: int, free: dict[int, Free], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Plain decoding, fixed numbers of nodes, the adapted number, and adapted with a drafter that is hardly ever right."""
    acceptances = [float(share) for share in args.acceptances.split(",")]
    ways: list[tuple[str, tuple[int, ...], bool, float]]
    ways = [("fixed", (0, nodes), True, acceptances[-1]) for nodes in (1, 2)]
    ways += [("fixed", (0, NODES), True, share) for share in acceptances]
    ways += [("adapted", (0, 1, 2, 3, 4), False, share) for share in (*acceptances, 0.05)]
    engine.use((0,), fixed=False, share=0.0)
    own = engine.decode(batch, args.prompt, args.repeats, args.output)
    known = free.setdefault(batch, Free(own, {}))
    plain, rows = known.plain, []
    for way, sizes, fixed, share in ways:
        engine.use(sizes, fixed=fixed, share=share)
        decoded, nodes = engine.decode(batch, args.prompt, args.repeats, args.output), sizes[-1]
        step_ms = decoded.gained * batch / decoded.tok_s * 1000
        if fixed and name == "free":
            known.step_ms[nodes] = step_ms
        few = f"-k{nodes}" if nodes < NODES else ""
        row = {
            "row": f"h200-{name}-{way}-{share}{few}-b{batch}",
            "drafter": f"{name}, acceptance {share}, {way} K = {nodes}",
            "work": f"{args.prompt} + {args.output} tokens",
            "temperature": 1.0,
            "batch": batch,
            "tok_s": round(decoded.tok_s, 1),
            "plain_tok_s": round(plain.tok_s, 1),
            "idle_ratio": round(own.tok_s / plain.tok_s, 3),
            "ratio": round(decoded.tok_s / plain.tok_s, 3),
            "ratio_to_end": round(decoded.to_end / plain.to_end, 3),
            "accepted_len": round(decoded.gained, 3),
            "step_ratio": round(decoded.gained * plain.tok_s / decoded.tok_s, 3) if fixed else None,
            "step_ms": round(step_ms, 3) if fixed else None,
            "draft_ms": round((step_ms - known.step_ms[nodes]) / nodes, 3)
            if fixed and nodes in known.step_ms
            else None,
        }
        shown = ("tok_s", "plain_tok_s", "idle_ratio", "ratio", "ratio_to_end", "accepted_len", "step_ms", "draft_ms")
        print(row["row"], *(row[part] for part in shown), flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
