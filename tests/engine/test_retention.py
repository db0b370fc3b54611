"""What a retention policy drops is gone, what it keeps is read at its old position, and its blocks return to the pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.plan import StepPlan
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.leases import Leases
from ridgeline.engine.result import without
from ridgeline.kv.compact import POOL, choose, slots_needed
from ridgeline.kv.retention import KEEP_ALL, Retention, read_retention
from ridgeline.kv.store import KvStore
from ridgeline.llm import LLM
from ridgeline.models.build import build
from ridgeline.ops.reference import REFERENCE
from tests.engine.runners import MAX_LEN, PAGE, PROMPT, DeviceBench, alone, layout_of, pair
from tests.engine.test_runner import Guesser
from tests.models.families import save

SINKS, KEEP = 1, 3 * PAGE
WINDOW = Retention("window", KEEP, KEEP + PAGE, PAGE, SINKS)
OBSERVED = 5
SNAP = Retention("snap", KEEP, KEEP + PAGE, PAGE, observed=OBSERVED, once=True)
HEAVY = Retention("heavy", KEEP, KEEP + PAGE, PAGE, observed=OBSERVED)
ADAPTIVE = Retention("adaptive", KEEP, KEEP, PAGE, observed=OBSERVED, once=True, share=0.6)
LONG = [3 + 7 * at % 250 for at in range(50)]


def run(bench: DeviceBench) -> dict[str, list[int]]:
    """Run all requests. Returns, for each, how many slots were dropped when each token was computed."""
    dropped: dict[str, list[int]] = {}
    while not bench.scheduler.idle:
        before = [(request, request.computed, request.dropped) for request in bench.scheduler.running]
        bench.turn()
        for request, computed, count in before:
            of_request = dropped.setdefault(request.id, [0] * computed)
            of_request.extend([count] * (request.computed - computed))
    return dropped


def masked_greedy(family: str, prompt: list[int], answer: list[int], dropped: list[int]) -> list[int]:
    """What transformers draws after the prompt and after each token of the answer, where each token sees what its step kept."""
    tokens = prompt + answer[:-1]
    seen = torch.ones(len(tokens), len(tokens)).tril().bool()
    for place, count in enumerate(dropped[: len(tokens)]):
        seen[place, SINKS * PAGE : SINKS * PAGE + count] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, -1e9)[None, None]
    with torch.inference_mode():
        logits = pair(family)[0](torch.tensor([tokens]), attention_mask=mask).logits[0]
    return logits[len(prompt) - 1 :].argmax(1).tolist()


@pytest.mark.parametrize(("family", "step_tokens"), [("llama-gqa", 24), ("llama-gqa", 64), ("cla", 24)])
def test_answers_are_those_of_a_model_that_sees_sinks_and_recent_tokens(family: str, step_tokens: int) -> None:
    """A long prompt drops most blocks at once, a short one a block at a time; the prompt's chunks change nothing."""
    bench = DeviceBench(family, retention=WINDOW, step_tokens=step_tokens)
    prompts = {"long": LONG, "short": PROMPT}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, max_tokens=70)
    dropped = run(bench)
    for name, prompt in prompts.items():
        answer = bench.tokens[name, 0]
        assert len(answer) == 70
        assert answer == masked_greedy(family, prompt, answer, dropped[name])
    for name, prompt in prompts.items():
        for place, count in enumerate(dropped[name]):
            expected = (place - KEEP) // PAGE * PAGE if place > max(len(prompt), WINDOW.most - 1) else 0
            assert count == expected
    whole = DeviceBench(family)
    whole.submit("long", LONG, max_tokens=70)
    whole.run()
    assert bench.tokens["long", 0] != whole.tokens["long", 0], "nothing that matters was dropped"


