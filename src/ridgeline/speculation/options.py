"""What the option `speculate` names, and whether a draft model fits."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.core.config import EngineConfig
from ridgeline.core.draft import MAX_DRAFT
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import ModelSpec

HOST = ("reference", "lookahead")
MOST = {"reference": 11, "lookahead": 30, "recurrent": 7, "draft": 4, "medusa": 8, "recycling": 12}
"""Nodes of the largest draft, untold."""
METHODS = {"ngram": "reference", "draft_model": "draft", "medusa": "medusa", "lookahead": "lookahead"}
"""vLLM's names in a --speculative-config -> ours."""


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
                raise refusal(f"{part!r} must {'not ' if rest else ''}name a folder")
            wanted = replace(wanted, device=name, folder=Path(rest) if rest else None)
        else:
            raise refusal(
                f"{part!r} is unknown" if name not in MOST else f"{part!r} cannot be joined to {wanted.device!r}"
            )
    names = (*wanted.host, *filter(None, [wanted.device]))
    if config.deterministic and names not in (("draft",), ("recurrent",)):
        raise ConfigError(
            "With --deterministic only --speculate draft:FOLDER or recurrent:FOLDER is possible, because the other drafters "
            "propose trees: use one of the two, or leave --speculate out.",
            param="speculate",
        )
    return replace(wanted, most=min(MAX_DRAFT, most or max(MOST[name] for name in names)), chains=config.deterministic)


def _from_json(text: str, most: int | None) -> tuple[str, int | None]:
    """A --speculative-config as vLLM's users write it."""
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
    if name in HOST:
        return name, most or count
    if "model" not in options:
        raise refusal(f'method {method!r} needs the key "model"')
    return f"{name}:{options['model']}", most or count


def refusal(reason: str) -> ConfigError:
    """An option that cannot be followed, and what can be."""
    return ConfigError(
        f"--speculate: {reason}. Use auto, reference[:FILE], lookahead, recycling, recurrent:FOLDER, draft:FOLDER or "
        "medusa:FOLDER; reference and lookahead can be joined with one another and with one of the others by +.",
        param="speculate",
    )


def check_files(wanted: Wanted) -> None:
    """Raises ConfigError for a document or a folder of weights that does not exist. A draft model may be a name on the hub."""
    if wanted.documents is not None and not wanted.documents.is_file():
        raise refusal(f"the document {wanted.documents} is not a file")
    if wanted.folder is not None and wanted.device != "draft" and not (wanted.folder / "config.json").is_file():
        raise refusal(f"{wanted.folder} does not exist or has no config.json")


def check_draft(draft: ModelSpec, target: ModelSpec) -> None:
    """Raises ConfigError if the draft's tokens mean something else, or its context is too short."""
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
    """`draft_vocabulary` of a draft's config.json: the tokens that it may say, ascending; empty for all. Raises ConfigError."""
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
