"""Resolves the configuration once: flags > environment > file > model and hardware > defaults. Records each value's origin.

All sources share one reader: a value means the same as a flag, as `RIDGELINE_MAX_MODEL_LEN` and as a key of a file.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ridgeline.core.adapters import read_modules
from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.logs import FORMATS, LEVELS
from ridgeline.core.quantization import check_format
from ridgeline.core.slo import Slo, reader_pace
from ridgeline.core.token_prices import TokenPrices

CONFIGS: tuple[type, ...] = (ModelConfig, EngineConfig, ServiceConfig)
ENVIRONMENT = "RIDGELINE_"
STANDARD_INPUT = Path("/dev/stdin")
SECRETS = frozenset({"admin_api_key", "api_key", "engine_secret", "moderation_api_key", "ssl_keyfile_password"})

CHOICES: Mapping[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "load_format": ("auto", "dummy"),
    "asleep_requests": ("wake", "refuse"),
    "metrics_alias": ("", "vllm", "old", "sglang"),
    "moderation_mode": ("buffer", "window", "after"),
    "moderation_failure": ("closed", "open"),
    "hand_over": ("local", "tcp"),
    "remote_engines": ("", "prefill", "decode"),
    "log_format": FORMATS,
    "log_level": LEVELS,
    "pooling": ("auto", "last", "mean", "cls", "yes-no"),
}
BOUNDS: Mapping[str, tuple[float, float]] = {
    "max_model_len": (1, 1 << 30),
    "max_loras": (1, 1 << 10),
    "max_lora_rank": (1, 256),
    "max_num_seqs": (1, 1 << 16),
    "max_num_batched_tokens": (1, 1 << 24),
    "gpu_memory_utilization": (0.01, 1.0),
    "kv_cache_memory": (1, 1 << 50),
    "block_size": (1, 1 << 12),
    "cache_pin_share": (0.0, 0.9),
    "tensor_parallel_size": (1, 1 << 10),
    "data_parallel_size": (1, 1 << 10),
    "pipeline_parallel_size": (1, 1 << 10),
    "context_parallel_size": (1, 1 << 10),
    "cpu_offload_gb": (0.0, 1 << 20),
    "kv_offload_gb": (0.0, 1 << 30),
    "kv_disk_gb": (0.0, 1 << 30),
    "kv_offload_ttl": (0.0, 1 << 40),
    "steps_in_flight": (0, 16),
    "threads": (1, 1 << 12),
    "draft_tokens": (1, 63),
    "port": (0, 65535),
    "nnodes": (1, 1 << 16),
    "master_port": (1, 65535),
    "max_queue": (0, 1 << 30),
    "max_body_mb": (0.001, 1 << 20),
    "batch_max_gb": (0.001, 1 << 20),
    "moderation_window": (1, 1 << 20),
    "moderation_timeout_s": (0.01, 3600),
    "keep_alive_s": (0.01, 1 << 20),
    "drain_s": (0.0, 1 << 20),
    "engine_restarts": (0, 1 << 20),
    "engine_restart_minutes": (0.01, 1 << 20),
    "response_store_mb": (0.0, 1 << 20),
    "answer_cache_mb": (0.0, 1 << 20),
    "prefill_engines": (0, 64),
    "decode_engines": (0, 64),
    "models_memory_gb": (0.01, 1 << 20),
    "models_load_s": (0.01, 1 << 20),
    "idle_sleep_minutes": (0.0, 1 << 20),
    "price_per_hour": (0.0, 1 << 20),
}
CHECKS: Mapping[str, Callable[[str], object]] = {
    "lora_modules": read_modules,
    "quantization": check_format,
    "slo": Slo.parse,
    "reader_pace": reader_pace,
    "token_prices": TokenPrices.parse,
}
"""Checks of options with a syntax of their own. Each raises ConfigError that lists the known values."""

INTEGER_TEXT = "a whole number (8192, 8K = 8192, 8k = 8000)"
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
# Kubernetes sets these variables in each container if a service is named "ridgeline". They are not options.
_KUBERNETES = re.compile(r"RIDGELINE_(SERVICE_(HOST|PORT)(_.*)?|PORT_\d+_.*)")


@dataclass(frozen=True, slots=True)
class Resolved:
    """The three configurations, and the origin of each value by field name."""

    model: ModelConfig
    engine: EngineConfig
    service: ServiceConfig
    origins: Mapping[str, str]

    def rows(self) -> list[tuple[str, str, str]]:
        """(field, value, origin) of every option in the order of the dataclasses. Secrets are masked.

        A value that is left to model and hardware reads "auto"; a text that is not set reads "-".
        """
        rows, types = [], option_types()
        for config in (self.model, self.engine, self.service):
            for field in fields(config):
                value = getattr(config, field.name)
                empty = "-" if types[field.name][0] is str else "auto"
                text = "***" if field.name in SECRETS and value else empty if value in (None, "") else str(value)
                rows.append((field.name, text, self.origins[field.name]))
        return rows


def option_fields(configs: Iterable[type] = CONFIGS) -> dict[str, Field[Any]]:
    """Every configuration field by name."""
    return {field.name: field for config in configs for field in fields(config)}


def option_types(configs: Iterable[type] = CONFIGS) -> dict[str, tuple[type, bool]]:
    """Field name -> (its type without None, whether None is allowed)."""
    types = {}
    for config in configs:
        for name, hint in get_type_hints(config).items():
            parts = get_args(hint) if get_origin(hint) is UnionType else (hint,)
            base = next(part for part in parts if part is not NoneType)
            types[name] = (base, NoneType in parts)
    return types


def resolve(
    flags: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    hardware: Mapping[str, Any] | None = None,
) -> Resolved:
    """Choose one value per option.

    flags: field name -> value given by the user (text or typed), absent when not given. hardware: values derived from model and
    machine (`MemoryPlan.chosen`). Raises ConfigError that names the option, its origin and the remedy.
    """
    sources = [
        ("flag", _canonical(flags, "flag")),
        ("environment", _from_environment(environ or {})),
        (f"file {file.name}" if file else "file", _canonical(read_file(file), f"file {file.name}") if file else {}),
        ("model and hardware", dict(hardware or {})),
    ]
    types = option_types()
    values: dict[str, Any] = {}
    origins = dict.fromkeys(types, "default")
    for origin, options in reversed(sources):
        for name, raw in options.items():
            values[name] = parse(name, raw, types[name], origin)
            origins[name] = origin
    model, engine, service = (
        config(**{field.name: values[field.name] for field in fields(config) if field.name in values})
        for config in CONFIGS
    )
    return Resolved(model, engine, service, origins)


def split_options(options: Mapping[str, Any], *configs: type, origin: str = "option") -> tuple[dict[str, Any], ...]:
    """Split keyword arguments into one dict per dataclass and parse them as flags are. Raises ConfigError for unknown names.

    origin: "flag" for options of a command line, so that errors name them as flags.
    """
    known, types = option_fields(configs), option_types(configs)
    for name in options:
        if name not in known:
            raise _unknown(name, origin, known)
    return tuple(
        {
            field.name: parse(field.name, options[field.name], types[field.name], origin)
            for field in fields(config)
            if field.name in options
        }
        for config in configs
    )


def parse(name: str, raw: Any, kind: tuple[type, bool], origin: str) -> Any:
    """Convert an option's value from text (a flag, the environment) or from a typed file. Raises ConfigError."""
    base, optional = kind
    if raw is None or (optional and base is not str and raw == "auto"):
        if optional:
            return None
        raise _bad(name, raw, origin, "a value")
    value: Any = _READERS[base](name, raw, origin)
    # An unset shell variable must not turn authentication off.
    if name in SECRETS and (not value or value != value.strip()):
        problem = f"{_label(name, origin)} is empty or has blanks at its ends"
        raise ConfigError(f"{problem}: give a value without them, or leave the option out.", param=name)
    allowed = CHOICES.get(name)
    if allowed is not None and value not in allowed:
        raise _bad(name, raw, origin, "one of " + ", ".join(word or "(empty)" for word in allowed))
    low, high = BOUNDS.get(name, (value, value))
    if name in BOUNDS and not low <= value <= high:
        raise _bad(name, raw, origin, f"{low:.15g} to {high:.15g}")
    if name in CHECKS:
        CHECKS[name](value)
    return value


