"""Write the model card from card.md, and the rows of its figures, out of what the other scripts measured.

    python training/card.py --corpus CORPUS --losses test.json --samples samples.json --probes probes.json \\
        --before probes-first.json --logs RUN1/log.jsonl RUN2/log.jsonl --trained "1x NVIDIA H200, ..." --sampled "2 CPU cores, ..." \\
        --difference 0.0

`--difference` is what convert.py printed. `--before` holds the probes of the first run's weights; `--logs` the log of every run in order.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODEL = "src/ridgeline/assets/model"
RESULTS = ROOT / "benchmarks" / "results" / "shipped_model.json"
EVALUATE = f"python training/evaluate.py --model {MODEL} --corpus CORPUS --split test"
SAMPLE = f"python training/samples.py --model {MODEL} --corpus CORPUS --out samples.json"
PROBE = f"python training/probes.py --model {MODEL} --out probes.json"
PROBE_FIRST = "python training/probes.py --model FIRST --out probes-first.json"
CONVERT = f"python training/convert.py --run RUN --tokenizer tokenizer.json --out {MODEL}"
TRAIN = ("python training/train.py --pools POOLS --out RUN1 --seconds 720",
         "python training/train.py --pools POOLS --out RUN2 --init FIRST --seconds 135")  # fmt: skip
SHOWN = 520  # characters of a sample
GREEDY = {"math", "chat: tool call"}
ORDER = ("prose", "docs", "docs, code", "code", "math", "dialogue")


def table(head: list[str], rows: list[list[object]], left: int = 1) -> str:
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def losses(test: dict[str, Any], loops: dict[str, Any]) -> str:
    head = ["kind", "documents", "nats per token", "bits per byte", "greedy text that loops"]
    return table(head, [
        [kind, r["documents"], f"{r['nats_per_token']:.3f}", f"{r['bits_per_byte']:.3f}",
         f"{loops[kind]['looping']} of {loops[kind]['continuations']}"]
        for kind, r in test.items()
    ]) + "\n"  # fmt: skip


def total(loops: dict[str, Any]) -> tuple[int, int]:
    return sum(r["looping"] for r in loops.values()), sum(r["continuations"] for r in loops.values())


def probes(before: dict[str, Any], after: dict[str, Any]) -> str:
    rows: list[list[object]] = [[group, r["asked"], before[group]["right"], r["right"]] for group, r in after.items()]
    sums = [
        sum(r[key] for r in groups.values()) for groups, key in ((after, "asked"), (before, "right"), (after, "right"))
    ]
    return table(["group", "asked", "right, first run", "right, as shipped"], [*rows, ["all", *sums]])


def block(text: str) -> str:
    text = text.rstrip()
    shown = text if len(text) <= SHOWN else text[:SHOWN].rsplit(" ", 1)[0] + " [...]"
    return f"````text\n{shown}\n````\n"


def sample(row: dict[str, str], way: str) -> str:
    kind = row["kind"].removeprefix("chat: ")
    if kind == row["kind"]:
        return f"**{kind}**, {way}\n\n" + block(row["prompt"] + " >>> " + row[way].lstrip(" "))
    question = row["prompt"].split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
    return f"**{kind}**, {way}: {question}\n\n" + block(row[way])


def samples(rows: list[dict[str, str]]) -> str:
    shown = [sample(row, "greedy" if row["kind"] in GREEDY else "sampled") for row in rows]
    greedy_prose = next(sample(row, "greedy") for row in rows if row["kind"] == "prose")
    return "\n".join([shown[0], greedy_prose, *shown[1:]])


def sources(corpus: Path) -> str:
    """Repositories and commits, grouped by the kinds of text and the licence."""
    kinds: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in json.loads((corpus / "sources.json").read_text(encoding="utf-8")):
        repository = kinds[row["repo"], row["licence"], row["commit"][:12]]
        if row["kind"] not in repository:
            repository.append(row["kind"])
    groups: dict[tuple[int, str, str], list[str]] = defaultdict(list)
    for (repo, licence, commit), of in kinds.items():
        text = ", ".join(sorted(of, key=ORDER.index))
        groups[ORDER.index(text), text, licence].append(f"{repo} `{commit}`")
    rows: list[list[object]] = [
        [text, licence, ", ".join(repos)] for (_, text, licence), repos in sorted(groups.items())
    ]
    return table(["text", "licence, as the repository states it", "repositories and commits"], rows, left=3)


def row(name: str, value: float, unit: str, machine: str, command: str) -> dict[str, Any]:
    empty = {"peer": None, "peer_name": None, "ratio": None}
    rest = {"share_of_bandwidth": None, "machine": machine, "date": "2026-11-21", "commit": None, "command": command}
    return {"row": name, "ours": value, **empty, "unit": unit, **rest}


def figures(data: dict[str, Any], logs: list[list[dict[str, Any]]], trained: str, sampled: str) -> list[dict[str, Any]]:
    rows = []
    for kind, r in data["losses"].items():
        extra = {"documents": r["documents"], "tokens": r["tokens"]}
        rows.append(row(f"heldout-{kind}-nats", r["nats_per_token"], "nats/token", trained, EVALUATE) | extra)
        rows.append(row(f"heldout-{kind}-bits", r["bits_per_byte"], "bits/byte", trained, EVALUATE) | extra)
    loops = data["samples"]["loops"]
    for kind, r in loops.items():
        extra = {key: r[key] for key in ("looping", "continuations", "ended")}
        rows.append(row(f"greedy-loops-{kind}", r["loop_rate"], "share of continuations", sampled, SAMPLE) | extra)
    looping, count = total(loops)
    all_loops = row("greedy-loops-all", round(looping / count, 3), "share of continuations", sampled, SAMPLE)
    rows.append(all_loops | {"looping": looping, "continuations": count})
    for name, command in (("probes", PROBE), ("before", PROBE_FIRST)):
        for group, r in data[name]["groups"].items():
            label = f"probes-{group.replace(' ', '-')}" + ("-first-run" if name == "before" else "")
            rows.append(row(label, r["right"], "right answers", sampled, command) | {"asked": r["asked"]})
    for number, (log, command) in enumerate(zip(logs, TRAIN, strict=True), 1):
        rows.append(row(f"run-{number}-tokens", log[-1]["tokens"], "tokens", trained, command))
        rows.append(row(f"run-{number}-seconds", log[-1]["seconds"], "s", trained, command))
        speed = sorted(line["tokens_per_s"] for line in log if "tokens_per_s" in line)
        rows.append(row(f"run-{number}-median-throughput", speed[len(speed) // 2], "tokens/s", trained, command))
    rows.append(row("parameters", logs[0][0]["parameters"], "parameters", trained, TRAIN[0]))
    unit = "largest absolute difference of float32 logits from transformers, 2 x 1,024 tokens"
    return [*rows, row("conversion-logit-difference", data["difference"], unit, sampled, CONVERT)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("corpus", "losses", "samples", "probes", "before"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--logs", type=Path, nargs=2, required=True)
    parser.add_argument("--trained", required=True, help="the machine of the training and of the losses")
    parser.add_argument("--sampled", required=True, help="the machine of samples, probes and conversion")
    parser.add_argument("--difference", type=float, required=True, help="what convert.py printed")
    given = parser.parse_args()
    data: dict[str, Any] = {
        name: json.loads(getattr(given, name).read_text("utf-8")) for name in ("losses", "samples", "probes", "before")
    }
    data["difference"] = given.difference
    looping, count = total(data["samples"]["loops"])
    card = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    for mark, text in {
        "@LOSSES@": losses(data["losses"], data["samples"]["loops"]),
        "@LOOPS@": f"Together {looping} of {count} greedy continuations loop ({looping / count:.0%}).",
        "@PROBES@": probes(data["before"]["groups"], data["probes"]["groups"]),
        "@SAMPLES@": samples(data["samples"]["samples"]),
        "@SOURCES@": sources(given.corpus) + "\n",
    }.items():
        card = card.replace(mark, text)
    (ROOT / MODEL / "README.md").write_text(card, encoding="utf-8")
    logs = [[json.loads(line) for line in log.read_text("utf-8").splitlines()] for log in given.logs]
    rows = figures(data, logs, given.trained, given.sampled)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
