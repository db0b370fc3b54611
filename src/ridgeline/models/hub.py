"""Resolves a model to a local folder: a folder, a GGUF file, a name on the Hugging Face hub, or the model of this package."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.gguf.folder import SUFFIX, model_folder

NEEDED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
WEIGHTS = ("*.safetensors",)
# Subfolders contain other exports of the same weights; "consolidated" is a second copy in Mistral's repositories.
UNNEEDED = ("*/*", "consolidated*")
# Not a path (./model, model.gguf): what does not exist there is not asked of the hub.
_HUB_NAME = re.compile(r"(?!\.)(?!.*\.(?i:gguf|safetensors|json)$)[\w.-]+(/[\w.-]+)?")


def shipped_model() -> Path:
    """Folder of the model that is shipped with the package."""
    return Path(str(files("ridgeline").joinpath("assets", "model")))


def resolve_model(
    model: ModelConfig,
    *,
    shipped: Path | None = None,
    snapshot: Callable[..., str] | None = None,
    cache: Path | None = None,
) -> Path:
    """The local folder of model.model, downloaded first if it is a hub name. Raises ConfigError with the remedy.

    An existing folder takes precedence over a hub name. With load_format dummy, weights are not downloaded.

    Args:
        shipped: the folder to use if no model is named; None: shipped_model().
        snapshot: the download function; None: huggingface_hub.snapshot_download.
        cache: where folders of GGUF files are written, see gguf.folder.
    """
    name = model.model
    folder = Path(name).expanduser() if name else shipped or shipped_model()
    if (folder / "config.json").is_file():
        if model.revision:
            raise ConfigError(
                f"--revision is for hub models, and {folder} is a folder: leave it out.", param="revision"
            )
        return folder
    if not name:
        raise ConfigError("The shipped model is missing from this installation: give a model folder or a hub name.")
    if folder.is_dir() and (files_in_gguf := sorted(folder.glob(f"*{SUFFIX}"))):
        raise ConfigError(f"The folder {folder} has no config.json: give the file, for example {files_in_gguf[0]}.")
    if folder.is_dir():
        raise ConfigError(f"The folder {folder} has no config.json: give a model folder in the layout of Hugging Face.")
    if folder.is_file() and folder.suffix == SUFFIX:
        return model_folder(folder, cache)
    if folder.is_file():
        raise ConfigError(
            f"{folder} is a file: give a *.gguf, or the folder that contains config.json and *.safetensors."
        )
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"{folder.absolute()} does not exist: check the path, or give a name on the hub, as in Qwen/Qwen3-0.6B."
        )
    return _download(model, snapshot)


def _download(model: ModelConfig, snapshot: Callable[..., str] | None) -> Path:
    # Imported here: a local folder does not need it, and the import takes a tenth of a second in the service and in the engine.
    from huggingface_hub import errors, snapshot_download

    name = model.model
    wanted = list(NEEDED if model.load_format == "dummy" else NEEDED + WEIGHTS)
    try:
        return Path(
            (snapshot or snapshot_download)(
                name, revision=model.revision, allow_patterns=wanted, ignore_patterns=list(UNNEEDED)
            )
        )
    except errors.GatedRepoError:
        raise ConfigError(
            f"The licence of {name} must be accepted first: accept it on huggingface.co/{name}, then set HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{name} has no revision {model.revision!r}: give another --revision.",
            param="revision",
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ConfigError(
            f"{name} is neither a local folder nor a public model on the hub: check the name. For a private model set HF_TOKEN."
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HTTPError, OSError) as error:
        raise ConfigError(
            f"{name} is not a folder or file here, and not in the cache of the hub, which cannot be reached "
            f"({type(error).__name__}). Check the path. For a model of the hub, run `hf download {name} --local-dir DIR` on a "
            "machine with network access, copy DIR here, and give DIR as the model. fit, plan and roofline need only its "
            "config.json."
        ) from None