def read_file(path: Path) -> dict[str, Any]:
    """Keys of a TOML, JSON or YAML file, or of JSON at STANDARD_INPUT. Raises ConfigError when it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read the configuration file {path}: {error.strerror}.", param="config") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"The configuration file {path} is not UTF-8 text ({error}).", param="config") from None
    readers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".json": lambda text: json.loads(text, object_pairs_hook=_without_duplicates),
        ".yaml": _yaml,
        ".yml": _yaml,
    }
    suffix = ".json" if path == STANDARD_INPUT else path.suffix
    if suffix not in readers:
        raise ConfigError(
            f"The configuration file {path} has an unknown type: name it .toml, .json or .yaml.", param="config"
        )
    try:
        options = readers[suffix](text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {suffix[1:].upper()}: {error}", param="config") from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ConfigError(f"The configuration file {path} must map option names to values.", param="config")
    return options


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        remedy = "run `pip install pyyaml`, or write the file as TOML or JSON."
        raise ConfigError(
            f"A YAML configuration file needs PyYAML, which is not installed: {remedy}", param="config"
        ) from None
    try:
        options, nodes = yaml.safe_load(text) or {}, yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        # Without the lines around it, which may contain a secret.
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{place}{problem or 'it cannot be parsed'}.") from None
    if isinstance(options, dict) and nodes is not None:
        _without_duplicates([(key.value, None) for key, _ in nodes.value])
    return options


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict. Raises ValueError for a repeated name, as the TOML reader does."""
    options = dict(pairs)
    if len(options) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice: keep one")
    return options


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Options among the environment's variables. An empty variable counts as not set."""
    options = {}
    for name, value in environ.items():
        service_link = _KUBERNETES.fullmatch(name) or (name == "RIDGELINE_PORT" and "://" in value)
        if name.startswith(ENVIRONMENT) and value and not service_link:
            options[name.removeprefix(ENVIRONMENT).lower()] = value
    return _canonical(options, "environment")


