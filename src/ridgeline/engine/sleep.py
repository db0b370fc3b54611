"""Sleep of an engine: it gives the memory of its weights and its KV cache back, and reads the weights again when it wakes.

Addresses stay (ops.releasable), so that CUDA graphs, programs and captured steps stay valid. All of this happens between steps,
while the engine has no request.

- Level 1 on a GPU copies the weights to pinned host memory, as stored: expanded ones are made anew. The copy is kept after the
  engine has woken up, so that a later sleep copies nothing. On a CPU there is no other memory, so that level 1 is level 2.
- Level 2 drops the weights. They are read from the model folder again.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.errors import ConfigError, EngineFailed, RidgelineError, UnsupportedModel
from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec
from ridgeline.engine.leases import Leases
from ridgeline.engine.rank import LoadedRank, RankPlan, operations
from ridgeline.models.build import load, served_spec
from ridgeline.models.config import read_model
from ridgeline.ops.blocks import kind_of
from ridgeline.ops.releasable import DeviceRange, release_pages, trim
from ridgeline.quant.streamed import HostMemory

ORDERS = frozenset({"sleep", "wake_up", "update_weights"})
"""Orders of Control that a Sleeper obeys."""

log = logging.getLogger(__name__)


class Sleeper:
    """The sleep of an engine. This one never sleeps. level: 0 while the engine is awake."""

    level = 0

    def obey(self, order: str, argument: str, leases: Leases) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run one of ORDERS. The engine has no request.

        Returns:
            The reply, with "error" if the order failed, and the members of `Setup` that have changed.
        """
        return {"error": "The server was started without --enable-sleep-mode: add it.", "status": 400}, {}


class MemorySleeper(Sleeper):
    """The sleep of an engine of one process.

    fingerprint: gives that of the weights in a folder (Setup.fingerprint). facts: of the setup.
    """

    def __init__(
        self, rank: RankPlan, loaded: LoadedRank, fingerprint: Callable[[Path], str], facts: dict[str, Any]
    ) -> None:
        self._rank, self._fingerprint, self._facts = rank, fingerprint, facts
        self._mesh = loaded.model.mesh
        self._folder = rank.folder
        """Of the weights that the engine has, or reads when it wakes."""
        self._weights, self._store = loaded.weights, loaded.runner.store
        self._copy: list[torch.Tensor] = []
        """Level 1 on a GPU: the weights in host memory, as stored, in pieces."""

    def obey(self, order: str, argument: str, leases: Leases) -> tuple[dict[str, Any], dict[str, Any]]:
        started, changes, released = time.perf_counter(), dict[str, Any](), 0
        leases.reset_prefix_cache()
        try:
            with torch.inference_mode():
                if order == "sleep":
                    released = self._sleep(int(argument or 1))
                elif order == "wake_up":
                    self._wake()
                else:
                    changes = self._update(Path(argument))
        except RidgelineError as error:
            status = 400 if isinstance(error, ConfigError) and order == "update_weights" else 503
            return {"error": error.message, "status": status, "level": self.level}, {}
        except Exception as error:
            log.exception("the order %s failed", order)
            return {"error": f"{order} failed: {type(error).__name__}: {error}", "status": 503, "level": self.level}, {}
        seconds = round(time.perf_counter() - started, 4)
        return {"level": self.level, "seconds": seconds, "released_bytes": released, **changes}, changes

    # --- sleep --------------------------------------------------------------------------------------------------------

    def _sleep(self, level: int) -> int:
        """Release the memory. An engine that sleeps at level 1 can go on to level 2. Returns the bytes released."""
        released = 0
        if not self.level:
            if level == 1 and (memory := self._weights.range) is not None and not self._copy:
                self._copy = _copied(memory)
            released = self._release()
        if level == 2:
            self._copy = []
        self.level = max(level, self.level)
        return released

    def _release(self) -> int:
        weights = self._weights
        if not weights.ranges or self._store.range is None:
            return release_pages([*weights.stored, *weights.expanded, self._store.flat])
        torch.cuda.synchronize()
        released = sum(memory.release() for memory in (*weights.ranges, self._store.range))
        torch.cuda.empty_cache()
        return released

    # --- wake ---------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self.level:
            return
        try:
            for memory in self._weights.ranges:
                memory.restore()
            if self._copy and self._weights.range is not None:
                _copy_back(self._copy, self._weights.range)
                self._weights.expand()
            else:
                self._read(self._folder)
            self._restore_cache()
        except BaseException:
            self._release()
            raise
        self.level = 0

    def _restore_cache(self) -> None:
        if self._store.range is not None:
            self._store.range.restore()
            self._store.flat.zero_()  # as KvStore has it: a masked value must not be NaN
            torch.cuda.synchronize()

    def _read(self, folder: Path) -> None:
        """Read the weights of a folder into the memory of the decoder. Nothing has changed if this fails.

        The folder is first loaded as at the start, because formats pack and quantize while they load: for that time the weights are
        held twice. The KV cache of a GPU is released meanwhile.
        """
        rank = self._rank
        # Operations of a CPU of its own: their memory for packed weights ends with them.
        ops = rank.ops if rank.device.type == "cuda" else operations(rank.config, rank.spec, rank.device)
        fresh = load(folder, model=rank.model, ops=ops, device=rank.device, mesh=self._mesh).decoder
        fresh.group_experts()
        read = fresh.all_tensors()
        if [_form(tensor) for tensor in read] != [_form(tensor) for tensor in self._weights.stored]:
            raise UnsupportedModel(
                f"The weights in {folder} are packed in another form, because another share of them is 0 or their number format "
                "differs: restart the server with them."
            )
        for tensor, value in zip(self._weights.stored, read, strict=True):
            tensor.copy_(value)
        del fresh, read, tensor, value
        gc.collect()  # a decoder has cycles
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()
        self._weights.expand()  # needs less than what has just been freed
        trim()

    # --- other weights ------------------------------------------------------------------------------------------------

    def _update(self, folder: Path) -> dict[str, Any]:
        """Replace the weights by those of a folder, and wake up. After an error the engine has the weights that it had before.

        Returns the members of Setup that have changed.
        """
        rank = self._rank
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} has no config.json: give the folder of a model.", param="model_path")
        check_same(rank.spec, served_spec(read_model(folder)[0], rank.model, kind_of(rank.device)), folder)
        if rank.spec.quantization and NUMBER_FORMATS[rank.spec.quantization].kept:
            raise ConfigError(
                f"--quantization {rank.spec.quantization} keeps inputs that depend on the weights: restart the server with them.",
                param="model_path",
            )
        fingerprint = self._fingerprint(folder)
        asleep, before = self.level, (self._folder, self._copy)
        if asleep:
            self._folder, self._copy = folder, []
            try:
                self._wake()
            except BaseException:
                self._folder, self._copy = before
                raise
        else:
            if self._store.range is not None:
                torch.cuda.synchronize()
                self._store.range.release()
            try:
                self._read(folder)
            finally:
                self._restore_cache()
            self._folder, self._copy = folder, []
        self._facts |= {"fingerprint": fingerprint, "root": str(folder)}
        return {"fingerprint": fingerprint}


