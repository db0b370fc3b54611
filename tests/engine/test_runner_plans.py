"""The runner without a scheduler: plans in, results out, whatever the plan says."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.core.errors import EngineFailed
from ridgeline.core.plan import Compaction, Flag, Join, Logits, StepPlan
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine import graph_shapes
from ridgeline.engine.batch import Batch, unpack
from ridgeline.engine.catch_up import reading, unread_steps
from ridgeline.engine.device import DeviceStep
from ridgeline.engine.executor import Executor
from ridgeline.engine.graphs import GraphExecutor
from ridgeline.engine.packet import Packet
from ridgeline.engine.runner import Runner
from ridgeline.engine.shape import Sizes, StepShape
from ridgeline.engine.warm_up import warm_up_kernels
from ridgeline.models.build import LoadedModel
from ridgeline.models.decoder import Decoder
from ridgeline.ops.capture import Uncaptured
from ridgeline.ops.rows import Int
from ridgeline.ops.step import SHORT
from ridgeline.speculation.device import NoDrafter
from tests.engine.runners import PAGE, PROMPT, DeviceBench, alone, make_runner, make_step, pair, run_plan

GREEDY = SamplingParams(temperature=0.0)


def join(row: int, generation: int = 1, tokens: tuple[int, ...] = tuple(PROMPT), **facts: object) -> Join:
    values = {"prompt_len": len(tokens), "computed": 0, "limit": 100, "stop_ids": (), "seed": 0, "choice": 0, **facts}
    sampling = values.pop("sampling", GREEDY)
    return Join(row, generation, tokens, sampling=sampling, **values)  # type: ignore[arg-type]


def pages(row: int, first: int, count: int = 6) -> list[int]:
    return [value for index in range(count) for value in (row, 0, index, first + index)]


def plan(step: int, *shares: tuple[int, int, int, bool], **more: object) -> StepPlan:
    """shares: (row, generation, query tokens, draws)."""
    made = StepPlan(step)
    for row, generation, n_query, draws in shares:
        made.rows.append(row)
        made.generations.append(generation)
        made.n_query.append(n_query)
        made.n_draft.append(0)
        made.logits.append(Logits.LAST if draws else Logits.NONE)
        made.samples.append(draws)
    made.bound = 80
    for name, value in more.items():
        if isinstance(getattr(made, name), array):
            getattr(made, name).extend(value)  # type: ignore[arg-type]
        else:
            setattr(made, name, value)
    return made


def sizes(rows: int, tokens: int, drafts: tuple[int, ...] = (), host_drafts: int = 0) -> Sizes:
    return Sizes(rows, tokens, 100, 20, drafts=drafts, host_drafts=host_drafts)


class Watched:
    """A decoder that notes how many hidden states its head multiplies, and whose forward pass fails while it is `broken`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.multiplied: list[int] = []
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, *given: Any) -> torch.Tensor:
        if self.broken:
            raise torch.OutOfMemoryError("no memory left")
        return self._decoder.forward(*given)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.multiplied.append(len(hidden))
        return self._decoder.logits(hidden)


def watched_model() -> tuple[LoadedModel, Watched]:
    model = pair("llama-gqa")[1]
    decoder: Any = Watched(model.decoder)
    return replace(model, decoder=decoder), decoder


@pytest.fixture
def runner() -> Runner:
    return make_runner(pair("llama-gqa")[1])


def start(runner: Runner, row: int = 1, first: int = 1) -> list[int]:
    """Row joins and draws its first token."""
    made = plan(1, (row, 1, len(PROMPT), True), joins=[join(row)], pages=pages(row, first))
    result = run_plan(runner, made)
    assert result.error is None
    return list(result.tokens)


