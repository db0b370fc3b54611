"""A model folder for a GGUF file: configuration and tokenizer from its metadata, and a link to the file.

All that reads models reads this folder. It is in the user's cache, has a few megabytes, and is written again if the file changes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

from ridgeline.core.errors import ConfigError
from ridgeline.core.version import VERSION
from ridgeline.gguf.config import make_config
from ridgeline.gguf.file import read_file
from ridgeline.gguf.tokenizer import make_tokenizer

SUFFIX = ".gguf"
LINK = "weights.gguf"
"""Name of the link to the file."""
_FORM = 3
"""Number of this form of folders. It increases when other contents are written."""


def model_folder(path: Path, cache: Path | None = None) -> Path:
    """The folder for a GGUF file, written first if there is none. Raises ConfigError or UnsupportedModel.

    cache: where folders are; None: ridgeline/gguf in XDG_CACHE_HOME or ~/.cache.
    """
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgeline" / "gguf"
    path = path.resolve()
    state = path.stat()
    key = sha256(repr((str(path), state.st_size, state.st_mtime_ns, VERSION, _FORM)).encode()).hexdigest()[:24]
    folder = root / key
    if (folder / "config.json").is_file():
        return folder
    contents = _contents(path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _write(root, folder, path, contents)
    except OSError as error:
        raise ConfigError(
            f"The configuration of {path} cannot be written to {root} ({error}): set XDG_CACHE_HOME to a folder of this user."
        ) from None
    return folder


def _contents(path: Path) -> dict[str, str]:
    file = read_file(path)
    config, generation = make_config(file)
    tokenizer, settings = make_tokenizer(file)
    files = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
    }
    return {name: json.dumps(content, ensure_ascii=False) for name, content in files.items()}


def _write(root: Path, folder: Path, path: Path, contents: dict[str, str]) -> None:
    """Write the folder under another name and rename it: other processes see it whole or not at all."""
    draft = Path(tempfile.mkdtemp(dir=root))
    try:
        for name, content in contents.items():
            (draft / name).write_text(content, encoding="utf-8")
        (draft / LINK).symlink_to(path)
        draft.rename(folder)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not (folder / "config.json").is_file():  # another process may have written it in the meantime
            raise
