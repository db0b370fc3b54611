"""The keys of a server, and the state of each: what it may still send, and what it has spent."""

from __future__ import annotations

import hmac
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError, Unauthorized
from ridgeline.metrics import RequestRecord
from ridgeline.service.batches.objects import PRICE_FACTOR
from ridgeline.service.call import Call, Payer
from ridgeline.service.keys.errors import LimitReached, ModelNotAllowed, OverBudget
from ridgeline.service.keys.limits import Bucket, Spending, duration_text, period_end
from ridgeline.service.keys.settings import ADMIN, DEFAULT, ApiKey, digest, read_keys
from ridgeline.service.keys.usage import UsageLedger, Used, usage_path

_CONCURRENCY_RETRY_S = 1.0

log = logging.getLogger(__name__)


class Holder(Payer):
    """Who sends a request. This base class is a client without limits.

    name: of the key; "" without keys. admin: may use the routes of operators.
    """

    limited = False
    """Whether it has limits, which the rows of a router's batch would pass by."""

    def __init__(self, name: str, *, admin: bool) -> None:
        self.name, self.admin = name, admin

    def check_model(self, *names: str) -> None:
        """Raises ModelNotAllowed if the client may use the model under none of its names."""

    def bind(self, call: Call) -> tuple[Call, tuple[str, ...]]:
        """The call as this client may run it, and the fields that this changes."""
        return replace(call, payer=self), ()

    def check(self, call: Call) -> None:
        """Raises LimitReached or OverBudget for a call that may not start now."""

    def check_budget(self) -> None:
        """Raises OverBudget."""

    @contextmanager
    def running(self, call: Call) -> Iterator[None]:
        """Charge a call that starts."""
        yield

    def headers(self) -> dict[str, str]:
        """The x-ratelimit headers of an answer."""
        return {}

    def expired(self) -> bool:
        return False


class UsageHolder(Holder):
    """A client whose use is counted. isolated: it shares cached prefixes with no other client."""

    def __init__(self, name: str, usage: UsageLedger, *, admin: bool, isolated: bool) -> None:
        super().__init__(name, admin=admin)
        self._usage, self._isolated = usage, isolated

    def bind(self, call: Call) -> tuple[Call, tuple[str, ...]]:
        salt = f"key {self.name}\0{call.salt}" if self._isolated else call.salt
        return replace(call, payer=self, salt=salt), ()

    def charge(self, record: RequestRecord, cost: float) -> float:
        if not _pays(record):
            return 0.0
        cost *= PRICE_FACTOR if record.batch else 1.0
        used = Used(1, record.prompt_tokens, record.cached_tokens, record.output_tokens, cost)
        self._usage.add(self.name, used, time.time())
        return cost


