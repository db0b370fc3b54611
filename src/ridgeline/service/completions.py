"""/v1/completions: text or token ids in, text out. With `echo` and `logprobs` it also scores the prompt."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec

from ridgeline.core.errors import RequestError
from ridgeline.core.plan import TokenLogprobs
from ridgeline.service.answer import Streaming
from ridgeline.service.breakpoints import Breakpoint, check_cached, prompt_breakpoint
from ridgeline.service.call import Call, Usage
from ridgeline.service.choices import ChoicesShape
from ridgeline.service.fields import MAX_CHOICES, Fields
from ridgeline.service.logprobs import CompletionLogprobs, prompt_logprobs
from ridgeline.service.piece import CONTENT_FILTER, Piece, Withdrawal
from ridgeline.service.reasoning import ReasoningReader, reasoning_after
from ridgeline.service.sampling import (
    check_grammar,
    grammar_field,
    read_beams,
    read_priority,
    read_sampling,
    read_streaming,
    read_tier,
    tokenize,
)
from ridgeline.service.state import Service
from ridgeline.text.detokenize import Detokenizer

DEFAULT_MAX_TOKENS = 16

_encode = msgspec.json.Encoder().encode


async def read_completion(
    service: Service, fields: Fields, call_id: str, arrival: float
) -> tuple[Call, CompletionShape, Streaming | None]:
    """Everything that a completion needs. Raises RequestError for the first thing that is wrong."""
    service.card.check(fields.get("model"))
    streaming = read_streaming(fields)
    max_tokens = fields.get("max_tokens")
    n = fields.get("n", 1)
    add_special_tokens = fields.get("add_special_tokens", True)
    batch_characters = sum(len(item) for item in fields.get("prompt") if isinstance(item, str))
    prompts = [
        await tokenize(service, item, add_special_tokens=add_special_tokens, batch_characters=batch_characters)
        if isinstance(item, str)
        else item
        for item in fields.get("prompt")
    ]
    count, most = max((n, "n"), (fields.get("best_of", n), "best_of"))
    if len(prompts) * count > MAX_CHOICES:
        raise RequestError(
            f"prompt has {len(prompts)} items and {most} is {count}, which makes more than {MAX_CHOICES} choices: send fewer "
            f"prompts, or lower {most}.",
            param=most,
        )
    for prompt in prompts:
        service.limits.check(len(prompt), max_tokens, "prompt")
        service.limits.check_ids(prompt, "prompt")
    limit = (
        min(DEFAULT_MAX_TOKENS, service.limits.request_tokens - max(map(len, prompts)))
        if max_tokens is None
        else max_tokens
    )
    sampling = await read_sampling(service, fields, limit)
    alternatives, echo = fields.get("logprobs"), fields.get("echo", False)
    prompt_alternatives = fields.get("prompt_logprobs")
    if echo and alternatives is not None:
        prompt_alternatives = max(alternatives, prompt_alternatives or 0)
    sampling = dataclasses.replace(sampling, logprobs=alternatives, prompt_logprobs=prompt_alternatives)
    await check_grammar(service, sampling, grammar_field(fields))
    call = Call(
        call_id,
        arrival,
        tuple(prompts),
        sampling,
        limit,
        priority=read_priority(fields),
        tier=read_tier(fields),
        salt=fields.get("cache_salt", ""),
        adapter=service.card.adapter,
        continues=True,
        constrained_by=grammar_field(fields),
        has_reader=streaming is not None,
        beams=read_beams(service, fields, sampling),
        breakpoints=await _breakpoints(service, fields, prompts),
    )
    shape = CompletionShape(service, call, echo=echo, show_prompt=fields.get("prompt_logprobs"))
    return call, shape, streaming


async def _breakpoints(service: Service, fields: Fields, prompts: list[list[int]]) -> tuple[Breakpoint, ...]:
    """The end of the part of the prompt that stays cached, if the request says so."""
    control = fields.get("cache_control")
    if control is None:
        return ()
    check_cached(service.client.facts, "cache_control")
    if len(prompts) > 1:
        raise RequestError(
            f"cache_control applies to one prompt, but prompt has {len(prompts)}: send one.", param="cache_control"
        )
    offsets: list[tuple[int, int]] = []
    if control.get("characters") is not None and isinstance(text := fields.get("prompt")[0], str):
        special = fields.get("add_special_tokens", True)
        encode = service.tokenizer.encode_with_offsets
        _, offsets = await asyncio.to_thread(encode, text, add_special_tokens=special)
    return (prompt_breakpoint(control, len(prompts[0]), offsets),)


class _Text:
    """One choice of the answer."""

    def __init__(self, tokenizer: Any, scored: bool, reasoning: ReasoningReader) -> None:
        self.text = ""
        self.reasoning = reasoning
        self.logprobs = CompletionLogprobs(tokenizer) if scored else None
        self.finish = ""
        self.stop_reason: str | int | None = None
        self.begun = False
        self.echoed = 0
        """Characters of the echoed prompt."""
        self.sent = False
        """The stream has a part of its text."""
        self.withdrawal: Withdrawal | None = None


class CompletionShape(ChoicesShape):
    """`text_completion` objects. See answer.Shape.

    show_prompt: value of the request's prompt_logprobs; None: not requested.
    """

    def __init__(self, service: Service, call: Call, *, echo: bool, show_prompt: int | None) -> None:
        self.usage = Usage()
        self._service = service
        self._call = call
        self._echo = echo
        self._show_prompt = show_prompt is not None
        self._scored = call.sampling.logprobs is not None
        self._texts = [
            _Text(service.tokenizer, self._scored, reasoning_after(service, prompt))
            for prompt in call.prompts
            for _ in range(call.sampling.n)
        ]
        self._prompt_scores: dict[int, list[TokenLogprobs]] = {}
        self.body_head: dict[str, Any] = {
            "id": call.id,
            "object": "text_completion",
            "created": int(call.arrival),
            "model": service.card.name,
            "system_fingerprint": service.fingerprint,
        }
        if call.tier:
            self.body_head["service_tier"] = call.tier
        self.head = _encode(self.body_head)[:-1]

    def choices(self, piece: Piece) -> list[bytes]:
        if piece.withdrawal is not None:
            text = "" if self._texts[piece.index].sent else piece.withdrawal.replacement
            values = piece.index, _encode(text), CONTENT_FILTER.encode(), _encode(piece.withdrawal.body())
            return [b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":"%b","withdrawal":%b}' % values]
        text, logprobs = self._grow(piece)
        if not (text or piece.finish or (logprobs is not None and logprobs.value["tokens"])):
            return []
        self._texts[piece.index].sent = True
        finish = b'"' + piece.finish.encode() + b'"' if piece.finish else b"null"
        scores = b"null" if logprobs is None else _encode(logprobs.value)
        reason = b"" if piece.stopped_by is None else b',"stop_reason":' + _encode(piece.stopped_by)
        return [
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}'
            % (piece.index, _encode(text), scores, finish, reason)
        ]

    def empty(self, index: int) -> bytes:
        return b'{"index":%d,"text":"","logprobs":null,"finish_reason":null}' % index

    def add(self, piece: Piece) -> None:
        choice = self._texts[piece.index]
        if piece.withdrawal is not None:
            choice.text, choice.finish, choice.withdrawal = (
                piece.withdrawal.replacement,
                CONTENT_FILTER,
                piece.withdrawal,
            )
            choice.logprobs = CompletionLogprobs(self._service.tokenizer) if self._scored else None
            return
        text, logprobs = self._grow(piece)
        choice.text += text
        if choice.logprobs is not None and logprobs is not None:
            choice.logprobs.extend(logprobs)
        choice.finish, choice.stop_reason = piece.finish, piece.stopped_by

    def body(self) -> list[dict[str, Any]]:
        return [self._choice(index, choice) for index, choice in enumerate(self._texts)]

    def _choice(self, index: int, choice: _Text) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index,
            "text": choice.text,
            "logprobs": choice.logprobs.value if choice.logprobs is not None else None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if choice.withdrawal is not None:
            body["withdrawal"] = choice.withdrawal.body()
        if self._show_prompt:
            scores = self._prompt_scores.get(index // self._call.sampling.n, [])
            body["prompt_logprobs"] = prompt_logprobs(self._service.tokenizer, scores)
        return body

    def _grow(self, piece: Piece) -> tuple[str, CompletionLogprobs | None]:
        """Text and scores that a piece adds. With echo, the prompt's text and scores come before the first piece."""
        choice = self._texts[piece.index]
        prompt = piece.index // self._call.sampling.n
        if piece.prompt_logprobs is not None:
            self._prompt_scores[prompt] = piece.prompt_logprobs
        text = piece.text
        self._count_reasoning(choice.reasoning, piece)
        logprobs = CompletionLogprobs(self._service.tokenizer) if self._scored else None
        if self._echo and not choice.begun:
            prompt_text = self._echoed(prompt, logprobs)
            choice.echoed = len(prompt_text)
            text = prompt_text + text
        choice.begun = True
        if logprobs is not None:
            for scored in piece.scored if piece.ended_by is None else [*piece.scored, piece.ended_by]:
                logprobs.add(scored.logprobs, choice.echoed + scored.start)
        return text, logprobs

    def _count_reasoning(self, reasoning: ReasoningReader, piece: Piece) -> None:
        """Count reasoning in the answer. Its text stays whole, but only visible text counts as published."""
        before = reasoning.tokens
        visible, _ = reasoning.read(piece)
        self.usage.reasoning += reasoning.tokens - before
        if visible:
            self.usage.publish()

    def _echoed(self, prompt: int, logprobs: CompletionLogprobs | None) -> str:
        """The prompt's text. Adds the scores of its tokens to `logprobs`."""
        ids = self._call.prompts[prompt]
        detokenizer = Detokenizer(self._service.tokenizer, skip_special_tokens=self._call.sampling.skip_special_tokens)
        if logprobs is None:
            return detokenizer.push(ids)
        logprobs.first(ids[0])
        text = detokenizer.push(ids[:1])
        for entry in self._prompt_scores.get(prompt, []):
            logprobs.add(entry, len(text))
            text += detokenizer.push((entry.token,))
        return text
