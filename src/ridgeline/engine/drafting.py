"""The drafters that are wanted: what they take beside the model, and the objects themselves."""

from __future__ import annotations

from pathlib import Path

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.draft import HostDrafter
from ridgeline.core.sizing import Beside
from ridgeline.core.spec import ModelSpec
from ridgeline.core.speculate import MOST, Wanted, check_draft, check_files, read_vocabulary, read_wanted, refusal
from ridgeline.decoding.combined import FirstOf
from ridgeline.decoding.draft_model import DraftModel
from ridgeline.decoding.drafters import DeviceDrafter, NoDrafter
from ridgeline.decoding.heads import load_heads, tree
from ridgeline.decoding.lookahead import Lookahead
from ridgeline.decoding.medusa import Medusa
from ridgeline.decoding.recurrent import Recurrent, load_recurrent
from ridgeline.decoding.recycling import Recycling
from ridgeline.decoding.reference import Reference
from ridgeline.engine.pace import Pace
from ridgeline.engine.speculation import Drafts, OnDevice, Speculation
from ridgeline.models.build import DTYPES, LoadedModel, build, served_spec
from ridgeline.models.config import read_model
from ridgeline.models.hub import resolve_model, shipped_model
from ridgeline.text.tokenizer import Tokenizer

LEAST_CHANCE = 0.35
"""Of a node that a reference drafter proposes on a CPU, where a step with drafts costs a fifth more before its first node."""
LOGIT_ROWS = 1024
"""Most rows of logits of a step with drafts; with more rows fewer nodes are verified."""


def wanted_by(config: EngineConfig, spec: ModelSpec, folder: Path, place: str) -> Wanted:
    """What `config` wants for the model in `folder`, served as `spec`: on a CPU, with auto, also the recurrent draft that is
    shipped for that model, unless weights in few bits make steps too short for it to pay. place: cpu or cuda. Raises ConfigError
    as read_wanted does."""
    shipped = place == "cpu" and folder == shipped_model() and not spec.quantization
    return read_wanted(config, folder.parent / "recurrent" if shipped else None)


def draft_model(wanted: Wanted, spec: ModelSpec, load_format: str) -> tuple[Path, ModelConfig]:
    """A draft model's folder, and how it is read: in the target's number type and context."""
    config = ModelConfig(model=str(wanted.folder), dtype=spec.dtype, load_format=load_format)
    return resolve_model(config), config


def weigh(config: EngineConfig, spec: ModelSpec, folder: Path, place: str, taken: int = 0) -> tuple[Wanted, Beside]:
    """What wanted_by says, and what that takes beside the model `spec` as served; taken: bytes that others hold. Raises
    ConfigError, before any weight is read, for drafters that could not be opened and a draft that does not fit the model."""
    wanted = wanted_by(config, spec, folder, place)
    if not wanted.most:
        return wanted, Beside(bytes=taken)
    check_files(wanted)
    logits = min(LOGIT_ROWS, (config.max_num_seqs or LOGIT_ROWS) * (1 + wanted.most))
    if wanted.device == "draft":
        small, how = draft_model(wanted, spec, "dummy")  # of a hub's model the small files alone
        draft = served_spec(read_model(small)[0], how)
        check_draft(draft, spec)
        return wanted, Beside(draft.layers, taken + draft.weight_bytes, logits)
    if wanted.folder is not None:
        taken += 2 * sum(file.stat().st_size for file in wanted.folder.glob("*") if file.is_file())
    return wanted, Beside((), taken, logits)


def open_drafters(
    wanted: Wanted, target: LoadedModel, folder: Path, dummy: bool
) -> tuple[Speculation | None, DeviceDrafter]:
    """The drafters for a loaded target; folder: of its tokenizer. dummy: a draft model gets random weights too."""
    if not wanted.most:
        return None, NoDrafter()
    device, shape = _open_device(wanted, target, dummy)
    host = [_open_host(name, wanted, target, folder) for name in wanted.host]
    asked = None if not host else host[0] if len(host) == 1 else FirstOf(host)
    sizes = tuple(sorted({0, shape.most, wanted.most})) if shape is not None and shape.cuts else wanted.sizes
    return Drafts(asked, shape, Pace(sizes), LOGIT_ROWS), device


def _open_host(name: str, wanted: Wanted, target: LoadedModel, folder: Path) -> HostDrafter:
    if name == "lookahead":
        return Lookahead()
    # On a GPU a further query token costs next to nothing.
    least = LEAST_CHANCE if target.decoder.embedding.device.type == "cpu" else LEAST_CHANCE / 5
    if wanted.documents is None:
        return Reference(least_chance=least)
    try:
        text = wanted.documents.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(f"the document {str(wanted.documents)!r} cannot be read ({error})") from None
    return Reference([Tokenizer.load(folder).encode(text, add_special_tokens=False)], least_chance=least)


def _open_device(wanted: Wanted, target: LoadedModel, dummy: bool) -> tuple[DeviceDrafter, OnDevice | None]:
    spec, place = target.spec, target.decoder.embedding.device
    if wanted.device == "draft":
        folder, config = draft_model(wanted, spec, "dummy" if dummy else "auto")
        model = build(folder, model=config, ops=target.ops, device=place)
        return DraftModel(model, read_vocabulary(folder, model.spec)), OnDevice(wanted.most, reads=True)
    if wanted.device == "recurrent" and wanted.folder is not None:
        weights = load_recurrent(wanted.folder, spec)
        rates = [row[: 1 if wanted.chains else None] for row in weights.accuracies]
        nodes = tree(rates, min(wanted.most, MOST["recurrent"]))
        recurrent = Recurrent(weights, spec, target.ops, DTYPES[spec.dtype], place, nodes)
        return recurrent, OnDevice(len(nodes), recurrent.parents, cuts=target.ops.programs.prunes_drafts)
    if wanted.device == "medusa" and wanted.folder is not None:
        heads = load_heads(wanted.folder, spec, target.ops, DTYPES[spec.dtype], place)
        medusa = Medusa(heads, target.decoder.logits, wanted.most)
        return medusa, OnDevice(len(medusa.parents), medusa.parents)
    if wanted.device == "recycling":
        recycling = Recycling(spec.vocab_size, place)
        return recycling, OnDevice(min(wanted.most, len(recycling.parents)), recycling.parents)
    return NoDrafter(), None
