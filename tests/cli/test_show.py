"""How things are shown."""

from __future__ import annotations

import io
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console

from ridgeline.cli.flags import read_flags
from ridgeline.cli.serve import Announcer, parser, resolve_arguments
from ridgeline.cli.show import LossyStream, Stages, configuration, stages_text


def test_only_stages_that_can_be_seen_are_named() -> None:
    assert stages_text({"imports": 2.04, "device": 0.01, "weights": 0.06}) == "imports 2.0 s, weights 0.1 s"
    assert stages_text({}) == ""


def test_the_time_until_ready_is_what_the_user_waited(tiny: Path) -> None:
    """No less than what the engine says it took, as the clock of a service that was still being imported said."""
    said = io.StringIO()
    console = Console(file=said, width=200)
    with Stages(console) as stages:
        started = time.perf_counter() - 7.5
        announcer = Announcer(read_flags(parser(), [str(tiny)]), tiny, console, stages, started)
        announcer.ready("http://x:1", {"startup_s": {"imports": 7.4}})
    ready = re.search(r"ready in (\S+) s", said.getvalue())
    assert ready is not None and 7.5 <= float(ready.group(1)) < 20 and "imports 7.4 s" in said.getvalue()


FACTS = {
    "root": "/models/tiny", "architecture": "LlamaForCausalLM", "params": 14_160_000, "dtype": "bfloat16",
    "quantization": "int8", "device": "cpu", "weight_bytes": 3 << 20, "blocks": 1000, "page_bytes": 1 << 10,
    "page_tokens": 16, "max_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 512,
}  # fmt: skip


def test_the_start_tells_what_matters_and_what_was_set() -> None:
    """No defaults; secrets are masked."""
    given = ["--port", "81", "--api-key", "secret", "--tensor-parallel-size", "2", "--threads", "1"]
    resolved = resolve_arguments(read_flags(parser(), given), {"max_num_seqs": 64})
    assert configuration(resolved, FACTS).splitlines() == [
        "model                 LlamaForCausalLM, 14.16 M parameters in int8 and bfloat16: /models/tiny",
        "device                cpu, 2 processes on 1 host, 1 thread each",
        "memory                weights 3.00 MiB, KV cache 1,000.00 KiB (1,000 blocks of 16 tokens)",
        "limits                4,096 tokens of prompt plus answer, 64 requests at once, 512 query tokens in a step",
        "threads               1 (flag)",
        "tensor_parallel_size  2 (flag)",
        "port                  81 (flag)",
        "api_key               *** (flag)",
    ]
    assert "1 process, 1 thread each" in configuration(resolve_arguments(read_flags(parser(), given[-2:])), FACTS)


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    """A disk that is full, and a pipe without a reader."""
    with Path("/dev/full").open("w") as full:
        Console(file=cast(TextIO, LossyStream(full))).print("a line")
        with suppress(OSError):  # what its buffer holds still cannot be written
            full.close()
    theirs, ours = os.pipe()
    os.close(theirs)
    with open(ours, "w") as pipe:
        Console(file=cast(TextIO, LossyStream(pipe))).print("a line")
        with suppress(OSError):
            pipe.close()
