"""The first of two hosts, with a GPU each or on CPUs: `python -m tests.engine.gpu_host JOB` (JSON), see test_hosts_gpu.

It opens an engine in this process, as the service's engine process does, and prints one line of JSON: what the engine said, and how
its ranks were connected. With `blow` it then strikes the other host while requests run, and says how and when they ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineFailed
from ridgeline.engine.executor import Executor
from ridgeline.engine.graphs import GraphExecutor
from ridgeline.engine.group import GroupRunner
from ridgeline.engine.local import LocalEngine
from ridgeline.parallel.gpu import GpuGroup
from tests.engine.helpers import counted
from tests.engine.test_group import answers, opened, requests

CONFIG = EngineConfig(
    device="cuda", kv_cache_memory=1 << 24, max_num_seqs=4, max_num_batched_tokens=32, block_size=32, threads=1
)


def executor(engine: LocalEngine) -> Executor:
    runner = engine.engine.loop.runner
    return (runner._runner if isinstance(runner, GroupRunner) else runner).executor  # type: ignore[attr-defined, no-any-return]


def wires(engine: LocalEngine) -> list[bool]:
    """For each group of this rank's GPU, whether its memory is shared by CUDA IPC."""
    runner = engine.engine.loop.runner
    groups = runner._group.mesh.groups if isinstance(runner, GroupRunner) else []
    return [group.sums is not None or group.peers is not None for group in groups if isinstance(group, GpuGroup)]


def struck(engine: LocalEngine, host: int, blow: str) -> dict[str, Any]:
    """Kill the other host's command, whose ranks end with it, or stop its rank. Returns how long requests ran on, and why they
    ended."""
    (rank,) = (int(pid) for pid in Path(f"/proc/{host}/task/{host}/children").read_text().split())
    for request in requests():
        engine.submit(request)
    for _ in range(3):
        engine.engine.turn()
    os.kill(*((host, signal.SIGKILL) if blow == "host killed" else (rank, signal.SIGSTOP)))
    began = time.monotonic()
    try:
        while time.monotonic() - began < 20:
            engine.engine.turn()
    except EngineFailed as error:
        engine._open.clear()
        return {"ended_s": time.monotonic() - began, "reason": error.message}
    finally:
        if blow != "host killed":
            os.kill(rank, signal.SIGCONT)
    return {"reason": "it did not end"}


def main(job: dict[str, Any]) -> None:
    config = replace(CONFIG, **job["sizes"])
    with opened(Path(job["folder"]), config) as engine:
        run, replayed = executor(engine), list[str]()
        if isinstance(run, GraphExecutor):
            run._replay = counted(run._replay, replayed)  # type: ignore[method-assign]
        said: dict[str, Any] = {"gpus": torch.cuda.device_count(), "answers": answers(engine), "again": answers(engine)}
        said |= {
            "shared": wires(engine),
            "network": os.environ.get("NCCL_SOCKET_IFNAME", ""),
            "replayed": len(replayed),
        }
        said["one kernel"] = type(run._step.decoder._run).__name__ == "OneToken"  # whose import needs Triton
        if job.get("blow"):
            said |= struck(engine, job["host"], job["blow"])
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
