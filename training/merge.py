"""Weights between two runs: the first run's, moved a share of the way towards those of the run that went on from it
(Wortsman et al. 2022, "Robust fine-tuning of zero-shot models", with one share for each part of the model).

    python training/merge.py --first FOLDER --second RUN --out RUN2 --embedding 0 --attention 0.6 --mlp 0.3
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def part(name: str) -> str:
    """ "attention", "mlp" or "embedding" (with the last norm); a layer's norm belongs to what it feeds."""
    if "self_attn" in name or "input_layernorm" in name:
        return "attention"
    return "mlp" if "mlp" in name or "post_attention" in name else "embedding"


def merged(first: Path, second: Path, shares: dict[str, float]) -> dict[str, Tensor]:
    """The merged tensors in bfloat16, under the names of train.py; `first` and `second` hold model.safetensors."""
    begin, end = (
        {
            name.removeprefix("model."): tensor.float()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        for folder in (first, second)
    )
    return {name: begin[name].lerp(end[name], shares[part(name)]).bfloat16().contiguous() for name in begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("first", "second", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("embedding", "attention", "mlp"):
        parser.add_argument(f"--{name}", type=float, required=True, help="share of the way to the second run")
    given = vars(parser.parse_args())
    shares = {name: given[name] for name in ("embedding", "attention", "mlp")}
    given["out"].mkdir(parents=True, exist_ok=True)
    save_file(merged(given["first"], given["second"], shares), given["out"] / "model.safetensors")


if __name__ == "__main__":
    main()