def check_same(served: ModelSpec, other: ModelSpec, folder: Path) -> None:
    """Raise UnsupportedModel that names the first field in which the model of a folder differs from the served one."""
    for field in fields(ModelSpec):
        now, new = getattr(served, field.name), getattr(other, field.name)
        if now == new:
            continue
        name = field.name
        if name == "layers" and len(now) == len(new):
            number = next(at for at, pair in enumerate(zip(now, new, strict=True)) if pair[0] != pair[1])
            now, new = now[number], new[number]
            name = next(part.name for part in fields(now) if getattr(now, part.name) != getattr(new, part.name))
            now, new, name = getattr(now, name), getattr(new, name), f"{name} of layer {number}"
        elif name == "layers":
            now, new, name = len(now), len(new), "number of layers"
        raise UnsupportedModel(
            f"The model in {folder} has another architecture: its {name} is {new}, that of the served model is {now}. "
            "Start a server with it.",
            param="model_path",
        )


def _copied(memory: DeviceRange) -> list[torch.Tensor]:
    """The memory in pinned memory of the host, in pieces that stay as long as the weights are the same."""
    whole, pieces = memory.tensor(), HostMemory(pinned=True).take(memory.size)
    for piece, part in zip(pieces, whole.split([len(piece) for piece in pieces]), strict=True):
        piece.copy_(part, non_blocking=True)
    torch.cuda.synchronize()
    return pieces


def _copy_back(pieces: list[torch.Tensor], memory: DeviceRange) -> None:
    for piece, part in zip(pieces, memory.tensor().split([len(piece) for piece in pieces]), strict=True):
        part.copy_(piece, non_blocking=True)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()


def open_sleeper(
    rank: RankPlan, loaded: LoadedRank, fingerprint: Callable[[Path], str], facts: dict[str, Any]
) -> Sleeper:
    """The sleep of an engine, as --enable-sleep-mode says. Raises EngineFailed for weights that torch hides."""
    if not rank.config.enable_sleep_mode:
        return Sleeper()
    sleeper = MemorySleeper(rank, loaded, fingerprint, facts)
    if any(tensor.is_mkldnn for tensor in loaded.model.decoder.all_tensors()):
        raise EngineFailed("--enable-sleep-mode needs the compiled operations of a CPU: install a C++ compiler.")
    return sleeper
