"""From the option `speculate` to drafters: what it names, what they take beside the model, and the objects themselves."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.draft import MAX_DRAFT, HostDrafter
from ridgeline.core.errors import ConfigError
from ridgeline.core.sizing import Beside
from ridgeline.core.spec import ModelSpec
from ridgeline.decoding.combined import FirstOf
from ridgeline.decoding.draft_model import DraftModel, check_draft, read_vocabulary
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

HOST = ("reference", "lookahead")
MOST = {"reference": 11, "lookahead": 30, "recurrent": 12, "draft": 4, "medusa": 8, "recycling": 12}
"""Nodes of the largest draft, untold."""
METHODS = {"ngram": "reference", "draft_model": "draft", "medusa": "medusa", "lookahead": "lookahead"}
"""vLLM's names in a --speculative-config -> ours."""
LEAST_CHANCE = 0.35
"""Of a node that a reference drafter proposes on a CPU, where a step with drafts costs a fifth more before its first node."""
LOGIT_ROWS = 1024
"""Most rows of logits of a step with drafts; with more rows fewer nodes are verified."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `speculate` names. host: drafters of HOST, in order. documents: a text that the reference drafter may quote.
    device: recurrent, draft, medusa, recycling or none; folder: of its weights. most: nodes of the largest draft. chains: they
    may not branch."""

    host: tuple[str, ...] = ()
    documents: Path | None = None
    device: str = ""
    folder: Path | None = None
    most: int = 0
    chains: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of nodes that are tried: each one to 4, then every half step of a doubling."""
        fine = [*range(min(self.most, 4) + 1), 6, 8, 12, 16, 24, 32, 48]
        return (*[size for size in fine if size < self.most], self.most)


def draft_of(folder: Path) -> Path | None:
    """The recurrent draft that is shipped for the model in `folder`."""
    return folder.parent / "recurrent" if folder == shipped_model() else None


def read_wanted(config: EngineConfig, made_for_it: Path | None = None) -> Wanted:
    """made_for_it: a recurrent draft of the model, which auto takes as well. Raises ConfigError for an option that names nothing
    we have."""
    text, most = config.speculate.strip(), config.draft_tokens
    if text.startswith("{"):
        text, most = _from_json(text, most)
    if text in ("", "off"):
        return Wanted()
    if text == "auto":  # what gains most on the shipped model, and what needs nothing of any other
        text = "reference" if made_for_it is None else f"reference+recurrent:{made_for_it}"
    wanted = Wanted()
    for part in text.split("+"):
        name, _, rest = part.partition(":")
        if name in HOST:
            documents = Path(rest) if rest else wanted.documents
            wanted = replace(wanted, host=(*wanted.host, name), documents=documents)
        elif name in MOST and not wanted.device:
            if (name == "recycling") is bool(rest):
                raise _refusal(f"{part!r} must {'not ' if rest else ''}name a folder")
            wanted = replace(wanted, device=name, folder=Path(rest) if rest else None)
        else:
            raise _refusal(
                f"{part!r} is unknown" if name not in MOST else f"{part!r} is a second drafter on the device"
            )
    names = (*wanted.host, *filter(None, [wanted.device]))
    if config.deterministic and names not in (("draft",), ("recurrent",)):
        raise ConfigError(
            "deterministic covers chains of drafts, and all but draft:FOLDER and recurrent:FOLDER draft trees: take those or none.",
            param="speculate",
        )
    return replace(wanted, most=min(MAX_DRAFT, most or max(MOST[name] for name in names)), chains=config.deterministic)


def _from_json(text: str, most: int | None) -> tuple[str, int | None]:
    """A --speculative-config as vLLM's users write it."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise _refusal(f"the JSON cannot be read ({error})") from None
    method = given.get("method", "draft_model" if "model" in given else "")
    if method not in METHODS:
        raise _refusal(f"method {method!r} is none of {', '.join(METHODS)}")
    name, count = METHODS[method], given.get("num_speculative_tokens")
    if count is not None and not (type(count) is int and 1 <= count <= MAX_DRAFT):
        raise _refusal(f"num_speculative_tokens is {count!r}, not a number from 1 to {MAX_DRAFT}")
    if name in HOST:
        return name, most or count
    if "model" not in given:
        raise _refusal(f"method {method!r} needs a model")
    return f"{name}:{given['model']}", most or count


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"speculate: {reason}. Use auto, reference[:FILE], lookahead, recycling, recurrent:FOLDER, draft:FOLDER or "
        "medusa:FOLDER; + joins host drafters with one of the others.",
        param="speculate",
    )


