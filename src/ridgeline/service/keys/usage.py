"""What each key has used, by hour, in an SQLite file that outlives the server.

Ended requests are counted in memory, and written about once a second in one transaction. A server that is killed loses what it
has not written.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.service.batches.settings import OFF, state_folder
from ridgeline.service.keys.limits import period_start
from ridgeline.service.keys.settings import PERIODS

HOUR_S = 3600
_PATIENCE_S = 0.5
"""Seconds for which another process may hold the file."""
_COLUMNS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "cost")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    hour INTEGER NOT NULL, key TEXT NOT NULL, requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, cost REAL NOT NULL, PRIMARY KEY (key, hour)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_by_hour ON usage (hour);
"""
_ADD = (
    "INSERT INTO usage (hour, key, requests, prompt_tokens, cached_tokens, output_tokens, cost) VALUES (?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (key, hour) DO UPDATE SET " + ", ".join(f"{name} = {name} + excluded.{name}" for name in _COLUMNS)
)


class Used(msgspec.Struct):
    """Sums of ended requests. cost: USD."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0

    def add(self, other: Used) -> None:
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class UsageLedger:
    """path: of the file; None: in memory only. Raises ConfigError if the file cannot be used."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._disk, self._lock = threading.Lock(), threading.Lock()
        """Held while the database is used; while the counts in memory are. `add` never waits for the disk."""
        self._pending: dict[tuple[int, str], Used] = {}
        self._database = self._connect()

    def _connect(self) -> sqlite3.Connection:
        try:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            place = ":memory:" if self._path is None else self._path
            database = sqlite3.connect(place, _PATIENCE_S, check_same_thread=False, isolation_level=None)
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"The usage file {self._path} cannot be used ({error}): give another --usage-file, or --usage-file off.",
                param="usage_file",
            ) from error
        return database

    def add(self, key: str, used: Used, now: float) -> None:
        """Count ended requests of a key at `now`, unix seconds."""
        place = int(now // HOUR_S) * HOUR_S, key
        with self._lock:
            self._pending.setdefault(place, Used()).add(used)

    def flush(self) -> None:
        """Write what is counted. Waits for the disk: call it in a thread. Raises sqlite3.Error, and keeps the counts, if it is
        full."""
        with self._disk:
            with self._lock:
                rows, self._pending = self._pending, {}
            if not rows:
                return
            try:
                self._database.execute("BEGIN IMMEDIATE")
                values = [(*place, *msgspec.structs.astuple(used)) for place, used in rows.items()]
                self._database.executemany(_ADD, values)
                self._database.execute("COMMIT")
            except sqlite3.Error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                with self._lock:
                    for place, used in rows.items():
                        self._pending.setdefault(place, Used()).add(used)
                raise

    def hours(self, key: str | None, since: float, until: float) -> Iterator[tuple[int, str, Used]]:
        """(hour, key, sums) of one or all keys, from the hour of `since` up to `until`, in order, with what is not written yet."""
        first = int(since // HOUR_S) * HOUR_S
        where, values = ("", ()) if key is None else (" AND key = ?", (key,))
        query = f"SELECT hour, key, {', '.join(_COLUMNS)} FROM usage WHERE hour >= ? AND hour < ?{where}"
        with self._disk:
            rows = {
                (hour, name): Used(*sums)
                for hour, name, *sums in self._database.execute(query, (first, until, *values))
            }
            with self._lock:
                for (hour, name), used in self._pending.items():
                    if first <= hour < until and key in (None, name):
                        rows.setdefault((hour, name), Used()).add(used)
        for (hour, name), used in sorted(rows.items(), key=lambda row: row[0]):
            yield hour, name, used

    def spent(self, key: str, now: float) -> Mapping[str, float]:
        """USD of a key since the start of each period."""
        return {period: self._cost_since(key, period_start(period, now)) for period in PERIODS}

    def _cost_since(self, key: str, since: float) -> float:
        with self._disk:
            query = "SELECT total(cost) FROM usage WHERE key = ? AND hour >= ?"
            ((stored,),) = self._database.execute(query, (key, since))
            with self._lock:
                pending = (used.cost for (hour, name), used in self._pending.items() if name == key and hour >= since)
                return float(stored) + sum(pending)

    def close(self) -> None:
        with self._disk:
            self._database.close()


def usage_path(config: ServiceConfig, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file of --usage-file. The default is one of the user's state for each port, as for batches."""
    if config.usage_file == OFF:
        return None
    if config.usage_file:
        return Path(config.usage_file).expanduser()
    folder = state_folder(environ)
    return None if folder is None or config.port == 0 else folder / f"usage-{config.port}.sqlite"