def _canonical(options: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Rename keys to field names. Accepts dashes and the alternative names of an option."""
    known = option_fields()
    names = {name: name for name in known}
    for name, option in known.items():
        for flag in option.metadata["flags"]:
            if flag.startswith("--"):
                names[flag[2:].replace("-", "_")] = name
    canonical: dict[str, Any] = {}
    for key, value in options.items():
        field = names.get(key.replace("-", "_"))
        if field is None:
            raise _unknown(key, origin, names)
        if field in canonical:
            raise ConfigError(f"{_label(field, origin)} is given twice: keep one.", param=field)
        canonical[field] = value
    return canonical


def _unknown(key: str, origin: str, names: Iterable[str]) -> ConfigError:
    near = difflib.get_close_matches(key.replace("-", "_"), list(names), n=1)
    hint = f"did you mean {_spelled(near[0], origin)}?" if near else "`ridgeline serve --help` lists all options."
    return ConfigError(f"Unknown option {_label(key, origin)}: {hint}", param=key)


def _bad(name: str, raw: Any, origin: str, expected: str) -> ConfigError:
    return ConfigError(f"{_label(name, origin)} is {raw!r}: give {expected}.", param=name)


def _label(name: str, origin: str) -> str:
    """An option as its user wrote it: --max-model-len, RIDGELINE_MAX_MODEL_LEN, or max_model_len (file a.toml)."""
    spelled = _spelled(name, origin)
    return spelled if origin in ("flag", "environment", "option") else f"{spelled} ({origin})"


def _spelled(name: str, origin: str) -> str:
    if origin == "flag":
        return f"--{name.replace('_', '-')}"
    return ENVIRONMENT + name.upper() if origin == "environment" else name


def read_integer(text: str) -> int:
    """Read a whole number as options accept it: with a suffix k, m, g (powers of 1000) or K, M, G (powers of 1024), as in 8k or
    1.5G. Raises ValueError.
    """
    text = text.strip().replace("_", "")
    factor = _SUFFIXES.get(text[-1:], 1)
    if factor == 1:
        return int(text)
    value = float(text[:-1]) * factor
    if not math.isfinite(value) or value != int(value):
        raise ValueError
    return int(value)


def _text(name: str, raw: Any, origin: str) -> str:
    if isinstance(raw, str):
        return raw
    if isinstance(raw, int) and not isinstance(raw, bool):  # YAML reads a key or a name of digits as a number
        return str(raw)
    raise _bad(name, raw, origin, "text")


def _integer(name: str, raw: Any, origin: str) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    try:
        if isinstance(raw, str):
            return read_integer(raw)
    except ValueError:
        pass
    raise _bad(name, raw, origin, INTEGER_TEXT)


def _number(name: str, raw: Any, origin: str) -> float:
    try:
        if isinstance(raw, (int, float, str)) and not isinstance(raw, bool) and (value := float(raw)) == value:
            return value
    except ValueError:
        pass
    raise _bad(name, raw, origin, "a number")


def _boolean(name: str, raw: Any, origin: str) -> bool:
    word = str(raw).strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise _bad(name, raw, origin, "true or false")


_READERS: Mapping[type, Callable[[str, Any, str], Any]] = {str: _text, int: _integer, float: _number, bool: _boolean}
