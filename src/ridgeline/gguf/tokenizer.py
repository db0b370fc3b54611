"""tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

Two kinds: gpt2 (byte-level BPE with merges and the name of a pre-tokenizer, as in Llama 3, Qwen and SmolLM) and llama
(SentencePiece with scores, as in Llama 2 and Mistral). Pre-tokenizers: llama-vocab.cpp of llama.cpp. The merges of scored
pieces: transformers' SentencePieceExtractor, which joins the pieces that form a piece of the highest score first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.gguf.config import required
from ridgeline.gguf.file import GgufFile

Json = dict[str, Any]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of tokenizer.ggml.token_type."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3")
_QWEN_NAMES = ("qwen2", "deepseek-r1-qwen")
_GPT2_NAMES = ("gpt-2", "smollm")
_SPACE = "\u2581"


def make_tokenizer(file: GgufFile) -> tuple[Json, Json]:
    """(tokenizer.json, tokenizer_config.json). Raises UnsupportedModel for another kind of tokenizer or pre-tokenizer."""
    kind = required(file, "tokenizer.ggml.model")
    tokens = _list(file, "tokens", str)
    if len(set(tokens)) != len(tokens):
        raise ConfigError(f"{file.path}: tokenizer.ggml.tokens lists a token twice: convert or download it again.")
    types = _list(file, "token_type", int) if "tokenizer.ggml.token_type" in file.metadata else [NORMAL] * len(tokens)
    if kind == "gpt2":
        parts = _byte_level(file, tokens)
    elif kind == "llama":
        parts = _sentencepiece(file, tokens, types)
    else:
        raise file.refused(
            f"tokenizer.ggml.model {kind!r} is not read",
            "supported are gpt2 and llama; serve the safetensors of this model",
        )
    added = [
        _added(index, token, special=types[index] in (CONTROL, UNKNOWN))
        for index, token in enumerate(tokens)
        if types[index] in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    frame = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return frame | parts | {"post_processor": _begin(file, kind, tokens)}, _settings(file, tokens)


def _list(file: GgufFile, name: str, kind: type | tuple[type, ...]) -> list[Any]:
    """A list of the metadata, with as many values as there are tokens."""
    values = required(file, f"tokenizer.ggml.{name}")
    wanted = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if not isinstance(values, list) or (name != "merges" and len(values) != wanted):
        raise ConfigError(f"{file.path}: tokenizer.ggml.{name} is not a list of {wanted} values: download it again.")
    if not all(isinstance(value, kind) for value in values):
        raise ConfigError(f"{file.path}: tokenizer.ggml.{name} has a value of another type: download it again.")
    return values


def _added(index: int, token: str, *, special: bool) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": special}


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> Json:
    name = required(file, "tokenizer.ggml.pre")
    pattern = _LLAMA3 if name in _LLAMA3_NAMES else _QWEN
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    if name in _GPT2_NAMES:
        digits: list[Json] = [{"type": "Digits", "individual_digits": True}] if name == "smollm" else []
        steps = [*digits, _byte_step(use_regex=True)]
    elif name in (*_LLAMA3_NAMES, *_QWEN_NAMES):
        steps = [split, _byte_step(use_regex=False)]
    else:
        known = ", ".join((*_LLAMA3_NAMES, *_QWEN_NAMES, *_GPT2_NAMES))
        raise file.refused(f"tokenizer.ggml.pre {name!r} is not read", f"supported are {known}; serve the safetensors")
    merges = [merge.split(" ") for merge in _list(file, "merges", str)]
    vocab = {token: index for index, token in enumerate(tokens)}
    _check_merges(file, merges, vocab)
    model = _bpe(vocab, merges, ignore_merges=name in _LLAMA3_NAMES)
    return {
        "normalizer": {"type": "NFC"} if name in _QWEN_NAMES else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _byte_step(use_regex=True),
        "model": model,
    }


def _byte_step(*, use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _check_merges(file: GgufFile, merges: Sequence[Sequence[str]], vocab: Mapping[str, int]) -> None:
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise ConfigError(
                f"{file.path}: tokenizer.ggml.merges has {' '.join(merge)!r}, which is not a pair of tokens: download it again."
            )


def _bpe(vocab: Mapping[str, int], merges: Sequence[Sequence[str]], **options: Any) -> Json:
    return {"type": "BPE", "dropout": None, "vocab": dict(vocab), "merges": list(merges), **options}


def _sentencepiece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> Json:
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = _list(file, "scores", float)
    joined = {token: scores[i] for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    start = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": BYTE in types}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*start, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, _merges(vocab, joined), **options),
    }


def _merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces that forms a piece, the piece of the highest score first."""
    pairs = []
    for piece, score in scores.items():
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in halves if pair[0] in scores and pair[1] in scores]
        pairs += [(score, *pair) for pair in sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    pairs.sort(key=lambda pair: (pair[0], len(pair[1]), len(pair[2])), reverse=True)
    return [(left, right) for _, left, right in pairs]


def _begin(file: GgufFile, kind: str, tokens: Sequence[str]) -> Json | None:
    """The post-processor that puts the BOS token before a text; None if the model has none."""
    is_llama = kind == "llama" or file.metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    if file.metadata.get("tokenizer.ggml.add_eos_token", False):
        raise file.refused("tokenizer.ggml.add_eos_token is not supported", "serve the safetensors of this model")
    if not file.metadata.get("tokenizer.ggml.add_bos_token", is_llama):
        return None
    token, index = _token(file, "bos", tokens), file.metadata.get("tokenizer.ggml.bos_token_id")
    if token is None:
        return None
    special: Json = {"SpecialToken": {"id": token, "type_id": 0}}
    texts: list[Json] = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [special, texts[0]],
        "pair": [special, texts[0], {"SpecialToken": {"id": token, "type_id": 1}}, texts[1]],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


def _token(file: GgufFile, name: str, tokens: Sequence[str]) -> str | None:
    """The text of a special token. Raises UnsupportedModel for an id outside the vocabulary."""
    index = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.{name}_token_id is {index!r}, and there are {len(tokens)} tokens: download it again."
        )
    return tokens[index]


def _settings(file: GgufFile, tokens: Sequence[str]) -> Json:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    texts = {f"{name}_token": _token(file, theirs, tokens) for name, theirs in names.items()}
    settings: Json = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {name: text for name, text in texts.items() if text is not None}
    template = file.metadata.get("tokenizer.chat_template")
    return settings if template is None else settings | {"chat_template": template}
