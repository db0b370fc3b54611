"""Control tokens under private names: a tokenizer.json in which no text spells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PRIVATE = "\ue000"
"""A private-use character. It makes names that the texts of grammars do not contain."""


def rename_tokens(content: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rename added tokens of a decoded tokenizer.json, in place; their ids stay the same. names: new name by text.

    Text that spells a renamed token becomes ordinary tokens: the token is renamed in the model's vocabulary too, and merges
    that build it from letters are removed.
    """
    model = content["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): index for name, index in model["vocab"].items()}
    else:  # pairs of a piece and its score
        model["vocab"] = [[names.get(name, name), *rest] for name, *rest in model["vocab"]]
    if model.get("unk_token") is not None:  # the model looks this token up by its name
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    return content


def nameless(content: dict[str, Any]) -> dict[str, Any]:
    """A decoded tokenizer.json for the grammar library, whose added tokens have private names; grammars use their ids.

    Where a grammar leaves one text only (a constant, for example), the library tokenizes that text and allows the first token
    alone. For the text of an added token it would allow the added token, and then refuse it, because the grammar asks for
    letters.
    """
    names = {
        token["content"]: f"{token['content'][:1]}{_PRIVATE}{token['content'][1:]}"
        for token in content["added_tokens"]
        if _special_to_library(token)
    }
    names.pop(content["model"].get("unk_token"), None)
    return rename_tokens(content, names)


def _special_to_library(token: dict[str, Any]) -> bool:
    """Whether the grammar library takes an added token for more than its text."""
    text: str = token["content"]
    return token["special"] or (text.startswith("<") and text.endswith(">"))