@pytest.mark.parametrize("depth", [1, *(pytest.param(depth, marks=pytest.mark.long) for depth in (0, 3))])
def test_a_row_is_bounded_and_all_blocks_return(depth: int) -> None:
    """Many long answers run at once in a pool that holds two of them with all their keys."""
    bench = DeviceBench(retention=WINDOW, blocks=2 * MAX_LEN // PAGE, depth=depth, prefix_cache=False)
    for name in range(6):
        bench.submit(str(name), [*PROMPT, name], max_tokens=150)
    most = 0
    while not bench.scheduler.idle:
        bench.turn()
        most = max([most, *(len(request.tables[0]) for request in bench.scheduler.running)])
    assert not bench.scheduler.counts.preempted
    assert most <= WINDOW.most // PAGE + 1
    assert all(len(tokens) == 150 for tokens in bench.tokens.values())
    assert bench.leases.pool.free == bench.leases.total


def test_a_dropped_prompt_stays_in_the_prefix_cache_and_forks_share_it() -> None:
    """Blocks are published with the keys of the whole prompt; those of tokens that have seen less are not."""
    bench = DeviceBench(retention=WINDOW)
    bench.submit("first", LONG, max_tokens=60)
    bench.run()
    published = bench.leases.prefix
    assert sum(published.holds(block) for block in range(200)) == len(LONG) // PAGE
    bench.submit("again", LONG, max_tokens=60)
    bench.submit("forks", LONG, n=3, max_tokens=60)
    bench.submit("longer", [*LONG, *bench.tokens["first", 0][:20]], max_tokens=5)
    bench.run()
    assert bench.scheduler.counts.prefix_hits
    expected = bench.tokens.pop(("first", 0))
    longer = bench.tokens.pop(("longer", 0))
    assert all(tokens == expected for tokens in bench.tokens.values())
    assert longer == alone([*LONG, *expected[:20]], max_tokens=2) + longer[2:]


@pytest.mark.parametrize(
    "trees", [pytest.param(False, marks=pytest.mark.long, id="chains"), pytest.param(True, id="trees")]
)
def test_drafts_are_verified_over_what_is_kept(trees: bool) -> None:
    """The nodes of a step see what the step before has kept: a block may leave some tokens later than without drafts."""
    plain = DeviceBench(retention=WINDOW)
    plain.submit("one", LONG, max_tokens=100)
    plain.run()
    guesser = Guesser({"one": plain.tokens["one", 0]}, 0.6, trees=trees)
    bench = DeviceBench(retention=WINDOW, speculation=guesser)
    bench.submit("one", LONG, max_tokens=100)
    dropped = run(bench)
    answer = bench.tokens["one", 0]
    assert bench.scheduler.counts.accepted
    assert answer == masked_greedy("llama-gqa", LONG, answer, dropped["one"])


def test_a_preempted_request_is_computed_again() -> None:
    bench = DeviceBench(retention=WINDOW, blocks=12, prefix_cache=False)
    for name in range(4):
        bench.submit(str(name), [*PROMPT, name], max_tokens=60)
    bench.run()
    assert bench.preempted
    assert all(len(tokens) == 60 for tokens in bench.tokens.values())
    assert bench.leases.pool.free == bench.leases.total


@pytest.mark.parametrize("kv_format", ["", "int8"])
def test_a_compressed_prompt_keeps_the_slots_that_its_last_tokens_attend_to(tmp_path: Path, kv_format: str) -> None:
    """For each head of each layer those that transformers' attention says, keys and values moved together, with their scales."""
    theirs = save("llama-gqa", tmp_path)
    config = ModelConfig(max_model_len=MAX_LEN, kv_cache_dtype=kv_format or "auto")
    model = build(tmp_path, model=config, ops=REFERENCE, device=torch.device("cpu"))
    bench = DeviceBench(retention=SNAP, model=model)
    bench.submit("one", LONG, max_tokens=8)
    request = bench.scheduler.waiting[0]
    while not request.dropped:
        pages = [*request.tables[0]] if request.tables else []
        bench.turn()
    bench.turn()
    computed = len(LONG) + 1
    blocks = (computed - OBSERVED) // PAGE
    kept = -(-(KEEP - (computed - blocks * PAGE)) // PAGE)
    assert request.dropped == (blocks - kept) * PAGE and request.tables[0][kept : kept + 2] == pages[blocks:]
    theirs.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = theirs(torch.tensor([[*LONG, request.tokens[len(LONG)]]]), output_attentions=True).attentions
    store = bench.runner.store
    old = [
        slots_of(store, layer, pages[:blocks]) for layer in range(len(attentions))
    ]  # nobody has taken these blocks yet
    for layer, weights in enumerate(attentions):
        mass = weights[0, :, -OBSERVED:, : blocks * PAGE].sum(1).unflatten(0, (-1, 2)).sum(1)
        pooled = torch.nn.functional.max_pool1d(mass, 7, 1, 3)
        new = slots_of(store, layer, request.tables[0][:kept])
        for head, share in enumerate(pooled):
            chosen = [
                (old[layer][:, head] == new[:, head, slot, None]).all((0, 2)).nonzero().item()
                for slot in range(kept * PAGE)
            ]
            assert chosen == sorted(set(chosen))
            least = share.topk(kept * PAGE).values[-1]
            assert all(share[slot] >= least - 2e-3 for slot in chosen)


def slots_of(store: KvStore, layer: int, pages: list[int]) -> torch.Tensor:
    """Keys and values of a layer with their scales, as stored: [2, heads, slots, bytes]."""
    parts = [part for part in (store.kv[layer], store.scales[layer]) if part is not None]
    return torch.cat([part.view(torch.uint8)[pages].permute(1, 2, 0, 3, 4).flatten(2, 3) for part in parts], -1)


def test_each_head_has_the_policy_that_keeps_the_share_with_fewest_slots() -> None:
    """A head that attends to recent slots keeps recent ones, a head with three needles those, and a head that attends to all nearly
    all; the slots after the candidates count as kept."""
    recent, needles, even = torch.zeros(3, 70)
    recent[[0, *range(55, 70)]] = torch.tensor([0.3, *[0.7 / 15] * 15])
    needles[[10, 30, 50, 69]] = torch.tensor([0.2, 0.2, 0.2, 0.4])
    even[:] = 1 / 70
    mass = torch.stack((recent, needles, even))
    for share in (0.3, 0.75, 0.9, 0.99):
        needed, order = slots_needed(mass, 64, share)
        for head, (count, taken) in enumerate(zip(needed.tolist(), order.tolist(), strict=True)):
            assert sorted(taken) == list(range(64))
            kept = [mass[head, [*taken[:slots], *range(64, 70)]].sum().item() for slots in (count, count - 1)]
            assert kept[0] >= share - 1e-6 and (count == 0 or kept[1] < share + 1e-6)
    assert order[0, :4].tolist() == [0, 1, 2, 3] and order[0, 4:10].tolist() == [63, 62, 61, 60, 59, 58]
    assert set(needles[:64].nonzero().flatten().tolist()) <= set(order[1, : needed[1]].tolist())
    assert needed[1] <= 3 * POOL and needed[2] == 64
    assert slots_needed(mass, 64, 1.0)[0].tolist() == [64, 64, 64]
    chosen = choose(mass, 64, 24, 0.75)
    assert chosen[0].tolist() == [0, 1, 2, 3, *range(44, 64)]


@pytest.mark.parametrize("kv_format", ["", "int8"])
def test_every_head_keeps_the_share_of_its_attention_and_the_other_blocks_return(
    tmp_path: Path, kv_format: str
) -> None:
    """The attention is that of transformers; the kept slots are those whose keys and values are found in the new blocks."""
    theirs = save("llama-gqa", tmp_path)
    config = ModelConfig(max_model_len=MAX_LEN, kv_cache_dtype=kv_format or "auto")
    model = build(tmp_path, model=config, ops=REFERENCE, device=torch.device("cpu"))
    bench = DeviceBench(retention=ADAPTIVE, model=model, prefix_cache=False)
    bench.submit("one", LONG, max_tokens=12)
    request = bench.scheduler.waiting[0]
    while not request.dropped:
        pages = [*request.tables[0]] if request.tables else []
        bench.turn()
    measured = request.measured
    assert bench.leases.pool.used == len(request.tables[0]) < len(pages)
    bench.turn()
    blocks, kept = (measured - OBSERVED) // PAGE, request.kept
    assert measured == len(LONG) + 1 and request.dropped == (blocks - kept) * PAGE > 0
    assert request.tables[0][kept : kept + 2] == pages[blocks : blocks + 2]
    theirs.set_attn_implementation("eager")
    with torch.inference_mode():
        tokens = torch.tensor([request.tokens[:measured].tolist()])
        attentions = theirs(tokens, output_attentions=True).attentions
    shares, needed = [], []
    for layer, weights in enumerate(attentions):
        mass = weights[0, :, -OBSERVED:].sum(1).unflatten(0, (-1, 2)).sum(1)
        needed.append(slots_needed(mass, blocks * PAGE, ADAPTIVE.share)[0].max().item())
        old, new = (slots_of(bench.runner.store, layer, table) for table in (pages[:blocks], request.tables[0][:kept]))
        for head, of_head in enumerate(mass):
            matches = (old[:, head, :, None] == new[:, head, None]).all((0, 3))
            assert matches.any(0).all(), "a slot of a new block is none of the old ones"
            shares.append(
                ((of_head[: blocks * PAGE] * matches.any(1)).sum() + of_head[blocks * PAGE :].sum()) / OBSERVED / 2
            )
    assert min(shares) >= ADAPTIVE.share - 2e-3
    assert kept == max(1, -(-max(needed) // PAGE)), "the head that needs most decides"
    bench.run()
    assert bench.leases.pool.used == 0


def test_a_share_of_all_changes_no_token() -> None:
    bench = DeviceBench(retention=replace(ADAPTIVE, share=1.0))
    bench.submit("one", LONG, max_tokens=60)
    request = bench.scheduler.waiting[0]
    while not request.kept:
        bench.turn()
    bench.run()
    assert request.finish == "length" and bench.tokens["one", 0] == alone(LONG, max_tokens=60)


def test_blocks_are_asked_for_again_after_a_failed_step_and_no_answer_reaches_another_lease() -> None:
    leases = Leases(layout_of(pair("llama-gqa")[1]), 30, retention=ADAPTIVE, prefix_cache=False)
    bench = DeviceBench()
    bench.submit("one", LONG)
    request = bench.scheduler.waiting[0]

    def ask(step: int) -> StepPlan:
        plan = StepPlan(step)
        request.computed = request.planned = leases.open(request)
        assert leases.extend(request, len(LONG) + 8, plan)
        request.computed = request.planned = len(LONG) + 1
        leases.committed(request, plan)
        assert len(plan.measures) == 1 and not plan.compactions
        return plan

    def answer(plan: StepPlan, blocks: list[int], error: str | None = None) -> int:
        result = without(plan, error)
        result.blocks = blocks
        request.watch = MAX_LEN
        assert not list(leases.ended(plan, result))
        return request.watch

    assert answer(ask(1), [], "the device is out of memory") == 0 and not request.measured
    leases.release(request)
    left = ask(2)
    leases.release(request)
    assert answer(left, [2]) == MAX_LEN and not request.kept
    plan = ask(3)
    free, cut = leases.pool.free, StepPlan(4)
    assert answer(plan, [2]) == 0
    leases.committed(request, cut)
    (compaction,) = cut.compactions
    assert [len(targets) for targets in compaction.targets] == [2] and compaction.blocks == 5
    assert leases.pool.free == free + 3 and request.dropped == 3 * PAGE


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.long), 2])
def test_adaptive_rows_are_preempted_and_verify_drafts(depth: int) -> None:
    """What was measured of a row that has left is forgotten, and all blocks return."""
    plain = DeviceBench(retention=ADAPTIVE)
    plain.submit("0", [*LONG, 0], max_tokens=60)
    plain.run()
    guesser = Guesser(dict.fromkeys("0123", plain.tokens["0", 0]), 0.6, trees=False)
    bench = DeviceBench(retention=ADAPTIVE, blocks=18, depth=depth, prefix_cache=False, speculation=guesser)
    for name in range(4):
        bench.submit(str(name), [*LONG, name], max_tokens=60)
    bench.run()
    assert bench.preempted and bench.scheduler.counts.drafts
    assert all(len(tokens) == 60 for tokens in bench.tokens.values())
    assert bench.leases.pool.used == 0


@pytest.mark.parametrize(
    "policy", ["heavy", *(pytest.param(name, marks=pytest.mark.long) for name in ("snap", "adaptive"))]
)
def test_compressed_requests_share_prompts_and_answer_alike(policy: str) -> None:
    """Chunks, prefix hits and forks change no token; rows stay bounded where the answer is compressed too, and blocks return."""
    retention = {"snap": SNAP, "heavy": HEAVY, "adaptive": ADAPTIVE}[policy]
    answers = []
    for step_tokens in (24, 64):
        bench = DeviceBench(retention=retention, step_tokens=step_tokens)
        bench.submit("first", LONG, max_tokens=60)
        bench.run()
        bench.submit("again", LONG, max_tokens=60)
        bench.submit("forks", LONG, n=3, max_tokens=60)
        most = 0
        while not bench.scheduler.idle:
            bench.turn()
            most = max([most, *(len(request.tables[0]) for request in bench.scheduler.running if request.dropped)])
        assert bench.scheduler.counts.prefix_hits
        assert most <= {"snap": KEEP + 60, "heavy": HEAVY.most, "adaptive": len(LONG) + 60 - PAGE}[policy] // PAGE + 1
        assert bench.leases.pool.used == 0
        answers += bench.tokens.values()
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] != alone(LONG, max_tokens=60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("retention", [WINDOW, SNAP, HEAVY, ADAPTIVE], ids=lambda policy: policy.name)
def test_a_gpu_keeps_what_a_cpu_keeps(retention: Retention, graphs: bool) -> None:
    """In float32, with steps in flight; prompts end within a chunk and with one."""
    answers = []
    for options in ({}, {"device": "cuda", "graphs": graphs}):
        bench = DeviceBench(retention=retention, step_tokens=24, depth=1, **options)
        for name in range(4):
            bench.submit(str(name), [*LONG[: 48 + name], name], max_tokens=60)
        bench.run()
        assert bench.leases.pool.used == 0
        answers.append(bench.tokens)
    assert answers[0] == answers[1]


def test_a_pool_without_room_for_the_compressed_blocks_goes_on() -> None:
    """Compression needs new blocks, since others may read the old ones; without them it waits."""
    bench = DeviceBench(retention=HEAVY, blocks=15, prefix_cache=False)
    for name in range(3):
        bench.submit(str(name), [*LONG, name], max_tokens=50)
    bench.run()
    assert all(len(tokens) == 50 for tokens in bench.tokens.values())
    assert bench.leases.pool.used == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("most", "use all, window:sinks=4,keep=1024"),
        ("all:keep=4", "use all"),
        ("window", "give numbers of tokens"),
        ("window:sinks=4", "say how many tokens stay"),
        ("window:keep=12,keep=13", "give numbers"),
        ("window:keep=many", "give numbers"),
        ("window:sinks=5,keep=11", "keep at least 12 tokens"),
        ("snap:sinks=4,keep=64", "give numbers"),
        ("snap:window=32,keep=39", "keep at least 40 tokens"),
        ("heavy:window=0,keep=39", "keep at least"),
        *(
            (f"adaptive{share}", "give the share of attention that every head keeps")
            for share in ("", ":", ":0", ":0.0", ":1.01", ":95", ":nan", ":-0.5", ":share=0.9")
        ),
    ],
)
def test_a_policy_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_retention(text, 4)
    assert caught.value.param == "kv_retention"


