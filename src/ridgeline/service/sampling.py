"""Converts checked fields to SamplingParams, for every route."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ridgeline.core.dry import Dry
from ridgeline.core.errors import RequestError
from ridgeline.core.sampling import Grammar, SamplingParams
from ridgeline.service.answer import Streaming
from ridgeline.service.beams import widest
from ridgeline.service.call import Beams
from ridgeline.service.fields import TIERS, Fields
from ridgeline.service.state import Service
from ridgeline.text.chat import RenderOptions
from ridgeline.text.prompts import ChatEncoder, Prompt
from ridgeline.text.words import bad_word_ids, breaker_ids

_T = TypeVar("_T")

GRAMMAR_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
)

_SAME_NAME = (
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "min_tokens",
    "ignore_eos",
    "stop",
    "skip_special_tokens",
)
_WITH_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}

_DRY_NAMES = {
    "dry_multiplier": "multiplier",
    "dry_base": "base",
    "dry_allowed_length": "allowed_length",
    "dry_penalty_last_n": "window",
}
DRY_BREAKERS = ("\n", ":", '"', "*")
"""Default of dry_sequence_breakers in llama.cpp and text-generation-webui."""

_NOT_WITH_BEAMS = (
    *("logit_bias", "allowed_token_ids", "bad_words", "dry_multiplier", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "stop", "tools", "cache_control"),
)

_IN_LOOP = 4096
"""Characters up to which a text is tokenized in the event loop. Longer texts go to a thread, so that other streams go on."""


async def read_sampling(service: Service, fields: Fields, max_tokens: int) -> SamplingParams:
    """The request's sampling parameters. Defaults come from the model's generation_config, then from OpenAI.

    max_tokens 0 becomes 1, because the engine must compute a token; the caller drops it.
    """
    values: dict[str, Any] = {name: fields.values[name] for name in _SAME_NAME if name in fields.values}
    for name, default in _WITH_DEFAULTS.items():
        values[name] = fields.get(name, service.card.defaults.get(name, default))
    values["top_k"] = max(0, int(values["top_k"]))
    if values["top_p"] == 0:
        values["top_k"], values["top_p"] = 1, 1.0
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        if (ids := fields.get(name)) is not None:
            service.limits.check_ids([item[0] for item in ids] if name == "logit_bias" else ids, name)
            values[name] = ids
    if words := fields.get("bad_words"):
        values["bad_word_ids"] = await _tokenized(sum(map(len, words)), partial(bad_word_ids, service.tokenizer, words))
    if fields.get("dry_multiplier") and fields.get("dry_penalty_last_n") != 0:
        values["dry"] = _dry(service, fields)
    if len(fields.get("stop_token_ids", ())) > service.limits.stop_ids:
        raise RequestError(
            f"stop_token_ids has {len(fields.get('stop_token_ids'))} ids: expected at most {service.limits.stop_ids} "
            "in addition to the model's end tokens.",
            param="stop_token_ids",
        )
    return SamplingParams(
        **values,
        max_tokens=max(1, max_tokens),
        include_stop=fields.get("include_stop_str_in_output", False),
        grammar=_grammar(fields),
        prompt_logprobs=fields.get("prompt_logprobs"),
    )


def _dry(service: Service, fields: Fields) -> Dry:
    breakers = fields.get("dry_sequence_breakers", DRY_BREAKERS)
    given = {name: fields.values[field] for field, name in _DRY_NAMES.items() if field in fields.values}
    return Dry(**given, breakers=breaker_ids(service.tokenizer, breakers))


def read_beams(service: Service, fields: Fields, sampling: SamplingParams) -> Beams | None:
    """The beam search that the request asks for. Raises RequestError for a field that does not combine with it."""
    best_of, n = fields.get("best_of", sampling.n), sampling.n
    if not fields.get("use_beam_search"):
        for name, neutral in (("best_of", n), ("length_penalty", 1), ("early_stopping", False)):
            if (value := fields.get(name, neutral)) != neutral:
                text = f"{name} is {value}, which needs use_beam_search: set it to true, or leave {name} out."
                raise RequestError(text, param=name)
        return None
    given = [name for name in (*GRAMMAR_FIELDS, *_NOT_WITH_BEAMS) if fields.get(name)]
    given += [name for name in ("logprobs", "prompt_logprobs") if getattr(sampling, name) is not None]
    given += ["repetition_penalty"] if fields.get("repetition_penalty", 1) != 1 else []
    if given:
        raise RequestError(f"use_beam_search does not combine with {given[0]}: leave one of them out.", param=given[0])
    ends = () if sampling.ignore_eos else service.client.facts.get("eos_ids") or ()
    end_ids = frozenset((*ends, *sampling.stop_token_ids))
    if not n <= best_of <= widest(len(end_ids)):
        most = f"at least n ({n}) and at most {widest(len(end_ids))}"
        name = "best_of" if "best_of" in fields.values else "n"
        raise RequestError(f"{name} is {best_of}: give {most} beams.", param=name)
    return Beams(best_of, end_ids, fields.get("length_penalty", 1.0), fields.get("early_stopping", False))


def _grammar(fields: Fields) -> Grammar | None:
    present = [name for name in GRAMMAR_FIELDS if fields.get(name) is not None]
    if len(present) > 1:
        raise RequestError(f"{' and '.join(present)} constrain the same output: give one of them.", param=present[1])
    return fields.get(present[0]) if present else None


async def check_grammar(service: Service, sampling: SamplingParams, param: str) -> None:
    """Compile the grammar before the engine receives it. Raises as GrammarChecks.check does, naming `param`."""
    if sampling.grammar is not None:
        await service.grammars.check(sampling.grammar, param)


def grammar_field(fields: Fields) -> str:
    """The field that constrains the output; "" if there is none."""
    return next((name for name in GRAMMAR_FIELDS if fields.get(name) is not None), "")


def read_streaming(fields: Fields) -> Streaming | None:
    """How to stream; None for a single body."""
    options = fields.get("stream_options")
    if not fields.get("stream"):
        if options is not None:
            raise RequestError(
                "stream_options needs stream: set it to true or leave stream_options out.", param="stream_options"
            )
        return None
    if fields.get("prompt_logprobs") is not None:
        raise RequestError("prompt_logprobs cannot be streamed: leave stream out.", param="prompt_logprobs")
    options = options or {}
    return Streaming(bool(options.get("include_usage")), bool(options.get("continuous_usage_stats")))


def read_priority(fields: Fields) -> int:
    """`priority`, otherwise the priority of `service_tier` (lower runs first)."""
    priority = fields.get("priority")
    return int(priority) if priority is not None else TIERS[fields.get("service_tier", "auto")]


def read_tier(fields: Fields) -> str:
    """The tier in the answer: the one that the request ran as. "" if the request named none."""
    tier = fields.get("service_tier", "")
    return "default" if tier and TIERS[tier] == 0 else tier


async def _tokenized(characters: int, encode: Callable[[], _T]) -> _T:
    """What `encode` makes of so many characters."""
    return encode() if characters <= _IN_LOOP else await asyncio.to_thread(encode)


async def tokenize(service: Service, text: str, *, add_special_tokens: bool, batch_characters: int = 0) -> list[int]:
    """Ids of the field `prompt`, at least one. A text that cannot fit the context is refused before it is tokenized.

    batch_characters: characters of all texts of the request, if there are several.
    """
    service.limits.check_text(text, "prompt")
    encode = partial(service.tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return not_empty(await _tokenized(max(len(text), batch_characters), encode), "prompt")


async def tokenize_texts(
    service: Service, texts: Sequence[tuple[str, str]], *, add_special_tokens: bool
) -> list[list[int]]:
    """Ids of each text, as `tokenize`. texts: the name of the field of each, and the text."""
    for field, text in texts:
        service.limits.check_text(text, field)

    def encode() -> list[list[int]]:
        return [service.tokenizer.encode(text, add_special_tokens=add_special_tokens) for _, text in texts]

    encoded = await _tokenized(sum(len(text) for _, text in texts), encode)
    return [not_empty(ids, field) for ids, (field, _) in zip(encoded, texts, strict=True)]


async def encode_chat(
    service: Service,
    encoder: ChatEncoder,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    options: RenderOptions,
    add_special_tokens: bool,
) -> Prompt:
    """A conversation's prompt. Runs in a thread, because the time grows with the messages and other streams must go on."""
    prompt = await asyncio.to_thread(
        encoder.encode,
        messages,
        tools=tools,
        options=options,
        add_special_tokens=add_special_tokens,
        check=partial(service.limits.check_text, field="messages"),
    )
    not_empty(prompt.ids, "messages")
    return prompt


def not_empty(ids: list[int], field: str) -> list[int]:
    """The ids. Raises RequestError if there are none."""
    if not ids:
        raise RequestError(f"{field} has no tokens: send at least one character.", param=field)
    return ids
