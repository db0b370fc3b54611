"""Logits and greedy tokens of every family equal those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ridgeline.core.config import ModelConfig
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops.cpu import CPU
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Ops
from tests.models.families import FAMILIES, MORE, SHARING, save
from tests.models.paged import PagedRows

LENGTH = 90


def load(folder: Path, ops: Ops = REFERENCE) -> LoadedModel:
    return build(folder, model=ModelConfig(), ops=ops, device=torch.device("cpu"))


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, 320) for _ in range(LENGTH)] for _ in range(2)]


@pytest.fixture(params=sorted([*FAMILIES, *MORE, *SHARING]), scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save(request.param, folder)
    with torch.inference_mode():
        expected = theirs(torch.tensor(prompts())).logits
    return theirs, load(folder), expected


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    scale = theirs.abs().max()
    assert (ours - theirs).abs().max() <= 1e-4 * scale


def test_prefill_whole(pair):
    _, model, expected = pair
    cache = PagedRows(model)
    close(cache.step([(2, prompts()[0])]), expected[0])


def in_chunks(model: LoadedModel, expected: torch.Tensor) -> None:
    """Odd chunks of two rows interleaved with decode steps, in pages that come and go."""
    cache = PagedRows(model)
    got: list[list[torch.Tensor]] = [[], []]
    at = [0, 0]
    for sizes in [(7, 0), (1, 31), (13, 1), (1, 1), (29, 17), (1, 1), (1, 37)] + [(1, 0)] * 3:
        work = [(row + 1, prompts()[row][at[row] : at[row] + n]) for row, n in enumerate(sizes) if n]
        out = cache.step(work)
        for row, n in enumerate(sizes):
            if n:
                got[row].append(out[:n])
                out, at[row] = out[n:], at[row] + n
    assert at == [56, 88]
    for row in range(2):
        close(torch.cat(got[row]), expected[row, : at[row]])


def test_chunks_and_decode_of_two_rows(pair):
    _, model, expected = pair
    in_chunks(model, expected)


@pytest.mark.parametrize(
    "name",
    ["llama-gqa", "mistral-window", "qwen3-window", "gemma2", "gemma3", "qwen2-moe", "olmoe", "gpt-oss", *SHARING],
)
def test_with_the_operations_of_a_cpu(name, tmp_path):
    theirs = save(name, tmp_path)
    with torch.inference_mode():
        expected = theirs(torch.tensor(prompts())).logits
    in_chunks(load(tmp_path, CPU), expected)


def test_greedy_tokens(pair):
    theirs, model, _ = pair
    prompt = prompts()[0][:40]
    with torch.inference_mode():
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    expected = out[0, len(prompt) :].tolist()
    cache = PagedRows(model)
    token = int(cache.step([(1, prompt)])[-1].argmax())
    got = [token]
    while len(got) < 24:
        token = int(cache.step([(1, [token])])[-1].argmax())
        got.append(token)
    assert got == expected
