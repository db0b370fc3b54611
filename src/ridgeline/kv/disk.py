"""The disk tier: pages of cached prefixes as files. A server that starts again finds them.

A file holds one page, and its header says of what: magic, version, fingerprint of model, KV format and page layout, key of the
prefix (SHA-256), group, length, time and checksum of header and page. A file that does not have the expected header, length and
checksum is removed and never served. Files are written under a temporary name and renamed. They are not flushed to the device
(fsync): after a power failure a file may be incomplete, and then its checksum says so.

Ownership: one thread calls the methods; `read` may be called by any thread. A background thread writes and removes files. Any error
of writing turns the tier off.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import re
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple, TextIO

from ridgeline.core.errors import ConfigError
from ridgeline.core.events import TierCounts
from ridgeline.kv.offload import Part

log = logging.getLogger(__name__)

MAGIC = b"RIDGEKV\n"
VERSION = 2
HEADER = struct.Struct("<8sI32s32sIQdI")
"""Magic, version, fingerprint, key, group, bytes of the page, time of writing, CRC-32 of these and of the page. The time
of the last use is the file's time of modification."""
SUM_BYTES = 4
NAME = re.compile(r"([0-9a-f]{64})-(\d{1,6})\.kv")
FOLDER = re.compile(r"[0-9a-f]{16}")
LOCK = "lock"
CLOSE_S = 2.0
"""Seconds that closing waits for files to be written."""

View = Callable[[int], memoryview]
"""Slot of host memory -> its bytes."""


class _Job(NamedTuple):
    """Write a slot, or remove files. slot 0: nothing to write."""

    path: Path
    part: Part
    slot: int
    removed: Sequence[Path] = ()


