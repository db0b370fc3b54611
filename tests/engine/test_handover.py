"""Two engines, one for prompts and one for the tokens after the first: the same tokens as one engine, whatever is lost between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.sampling import Grammar, SamplingParams
from ridgeline.core.ticket import Pools, Ticket
from ridgeline.engine.assemble import assemble
from ridgeline.engine.engine import Engine
from ridgeline.engine.handover import over_peers, over_tcp
from ridgeline.models.hub import shipped_model
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.wire.messages import Cancel, Delta, Offer, Submit
from tests.kv.host_memory import HostMemory
from tests.models.families import save

CONFIG = EngineConfig(
    device="cpu", kv_cache_memory=1 << 23, max_num_seqs=4, max_num_batched_tokens=24, block_size=8, threads=1
)
PROMPT = [5, 9, 2, 77, 41, 200, 13, 8, 300, 11, 6, 17, 18, 19, 20, 21, 22, 91, 90, 89, 4]
ENDS = ("stop", "length", "cancelled", "refused", "error")


def start(folder: Path, config: EngineConfig, pools: Pools, **model: object) -> Engine:
    chosen = ModelConfig(str(folder), dtype="float32", **model)  # type: ignore[arg-type]
    return assemble(chosen, config, lambda *at: None, pools=pools)


@contextmanager
def shared_pools(count: int) -> Iterator[list[Pools]]:
    descriptors = tuple(os.memfd_create("pool") for _ in range(count))
    try:
        yield [Pools(descriptors, number) for number in range(count)]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@contextmanager
def engines(
    folder: Path, config: EngineConfig = CONFIG, memory: HostMemory | None = None, tcp: bool = False, **model: object
) -> Iterator[list[Engine]]:
    """The engine of prompts, the engine of the other tokens, and one that does both. memory: pages are copied from it, as between
    GPUs; None: from memory files. tcp: they are sent."""
    with ExitStack() as stack:
        pools = stack.enter_context(shared_pools(2))
        if tcp:
            pools = [Pools(local=number, listen="127.0.0.1", secret="5e" * 32) for number in range(2)]
        made = []
        for pool in (*pools, Pools()):
            made.append(start(folder, config, pool if memory is None else Pools(), **model))
            stack.callback(made[-1].close)
            if memory is not None and pool.hands_over:
                leases, runner = made[-1].loop.scheduler.leases, made[-1].loop.runner
                over = over_tcp if tcp else over_peers
                hand_overs = over(pool, leases, runner, made[-1].setup.fingerprint, memory)  # type: ignore[arg-type]
                made[-1].setup = replace(made[-1].setup, hand_overs=hand_overs)
        yield made


@dataclass
class Heard:
    """What an engine says of one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    cached: int = -1
    ticket: Ticket | None = None
    offers: list[Ticket] = field(default_factory=list)
    """Tickets of parts of the prompt."""

    def take(self, delta: Delta) -> None:
        if delta.ticket is not None and not delta.finish:
            self.offers.append(delta.ticket)
            return
        self.tokens.setdefault(delta.choice, []).extend(delta.tokens)
        self.logprobs.setdefault(delta.choice, []).extend(score.logprob for score in delta.logprobs or ())
        self.cached = max(self.cached, delta.cached)
        self.ticket = delta.ticket or self.ticket
        if delta.finish:
            self.finish[delta.choice] = delta.finish


def run(engine: Engine, *messages: Submit, until: Callable[[], bool] = lambda: False) -> dict[str, Heard]:
    """Run requests until all have ended, or `until`."""
    heard = {message.id: Heard() for message in messages}
    for message in messages:
        engine.handle(message)
    deadline = time.monotonic() + 60
    while not engine.idle and not until():
        assert time.monotonic() < deadline, "requests hang"
        for delta in [] if (frame := engine.turn()) is None else frame.each():
            heard.setdefault(delta.id, Heard()).take(delta)
    return heard


def prompt_half(message: Submit) -> Submit:
    return Submit(message.id, message.tokens, message.sampling, 0.0, salt=message.salt, hand_over=True)


def other_half(message: Submit, first: Heard, **changed: object) -> Submit:
    """changed: fields of Submit."""
    drawn = {choice: tokens for choice, tokens in first.tokens.items() if first.finish[choice] == "length"}
    sampling = replace(message.sampling, prompt_logprobs=None)
    fields = {"salt": message.salt, "drawn": drawn, "ticket": first.ticket, **changed}
    return Submit(message.id, message.tokens, sampling, 0.0, **fields)  # type: ignore[arg-type]


