"""Compress a checkpoint layer by layer into a folder that appears only when it is complete.

Finished layers are written to a temporary folder beside the target. An interrupted run resumes after the last finished
layer: calibration texts run through the finished layers as they are stored. A run that fails because of the model or the
recipe deletes the temporary folder.
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
from ridgeline.compress.layerwise import CPU, LayerwiseRunner, Streams, batches, collect_statistics
from ridgeline.compress.methods import compress_layer
from ridgeline.compress.recipes import Recipe
from ridgeline.compress.statistics import Statistics
from ridgeline.compress.storage import Floats, Storage, Tensors
from ridgeline.compress.structured import (
    check_layers,
    influence,
    kept_layers,
    new_config,
    prune_layer,
    pruned_layer_spec,
)
from ridgeline.core.errors import ConfigError, RidgelineError, UnsupportedModel
from ridgeline.core.spec import LayerSpec
from ridgeline.models.stored import KEY

Progress = Callable[[str, int, int], None]
"""Called with (stage, layers done, layers in total)."""
COPIED = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "LICENSE*", "NOTICE*")
NOT_COPIED = ("config.json", "model.safetensors.index.json")
STATE = "job.json"
DONE = "config.json"
"""The file of a model folder that is written last."""


class Job:
    """The compression of one model by one recipe into one target folder.

    texts: token ids of the calibration texts. device: where layers run and are compressed. unrounded: folder for the weights
    before rounding, a file per layer, from which training on the grid starts.
    """

    def __init__(
        self,
        source: Checkpoint,
        recipe: Recipe,
        texts: Sequence[Sequence[int]],
        out: Path,
        device: torch.device = CPU,
        unrounded: Path | None = None,
    ) -> None:
        if not isinstance(source.storage, Floats):
            raise UnsupportedModel(
                f"The checkpoint {source.folder} is already compressed: give the original checkpoint."
            )
        check_target(out)
        if recipe.needs_texts and not texts:
            raise ConfigError(
                f"The recipe {recipe.name} needs calibration texts: give --calibration FILE.", param="calibration"
            )
        self._source, self._recipe, self._out, self._unrounded = source, recipe, out, unrounded
        self._partial = out.with_name(f".{out.name}.part")
        self._ids = batches(texts)
        self._runner = LayerwiseRunner(source.spec, max((len(text) for text in texts), default=1), device)
        self._layers = list(range(len(source.spec.layers)))
        if recipe.method == "layers":
            check_layers(int(recipe.amount), len(self._layers))
        self._target: LayerSpec | None = None
        if recipe.method in ("heads", "neurons") or recipe.pools_heads:
            self._target = pruned_layer_spec(recipe, source.spec)

    def run(self, progress: Progress) -> None:
        """Build and publish the model."""
        self.build(progress)
        self.publish()

    def build(self, progress: Progress) -> Path:
        """Build the model in the temporary folder and return its path.

        Raises ConfigError, or UnsupportedModel that names the tensor. The temporary folder is then deleted.
        """
        self._open()
        if (self._partial / DONE).is_file():
            return self._partial
        try:
            if self._recipe.method == "layers":
                self._layers = self._choose_layers(progress)
            streams = self._embed_texts()
            for position, index in enumerate(self._layers):
                streams = self._process_layer(position, index, streams)
                progress("layers", position + 1, len(self._layers))
            self._finish()
        except RidgelineError:
            shutil.rmtree(self._partial)
            raise
        return self._partial

    def publish(self) -> None:
        """Rename the temporary folder to the target."""
        (self._partial / STATE).unlink()
        self._partial.rename(self._out)

    def _open(self) -> None:
        """Create the temporary folder, or keep that of an interrupted run with the same inputs."""
        state = self._partial / STATE
        identity = {"recipe": self._recipe.name, "source": fingerprint(self._source), "texts": _hash(self._ids)}
        if state.is_file() and json.loads(state.read_text(encoding="utf-8")) == identity:
            return
        if self._partial.exists():
            shutil.rmtree(self._partial)
        self._partial.mkdir(parents=True)
        state.write_text(json.dumps(identity), encoding="utf-8")

    def _embed_texts(self) -> Streams:
        """Return the streams of the calibration texts before the first layer; empty if layers need no statistics."""
        if not self._recipe.needs_texts or self._recipe.method == "layers":
            return []
        return self._runner.embed(self._ids, self._source.embedding(), self._source.dtype)

    def _choose_layers(self, progress: Progress) -> list[int]:
        """Return the indices of the layers that remain."""
        source, influences = self._source, []
        streams = self._runner.embed(self._ids, source.embedding(), source.dtype)
        for index in self._layers:
            after = self._runner.run(index, self._runner.module(index, source.layer(index)), streams)
            influences.append(influence(streams, after))
            streams = after
            progress("importance", index + 1, len(self._layers))
        return kept_layers(influences, int(self._recipe.amount))

    def _process_layer(self, position: int, index: int, streams: Streams) -> Streams:
        """Compress layer `index` and write it as layer `position`, unless that file exists. Returns the streams after the layer.

        The stored layer computes the streams, except after structured pruning.
        """
        file = self._partial / f"layer-{position:05d}.safetensors"
        if not file.is_file():
            stored = self._compress_layer(index, streams)
            temporary = file.with_suffix(".draft")
            _save(stored, temporary)
            temporary.rename(file)
        if not streams or self._target is not None:
            # A pruned layer is fitted to the outputs of the original layers before it, so streams follow the original model.
            return self._run_original(index, streams)
        dense = _dense(self._recipe.storage, load_file(file))
        return self._runner.run(index, self._runner.module(index, dense, self._recipe.storage.product), streams)

    def _run_original(self, index: int, streams: Streams) -> Streams:
        if not streams:
            return streams
        return self._runner.run(index, self._runner.module(index, self._source.layer(index)), streams)

    def _compress_layer(self, index: int, streams: Streams) -> Tensors:
        """Compress a layer. Returns the tensors to store, by their names in the layer."""
        source, recipe = self._source, self._recipe
        weights = {name: tensor.to(self._runner.device) for name, tensor in source.layer(index).items()}
        if recipe.method == "layers":
            return {name: tensor.to(source.dtype) for name, tensor in weights.items()}
        statistics: Mapping[str, Statistics] = {}
        if streams:
            module = self._runner.module(index, weights)
            with collect_statistics(module) as statistics:
                self._runner.run(index, module, streams)
        if self._target is not None:
            pruned = prune_layer(recipe, source.spec.layers[index], self._target, weights, statistics)
            return {name: tensor.to(source.dtype) for name, tensor in pruned.items()}
        layer = compress_layer(recipe, source.spec, index, weights, statistics)
        if self._unrounded is not None:
            self._unrounded.mkdir(parents=True, exist_ok=True)
            _save(layer.unrounded, unrounded_file(self._unrounded, index))
        stored = {name: tensor.to(source.dtype) for name, tensor in layer.others.items()}
        for linear, compressed in layer.linears.items():
            try:
                packed = recipe.storage.pack(compressed.to(CPU), source.dtype)
            except UnsupportedModel as error:
                raise UnsupportedModel(f"The tensor layers.{index}.{linear}.weight {error.message}") from None
            stored.update({f"{linear}.{name}": tensor for name, tensor in packed.items()})
        return stored

    def _finish(self) -> None:
        """Turn the layer files into a model folder: tensor names of the source, index, config.json and other files."""
        source, partial = self._source, self._partial
        count = len(self._layers) + 1
        weight_map: dict[str, str] = {}
        size = 0
        for position, index in enumerate([*self._layers, -1]):
            name = f"model-{position + 1:05d}-of-{count:05d}.safetensors"
            if index < 0:
                tensors = dict(source.tensors_outside_layers())
            else:
                prefix = source.prefix(index).replace(f".{index}.", f".{position}.")
                layer_tensors = load_file(partial / f"layer-{position:05d}.safetensors")
                tensors = {prefix + tensor_name: tensor for tensor_name, tensor in layer_tensors.items()}
            _save(tensors, partial / name)
            weight_map.update(dict.fromkeys(tensors, name))
            size += sum(tensor.nbytes for tensor in tensors.values())
        for file in partial.glob("layer-*"):
            file.unlink()
        index_file = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=1) + "\n", encoding="utf-8")
        copy_other_files(source.folder, partial)
        (partial / DONE).write_text(json.dumps(self._config(), indent=2) + "\n", encoding="utf-8")

    def _config(self) -> dict[str, Any]:
        spec = self._source.spec
        config = dict(self._source.config)
        if self._target is not None or len(self._layers) != len(spec.layers):
            layers = [spec.layers[index] for index in self._layers]
            if (target := self._target) is not None:
                sizes = {"n_heads": target.n_heads, "n_kv_heads": target.n_kv_heads, "d_ff": target.d_ff}
                layers = [replace(layer, **sizes) for layer in layers]  # type: ignore[arg-type]
            config = new_config(config, spec, layers)
        quantization_config = self._recipe.storage.describe()
        return config if quantization_config is None else {**config, KEY: quantization_config}


def unrounded_file(folder: Path, index: int) -> Path:
    """Return the file with the weights of layer `index` before rounding, by their names in the layer."""
    return folder / f"layer-{index:05d}.safetensors"


def _save(tensors: Tensors, path: Path) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors creates files that only their owner can read


def _dense(storage: Storage, stored: Tensors) -> Tensors:
    """Convert a stored layer to floats, by the names of Checkpoint.layer."""
    dense: Tensors = {}
    for name in LINEAR_NAMES:
        linear_tensors = {
            key: stored.pop(key) for key in list(stored) if key.startswith(name + ".") and not key.endswith(".bias")
        }
        dense[f"{name}.weight"] = storage.weight(
            {key.removeprefix(name + "."): tensor for key, tensor in linear_tensors.items()}
        )
    return dense | {name: tensor.float() for name, tensor in stored.items()}


def check_target(out: Path) -> None:
    """Raise ConfigError if the folder for a result exists."""
    if out.exists():
        raise ConfigError(f"--out {out} exists: give a folder that does not exist yet.", param="out")


def copy_other_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat templates and licences of a model folder."""
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_file() and path.name not in NOT_COPIED:
                shutil.copyfile(path, target / path.name)


def fingerprint(source: Checkpoint) -> list[Any]:
    """Return data that identifies a source and its current files."""
    files = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in source.files]
    return [str(source.folder.resolve()), source.config, files]


def _hash(ids: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for batch in ids:
        digest.update(str(tuple(batch.shape)).encode())
        digest.update(batch.numpy().tobytes())
    return digest.hexdigest()
