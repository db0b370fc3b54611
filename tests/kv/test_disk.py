"""Files of pages: what is written is found again, the least recently used go first, and nothing else is served."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.kv.disk import HEADER, Disk
from ridgeline.kv.offload import Part

PAGE = 64
FILE = HEADER.size + PAGE
PARTS = [Part(bytes([number]) * 32, number % 2) for number in range(6)]


def page(number: int) -> bytes:
    return bytes([number]) * PAGE


def opened(
    root: Path,
    capacity: int = 100 * FILE,
    fingerprint: bytes = b"f" * 32,
    ttl_s: float = 0.0,
    now: Callable[[], float] = time.time,
) -> Disk:
    disk = Disk(root, capacity, fingerprint, PAGE, ttl_s=ttl_s, now=now)
    disk.view = lambda slot: memoryview(page(slot - 1))
    return disk


def written(disk: Disk, count: int) -> list[int]:
    """Wait until so many slots are written."""
    slots: list[int] = []
    deadline = time.monotonic() + 10
    while len(slots) < count and time.monotonic() < deadline:
        slots += disk.written()
        time.sleep(0.001)
    return slots


def store(disk: Disk, *numbers: int) -> None:
    for number in numbers:
        assert disk.write(PARTS[number], number + 1)
    assert written(disk, len(numbers)) == [number + 1 for number in numbers]


def read(disk: Disk, part: Part) -> bytes | None:
    target, number = bytearray(PAGE), disk.find(part)
    if not number:
        return None
    disk.hold([number])
    served = disk.read(number, memoryview(target))
    disk.release([number])
    return bytes(target) if served else None


def test_a_restart_finds_what_was_written(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 0, 1, 2)
    assert not disk.write(PARTS[0], 1), "it is there already"
    disk.close()
    again = opened(tmp_path)
    assert [read(again, part) for part in PARTS[:4]] == [page(0), page(1), page(2), None]
    assert again.written() == [] and again.counts.blocks == 3
    again.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "bytes instead of"),
        (lambda data: data[: HEADER.size - 3], "bytes instead of"),
        (lambda data: b"", "bytes instead of"),
        (lambda data: data + b"!", "bytes instead of"),
        (lambda data: data[:-1] + b"!", "checksum"),
        (lambda data: b"OTHERS!\n" + data[8:], "not a page of this version"),
        (lambda data: data[:8] + b"\1" + data[9:], "not a page of this version"),
        (lambda data: data[:12] + b"g" * 32 + data[44:], "another model"),
        (lambda data: data[:44] + b"k" * 32 + data[76:], "another prefix"),
        (lambda data: data[: -PAGE - 8] + bytes([data[-PAGE - 8] ^ 1]) + data[-PAGE - 7 :], "checksum"),
    ],
)
@pytest.mark.parametrize("before_start", [True, False])
def test_a_damaged_file_is_removed_and_never_served(
    damage: Callable[[bytes], bytes], reason: str, before_start: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = opened(tmp_path)
    store(disk, 0, 1)
    path = disk.path(PARTS[0])
    if before_start:
        disk.close()
    path.write_bytes(damage(path.read_bytes()))
    if before_start:
        disk = opened(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert read(disk, PARTS[0]) is None
    assert disk.find(PARTS[0]) == 0 and not path.exists()
    assert reason in caplog.text
    assert read(disk, PARTS[1]) == page(1), "the other file is served"
    store(disk, 0)
    assert read(disk, PARTS[0]) == page(0), "it is written again"
    disk.close()


def test_files_that_are_no_pages_stay(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for name in ("notes.txt", "notes.kv", "00-0.kv"):
        (disk.folder / name).write_text("mine")
    (disk.folder / "half.tmp").write_text("of an earlier run")
    disk.close()
    disk = opened(tmp_path)
    assert sorted(path.name for path in disk.folder.iterdir()) == ["00-0.kv", "lock", "notes.kv", "notes.txt"]
    disk.close()


def test_models_share_a_folder_and_servers_of_one_model_do_not(tmp_path: Path) -> None:
    disk, other = opened(tmp_path), opened(tmp_path, fingerprint=b"g" * 32)
    store(disk, 0)
    assert other.find(PARTS[0]) == 0
    with pytest.raises(ConfigError, match="a folder of its own"):
        opened(tmp_path)
    disk.close()
    other.close()


def test_the_least_recently_used_file_goes_first_also_after_a_restart(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 0, 1, 2)
    assert read(disk, PARTS[0]) == page(0)
    for age, number in enumerate((0, 2, 1)):  # the file system's clock may be coarse
        os.utime(disk.path(PARTS[number]), (1e9, 1e9 - age))
    disk.close()
    disk = opened(tmp_path, capacity=3 * FILE)
    store(disk, 3)
    assert [bool(disk.find(part)) for part in PARTS[:4]] == [True, False, True, True]
    number = disk.find(PARTS[2])
    disk.hold([number])
    store(disk, 4)
    assert [bool(disk.find(part)) for part in PARTS[:5]] == [False, False, True, True, True], "a held file stays"
    disk.release([number])
    disk.close()
    assert len(list(disk.folder.glob("*.kv"))) == 3


def test_a_smaller_limit_removes_files_at_the_start(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 0, 1, 2)
    disk.close()
    for number in range(3):
        os.utime(disk.path(PARTS[number]), (1e9, 1e9 + number))
    disk = opened(tmp_path, capacity=2 * FILE)
    assert [disk.path(part).exists() for part in PARTS[:3]] == [False, True, True]
    disk.close()


def test_files_of_other_models_give_way(tmp_path: Path) -> None:
    """A new version of the model or of its options begins a folder; the folders before it must not fill the disk."""
    for age, name in ((2, b"a"), (1, b"b")):
        disk = opened(tmp_path, fingerprint=name * 32)
        store(disk, 0, 1)
        disk.close()
        os.utime(disk.folder / "lock", (1e9, 1e9 - age))
    (tmp_path / "notes").mkdir()
    in_use = opened(tmp_path, fingerprint=b"c" * 32)
    store(in_use, 0, 1, 2)
    disk = opened(tmp_path, capacity=3 * FILE)
    assert [len(list((tmp_path / (name * 8).hex()).glob("*.kv"))) for name in (b"a", b"b", b"c")] == [0, 2, 3]
    disk.close()
    in_use.close()


def test_files_have_a_time_to_live(tmp_path: Path) -> None:
    now = time.time()
    disk = opened(tmp_path, ttl_s=60, now=lambda: now)
    store(disk, 0)
    now += 59
    assert read(disk, PARTS[0]) == page(0)
    now += 2
    assert disk.find(PARTS[0]) == 0, "reading does not prolong it"
    disk.close()
    assert not disk.path(PARTS[0]).exists()


def test_files_whose_time_has_passed_are_removed_at_the_start(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 0)
    disk.close()
    disk = opened(tmp_path, ttl_s=60, now=lambda: time.time() + 61)
    assert not disk.path(PARTS[0]).exists()
    disk.close()


def test_an_error_of_writing_turns_the_tier_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = opened(tmp_path)
    store(disk, 0)
    disk.path(PARTS[1]).mkdir()  # the rename to this name fails, for root too
    assert disk.write(PARTS[1], 2) and disk.write(PARTS[2], 3)
    assert written(disk, 2) == [2, 3], "the slots return"
    assert "The disk tier of the KV cache is off" in caplog.text and "restart" in caplog.text
    assert disk.find(PARTS[0]) == 0 and not disk.write(PARTS[3], 4)
    disk.close()


def test_what_is_being_written_is_cleared_too(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    store(disk, 0)
    assert disk.write(PARTS[1], 2)
    disk.clear()
    assert written(disk, 1) == [2]
    assert not any(map(disk.find, PARTS))
    disk.close()
    assert not list(disk.folder.glob("*.kv"))


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        opened(tmp_path / "file")
