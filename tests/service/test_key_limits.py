"""Limits of a key as values: buckets, budgets and the file that sets them. No clock."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.service.keys.limits import Bucket, Spending, duration_text, period_end, period_start
from ridgeline.service.keys.settings import read_keys
from ridgeline.service.keys.usage import UsageLedger, Used


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def test_a_bucket_refills_evenly_and_holds_a_minute() -> None:
    bucket = Bucket(60, 0.0)
    for _ in range(60):
        assert bucket.wait_s(1, 0.0) == 0
        bucket.take(1, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0) and bucket.wait_s(3, 0.5) == pytest.approx(2.5)
    assert bucket.wait_s(1, 1.0) == pytest.approx(0.0) and bucket.level(1000.0) == 60


def test_a_bucket_in_debt_allows_nothing_until_it_is_paid() -> None:
    bucket = Bucket(600, 0.0)
    bucket.take(900, 0.0)
    assert bucket.level(0.0) == -300 and bucket.wait_s(1, 0.0) == pytest.approx(30.1)
    assert bucket.full_s(0.0) == pytest.approx(90.0)


def test_more_than_a_minute_allows_needs_a_full_bucket() -> None:
    bucket = Bucket(100, 0.0)
    assert bucket.wait_s(5000, 0.0) == 0
    bucket.take(1, 0.0)
    assert bucket.wait_s(5000, 0.0) == pytest.approx(0.6)


def test_a_new_limit_keeps_what_is_used() -> None:
    bucket = Bucket(100, 0.0)
    bucket.take(80, 0.0)
    bucket.resize(200, 0.0)
    assert bucket.level(0.0) == 120
    bucket.resize(50, 0.0)
    assert bucket.level(0.0) == -30


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(50.0) == 0 and bucket.level(101.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("now", "day", "month", "next_month"),
    [
        ("2026-12-31T23:59:59", "2026-12-31", "2026-12-01", "2027-01-01"),
        ("2028-02-29T00:00:00", "2028-02-29", "2028-02-01", "2028-03-01"),
    ],
)
def test_periods_are_those_of_utc(now: str, day: str, month: str, next_month: str) -> None:
    assert period_start("day", at(now)) == at(day) and period_start("month", at(now)) == at(month)
    assert period_end("day", at(now)) == at(day) + 86_400 and period_end("month", at(now)) == at(next_month)
    assert period_start("total", at(now)) == 0 and period_end("total", at(now)) is None


def test_a_budget_is_renewed_with_its_period() -> None:
    now = at("2026-11-30T12:00:00")
    spending = Spending({"day": 0.5, "month": 3.0, "total": 9.0}, now)
    budget = {"day": 1.0, "month": 4.0, "total": 20.0}
    assert spending.exhausted(budget, now) is None
    spending.add(0.5, now)
    assert spending.exhausted(budget, now) == "day"
    spending.add(0.5, now)
    assert spending.of("month", now) == 4.0
    tomorrow = now + 86_400
    assert spending.exhausted(budget, tomorrow) is None and spending.of("total", tomorrow) == 10.0
    spending.add(10.0, tomorrow)
    assert spending.exhausted(budget, tomorrow) == "total", "the one that ends last"
    assert spending.of("day", tomorrow) == 10.0


@pytest.mark.parametrize(("seconds", "text"), [(0, "0ms"), (0.0123, "12ms"), (1.5, "1.5s"), (7, "7s"), (360.2, "6m0s")])
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


# --- the file -------------------------------------------------------------------------------------------------------------

SHA = hashlib.sha256(b"bee").hexdigest()


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(
        "ann:\n  key: ant\n  requests_per_minute: 60\n  tokens_per_minute: 1000\n  concurrent_requests: 2\n  priority: -5\n"
        "  budget: {day: 1.5, total: 20}\n  models: [a, b]\n  expires: 2027-01-31\n"
        f"bob:\n  key_sha256: {SHA.upper()}\n  expires: 2027-01-31T12:00:00+01:00\ncat: {{key: cow, expires: '2027-01-31T12:00'}}\n"
    )
    ann, bob, cat = read_keys(file).values()
    assert (ann.digest, bob.digest) == (hashlib.sha256(b"ant").digest(), hashlib.sha256(b"bee").digest())
    assert (ann.requests_per_minute, ann.tokens_per_minute, ann.concurrent_requests, ann.priority) == (60, 1000, 2, -5)
    assert ann.budget == {"day": 1.5, "total": 20.0} and ann.models == {"a", "b"} and bob.budget is None
    assert (ann.expires, bob.expires, cat.expires) == (at("2027-02-01"), at("2027-01-31T11:00"), at("2027-01-31T12:00"))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{}", "has no keys"),
        ("a b: {key: x}", "API key 'a b' is not valid: give letters"),
        ("admin: {key: x}", "neither admin nor default"),
        ("ann: hush", "a mapping with key or key_sha256"),
        ("ann: {priority: 1}", "either key or key_sha256"),
        (f"ann: {{key: x, key_sha256: {SHA}}}", "either key or key_sha256"),
        ("ann: {key: 12345678}", "key of the API key 'ann' is not valid: give text in quotes"),
        ("ann: {key: ' hush '}", "without blanks"),
        ("ann: {key_sha256: hush}", "64 hexadecimal digits"),
        (
            "ann: {key: x, rpm: 3}",
            "rpm of the API key 'ann' is not valid: give a known setting: key, .*requests_per_minute",
        ),
        ("ann: {key: x, requests_per_minute: 0}", "a whole number of 1 or more"),
        ("ann: {key: x, tokens_per_minute: true}", "a whole number of 1 or more"),
        ("ann: {key: x, priority: low}", "a whole number; requests with a lower one run first"),
        ("ann: {key: x, budget: 3}", "USD for one or more of day, month and total"),
        ("ann: {key: x, budget: {week: 3}}", "USD for one or more of day, month and total"),
        ("ann: {key: x, budget: {day: -1}}", "USD of 0 or more"),
        ("ann: {key: x, budget: {day: .nan}}", "USD of 0 or more"),
        ("ann: {key: x, models: m}", "a list of names"),
        ("ann: {key: x, expires: soon}", "a date, as in 2027-01-31"),
        ("ann: {key: x}\nbob: {key: x}", "'bob' is not valid: give another key than ann"),
        ("ann: {key: x}\nann: {key: y}", "appears twice"),
        ("ann: {key: hush", "is not valid YAML: line 1, column 16: expected"),
        ("ann: {key: *hush}", "is not valid YAML: line 1, column 12: found undefined alias ..."),
        ("ann:\n  key: hush\n key: hush", "is not valid YAML: line 3"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=match) as caught:
        read_keys(file)
    assert "hush" not in caught.value.message


# --- the ledger of use ----------------------------------------------------------------------------------------------------


def test_use_is_kept_over_a_restart(tmp_path: Path) -> None:
    now = at("2026-11-30T12:34:56")
    ledger = UsageLedger(tmp_path / "state" / "usage.sqlite")
    ledger.add("ann", Used(1, 10, 4, 5, 0.25), now)
    ledger.flush()
    ledger.add("ann", Used(1, 20, 0, 5, 0.5), now)
    ledger.add("bob", Used(1, 1, 0, 1, 0.125), now - 86_400)
    together = [("bob", 1, 1, 0.125), ("ann", 2, 30, 0.75)]
    for state in (ledger, None, UsageLedger(tmp_path / "state" / "usage.sqlite")):
        if state is None:
            ledger.flush()
            ledger.close()
            continue
        rows = list(state.hours(None, 0, now))
        assert [(key, used.requests, used.prompt_tokens, used.cost) for _, key, used in rows] == together
        assert rows[1][0] == at("2026-11-30T12:00")
        assert [key for _, key, _ in state.hours("ann", 0, now)] == ["ann"]
        assert [key for _, key, _ in state.hours(None, now - 60, now)] == ["ann"]
        assert state.spent("ann", now) == {"day": 0.75, "month": 0.75, "total": 0.75}
        assert state.spent("bob", now) == {"day": 0, "month": 0.125, "total": 0.125}


def test_use_that_cannot_be_written_is_kept(tmp_path: Path) -> None:
    """Another process holds the file: nothing is lost, and nothing counts twice."""
    path = tmp_path / "usage.sqlite"
    ledger = UsageLedger(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        ledger.add("ann", Used(1, 10, 0, 5, 0.25), 7200.0)
        with pytest.raises(sqlite3.OperationalError):
            ledger.flush()
        ledger.add("ann", Used(1, 1, 0, 0, 0.0), 7200.0)
    for _ in range(2):
        ledger.flush()
        assert [(hour, used.requests, used.prompt_tokens) for hour, _, used in ledger.hours("ann", 0, 9000)] == [
            (7200, 2, 11)
        ]


def test_a_usage_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a database, but long enough to be read as one" * 20)
    for path in (tmp_path / "file", tmp_path / "file" / "usage.sqlite"):
        with pytest.raises(ConfigError, match="--usage-file"):
            UsageLedger(path)
