"""What moderation costs in latency, in each mode:

    python benchmarks/moderation.py --out benchmarks/results/moderation.json

Four servers of the shipped model on a CPU, one without moderation and one in each mode. The judge is an endpoint in this
process that takes a fixed time. One request at a time goes to each server in turn, in alternating order, and rounds repeat,
so that each round compares the four under the same load of the machine. Rows `moderation-none`, `-buffer`, `-window` and
`-after` have the medians over the rounds: milliseconds until the first text and until the end, and their differences from
the server without moderation in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import uvloop
from common import cpu_name, provenance, write_rows

from ridgeline.bench.server_process import serving
from ridgeline.cli.client import ChatClient

MODES = ("none", "buffer", "window", "after")
MESSAGE = [{"role": "user", "content": "Tell me a story about a lighthouse."}]


@contextmanager
def judge(delay_s: float) -> Iterator[str]:
    """An endpoint that lets every text pass after `delay_s`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            time.sleep(delay_s)
            data = b'{"results":[{"flagged":false}]}'
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/moderations"
    finally:
        server.shutdown()


def ask(url: str, tokens: int) -> tuple[float, float]:
    """Milliseconds until the first text and until the end of one answer."""
    client = ChatClient(url)
    for _ in client.stream(MESSAGE, {"max_tokens": tokens, "ignore_eos": True, "seed": 1}):
        pass
    assert client.last.ttft_s is not None and client.last.output_tokens == tokens
    return client.last.ttft_s * 1e3, client.last.total_s * 1e3


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    options = ["--device", "cpu", "--threads", "1", "--max-num-seqs", "4", "--max-model-len", "2048"]
    rounds: list[dict[str, tuple[float, float]]] = []
    with judge(arguments.judge_ms / 1e3) as address:
        async with AsyncExitStack() as stack:
            urls = {}
            for mode in MODES:
                extra = [] if mode == "none" else ["--moderation", address, "--moderation-mode", mode]
                urls[mode] = await stack.enter_async_context(serving([*options, *extra]))
            for number in range(arguments.rounds + 1):
                order = MODES[:: -1 if number % 2 else 1]
                times = {mode: await asyncio.to_thread(ask, urls[mode], arguments.tokens) for mode in order}
                rounds.append(times)
    about = {"device": "cpu", "tokens": arguments.tokens, "judge_ms": arguments.judge_ms, "rounds": arguments.rounds}
    return [{**figures(mode, rounds[1:]), **about, **provenance(cpu_name(), arguments.commit)} for mode in MODES]


def figures(mode: str, rounds: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """The row of a mode."""

    def median(place: int, less: bool = False) -> float:
        values = (times[mode][place] - (times["none"][place] if less else 0.0) for times in rounds)
        return round(statistics.median(values), 1)

    row = {"row": f"moderation-{mode}", "first_ms": median(0), "end_ms": median(1)}
    return row if mode == "none" else {**row, "first_more_ms": median(0, True), "end_more_ms": median(1, True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge-ms", type=float, default=50.0, help="time that the judge takes")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--commit", default="", help="the commit that runs, where there is no .git to ask")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    arguments = parser.parse_args()
    table = uvloop.run(measure(arguments))
    print(*map(json.dumps, table), sep="\n")
    if arguments.out:
        write_rows(arguments.out, table)


if __name__ == "__main__":
    main()
