"""Beam search of transformers on the shipped model in float32."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ridgeline.models.hub import shipped_model
from ridgeline.text.tokenizer import Tokenizer


@cache
def _model() -> tuple[Any, Tokenizer]:
    from transformers import AutoModelForCausalLM  # takes seconds, and tests of the algorithm do not need it

    folder = shipped_model()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), Tokenizer.load(folder)


def theirs(prompt: str, max_tokens: int, *, num_beams: int, **options: Any) -> list[str]:
    """The texts of all beams, best first."""
    model, tokenizer = _model()
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=True)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            **options,
        )
    return [tokenizer.decode(answer[ids.shape[1] :].tolist(), skip_special_tokens=True) for answer in out]