class KeyHolder(UsageHolder):
    """A key of the file. `key` is replaced when the file changes; what was used stays used."""

    limited = True

    def __init__(
        self, key: ApiKey, usage: UsageLedger, *, isolated: bool, clock: Callable[[], float] = time.time
    ) -> None:
        """clock: unix seconds."""
        super().__init__(key.name, usage, admin=False, isolated=isolated)
        self._clock = clock
        self._spending = Spending(usage.spent(key.name, clock()), clock())
        self._buckets: dict[str, Bucket] = {}
        self._running = 0
        self.replace(key)

    def replace(self, key: ApiKey) -> None:
        """Take new settings."""
        self.key = key
        now = time.monotonic()
        for kind, limit in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)):
            if limit is None:
                self._buckets.pop(kind, None)
            elif kind in self._buckets:
                self._buckets[kind].resize(limit, now)
            else:
                self._buckets[kind] = Bucket(limit, now)

    def expired(self) -> bool:
        return self.key.expires is not None and self._clock() >= self.key.expires

    def check_model(self, *names: str) -> None:
        if self.key.models and self.key.models.isdisjoint(names):
            raise ModelNotAllowed(
                f"The API key {self.name!r} may not use the model {names[0][:80]!r}: ask for another model, or another key.",
                param="model",
            )

    def bind(self, call: Call) -> tuple[Call, tuple[str, ...]]:
        """A request may be less urgent than its key, and not more."""
        call, _ = super().bind(call)
        if call.priority >= self.key.priority:
            return call, ()
        return replace(call, priority=self.key.priority), ("priority",) if call.priority else ()

    def check(self, call: Call) -> None:
        self.check_budget()
        key, now = self.key, time.monotonic()
        if key.concurrent_requests is not None and self._running >= key.concurrent_requests:
            raise self._reached(
                f"{self._running} requests run, and at most {key.concurrent_requests} may", _CONCURRENCY_RETRY_S
            )
        for kind, amount in (("requests", 1), ("tokens", _prompt_tokens(call))):
            bucket = self._buckets.get(kind)
            if bucket is not None and (wait_s := bucket.wait_s(amount, now)) > 0:
                raise self._reached(f"it may use {bucket.per_minute} {kind} per minute", wait_s)

    def check_budget(self) -> None:
        """Raises OverBudget."""
        now, budget = self._clock(), self.key.budget
        period = None if budget is None else self._spending.exhausted(budget, now)
        if period is None or budget is None:
            return
        end = period_end(period, now)
        remedy = (
            "ask for a higher one"
            if end is None
            else f"it is renewed at {datetime.fromtimestamp(end, UTC):%Y-%m-%dT%H:%MZ}"
        )
        raise OverBudget(
            f"The API key {self.name!r} has spent its budget of {budget[period]:g} USD ({period}): {remedy}."
        )

    def _reached(self, reason: str, wait_s: float) -> LimitReached:
        return LimitReached(
            f"The API key {self.name!r} has reached its limit: {reason}. Retry after the seconds in the header retry-after.",
            retry_after_s=wait_s,
        )

    @contextmanager
    def running(self, call: Call) -> Iterator[None]:
        now = time.monotonic()
        for kind, amount in (("requests", 1), ("tokens", _prompt_tokens(call))):
            if kind in self._buckets:
                self._buckets[kind].take(amount, now)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def charge(self, record: RequestRecord, cost: float) -> float:
        cost = super().charge(record, cost)
        self._spending.add(cost, self._clock())
        if "tokens" in self._buckets and _pays(record):
            tokens = record.output_tokens + (record.prompt_tokens if record.batch else 0)
            self._buckets["tokens"].take(tokens, time.monotonic())
        return cost

    def headers(self) -> dict[str, str]:
        headers, now = {}, time.monotonic()
        for kind, bucket in self._buckets.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level(now))))
            headers[f"x-ratelimit-reset-{kind}"] = duration_text(bucket.full_s(now))
        return headers


def _pays(record: RequestRecord) -> bool:
    """Whether a request is counted. A row of a batch that was cut off has no answer: it runs again, and is counted then."""
    return record.cut != "refused" and not (record.batch and record.cut)


def _prompt_tokens(call: Call) -> int:
    return sum(map(len, call.prompts))


ANYONE = Holder("", admin=True)
"""Who sends requests to a server without keys."""
UNKNOWN = Holder("", admin=False)
"""Who sends no key to a server that requires one only of operators."""


