"""The real runner and transfers: it copies between its own blocks and refuses every other origin."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence

import pytest

from ridgeline.core.plan import OWN_BLOCKS
from ridgeline.kv.prefix import Source, chain_root, extend_chain
from tests.engine.runners import PAGE, PROMPT, DeviceBench, alone

LONG = PROMPT * 3
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


class Blocks(Source):
    """A source that says what the test wants."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.places: dict[bytes, list[int]] = {}

    def find(self, chain: Sequence[bytes], first: int) -> list[list[int]]:
        return [self.places[key] for key in chain[first:] if key in self.places]


def _moved(origin: str, family: str, depth: int) -> DeviceBench:
    """A bench whose source keeps the blocks of LONG, which the prefix cache has forgotten."""
    source, bench = Blocks(origin), DeviceBench(family, depth=depth)
    bench.submit("first", LONG, max_tokens=2)
    bench.run()
    chain: list[bytes] = []
    extend_chain(chain, array("i", LONG), PAGE, chain_root("", "tiny"))
    blocks, tables = bench.leases.prefix.match(chain, len(chain))
    for index, key in enumerate(chain[:blocks]):
        source.places[key] = [table[index] for table in tables]
    for block in {block for table in tables for block in table if block}:
        bench.leases.pool.share(block)
    bench.leases.reset_prefix_cache()
    bench.leases.source = source
    return bench


@DEPTHS
@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_blocks_are_copied_at_once(family: str, depth: int) -> None:
    bench = _moved(OWN_BLOCKS, family, depth)
    bench.scheduler.counts.prompt_tokens = 0
    bench.submit("second", LONG, max_tokens=6)
    bench.run()
    assert bench.tokens["second", 0] == alone(LONG, family, max_tokens=6)
    assert bench.scheduler.counts.prompt_tokens == len(LONG) % PAGE


@DEPTHS
def test_an_unknown_origin_is_refused_and_the_request_computes(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    bench = _moved("host", "llama-gqa", depth)
    bench.scheduler.counts.prompt_tokens = 0
    with caplog.at_level(logging.ERROR):
        bench.submit("second", LONG, max_tokens=6)
        bench.run()
    assert "from 'host' is not supported" in caplog.text
    assert bench.tokens["second", 0] == alone(LONG, max_tokens=6)
    assert bench.scheduler.counts.prompt_tokens == len(LONG)
