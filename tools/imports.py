"""The import table of docs/architecture.md as data, and the check that holds it. Imports point inwards only.

Nothing is imported: every file is read as a syntax tree.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    "parallel": ("core",),
    "models": ("core", "ops", "quant", "parallel"),
    "decoding": ("core", "ops", "models"),
    "engine": (
        "core", "wire", "text", "metrics", "hardware", "ops", "quant", "kv", "parallel", "models", "decoding",
    ),
    "service": ("core", "wire", "text", "metrics", "hardware.table", "planner"),
    "planner": ("core", "hardware", "metrics"),
    "compress": ("core", "text", "hardware", "models", "quant", "ops", "parallel", "decoding", "quality"),
    "bench": ("core", "wire", "text", "metrics", "hardware", "planner", "engine.local"),
    "quality": ("core", "wire", "text", "metrics", "hardware", "planner", "engine.local"),
    "llm": ("core", "wire", "text", "models", "engine.local"),
}  # fmt: skip
"""Room -> what its modules may import, beside each other. cli may import everything, and nobody imports cli.
The package's own `llm` (offline use) stands outside like bench: it knows the engine by its local client alone."""

_PLANNING = (
    "core", "metrics", "kv.blocks", "kv.prefix", "kv.retention",
    "engine.scheduler", "engine.policy", "engine.leases", "engine.request", "engine.flight", "engine.speculation",
    "engine.pace",
)  # fmt: skip
EXCEPTIONS: Mapping[str, tuple[str, ...]] = {
    "kv.blocks": ("core", "kv.blocks"),
    "kv.prefix": ("core", "kv.blocks", "kv.prefix"),
    "kv.retention": ("core", "kv.blocks", "kv.prefix", "kv.retention"),
    "engine.scheduler": _PLANNING,
    "engine.policy": _PLANNING,
    "engine.leases": _PLANNING,
    "engine.request": _PLANNING,
    "engine.flight": _PLANNING,
    "engine.speculation": _PLANNING,
    "engine.pace": _PLANNING,
    "engine.virtual": ("core",),
    "planner.simulate": ("core", "hardware", "metrics", "planner", "engine.scheduler", "engine.virtual"),
}
"""Module -> all it may import of ours, where that differs from its room."""

FORBIDDEN: Mapping[str, tuple[str, ...]] = {
    "service": ("planner.simulate",),
}
"""Room -> what it may not import although the table lets the whole room in."""

NO_TORCH = (
    "core", "wire", "text", "metrics", "service", "kv.blocks", "kv.prefix", "kv.retention", "hardware.table",
    "hardware.probe", "hardware.context", "engine.__main__", "engine.scheduler", "engine.policy", "engine.leases", "engine.request",
    "engine.flight", "engine.loop", "engine.virtual", "cli.main", "cli.serve", "cli.chat",
)  # fmt: skip
"""Rooms and modules that must not reach torch, on whatever way: they decide, serve and start without it."""

OPTIONAL = (
    "llguidance", "highspy", "matplotlib", "pynvml", "ray", "yaml", "triton", "readline",
    "ridgeline.ops.triton", "huggingface_hub",
)  # fmt: skip
"""Packages that need not be there, modules of ours that need one, and what few starts need and all would wait for: only these
may be imported inside a function."""


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement. target: full dotted name of the module. inside: it stands in a function or a try."""

    target: str
    line: int
    inside: bool


def modules(root: Path) -> dict[str, ast.Module]:
    """Dotted name (without the package's) -> tree, of every module in src; the package itself is ""."""
    source = root / "src" / PACKAGE
    found = {}
    for file in sorted(source.rglob("*.py")):
        parts = list(file.relative_to(source).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return found


def imports(tree: ast.AST, inside: bool = False) -> Iterator[Import]:
    """Every import in a tree. `from a import b` counts as a.b when b may be a module, which the caller decides."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (Import(f"{base}.{alias.name}", node.lineno, inside) for alias in node.names)
        else:
            hides = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Try)
            yield from imports(node, inside or hides)


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
    found: list[str] = []
    for module, tree in trees.items():
        found += [f"{module or PACKAGE}:{line}: {text}" for line, text in _in_module(module, tree, trees)]
    return found + _torch_paths(trees)


def _in_module(module: str, tree: ast.Module, trees: Mapping[str, ast.Module]) -> Iterator[tuple[int, str]]:
    room = module.split(".")[0]
    if room not in ("", "cli", "__main__") and room not in ROOMS:
        yield 1, f"room {room!r} is not in the import table: add it there or move the file."
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING":
            yield node.lineno, "TYPE_CHECKING hides an import cycle: move what both sides need inwards."
    for one in imports(tree):
        top = one.target.split(".")[0]
        if one.target.startswith("."):
            yield one.line, "relative import: write the full name."
        elif one.inside and not any(covers(allowed, one.target) for allowed in OPTIONAL):
            yield one.line, f"{one.target} is imported inside a function or try: import it at the top."
        elif (target := ours(one.target, trees)) is not None:
            yield from ((one.line, text) for text in _against_table(module, target))
        elif room == "core" and top not in sys.stdlib_module_names and not one.inside:
            yield one.line, f"core uses the standard library alone, not {top}."


def _against_table(module: str, target: str) -> Iterator[str]:
    allowed = allowed_for(module)
    room = module.split(".")[0]
    if target.split(".")[0] == "cli" and room not in ("cli", "__main__"):
        yield "nobody imports cli: move what is needed inwards."
    elif allowed is not None and target and not any(covers(one, target) for one in allowed):
        yield f"{module} may not import {target}; it may import {', '.join(allowed)}."
    elif any(covers(one, target) for one in FORBIDDEN.get(room, ())):
        yield f"{room} may not import {target}."


def _torch_paths(trees: Mapping[str, ast.Module]) -> list[str]:
    """Ways on which a module that must not need torch reaches it, packages' __init__ included."""
    edges: dict[str, list[str]] = {}
    for module, tree in trees.items():
        reached = [ours(one.target, trees) for one in imports(tree)]
        known = [one for one in reached if one is not None]
        torch = ["torch"] if any(one.target.split(".")[0] == "torch" for one in imports(tree)) else []
        parents = [name.rsplit(".", 1)[0] for name in (*known, module) if "." in name]
        edges[module] = [*torch, *known, *parents, ""]
    free = [module for module in trees if any(covers(one, module) for one in NO_TORCH)]
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


def main() -> int:
    found = violations()
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
