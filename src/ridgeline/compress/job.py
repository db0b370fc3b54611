"""Compression of a checkpoint, layer by layer, into a folder that appears only when it is whole, and judged if it is to be.

Layers are written as they are done into a folder beside the target, and an interrupted run goes on behind the last one:
calibration texts run through the layers that are there already, as they were stored. A run that fails for a reason of the
model's leaves nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.methods import compress_layer
from ridgeline.compress.recipes import Recipe
from ridgeline.compress.statistics import Statistics
from ridgeline.compress.storage import Floats, Storage, Tensors
from ridgeline.compress.structured import check_layers, influence, kept_layers, narrow, narrower, new_config
from ridgeline.compress.walk import CPU, Streams, Walk, batches, watched
from ridgeline.core.errors import ConfigError, RidgelineError, UnsupportedModel
from ridgeline.core.spec import LayerSpec
from ridgeline.models.stored import KEY

Progress = Callable[[str, int, int], None]
"""(stage, layers done, layers in all)."""
COPIED = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "LICENSE*", "NOTICE*")
NOT_COPIED = ("config.json", "model.safetensors.index.json")
STATE = "job.json"
DONE = "config.json"
"""What is written last of a model."""


class Job:
    """One model, one recipe, one target. texts: calibration, token ids. device: where layers run and are solved."""

    def __init__(
        self,
        source: Checkpoint,
        recipe: Recipe,
        texts: Sequence[Sequence[int]],
        out: Path,
        device: torch.device = CPU,
    ) -> None:
        if not isinstance(source.storage, Floats):
            raise UnsupportedModel(
                f"The checkpoint {source.folder} is already compressed: give the original checkpoint."
            )
        if out.exists():
            raise ConfigError(f"--out {out} exists: give a folder that does not exist yet.", param="out")
        if recipe.needs_texts and not texts:
            raise ConfigError(
                f"The recipe {recipe.name} needs calibration texts: give --calibration FILE.", param="calibration"
            )
        self._source, self._recipe, self._out = source, recipe, out
        self._part = out.with_name(f".{out.name}.part")
        self._ids = batches(texts)
        self._walk = Walk(source.spec, max((len(one) for one in texts), default=1), device)
        self._layers = list(range(len(source.spec.layers)))
        if recipe.method == "layers":
            check_layers(int(recipe.amount), len(self._layers))
        self._target: LayerSpec | None = None
        if recipe.method in ("heads", "neurons"):
            self._target = narrower(recipe, source.spec)

    def run(self, progress: Progress) -> None:
        """Build and publish."""
        self.build(progress)
        self.publish()

    def build(self, progress: Progress) -> Path:
        """The finished model in a folder of its own, beside the target. Raises ConfigError or UnsupportedModel naming the
        tensor; then nothing is left."""
        self._open()
        if (self._part / DONE).is_file():
            return self._part
        try:
            if self._recipe.method == "layers":
                self._layers = self._choose(progress)
            streams = self._start()
            for place, index in enumerate(self._layers):
                streams = self._layer(place, index, streams)
                progress("layers", place + 1, len(self._layers))
            self._finish()
        except RidgelineError:
            shutil.rmtree(self._part)
            raise
        return self._part

    def publish(self) -> None:
        """Let the target appear."""
        (self._part / STATE).unlink()
        self._part.rename(self._out)

    def _open(self) -> None:
        """Make the part folder, or keep that of an equal run that was interrupted."""
        state = self._part / STATE
        said = {"recipe": self._recipe.name, "source": fingerprint(self._source), "texts": _hash(self._ids)}
        if state.is_file() and json.loads(state.read_text(encoding="utf-8")) == said:
            return
        if self._part.exists():
            shutil.rmtree(self._part)
        self._part.mkdir(parents=True)
        state.write_text(json.dumps(said), encoding="utf-8")

    def _start(self) -> Streams:
        if not self._recipe.needs_texts or self._recipe.method == "layers":
            return []
        return self._walk.embed(self._ids, self._source.embedding(), self._source.dtype)

    def _choose(self, progress: Progress) -> list[int]:
        """The layers that stay."""
        source, found = self._source, []
        streams = self._walk.embed(self._ids, source.embedding(), source.dtype)
        for index in self._layers:
            after = self._walk.run(index, self._walk.module(index, source.layer(index)), streams)
            found.append(influence(streams, after))
            streams = after
            progress("importance", index + 1, len(self._layers))
        return kept_layers(found, int(self._recipe.amount))

    def _layer(self, place: int, index: int, streams: Streams) -> Streams:
        """Compress layer `index` into place `place`, unless that is done; the streams behind it as it is stored."""
        file = self._part / f"layer-{place:05d}.safetensors"
        if not file.is_file():
            stored = self._compressed(index, streams)
            draft = file.with_suffix(".draft")
            _save(stored, draft)
            draft.rename(file)
        if not streams or self._target is not None:
            # A narrower layer is fitted to what the whole layers before it give, so that streams keep to the original.
            return self._plain(index, streams)
        dense = _dense(self._recipe.storage, load_file(file))
        return self._walk.run(index, self._walk.module(index, dense, self._recipe.storage.product), streams)

    def _plain(self, index: int, streams: Streams) -> Streams:
        if not streams:
            return streams
        return self._walk.run(index, self._walk.module(index, self._source.layer(index)), streams)

    def _compressed(self, index: int, streams: Streams) -> Tensors:
        """Tensors of a layer as they will be stored, by their names within it."""
        source, recipe = self._source, self._recipe
        weights = {name: tensor.to(self._walk.device) for name, tensor in source.layer(index).items()}
        if recipe.method == "layers":
            return {name: tensor.to(source.dtype) for name, tensor in weights.items()}
        seen: Mapping[str, Statistics] = {}
        if streams:
            layer = self._walk.module(index, weights)
            with watched(layer) as seen:
                self._walk.run(index, layer, streams)
        if self._target is not None:
            cut = narrow(recipe, source.spec.layers[index], self._target, weights, seen)
            return {name: tensor.to(source.dtype) for name, tensor in cut.items()}
        rest, linears = compress_layer(recipe, source.spec, index, weights, seen)
        stored = {name: tensor.to(source.dtype) for name, tensor in rest.items()}
        for linear, settled in linears.items():
            try:
                packed = recipe.storage.pack(settled.to(CPU), source.dtype)
            except UnsupportedModel as error:
                raise UnsupportedModel(f"The tensor layers.{index}.{linear}.weight {error.message}") from None
            stored.update({f"{linear}.{name}": tensor for name, tensor in packed.items()})
        return stored

    def _finish(self) -> None:
        """From layers to a model folder: names as in the source, index, config.json, what else a folder has."""
        source, part = self._source, self._part
        count = len(self._layers) + 1
        where: dict[str, str] = {}
        size = 0
        for place, index in enumerate([*self._layers, -1]):
            name = f"model-{place + 1:05d}-of-{count:05d}.safetensors"
            if index < 0:
                tensors = dict(source.outside())
            else:
                prefix = source.prefix(index).replace(f".{index}.", f".{place}.")
                own = load_file(part / f"layer-{place:05d}.safetensors")
                tensors = {prefix + one: tensor for one, tensor in own.items()}
            _save(tensors, part / name)
            where.update(dict.fromkeys(tensors, name))
            size += sum(tensor.nbytes for tensor in tensors.values())
        for file in part.glob("layer-*"):
            file.unlink()
        index_of = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        (part / "model.safetensors.index.json").write_text(json.dumps(index_of, indent=1) + "\n", encoding="utf-8")
        copy_rest(source.folder, part)
        (part / DONE).write_text(json.dumps(self._config(), indent=2) + "\n", encoding="utf-8")

    def _config(self) -> dict[str, Any]:
        spec = self._source.spec
        config = dict(self._source.config)
        if self._target is not None or len(self._layers) != len(spec.layers):
            own = [spec.layers[index] for index in self._layers]
            if (like := self._target) is not None:
                sizes = {"n_heads": like.n_heads, "n_kv_heads": like.n_kv_heads, "d_ff": like.d_ff}
                own = [replace(one, **sizes) for one in own]  # type: ignore[arg-type]
            config = new_config(config, spec, own)
        said = self._recipe.storage.describe()
        return config if said is None else {**config, KEY: said}


def _save(tensors: Tensors, path: Path) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files that their owner alone may read


def _dense(storage: Storage, stored: Tensors) -> Tensors:
    """A stored layer in floats, by the names of Checkpoint.layer."""
    dense: Tensors = {}
    for name in LINEAR_NAMES:
        own = {key: stored.pop(key) for key in list(stored) if key.startswith(name + ".") and not key.endswith(".bias")}
        dense[f"{name}.weight"] = storage.weight({key.removeprefix(name + "."): one for key, one in own.items()})
    return dense | {name: tensor.float() for name, tensor in stored.items()}


def copy_rest(source: Path, target: Path) -> None:
    """What a model folder has beside weights and config: tokenizer, templates, licences."""
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_file() and path.name not in NOT_COPIED:
                shutil.copyfile(path, target / path.name)


def fingerprint(source: Checkpoint) -> list[Any]:
    """What tells a source from another one, or from what it was before."""
    files = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in source.files]
    return [str(source.folder.resolve()), source.config, files]


def _hash(ids: Sequence[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for one in ids:
        found.update(str(tuple(one.shape)).encode())
        found.update(one.numpy().tobytes())
    return found.hexdigest()