def handed_over(engines: list[Engine], *messages: Submit) -> tuple[dict[str, Heard], dict[str, Heard]]:
    """Run requests over both engines. Returns what each of them said, the second with all tokens."""
    first = run(engines[0], *map(prompt_half, messages))
    for name, heard in first.items():
        for ticket in heard.offers:
            engines[1].handle(Offer(name, ticket))
    second = run(engines[1], *(other_half(message, first[message.id]) for message in messages))
    for message in messages:
        engines[0].handle(Cancel(message.id))
        both, before = second[message.id], first[message.id]
        for choice in before.tokens:
            both.tokens[choice] = before.tokens[choice] + both.tokens.get(choice, [])
            both.logprobs[choice] = before.logprobs[choice] + both.logprobs.get(choice, [])
            both.finish.setdefault(choice, before.finish[choice])
    return first, second


def requests() -> list[Submit]:
    kinds = (
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=12, seed=3, logprobs=2),
        SamplingParams(temperature=0.7, max_tokens=12, seed=4, repetition_penalty=1.3, top_p=0.9, min_tokens=4),
        SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1),
        SamplingParams(temperature=0.8, max_tokens=8, seed=5, n=3),
    )
    return [
        Submit(str(number), [*PROMPT, number + 30, *PROMPT[: 3 * number]], sampling, arrival=0.0)
        for number, sampling in enumerate(kinds)
    ]


def pool_of(engine: Engine):  # type: ignore[no-untyped-def]
    return engine.loop.scheduler.leases.pool


def pulled(engine: Engine) -> tuple[int, int]:
    """Pages that have arrived, and pages that have not."""
    (tier,) = engine.loop.scheduler.leases.source.tiers()
    return tier.loaded, tier.dropped


