"""The last ended requests, indexed by both of their ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ridgeline.metrics.records import RequestRecord


class RequestIndex:
    """At most `capacity` request records. A new record replaces the oldest one and its index entries.

    An id finds its newest record. Clients choose x-request-id, so it may repeat, and it may equal the id of another answer.
    Therefore each kind of id has its own index.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: deque[RequestRecord] = deque()
        self._by_id: dict[str, RequestRecord] = {}
        self._by_request_id: dict[str, RequestRecord] = {}

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        if len(self._records) == self._capacity:
            oldest = self._records.popleft()
            for index, record_id in ((self._by_id, oldest.id), (self._by_request_id, oldest.request_id)):
                if index.get(record_id) is oldest:
                    del index[record_id]
        self._records.append(record)
        self._by_id[record.id] = record
        if record.request_id:
            self._by_request_id[record.request_id] = record

    def find(self, request_id: str) -> RequestRecord | None:
        """Find the record whose answer has this id, else the newest one with this x-request-id, else None."""
        return self._by_id.get(request_id) or self._by_request_id.get(request_id)

    def recent(self, limit: int) -> list[RequestRecord]:
        """Return the last `limit` records, the newest first."""
        return [record for _, record in zip(range(limit), reversed(self._records), strict=False)]
