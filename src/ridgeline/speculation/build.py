"""Builds the drafters of the option `speculate` and computes their memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ridgeline.core.compatibility import Choice
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sizing import DrafterMemory
from ridgeline.core.spec import LayerSpec, ModelSpec
from ridgeline.models.build import DTYPES, LoadedModel, build, served_spec
from ridgeline.models.config import read_model
from ridgeline.models.eagle import load_head
from ridgeline.models.eagle_files import head_layers, mtp_bytes, read_eagle, read_mtp
from ridgeline.models.hub import resolve_model, shipped_model
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.device import DeviceDrafter, NoDrafter
from ridgeline.speculation.draft_model import DraftModel
from ridgeline.speculation.eagle import Eagle
from ridgeline.speculation.first_of import FirstOf
from ridgeline.speculation.heads import load_heads, tree
from ridgeline.speculation.host import HostDrafter
from ridgeline.speculation.interface import NO_SPECULATION, Speculation
from ridgeline.speculation.lookahead import Lookahead
from ridgeline.speculation.medusa import Medusa
from ridgeline.speculation.ngram import NGram
from ridgeline.speculation.options import (
    DRAFTERS,
    Wanted,
    check_draft,
    check_files,
    read_vocabulary,
    read_wanted,
    refusal,
)
from ridgeline.speculation.recurrent import Recurrent, load_recurrent
from ridgeline.speculation.recycling import Recycling
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from ridgeline.speculation.state import DraftLimits

NGRAM_MIN_CHANCE = {"cpu": 0.35, "cuda": 0.07}
"""Device -> lowest estimated acceptance of a node that the n-gram drafter proposes. On a CPU a step with drafts costs a fifth more
before its first node; on a GPU a further query token costs next to nothing (benchmarks/speculation.py, controlled.py)."""
LOGIT_ROWS = 1024
"""Most logits rows of a step with drafts. The more rows a step has, the fewer nodes each verifies."""


def wanted_by(config: EngineConfig, spec: ModelSpec, folder: Path, place: str) -> Wanted:
    """The drafters that `config` selects for the model in `folder`, served as `spec`.

    auto includes the shipped recurrent draft for the shipped model on a CPU, unless the model is quantized: then steps are too
    short for the draft to pay.

    Args:
        place: cpu or cuda.
    Raises:
        ConfigError: as read_wanted.
    """
    shipped = place == "cpu" and folder == shipped_model() and not spec.quantization
    wanted = read_wanted(config, folder.parent / "recurrent" if shipped else None)
    return (
        replace(wanted, folder=folder) if wanted.device == "mtp" else wanted
    )  # its weights are in the model's checkpoint


def draft_model(wanted: Wanted, spec: ModelSpec, load_format: str) -> tuple[Path, ModelConfig]:
    """Folder of the draft model, and the ModelConfig to load it in the dtype of the target."""
    config = ModelConfig(model=str(wanted.folder), dtype=spec.dtype, load_format=load_format)
    return resolve_model(config), config


def memory_of_drafters(config: EngineConfig, spec: ModelSpec, folder: Path, place: str) -> tuple[Wanted, DrafterMemory]:
    """The drafters that `config` selects, and their memory in addition to the served model `spec`.

    Raises:
        ConfigError: before any weight is read, for drafters that cannot be opened and for a draft that does not fit the model.
    """
    wanted = wanted_by(config, spec, folder, place)
    if not wanted.max_nodes:
        return wanted, DrafterMemory()
    check_files(wanted)
    logits = min(LOGIT_ROWS, (config.max_num_seqs or LOGIT_ROWS) * (1 + wanted.max_nodes))
    if wanted.device == "draft":
        draft_folder, draft_config = draft_model(wanted, spec, "dummy")  # from the hub, only the small files
        draft = served_spec(read_model(draft_folder)[0], draft_config, spec.device_kind)
        check_draft(draft, spec)
        return wanted, DrafterMemory(draft.layers, draft.weight_bytes, logits)
    layers: tuple[LayerSpec, ...] = ()
    if wanted.folder is not None and wanted.device in HEADS:
        layers = head_layers(wanted.device, wanted.folder, spec)
    if wanted.folder is not None and wanted.device == "mtp":
        return wanted, DrafterMemory(layers, mtp_bytes(wanted.folder, spec), logits)
    files = wanted.folder.glob("*") if wanted.folder is not None else ()
    return wanted, DrafterMemory(layers, 2 * sum(file.stat().st_size for file in files if file.is_file()), logits)


def choice_of(model: ModelConfig, config: EngineConfig, spec: ModelSpec, wanted: Wanted, device: str) -> Choice:
    """What may exclude one another. spec: the model as served. device: "cpu" or "cuda"."""
    return Choice(
        model, config, spec.layers, device, wanted.names, bool(wanted.device), wanted.branch, gated=spec.gated
    )


def open_drafters(
    wanted: Wanted, target: LoadedModel, encode: Callable[[str], list[int]], limits: DraftLimits, dummy: bool
) -> tuple[Speculation, DeviceDrafter]:
    """The scheduler's Speculation and the device drafter, for a loaded target.

    Args:
        encode: encodes a text with the target's tokenizer.
        dummy: load random weights for a draft model.
    """
    if not wanted.max_nodes:
        return NO_SPECULATION, NoDrafter()
    device, traits = DEVICE_DRAFTERS[wanted.device](wanted, target, wanted.folder or Path(), dummy)
    host_drafters = [HOST_DRAFTERS[name](wanted, target, encode) for name in wanted.host]
    host_drafter = (
        None if not host_drafters else host_drafters[0] if len(host_drafters) == 1 else FirstOf(host_drafters)
    )
    cuts = traits is not None and traits.cuts
    sizes = tuple(sorted({0, traits.max_nodes, wanted.max_nodes})) if traits is not None and cuts else wanted.sizes
    return Speculator(host_drafter, traits, Controller(sizes), limits), device


def _ngram(wanted: Wanted, target: LoadedModel, encode: Callable[[str], list[int]]) -> HostDrafter:
    min_chance = NGRAM_MIN_CHANCE[target.decoder.embedding.device.type]
    if wanted.documents is None:
        return NGram(min_chance=min_chance)
    try:
        text = wanted.documents.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(f"the document {str(wanted.documents)!r} cannot be read ({error})") from None
    return NGram([encode(text)], min_chance=min_chance)


def _draft_model(wanted: Wanted, target: LoadedModel, folder: Path, dummy: bool) -> tuple[DeviceDrafter, DeviceTraits]:
    folder, config = draft_model(wanted, target.spec, "dummy" if dummy else "auto")
    model = build(folder, model=config, ops=target.ops, device=target.decoder.embedding.device)
    return DraftModel(model, read_vocabulary(folder, model.spec)), DeviceTraits(wanted.max_nodes, reads_tokens=True)


def _recurrent(wanted: Wanted, target: LoadedModel, folder: Path, dummy: bool) -> tuple[DeviceDrafter, DeviceTraits]:
    spec, place = target.spec, target.decoder.embedding.device
    weights = load_recurrent(folder, spec)
    rates = [row[: 1 if wanted.chains else None] for row in weights.accuracies]
    nodes = tree(rates, min(wanted.max_nodes, DRAFTERS["recurrent"].nodes))
    recurrent = Recurrent(weights, spec, target.ops, DTYPES[spec.dtype], place, nodes)
    return recurrent, DeviceTraits(len(nodes), recurrent.parents, cuts=target.ops.programs.prunes_drafts)


def _medusa(wanted: Wanted, target: LoadedModel, folder: Path, dummy: bool) -> tuple[DeviceDrafter, DeviceTraits]:
    spec, place = target.spec, target.decoder.embedding.device
    heads = load_heads(folder, spec, target.ops, DTYPES[spec.dtype], place)
    medusa = Medusa(heads, target.decoder.logits, wanted.max_nodes)
    medusa.work = heads.work([node.head for node in medusa.nodes], spec)
    return medusa, DeviceTraits(len(medusa.parents), medusa.parents)


def _head(wanted: Wanted, target: LoadedModel, folder: Path, dummy: bool) -> tuple[DeviceDrafter, DeviceTraits]:
    files = HEADS[wanted.device](folder, target.spec)
    return Eagle(load_head(files, target, folder), target), DeviceTraits(wanted.max_nodes, follows_target=True)


def _recycling(wanted: Wanted, target: LoadedModel, folder: Path, dummy: bool) -> tuple[DeviceDrafter, DeviceTraits]:
    recycling = Recycling(target.spec.vocab_size, target.decoder.embedding.device)
    return recycling, DeviceTraits(min(wanted.max_nodes, len(recycling.parents)), recycling.parents)


HEADS = {"eagle": read_eagle, "mtp": read_mtp}
"""Drafters with a layer that follows the target -> function that reads its files."""
HOST_DRAFTERS = {"reference": _ngram, "lookahead": lambda wanted, target, encode: Lookahead(wanted.lookahead)}
DEVICE_DRAFTERS = {
    "": lambda wanted, target, folder, dummy: (NoDrafter(), None),
    "draft": _draft_model,
    "recurrent": _recurrent,
    "medusa": _medusa,
    "recycling": _recycling,
    "eagle": _head,
    "mtp": _head,
}
"""Name in options.DRAFTERS -> function that opens the drafter; folder: its weights, if it has any. "": no device drafter."""
