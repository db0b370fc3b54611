"""Parses the option `speculate` and checks that a draft model fits the target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ridgeline.core.config import EngineConfig
from ridgeline.core.draft import MAX_DRAFT
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import ModelSpec
from ridgeline.speculation.lookahead import SHAPE, DraftShape, read_shape


class DrafterKind(NamedTuple):
    """A drafter that the option can name."""

    on_host: bool
    """It reads tokens on the host, and can be joined to others. Otherwise it runs on the device, at the end of a step."""
    nodes: int
    """Default number of nodes of its largest draft."""
    argument: str = ""
    """What follows its name: "", an optional "[:FILE]" or "[:SIZES]", or a required ":FOLDER"."""
    chains: bool = False
    """It can propose chains only, which --deterministic requires."""


DRAFTERS: Mapping[str, DrafterKind] = {
    "reference": DrafterKind(on_host=True, nodes=11, argument="[:FILE]"),
    "lookahead": DrafterKind(on_host=True, nodes=SHAPE.nodes, argument="[:w=W,n=N,g=G]"),
    "recycling": DrafterKind(on_host=False, nodes=12),
    "recurrent": DrafterKind(on_host=False, nodes=7, argument=":FOLDER", chains=True),
    "draft": DrafterKind(on_host=False, nodes=4, argument=":FOLDER", chains=True),
    "medusa": DrafterKind(on_host=False, nodes=8, argument=":FOLDER"),
    "eagle": DrafterKind(on_host=False, nodes=4, argument=":FOLDER", chains=True),
    "mtp": DrafterKind(on_host=False, nodes=3, chains=True),
}
"""Name in the option -> drafter. build.py opens them."""
METHODS = {
    "ngram": "reference",
    "draft_model": "draft",
    "medusa": "medusa",
    "lookahead": "lookahead",
    "eagle": "eagle",
    "eagle3": "eagle",
    "mtp": "mtp",
    "mimo_mtp": "mtp",
    "deepseek_mtp": "mtp",
}
"""Method of vLLM's --speculative-config -> drafter."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parsed option `speculate`.

    host: names of host drafters, in order. documents: file with a text for the reference drafter. lookahead: shape of its
    largest draft. device: name of the device drafter, or "". folder: weights of the device drafter. max_nodes: nodes of the
    largest draft. chains: drafts may not branch.
    """

    host: tuple[str, ...] = ()
    documents: Path | None = None
    lookahead: DraftShape = SHAPE
    device: str = ""
    folder: Path | None = None
    max_nodes: int = 0
    chains: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.host, *filter(None, [self.device]))

    @property
    def branch(self) -> bool:
        """A drafter proposes trees by default."""
        return not all(DRAFTERS[name].chains for name in self.names)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Draft sizes that the controller tries: each size up to 4, then two sizes per doubling."""
        candidates = [*range(min(self.max_nodes, 4) + 1), 6, 8, 12, 16, 24, 32, 48]
        return (*[size for size in candidates if size < self.max_nodes], self.max_nodes)


def read_wanted(config: EngineConfig, model_draft: Path | None = None) -> Wanted:
    """Parse the option. model_draft: folder of a recurrent draft for this model, which auto also uses. Raises ConfigError for an
    invalid option."""
    text, nodes = config.speculate.strip(), config.draft_tokens
    if text.startswith("{"):
        text, nodes = _from_json(text, nodes)
    if text in ("", "off"):
        return Wanted()
    if text == "auto":  # the best drafters of the shipped model; for others, the one that needs no weights
        text = "reference" if model_draft is None else f"reference+recurrent:{model_draft}"
    wanted = Wanted()
    for part in text.split("+"):
        name, _, argument = part.partition(":")
        kind = DRAFTERS.get(name)
        if kind is None:
            raise refusal(f"{part!r} is unknown")
        if kind.argument == ":FOLDER" and not argument:
            raise refusal(f"{part!r} must name a folder")
        if argument and not kind.argument:
            raise refusal(f"{part!r} must not name a folder")
        path = Path(argument) if argument else None
        if name == "lookahead":
            wanted = replace(wanted, host=(*wanted.host, name), lookahead=read_shape(argument))
        elif kind.on_host:
            wanted = replace(wanted, host=(*wanted.host, name), documents=path or wanted.documents)
        elif wanted.device:
            raise refusal(f"{part!r} cannot be joined to {wanted.device!r}")
        else:
            wanted = replace(wanted, device=name, folder=path)
    largest = nodes or max(
        wanted.lookahead.nodes if name == "lookahead" else DRAFTERS[name].nodes for name in wanted.names
    )
    return replace(wanted, max_nodes=min(MAX_DRAFT, largest), chains=config.deterministic)


