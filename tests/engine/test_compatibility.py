"""Every pair of docs/compatibility.md on a small model: it answers with the right tokens, or is refused before weights load."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import split_options
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.spec import kv_layout
from ridgeline.engine.local import LocalEngine
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.models.hub import shipped_model
from ridgeline.wire.messages import Submit
from tests.models.families import save
from tests.speculation.published import eagle, save_head
from tools.compatibility import EXAMPLES, pairs, refused

MAX_LEN = 128
PROMPTS = [[(7 * number + 3 * place) % 250 + 5 for place in range(70)] for number in (1, 2, 1)]
SAMPLING = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
WINDOWS, SHARING, RECURRENT = "layers with windows", "layers that share a cache", "--speculate recurrent"
EAGLE = "--speculate eagle, mtp"
FAMILIES = {(): "qwen3", (WINDOWS,): "gemma3", (SHARING,): "cla", (WINDOWS, SHARING): "gemma3n-like"}
DRAFTS = frozenset(name for name, example in EXAMPLES.items() if "speculate" in example.options)
EXACT = DRAFTS | {"--kv-offload-gb, --kv-disk", "--no-enable-prefix-caching"}
EXACT |= {"--pipeline-parallel-size 2", "--context-parallel-size 2"}
"""What changes no token in float32."""
RANKS = frozenset(name for name in EXAMPLES if "parallel" in name)
ON_CPU = [pair for pair in pairs() if not any(EXAMPLES[name].on_gpu for name in pair)]
RUNNABLE = [
    pair for pair in ON_CPU if not refused(pair) and not (RECURRENT in pair and {WINDOWS, SHARING}.intersection(pair))
]
"""The shipped model has the only recurrent draft."""


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES.values():
        save(family, root / family)
        save_head(root / family / "eagle", eagle(read_model(root / family)[0]))
    return root


def start(root: Path, names: Sequence[str]) -> LocalEngine:
    """An engine with these features, and a cache of little more than one request."""
    folder = root / FAMILIES[tuple(name for name in (WINDOWS, SHARING) if name in names)]
    drafter = folder / "eagle" if EAGLE in names else folder
    if RECURRENT in names:
        folder, drafter = shipped_model(), shipped_model().parent / "recurrent"
    options: dict[str, Any] = {key: value for name in names for key, value in EXAMPLES[name].options.items()}
    if "speculate" in options:
        options["speculate"] = options["speculate"].replace("FOLDER", str(drafter))
    model_options, engine_options = split_options(options, ModelConfig, EngineConfig)
    model = ModelConfig(str(folder), dtype="float32", max_model_len=MAX_LEN, **model_options)
    layout = kv_layout(served_spec(read_model(folder)[0], model), 16)
    pages = 5 * layout.pages_for(MAX_LEN, MAX_LEN) // 4 * (8 if {"--speculate draft", EAGLE} & {*names} else 1)
    config = EngineConfig(
        device="cpu", threads=1, kv_cache_memory=pages * layout.page_bytes, max_num_seqs=2, **engine_options
    )
    return LocalEngine.start(model, config)


@cache
def answers(root: Path, names: frozenset[str]) -> list[list[int]]:
    """Tokens of each prompt, of which the last repeats the first."""
    engine = start(root, [name for name in EXAMPLES if name in names])
    tokens = []
    for number, prompt in enumerate(PROMPTS):
        updates = engine.run([Submit(str(number), prompt, SAMPLING, arrival=0.0)])
        tokens.append([token for delta in updates for token in delta.tokens])
    engine.close()
    return tokens


def check(root: Path, names: frozenset[str]) -> None:
    """The features answer together, as the server does without those that change no token."""
    given = answers(root, names)
    assert [len(tokens) for tokens in given] == [20, 20, 20]
    if names & DRAFTS and any("retention" in name for name in names):
        return  # blocks may leave some tokens later than without drafts
    assert given[2] == given[0]
    if RECURRENT not in names:
        assert given == answers(root, names - EXACT)


def together() -> list[frozenset[str]]:
    """Few servers that have every pair which runs in one process."""
    possible = {frozenset(pair) for pair in RUNNABLE if not RANKS.intersection(pair)}
    uncovered, servers = sorted(possible, key=sorted), []
    while uncovered:
        server = uncovered[0]
        for name in EXAMPLES:
            if all(frozenset((name, other)) in possible for other in server - {name}):
                server |= {name}
        servers.append(server)
        uncovered = [pair for pair in uncovered if not pair <= server]
    return servers


@pytest.mark.parametrize(
    "names",
    [pytest.param(names, marks=pytest.mark.long if at % 6 else ()) for at, names in enumerate(together())],
    ids=lambda names: " ".join(sorted(names)),
)
def test_features_answer_together(names: frozenset[str], folders: Path) -> None:
    check(folders, names)


@pytest.mark.long
@pytest.mark.parametrize("pair", RUNNABLE, ids=" ".join)
def test_a_pair_answers(pair: tuple[str, str], folders: Path) -> None:
    check(folders, frozenset(pair))


def test_a_refused_pair_names_both_and_the_nearest_that_works(folders: Path) -> None:
    for pair in ON_CPU:
        if refusal := refused(pair):
            if RECURRENT in pair and {WINDOWS, SHARING}.intersection(pair):
                continue
            with pytest.raises(ConfigError) as caught:
                start(folders, pair)
            assert "is not possible" in caught.value.message, pair
            assert caught.value.message.lower().endswith(f"{refusal.remedy.lower()}."), pair