def test_results_come_in_order(runner: Runner) -> None:
    runner.launch(plan(1, (1, 1, len(PROMPT), True), joins=[join(1)], pages=pages(1, 1)))
    runner.launch(plan(2, (1, 1, 1, True)))
    runner.launch(plan(3, (1, 1, 1, True)))
    results = [runner.collect() for _ in range(3)]
    assert [result.step for result in results] == [1, 2, 3]
    assert [token for result in results for token in result.tokens] == alone(max_tokens=3)
    assert all(list(result.counts) == [1] and result.device_s > 0 for result in results)
    with pytest.raises(IndexError):
        runner.collect()


def test_a_row_that_ended_changes_nothing(runner: Runner) -> None:
    """The step in flight behind an end gains nothing, and the row may be given away at once."""
    expected = alone(max_tokens=8)
    stop = expected[1]
    run_plan(runner, plan(1, (1, 1, len(PROMPT), True), joins=[join(1, stop_ids=(stop,))], pages=pages(1, 1)))
    ended = run_plan(runner, plan(2, (1, 1, 1, True)))
    late = run_plan(runner, plan(3, (1, 1, 1, True)))
    assert ended.flags[0] == Flag.STOP
    assert (list(late.counts), list(late.tokens)) == ([0], [])
    fresh = plan(4, (1, 2, len(PROMPT), True), leaves=[1], joins=[join(1, 2)], pages=pages(1, 20))
    assert list(run_plan(runner, fresh).tokens) == expected[:1]


def test_many_steps_behind_an_end(runner: Runner) -> None:
    """As many as a pipeline is deep: the row stays where it was."""
    limit = len(PROMPT) + 1
    run_plan(runner, plan(1, (1, 1, len(PROMPT), True), joins=[join(1, limit=limit)], pages=pages(1, 1)))
    before = runner.rows.ints[1].tolist()
    late = [run_plan(runner, plan(step, (1, 1, 1, True))) for step in range(2, 6)]
    assert all((list(plan.counts), list(plan.tokens), list(plan.flags)) == ([0], [], [0]) for plan in late)
    assert runner.rows.ints[1].tolist() == before


def test_rows_and_chunks_mix(runner: Runner) -> None:
    start(runner)
    mixed = plan(
        2,
        (2, 1, 4, False),
        (1, 1, 1, True),
        (3, 1, 11, True),
        joins=[join(2), join(3)],
        pages=pages(2, 10) + pages(3, 20),
    )
    result = run_plan(runner, mixed)
    assert list(result.counts) == [0, 1, 1]
    expected = alone(max_tokens=2)
    assert list(result.tokens) == [expected[1], expected[0]]
    assert list(run_plan(runner, plan(3, (2, 1, 7, True))).tokens) == expected[:1]


def test_of_two_entries_for_a_place_the_last_counts(runner: Runner) -> None:
    """A shared block is put into the table and replaced by a copy within one plan."""
    first = start(runner)
    forked = join(2, computed=len(PROMPT) - 1)
    twice = [*pages(2, 1), 2, 0, 1, 30]
    made = plan(2, (2, 1, 1, True), (1, 1, 1, True), joins=[forked], pages=twice, copies=[2, 30])
    assert list(run_plan(runner, made).tokens) == alone(max_tokens=2)[:1] + alone(max_tokens=2)[1:]
    assert runner.rows.tables[0, 2, :3].tolist() == [1, 30, 3]
    assert first == alone(max_tokens=1)


def test_drafts_by_hand(runner: Runner) -> None:
    expected = alone(max_tokens=6)
    start(runner)
    made = plan(2, (1, 1, 4, True), drafts=[expected[1], expected[2], 0])
    made.n_draft[0] = 3
    result = run_plan(runner, made)
    assert list(result.counts) == [3] and result.kept == {0: [0, 1]}
    assert list(result.tokens) == expected[1:4]
    assert list(run_plan(runner, plan(3, (1, 1, 1, True))).tokens) == expected[4:5]


