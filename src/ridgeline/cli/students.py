"""The options of `ridgeline compress` for students and served teachers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.cli.flags import Parser, whole_number
from ridgeline.compress.drafter_job import KINDS
from ridgeline.compress.served_teacher import ServedTeacher
from ridgeline.core.errors import ConfigError
from ridgeline.core.sampling import MAX_LOGPROBS
from ridgeline.quality.served import Endpoint

STUDENT = ("student", "student_config")
TEACHER = ("teacher_url", "teacher_model", "teacher_key_env", "teacher_logprobs")
RECIPES = {"distill": (*STUDENT, *TEACHER), "draft": STUDENT, "medusa": (), "recurrent": ()}
"""Recipe -> the options of this module that apply to it."""

MEASURED = ("tasks", "speed_tokens", "judged_tokens")
"""Options that measure a compressed model, which a drafter is not. 0 measures nothing."""


def add_options(parser: Parser) -> None:
    """Add the options."""
    group = parser.add_argument_group("students", "for the recipes distill and draft")
    group.add_argument("--student", metavar="FOLDER", help="model that is trained, with the tokenizer of MODEL")
    group.add_argument(
        "--student-config",
        metavar="FILE",
        help="config.json of a new model that is trained from random weights; vocab_size as in MODEL",
    )
    group.add_argument(
        "--teacher-url",
        metavar="URL",
        help="server of the OpenAI API that is the teacher, for distill; MODEL is then a folder with its config.json and "
        "tokenizer, with or without weights",
    )
    group.add_argument(
        "--teacher-model", metavar="NAME", help="name of the model on the server (default: its first model)"
    )
    group.add_argument("--teacher-key-env", metavar="NAME", help="environment variable with the API key of the server")
    group.add_argument(
        "--teacher-logprobs",
        type=whole_number,
        metavar="N",
        help="most probable tokens that the server reports for each token of the texts; 0: it samples continuations, for servers "
        f"that cannot score prompts (default: {MAX_LOGPROBS})",
    )


def check_options(recipe: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that do not apply to the recipe, and for training without texts."""
    allowed = RECIPES.get(recipe, ())
    for name in (*STUDENT, *TEACHER):
        if name in options and name not in allowed:
            able = " or ".join(f"--recipe {other}" for other, names in RECIPES.items() if name in names)
            raise ConfigError(
                f"--{name.replace('_', '-')} does not apply to the recipe {recipe}: use {able}.", param=name
            )
    if ignored := next((name for name in MEASURED if options.get(name) and recipe in KINDS), None):
        raise ConfigError(
            f"--{ignored.replace('_', '-')} does not apply to the recipe {recipe}, which measures the drafter's accuracy: leave it "
            "out.",
            param=ignored,
        )
    if recipe in RECIPES and "tune" not in options:
        raise ConfigError(f"The recipe {recipe} trains on texts: give --tune FILE.", param="tune")
    if all(name in options for name in STUDENT):
        raise ConfigError("--student and --student-config exclude each other: give one of them.", param="student")
    if unused := next((name for name in TEACHER if name in options and "teacher_url" not in options), None):
        raise ConfigError(f"--{unused.replace('_', '-')} applies to a server: give --teacher-url URL.", param=unused)


def student_of(options: Mapping[str, Any]) -> Path | None:
    """Return the folder or file of the student."""
    path = next((Path(options[name]) for name in STUDENT if name in options), None)
    if path is not None and "student" in options and not (path / "config.json").is_file():
        raise ConfigError(f"--student {path} is not a model folder: it has no config.json.", param="student")
    if path is not None and "student_config" in options and not path.is_file():
        raise ConfigError(
            f"--student-config {path} is not a file: give a file like config.json.", param="student_config"
        )
    return path


def teacher_of(options: Mapping[str, Any]) -> ServedTeacher | None:
    """Return the served teacher. None: the original is the teacher."""
    if "teacher_url" not in options:
        return None
    top = options.get("teacher_logprobs", MAX_LOGPROBS)
    if not 0 <= top <= MAX_LOGPROBS:
        raise ConfigError(f"--teacher-logprobs is {top}: give 0 to {MAX_LOGPROBS}.", param="teacher_logprobs")
    name = options.get("teacher_key_env", "")
    if name and name not in os.environ:
        raise ConfigError(
            f"The environment variable {name} is not set: export it with the API key.", param="teacher_key_env"
        )
    return ServedTeacher(
        Endpoint(options["teacher_url"], options.get("teacher_model", ""), os.environ.get(name, "")), top
    )