CASES = {
    "grouped heads": ("llama-gqa", {}, {}),
    "from the memory of the other device": ("llama-gqa", {"memory": HostMemory()}, {}),
    "through host memory": ("llama-gqa", {"memory": HostMemory("share")}, {}),
    "over TCP": ("llama-gqa", {"tcp": True}, {}),
    "over TCP from the memory of a device": ("llama-gqa", {"tcp": True, "memory": HostMemory()}, {}),
    "over TCP with windows": ("gemma3", {"tcp": True}, {}),
    "windows": ("gemma3", {}, {}),
    "int8 cache": ("llama-gqa", {"kv_cache_dtype": "int8"}, {}),
    "drafts": ("llama-gqa", {}, {"speculate": "reference+lookahead"}),
    "steps in flight": ("llama-gqa", {}, {"steps_in_flight": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_engines_say_what_one_says(case: str, tmp_path: Path) -> None:
    family, model, options = CASES[case]
    save(family, tmp_path)
    with engines(tmp_path, replace(CONFIG, **options), **model) as made:  # type: ignore[arg-type]
        expected = run(made[2], *requests())
        _, answers = handed_over(made, *requests())
        for name, answer in answers.items():
            assert (answer.tokens, answer.finish) == (expected[name].tokens, expected[name].finish), name
            for choice, scores in expected[name].logprobs.items():
                assert answer.logprobs[choice] == pytest.approx(scores, abs=1e-3), name
        arrived, lost = pulled(made[1])
        assert arrived > 4 and not lost
        assert pool_of(made[0]).used == pool_of(made[1]).used == 0
        _, again = handed_over(made, *requests())
        assert {name: heard.tokens for name, heard in again.items()} == {
            name: heard.tokens for name, heard in expected.items()
        }, "from cached prefixes on both sides"
        assert pulled(made[1])[0] == arrived, "what the second engine has is not pulled again"


def test_a_grammar_goes_on() -> None:
    sampling = SamplingParams(temperature=0.8, seed=2, max_tokens=40, grammar=Grammar("regex", "[a-z ]{20,30}"))
    prompt = Tokenizer.load(shipped_model()).encode("Once upon a time there was a king", add_special_tokens=False)
    message = Submit("a", prompt * 3, sampling, arrival=0.0)
    with engines(shipped_model(), replace(CONFIG, kv_cache_memory=1 << 25)) as made:
        expected = run(made[2], message)["a"]
        _, answers = handed_over(made, message)
        assert answers["a"].tokens == expected.tokens and answers["a"].finish == expected.finish
        assert pulled(made[1])[0] > 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("model")
    save("llama-gqa", folder)
    with engines(folder) as three:
        yield three


def message(name: str, seed: int = 1, **options: object) -> Submit:
    """A request with a prompt of its own."""
    prompt = [*(ord(letter) for letter in reversed(name)), *PROMPT * 2]
    fields = {"temperature": 0.8, "seed": seed, "max_tokens": 10, "ignore_eos": True, **options}
    return Submit(name, prompt, SamplingParams(**fields), arrival=0.0)  # type: ignore[arg-type]


def overwritten(engine: Engine, ticket: Ticket) -> None:
    store = engine.loop.runner.store.flat  # type: ignore[attr-defined]
    page = max(ticket.pages[1])
    size = engine.loop.scheduler.layout.page_bytes
    with torch.inference_mode():
        store[page * size] ^= 1


LOSSES: dict[str, Callable[[Engine, Ticket], Ticket]] = {
    "a changed byte": lambda engine, ticket: overwritten(engine, ticket) or ticket,
    "a wrong page": lambda engine, ticket: replace(ticket, pages=(*ticket.pages[:-1], ticket.pages[0])),
    "a page behind the end": lambda engine, ticket: replace(ticket, pages=((1 << 20,), *ticket.pages[1:])),
    "an engine that is not there": lambda engine, ticket: replace(ticket, engine=7),
    "an engine without a pool": lambda engine, ticket: replace(
        ticket, engine=1, pages=((1 << 20,),) * len(ticket.pages)
    ),
    "other keys": lambda engine, ticket: replace(ticket, keys=tuple(key[::-1] for key in ticket.keys)),
    "fewer pages": lambda engine, ticket: Ticket(0, ticket.keys[:1], ticket.pages[:1], ticket.checks[:1]),
    "no page": lambda engine, ticket: Ticket(0, (), (), ()),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_does_not_arrive_is_computed(loss: str, made: list[Engine]) -> None:
    asked = message(f"lost {loss}")
    first = run(made[0], prompt_half(asked))[asked.id]
    assert first.ticket is not None and len(first.ticket.keys) == len(asked.tokens) // 8
    ticket = LOSSES[loss](made[0], first.ticket)
    second = run(made[1], other_half(asked, first, ticket=ticket))[asked.id]
    made[0].handle(Cancel(asked.id))
    made[0].loop.scheduler.leases.reset_prefix_cache()  # it may hold the changed page
    assert first.tokens[0] + second.tokens[0] == run(made[2], asked)[asked.id].tokens[0]
    assert (second.cached == 8) == (loss == "fewer pages") and second.cached in (0, 8)
    assert pool_of(made[0]).used == pool_of(made[1]).used == 0


def test_pages_are_kept_until_they_are_pulled_and_no_longer_than_a_deadline(made: list[Engine]) -> None:
    first, second = message("kept"), message("forgotten")
    for asked in (first, second):
        run(made[0], prompt_half(asked))
    kept = pool_of(made[0]).used
    assert kept == len(first.tokens) // 8 + len(second.tokens) // 8
    made[0].handle(Cancel(first.id))
    assert 0 < pool_of(made[0]).used < kept
    source = made[0].loop.scheduler.leases.source
    source._clock = lambda: time.monotonic() + 31.0  # type: ignore[attr-defined]
    made[0].turn()
    assert pool_of(made[0]).used == 0 and pulled(made[0])[1] > 0
    made[0].handle(Cancel(second.id))
    pool_of(made[0]).check()


def test_cancel_frees_the_blocks_on_both_sides_at_every_turn(made: list[Engine]) -> None:
    turns = 0
    for stop in range(12):
        asked = message(f"cancelled {stop}")
        heard: dict[str, Heard] = {asked.id: Heard()}
        for place, engine in enumerate(made[:2]):
            engine.handle(prompt_half(asked) if place == 0 else other_half(asked, heard[asked.id]))
            while not engine.idle and turns < stop:
                turns += 1
                for delta in [] if (frame := engine.turn()) is None else frame.each():
                    heard[asked.id].take(delta)
            if not engine.idle:
                break
        for engine in made[:2]:
            engine.handle(Cancel(asked.id))
            run(engine)
            assert pool_of(engine).used == 0
            pool_of(engine).check()
        turns = 0


def test_another_model_has_other_keys(made: list[Engine], tmp_path: Path) -> None:
    asked = message("other model")
    save("llama-gqa", tmp_path)
    other = start(tmp_path, CONFIG, Pools(), kv_cache_dtype="int8")
    first = run(made[0], prompt_half(asked))[asked.id]
    second = run(other, other_half(asked, first))[asked.id]
    assert second.cached == 0 and len(second.tokens[0]) == 9
    made[0].handle(Cancel(asked.id))
    other.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "several ranks hand nothing over"),
        ({"pipeline_parallel_size": 2}, "several ranks hand nothing over"),
        ({"enable_prefix_caching": False}, "blocks are handed over by their prefix"),
        ({"kv_retention": "window:keep=16,sinks=1"}, "would drop tokens one token later"),
        ({"kv_offload_gb": 0.1}, "engines that hand prompts over have no tiers"),
    ],
)
def test_what_hands_nothing_over_is_refused(options: dict[str, object], words: str, tmp_path: Path) -> None:
    save("llama-gqa", tmp_path)
    with shared_pools(2) as pools, pytest.raises(ConfigError, match=words):
        start(tmp_path, replace(CONFIG, **options), pools[0])  # type: ignore[arg-type]


def long_message(name: str) -> Submit:
    """A request whose prompt takes several steps."""
    prompt = [*(ord(letter) for letter in name), *(PROMPT * 5)]
    return Submit(name, prompt, SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True), arrival=0.0)


