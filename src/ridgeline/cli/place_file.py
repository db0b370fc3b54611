"""The file of `ridgeline place`: GPUs and models as tables of TOML, JSON or YAML, read into a Fleet. Errors name key, value and
remedy."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.cli.roofline import read_spec
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.quantization import check_experts
from ridgeline.core.resolve import read_file, read_integer
from ridgeline.core.slo import Slo
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.hardware.table import Accelerator, lookup
from ridgeline.models.build import served_spec
from ridgeline.planner.cost import Owned
from ridgeline.planner.footprint import ReplicaNeed, footprints
from ridgeline.planner.placement import GOALS, Fleet, Gpu, ModelLoad, Replica, split_device
from ridgeline.planner.ranking import Demand

TOP = ("goal", "usd_hour", "watts", "move_cost", "gpu_memory_utilization", "pue", "usd_kwh", "gpu", "model")
GPU = ("kind", "count", "memory", "usd_hour", "watts", "per_host", "owned")
SHAPE = ("layers", "width", "heads", "kv_heads", "d_ff", "vocab_size")
MODEL = (
    "name", "model", *SHAPE, "dtype", "quantization", "kv_cache_dtype", "input_len", "output_len", "rate", "slo", "replicas",
    "requests", "share", "weight", "spread", "apart", "tensor_parallel_sizes",
)  # fmt: skip
"""Keys of the file, of a table [[gpu]], and of a table [[model]]."""


@dataclass(frozen=True)
class Plan:
    """What a file asks for. notes: what is assumed, and models that no GPU holds."""

    fleet: Fleet
    notes: tuple[str, ...]


class Table:
    """A table of the file, with values by key. Raises ConfigError that names the key, the value and the remedy."""

    def __init__(self, where: str, values: Any, known: Sequence[str]) -> None:
        self._where = where
        if not isinstance(values, dict):
            raise ConfigError(f"{where} is {values!r}: write a table of keys and values.")
        self._values: Mapping[str, Any] = values
        for key in values:
            if key not in known:
                similar = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {similar[0]}?" if similar else f"use {', '.join(known)}."
                raise ConfigError(f"{where} has an unknown key {key!r}: {hint}")

    def bad(self, key: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self._where}: {key} is {self._values.get(key)!r}: {remedy}", param=key)

    def within(self, error: ConfigError) -> ConfigError:
        """The error with the place in the file."""
        return ConfigError(f"{self._where}: {error.message}", param=error.param)

    def has(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str = "") -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, "give a text in quotes.")
        return value

    def number(self, key: str, default: float, least: float = 0.0) -> float:
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
            raise self.bad(key, f"give a number of at least {least:g}.")
        return float(value)

    def positive(self, key: str, default: float) -> float:
        if (value := self.number(key, default)) <= 0:
            raise self.bad(key, "give a number above 0.")
        return value

    def whole(self, key: str, default: int, least: int = 1) -> int:
        value = self._values.get(key, default)
        try:
            value = read_integer(value) if isinstance(value, str) else value
        except ValueError:
            value = None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.bad(key, f"give a whole number of at least {least}.")
        return value

    def flag(self, key: str) -> bool:
        value = self._values.get(key, False)
        if not isinstance(value, bool):
            raise self.bad(key, "write true or false.")
        return value

    def items(self, key: str) -> list[Any]:
        value = self._values.get(key, [])
        if not isinstance(value, list):
            raise self.bad(key, "write a list, as in [1, 2].")
        return value


def read_plan(path: Path, previous: Path | None) -> Plan:
    """The fleet of a file. previous: what `ridgeline place --json` printed before."""
    top = Table(str(path), read_file(path), TOP)
    kinds, tables = top.items("gpu"), top.items("model")
    if not kinds or not tables:
        raise ConfigError(
            f"{path} has no {'[[gpu]]' if not kinds else '[[model]]'}: write a table for each kind or model."
        )
    if (goal := top.text("goal", GOALS[0])) not in GOALS:
        raise top.bad("goal", f"write {' or '.join(GOALS)}.")
    utilization = top.positive("gpu_memory_utilization", EngineConfig().gpu_memory_utilization)
    if utilization > 1:
        raise top.bad("gpu_memory_utilization", "give a share of at most 1.")
    gpus = [_gpu(Table(f"{path}: gpu {number}", kind, GPU), top, utilization) for number, kind in enumerate(kinds, 1)]
    names = [gpu.name for gpu, _ in gpus]
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(f"{path}: two tables [[gpu]] have the kind {repeated!r}: add their counts in one table.")
    models, notes = list[ModelLoad](), list[str]()
    for number, values in enumerate(tables, 1):
        table = Table(f"{path}: model {number}", values, MODEL)
        try:
            model, note = _model(table, gpus)
        except ConfigError as error:  # of a format, a checkpoint, an objective
            raise error if error.message.startswith(str(path)) else table.within(error) from None
        if note and goal == "cheapest":
            raise ConfigError(f"{path}: {note}")
        notes += [note] if note else []
        models.append(model)
    _check_names(path, models)
    usd_hour, watts = (top.positive(key, 1.0) if top.has(key) else None for key in ("usd_hour", "watts"))
    running = _running(previous) if previous is not None else ()
    only = tuple(gpu for gpu, _ in gpus)
    move_cost = top.number("move_cost", 0.01)
    return Plan(Fleet(only, tuple(models), goal, usd_hour, watts, running, move_cost), tuple(notes))


def _check_names(path: Path, models: Sequence[ModelLoad]) -> None:
    names = [model.name for model in models]
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(f"{path}: two models have the name {repeated!r}: give each its own.", param="name")
    for model in models:
        for name in model.apart:
            if name not in names or name == model.name:
                raise ConfigError(
                    f"{path}: apart of {model.name} has {name!r}: name other models of the file ({', '.join(names)}); spread keeps "
                    "replicas of one model apart.",
                    param="apart",
                )


def _gpu(table: Table, top: Table, utilization: float) -> tuple[Gpu, Accelerator | None]:
    name = table.text("kind")
    if not name or ":" in name:
        raise table.bad("kind", "name a kind of GPU without a colon, as in h100.")
    row = None
    try:
        row = lookup(name)
    except ConfigError as error:
        if not table.has("memory"):
            raise table.bad("kind", f"give its memory, or a name of the hardware table. {error.message}") from None
    if row is not None and row.kind != "cuda":
        raise table.bad("kind", "give a GPU that Ridgeline serves on, or another name and its memory.")
    memory = int(table.whole("memory", row.memory_bytes if row else 0) * utilization)
    watts = table.number("watts", row.watts if row else 0.0)
    if table.flag("owned"):
        price = Owned(
            0.0, watts=watts, pue=top.number("pue", 1.2, 1.0), usd_kwh=top.number("usd_kwh", 0.12)
        ).power_usd_hour
    elif table.has("usd_hour") or (row is not None and row.rent is not None):
        price = table.number("usd_hour", row.rent.usd if row and row.rent else 0.0)
    else:
        raise table.bad(
            "usd_hour", f"the price of {name} is unknown: give usd_hour, or owned = true for its electricity."
        )
    hosts = row.links.devices if row and row.links else 8
    count = table.whole("count", 0, 0) if table.has("count") else None
    if table.flag("owned") and count is None:
        raise table.bad("count", "say how many are owned.")
    return Gpu(name, memory, count, price, watts, table.whole("per_host", hosts)), row


def _model(table: Table, gpus: Sequence[tuple[Gpu, Accelerator | None]]) -> tuple[ModelLoad, str]:
    """The model with its footprints, and why it has none."""
    name = table.text("name") or table.text("model")
    if not name:
        raise table.bad("name", "give the model a name.")
    if not table.has("rate") and not table.has("replicas"):
        raise table.bad("rate", "give rate, in requests per second, or the number of replicas.")
    default = Demand()
    lengths = table.whole("input_len", default.input), table.whole("output_len", default.output)
    rate = table.positive("rate", 1.0) if table.has("rate") else None
    if rate is not None and (unused := next((key for key in ("requests", "share") if table.has(key)), "")):
        raise table.bad(unused, "leave it out: it follows from rate.")
    sizes = tuple(table.items("tensor_parallel_sizes")) or (1, 2, 4, 8)
    if any(size not in (1, 2, 4, 8, 16) for size in sizes):
        raise table.bad("tensor_parallel_sizes", "give some of 1, 2, 4, 8 and 16.")
    replicas = table.whole("replicas", 0, 0)
    share = table.number("share", 0.0)
    if share > 1:
        raise table.bad("share", "give a share of a GPU's time of at most 1.")
    demand = Demand(*lengths, rate, Slo.parse(table.text("slo")))
    need = ReplicaNeed(demand, replicas, table.whole("requests", 1), share, sizes, table.has("tensor_parallel_sizes"))
    spec, feet, reasons = _spec(table), [], list[str]()
    for gpu, row in gpus:
        made, reason = footprints(spec, need, gpu, row, EngineConfig())
        feet += made
        reasons += (
            [f"{gpu.name}: {reason or 'has fewer GPUs in a host than tensor_parallel_sizes names'}"] if not made else []
        )
    remedy = "add a larger GPU, a larger tensor parallel size or a smaller quantization."
    note = "" if feet else f"no GPU holds {name} ({'; '.join(reasons)}): {remedy}"
    load = float(replicas or rate or 0.0)
    weight = table.positive("weight", 1.0)
    if load <= 0:
        raise table.bad("replicas", "give 1 replica or more.")
    return ModelLoad(name, tuple(feet), load, weight, table.flag("spread"), frozenset(table.items("apart"))), note


def _spec(table: Table) -> ModelSpec:
    """The model of config.json, or a shape of the file."""
    config = ModelConfig(
        model=table.text("model"),
        dtype=table.text("dtype", "auto"),
        quantization=table.text("quantization"),
        kv_cache_dtype=table.text("kv_cache_dtype", "auto"),
    )
    shaped = [key for key in SHAPE if table.has(key)]
    if not shaped:
        if not table.has("model"):
            raise table.bad("model", f"give a folder or hub name, or a shape: {', '.join(SHAPE)}.")
        spec = read_spec(config)
        check_experts(spec, "cuda")
        return spec
    if table.has("model"):
        raise table.bad("model", f"leave it out, or leave out {', '.join(shaped)}.")
    for key in ("layers", "width", "heads", "d_ff", "vocab_size"):
        if not table.has(key):
            raise table.bad(key, f"a shape needs {', '.join(SHAPE)} (kv_heads: heads if absent).")
    heads, width = table.whole("heads", 1), table.whole("width", 1)
    kv_heads = table.whole("kv_heads", heads)
    if width % heads or heads % kv_heads:
        raise table.bad("heads", "heads divide width, and kv_heads divide heads: give other numbers.")
    layer = LayerSpec(heads, kv_heads, width // heads, table.whole("d_ff", 1), Rope(dim=width // heads))
    layers = (layer,) * table.whole("layers", 1)
    return served_spec(ModelSpec("(shape)", table.whole("vocab_size", 1), width, layers, 1 << 20), config)


def _running(path: Path) -> tuple[Replica, ...]:
    """Replicas of a placement that was printed as JSON. Raises ConfigError for any other file."""
    try:
        replicas = json.loads(path.read_text(encoding="utf-8"))["replicas"]
        made = tuple(Replica(str(entry["model"]), tuple(map(str, entry["gpus"]))) for entry in replicas)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--previous {path} is not a placement: give the output of `ridgeline place --json`.", param="previous"
        ) from None
    for replica in made:
        for device in replica.devices:
            split_device(device)
    return made
