from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from ridgeline.core.errors import ConfigError, RequestError, UnsupportedModel
from ridgeline.text.tokenizer import Tokenizer
from tests.text.conftest import SENTENCES, byte_level_backend, sentencepiece_backend, write_model

TEXTS = [*SENTENCES, "", " ", "  two  spaces ", "<|im_start|>user\nhi<|im_end|>", "<s>hi</s>", "\x00\n\t\r"]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("special", [True, False])
def test_ids_and_text_as_in_transformers(kind: str, special: bool, request: pytest.FixtureRequest) -> None:
    folder, ours = request.getfixturevalue(f"{kind}_dir"), request.getfixturevalue(kind)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special), text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids >= set(theirs.all_special_ids)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": None},
        {"bos_token": None, "add_bos_token": True},
    ],
)
@pytest.mark.parametrize("processor", [True, False])
def test_tokens_around_a_text_as_in_transformers(extra: dict[str, Any], processor: bool, tmp_path: Path) -> None:
    backend = byte_level_backend()
    if processor:
        ids = [(text, backend.token_to_id(text)) for text in ("<|endoftext|>", "<|im_end|>")]
        backend.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A <|im_end|>", special_tokens=ids)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    folder = write_model(tmp_path, backend, config | extra)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    assert ours.encode("the fox", add_special_tokens=True) == theirs.encode("the fox")
    assert ours.encode("the fox", add_special_tokens=False) == theirs.encode("the fox", add_special_tokens=False)


def test_tokens_named_only_in_the_configuration_join_the_vocabulary(tmp_path: Path) -> None:
    added = {"602": {"content": "<think>", "special": False, "normalized": False}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|stop|>", "added_tokens_decoder": added}
    folder = write_model(tmp_path, byte_level_backend(), config)
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer.load(folder)
    text = "a <think> b <|stop|>"
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.eos_id == theirs.eos_token_id
    assert ours.eos_id in ours.special_ids and ours.token_id("<think>") not in ours.special_ids


def test_token_bytes_join_to_the_text(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for text in SENTENCES:
        ids = byte_level.encode(text, add_special_tokens=False)
        assert b"".join(map(byte_level.token_bytes, ids)).decode() == text
        ids = sentencepiece.encode(text, add_special_tokens=False)
        assert b"".join(map(sentencepiece.token_bytes, ids)).decode() == " " + text
    half = byte_level.encode("\U0001f9ff", add_special_tokens=False)
    assert b"".join(map(byte_level.token_bytes, half)) == b"\xf0\x9f\xa7\xbf"
    assert byte_level.token_text(half[0]) == "\ufffd"
    assert byte_level.token_bytes(10**9) == b"" and byte_level.token_bytes(-1) == b""


def test_lone_surrogate_is_the_callers_error(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate at character 3"):
        byte_level.encode("abc\ud800", add_special_tokens=False)


def test_ids_outside_the_vocabulary_have_no_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("fox", add_special_tokens=False)
    assert byte_level.decode([*ids, 99_999], skip_special_tokens=True) == "fox"


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(tmp_path)


def test_other_decoders_are_refused_by_name(tmp_path: Path) -> None:
    backend = byte_level_backend()
    content = json.loads(backend.to_str())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer.load(tmp_path)


def test_templates_from_file_configuration_or_a_list(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    backend = sentencepiece_backend()
    assert Tokenizer.load(write_model(tmp_path / "none", backend, {})).templates == {}
    assert Tokenizer.load(write_model(tmp_path / "text", backend, {"chat_template": "A"})).templates == {"default": "A"}
    folder = write_model(tmp_path / "list", backend, {"chat_template": listed})
    assert Tokenizer.load(folder).templates == {"default": "A", "tool_use": "B"}
    (folder / "chat_template.jinja").write_text("C")
    assert Tokenizer.load(folder).templates == {"default": "C"}
