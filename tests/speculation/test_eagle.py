"""EAGLE heads and MTP layers: what is drafted is what the published networks say, and files that do not fit are refused."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.compress.decoder import load_decoder
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.draft import EMPTY_DRAFT, Draft
from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.spec import ModelSpec
from ridgeline.models.build import LoadedModel, build
from ridgeline.models.eagle import load_head
from ridgeline.models.eagle_files import read_eagle, read_mtp
from ridgeline.ops.reference import REFERENCE
from ridgeline.speculation.build import memory_of_drafters
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.device import DraftRows, Views
from ridgeline.speculation.eagle import Eagle
from ridgeline.speculation.host import HostDrafter
from ridgeline.speculation.options import read_wanted
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from tests.combinations import crossed
from tests.engine.runners import MAX_LEN, PROMPT, DeviceBench, alone, pair
from tests.models.families import save
from tests.speculation.published import (
    DEEPSEEK,
    EPS,
    LAYOUTS,
    MIMO,
    Step,
    config,
    eagle,
    eagle3,
    eagle3_states,
    eagle_states,
    mtp,
    mtp_states,
    rms,
    save_head,
    save_layout,
)

NODES = 3
CLOSE = 1e-3
"""Difference of two logits below which float32 and float64 may order them differently."""


@dataclass(frozen=True, slots=True)
class Oracle:
    """A head in plain PyTorch, float64: features of the target's hidden states (transformers' list), embedding, states, logits, and
    the token of each logit."""

    features: Callable[[Sequence[Tensor]], Tensor]
    embedding: Tensor
    states: Step
    logits: Callable[[Tensor], Tensor]
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Case:
    theirs: torch.nn.Module
    target: LoadedModel
    drafter: Recording
    oracle: Oracle


class Recording(Eagle):
    """Keeps the tokens that a row knew and those that were drafted after them."""

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self.drafts: list[tuple[list[int], list[int]]] = []

    def draft(self, draft_rows: DraftRows, count: int, views: Views) -> None:
        super().draft(draft_rows, count, views)
        for row, known in zip(draft_rows.rows.tolist(), draft_rows.known.tolist(), strict=True):
            tokens = draft_rows.state.tokens[row].tolist()
            self.drafts.append((tokens[:known], tokens[known : known + count]))


@cache
def case(name: str) -> Case:
    """A name of LAYOUTS, or eagle-gemma3 (a target whose scores have another scale), deepseek, mimo."""
    with tempfile.TemporaryDirectory() as place:
        return (_mtp_case if name in ("deepseek", "mimo") else _eagle_case)(name, Path(place))


def _eagle_case(name: str, folder: Path) -> Case:
    theirs, target = pair("gemma3" if name in ("eagle-gemma3", "eagle3-sglang") else "llama-gqa")
    exact, spec = theirs.state_dict(), target.spec
    head, table = exact["lm_head.weight"].double(), exact["model.embed_tokens.weight"].double()
    layout = "eagle" if name == "eagle-gemma3" else name
    keys, tensors = LAYOUTS[layout](spec)
    # The embedding of the model is taken as it is stored, also where the model scales it, as SGLang and vLLM do.
    embedding = tensors["embed_tokens.weight"].double() if "embed_tokens.weight" in tensors else table
    if "d2t" not in tensors:
        ids, original = torch.arange(spec.vocab_size), eagle(spec)[1]
        states = eagle_states(original | {key: value for key, value in tensors.items() if "_layernorm." in key})
        oracle = Oracle(lambda hidden: hidden[-1], embedding, states, lambda state: state @ head.T, ids)
    else:
        nested = keys.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        taps = keys.get("eagle_aux_hidden_state_layer_ids") or (nested and [layer + 1 for layer in nested]) or (2, 1, 0)
        fc, outer = tensors["fc.weight"].double(), (tensors["norm.weight"].double(), tensors["lm_head.weight"].double())
        original = {key.replace("layers.0.", "midlayer."): value for key, value in tensors.items()}
        oracle = Oracle(
            lambda hidden: torch.cat([hidden[tap] for tap in taps], 1) @ fc.T,
            embedding,
            eagle3_states(original, norm_before_residual="norm_before_residual" in keys),
            lambda state: rms(state, outer[0], EPS) @ outer[1].T,
            tensors["d2t"] + torch.arange(len(tensors["d2t"])),
        )
    save_layout(folder, layout, spec)
    drafter = Recording(load_head(read_eagle(folder, spec), target, folder), target)
    return Case(theirs, target, drafter, oracle)


def _mtp_case(name: str, folder: Path) -> Case:
    names = MIMO if name == "mimo" else DEEPSEEK
    theirs, spec = save_with_mtp(folder, name)
    target = build(folder, model=ModelConfig(max_model_len=MAX_LEN), ops=REFERENCE, device=torch.device("cpu"))
    tensors = mtp(spec, names)
    table = theirs.state_dict()["model.embed_tokens.weight"].double()  # tied
    final = next(tensor for key, tensor in tensors.items() if names["final"] in key).double()

    def logits(state: Tensor) -> Tensor:
        return (state if names is MIMO else rms(state, final, spec.norm_eps)) @ table.T

    ids = torch.arange(spec.vocab_size)
    oracle = Oracle(lambda hidden: hidden[-1], table, mtp_states(tensors, names, spec), logits, ids)
    drafter = Recording(load_head(read_mtp(folder, target.spec), target, folder), target)
    return Case(theirs, target, drafter, oracle)


def save_with_mtp(folder: Path, name: str, layers: int = 1) -> tuple[torch.nn.Module, ModelSpec]:
    """A tiny Qwen2 with an MTP layer of the given form; for mimo it says that it is one."""
    theirs = save("qwen2", folder)
    keys = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"num_nextn_predict_layers": layers}
    if name == "mimo":
        keys |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    spec = build(folder, model=ModelConfig(load_format="dummy"), ops=REFERENCE, device=torch.device("cpu")).spec
    path = folder / "model.safetensors"
    tensors = load_file(path) | mtp(spec, MIMO if name == "mimo" else DEEPSEEK)
    if name == "deepseek":  # DeepSeek and GLM store copies of embedding and head in the layer
        for copy in ("embed_tokens", "shared_head.head"):
            tensors[f"model.layers.{len(spec.layers)}.{copy}.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    return theirs, spec


def expected(case: Case, known: list[int], count: int) -> tuple[list[int], bool]:
    """The greedy chain after `known`, and whether every choice is clear."""
    oracle, exact = case.oracle, case.theirs.double()
    with torch.inference_mode():
        out = exact(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        features = oracle.features([hidden[0] for hidden in out])
        case.theirs.float()
        tokens, clear = known[1:], True
        for _ in range(count):
            states = oracle.states(oracle.embedding[torch.tensor(tokens)], features)
            best = oracle.logits(states[-1:])[0].topk(2)
            clear &= bool(best.values[0] - best.values[1] > CLOSE)
            tokens = [*tokens, int(oracle.ids[best.indices[0]])]
            features = torch.cat((features, states[-1:]))
    return tokens[-count:], clear


def drafting(made: Case, host: HostDrafter | None = None, **facts: object) -> DeviceBench:
    made.drafter.drafts.clear()
    traits = DeviceTraits(NODES, follows_target=True)
    sizes = (0, NODES) if host is None else (0, NODES, 6)
    speculation = Speculator(host, traits, Controller(sizes, fixed=True))
    return DeviceBench(
        model=made.target, speculation=speculation, drafter=made.drafter, drafts=sizes, step_tokens=16, **facts
    )


def check_drafts(made: Case, fewest: int) -> None:
    """The recorded drafts are those of the oracle, where its choices are clear."""
    clear = 0
    for known, drafted in made.drafter.drafts:
        tokens, sure = expected(made, known, len(drafted))
        clear += sure
        assert drafted == tokens or not sure, (len(known), drafted, tokens)
    assert clear >= fewest


CASES = (*LAYOUTS, "eagle-gemma3", "deepseek", "mimo")


@pytest.mark.parametrize(
    "name", crossed(CASES, quick=lambda case: CASES[case] in ("eagle", "eagle3-sglang", "eagle-gemma3", "deepseek"))
)
def test_drafts_are_those_of_the_published_network(name: str) -> None:
    """Prompts in chunks, a batch, and a prefix from the cache."""
    made = case(name)
    bench = drafting(made)
    bench.submit("one", PROMPT * 3, max_tokens=12)
    bench.turn()
    bench.submit("two", PROMPT[::-1], max_tokens=10)
    bench.run()
    bench.submit("again", PROMPT * 3, max_tokens=4)
    bench.run()
    assert bench.tokens["again", 0] == bench.tokens["one", 0][:4]
    check_drafts(made, 20)


class Partly:
    """A host drafter that knows the answer. Up to `end` known tokens it proposes a tree whose second branch is right."""

    needs_repeat = False

    def __init__(self, answer: Sequence[int], end: int) -> None:
        self.answer, self.end = list(answer), end
        self.known = 0

    def start(self, tokens: Sequence[int]) -> Partly:
        self.known = len(tokens)
        return self

    def nodes(self, chain: int, cost: float) -> int:
        return 4

    def propose(self, nodes: int, depth: int) -> Draft:
        right = self.answer[self.known : self.known + 3]
        if self.known > self.end or nodes < 4 or len(right) < 3:
            return EMPTY_DRAFT
        return Draft.of([(right[0] + 1) % 320, *right], [-1, -1, 1, 2])

    def observe(self, tokens: Sequence[int], draft: Draft, drawn: Sequence[int]) -> None:
        self.known += len(tokens)


@pytest.mark.parametrize(
    "name", ["eagle3", *(pytest.param(name, marks=pytest.mark.long) for name in ("eagle", "mimo"))]
)
def test_pairs_are_right_after_accepted_nodes(name: str) -> None:
    """Steps gain several tokens at once, of trees; then the head drafts, with the pairs that these steps wrote."""
    made, prompt = case(name), PROMPT * 2
    bench = drafting(made)
    bench.submit("one", prompt, max_tokens=40)
    bench.run()
    said = bench.tokens["one", 0]
    bench = drafting(made, Partly(prompt + said, len(prompt) + 24))
    bench.submit("one", prompt, max_tokens=40)
    bench.run()
    assert bench.tokens["one", 0] == said and bench.scheduler.counts.accepted > 15
    check_drafts(made, 4)


@pytest.mark.parametrize(
    ("name", "depth"), crossed(("eagle", "eagle3"), (0, 1), quick=lambda name, depth: name == depth == 1)
)
def test_preempted_and_cancelled_requests(name: str, depth: int) -> None:
    """With few pages requests are computed again; what is drafted then is drafted from the same pairs."""
    made = case(name)
    bench = drafting(made, blocks=22, depth=depth)
    given = {f"r{number}": (PROMPT * 3)[number : 24 + number] for number in range(5)}
    for at, (key, prompt) in enumerate(given.items()):
        bench.submit(key, prompt, max_tokens=40, temperature=0.8 * (at % 2), seed=at)
        bench.turn()
    bench.scheduler.cancel("r4")
    bench.run()
    assert bench.preempted > 0
    for at, (key, prompt) in enumerate(given.items()):
        if key != "r4":
            assert bench.tokens[key, 0] == alone(prompt, max_tokens=40, temperature=0.8 * (at % 2), seed=at)


# --- options and refusals ---------------------------------------------------------------------------------------------


def broken(folder: Path, **changes: Any) -> Path:
    """A head for llama-gqa with keys of config.json replaced (None: removed) and tensors replaced, renamed or removed."""
    keys, tensors = changes.pop("of", eagle3)(pair("llama-gqa")[1].spec)
    for key, value in changes.pop("tensors", {}).items():
        tensors.pop(key, None)
        tensors |= {} if value is None else {key: value}
    keys |= changes
    return save_head(folder, ({key: value for key, value in keys.items() if value is not None}, tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"of": eagle, "hidden_size": 72}, "hidden_size is 72, but 64 in the served model"),
        ({"target_hidden_size": 128}, "hidden_size is 128, but 64 in the served model"),
        ({"vocab_size": 999}, "vocab_size is 999, but 320 in the served model"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"attention_multiplier": 2.0}, "attention_multiplier"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, r"layers \[0, 1, 3\] .* 0 to 2"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"tensors": {"fc.weight": None}}, "no tensor fc.weight"),
        ({"tensors": {"fc.weight": torch.zeros(64, 128)}}, r"fc.weight is \[64, 128\].* needs \[64, 192\]"),
        ({"tensors": {"midlayer.mlp.up_proj.weight": None}}, "lacks the tensors layer.mlp.up_proj.weight"),
        ({"tensors": {"midlayer.odd.weight": torch.zeros(2)}}, "unknown tensors layer.odd.weight"),
        ({"tensors": {"lm_head.weight": torch.zeros(95, 64)}}, r"head.weight is \[95, 64\]"),
        ({"tensors": {"fc.weight": torch.zeros(64, 192, dtype=torch.int8)}}, "torch.int8"),
        ({"tensors": {"d2t": torch.full((96,), 300)}}, "tensor d2t does not give 96 different tokens from 0 to 319"),
        ({"tensors": {"t2d": torch.zeros(320).bool()}}, "tensor t2d .* does not mark the 96 tokens"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    target = pair("llama-gqa")[1]
    folder = broken(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_head(read_eagle(folder, target.spec), target, folder)
    assert str(folder) in caught.value.message and caught.value.param == "speculate"


def test_folders_without_a_head(tmp_path: Path) -> None:
    spec = pair("llama-gqa")[1].spec
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_eagle(tmp_path, spec)
    (tmp_path / "config.json").write_text(json.dumps(config(64, 320)), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"neither \*\.safetensors nor pytorch_model\.bin"):
        read_eagle(tmp_path, spec)
    (tmp_path / "pytorch_model.bin").write_bytes(b"none")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin cannot be read"):
        read_eagle(tmp_path, spec)


def test_models_without_mtp_layers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        read_mtp(tmp_path, pair("llama-gqa")[1].spec)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        memory_of_drafters(EngineConfig(speculate="mtp"), pair("llama-gqa")[1].spec, tmp_path, "cpu")
    save("qwen2", tmp_path)
    lacking = replace(case("deepseek").target.spec, mtp_layers=1)
    with pytest.raises(ConfigError, match=r"neither model\.layers\.3\.\* nor model\.mtp_layers\.0\.\*"):
        read_mtp(tmp_path, lacking)


def test_layers_that_config_json_does_not_count_are_unknown(tmp_path: Path) -> None:
    """So that a config.json with too few layers is still noticed."""
    save_with_mtp(tmp_path, "deepseek", layers=0)
    with pytest.raises(UnsupportedModel, match=r"unknown tensors model\.layers\.3\."):
        build(tmp_path, model=ModelConfig(), ops=REFERENCE, device=torch.device("cpu"))


def test_training_leaves_mtp_layers_out(tmp_path: Path) -> None:
    theirs, spec = save_with_mtp(tmp_path, "mimo")
    trained = load_decoder(tmp_path)
    assert spec.architecture == "MiMoForCausalLM" and len(trained.spec.layers) == 3
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        torch.testing.assert_close(trained(ids), theirs.float()(ids).logits, atol=1e-3, rtol=1e-3)


def test_what_the_option_reads() -> None:
    read = lambda text: read_wanted(EngineConfig(speculate=text))  # noqa: E731
    assert (read("eagle:folder").device, read("eagle:folder").folder, read("eagle:folder").max_nodes) == (
        "eagle",
        Path("folder"),
        4,
    )
    assert read("reference+mtp").names == ("reference", "mtp")
    for method in ("eagle", "eagle3"):
        wanted = read(json.dumps({"method": method, "model": "folder", "num_speculative_tokens": 3}))
        assert (wanted.device, wanted.folder, wanted.max_nodes) == ("eagle", Path("folder"), 3)
    assert read('{"method": "mtp", "num_speculative_tokens": 1}').max_nodes == 1
    with pytest.raises(ConfigError, match='needs the key "model"'):
        read('{"method": "eagle3"}')
    with pytest.raises(ConfigError, match="must name a folder"):
        read("eagle")
