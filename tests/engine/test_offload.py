"""The tiers below the pool with the real runner on a CPU: the same tokens as without them, whatever is evicted and reloaded."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

from ridgeline.core.plan import StepPlan, Transfer
from ridgeline.engine.tiers import keep_pool
from ridgeline.kv.copies import Event as Copied
from ridgeline.kv.copies import PlainLink, TierTransfers
from ridgeline.kv.disk import Disk
from ridgeline.kv.offload import OFFLOAD, Offload, Part
from ridgeline.kv.prefix import chain_root, extend_chain
from tests.engine.runners import PAGE, PROMPT, DeviceBench, alone, layout_of, pair

LONG = PROMPT * 3
OTHERS = [[number + 20, *PROMPT * 4] for number in range(4)]
FAMILIES = pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def always(start: int, end: int, in_memory: int, on_disk: int) -> bool:
    return True


def _disk(folder: Path, family: str = "llama-gqa", capacity: int = 1 << 30) -> Disk:
    return Disk(folder, capacity, b"f" * 32, layout_of(pair(family)[1]).page_bytes)


def _bench(
    family: str = "llama-gqa", slots: int = 400, disk: Disk | None = None, **options: object
) -> tuple[DeviceBench, Offload]:
    """A bench whose pool holds little more than one of the prompts, and its tiers."""
    layout = layout_of(pair(family)[1])
    blocks = layout.pages_for(len(OTHERS[0]) + 20, 64) + len(layout.groups)
    bench = DeviceBench(family, **{"blocks": blocks, "clock": time.monotonic, **options})
    tiers = Offload(layout, slots, always, disk)
    bench.leases.source = tiers
    bench.runner.transfers = transfers = TierTransfers(bench.runner.store, slots, disk)
    if disk is not None:
        disk.view = transfers.view
    return bench, tiers


def _ask(bench: DeviceBench, name: str, prompt: Sequence[int], **options: object) -> int:
    """Run a request alone. Returns how many of its prompt tokens were computed."""
    bench.scheduler.counts.prompt_tokens = 0
    bench.submit(name, prompt, **{"max_tokens": 6, **options})  # type: ignore[arg-type]
    until = time.monotonic() + 20
    while not bench.scheduler.idle and time.monotonic() < until:
        bench.turn()
        time.sleep(0 if bench.scheduler.steps_in_flight else 0.0002)
    bench.run()
    return bench.scheduler.counts.prompt_tokens


def _evict(bench: DeviceBench, run: int = 0) -> None:
    for index, prompt in enumerate(OTHERS):
        _ask(bench, f"other {run} {index}", prompt)


@FAMILIES
@DEPTHS
def test_an_evicted_prompt_is_reloaded_with_the_same_tokens(family: str, depth: int) -> None:
    bench, tiers = _bench(family, depth=depth)
    assert _ask(bench, "first", LONG) == len(LONG)
    _evict(bench)
    assert tiers.counts.stored > 0
    assert _ask(bench, "again", LONG) == len(LONG) % PAGE, "all full blocks come from host memory"
    assert bench.tokens["again", 0] == bench.tokens["first", 0] == alone(LONG, family, max_tokens=6)
    assert tiers.counts.loaded > 0
    tiers.check()


def test_without_the_tier_the_same_prompt_is_computed() -> None:
    """The eviction that the other tests rely on is real."""
    bench, _ = _bench(slots=1)
    _ask(bench, "first", LONG)
    _evict(bench)
    assert _ask(bench, "again", LONG) >= len(LONG) - PAGE


@FAMILIES
def test_what_the_pool_still_has_is_not_copied(family: str) -> None:
    bench, tiers = _bench(family)
    _ask(bench, "first", LONG)
    held = bench.leases.prefix.blocks
    while bench.leases.prefix.blocks > held // 2:
        bench.leases.pool.release(bench.leases.pool.take(), keep=False)
        if bench.leases.pool.cached == 0:
            break
        taken = [bench.leases.pool.take() for _ in range(bench.leases.pool.free - bench.leases.pool.cached + 1)]
        for block in taken:
            bench.leases.pool.release(block, keep=False)
    _ask(bench, "short", [7, 8, 9])
    assert _ask(bench, "again", LONG) == len(LONG) % PAGE
    assert 0 < tiers.counts.loaded < held
    assert bench.tokens["again", 0] == alone(LONG, family, max_tokens=6)


class Failing(PlainLink):
    """A link that breaks."""

    def up(self, rows: Sequence[object], blocks: Sequence[int]) -> object:  # type: ignore[override]
        raise RuntimeError("the link is down")

    def down(self, blocks: Sequence[int], rows: Sequence[object], refilled: object = ()) -> object:  # type: ignore[override]
        raise RuntimeError("the link is down")


class FailingUp(PlainLink):
    """A link that breaks on the way up, once there is something to copy."""

    def up(self, rows: Sequence[torch.Tensor], blocks: Sequence[int]) -> Copied:
        if blocks:
            raise RuntimeError("the link is down")
        return super().up(rows, blocks)


def test_a_store_that_fails_is_no_hit(caplog: pytest.LogCaptureFixture) -> None:
    bench, tiers = _bench()
    store = bench.runner.store
    bench.runner.transfers._link = Failing(store.flat.view(store.pages, -1))  # type: ignore[attr-defined]
    _ask(bench, "first", LONG)
    _evict(bench)
    assert "are not kept" in caplog.text and tiers.counts.stored == 0
    assert _ask(bench, "again", LONG) >= len(LONG) - PAGE
    assert bench.tokens["again", 0] == alone(LONG, max_tokens=6)
    tiers.check()


@DEPTHS
def test_a_load_that_fails_is_computed(depth: int) -> None:
    bench, tiers = _bench(depth=depth)
    _ask(bench, "first", LONG)
    _evict(bench)
    store = bench.runner.store
    bench.runner.transfers._link = Failing(store.flat.view(store.pages, -1))  # type: ignore[attr-defined]
    assert _ask(bench, "again", LONG) >= len(LONG) - PAGE
    assert bench.tokens["again", 0] == alone(LONG, max_tokens=6)
    assert bench.finish["again", 0] == "length"
    assert not tiers.held
    tiers.check()


@FAMILIES
@DEPTHS
def test_a_restart_finds_the_files(family: str, depth: int, tmp_path: Path) -> None:
    disk = _disk(tmp_path, family)
    bench, _ = _bench(family, disk=disk, depth=depth)
    _ask(bench, "first", LONG)
    _evict(bench)
    bench.runner.close()
    disk = _disk(tmp_path, family)
    again, tiers = _bench(family, disk=disk, depth=depth)
    assert _ask(again, "again", LONG) == len(LONG) % PAGE
    assert again.tokens["again", 0] == alone(LONG, family, max_tokens=6)
    assert tiers.counts.loaded == 0 and disk.counts.loaded > 0
    again.runner.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign", "gone"])
def test_damaged_files_are_computed_again(damage: str, tmp_path: Path) -> None:
    disk = _disk(tmp_path)
    bench, _ = _bench(disk=disk)
    _ask(bench, "first", LONG)
    _evict(bench)
    bench.runner.close()
    disk = _disk(tmp_path)
    again, _ = _bench(disk=disk)
    for path in disk.folder.glob("*.kv"):
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[-5] ^= 1
        elif damage == "foreign":
            data[20] ^= 1
        path.write_bytes(data if damage in ("flip", "foreign") else data[: len(data) // 2] if damage == "cut" else b"")
        if damage == "gone":
            path.unlink()
    assert _ask(again, "again", LONG) == len(LONG)
    assert again.tokens["again", 0] == alone(LONG, max_tokens=6)
    again.runner.close()


def test_pages_that_were_read_but_not_copied_are_computed(tmp_path: Path) -> None:
    bench, _ = _bench(disk=_disk(tmp_path))
    _ask(bench, "first", LONG)
    _evict(bench)
    bench.runner.close()
    again, tiers = _bench(disk=_disk(tmp_path))
    store = again.runner.store
    again.runner.transfers._link = FailingUp(store.flat.view(store.pages, -1))  # type: ignore[attr-defined]
    assert _ask(again, "again", LONG) == len(LONG)
    assert again.finish["again", 0] == "length" and again.tokens["again", 0] == alone(LONG, max_tokens=6)
    assert not tiers.held
    again.runner.close()


def test_an_engine_that_ends_during_a_load_writes_all_that_its_pool_holds(tmp_path: Path) -> None:
    """More blocks than host memory has room for at once, and slots of a transfer that will never end."""
    disk = _disk(tmp_path)
    bench, tiers = _bench(slots=4, disk=disk)
    for name, prompt in (("first", OTHERS[0]), ("second", OTHERS[1]), ("third", LONG)):
        _ask(bench, name, prompt)
    chain: list[bytes] = []
    extend_chain(chain, array("i", OTHERS[0]), PAGE, chain_root("", "tiny"))
    tiers.begins(1 << 20, [next(place for (place,) in tiers.find(chain, 0) if place > 0)])
    blocks = {(key, group) for key, group, _ in bench.leases.prefix.items()}
    assert len(blocks) > 4
    keep_pool(bench.leases, bench.runner.transfers)
    assert all(disk.find(Part(*block)) for block in blocks)
    bench.runner.close()


class Held:
    """Files whose pages are not read before the test says so."""

    def __init__(self) -> None:
        self.may_read = Event()
        self.view: object = None

    def read(self, number: int, target: memoryview) -> bool:
        self.may_read.wait()
        return True

    def close(self) -> None:
        pass


@torch.inference_mode()
def test_a_failed_step_forgets_what_it_cancels_and_loads() -> None:
    """It may have failed before it began. The scheduler gives the blocks to others, so nothing may write to them later."""
    store, files = DeviceBench("llama-gqa").runner.store, Held()
    transfers = TierTransfers(store, 1, files)  # type: ignore[arg-type]
    pages = store.flat.view(store.pages, -1)
    begun = StepPlan(1, transfers=[Transfer(7, [3], OFFLOAD, [-1]), Transfer(8, [4], OFFLOAD, [-2])])
    assert not transfers.step(begun)
    transfers.forget(StepPlan(2, cancels=[7]))
    transfers.forget(replace(begun, transfers=begun.transfers[1:]))
    pages[3:5] = 1
    files.may_read.set()
    while transfers.busy:
        assert not transfers.step(StepPlan(3))
    transfers.close()
    assert (pages[3:5] == 1).all()
