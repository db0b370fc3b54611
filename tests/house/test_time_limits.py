"""Limits of the service on others are in the time of the event loop (core/loop_time.py), so that a late process blames nobody."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "ridgeline"
WALL_CLOCK = frozenset({"timeout", "timeout_at", "wait_for"})
"""Functions of asyncio whose limits go on while the loop is late."""
HTTP_LIMITS = frozenset({"connect", "sock_connect", "sock_read"})
"""Limits of aiohttp, likewise, and `total` unless it is None."""
WAITS = {
    "service/batches/engine_rows.py:watch": "a pause between two looks",
    "service/batches/lane.py:run": "a pause between two looks",
    "service/bodies.py:reserve": "a client waits for memory of this process",
    "service/debug.py:_wait": "a profile is as long as asked",
    "service/fleet/balancer.py:_turn": "a client waits in the queue of this process",
    "service/fleet/launcher.py:stop": "a process has this time to end before it is killed",
    "service/fleet/ray_cluster.py:_stop": "a process has this time to end before it is killed",
    "service/grammar_checks.py:check": "a client waits for a compilation of this process",
    "service/models/front.py:_up": "a client waits for a model of this process",
    "service/prompt_log.py:follow": "a pause until the next comment",
    "wire/client.py:wait_lost": "a pause between two looks",
}
"""Where the wall clock is right: nobody is found late. file:function -> what the limit is."""


def limits(path: Path) -> Iterator[str]:
    """The functions of a file with a limit on the wall clock."""
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and _limits(call):
                    yield f"{path.relative_to(SOURCE)}:{function.name}"


def _limits(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name == "ClientTimeout":
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        total = given.pop("total", None)
        return not (isinstance(total, ast.Constant) and total.value is None) or bool(HTTP_LIMITS & set(given))
    none = bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value is None
    return name in WALL_CLOCK and not none


def test_limits_on_others_are_in_the_time_of_the_loop() -> None:
    files = [path for package in ("service", "wire") for path in sorted((SOURCE / package).rglob("*.py"))]
    places = {place for path in files for place in limits(path)}
    assert places == set(WAITS), "use LoopTimeout, or say in WAITS why nobody is found late"