def test_sizes_are_whole_blocks() -> None:
    assert read_retention("all", 4) is KEEP_ALL
    assert read_retention("window:keep=64", 4) == Retention("window:keep=64", 64, 68, 4, 1)
    assert read_retention("adaptive:.9", 4) == Retention("adaptive:.9", 40, 40, 4, observed=32, once=True, share=0.9)


@pytest.mark.parametrize(
    "options",
    [
        {"speculate": "auto"},
        *(
            pytest.param(option, marks=pytest.mark.long)
            for option in ({}, {"speculate": "recycling"}, {"kv_cache_dtype": "int4"})
        ),
    ],
)
def test_the_shipped_model_answers_with_a_bounded_cache(options: dict[str, str]) -> None:
    """Native operations, captured steps and drafters that read the cache: as if nothing was dropped, up to where it is."""
    answers, sampling = [], SamplingParams(max_tokens=160, temperature=0.8, seed=3)
    for retention in ("all", "window:keep=64", "heavy:window=16,keep=64"):
        facts = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory": 1 << 25} | options
        llm = LLM(device="cpu", threads=1, kv_retention=retention, **facts)
        answers.append(llm.generate("The history of the city begins", sampling)[0].choices[0].token_ids)
        llm.close()
    whole, *others = answers
    for kept in others:
        assert kept[:70] == whole[:70]
        assert kept != whole


@pytest.mark.long
def test_the_shipped_model_keeps_a_share_of_its_attention() -> None:
    """With all of the attention its tokens are those of the whole cache, with little of it they are others."""
    answers, sampling = [], SamplingParams(max_tokens=24, temperature=0.0)
    for retention in ("all", "adaptive:1", "adaptive:0.1"):
        facts = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory": 1 << 24}
        llm = LLM(device="cpu", threads=1, kv_retention=retention, **facts)
        answers.append(
            llm.generate("The history of the city begins with a river. " * 12, sampling)[0].choices[0].token_ids
        )
        llm.close()
    assert answers[0] == answers[1] != answers[2]
