"""The import table as data, and the check that every module obeys it. Imports point inwards only and form no cycle.

`imports.py` prints breaches, `imports.py --table` prints the table of docs/imports.md. Nothing is imported: every file
is read as a syntax tree.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "ridgeline"

ROOMS: Mapping[str, tuple[str, ...]] = {
    "core": (),
    "wire": ("core",),
    "text": ("core",),
    "metrics": ("core",),
    "hardware": ("core",),
    "ops": ("core", "hardware"),
    "quant": ("core", "ops"),
    "kv": ("core", "ops", "quant"),
    "gguf": ("core", "quant"),
    "parallel": ("core", "ops"),
    "models": ("core", "ops", "quant", "parallel", "gguf"),
    "decoding": ("core", "ops", "models"),
    "speculation": ("core", "ops", "models", "decoding"),
    "engine": (
        "core", "wire", "text", "metrics", "hardware", "ops", "quant", "kv", "parallel", "models", "decoding", "speculation",
    ),
    "service": ("core", "wire", "text", "metrics", "hardware.table", "planner"),
    "planner": (
        "core", "hardware", "metrics", "kv.offload", "kv.prefix", "kv.retention",
        "engine.scheduler", "engine.policy", "engine.deadlines", "engine.leases", "engine.request", "engine.loop", "engine.virtual",
        "service.routing", "service.prefix_index", "service.autoscale",
    ),
    "compress": ("core", "text", "hardware", "models", "quant", "ops", "parallel", "decoding", "speculation", "quality"),
    "bench": ("core", "wire", "text", "metrics", "hardware", "planner", "engine.local"),
    "quality": ("core", "wire", "text", "metrics", "hardware", "planner", "engine.local"),
    "llm": ("core", "wire", "text", "models", "engine.local"),
}  # fmt: skip
"""Package -> what its modules may import, beside each other. cli may import everything, and no package imports cli.
`ridgeline.llm` (offline use) stands outside like bench: it knows the engine by its local client alone."""

_INTERFACE = ("core", "speculation.interface", "speculation.state", "speculation.host")
_CONTROLLER = ("core", "speculation.state", "speculation.host", "speculation.batch_state")
_ROUTING = ("core", "service.routing", "service.fair_queue", "service.prefix_index", "service.progress")
_PLANNING = (
    "core", "metrics", "kv.blocks", "kv.prefix", "kv.pins", "kv.retention",
    "engine.scheduler", "engine.policy", "engine.deadlines", "engine.leases", "engine.request", "engine.in_flight",
    "speculation.interface", "speculation.state", "speculation.host",
)  # fmt: skip
EXCEPTIONS: Mapping[str, tuple[str, ...]] = {
    "kv.blocks": ("core", "kv.blocks"),
    "kv.prefix": ("core", "kv.blocks", "kv.prefix"),
    "kv.pins": ("core", "kv.blocks", "kv.prefix", "kv.pins"),
    "kv.retention": ("core",),
    "engine.scheduler": _PLANNING,
    "engine.policy": _PLANNING,
    "engine.deadlines": _PLANNING,
    "engine.leases": _PLANNING,
    "engine.request": _PLANNING,
    "engine.in_flight": _PLANNING,
    "speculation.interface": _INTERFACE,
    "speculation.state": _INTERFACE,
    "speculation.host": _INTERFACE,
    "speculation.controller": _CONTROLLER,
    "speculation.batch_state": _CONTROLLER,
    "engine.virtual": ("core",),
    "service.routing": _ROUTING,
    "service.fair_queue": _ROUTING,
    "service.prefix_index": _ROUTING,
    "service.progress": _ROUTING,
    "service.autoscale": _ROUTING,
}
"""Module -> all it may import of Ridgeline, where that differs from its package."""

NO_TORCH = (
    "core", "wire", "text", "metrics", "service", "kv.blocks", "kv.prefix", "kv.pins", "kv.retention",
    "kv.offload", "kv.disk", "hardware.table", "hardware.probe", "hardware.context",
    "engine.__main__", "engine.scheduler", "engine.policy", "engine.deadlines", "engine.leases", "engine.request",
    "engine.in_flight", "engine.loop", "engine.virtual", "speculation.interface", "speculation.speculator", "speculation.options",
    "cli.main", "cli.serve", "cli.chat",
)  # fmt: skip
"""Packages and modules that must not reach torch, directly or through others: they decide, serve and start without it."""

OPTIONAL = (
    "llguidance", "highspy", "yaml", "triton", "readline", "ridgeline.ops.triton", "huggingface_hub", "ray", "ray.util",
)  # fmt: skip
"""What may be imported inside a function: optional distributions, modules of Ridgeline that need one, and distributions that
few starts need and that are slow to import."""

LOADERS = ("ops.triton.launch",)
"""Modules that call import_module with a name that their callers give: the callers depend on what is loaded, they do not."""


@dataclass(frozen=True, slots=True)
class Import:
    """One import. target: full dotted name of the module."""

    target: str
    line: int
    inside: bool
    """It stands in a function or a try."""
    deferred: bool = False
    """It is a call of import_module: it runs when the call runs, wherever the call stands."""


@cache
def modules(root: Path) -> Mapping[str, ast.Module]:
    """Dotted name (without the package's) -> tree, of every module in src; the package itself is ""."""
    source = root / "src" / PACKAGE
    modules_by_name = {}
    for file in sorted(source.rglob("*.py")):
        parts = list(file.relative_to(source).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        modules_by_name[".".join(parts)] = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return modules_by_name


def imports(tree: ast.AST, inside: bool = False) -> Iterator[Import]:
    """Every import statement in a tree. `from a import b` is a.b: the caller decides whether b is a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (Import(f"{base}.{alias.name}", node.lineno, inside) for alias in node.names)
        elif not isinstance(node, ast.expr):  # no expression holds a statement, and most nodes are expressions
            hides = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try)
            yield from imports(node, inside or hides)


def deferred_imports(tree: ast.AST) -> Iterator[Import]:
    """Every module that calls of import_module in a tree may load; a target that ends with a dot is all below it.

    A call whose argument is computed looks the name up in a table of its file, so every string of the file counts. The
    caller drops those that name no module.
    """
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__")
    ]
    arguments = [node.args[0] for node in calls if node.args]
    looked_up = any(not isinstance(argument, ast.Constant | ast.JoinedStr) for argument in arguments)
    for node in ast.walk(tree) if looked_up else arguments:
        first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield Import(first.value, first.lineno, inside=True, deferred=True)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def ours(target: str, names: Mapping[str, object]) -> str | None:
    """The module of ours (without the package's name) that `target` means, or None."""
    if target.split(".")[0] != PACKAGE:
        return None
    rest = target.split(".")[1:]
    while rest and ".".join(rest) not in names:
        rest.pop()
    return ".".join(rest)


def covers(allowed: str, module: str) -> bool:
    """`allowed` is the module itself or a package around it."""
    return module == allowed or module.startswith(allowed + ".")


def allowed_for(module: str) -> tuple[str, ...] | None:
    """What a module may import of ours; None is everything."""
    room = module.split(".")[0]
    if room in ("", "cli", "__main__"):
        return None
    if module in EXCEPTIONS:
        return EXCEPTIONS[module]
    return (room, *ROOMS.get(room, ()))


def violations(root: Path = ROOT) -> list[str]:
    """Every breach of the table, as "path: what; remedy"."""
    trees = modules(root)
    problems: list[str] = []
    for module, tree in trees.items():
        problems += [f"{module or PACKAGE}:{line}: {text}" for line, text in _in_module(module, tree, trees)]
    return problems + _torch_paths(trees) + [_cycle_text(cycle) for cycle in cycles(dependencies(trees))]


def dependencies(trees: Mapping[str, ast.Module]) -> dict[str, dict[str, int]]:
    """Module -> the modules it imports at any time, each with the line that does so."""
    edges: dict[str, dict[str, int]] = {}
    for module, tree in trees.items():
        edges[module] = {}
        for import_ in all_imports(module, tree):
            for target in _targets(import_, trees):
                if target != module:
                    edges[module].setdefault(target, import_.line)
    return edges


@cache
def all_imports(module: str, tree: ast.AST) -> list[Import]:
    """Import statements and calls of import_module. Two rules read them, so they are kept with the tree."""
    return [*imports(tree), *(() if module in LOADERS else deferred_imports(tree))]


def _targets(import_: Import, trees: Mapping[str, ast.Module]) -> list[str]:
    """Modules of Ridgeline that an import loads. A call of import_module counts only if it names a module in full."""
    if not import_.deferred:
        target = ours(import_.target, trees)
        return [] if target is None else [target]
    names = {f"{PACKAGE}.{module}" if module else PACKAGE: module for module in trees}
    if import_.target.endswith("."):
        return [module for name, module in names.items() if name.startswith(import_.target)]
    return [names[import_.target]] if import_.target in names else []


def cycles(edges: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """For each group of modules that import each other, one shortest cycle: its modules with their lines, in order."""
    components: list[list[str]] = []
    covered: set[str] = set()
    for module in edges:
        path = None if module in covered else _path_back(module, edges)
        if path is not None:
            components.append([f"{name}:{edges[name][target]}" for name, target in pairwise([*path, module])])
            covered.update(path)
    return components


def _path_back(start: str, edges: Mapping[str, Mapping[str, int]]) -> list[str] | None:
    paths = [[start]]
    seen: set[str] = set()
    for path in paths:
        for target in edges.get(path[-1], ()):
            if target == start:
                return path
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return None


def _cycle_text(cycle: list[str]) -> str:
    first = cycle[0].partition(":")[0]
    return f"import cycle: {' -> '.join(cycle)} -> {first}; move what both need into a module that imports neither."


def _in_module(module: str, tree: ast.Module, trees: Mapping[str, ast.Module]) -> Iterator[tuple[int, str]]:
    room = module.split(".")[0]
    if room not in ("", "cli", "__main__") and room not in ROOMS:
        yield 1, f"room {room!r} is not in the import table: add it there or move the file."
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING":
            yield node.lineno, "TYPE_CHECKING hides an import cycle: move what both sides need inwards."
    for import_ in all_imports(module, tree):
        if import_.deferred:
            yield from (
                (import_.line, text) for target in _targets(import_, trees) for text in _against_table(module, target)
            )
            continue
        top = import_.target.split(".")[0]
        if import_.target.startswith("."):
            yield import_.line, "relative import: write the full name."
        elif import_.inside and not any(covers(allowed, import_.target) for allowed in OPTIONAL):
            yield import_.line, f"{import_.target} is imported inside a function or try: import it at the top."
        elif (target := ours(import_.target, trees)) is not None:
            yield from ((import_.line, text) for text in _against_table(module, target))
        elif room == "core" and top not in sys.stdlib_module_names and not import_.inside:
            yield import_.line, f"core uses the standard library alone, not {top}."


def _against_table(module: str, target: str) -> Iterator[str]:
    allowed = allowed_for(module)
    room = module.split(".")[0]
    if target.split(".")[0] == "cli" and room not in ("cli", "__main__"):
        yield "nobody imports cli: move what is needed inwards."
    elif allowed is not None and target and not any(covers(entry, target) for entry in allowed):
        yield f"{module} may not import {target}; it may import {', '.join(allowed)}."


def _torch_paths(trees: Mapping[str, ast.Module]) -> list[str]:
    """Ways on which a module that must not need torch reaches it, packages' __init__ included."""
    edges: dict[str, list[str]] = {}
    for module, tree in trees.items():
        reached = [ours(import_.target, trees) for import_ in imports(tree)]
        known = [target for target in reached if target is not None]
        torch = ["torch"] if any(import_.target.split(".")[0] == "torch" for import_ in imports(tree)) else []
        parents = [name.rsplit(".", 1)[0] for name in (*known, module) if "." in name]
        edges[module] = [*torch, *known, *parents, ""]
    free = [module for module in trees if any(covers(entry, module) for entry in NO_TORCH)]
    paths = {module: _path_to_torch(module, edges) for module in free}
    return [f"{module}: reaches torch by {' -> '.join(path)}." for module, path in paths.items() if path]


def _path_to_torch(start: str, edges: Mapping[str, list[str]]) -> list[str] | None:
    paths = [[start]]
    seen = {start}
    for path in paths:
        for target in edges.get(path[-1], ()):
            if target == "torch":
                return [*path, "torch"]
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return None


def table() -> str:
    """The import table in Markdown, as docs/imports.md has it."""
    lines = ["| package or module | may import, beside its own modules |", "|---|---|"]
    lines += [f"| `{package}` | {_names(allowed)} |" for package, allowed in ROOMS.items()]
    lines.append("| `cli` | everything; no package imports it |")
    by_rule: dict[tuple[str, ...], list[str]] = {}
    for module, allowed in EXCEPTIONS.items():
        by_rule.setdefault(allowed, []).append(module)
    lines += [f"| {_names(modules)} | only {_names(allowed)} |" for allowed, modules in by_rule.items()]
    return "\n".join([*lines, "", f"Without torch, directly or through others: {_names(NO_TORCH)}."])


def _names(modules: Iterable[str]) -> str:
    return ", ".join(f"`{module}`" for module in modules) or "the standard library"


def main(arguments: Sequence[str] = ()) -> int:
    if list(arguments) == ["--table"]:
        print(table())
        return 0
    problems = violations()
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