def _from_json(text: str, nodes: int | None) -> tuple[str, int | None]:
    """Convert a --speculative-config of vLLM (JSON) to (option, number of draft tokens)."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise refusal(f"the JSON cannot be read ({error})") from None
    method = options.get("method", "draft_model" if "model" in options else "")
    if method not in METHODS:
        raise refusal(f"method {method!r} is unknown (known methods: {', '.join(METHODS)})")
    name, count = METHODS[method], options.get("num_speculative_tokens")
    if count is not None and not (type(count) is int and 1 <= count <= MAX_DRAFT):
        raise refusal(f"num_speculative_tokens is {count!r}, not a whole number from 1 to {MAX_DRAFT}")
    if DRAFTERS[name].argument != ":FOLDER":
        return name, nodes or count
    if "model" not in options:
        raise refusal(f'method {method!r} needs the key "model"')
    return f"{name}:{options['model']}", nodes or count


def refusal(reason: str) -> ConfigError:
    """The error for an invalid option, with the valid ones."""
    *names, last = [f"{name}{kind.argument}" for name, kind in DRAFTERS.items()]
    joined = " and ".join(name for name, kind in DRAFTERS.items() if kind.on_host)
    return ConfigError(
        f"--speculate: {reason}. Use auto, {', '.join(names)} or {last}; {joined} can be joined with one another and with one of "
        "the others by +.",
        param="speculate",
    )


def check_files(wanted: Wanted) -> None:
    """Raise ConfigError if the document or the folder of weights does not exist. A draft model may be a hub name."""
    if wanted.documents is not None and not wanted.documents.is_file():
        raise refusal(f"the document {wanted.documents} is not a file")
    if wanted.folder is not None and wanted.device != "draft" and not (wanted.folder / "config.json").is_file():
        raise refusal(f"{wanted.folder} does not exist or has no config.json")


def check_draft(draft: ModelSpec, target: ModelSpec) -> None:
    """Raise ConfigError if the draft model's vocabulary size differs or its context is too short."""
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"The vocabulary of the draft model has {draft.vocab_size} tokens, that of the served model {target.vocab_size}: use a "
            "draft model with the same tokenizer.",
            param="speculate",
        )
    if draft.max_len < target.max_len:
        raise ConfigError(
            f"The draft model's context of {draft.max_len} tokens is shorter than the served {target.max_len}: lower "
            f"--max-model-len to {draft.max_len}, or use another draft model.",
            param="speculate",
        )


def read_vocabulary(folder: Path, draft: ModelSpec) -> tuple[int, ...]:
    """`draft_vocabulary` of a draft model's config.json: the tokens it may propose, ascending; empty: all. Raises ConfigError."""
    ids = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("draft_vocabulary", [])
    valid = isinstance(ids, list) and all(type(token) is int and 0 <= token < draft.vocab_size for token in ids)
    if not valid or len(set(ids)) < len(ids):
        raise ConfigError(
            f"draft_vocabulary in {folder / 'config.json'} must list distinct token ids below {draft.vocab_size}. Without "
            "the key the draft may propose every token.",
            param="speculate",
        )
    if ids and not draft.tied:
        raise ConfigError(
            f"draft_vocabulary in {folder / 'config.json'} requires tied embeddings (tie_word_embeddings): remove the key.",
            param="speculate",
        )
    return tuple(sorted(ids))
