"""The models file of `ridgeline serve --models`: the name of each model, and its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ridgeline.core.compatibility import Choice, refusals
from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig, option
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import Resolved, read_file, resolve, split_options
from ridgeline.service.batches.settings import OFF
from ridgeline.service.reference import EngineReference, make_reference

SERVICE_OPTIONS = (
    "chat_template",
    "allow_special_in_content",
    "reasoning_parser",
    "tool_call_parser",
    "warm_prefix",
    "pooling",
    "shadow_rate",
    "shadow_url",
    "shadow_model",
    "shadow_limit",
    "idle_sleep_minutes",
    "asleep_requests",
)
"""Options of `ServiceConfig` that a model may have of its own."""
EVICTIONS = ("sleep", "unload")
_NOT_TOGETHER = {
    "model": "name the models in the file",
    "served_model_name": "the keys of the file are the names",
    "node_rank": "leave it out",
}
"""Options that exclude --models, with the remedy."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Options of a model of the file, beside those of `ridgeline serve`."""

    memory_gb: float | None = option(None, "GiB that the model takes while it is awake; needed with --models-memory-gb")
    evict: str | None = option(
        None,
        "what happens when others need its memory: sleep, or unload, which ends its process (default: sleep where it is possible)",
    )


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of the file. memory: bytes that it takes while it is awake, 0 if the file does not say."""

    name: str
    resolved: Resolved
    memory: int
    evict: str


def read_models(
    path: Path,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Path | None = None,
    has_gpu: bool = False,
) -> list[ModelEntry]:
    """The models of a file, in its order. Raises ConfigError that names file, model, option and remedy.

    Args:
        flags: options of the command line, for all models. Options of the file take precedence.
        file: the file of --config.
        has_gpu: this machine has a GPU, which --device auto chooses.
    """
    content = read_file(path)
    models = content.pop("models", None)
    if content or not isinstance(models, dict) or not models:
        raise ConfigError(
            f"{path.name} must have one key, models, with the options of each model by its name.", param="models"
        )
    shared = resolve(flags, environ=environ, file=file)
    _check_shared(shared)
    read = partial(resolve, environ=environ, file=file)
    entries = [
        _read(f"model {str(name)!r} ({path.name})", str(name), options, lambda given: read({**flags, **given}), has_gpu)
        for name, options in models.items()
    ]
    if (limit := shared.service.models_memory_gb) is not None:
        for entry in entries:
            if not 0 < entry.memory <= limit * (1 << 30):
                raise ConfigError(
                    f"memory_gb of model {entry.name!r} ({path.name}) is {entry.memory / (1 << 30):g}: with --models-memory-gb "
                    f"{limit:g}, give each model what it takes, above 0 and at most {limit:g}.",
                    param="memory_gb",
                )
    return entries


def _check_shared(shared: Resolved) -> None:
    """Raise ConfigError for an option that several models cannot have."""
    values = {**vars_of(shared.model), **vars_of(shared.engine), **vars_of(shared.service)}
    for name, remedy in _NOT_TOGETHER.items():
        if values[name]:
            raise ConfigError(f"--{name.replace('_', '-')} and --models exclude each other: {remedy}.", param=name)


def vars_of(config: object) -> dict[str, Any]:
    """The fields of a configuration by name."""
    return {field.name: getattr(config, field.name) for field in fields(config)}  # type: ignore[arg-type]


def _read(
    label: str, name: str, options: Any, read: Callable[[Mapping[str, Any]], Resolved], has_gpu: bool
) -> ModelEntry:
    """A model of the file. label: names it in errors. read: resolves options that the file gives."""
    if not isinstance(options, dict):
        raise ConfigError(f"The options of {label} are not a mapping: give model and others by name.", param="models")
    options = {str(key).replace("-", "_"): value for key, value in options.items()}
    try:
        given = {key: options.pop(key) for key in ("memory_gb", "evict") if key in options}
        placed = Placed(**split_options(given, Placed)[0])
        _check(options, placed)
        resolved = read(options)
        if resolved.model.enable_lora or resolved.model.lora_modules:
            raise ConfigError("adapters need a server with one model: leave --models out.", param="enable_lora")
        _check_shadow(resolved)
        refused = _cannot_sleep(resolved, has_gpu)
        evict = placed.evict or ("unload" if refused else "sleep")
        if evict == "sleep" and (refused or options.get("enable_sleep_mode") is False):
            raise ConfigError(
                f"evict is sleep, but {refused or 'enable_sleep_mode is off'}: use evict: unload.", param="evict"
            )
        if evict == "sleep":
            resolved = read({**options, "enable_sleep_mode": True})
    except ConfigError as error:
        raise ConfigError(f"{label}: {error.message}", param=error.param) from None
    service = replace(resolved.service, served_model_name=name, api_keys="", usage_file="", batch_dir=OFF, models="")
    return ModelEntry(name, replace(resolved, service=service), int((placed.memory_gb or 0.0) * (1 << 30)), evict)


def _check(options: Mapping[str, Any], placed: Placed) -> None:
    """Raise ConfigError for options that a model cannot have of its own, and for values that cannot be."""
    known = {field.name for config in (ModelConfig, EngineConfig) for field in fields(config)} | {*SERVICE_OPTIONS}
    for key in options:
        if key not in known and key in {field.name for field in fields(ServiceConfig)}:
            raise ConfigError(f"{key} is the same for all models: give it as an option of the server.", param=key)
    if placed.evict not in (None, *EVICTIONS):
        raise ConfigError(f"evict is {placed.evict!r}: give {' or '.join(EVICTIONS)}.", param="evict")
    if placed.memory_gb is not None and not 0 < placed.memory_gb < 1 << 20:
        raise ConfigError(f"memory_gb is {placed.memory_gb}: give a positive number of GiB.", param="memory_gb")


def _check_shadow(resolved: Resolved) -> None:
    """Raise ConfigError for a reference that is not a server: its weights would stay in memory while the model sleeps."""
    reference = make_reference(resolved.service, resolved.model, resolved.engine)
    if isinstance(reference, EngineReference):
        raise ConfigError(
            "shadow_rate with several models needs the reference on another server, because reference weights here would keep "
            "memory that the model gives back: give its address (http://...) as shadow_url.",
            param="shadow_url",
        )


def _cannot_sleep(resolved: Resolved, has_gpu: bool) -> str:
    """Why a model cannot sleep, as the table of refusals says; "" if it can."""
    on_gpu = resolved.engine.device == "cuda" or (resolved.engine.device == "auto" and has_gpu)
    engine = replace(resolved.engine, enable_sleep_mode=True)
    choice = Choice(
        resolved.model, engine, (), "cuda" if on_gpu else "cpu", hands_over=resolved.service.prefill_engines > 0
    )
    return next((refusal.reason for refusal in refusals(choice) if refusal.feature == "sleep"), "")
