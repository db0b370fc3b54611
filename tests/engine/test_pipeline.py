"""Steps of a pipeline: each stage has rows of its own, equally many, and the tokens are those of one stage."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.helpers import Bench, oracle
from tests.engine.test_reader_pace import words

counts = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=8)


@given(
    stages=st.integers(2, 4),
    ahead=st.integers(0, 1),
    requests=counts,
    step_tokens=st.integers(8, 32),
    blocks=st.integers(24, 64),
)
def test_a_step_continues_no_row_that_another_step_draws_for(
    stages: int, ahead: int, requests: list[tuple[int, int]], step_tokens: int, blocks: int
) -> None:
    bench = Bench(stages=stages, depth=stages - 1 + ahead, step_tokens=step_tokens, blocks=blocks)
    expected = {}
    for number, (prompt, answer) in enumerate(requests):
        tokens = words(number, prompt)
        bench.submit(str(number), tokens, max_tokens=answer)
        expected[str(number), 0] = oracle(tokens, answer)
    while not bench.scheduler.idle:
        committed, planned = bench.scheduler.last_step, len(bench.runner.plans)
        bench.turn()
        *in_flight, _ = (plan for plan in bench.runner.plans if plan.step > committed)
        for plan in bench.runner.plans[planned:]:
            drawn = {pair for other in in_flight for pair in drawing(other) if other is not plan}
            assert not drawn & set(zip(plan.rows, plan.generations, strict=True))
    assert bench.tokens == expected


def drawing(plan: object) -> set[tuple[int, int]]:
    """(row, generation) of the rows that draw a token in a step."""
    rows = zip(plan.rows, plan.generations, plan.samples, strict=True)  # type: ignore[attr-defined]
    return {(row, generation) for row, generation, samples in rows if samples}


@pytest.mark.parametrize("stages", [2, 3])
def test_rows_are_shared_equally_between_stages(stages: int) -> None:
    bench = Bench(stages=stages, depth=stages - 1, step_tokens=64)
    for number in range(2 * stages):
        bench.submit(str(number), words(number, 4), max_tokens=40)
    bench.run()
    full = bench.runner.plans[8:30]
    assert {len(plan.rows) for plan in full} == {2}
    assert all(not set(first.rows) & set(second.rows) for first, second in pairwise(full))


def test_a_few_rows_wait_for_others_instead_of_a_step_of_their_own() -> None:
    """On a GPU one step more than stages is in flight. The first step draws for 9 of 16 prompts, the second for 7."""
    bench = Bench(stages=2, depth=2, step_tokens=36, rows=16, blocks=200)
    for number in range(16):
        bench.submit(str(number), words(number, 4), max_tokens=40)
    bench.run()
    sizes = [len(plan.rows) for plan in bench.runner.plans]
    assert sizes[:2] == [9, 7] and set(sizes[2:40]) == {8}


def test_chunks_of_a_prompt_follow_one_another_through_the_stages() -> None:
    """A chunk needs no token of the chunk before it."""
    bench = Bench(stages=2, depth=1, step_tokens=8)
    bench.submit("long", words(1, 40), max_tokens=2)
    bench.turn()
    assert bench.scheduler.steps_in_flight == 1
    bench.turn()
    assert [list(plan.n_query) for plan in bench.runner.plans] == [[8], [8]]
    bench.run()
    assert bench.tokens["long", 0] == oracle(words(1, 40), 2)
