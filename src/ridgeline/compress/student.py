"""The start of a student that has a shape of its own: a model folder, or a config.json with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ridgeline.compress.checkpoint import Checkpoint
from ridgeline.compress.decoder import TrainableDecoder, save_decoder
from ridgeline.compress.job import copy_other_files
from ridgeline.compress.storage import Floats
from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import read_spec
from ridgeline.text.tokenizer import Tokenizer

PROBE_CHARACTERS = 4096
"""Characters of the texts that the tokenizers of both folders encode."""


def check_student(student: Path, teacher: Checkpoint, length: int, probe: str) -> None:
    """Raise ConfigError unless a student can learn from a teacher: same vocabulary, and a context of `length` tokens.

    Args:
        student: model folder, or a file like config.json.
        probe: text that the tokenizers of both folders must encode alike.
    """
    option = "student" if student.is_dir() else "student_config"
    flag = f"--{option.replace('_', '-')}"
    spec = _spec(student, flag, option)
    if spec.vocab_size != teacher.spec.vocab_size:
        raise ConfigError(
            f"vocab_size of {flag} {student} is {spec.vocab_size}, but the teacher has {teacher.spec.vocab_size} tokens: give a "
            f"student with vocab_size {teacher.spec.vocab_size} and the teacher's tokenizer.",
            param=option,
        )
    if spec.max_len < length:
        raise ConfigError(
            f"max_position_embeddings of {flag} {student} is {spec.max_len}, but rows have {length} tokens: lower --length to "
            f"{spec.max_len}, or give a student with a longer context.",
            param=option,
        )
    if student.is_dir() and not isinstance(Checkpoint(student).storage, Floats):
        raise ConfigError(
            f"--student {student} is quantized or pruned and cannot be trained: give the original.", param=option
        )
    if student.is_dir() and (student / "tokenizer.json").is_file():
        text = probe[:PROBE_CHARACTERS]
        ours, theirs = (
            Tokenizer.load(folder).encode(text, add_special_tokens=False) for folder in (student, teacher.folder)
        )
        if ours != theirs:
            raise ConfigError(
                f"The tokenizer of --student {student} gives other tokens than the teacher's: give a student with the teacher's "
                "tokenizer, or --student-config for a new one.",
                param=option,
            )


def student_checkpoint(student: Path, teacher: Checkpoint, folder: Path) -> Checkpoint:
    """Return the checkpoint that training starts from.

    student: model folder, or a file like config.json, whose model is written into `folder` with random weights (seed 0) and the
    teacher's tokenizer.
    """
    if student.is_dir():
        return Checkpoint(student)
    if not (folder / "config.json").is_file():
        config = _read(student, "--student-config", "student_config")
        torch.manual_seed(0)
        save_decoder(TrainableDecoder(read_spec(config)), folder, config)
        copy_other_files(teacher.folder, folder)
    return Checkpoint(folder)


def _spec(student: Path, flag: str, option: str) -> ModelSpec:
    if student.is_dir():
        return Checkpoint(student).spec
    try:
        return read_spec(_read(student, flag, option))
    except (ConfigError, UnsupportedModel) as error:
        raise ConfigError(f"{flag} {student}: {error.message}", param=option) from None


def _read(path: Path, flag: str, option: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Cannot read {flag} {path} ({getattr(error, 'strerror', None) or error}): give a file like config.json.",
            param=option,
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{flag} {path} does not hold a JSON object: give a file like config.json.", param=option)
    if "quantization_config" in config:
        raise ConfigError(
            f"{flag} {path} has a quantization_config: leave it out, because training needs floats.", param=option
        )
    return config