def test_beside_a_prompt_the_head_multiplies_what_a_row_has() -> None:
    """Not as many hidden states of each row as the longest draft has nodes."""
    expected = alone(max_tokens=6)
    model, decoder = watched_model()
    runner = make_runner(model)
    start(runner)
    shares = (3, 1, 4, False), (2, 1, len(PROMPT), True), (1, 1, 4, True)
    made = plan(2, *shares, joins=[join(2), join(3)], pages=[*pages(2, 10), *pages(3, 20)])
    made.n_draft[2], made.drafts = 3, array("i", [expected[1], expected[2], 0])
    result = run_plan(runner, made)
    assert list(result.counts) == [0, 1, 3] and list(result.tokens) == [expected[0], *expected[1:4]]
    assert decoder.multiplied == [1, 1 + 4]
    assert list(run_plan(runner, plan(3, (3, 1, 7, True))).tokens) == expected[:1]


@pytest.mark.parametrize("padded", [None, reading(5, 16)])
@pytest.mark.parametrize("count", [1, 4, 5, 23])
def test_what_a_draft_model_has_not_read(count: int, padded: StepShape | None) -> None:
    """Every row's tokens in order but for the last two, of as many rows at a time as the graph holds that reads them."""
    behind = [7 * row % 19 for row in range(count)]
    made = plan(1, *((row, 1, 1, row % 5 != 4) for row in range(1, count + 1)))
    made.unread = array("i", [drafted for row, drafted in enumerate(behind, 1) if row % 5 != 4])
    nodes: dict[int, list[int]] = {}
    for packed, its in unread_steps(made, padded):
        assert padded is None or its is padded
        ragged = unpack(torch.from_numpy(packed), its).ragged
        rows = packed[: its.rows].tolist()
        assert ragged is not None
        owners, places, tokens = ragged.row_of.tolist(), ragged.place.tolist(), int(ragged.q_start[-1])
        for at, (owner, place) in enumerate(zip(owners[:tokens], places[:tokens], strict=True)):
            nodes.setdefault(rows[owner], []).append(place)
            assert int(ragged.q_start[owner]) <= at < int(ragged.q_start[owner + 1])
        ends = dict(zip(owners[:tokens], places[:tokens], strict=True))
        assert all(int(ragged.n_query[owner]) == place + 1 for owner, place in ends.items())
    wanted = {row: drafted - 2 for row, drafted in enumerate(behind, 1) if row % 5 != 4 and drafted > 2}
    assert nodes == {row: list(range(-1 - drafted, -1)) for row, drafted in wanted.items()}


def test_drafts_stop_at_an_end(runner: Runner) -> None:
    expected = alone(max_tokens=6)
    limit = len(PROMPT) + 3
    run_plan(runner, plan(1, (1, 1, len(PROMPT), True), joins=[join(1, limit=limit)], pages=pages(1, 1)))
    made = plan(2, (1, 1, 5, True), drafts=expected[1:5])
    made.n_draft[0] = 4
    result = run_plan(runner, made)
    assert list(result.tokens) == expected[1:3]
    assert list(result.flags) == [Flag.LIMIT]


def test_a_mask_that_leaves_only_an_end(runner: Runner) -> None:
    """The mask has its way before min_tokens, but nothing ends there."""
    only = bytes([0, 1 << 1]) + bytes(40)
    sampling = SamplingParams(temperature=1.0, min_tokens=1)
    first = plan(
        1, (1, 1, 11, True), joins=[join(1, stop_ids=(9,), sampling=sampling)], pages=pages(1, 1), masks={1: only}
    )
    early = run_plan(runner, first)
    late = run_plan(runner, plan(2, (1, 1, 1, True), masks={1: only}))
    assert (list(early.tokens), list(early.flags)) == ([9], [0])
    assert (list(late.tokens), list(late.flags)) == ([9], [Flag.STOP])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tree": [-1]}, "parents"),
        ({"drafts": [5]}, "draft tokens"),
    ],
)
def test_refusals_fail_the_step_alone(runner: Runner, change: dict[str, list[int]], reason: str) -> None:
    first = start(runner)
    bad = plan(2, (1, 1, 1, True))
    for name, value in change.items():
        setattr(bad, name, array("i", value))
    result = run_plan(runner, bad)
    assert result.error is not None and reason in result.error
    assert list(result.counts) == [0]
    good = run_plan(runner, plan(3, (1, 1, 1, True)))
    assert first + list(good.tokens) == alone(max_tokens=2)