class Keyring:
    """All keys. `holder` says whose a key is, and `reload` reads the file again."""

    def __init__(self, config: ServiceConfig) -> None:
        """Raises ConfigError if the file of keys, or the usage file, cannot be used."""
        self._config = config
        self._file = Path(config.api_keys).expanduser() if config.api_keys else None
        self._version: tuple[int, ...] = ()
        """Of the file when it was last read."""
        self.usage: UsageLedger | None = None
        self._fixed: list[tuple[bytes, Holder]] = []
        """The keys of --api-key and --admin-api-key."""
        self._holders: dict[str, KeyHolder] = {}
        """By name; also those whose key was removed, because their requests may still run."""
        self._current: list[KeyHolder] = []
        self._prices: set[float] = set()
        """USD per hour of the devices of this server, of each model that was loaded."""
        keys = {} if self._file is None else self._read(self._file)
        if self._file is not None:
            self.usage = UsageLedger(usage_path(config))
        self._add_fixed()
        self._take(keys)

    def _add_fixed(self) -> None:
        config = self._config
        for secret, name in ((config.api_key, DEFAULT), (config.admin_api_key, ADMIN)):
            if secret is not None:
                admin = name == ADMIN or config.admin_api_key is None
                self._fixed.append((digest(_raw(secret)), self._make(name, admin=admin)))

    def _make(self, name: str, *, admin: bool) -> Holder:
        if self.usage is None:
            return Holder(name, admin=admin)
        return UsageHolder(name, self.usage, admin=admin, isolated=self._config.isolate_keys)

    @property
    def needed(self) -> bool:
        """Whether ordinary routes require a key."""
        return self._config.api_key is not None or self._file is not None

    def holder(self, sent: str, *, anonymous: bool) -> Holder:
        """Whose key this is. Compares with every key, in constant time. Raises Unauthorized.

        anonymous: the route is open to all on a server that requires a key only of operators.
        """
        received, match = digest(_raw(sent)), None
        for known, holder in [*self._fixed, *((holder.key.digest, holder) for holder in self._current)]:
            if hmac.compare_digest(received, known):
                match = holder
        if match is not None and match.expired():
            raise Unauthorized(f"The API key {match.name!r} has expired: ask for a new one.")
        if match is not None:
            return match
        if not self._fixed and not self._current:
            return ANYONE
        if anonymous and not self.needed:
            return UNKNOWN
        raise Unauthorized(
            "The API key is missing or wrong: send the header `authorization: Bearer KEY` or `x-api-key: KEY`."
        )

    def payer(self, name: str) -> Holder:
        """The client with this name, to whom the rows of a batch belong."""
        known = {holder.name: holder for _, holder in self._fixed} | self._holders
        return known.get(name) or (ANYONE if self.usage is None else self._make(name, admin=False))

    # --- the file ---------------------------------------------------------------------------------------------------

    def _read(self, path: Path) -> dict[str, ApiKey]:
        self._version = _version(path)
        return read_keys(path)

    def _take(self, keys: Mapping[str, ApiKey]) -> None:
        assert self.usage is not None or not keys
        for key in keys.values():
            if key.name in self._holders:
                self._holders[key.name].replace(key)
            elif self.usage is not None:
                self._holders[key.name] = KeyHolder(key, self.usage, isolated=self._config.isolate_keys)
        self._current = [self._holders[name] for name in keys]

    def set_price(self, price: float) -> None:
        """The price of a device in USD per hour, when it is known. Raises ConfigError if budgets need one."""
        self._check_prices((holder.key for holder in self._current), {price})
        self._prices.add(price)

    def _check_prices(self, keys: Iterable[ApiKey], prices: Collection[float]) -> None:
        unpriced = next((key.name for key in keys if key.budget is not None), None)
        if unpriced is not None and not all(prices):
            raise ConfigError(
                f"The API key {unpriced!r} has a budget, but the price of this device is not known: give --price-per-hour.",
                param="price_per_hour",
            )

    def reload(self, *, changed_only: bool = True) -> bool:
        """Read the file again, if it has changed. A file that is not valid changes nothing. Returns whether new keys are in
        force."""
        if self._file is None or (changed_only and _version(self._file) == self._version):
            return False
        try:
            keys = self._read(self._file)
            self._check_prices(keys.values(), self._prices)
            self._take(keys)
        except (ConfigError, sqlite3.Error) as error:
            log.error("the API keys stay as they were: %s", error)
            return False
        log.warning("%d API keys are in force from %s", len(keys), self._file)
        return True

    def flush(self) -> None:
        """Write the usage. Waits for the disk: call it in a thread."""
        if self.usage is not None:
            try:
                self.usage.flush()
            except sqlite3.Error as error:
                log.error("the usage of API keys cannot be stored: %s", error)

    def close(self) -> None:
        if self.usage is not None:
            self.flush()
            self.usage.close()


def _version(path: Path) -> tuple[int, ...]:
    """Changes when the file changes or is replaced."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _raw(text: str) -> bytes:
    """The bytes that were sent, including bytes that are not valid text."""
    return text.encode("utf-8", "surrogateescape")