class Disk:
    """Files of pages in a folder, at most `capacity` bytes of them, the least recently used removed first.

    fingerprint: 32 bytes; files of other fingerprints are in other folders below `root`. At the start, folders that no server uses
    are emptied, the oldest first, until all files fit. ttl_s: seconds after which a file is dropped; 0: never. now: seconds since
    the epoch. Raises ConfigError if the folder cannot be used.
    """

    def __init__(
        self,
        root: Path,
        capacity: int,
        fingerprint: bytes,
        page_bytes: int,
        *,
        ttl_s: float = 0.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.page_bytes = root / fingerprint.hex()[:16], page_bytes
        self.counts = TierCounts("disk", page_bytes)
        self.off = ""
        """Why the tier is off; empty: it is on."""
        self.view: View | None = None
        """Set by the owner of host memory."""
        self._capacity, self._fingerprint, self._ttl_s, self._now = capacity, fingerprint, ttl_s, now
        self._numbers: OrderedDict[Part, int] = OrderedDict()
        """Complete files, the least recently used first."""
        self._parts: dict[int, tuple[Part, float]] = {}
        """Number -> part and time of writing."""
        self._held: dict[int, int] = {}
        self._writing: dict[Part, int] = {}
        """Part -> slot that is being written."""
        self._unwanted: set[Part] = set()
        self._last = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Job, str]] = queue.SimpleQueue()
        self._bad: queue.SimpleQueue[int] = queue.SimpleQueue()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if (lock := _locked(self.folder)) is None:
                raise ConfigError(
                    f"--kv-disk: another server of this model uses {self.folder}. Give each server a folder of its own.",
                    param="kv_disk",
                )
            self._lock = lock
            os.utime(self.folder / LOCK)
            self._scan()
            _trim(root, self.folder, capacity - len(self._numbers) * self._file_bytes)
        except OSError as error:
            raise _unusable(root, error) from None
        self._thread = threading.Thread(target=self._work, name="kv-disk", daemon=True)
        self._thread.start()

    # --- what is there ----------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """Find the files of an earlier run, and remove those that cannot be served. Checksums are checked when a file is read."""
        usable = []
        for path in self.folder.iterdir():
            if path.suffix == ".tmp":
                path.unlink(missing_ok=True)
            elif match := NAME.fullmatch(path.name):
                part = Part(bytes.fromhex(match[1]), int(match[2]))
                header, status = _head(path), path.stat()
                if reason := self._refusal(header, status.st_size, part):
                    _remove(path, reason)
                else:
                    usable.append((status.st_mtime, HEADER.unpack(header)[-2], part))
        for _, written_at, part in sorted(usable):
            self._enter(part, written_at)
        expired = [number for number in self._parts if self._expired(number)]
        for path in [*map(self._forget, expired), *self._evict_beyond(self._capacity)]:
            path.unlink(missing_ok=True)

    def _refusal(self, header: bytes, size: int, part: Part) -> str:
        """Why a file cannot be of this part; empty: header and length are right."""
        if len(header) < HEADER.size or size != HEADER.size + self.page_bytes:
            return f"it has {size:,} bytes instead of {HEADER.size + self.page_bytes:,}"
        magic, version, fingerprint, key, group, length, *_ = HEADER.unpack(header)
        if (magic, version) != (MAGIC, VERSION):
            return "it is not a page of this version"
        if (fingerprint, length) != (self._fingerprint, self.page_bytes):
            return "it is of another model or page layout"
        return "" if (key, group) == part else "it is of another prefix than its name says"

    def _enter(self, part: Part, written_at: float) -> None:
        self._last += 1
        self._numbers[part] = self._last
        self._parts[self._last] = part, written_at

    def path(self, part: Part) -> Path:
        return self.folder / f"{part.key.hex()}-{part.group}.kv"

    # --- the index --------------------------------------------------------------------------------------------------

    def find(self, part: Part) -> int:
        while not self._bad.empty():
            if (number := self._bad.get()) in self._parts:
                self._forget(number)
        number = self._numbers.get(part, 0)
        if number and self._expired(number):
            if number not in self._held:
                self._jobs.put(_Job(self.path(part), part, 0, [self._forget(number)]))
            return 0
        return number

    def _expired(self, number: int) -> bool:
        return bool(self._ttl_s) and self._now() - self._parts[number][1] >= self._ttl_s

    def hold(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._held[number] = self._held.get(number, 0) + 1

    def release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._held[number] -= 1
            if not self._held[number]:
                del self._held[number]
            if number in self._parts:
                self._numbers.move_to_end(self._parts[number][0])

    def write(self, part: Part, slot: int) -> bool:
        if self.off or part in self._numbers or part in self._writing:
            return False
        removed = self._evict_beyond(self._capacity - (1 + len(self._writing)) * self._file_bytes)
        if (len(self._numbers) + len(self._writing) + 1) * self._file_bytes > self._capacity:
            self.counts.dropped += 1
            return False
        self._writing[part] = slot
        self._jobs.put(_Job(self.path(part), part, slot, removed))
        return True

    def written(self) -> Sequence[int]:
        slots = []
        while not self._done.empty():
            job, error = self._done.get()
            if error and not self.off:
                self._turn_off(error)
            if not job.slot:
                continue
            slots.append(self._writing.pop(job.part))
            if self.off or job.part in self._unwanted:
                self._unwanted.discard(job.part)
                self._jobs.put(_Job(job.path, job.part, 0, [job.path]))
            else:
                self._enter(job.part, self._now())
                self.counts.stored += 1
        self.counts.blocks = len(self._numbers)
        return slots

    def clear(self) -> None:
        paths = [self._forget(number) for number in list(self._parts)]
        self._unwanted.update(self._writing)
        self._jobs.put(_Job(self.folder, Part(b"", 0), 0, paths))

    @property
    def _file_bytes(self) -> int:
        return HEADER.size + self.page_bytes

    def _evict_beyond(self, capacity: int) -> list[Path]:
        """Forget the least recently used files that nobody reads, until the others fit. Returns their paths."""
        paths = []
        over = len(self._numbers) - max(0, capacity) // self._file_bytes
        if over > 0:
            unread = [number for number in self._numbers.values() if number not in self._held]
            paths = [self._forget(number) for number in unread[:over]]
        return paths

    def _forget(self, number: int) -> Path:
        part, _ = self._parts.pop(number)
        del self._numbers[part]
        self.counts.dropped += 1
        self.counts.blocks = len(self._numbers)
        return self.path(part)

    def _turn_off(self, error: str) -> None:
        self.off = error
        self._numbers.clear()
        self._parts.clear()
        self.counts.blocks = 0
        log.error(
            "The disk tier of the KV cache is off, and requests go on without it: %s. Free space in %s and restart.",
            error,
            self.folder,
        )

    # --- files ------------------------------------------------------------------------------------------------------

    def read(self, number: int, target: memoryview) -> bool:
        """Read the page of a held file into `target`. False: it is not there as it was written; then it is removed."""
        known = self._parts.get(number)
        if known is None:
            return False
        part, path = known[0], self.path(known[0])
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(HEADER.size) or b""
                reason = self._refusal(header, os.fstat(file.fileno()).st_size, part)
                if not reason and file.readinto(target) != self.page_bytes:
                    reason = "it ends too early"
            if not reason and _checksum(header, target) != HEADER.unpack(header)[-1]:
                reason = "its checksum is wrong"
            if not reason:
                with suppress(OSError):
                    os.utime(path)  # the order of use, for the next start
                return True
        except OSError as error:
            reason = str(error)
        _remove(path, reason)
        self._bad.put(number)
        return False

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            error = ""
            try:
                for path in job.removed:
                    path.unlink(missing_ok=True)
                if job.slot and not self.off:
                    self._write(job)
            except OSError as problem:
                error = str(problem)
            self._done.put((job, error))

    def _write(self, job: _Job) -> None:
        assert self.view is not None
        page, path = self.view(job.slot), job.path.with_suffix(".tmp")
        fields = MAGIC, VERSION, self._fingerprint, *job.part, self.page_bytes, self._now()
        header = HEADER.pack(*fields, _checksum(HEADER.pack(*fields, 0), page))
        try:
            with path.open("wb", buffering=0) as file:
                for data in (header, page):
                    if file.write(data) != len(data):
                        raise OSError("the device has no space left")
            path.replace(job.path)
        except OSError:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Write what is queued, for at most CLOSE_S seconds."""
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
        self._lock.close()


def check_folder(root: Path) -> None:
    """Raise ConfigError if files cannot be written below `root`."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise _unusable(root, error) from None


def _unusable(root: Path, error: OSError) -> ConfigError:
    message = f"--kv-disk {root} cannot be used: {error}. Give a folder that this user may write."
    return ConfigError(message, param="kv_disk")


def _locked(folder: Path) -> TextIO | None:
    """The locked file of a folder; None: another process has it. The system unlocks it when the process ends."""
    lock = (folder / LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _trim(root: Path, kept: Path, room: int) -> None:
    """Keep at most `room` bytes in the folders other than `kept`: those whose server started last. Folders that a server uses
    stay as they are."""
    others = [folder for folder in root.iterdir() if FOLDER.fullmatch(folder.name) and (folder / LOCK).is_file()]
    for folder in sorted(others, key=lambda folder: (folder / LOCK).stat().st_mtime, reverse=True):
        if folder == kept or (lock := _locked(folder)) is None:
            continue
        with lock:
            paths = [path for path in folder.iterdir() if NAME.fullmatch(path.name) or path.suffix == ".tmp"]
            room -= sum(path.stat().st_size for path in paths)
            for path in paths if room < 0 else ():
                path.unlink(missing_ok=True)


def _checksum(header: bytes, page: memoryview) -> int:
    return zlib.crc32(page, zlib.crc32(header[:-SUM_BYTES]))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEADER.size)


def _remove(path: Path, reason: str) -> None:
    log.warning("%s is removed: %s.", path, reason)
    with suppress(OSError):
        path.unlink(missing_ok=True)
