"""Size budgets: a function, a file, a signature and the heart as a whole must stay small enough to be read.

Prints code lines (no blanks, comments or docstrings) by room and their change against the parent commit, and fails with
place and remedy where a budget is broken.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "tools", "benchmarks", "training")
FUNCTION_LINES = 60
KERNEL_LINES = 150
FILE_LINES = 500
PARAMETERS = 6
HEART = ("engine", "kv", "models", "decoding")
HEART_LINES = 6000
KERNEL_DECORATORS = frozenset({"jit", "autotune", "heuristics"})

Function = ast.FunctionDef | ast.AsyncFunctionDef
_SILENT = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


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
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    if names and names[0] in ("self", "cls"):
        names = names[1:]
    return len(names) + len(given.kwonlyargs) + (given.vararg is not None) + (given.kwarg is not None)


def breaches(path: str, source: str) -> Iterator[Breach]:
    """What in one file is over budget."""
    lines = source.count("\n") + (not source.endswith("\n") and bool(source))
    if lines > FILE_LINES:
        yield Breach(path, FILE_LINES + 1, f"file has {lines} lines (at most {FILE_LINES}): split it by subject.")
    for node in ast.walk(ast.parse(source, path)):
        if not isinstance(node, Function):
            continue
        kernel = is_kernel(node)
        limit = KERNEL_LINES if kernel else FUNCTION_LINES
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > limit:
            yield Breach(path, node.lineno, f"{node.name} has {length} lines (at most {limit}): name a part of it.")
        exempt = kernel or node.name.startswith("test_")  # pytest calls a test, and hands it its cases by name
        if not exempt and (count := parameters(node)) > PARAMETERS:
            remedy = "make a value of those that belong together."
            yield Breach(path, node.lineno, f"{node.name} has {count} parameters (at most {PARAMETERS}): {remedy}")


def code_lines(source: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - docstrings)


def room_of(path: str) -> str:
    """Room of a path below src/ridgeline; the package's own files are the room "."."""
    parts = Path(path).parts[2:]
    return parts[0] if len(parts) > 1 else "."


def sources(root: Path) -> dict[str, str]:
    """Repository path -> text, of every Python file under budget."""
    files = sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py"))
    return {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}


def rooms(files: dict[str, str]) -> Counter[str]:
    """Code lines by room of src/ridgeline."""
    total: Counter[str] = Counter()
    for path, source in files.items():
        if path.startswith("src/ridgeline/"):
            total[room_of(path)] += code_lines(source)
    return total


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def parent_rooms(root: Path) -> Counter[str] | None:
    """Code lines by room in the commit before this state: HEAD while there are changes, else its parent."""
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
    return rooms(files)


def report(now: Counter[str], before: Counter[str] | None) -> str:
    """Table of code lines by room."""
    lines = []
    for room in sorted(set(now) | set(before or ())):
        change = "" if before is None else f"{now[room] - before[room]:+7d}"
        lines.append(f"{room:10s}{now[room]:7d}{change}")
    heart = sum(now[room] for room in HEART)
    lines.append(f"{'all':10s}{now.total():7d}" + ("" if before is None else f"{now.total() - before.total():+7d}"))
    lines.append(f"heart ({', '.join(HEART)}): {heart} of {HEART_LINES}")
    return "\n".join(lines)


def main(root: Path = ROOT) -> int:
    files = sources(root)
    found = [breach for path, source in files.items() for breach in breaches(path, source)]
    now = rooms(files)
    print(report(now, parent_rooms(root)))
    heart = sum(now[room] for room in HEART)
    if heart > HEART_LINES:
        remedy = "delete, or move what is not the heart to another room."
        found.append(Breach("src/ridgeline", 1, f"the heart has {heart} code lines (at most {HEART_LINES}): {remedy}"))
    for breach in found:
        print(breach, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
