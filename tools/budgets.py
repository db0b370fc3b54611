"""Size budgets: functions, files, signatures and the heart, which is the code that every request passes through.

The unit is the statement of Python's syntax tree, without docstrings: layout and comments do not change it. Functions and
files are also bounded in lines. Prints statements by package and their change against the parent commit, and fails with
place and remedy where a budget is broken.
"""

from __future__ import annotations

import ast
import gc
import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "tools", "benchmarks", "training")
FUNCTION_LINES = 60
FUNCTION_STATEMENTS = 40
KERNEL_LINES = 150
KERNEL_STATEMENTS = 95
FILE_LINES = 500
FILE_STATEMENTS = 375
PARAMETERS = 6
PACKAGES = "src/ridgeline/"
HEART_STATEMENTS = 7_765
HEART: Mapping[str, str] = {
    "engine/": "plans, launches and commits every step",
    "kv/": "blocks, prefixes and cache memory of every request",
    "models/": "the decoder that every step runs",
    "decoding/": "what is done with the logits of every step",
    "speculation/": "what is drafted, and its state in every request and step",
    "parallel/": "the mesh that every layer is given",
    "ops/choose.py": "chooses the operations that every step calls",
    "ops/table.py": "the interface between layers and operations",
    "ops/columns.py": "joins and cuts the states of every token",
    "ops/experts.py": "groups the tokens of every step by expert",
    "ops/capture.py": "what every captured step is replayed by",
    "ops/step.py": "what a step hands to every layer",
    "ops/rows.py": "the device's rows: inputs gathered, drawn tokens written",
    "ops/sample.py": "draws every token",
    "ops/noise.py": "the random numbers of every draw",
    "ops/mass.py": "sums of probabilities, which limits of a draw read",
    "core/plan.py": "the two records that go to the device and back",
    "core/events.py": "what the scheduler reports of every step",
    "core/sampling.py": "sampling parameters of every request",
    "core/draft.py": "drafts as the scheduler plans them",
    "core/formats.py": "number formats as cache and decoder read them",
    "core/spec.py": "the model as scheduler, cache and decoder read it",
    "core/experts.py": "experts as cost model and decoder read them",
    "core/cost.py": "the predicted time of every step",
    "core/errors.py": "how requests end that fail",
    "core/interrupt.py": "Ctrl-C between two steps of the local engine",
}
"""Package, or file of ops and core, that the request path passes through, with the reason. Paths are below PACKAGES."""
BESIDE_HEART: Mapping[str, str] = {
    "engine/virtual.py": "simulation",
    "core/adapters.py": "LoRA adapters: start-up",
    "engine/adapters.py": "LoRA adapters: loads and unloads them, by orders of operators",
    "models/adapters.py": "LoRA adapters: reads their files",
    "ops/adapters.py": "LoRA adapters: what they add to linears, with the option --enable-lora",
    "engine/constraints.py": "requests with a grammar, bad words or DRY",
    "engine/token_rules.py": "requests with bad words or DRY",
    "engine/tiers.py": "start-up: options of the tiers below the KV cache",
    "kv/pins.py": "pinned prefixes, for requests with cache_control",
    "kv/copies.py": "tiers below the KV cache: copies, with the option --kv-offload-gb",
    "kv/disk.py": "tiers below the KV cache: files, with the option --kv-disk",
    "kv/offload.py": "tiers below the KV cache: their index, with the option --kv-offload-gb",
    "kv/transfer.py": "prompts computed by another engine, with the option --prefill-engines",
    "kv/peer_pools.py": "prompts computed by another engine on a GPU, with the option --prefill-engines",
    "kv/tcp_pools.py": "prompts computed by another engine, with the option --hand-over tcp",
    "kv/page_server.py": "prompts computed by another engine, with the option --hand-over tcp",
    "kv/page_client.py": "prompts computed by another engine, with the option --hand-over tcp",
    "kv/page_wire.py": "prompts computed by another engine, with the option --hand-over tcp",
    "core/handshake.py": "several hosts: how their processes know each other",
    "core/process.py": "settings of a server's process: start-up, and a collection every ten minutes",
    "kv/host_pages.py": "prompts computed by another engine on a GPU, with the option --prefill-engines",
    "ops/peer_memory.py": "memory of GPUs that processes share",
    "engine/profiler.py": "profiles, by orders of operators",
    "engine/weight_memory.py": "start-up and sleep: memory of weights, expanded linears",
    "engine/sleep.py": "releases and reads the weights, by orders of operators",
    "ops/releasable.py": "memory that a sleeping engine gives back",
    "engine/handover.py": "prompts computed by another engine, with the option --prefill-engines",
    "core/ticket.py": "prompts computed by another engine, with the option --prefill-engines",
    "engine/group.py": "several ranks: starts, feeds and watches them",
    "engine/hosts.py": "several hosts: how their ranks connect",
    "engine/rank_link.py": "several ranks: their messages",
    "engine/divided_leases.py": "ranks that divide requests: the blocks of each, with the option --data-parallel-size",
    "engine/divided_runner.py": "ranks that divide requests: their part of a plan, with the option --data-parallel-size",
    "engine/stage.py": "several ranks: runners of the stages of a pipeline",
    "parallel/connect.py": "several ranks: how they find one another and connect",
    "parallel/wiring.py": "several ranks: which of them are connected, and how",
    "parallel/gloo.py": "several ranks on CPUs: their messages",
    "parallel/gpu.py": "several ranks on GPUs: their messages",
    "parallel/group.py": "several ranks: the interface of their messages",
    "parallel/nccl.py": "several ranks on GPUs: calls of NCCL",
    "parallel/pipeline.py": "several ranks: what passes between stages",
    "core/compatibility.py": "start-up: options that exclude one another",
    "core/stages.py": "start-up: the layers of each stage",
    "core/ranks.py": "start-up: heads that ranks share",
    "engine/follower.py": "several ranks: what a rank without a scheduler does",
    "speculation/options.py": "start-up: the option --speculate",
    "speculation/ngram.py": "host drafter: called where its drafts pay",
    "speculation/lookahead.py": "host drafter: called where its drafts pay",
    "speculation/first_of.py": "host drafters joined by +",
    "models/expert_keys.py": "start-up: experts in config.json",
    "models/eagle.py": "EAGLE heads and MTP layers, with the options --speculate eagle and mtp",
    "models/eagle_files.py": "start-up: files of EAGLE heads and MTP layers",
    "models/mxfp4.py": "start-up: experts in published checkpoints of gpt-oss",
    "models/more_families.py": "start-up: data of families",
    "models/tensor_names.py": "start-up: names and layouts of tensors in published checkpoints",
    "models/unquantized_modules.py": "start-up: lists of unquantized modules in config.json",
    "ops/__init__.py": "empty",
    "ops/verify.py": "reference of the kernels that verify drafts, in plain PyTorch",
    "ops/merge.py": "attention from its parts, and with sinks",
    "ops/striped.py": "several ranks: attention to keys that they hold together",
    "ops/division.py": "several ranks: which tokens each has, with the option --data-parallel-size",
    "ops/divided.py": "several ranks: layers over the tokens of each, with the option --data-parallel-size",
    "ops/gathered.py": "several ranks: keys that travel to the queries of a prompt",
    "ops/reference.py": "operations as kernels have them, in plain PyTorch",
    "ops/stored.py": "formulas of the reference for KV formats with scales",
    "ops/cpu": "operations of a CPU",
    "ops/native": "compiled operations of a CPU",
    "ops/triton/": "operations of a GPU",
    "core/__init__.py": "empty",
    "core/bytecode.py": "start-up",
    "core/calibration.py": "start-up: factors of the cost model from a file",
    "core/config.py": "start-up: options",
    "core/dry.py": "parameters of requests with DRY",
    "core/drafting.py": "measures: FLOPs and bytes of drafters",
    "core/fit.py": "start-up: options with which a model fits",
    "core/gpu_blocks.py": "start-up: which weights a GPU converts or expands",
    "core/gpu_layout.py": "start-up: bytes of quantized weights on a GPU",
    "core/host_weights.py": "start-up: weights that stay in host memory",
    "core/logs.py": "log lines",
    "core/loop_time.py": "limits of the service on others",
    "core/memory.py": "memory of the grammar processes",
    "core/operations.py": "calculators",
    "core/plural.py": "messages of commands",
    "core/reach.py": "messages of commands",
    "core/quantization.py": "start-up: the option --quantization",
    "core/resolve.py": "start-up: options",
    "core/sharing.py": "start-up: which layers share a cache",
    "core/sizing.py": "start-up: what fits into memory",
    "core/slo.py": "judges requests in service and bench",
    "core/token_prices.py": "prices of requests, in the service",
    "core/workload.py": "workloads of benchmarks and planning",
    "core/selection.py": "checks an option at start-up",
    "core/version.py": "a constant",
    "core/expert_parallel.py": "start-up: the option --expert-parallel",
    "ops/selective.py": "operations",
    "ops/blocks.py": "formulas of weights in the blocks of a checkpoint",
}
"""Start of a path that the heart leaves out, with the reason. Each file of ops and core is in one of the two tables."""
SPLIT_PACKAGES = ("ops/", "core/")
ALL_ROW, HEART_ROW = "all", "heart"
KERNEL_DECORATORS = frozenset({"jit", "autotune", "heuristics"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Breach:
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def is_kernel(function: Function) -> bool:
    """Decorated as a Triton kernel (`@triton.jit` and what is stacked on it)."""
    for decorator in function.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = call.attr if isinstance(call, ast.Attribute) else call.id if isinstance(call, ast.Name) else ""
        owner = call.value.id if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) else ""
        if name in KERNEL_DECORATORS and owner in ("triton", ""):
            return True
    return False


def parameters(function: Function) -> int:
    """Parameters a caller can give, `self` and `cls` left out."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    if names and names[0] in ("self", "cls"):
        names = names[1:]
    return len(names) + len(given.kwonlyargs) + (given.vararg is not None) + (given.kwarg is not None)


def breaches(path: str, source: str) -> Iterator[Breach]:
    """What in one file is over budget."""
    lines = source.count("\n") + (not source.endswith("\n") and bool(source))
    if lines > FILE_LINES:
        yield Breach(path, FILE_LINES + 1, f"file has {lines} lines (at most {FILE_LINES}): split it by subject.")
    tree = ast.parse(source, path)
    if (count := statements(tree)) > FILE_STATEMENTS:
        yield Breach(path, 1, f"file has {count} statements (at most {FILE_STATEMENTS}): split it by subject.")
    for node in ast.walk(tree):
        if not isinstance(node, Function):
            continue
        kernel = is_kernel(node)
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        for size, unit, limit in (
            (length, "lines", KERNEL_LINES if kernel else FUNCTION_LINES),
            (statements(node) - 1, "statements", KERNEL_STATEMENTS if kernel else FUNCTION_STATEMENTS),
        ):
            if size > limit:
                yield Breach(path, node.lineno, f"{node.name} has {size} {unit} (at most {limit}): name a part of it.")
        exempt = kernel or node.name.startswith("test_")  # pytest calls a test, and hands it its cases by name
        if not exempt and (count := parameters(node)) > PARAMETERS:
            remedy = "make a value of those that belong together."
            yield Breach(path, node.lineno, f"{node.name} has {count} parameters (at most {PARAMETERS}): {remedy}")


def statements(tree: ast.AST) -> int:
    """Statements in a tree, its root included. Docstrings, also those of attributes, are none."""
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(tree))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def package_of(path: str) -> str:
    """Package of a path below src/ridgeline; files outside of a package are in "."."""
    package, slash, _ = path.removeprefix(PACKAGES).partition("/")
    return package if slash else "."


def in_heart(path: str) -> bool:
    """Whether the longest entry that names the file is one of HEART."""
    named = [entry for entry in (*HEART, *BESIDE_HEART) if path.startswith(PACKAGES + entry)]
    return bool(named) and max(named, key=len) in HEART


def unclassified(paths: Iterable[str]) -> list[Breach]:
    """Files of ops and core that neither table names, and entries of the tables that name no file."""
    files = [path.removeprefix(PACKAGES) for path in paths if path.startswith(PACKAGES)]
    entries = (*HEART, *BESIDE_HEART)
    breaches = [
        Breach(
            PACKAGES + file,
            1,
            "tools/budgets.py does not say whether it is of the heart: enter it in HEART or BESIDE_HEART.",
        )
        for file in files
        if file.startswith(SPLIT_PACKAGES) and not file.startswith(entries)
    ]
    return breaches + [
        Breach("tools/budgets.py", 1, f"{entry} names no file: take it out.")
        for entry in entries
        if not any(file.startswith(entry) for file in files)
    ]


def sources(root: Path) -> dict[str, str]:
    """Repository path -> text, of every Python file under budget."""
    files = sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py"))
    return {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}


def sizes(files: Mapping[str, str]) -> Counter[str]:
    """Statements by package of src/ridgeline; HEART_ROW holds those of the heart, which lie in several."""
    total: Counter[str] = Counter()
    for path, source in files.items():
        if path.startswith(PACKAGES):
            count = statements(ast.parse(source, path))
            total[package_of(path)] += count
            total[ALL_ROW] += count
            total[HEART_ROW] += count if in_heart(path) else 0
    return total


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def parent_sizes(root: Path) -> Counter[str] | None:
    """sizes() of the commit before this state: HEAD while there are changes, else its parent."""
    changed = _git(root, "status", "--porcelain", "--", "src")
    base = "HEAD" if changed else "HEAD^"
    packed = _git(root, "archive", "--format=tar", base, "src/ridgeline")
    if packed is None:
        return None
    files = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member) if member.name.endswith(".py") else None
            if content is not None:
                files[member.name] = content.read().decode()
    return sizes(files)


def report(now: Counter[str], before: Counter[str] | None) -> str:
    """Table of statements by package."""
    names = sorted({*now, *(before or ())} - {ALL_ROW, HEART_ROW})
    lines = [f"{'statements':10s}{'now':>7s}" + ("" if before is None else f"{'change':>8s}")]
    for name in (*names, ALL_ROW, HEART_ROW):
        change = "" if before is None else f"{now[name] - before[name]:+8d}"
        lines.append(f"{name:10s}{now[name]:7d}{change}" + (f" of {HEART_STATEMENTS}" if name == HEART_ROW else ""))
    return "\n".join(lines)


def main(root: Path = ROOT) -> int:
    files = sources(root)
    problems = [breach for path, source in files.items() for breach in breaches(path, source)] + unclassified(files)
    now = sizes(files)
    print(report(now, parent_sizes(root)))
    if now[HEART_ROW] > HEART_STATEMENTS:
        text = f"the heart has {now[HEART_ROW]} statements (at most {HEART_STATEMENTS})"
        problems.append(
            Breach(PACKAGES, 1, f"{text}: delete, or move what not every request needs to another package.")
        )
    for breach in problems:
        print(breach, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    gc.disable()  # syntax trees are millions of objects that stay: looking for garbage among them takes most of the time
    sys.exit(main())
