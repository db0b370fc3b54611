"""The ledger's rows: the last ended requests, found by either of their ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ridgeline.metrics.records import RequestRecord


class Rows:
    """At most `capacity` records; the oldest leaves first, and its index entries with it.

    Each id indexes its newest record. Clients choose x-request-id, so it may repeat, and may equal another body's id:
    the two kinds of ids have an index each.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: deque[RequestRecord] = deque()
        self._by_id: dict[str, RequestRecord] = {}
        self._by_request_id: dict[str, RequestRecord] = {}

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, record: RequestRecord) -> None:
        if len(self._rows) == self._capacity:
            oldest = self._rows.popleft()
            for index, name in ((self._by_id, oldest.id), (self._by_request_id, oldest.request_id)):
                if index.get(name) is oldest:
                    del index[name]
        self._rows.append(record)
        self._by_id[record.id] = record
        if record.request_id:
            self._by_request_id[record.request_id] = record

    def find(self, name: str) -> RequestRecord | None:
        """The record whose body has this id, else the newest whose x-request-id it is; None when there is none."""
        return self._by_id.get(name) or self._by_request_id.get(name)

    def recent(self, limit: int) -> list[RequestRecord]:
        """The newest first."""
        return [record for _, record in zip(range(limit), reversed(self._rows), strict=False)]
