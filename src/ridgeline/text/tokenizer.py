"""Text to token ids and back: a checkpoint's tokenizer.json, with settings from tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ridgeline.core.errors import ConfigError, RequestError
from ridgeline.text.pieces import Pieces, read_pieces

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
LEGACY_SPECIALS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
_LONG = 4096
"""Characters from which a text is encoded without the interpreter lock."""
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A loaded tokenizer. Make one with `Tokenizer.load`.

    vocab_size: highest id + 1; a model's vocabulary may be padded beyond it. specials: text by name ("bos_token", ...).
    special_ids: ids that `skip_special_tokens` hides. markup_ids: added tokens that stay in the text (tags of tool calls
    and reasoning). templates: chat templates by name: "default" and, in some checkpoints, "tool_use".
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    pieces: Pieces = field(repr=False)
    vocab_size: int
    specials: Mapping[str, str]
    special_ids: frozenset[int]
    markup_ids: frozenset[int]
    templates: Mapping[str, str]

    @classmethod
    def load(cls, model_dir: str | Path) -> Tokenizer:
        """Read a model folder. Raises ConfigError naming a file that is missing or broken."""
        folder = Path(model_dir)
        config = _read_json(folder / CONFIG_FILE)
        specials = _specials(config, _read_json(folder / LEGACY_SPECIALS_FILE))
        backend = _backend(folder / TOKENIZER_FILE)
        _add_tokens(backend, config, specials)
        vocab = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        return cls(
            backend=backend,
            pieces=read_pieces(json.loads(backend.to_str())["decoder"], vocab),
            vocab_size=max(vocab.values(), default=-1) + 1,
            specials=specials,
            special_ids=frozenset(index for index, token in added.items() if token.special),
            markup_ids=frozenset(index for index, token in added.items() if not token.special),
            templates=_templates(folder / TEMPLATE_FILE, config),
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`. add_special_tokens: also add the tokens that the tokenizer puts around a text (a BOS, for example).

        tokenizer.json alone defines these tokens, as in transformers 5; `add_bos_token` of tokenizer_config.json is ignored.
        Text of special tokens inside `text` becomes those tokens. Raises RequestError for text that is not Unicode.
        """
        check_unicode(text)
        ids: list[int] = encode_text(self.backend, text, add_special_tokens).ids
        return ids

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """As `encode`, with the first character of each token and the character after it."""
        check_unicode(text)
        encoding = encode_text(self.backend, text, add_special_tokens)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `ids`. Ids outside the vocabulary have no text."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, text: str) -> int | None:
        """Id of the token whose text in the vocabulary is exactly `text`, special tokens included."""
        index: int | None = self.backend.token_to_id(text)
        return index

    def token_bytes(self, index: int) -> bytes:
        """Bytes that one token adds to a text, possibly part of a character. Empty for an id outside the vocabulary."""
        return self.pieces.bytes_of(index)

    def token_text(self, index: int) -> str:
        """The token's bytes as text, with U+FFFD for incomplete characters. Its leading space is kept."""
        return self.token_bytes(index).decode("utf-8", "replace")

    @property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's end token. A model may have more (generation_config.json)."""
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        text = self.specials.get(name)
        return None if text is None else self.token_id(text)


def check_unicode(text: str) -> None:
    """Raises RequestError for text that cannot be written in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"character {error.start}"
        raise RequestError(f"The text holds a lone surrogate at {place}: send valid Unicode.") from error


def encode_text(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
    """The encoding of one text. A long text is encoded as a batch of one: only batches release the interpreter lock."""
    if len(text) < _LONG:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): download the model again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object: download the model again.")
    return content


def _backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist: a model folder needs a {TOKENIZER_FILE} "
            "(transformers writes one with AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER))."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _text(token: Any) -> str | None:
    """Content of a token given as text or as an AddedToken object in JSON."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _specials(config: dict[str, Any], legacy: dict[str, Any]) -> dict[str, str]:
    texts = {name: _text(config[name] if name in config else legacy.get(name)) for name in SPECIAL_NAMES}
    return {name: text for name, text in texts.items() if text is not None}


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], specials: dict[str, str]) -> None:
    """Add tokens that only tokenizer_config.json lists to the vocabulary, in the order of their ids."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            known.add(token["content"])
            flags = {key: bool(token[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in token}
            special = bool(token.get("special")) or token["content"] in specials.values()
            backend.add_tokens([AddedToken(token["content"], special=special, **flags)])
    missing = [text for text in dict.fromkeys(specials.values()) if text not in known]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {}
