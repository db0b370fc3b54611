"""Files and batches on disk: one SQLite database for the objects, and one file of bytes for each stored file.

`FOLDER/state.sqlite`, and the bytes in `FOLDER/files/ID`. A process locks the folder. Every method waits for the disk: call it in
a thread. Results of a batch that still runs are in `files/`, under the ids of its output and error files, but are no objects
yet; `Store.end` makes them files at the moment in which the batch ends.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from ridgeline.core.errors import ConfigError, NotFound
from ridgeline.service.batches.objects import Batch, Conflict, StorageFull, StoredFile

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, purpose TEXT NOT NULL, expires_at INTEGER, body BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, ended INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS unfinished ON batches (ended) WHERE NOT ended;
"""


class StoredBatch(msgspec.Struct):
    """A batch, and what the server keeps with it. output, errors: ids that its result files will have. result_expiry_s: seconds
    from their creation until they are deleted. owner: name of the API key that has created it."""

    batch: Batch
    output: str
    errors: str
    result_expiry_s: int
    owner: str = ""


_FILE = msgspec.json.Decoder(StoredFile)
_BATCH = msgspec.json.Decoder(StoredBatch)


class Store:
    """The folder. Opening it creates nothing until something is stored."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises ConfigError if another server uses the folder, or it cannot be used. max_bytes: of all files together."""
        self._folder, self._max_bytes = folder, max_bytes
        self._lock = threading.RLock()
        self._lock_file: IO[bytes] | None = None
        self._database: sqlite3.Connection | None = None
        self._reserved: dict[str, int] = {}
        """Bytes reserved for files that are being uploaded, by their ids."""
        if (folder / "state.sqlite").exists():
            self._open()

    def _open(self) -> sqlite3.Connection:
        """The database, opened at the first use."""
        if self._database is not None:
            return self._database
        try:
            (self._folder / "files").mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_file = (self._folder / "lock").open("wb")
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            database = sqlite3.connect(self._folder / "state.sqlite", check_same_thread=False, isolation_level=None)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            database.executescript(_SCHEMA)
        except BlockingIOError:
            raise ConfigError(
                f"Another server uses the batch folder {self._folder}: give each server a --batch-dir of its own.",
                param="batch_dir",
            ) from None
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"The batch folder {self._folder} cannot be used ({error}): give another --batch-dir, or --batch-dir off.",
                param="batch_dir",
            ) from error
        self._database = database
        self._remove_leftovers()
        return database

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        """A transaction. Raises StorageFull if the disk does not take it."""
        with self._lock:
            database = self._open()
            try:
                database.execute("BEGIN IMMEDIATE")
                yield database
                database.execute("COMMIT")
            except BaseException as error:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise StorageFull(
                        f"The state of batches cannot be stored ({error}): free space on the disk of --batch-dir, or replace it."
                    ) from error
                raise

    def close(self) -> None:
        """Release the folder."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            if self._lock_file is not None:
                self._lock_file.close()

    # --- files ------------------------------------------------------------------------------------------------------

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file are. The id is one that the store has returned."""
        return self._folder / "files" / file_id

    def reserve(self, file_id: str, more: int) -> int:
        """Reserve up to `more` further bytes for a file that is being uploaded, until `release`. Returns its reserved bytes.

        Opens the folder. Raises StorageFull if no space is left.
        """
        with self._lock:
            self._open()
            stored = (entry for entry in os.scandir(self._folder / "files") if entry.name not in self._reserved)
            used = sum(self._reserved.values()) + sum(map(_size, stored))
            if used >= self._max_bytes:
                raise StorageFull(
                    f"The files have {used >> 20} MiB, all that --batch-max-gb allows: delete files, or raise it."
                )
            self._reserved[file_id] = self._reserved.get(file_id, 0) + min(more, self._max_bytes - used)
            return self._reserved[file_id]

    def release(self, file_id: str) -> None:
        """The upload has ended: from now on the file has the space that its bytes take, none if they were deleted."""
        with self._lock:
            self._reserved.pop(file_id, None)

    def add_file(self, file: StoredFile) -> None:
        """Add a file whose bytes are at its path. If that fails, they are deleted."""
        try:
            with self._write() as database:
                _insert_file(database, file)
        except BaseException:
            self.path(file.id).unlink(missing_ok=True)
            raise

    def file(self, file_id: str, param: str = "file_id", owner: str | None = None) -> StoredFile:
        """A file of one or all owners. Raises NotFound, naming `param`."""
        owned, owners = _owned(owner)
        rows = self._rows(f"SELECT body FROM files WHERE {owned} AND id = ?", *owners, file_id)
        if not rows:
            raise NotFound(
                f"There is no file {file_id[:80]!r}: it was deleted, has expired, or never existed.", param=param
            )
        return _FILE.decode(rows[0])

    def files(
        self, purpose: str | None, after: str | None, limit: int, *, ascending: bool, owner: str | None = None
    ) -> tuple[list[StoredFile], bool]:
        """One page of files, of one or all owners, the latest first or last, and whether more follow. Raises NotFound for an
        unknown `after`."""
        rows, more = self._page("files", after, limit, owner, ascending=ascending, purpose=purpose)
        return [_FILE.decode(row) for row in rows], more

    def delete_file(self, file_id: str) -> None:
        """Raises NotFound for an unknown file, Conflict for the input of a batch that has not ended."""
        with self._lock:
            self.file(file_id)
            for stored in self.unfinished():
                if stored.batch.input_file_id == file_id:
                    raise Conflict(
                        f"File {file_id} is the input of {stored.batch.id}, which has not ended: cancel the batch first.",
                        param="file_id",
                    )
            self._delete([file_id])

    def delete_expired(self, now: float) -> None:
        """Delete the files whose time is over, except inputs of batches that have not ended."""
        if self._database is None:
            return
        with self._lock:
            needed = {stored.batch.input_file_id for stored in self.unfinished()}
            rows = self._rows("SELECT body FROM files WHERE expires_at <= ?", int(now))
            self._delete([file.id for file in map(_FILE.decode, rows) if file.id not in needed])

    def _delete(self, file_ids: list[str]) -> None:
        with self._write() as database:
            database.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in file_ids])
        for file_id in file_ids:
            self.path(file_id).unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Delete bytes that belong to no object: uploads and deletions that a crash has interrupted."""
        kept = {_FILE.decode(row).id for row in self._rows("SELECT body FROM files")}
        for stored in self.unfinished():
            kept |= {stored.output, stored.errors}
        for entry in os.scandir(self._folder / "files"):
            if entry.name not in kept:
                Path(entry.path).unlink(missing_ok=True)

    # --- batches ----------------------------------------------------------------------------------------------------

    def add_batch(self, stored: StoredBatch) -> None:
        """Add a batch. Raises NotFound if its input file was deleted meanwhile."""
        with self._write() as database:
            self.file(stored.batch.input_file_id, "input_file_id")
            body = msgspec.json.encode(stored)
            database.execute("INSERT INTO batches (id, ended, body) VALUES (?, 0, ?)", (stored.batch.id, body))

    def save(self, stored: StoredBatch, files: tuple[StoredFile, ...] = ()) -> None:
        """Store a batch's present state and, in the same moment, add its result files."""
        with self._write() as database:
            for file in files:
                _insert_file(database, file)
            body = msgspec.json.encode(stored)
            ended = int(stored.batch.ended)
            database.execute("UPDATE batches SET ended = ?, body = ? WHERE id = ?", (ended, body, stored.batch.id))

    def batch(self, batch_id: str, owner: str | None = None) -> StoredBatch:
        """A batch of one or all owners. Raises NotFound."""
        owned, owners = _owned(owner)
        rows = self._rows(f"SELECT body FROM batches WHERE {owned} AND id = ?", *owners, batch_id)
        if not rows:
            raise NotFound(f"There is no batch {batch_id[:80]!r}: check the id.", param="batch_id")
        return _BATCH.decode(rows[0])

    def batches(self, after: str | None, limit: int, owner: str | None = None) -> tuple[list[StoredBatch], bool]:
        """One page of batches, of one or all owners, the latest first, and whether more follow. Raises NotFound for an
        unknown `after`."""
        rows, more = self._page("batches", after, limit, owner, ascending=False)
        return [_BATCH.decode(row) for row in rows], more

    def unfinished(self) -> list[StoredBatch]:
        """Batches that have not ended, the oldest first."""
        rows = self._rows("SELECT body FROM batches WHERE NOT ended ORDER BY number")
        return [_BATCH.decode(row) for row in rows]

    # --- queries ----------------------------------------------------------------------------------------------------

    def _rows(self, query: str, *values: object) -> list[bytes]:
        """The column `body` of a query; empty while nothing was ever stored."""
        with self._lock:
            if self._database is None:
                return []
            return [body for (body,) in self._database.execute(query, values)]

    def _page(
        self,
        table: str,
        after: str | None,
        limit: int,
        owner: str | None,
        *,
        ascending: bool,
        purpose: str | None = None,
    ) -> tuple[list[bytes], bool]:
        """A page of a table's bodies in the order of creation. `after` of another owner is unknown."""
        owned, owners = _owned(owner)
        where, parameters = owned, [*owners]
        if purpose is not None:
            where, parameters = f"{where} AND purpose = ?", [*parameters, purpose]
        with self._lock:
            if after is not None:
                if not self._rows(f"SELECT body FROM {table} WHERE {owned} AND id = ?", *owners, after):
                    raise NotFound(
                        f"after is {after[:80]!r}, which does not exist: give the id of a listed object.", param="after"
                    )
                where += f" AND number {'>' if ascending else '<'} (SELECT number FROM {table} WHERE id = ?)"
                parameters.append(after)
            order = "ASC" if ascending else "DESC"
            query = f"SELECT body FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?"
            rows = self._rows(query, *parameters, limit + 1)
        return rows[:limit], len(rows) > limit


def _size(entry: os.DirEntry[str]) -> int:
    """The bytes of a file; 0 if it is gone by now: a batch that ends deletes empty result files meanwhile."""
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0


def _owned(owner: str | None) -> tuple[str, list[object]]:
    """Condition and values that select the objects of one owner; None: of all."""
    return ("1", []) if owner is None else ("json_extract(CAST(body AS TEXT), '$.owner') = ?", [owner])


def _insert_file(database: sqlite3.Connection, file: StoredFile) -> None:
    database.execute(
        "INSERT OR REPLACE INTO files (id, purpose, expires_at, body) VALUES (?, ?, ?, ?)",
        (file.id, file.purpose, file.expires_at, msgspec.json.encode(file)),
    )
