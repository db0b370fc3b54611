"""/v1/chat/completions: messages in, a message out; thoughts and tool calls told apart from the answer."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec

from ridgeline.core.errors import BadGrammar, RequestError, UnsupportedField
from ridgeline.core.sampling import SamplingParams
from ridgeline.service.answer import Streaming
from ridgeline.service.call import Call, Usage
from ridgeline.service.fields import Fields
from ridgeline.service.logprobs import chat_logprobs, prompt_logprobs
from ridgeline.service.sampling import (
    check_grammar,
    encode_chat,
    grammar_field,
    read_priority,
    read_sampling,
    read_streaming,
    read_tier,
)
from ridgeline.service.state import Service
from ridgeline.service.stream import Piece
from ridgeline.service.thoughts import Thoughts
from ridgeline.text.chat import ChatTemplate, RenderOptions
from ridgeline.text.grammar import MAX_SOURCE
from ridgeline.text.prompts import ChatEncoder, Prompt
from ridgeline.text.reasoning import Tags, detect_tags, starts_inside
from ridgeline.text.toolcalls import ToolCallParser, ToolDelta
from ridgeline.text.tools import ToolChoice, ToolFormat, detect_format, read_tool_choice, read_tools, tool_grammar

_encode = msgspec.json.Encoder().encode


async def read_chat(
    service: Service, fields: Fields, call_id: str, arrival: float
) -> tuple[Call, ChatShape, Streaming | None]:
    """Everything a chat completion needs, or the RequestError that says what is wrong."""
    service.card.check(fields.get("model"))
    streaming = read_streaming(fields)
    asked = _max_tokens(fields)
    logprobs = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    if logprobs is None and fields.get("top_logprobs"):
        raise RequestError("top_logprobs needs logprobs: set logprobs to true.", param="top_logprobs")
    tools = await asyncio.to_thread(_read_tools, fields)  # the work grows with their schemas
    encoder = service.templates.choose(tools=tools is not None)
    template = encoder.template
    prompt, ignored = await _read_prompt(service, encoder, fields, tools is not None)
    size = len(prompt.ids)
    service.limits.check(size, asked, "messages")
    sampling = read_sampling(service, fields, service.limits.most - size if asked is None else asked)
    sampling = dataclasses.replace(sampling, logprobs=logprobs)
    form = None
    if tools is not None:
        form = detect_format(template)
        sampling = await _bind_tools(service, fields, sampling, form, tools)
    else:
        await check_grammar(service, sampling, grammar_field(fields))
    tags = detect_tags(template.source)
    sampling = _show_tags(service, sampling, tags, form)
    call = Call(
        call_id,
        arrival,
        (prompt.ids,),
        sampling,
        asked,
        priority=read_priority(fields),
        tier=read_tier(fields),
        salt=fields.get("cache_salt", ""),
        continues=fields.get("continue_final_message", False),
        constrained_by=grammar_field(fields) if tools is None else "tools",
        ignored=ignored,
    )
    parsing = Parsing(
        tags=tags,
        inside=tags is not None and starts_inside(tags, prompt.text),
        show=fields.get("include_reasoning", True),
        form=form,
        names=frozenset(tool.name for tool in tools.tools) if tools is not None else frozenset(),
    )
    return call, ChatShape(service, call, parsing), streaming


def _max_tokens(fields: Fields) -> int | None:
    """max_tokens under either of its names; None goes on to the end of the context."""
    old, new = fields.get("max_tokens"), fields.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError("max_tokens and max_completion_tokens differ: send one of them.", param="max_tokens")
    asked: int | None = new if old is None else old
    if asked == 0:
        raise RequestError(
            "max_tokens is 0: a chat completion has at least 1 token. Send 1 or more.", param="max_tokens"
        )
    return asked


def _read_tools(fields: Fields) -> ToolChoice | None:
    """The functions that may be called; None without tools and with tool_choice "none", when the model is not told of any."""
    offered, choice = fields.get("tools"), fields.get("tool_choice")
    if not offered:
        if choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice asks for a tool call, but the request has no tools: send tools, or leave tool_choice out.",
                param="tool_choice",
            )
        return None
    chosen = read_tool_choice(choice, read_tools(offered))
    return chosen if chosen.tools else None


async def _bind_tools(
    service: Service, fields: Fields, sampling: SamplingParams, form: ToolFormat | None, tools: ToolChoice
) -> SamplingParams:
    """Sampling under the grammar that makes calls valid. Raises BadGrammar naming the function whose schema it is about."""
    if form is None:
        raise UnsupportedField(
            "tools is not supported: the server does not know the format of this model's tool calls. Leave tools out.",
            param="tools",
        )
    if sampling.grammar is not None:
        name = grammar_field(fields)
        raise UnsupportedField(
            f'{name} cannot be combined with tools: send one of them, or set tool_choice to "none".', param=name
        )
    parallel = fields.get("parallel_tool_calls", True)
    bound = dataclasses.replace(sampling, grammar=tool_grammar(form, tools, service.tokenizer, parallel=parallel))
    try:
        await check_grammar(service, bound, "tools")
    except BadGrammar:
        assert bound.grammar is not None
        if len(bound.grammar.source) > MAX_SOURCE:
            raise
        for tool in tools.tools:
            alone = tool_grammar(form, ToolChoice((tool,), True), service.tokenizer)
            try:
                await check_grammar(service, dataclasses.replace(sampling, grammar=alone), "tools")
            except BadGrammar as error:
                reason = f"tools: the parameters of {tool.name!r} cannot be enforced. {error.message}"
                raise BadGrammar(reason, param="tools") from None
        raise
    return bound


def _show_tags(
    service: Service, sampling: SamplingParams, tags: Tags | None, form: ToolFormat | None
) -> SamplingParams:
    """Tags that are special tokens in this model must reach the text, or nobody could tell its parts apart."""
    found = [tags.open, tags.close] if tags is not None else []
    found += [form.open, form.close] if form is not None else []
    if not any(service.tokenizer.token_id(tag) in service.tokenizer.special_ids for tag in found):
        return sampling
    return dataclasses.replace(sampling, skip_special_tokens=False)


async def _read_prompt(
    service: Service, encoder: ChatEncoder, fields: Fields, tools: bool
) -> tuple[Prompt, tuple[str, ...]]:
    """The prompt, and the names of what the template does not read."""
    template = encoder.template
    given = fields.get("chat_template_kwargs", {})
    controls, unread = _read_controls(template, fields)
    options = RenderOptions(
        add_generation_prompt=fields.get("add_generation_prompt", True),
        continue_final_message=fields.get("continue_final_message", False),
        variables={**controls, **given},
    )
    messages = fields.get("messages")
    prompt = await encode_chat(
        service,
        encoder,
        messages,
        tools=fields.get("tools") if tools else None,
        options=options,
        add_special_tokens=fields.get("add_special_tokens", False),
    )
    return prompt, (*unread, *await asyncio.to_thread(template.ignored, messages, given))


def _read_controls(template: ChatTemplate, fields: Fields) -> tuple[dict[str, Any], list[str]]:
    """Fields of a request as variables of its template, and the names of those that the template does not read."""
    effort, verbosity = fields.get("reasoning_effort"), fields.get("verbosity")
    meant = {
        "reasoning_effort": {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"},
        "verbosity": {} if verbosity is None else {"verbosity": verbosity},
    }
    unread = [field for field, variables in meant.items() if variables and template.names.isdisjoint(variables)]
    return {name: value for variables in meant.values() for name, value in variables.items()}, unread


@dataclasses.dataclass(frozen=True, slots=True)
class Parsing:
    """How to read the model's text.

    inside: the prompt has opened a thought already. show: thoughts are shown. form, names: of the calls it may make.
    """

    tags: Tags | None
    inside: bool
    show: bool
    form: ToolFormat | None
    names: frozenset[str]


@dataclasses.dataclass(slots=True)
class _Part:
    """What a piece adds to a message."""

    content: str
    reasoning: str
    calls: list[ToolDelta]
    finish: str


class _Message:
    """One choice while it grows."""

    def __init__(self, parsing: Parsing) -> None:
        self.thoughts = Thoughts(parsing.tags, inside=parsing.inside)
        self._parser = ToolCallParser(parsing.form, parsing.names) if parsing.form is not None else None
        self._show = parsing.show
        self.begun = False
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self.finish = ""
        self.stop_reason: str | int | None = None
        self.logprobs: list[dict[str, Any]] = []

    def read(self, piece: Piece) -> _Part:
        """Tell thoughts, text and calls apart."""
        content, hidden = self.thoughts.read(piece)
        calls: list[ToolDelta] = []
        finish = piece.finish
        if self._parser is not None:
            content, calls = self._parser.push(content)
            if finish:
                more, rest = self._parser.finish()
                content, calls = content + more, calls + rest
                finish = "tool_calls" if finish == "stop" and self._parser.calls else finish
        return _Part(content, hidden if self._show else "", calls, finish)

    def keep(self, part: _Part) -> None:
        """Add a part to the whole."""
        self.content += part.content
        self.reasoning += part.reasoning
        self.finish = part.finish
        for call in part.calls:
            if call.id:
                function = {"name": call.name, "arguments": ""}
                self.calls.append({"id": call.id, "type": "function", "function": function})
            self.calls[call.index]["function"]["arguments"] += call.arguments

    def whole(self) -> dict[str, Any]:
        content = None if self.calls and not self.content else self.content
        said: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            said["reasoning_content"] = self.reasoning
        if self.calls:
            said["tool_calls"] = self.calls
        return said


class ChatShape:
    """`chat.completion` and its chunks. See answer.Shape."""

    def __init__(self, service: Service, call: Call, parsing: Parsing) -> None:
        self.usage = Usage()
        self._tokenizer = service.tokenizer
        self._scored = call.sampling.logprobs is not None
        self._show_prompt = call.sampling.prompt_logprobs is not None
        self._messages = [_Message(parsing) for _ in range(call.choices)]
        self.body_head: dict[str, Any] = {
            "id": call.id,
            "object": "chat.completion",
            "created": int(call.arrival),
            "model": service.card.name,
            "system_fingerprint": service.fingerprint,
        }
        if call.tier:
            self.body_head["service_tier"] = call.tier
        self.head = _encode({**self.body_head, "object": "chat.completion.chunk"})[:-1]

    def choices(self, piece: Piece) -> list[bytes]:
        message, part = self._read(piece)
        found: list[bytes] = []
        if not message.begun:
            message.begun = True
            found.append(_choice(piece.index, b'"role":"assistant","content":""'))
        if part.reasoning:
            found.append(_choice(piece.index, b'"reasoning_content":' + _encode(part.reasoning)))
        scores = b"null"
        if self._scored and piece.scored:
            scores = b'{"content":%b,"refusal":null}' % _encode(chat_logprobs(self._tokenizer, piece.scored))
        if part.content or scores != b"null":
            found.append(_choice(piece.index, b'"content":' + _encode(part.content), scores))
        if part.calls:
            found.append(_choice(piece.index, b'"tool_calls":' + _encode([_call_delta(call) for call in part.calls])))
        if part.finish:
            found.append(_choice(piece.index, b"", finish=_finish(part.finish, piece.stopped_by)))
        return found

    def empty(self, index: int) -> bytes:
        return _choice(index, b'"content":""')

    def add(self, piece: Piece) -> None:
        message, part = self._read(piece)
        message.keep(part)
        message.stop_reason = piece.stopped_by
        if self._scored:
            message.logprobs += chat_logprobs(self._tokenizer, piece.scored)
        if piece.prompt_logprobs is not None and self._show_prompt:
            self.body_head["prompt_logprobs"] = prompt_logprobs(self._tokenizer, piece.prompt_logprobs)

    def body(self) -> list[dict[str, Any]]:
        return [self._whole(index, message) for index, message in enumerate(self._messages)]

    def _whole(self, index: int, message: _Message) -> dict[str, Any]:
        return {
            "index": index,
            "message": message.whole(),
            "logprobs": {"content": message.logprobs, "refusal": None} if self._scored else None,
            "finish_reason": message.finish,
            "stop_reason": message.stop_reason,
        }

    def _read(self, piece: Piece) -> tuple[_Message, _Part]:
        message = self._messages[piece.index]
        before = message.thoughts.tokens
        part = message.read(piece)
        self.usage.reasoning += message.thoughts.tokens - before
        if part.content or part.calls:
            self.usage.publish()
        return message, part


def _finish(finish: str, stopped_by: str | int | None) -> bytes:
    reason = b"" if stopped_by is None else b',"stop_reason":' + _encode(stopped_by)
    return b'"%b"%b' % (finish.encode(), reason)


def _call_delta(call: ToolDelta) -> dict[str, Any]:
    """`delta.tool_calls[]`: id, type and name come once, arguments in fragments."""
    if call.id:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _choice(index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
    return b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, finish)
