"""Parses the option `speculate` and checks that a draft model fits the target."""

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
"""Default nodes of the largest draft."""
METHODS = {"ngram": "reference", "draft_model": "draft", "medusa": "medusa", "lookahead": "lookahead"}
"""Method of vLLM's --speculative-config -> drafter."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parsed option `speculate`.

    host: host drafters, in order. documents: file with a text for the reference drafter. device: recurrent, draft, medusa,
    recycling or "". folder: weights of the device drafter. most: nodes of the largest draft. chains: drafts may not branch.
    """

    host: tuple[str, ...] = ()
    documents: Path | None = None
    device: str = ""
    folder: Path | None = None
    most: int = 0
    chains: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Draft sizes that the controller tries: each size up to 4, then two sizes per doubling."""
        candidates = [*range(min(self.most, 4) + 1), 6, 8, 12, 16, 24, 32, 48]
        return (*[size for size in candidates if size < self.most], self.most)


def read_wanted(config: EngineConfig, model_draft: Path | None = None) -> Wanted:
    """Parse the option. model_draft: folder of a recurrent draft for this model, which auto also uses. Raises ConfigError for an
    invalid option."""
    text, most = config.speculate.strip(), config.draft_tokens
    if text.startswith("{"):
        text, most = _from_json(text, most)
    if text in ("", "off"):
        return Wanted()
    if text == "auto":  # the best drafters of the shipped model; for others, the one that needs no weights
        text = "reference" if model_draft is None else f"reference+recurrent:{model_draft}"
    wanted = Wanted()
    for part in text.split("+"):
        name, _, argument = part.partition(":")
        if name in HOST:
            documents = Path(argument) if argument else wanted.documents
            wanted = replace(wanted, host=(*wanted.host, name), documents=documents)
        elif name in MOST and not wanted.device:
            if (name == "recycling") is bool(argument):
                raise refusal(f"{part!r} must {'not ' if argument else ''}name a folder")
            wanted = replace(wanted, device=name, folder=Path(argument) if argument else None)
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
    if name in HOST:
        return name, most or count
    if "model" not in options:
        raise refusal(f'method {method!r} needs the key "model"')
    return f"{name}:{options['model']}", most or count


def refusal(reason: str) -> ConfigError:
    """The error for an invalid option, with the valid ones."""
    return ConfigError(
        f"--speculate: {reason}. Use auto, reference[:FILE], lookahead, recycling, recurrent:FOLDER, draft:FOLDER or "
        "medusa:FOLDER; reference and lookahead can be joined with one another and with one of the others by +.",
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