def test_pages_travel_while_the_prompt_is_computed(tmp_path: Path) -> None:
    """After the last step only its blocks are left to send; the tokens are those of one engine."""
    save("llama-gqa", tmp_path)
    with engines(tmp_path, tcp=True) as made:
        asked = long_message("early")
        first = run(made[0], prompt_half(asked))[asked.id]
        assert first.ticket is not None and len(first.offers) >= 3
        early = [key for offer in first.offers for key in offer.keys]
        assert early == list(first.ticket.keys[: len(early)]), "each block once, in order"
        assert len(first.ticket.keys) - len(early) <= CONFIG.max_num_batched_tokens // CONFIG.block_size
        for offer in first.offers:
            made[1].handle(Offer(asked.id, offer))
        transport = made[1].loop.scheduler.leases.source._transport  # type: ignore[attr-defined]
        assert all(arrival.result(10) is not None for arrival in transport._arrivals.values())
        assert len(transport._arrivals) == len(early) and pool_of(made[1]).used == 0, "no block is needed yet"
        second = run(made[1], other_half(asked, first))[asked.id]
        assert first.tokens[0] + second.tokens[0] == run(made[2], asked)[asked.id].tokens[0]
        assert pulled(made[1]) == (len(first.ticket.keys), 0) and not transport._arrivals
        made[0].handle(Cancel(asked.id))
        assert pool_of(made[0]).used == pool_of(made[1]).used == 0
        pool_of(made[0]).check()


@pytest.mark.parametrize("ends", ["after a part of the prompt", "after the ticket", "released after the ticket"])
def test_an_engine_that_ends_between_offers_and_pages(ends: str, tmp_path: Path) -> None:
    save("llama-gqa", tmp_path)
    with engines(tmp_path, tcp=True) as made:
        asked = long_message("lost")
        first = run(made[0], prompt_half(asked))[asked.id]
        transport = made[1].loop.scheduler.leases.source._transport  # type: ignore[attr-defined]
        made[1].handle(Offer(asked.id, first.offers[0]))
        assert all(arrival.result(10) is not None for arrival in transport._arrivals.values())
        if ends == "released after the ticket":
            made[0].handle(Cancel(asked.id))
        else:
            made[0].loop.scheduler.leases.source._transport.close()  # type: ignore[attr-defined]
        if ends == "after a part of the prompt":  # what the service sends to the engine that takes over
            made[1].handle(Cancel(asked.id))
            assert not transport._arrivals
            tokens = run(made[1], asked)[asked.id].tokens[0]
        else:
            second = run(made[1], other_half(asked, first))[asked.id]
            assert second.cached == 0, "computed again"
            tokens = first.tokens[0] + second.tokens[0]
        assert tokens == run(made[2], asked)[asked.id].tokens[0]
        assert pool_of(made[1]).used == 0 and not transport._arrivals
        assert transport._room == 4 << 30, "no memory is held"
