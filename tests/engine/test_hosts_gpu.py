"""A model over GPUs of two hosts, both of which are this machine: each host's processes see one GPU of it.

The ranks meet over TCP on loopback. "NCCL's choice" is peer-to-peer copies or shared memory, as between GPUs that a link of the
machine connects; "sockets" is what hosts without InfiniBand have. Memory mapped by our own kernels is used in neither case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.gpu_host import CONFIG
from tests.engine.test_group import CONTEXT, DIVIDED, PIPELINE, TENSOR
from tests.engine.test_hosts import free_port, second_host
from tests.models.families import save

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
NETWORKS = {
    "NCCL's choice": {},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"},
}
TRIED = [
    ("llama-gqa", TENSOR, "NCCL's choice"),
    ("llama-gqa", TENSOR, "sockets"),
    ("llama-gqa", PIPELINE, "NCCL's choice"),
    ("llama-gqa", PIPELINE, "sockets"),
    ("llama-gqa", CONTEXT, "NCCL's choice"),
    ("olmo2", TENSOR, "NCCL's choice"),
    ("llama-gqa", TENSOR | DIVIDED, "sockets"),
]
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in {family for family, _, _ in TRIED}:
        save(family, folder / family)
    return folder


def first_host(job: dict[str, Any], **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs tests.engine.gpu_host, which sees GPU 0."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "tests.engine.gpu_host", json.dumps(job)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "CUDA_VISIBLE_DEVICES": gpus()[0],
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def gpus() -> list[str]:
    """Names of the GPUs of this process, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]


def said(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr[-4000:]
    return dict(json.loads(result.stdout.splitlines()[-1]))


@cache
def expected(folder: Path) -> dict[str, Any]:
    """What one GPU says."""
    return said(first_host({"folder": str(folder), "sizes": {}}))


def sizes_of_hosts(axes: dict[str, Any]) -> dict[str, Any]:
    """Bytes of the cache are per rank: with half of the heads, half of them hold as many tokens."""
    memory = (CONFIG.kv_cache_memory or 0) // int(axes.get("tensor_parallel_size", 1))
    place = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port()}
    return {"kv_cache_memory": memory, **axes, **place}


@pytest.mark.parametrize(("family", "axes", "network"), TRIED, ids=lambda value: str(value).replace(" ", "-"))
def test_gpus_of_two_hosts_say_what_one_says(family: str, axes: dict[str, Any], network: str, folders: Path) -> None:
    folder, sizes, variables = folders / family, sizes_of_hosts(axes), NETWORKS[network]
    with second_host(replace(CONFIG, **sizes), folder, CUDA_VISIBLE_DEVICES=gpus()[1], **variables):
        both = said(first_host({"folder": str(folder), "sizes": sizes}, **variables))
    single = expected(folder)
    assert both["gpus"] == single["gpus"] == 1, "a host sees its own GPU only"
    assert both["answers"] == single["answers"]
    assert both["again"] == single["answers"], "from cached prefixes"
    assert both["shared"] and not any(both["shared"]) and not both["one kernel"], "no memory is mapped between hosts"
    assert both["network"] == "=lo" and both["replayed"] > 20, "messages between hosts are in CUDA graphs"


@pytest.mark.parametrize(
    ("axes", "network", "blow", "reason"),
    [
        (TENSOR, "sockets", "host killed", "rank 1 has ended, or its host cannot be reached any more"),
        (TENSOR, "NCCL's choice", "rank stopped", "rank 1 has sent nothing for 4 s"),
        (PIPELINE, "sockets", "host killed", "rank 1 has ended, or its host cannot be reached any more"),
    ],
    ids=["tensor, killed", "tensor, stopped", "stages, killed"],
)
def test_a_lost_host_ends_requests(axes: dict[str, Any], network: str, blow: str, reason: str, folders: Path) -> None:
    """Within five seconds, with the reason, although kernels of NCCL wait for the host."""
    folder, sizes, variables = folders / "llama-gqa", sizes_of_hosts(axes), NETWORKS[network]
    command = [sys.executable, "-m", "ridgeline", "serve", str(folder), "--nnodes", "2", "--node-rank", "1"]
    flags = [
        part
        for name in (*axes, "master_addr", "master_port")
        for part in (f"--{name.replace('_', '-')}", str(sizes[name]))
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))),
        "CUDA_VISIBLE_DEVICES": gpus()[1],
        **variables,
    }
    with subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL, env=environment) as host:
        try:
            began = time.monotonic()
            result = said(
                first_host({"folder": str(folder), "sizes": sizes, "host": host.pid, "blow": blow}, **variables)
            )
        finally:
            host.kill()
    assert f"A rank of the model is lost: {reason}" in result["reason"], result
    assert result["ended_s"] < 5.5
    assert time.monotonic() - began < PATIENCE_S


def test_a_host_with_fewer_gpus_is_named(folders: Path) -> None:
    """The second host would need two GPUs and sees one."""
    folder = folders / "llama-gqa"
    sizes = sizes_of_hosts(TENSOR | PIPELINE)
    with second_host(replace(CONFIG, **sizes), folder, CUDA_VISIBLE_DEVICES=gpus()[1]):
        both = ",".join(gpus()[:2])
        result = first_host({"folder": str(folder), "sizes": sizes}, CUDA_VISIBLE_DEVICES=both)
    assert result.returncode != 0
    assert "needs 2 GPUs on each of --nnodes 2 hosts, and torch finds 1 on host 1" in result.stderr