def test_a_refused_plan_still_moves_pages(runner: Runner) -> None:
    bad = plan(1, (1, 1, 1, True), joins=[join(1)], pages=pages(1, 1), tree=[-1])
    assert run_plan(runner, bad).error
    assert list(run_plan(runner, plan(2, (1, 1, len(PROMPT), True))).tokens) == alone(max_tokens=1)


def test_a_failing_model_fails_its_step_alone() -> None:
    model, decoder = watched_model()
    runner = make_runner(model)
    start(runner)
    decoder.broken = True
    broken = run_plan(runner, plan(2, (1, 1, 1, True)))
    decoder.broken = False
    assert broken.error is not None and "no memory left" in broken.error
    assert start(runner, row=2, first=40) == alone(max_tokens=1)


def test_a_lost_device_ends_the_engine_with_the_reason(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA fault stays until the process ends: every later step would fail, so the engine must say so and go."""
    start(runner)

    def fault(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(type(runner.rows), "write_changes", fault)
    monkeypatch.setattr(runner, "_cuda", True)
    monkeypatch.setattr(torch.cuda, "synchronize", fault)
    monkeypatch.setattr("ridgeline.engine.runner.Clock", lambda cuda: None)
    with pytest.raises(EngineFailed, match="device is lost"):
        runner.launch(plan(2, (1, 1, 1, True)))


def test_lost_changes_fail_the_rows_they_concern(runner: Runner) -> None:
    """If the upload itself fails, here by a page that no table has, the rows it was for must not go on with stale tables."""
    start(runner)
    nowhere = [2, 0, 1 << 28, 9]
    lost = plan(2, (1, 1, 1, True), joins=[join(2), join(3)], pages=[*pages(2, 10), *nowhere])
    assert "out of bounds" in (run_plan(runner, lost).error or "")
    behind = plan(3, (2, 1, 11, True), (1, 1, 1, True), (4, 1, 11, True), joins=[join(4)], pages=pages(4, 20))
    result = run_plan(runner, behind)
    assert result.error is None and list(result.lost) == [0]
    assert list(result.counts) == [0, 1, 1]
    assert list(result.tokens) == [alone(max_tokens=2)[1], alone(max_tokens=1)[0]]
    assert runner.rows.ints[0, : Int.LIMIT].tolist() == [0, 0, 1, 1]


def measure(page: int) -> Compaction:
    """Asks how many blocks row 1 keeps after its prompt, whose first block is in `page`."""
    return Compaction(1, len(PROMPT), len(PROMPT), 3, 1, [[page, 2]], share=0.9)


def test_rows_do_not_go_on_with_stale_tables_after_a_measure_that_fails(runner: Runner) -> None:
    """Changes of its plan did not reach the device."""
    start(runner)
    failed = run_plan(runner, plan(2, joins=[join(2)], pages=pages(2, 10), measures=[measure(1 << 28)]))
    assert failed.error is not None and not failed.blocks
    result = run_plan(runner, plan(3, (2, 1, 11, True), (1, 1, 1, True)))
    assert result.error is None and list(result.lost) == [0]
    assert list(result.tokens) == [alone(max_tokens=2)[1]]


def test_a_measure_of_a_plan_without_rows_is_complete() -> None:
    """No event says when a copy to the host has ended."""
    model = pair("llama-gqa")[1]

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor) if tensor.dtype == torch.int64 else tensor  # not written yet

    sampler = replace(model.ops.sampler, to_host=to_host)
    runner = make_runner(replace(model, ops=replace(model.ops, sampler=sampler)))
    start(runner)
    assert run_plan(runner, plan(2, measures=[measure(1)])).blocks == [1]


@pytest.mark.parametrize(("row", "generation"), [(1, 9), (5, 1), (0, 1), (99, 1), (-1, 1)])
def test_a_row_that_holds_somebody_else_is_lost_alone(runner: Runner, row: int, generation: int) -> None:
    """Whatever was asked of it: a chunk, a draw, drafts, a mask."""
    first = start(runner)
    drafted = plan(2, (row, generation, 3, True), (1, 1, 1, True), drafts=[4, 5])
    drafted.n_draft[0] = 2
    masks = {} if row == 1 else {row: b""}
    for number, bad in enumerate((drafted, plan(3, (1, 1, 1, True), (row, generation, 1, True), masks=masks))):
        result = run_plan(runner, bad)
        assert result.error is None and list(result.lost) == [number]
        first += result.tokens
    alone_again = run_plan(runner, plan(4, (row, generation, 5, False)))
    assert alone_again.error is None and list(alone_again.lost) == [0]
    assert first == alone(max_tokens=3)
    assert runner.rows.ints[0, : Int.LIMIT].tolist() == [0, 0, 1, 1]


def test_a_plan_may_only_prepare(runner: Runner) -> None:
    assert run_plan(runner, plan(1, joins=[join(1)], pages=pages(1, 1))).error is None
    assert list(run_plan(runner, plan(2, (1, 1, len(PROMPT), True))).tokens) == alone(max_tokens=1)


def test_joins_that_cannot_be(runner: Runner) -> None:
    for bad in (join(99), join(1, computed=len(PROMPT)), join(1, stop_ids=tuple(range(17)))):
        result = run_plan(runner, plan(1, (1, 1, 1, True), joins=[bad]))
        assert result.error is not None
    assert start(runner) == alone(max_tokens=1)


def test_device_state(runner: Runner) -> None:
    """Row 0 never moves; a chunk moves the position alone, a draw also what is known."""
    run_plan(runner, plan(1, (1, 1, 5, False), joins=[join(1)], pages=pages(1, 1)))
    assert runner.rows.ints[1, : Int.DONE].tolist() == [5, 5, len(PROMPT)]
    run_plan(runner, plan(2, (1, 1, 6, True)))
    assert runner.rows.ints[1, : Int.DONE].tolist() == [11, 11, 12]
    assert runner.rows.tokens[1, :12].tolist() == PROMPT + alone(max_tokens=1)
    assert runner.rows.ints[0, : Int.LIMIT].tolist() == [0, 0, 1, 1]
    assert runner.store.kv[0].shape[3] == PAGE


def test_unchanged_steps_upload_nothing(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    start(runner)
    run_plan(runner, plan(2, (1, 1, 1, True)))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an upload")

    with monkeypatch.context() as patch:
        patch.setattr(Packet, "add", refuse)
        result = run_plan(runner, plan(3, (1, 1, 1, True)))
    assert result.error is None
    assert list(result.tokens) == alone(max_tokens=3)[2:]


@pytest.mark.parametrize("few", [32, 2])
def test_buckets_and_padding(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of graphs but the capture itself: rows join and leave while buckets change, special rows among them. few: rows of
    small mixed steps, the others take the graphs of any number of rows."""
    monkeypatch.setattr(graph_shapes, "MIXED_ROWS", few)
    monkeypatch.setattr(graph_shapes, "CROWDED_TOKENS", (16, 40))
    bench = DeviceBench(rows=7)
    bench.use_graphs(Uncaptured)
    options: list[dict[str, object]] = [
        {"temperature": 0.5 * (number % 3), "seed": number, "max_tokens": 5 + 4 * number} for number in range(9)
    ]
    options[7]["logprobs"] = 2
    options[8]["top_p"] = 0.7
    options[4]["prompt_logprobs"] = 1
    for number, option in enumerate(options):
        bench.submit(f"r{number}", PROMPT[number:], **option)  # type: ignore[arg-type]
    bench.run()
    for number, option in enumerate(options):
        assert bench.tokens[f"r{number}", 0] == alone(PROMPT[number:], **option), option
    assert len(bench.logprobs["r7", 0]) == options[7]["max_tokens"]
    plain = DeviceBench(rows=7)
    plain.submit("r4", PROMPT[4:], **options[4])  # type: ignore[arg-type]
    plain.run()
    scores = [[score.logprob for score in each.scores["r4"]] for each in (bench, plain)]
    assert len(scores[0]) == len(PROMPT) - 5 and scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert bench.runner.rows.ints[0, : Int.LIMIT].tolist() == [0, 0, 1, 1]


def test_few_rows_have_graphs_for_shorter_contexts() -> None:
    seen: list[int] = []

    class Noted(DeviceStep):
        def forward(self, batch: Batch, longest: int) -> torch.Tensor:
            seen.append(longest)
            return super().forward(batch, longest)

    model = pair("llama-gqa")[1]
    runner = make_runner(model, Sizes(6, 64, SHORT + 9, 200))
    step = Noted(model, runner.rows, runner.store, 64, NoDrafter())
    most = step.longest
    assert most > SHORT
    cases = ((1, SHORT, SHORT), (1, SHORT + 1, most), (2, SHORT, SHORT), (2, most, most), (6, 3, most))
    with torch.inference_mode():
        graphs = GraphExecutor(step, sizes(6, 64), Uncaptured)
        graphs.capture(lambda stage, done, total: None)
        for rows, bound, longest in cases:
            decode = plan(1, *((0, 0, 1, True) for _ in range(rows)), bound=bound)
            shape = StepShape.decoding(rows)
            batch = unpack(torch.zeros(rows, dtype=torch.int32), shape)
            graphs.run(graphs.load(decode, batch, True), decode)
            assert seen[-1] == longest


def test_steps_too_small_for_mixed_graphs_have_those_that_decode() -> None:
    bench = DeviceBench(rows=3, step_tokens=8)
    bench.use_graphs(Uncaptured)
    bench.submit("a", PROMPT, max_tokens=6)
    bench.run()
    assert bench.tokens["a", 0] == alone(PROMPT, max_tokens=6)


def test_warm_up_changes_nothing(runner: Runner) -> None:
    before = start(runner), runner.rows.ints.clone(), runner.rows.tokens.clone()
    step = make_step(pair("llama-gqa")[1], runner)
    with torch.inference_mode():
        for rows, tokens in ((6, 64), (3, 40), (1, 3)):
            held = Sizes(rows, tokens, 20, 20, host_drafts=5)
            warm_up_kernels(step, Executor(step), held, lambda *_: None)
    assert torch.equal(runner.rows.ints, before[1]) and torch.equal(runner.rows.tokens, before[2])
    assert before[0] + list(run_plan(runner, plan(2, (1, 1, 1, True))).tokens) == alone(max_tokens=2)


def test_a_lost_row_has_nothing_to_read(runner: Runner) -> None:
    """A draft model reads what the others have missed."""
    start(runner)
    made = plan(2, (2, 9, 1, True), (1, 1, 1, True), (3, 1, 4, False), unread=[7, 5])
    kept, lost = runner.rows.drop_lost(made)
    assert lost == [0, 2] and kept.unread.tolist() == [5]
    [(packed, shape)] = unread_steps(kept, None)
    assert (shape.rows, shape.tokens) == (1, 3) and packed[0] == 1


def test_chunks_need_no_logits() -> None:
    """In graphs as without: a step in which nobody draws does not run the head for its padding."""
    counts: list[int] = []
    for graphs in (True, False):
        model, decoder = watched_model()
        bench = DeviceBench(rows=3, step_tokens=16, model=model)
        if graphs:
            bench.use_graphs(Uncaptured)
        decoder.multiplied.clear()
        bench.submit("a", PROMPT * 5, max_tokens=1)
        bench.run()
        counts.append(len(decoder.multiplied))
        assert bench.tokens["a", 0] == alone(PROMPT * 5, max_tokens=1)
    assert counts == [1, 1]
