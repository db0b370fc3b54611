"""Gives control tokens private names, so that no request text can spell them.

A chat template marks roles and turns with control tokens. User text that spells one must not become that token. The template
therefore uses names that only this process knows, and a copy of the tokenizer knows the control tokens by these names only.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import tokenizers

from ridgeline.core.errors import ConfigError
from ridgeline.text.tokenizer import Tokenizer, encode_text

MARK = f"~{secrets.randbelow(10**16):016}~"
"""Prefix of the private name of a control token. It is random, so no request contains it. Template filters (trim, upper, tojson)
and tokenizer normalizers do not change its characters. It is short, because it adds to the text that is tokenized."""

_PRIVATE = "\ue000"
"""A private-use character. Names with it do not occur in the texts of grammars."""


class ControlTokens:
    """A tokenizer that knows some of its added tokens by private names only. A private name is MARK + text.

    texts: the tokens' texts, longest first.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Collection[str]) -> None:
        """texts: texts of the added tokens to rename. Raises ConfigError when the renamed tokenizer has other ids."""
        self.texts = sorted(texts, key=len, reverse=True)
        added = tokenizer.backend.get_added_tokens_decoder().items()
        self._ids = {token.content: index for index, token in added if token.content in texts}
        # Texts such as "user" are not renamed: templates compare roles with such strings.
        patterns = [re.escape(text) for text in self.texts if not text.replace("_", "").isalnum()]
        self._pattern = re.compile("|".join(patterns) or r"(?!)")
        self._backend, self._countable = tokenizer.backend, frozenset[int]()
        if texts:
            self._rename()
        self._added_count = self._count(self._backend.encode("", add_special_tokens=True).ids)

    def _rename(self) -> None:
        content = msgspec.json.decode(self._backend.to_str())
        # The unknown token also stands for unknown characters, so it cannot be counted as a name.
        unknown_token = _unknown_token(content["model"])
        self._countable = frozenset(index for text, index in self._ids.items() if text != unknown_token)
        content = rename_tokens(content, {text: MARK + text for text in self.texts})
        self._backend = tokenizers.Tokenizer.from_str(msgspec.json.encode(content).decode())
        if any(self._backend.token_to_id(MARK + text) != index for text, index in self._ids.items()):
            raise ConfigError(
                "The tokenizer's control tokens cannot be kept apart from text: start with --allow-special-in-content."
            )

    def name(self, text: str) -> str:
        """Replace control tokens in a string of a chat template by their private names."""
        return self._pattern.sub(rf"{MARK}\g<0>", text)

    def encode(self, named: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text with private names for control tokens. `named` must be valid Unicode."""
        ids: list[int] = self._encoding(named, add_special_tokens)[1].ids
        return ids

    def encode_with_offsets(self, named: str, *, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Also where each token begins and ends in the text without private names."""
        named, encoding = self._encoding(named, add_special_tokens)
        names = [mark.start() for mark in re.finditer(MARK, named)]
        # A position of the text with names is shifted by the names that begin before it.
        offsets = [
            (start - len(MARK) * bisect_left(names, start), end - len(MARK) * bisect_left(names, end))
            for start, end in encoding.offsets
        ]
        return encoding.ids, offsets

    def _encoding(self, named: str, add_special_tokens: bool) -> tuple[str, tokenizers.Encoding]:
        """The encoding, and the text without the private names that did not become tokens."""
        added = self._added_count if add_special_tokens else 0
        encoding = encode_text(self._backend, named, add_special_tokens)
        while self._count(encoding.ids) < named.count(MARK) + added:
            # Some tokenizers accept a token only at certain places. Elsewhere its text is tokenized, which is repeated here.
            previous, named = named, self._without_unused_names(named, encoding)
            if named == previous:
                break
            encoding = encode_text(self._backend, named, add_special_tokens)
        return named, encoding

    def _count(self, ids: list[int]) -> int:
        return sum(map(self._countable.__contains__, ids))

    def _without_unused_names(self, named: str, encoding: tokenizers.Encoding) -> str:
        """Replace private names that did not become tokens by their texts."""
        known = frozenset(self._ids.values())
        spans = (span for index, span in zip(encoding.ids, encoding.offsets, strict=True) if index in known)
        used = {named.find(MARK, start, end) for start, end in spans}
        return re.sub(MARK, lambda mark: mark[0] if mark.start() in used else "", named)


def without_private_names(named: str) -> str:
    """Replace private names by their texts."""
    return named.replace(MARK, "")


def _unknown_token(model: Mapping[str, Any]) -> str | None:
    """The text of the token that a model uses for unknown characters."""
    if model.get("unk_id") is not None:
        text: str = model["vocab"][model["unk_id"]][0]
        return text
    return model.get("unk_token")


def rename_tokens(content: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rename added tokens of a decoded tokenizer.json, in place. Their ids stay the same. names: new name by text.

    Text that spells a renamed token becomes ordinary tokens, because the token is also renamed in the model's vocabulary, and
    merges that produce it are removed.
    """
    model = content["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): index for name, index in model["vocab"].items()}
    else:  # pairs of a piece and its score
        model["vocab"] = [[names.get(name, name), *score] for name, *score in model["vocab"]]
    if model.get("unk_token") is not None:  # the model looks this token up by its name
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return content


def hide_added_tokens(content: dict[str, Any]) -> dict[str, Any]:
    """Give added tokens of a decoded tokenizer.json private names, for the grammar library. Grammars refer to them by id.

    Where a grammar allows one text only (a constant, for example), the library tokenizes that text and allows its first token only.
    For the text of an added token it would allow the added token, and then reject it, because the grammar requires the letters.
    """
    names = {
        token["content"]: f"{token['content'][:1]}{_PRIVATE}{token['content'][1:]}"
        for token in content["added_tokens"]
        if _special_to_library(token)
    }
    names.pop(content["model"].get("unk_token"), None)
    return rename_tokens(content, names)


def _special_to_library(token: dict[str, Any]) -> bool:
    """Whether the grammar library treats an added token as more than its text."""
    text: str = token["content"]
    return token["special"] or (text.startswith("<") and text.endswith(">"))
