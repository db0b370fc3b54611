"""The file of --api-keys: a mapping from the name of each key to its settings."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError, shown
from ridgeline.core.resolve import read_file

PERIODS = ("day", "month", "total")
"""Periods of a budget, in UTC. `total` never ends."""
ADMIN, DEFAULT = "admin", "default"
"""Names of the keys of --admin-api-key and --api-key in the usage ledger."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


def digest(secret: bytes) -> bytes:
    """What the server keeps of a key."""
    return hashlib.sha256(secret).digest()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. None: no limit.

    digest: SHA-256 of the key. priority: the most urgent priority of its requests; lower runs first. budget: USD by period.
    models: names that it may request; empty: all. expires: unix seconds.
    """

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    priority: int = 0
    budget: Mapping[str, float] | None = None
    models: frozenset[str] = frozenset()
    expires: float | None = None


def check_keys(config: ServiceConfig) -> None:
    """Raises ConfigError for options that need a file of keys, and for a file that is not valid."""
    if config.api_keys:
        read_keys(Path(config.api_keys).expanduser())
        return
    for name, value in (("isolate_keys", config.isolate_keys), ("usage_file", config.usage_file)):
        if value:
            raise ConfigError(f"{name} has an effect only with API keys: give --api-keys FILE, too.", param=name)


def read_keys(path: Path) -> dict[str, ApiKey]:
    """The keys of a file, by name. Raises ConfigError that names key, setting and remedy."""
    keys: dict[str, ApiKey] = {}
    names: dict[bytes, str] = {}
    for name, settings in _content(path).items():
        if not _NAME.fullmatch(name) or name in (ADMIN, DEFAULT):
            raise _wrong(name, "", f"letters, digits, '.', '_' and '-' as its name, and neither {ADMIN} nor {DEFAULT}")
        if not isinstance(settings, dict):
            raise _wrong(name, "", "a mapping with key or key_sha256")
        keys[name] = key = _read_key(name, settings)
        if key.digest in names:
            raise _wrong(name, "", f"another key than {names[key.digest]}")
        names[key.digest] = name
    if not keys:
        raise ConfigError(f"The file {path} of --api-keys has no keys: give at least one.", param="api_keys")
    return keys


def _content(path: Path) -> dict[str, Any]:
    """The file's mapping. Raises ConfigError without what it quotes, which may be a secret."""
    try:
        return read_file(path)
    except ConfigError as error:
        raise ConfigError(_QUOTED.sub("...", error.message), param="api_keys") from None


def _read_key(name: str, settings: Mapping[str, Any]) -> ApiKey:
    secrets = [setting for setting in ("key", "key_sha256") if settings.get(setting) is not None]
    if len(secrets) != 1:
        raise _wrong(name, "", "either key or key_sha256")
    values: dict[str, Any] = {}
    for setting, value in settings.items():
        if setting not in _READERS:
            raise _wrong(name, setting, "a known setting: " + ", ".join(_READERS))
        if value is None:
            continue
        try:
            values["digest" if setting in secrets else setting] = _READERS[setting](value)
        except ValueError as error:
            raise _wrong(name, setting, str(error)) from None
    return ApiKey(name, **values)


def _wrong(name: str, setting: str, expected: str) -> ConfigError:
    """Names the setting, and never its value, which may be a secret."""
    place = f"{setting} of the API key {shown(name)}" if setting else f"The API key {shown(name)}"
    return ConfigError(f"{place} is not valid: give {expected}.", param="api_keys")


def _secret(value: Any) -> bytes:
    if not isinstance(value, str) or not value or value != value.strip():
        raise ValueError("text in quotes, without blanks at its ends")
    return digest(value.encode())


def _sha256(value: Any) -> bytes:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError("64 hexadecimal digits, as `printf %s KEY | sha256sum` prints them")
    return bytes.fromhex(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 53:
        raise ValueError("a whole number of 1 or more")
    return value


def _priority(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 31) <= value < 1 << 31:
        raise ValueError("a whole number; requests with a lower one run first")
    return value


def _budget(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not value or not set(value) <= set(PERIODS):
        raise ValueError("USD for one or more of day, month and total")
    if not all(
        isinstance(usd, int | float) and not isinstance(usd, bool) and 0 <= usd < math.inf for usd in value.values()
    ):
        raise ValueError("USD of 0 or more for each period")
    return {period: float(usd) for period, usd in value.items()}


def _models(value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not value or not all(isinstance(model, str) for model in value):
        raise ValueError("a list of names")
    return frozenset(value)


def _expires(value: Any) -> float:
    """Unix seconds of a date (its end, UTC) or a time (UTC if it names no zone). YAML and TOML read them as values."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        if isinstance(value, str) and len(value) == len("2027-01-31"):
            moment = moment.date()
    except ValueError:
        moment = None
    if isinstance(moment, datetime):
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(moment, date):
        return datetime(moment.year, moment.month, moment.day, tzinfo=UTC).timestamp() + 86_400
    raise ValueError("a date, as in 2027-01-31, or a time, as in 2027-01-31T12:00:00Z")


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "key": _secret,
    "key_sha256": _sha256,
    "requests_per_minute": _count,
    "tokens_per_minute": _count,
    "concurrent_requests": _count,
    "priority": _priority,
    "budget": _budget,
    "models": _models,
    "expires": _expires,
}
