"""Two small tokenizers, built once: byte-level BPE with ChatML tokens, and one in the style of Llama 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from ridgeline.text.tokenizer import Tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps.",
    'A call looks like {"name": "weather", "arguments": {"city": "Oslo", "days": 3}} in JSON.',
    "naïve café, über alles; привет мир; 日本語のテキスト; emoji 😀🎉 and 👩‍👩‍👧.",
    "def area(width, height):\n    return width * height\n",
    "0123456789 true false null [1, 2.5, -3e7]",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>"]


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 5, trainer)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Spaces as U+2581, a byte token for what the vocabulary lacks, one leading space lost in decoding."""
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    seed = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    seed.pre_tokenizer = pre_tokenizers.Metaspace()
    seed.train_from_iterator([text for text in SENTENCES if text.isascii()] * 5, trainer)
    learned = json.loads(seed.to_str())["model"]
    words = [word for word in learned["vocab"] if word not in ("<unk>", "<s>", "</s>")]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [tuple(pair) for pair in learned["merges"]]
    model = models.BPE(
        {name: index for index, name in enumerate(names)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def write_model(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return write_model(tmp_path_factory.mktemp("byte_level"), byte_level_backend(), config)


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
    }
    return write_model(tmp_path_factory.mktemp("sentencepiece"), sentencepiece_backend(), config)


@pytest.fixture(scope="session")
def byte_level(byte_level_dir: Path) -> Tokenizer:
    return Tokenizer.load(byte_level_dir)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_dir: Path) -> Tokenizer:
    return Tokenizer.load(sentencepiece_dir)