def _draft_config(wanted: Wanted, spec: ModelSpec) -> tuple[Path, ModelConfig]:
    """A draft model's folder, and how it is read: in the target's number type and context."""
    folder = resolve_model(ModelConfig(model=str(wanted.folder)))
    return folder, ModelConfig(model=str(folder), dtype=spec.dtype)


def weigh(wanted: Wanted, spec: ModelSpec, rows: int, taken: int) -> Beside:
    """What the drafters take beside the model `spec` as served in up to `rows` rows; taken: bytes that others hold. Raises
    ConfigError for a draft that does not fit the model."""
    if not wanted.most:
        return Beside(bytes=taken)
    logits = min(LOGIT_ROWS, rows * (1 + wanted.most))
    if wanted.device == "draft":
        folder, config = _draft_config(wanted, spec)
        draft = served_spec(read_model(folder)[0], config)
        check_draft(draft, spec)
        return Beside(draft.layers, taken + draft.weight_bytes, logits)
    if wanted.device in ("medusa", "recurrent") and wanted.folder is not None:
        held = 2 * sum(file.stat().st_size for file in wanted.folder.glob("*") if file.is_file())
        return Beside((), taken + held, logits)
    return Beside((), taken, logits)


def open_drafters(
    wanted: Wanted, target: LoadedModel, folder: Path, dummy: bool
) -> tuple[Speculation | None, DeviceDrafter]:
    """The drafters for a loaded target; folder: of its tokenizer. dummy: a draft model gets random weights too."""
    if not wanted.most:
        return None, NoDrafter()
    device, shape = _open_device(wanted, target, dummy)
    host = [_open_host(name, wanted, target, folder) for name in wanted.host]
    asked = None if not host else host[0] if len(host) == 1 else FirstOf(host)
    return Drafts(asked, shape, Pace(wanted.sizes), LOGIT_ROWS), device


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
        raise _refusal(f"the document {str(wanted.documents)!r} cannot be read ({error})") from None
    return Reference([Tokenizer.load(folder).encode(text, add_special_tokens=False)], least_chance=least)


def _open_device(wanted: Wanted, target: LoadedModel, dummy: bool) -> tuple[DeviceDrafter, OnDevice | None]:
    spec, place = target.spec, target.decoder.embedding.device
    if wanted.device == "draft":
        folder, config = _draft_config(wanted, spec)
        config = replace(config, load_format="dummy" if dummy else "auto")
        model = build(folder, model=config, ops=target.ops, device=place)
        return DraftModel(model, read_vocabulary(folder, model.spec)), OnDevice(wanted.most, reads=True)
    if wanted.device == "recurrent" and wanted.folder is not None:
        weights = load_recurrent(wanted.folder, spec)
        rates = [row[: 1 if wanted.chains else None] for row in weights.accuracies]
        nodes = tree(rates, min(wanted.most, MOST["recurrent"]))
        recurrent = Recurrent(weights, spec, target.ops, DTYPES[spec.dtype], place, nodes)
        return recurrent, OnDevice(len(nodes), recurrent.parents)
    if wanted.device == "medusa" and wanted.folder is not None:
        heads = load_heads(wanted.folder, spec, target.ops, DTYPES[spec.dtype], place)
        medusa = Medusa(heads, target.decoder.logits, wanted.most)
        return medusa, OnDevice(len(medusa.parents), medusa.parents)
    if wanted.device == "recycling":
        recycling = Recycling(spec.vocab_size, place)
        return recycling, OnDevice(min(wanted.most, len(recycling.parents)), recycling.parents)
    return NoDrafter(), None
