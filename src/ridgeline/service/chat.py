"""/v1/chat/completions: messages in, a message out; reasoning and tool calls are separated from the answer."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec

from ridgeline.core.errors import RequestError
from ridgeline.core.sampling import SamplingParams
from ridgeline.service.answer import Streaming
from ridgeline.service.breakpoints import Wanted, check_cached, read_wanted, without_controls
from ridgeline.service.call import Call, Usage
from ridgeline.service.choices import ChoicesShape
from ridgeline.service.constraints import constrain, read_reasoning
from ridgeline.service.fields import Fields
from ridgeline.service.logprobs import chat_logprobs, prompt_logprobs
from ridgeline.service.piece import CONTENT_FILTER, Piece, Withdrawal
from ridgeline.service.reasoning import ReasoningReader
from ridgeline.service.sampling import (
    encode_chat,
    grammar_field,
    read_beams,
    read_priority,
    read_sampling,
    read_streaming,
    read_tier,
)
from ridgeline.service.state import Service
from ridgeline.text.chat import ChatTemplate, RenderOptions
from ridgeline.text.harmony import open_channel
from ridgeline.text.prompts import ChatEncoder, Prompt
from ridgeline.text.reasoning import Tags
from ridgeline.text.tool_formats import ToolFormat
from ridgeline.text.tool_grammar import added_ids
from ridgeline.text.toolcalls import ToolCallParser, ToolDelta
from ridgeline.text.tools import ToolChoice, read_tool_choice, read_tools

_encode = msgspec.json.Encoder().encode


async def read_chat(
    service: Service, fields: Fields, call_id: str, arrival: float
) -> tuple[Call, ChatShape, Streaming | None]:
    """Everything that a chat completion needs. Raises RequestError for the first thing that is wrong."""
    service.card.check(fields.get("model"))
    streaming = read_streaming(fields)
    max_tokens = _max_tokens(fields)
    logprobs = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    if logprobs is None and fields.get("top_logprobs"):
        raise RequestError("top_logprobs needs logprobs: set logprobs to true.", param="top_logprobs")
    tools = await asyncio.to_thread(_read_tools, fields)  # the time grows with their schemas
    encoder = service.templates.choose(tools=tools is not None)
    wanted = read_wanted(fields)
    if wanted.fields:
        check_cached(service.client.facts, wanted.fields[0])
    prompt, ignored = await _read_prompt(service, encoder, fields, wanted, tools is not None)
    size = len(prompt.ids)
    service.limits.check(size, max_tokens, "messages")
    sampling = await read_sampling(
        service, fields, service.limits.request_tokens - size if max_tokens is None else max_tokens
    )
    sampling = dataclasses.replace(sampling, logprobs=logprobs)
    reasoning, unread = read_reasoning(service, fields, encoder, prompt.text)
    tags = encoder.tags
    tool_format = encoder.tool_format if tools is not None else None
    sampling = await constrain(service, fields, sampling, encoder, tools, reasoning)
    sampling = _show_tags(service, sampling, tags, tool_format)
    publishes = fields.get("include_reasoning", False)
    call = Call(
        call_id,
        arrival,
        (prompt.ids,),
        sampling,
        max_tokens,
        priority=read_priority(fields),
        tier=read_tier(fields),
        salt=fields.get("cache_salt", ""),
        adapter=service.card.adapter,
        continues=fields.get("continue_final_message", False),
        constrained_by=grammar_field(fields) if tools is None else "tools",
        has_reader=streaming is not None and (tags is None or publishes),
        ignored=(*ignored, *unread),
        beams=read_beams(service, fields, sampling),
        breakpoints=wanted.breakpoints(prompt.marks),
    )
    parsing = Parsing(
        tags=tags,
        inside=reasoning.inside,
        channel=open_channel(prompt.text) if tags is not None and tags.channels else "",
        show=fields.get("include_reasoning", True),
        publishes_reasoning=publishes,
        form=tool_format,
        names=frozenset(tool.name for tool in tools.tools) if tools is not None else frozenset(),
    )
    return call, ChatShape(service, call, parsing), streaming


def _max_tokens(fields: Fields) -> int | None:
    """max_tokens under either of its names. None: the answer may fill the context."""
    max_tokens, max_completion_tokens = fields.get("max_tokens"), fields.get("max_completion_tokens")
    if max_tokens is not None and max_completion_tokens is not None and max_tokens != max_completion_tokens:
        raise RequestError("max_tokens and max_completion_tokens differ: send one of them.", param="max_tokens")
    limit: int | None = max_completion_tokens if max_tokens is None else max_tokens
    if limit == 0:
        raise RequestError(
            "max_tokens is 0: a chat completion has at least 1 token. Send 1 or more.", param="max_tokens"
        )
    return limit


def _read_tools(fields: Fields) -> ToolChoice | None:
    """The functions that may be called. None without tools or with tool_choice "none": the model is not told of any."""
    offered, choice = fields.get("tools"), fields.get("tool_choice")
    if not offered:
        if choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice asks for a tool call, but the request has no tools: send tools, or leave tool_choice out.",
                param="tool_choice",
            )
        return None
    tool_choice = read_tool_choice(choice, read_tools(offered))
    return tool_choice if tool_choice.tools else None


def _show_tags(
    service: Service, sampling: SamplingParams, tags: Tags | None, tool_format: ToolFormat | None
) -> SamplingParams:
    """Make special tokens visible if tags are special tokens of this model: parsing needs the tags in the text."""
    markers = (tags.all if tags is not None else "") + (tool_format.tags if tool_format is not None else "")
    if service.tokenizer.special_ids.isdisjoint(added_ids(markers, service.tokenizer).values()):
        return sampling
    return dataclasses.replace(sampling, skip_special_tokens=False)


async def _read_prompt(
    service: Service, encoder: ChatEncoder, fields: Fields, wanted: Wanted, tools: bool
) -> tuple[Prompt, tuple[str, ...]]:
    """The prompt, and the names of fields, variables and members that the template does not read."""
    template = encoder.template
    variables = fields.get("chat_template_kwargs", {})
    controls, unread_fields = _read_controls(template, fields)
    options = RenderOptions(
        add_generation_prompt=fields.get("add_generation_prompt", True),
        continue_final_message=fields.get("continue_final_message", False),
        variables={**controls, **variables},
        places=wanted.places,
    )
    messages = fields.get("messages")
    prompt = await encode_chat(
        service,
        encoder,
        messages,
        tools=without_controls(fields.get("tools")) if tools else None,
        options=options,
        add_special_tokens=fields.get("add_special_tokens", False),
    )
    return prompt, (*unread_fields, *await asyncio.to_thread(template.ignored, messages, variables))


def _read_controls(template: ChatTemplate, fields: Fields) -> tuple[dict[str, Any], list[str]]:
    """Request fields as template variables, and the names of those fields that the template does not read."""
    effort, verbosity = fields.get("reasoning_effort"), fields.get("verbosity")
    by_field = {
        "reasoning_effort": {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"},
        "verbosity": {} if verbosity is None else {"verbosity": verbosity},
    }
    unread = [field for field, variables in by_field.items() if variables and template.names.isdisjoint(variables)]
    return {name: value for variables in by_field.values() for name, value in variables.items()}, unread


@dataclasses.dataclass(frozen=True, slots=True)
class Parsing:
    """How to parse the model's text.

    inside: the prompt ends inside of reasoning. show: reasoning is returned. publishes_reasoning: the user sees it, so it counts as
    published. channel: of the message that the prompt leaves open. form, names: format and functions of tool calls.
    """

    tags: Tags | None
    inside: bool
    channel: str
    show: bool
    publishes_reasoning: bool
    form: ToolFormat | None
    names: frozenset[str]


@dataclasses.dataclass(slots=True)
class Part:
    """The parts that a piece adds to a message."""

    content: str
    reasoning: str
    calls: list[ToolDelta]
    finish: str


class _Message:
    """One choice while it grows."""

    def __init__(self, parsing: Parsing) -> None:
        self.reasoning_reader = ReasoningReader(parsing.tags, inside=parsing.inside, channel=parsing.channel)
        self._parser = ToolCallParser(parsing.form, parsing.names) if parsing.form is not None else None
        self._show = parsing.show
        self.begun = False
        self.sent = False
        """The stream has a part of its text."""
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self.finish = ""
        self.stop_reason: str | int | None = None
        self.logprobs: list[dict[str, Any]] = []
        self.withdrawal: Withdrawal | None = None

    def read(self, piece: Piece) -> Part:
        """Separate reasoning, text and calls."""
        content, hidden = self.reasoning_reader.read(piece)
        calls: list[ToolDelta] = []
        finish = piece.finish
        if self._parser is not None:
            content, calls = self._parser.push(content)
            if finish:
                last_content, last_calls = self._parser.finish()
                content, calls = content + last_content, calls + last_calls
                finish = "tool_calls" if finish == "stop" and self._parser.calls else finish
        return Part(content, hidden if self._show else "", calls, finish)

    def keep(self, part: Part) -> None:
        """Append a part to the message."""
        self.content += part.content
        self.reasoning += part.reasoning
        self.finish = part.finish
        for call in part.calls:
            if call.id:
                function = {"name": call.name, "arguments": ""}
                self.calls.append({"id": call.id, "type": "function", "function": function})
            self.calls[call.index]["function"]["arguments"] += call.arguments

    def withdraw(self, withdrawal: Withdrawal) -> None:
        """Drop the message, and put the replacement in its place."""
        self.content, self.reasoning, self.finish = withdrawal.replacement, "", CONTENT_FILTER
        self.withdrawal = withdrawal
        self.calls, self.logprobs = [], []

    def body(self) -> dict[str, Any]:
        content = None if self.calls and not self.content else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class ChatShape(ChoicesShape):
    """`chat.completion` and its chunks. See answer.Shape."""

    def __init__(self, service: Service, call: Call, parsing: Parsing) -> None:
        self.usage = Usage()
        self._tokenizer = service.tokenizer
        self._scored = call.sampling.logprobs is not None
        self._show_prompt = call.sampling.prompt_logprobs is not None
        self._publishes_reasoning = parsing.publishes_reasoning
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
        if piece.withdrawal is not None:
            return self._withdrawn(self._messages[piece.index], piece.index, piece.withdrawal)
        message, part = self._read(piece)
        choices: list[bytes] = []
        if not message.begun:
            message.begun = True
            choices.append(_choice(piece.index, b'"role":"assistant","content":""'))
        if part.reasoning:
            choices.append(_choice(piece.index, b'"reasoning_content":' + _encode(part.reasoning)))
        scores = b"null"
        if self._scored and piece.scored:
            scores = b'{"content":%b,"refusal":null}' % _encode(chat_logprobs(self._tokenizer, piece.scored))
        if part.content or scores != b"null":
            choices.append(_choice(piece.index, b'"content":' + _encode(part.content), scores))
        if part.calls:
            choices.append(_choice(piece.index, b'"tool_calls":' + _encode([_call_delta(call) for call in part.calls])))
        if part.finish:
            choices.append(_choice(piece.index, b"", finish=_finish(part.finish, piece.stopped_by)))
        message.sent |= bool(part.reasoning or part.content or part.calls)
        return choices

    def _withdrawn(self, message: _Message, index: int, withdrawal: Withdrawal) -> list[bytes]:
        """The last entry of a choice. A client that does not know withdrawals gets the replacement if it has no other text."""
        choices = [] if message.begun else [_choice(index, b'"role":"assistant","content":""')]
        delta = b'"content":' + _encode(withdrawal.replacement) if not message.sent else b""
        finish = b'"%b","withdrawal":%b' % (CONTENT_FILTER.encode(), _encode(withdrawal.body()))
        return [*choices, _choice(index, delta, finish=finish)]

    def empty(self, index: int) -> bytes:
        return _choice(index, b'"content":""')

    def grow(self, piece: Piece) -> Part:
        """What a piece adds, which becomes part of the body too. For a piece that is not a withdrawal."""
        message, part = self._read(piece)
        message.keep(part)
        return part

    def add(self, piece: Piece) -> None:
        message = self._messages[piece.index]
        if piece.withdrawal is not None:
            message.withdraw(piece.withdrawal)
            return
        self.grow(piece)
        message.stop_reason = piece.stopped_by
        if self._scored:
            message.logprobs += chat_logprobs(self._tokenizer, piece.scored)
        if piece.prompt_logprobs is not None and self._show_prompt:
            self.body_head["prompt_logprobs"] = prompt_logprobs(self._tokenizer, piece.prompt_logprobs)

    def body(self) -> list[dict[str, Any]]:
        return [self._choice_body(index, message) for index, message in enumerate(self._messages)]

    def _choice_body(self, index: int, message: _Message) -> dict[str, Any]:
        body = {
            "index": index,
            "message": message.body(),
            "logprobs": {"content": message.logprobs, "refusal": None} if self._scored else None,
            "finish_reason": message.finish,
            "stop_reason": message.stop_reason,
        }
        return body if message.withdrawal is None else {**body, "withdrawal": message.withdrawal.body()}

    def _read(self, piece: Piece) -> tuple[_Message, Part]:
        message = self._messages[piece.index]
        before = message.reasoning_reader.tokens
        part = message.read(piece)
        self.usage.reasoning += message.reasoning_reader.tokens - before
        if part.content or part.calls or (self._publishes_reasoning and part.reasoning):
            self.usage.publish()
        return message, part


def _finish(finish: str, stopped_by: str | int | None) -> bytes:
    reason = b"" if stopped_by is None else b',"stop_reason":' + _encode(stopped_by)
    return b'"%b"%b' % (finish.encode(), reason)


def _call_delta(call: ToolDelta) -> dict[str, Any]:
    """`delta.tool_calls[]`: id, type and name are sent once, arguments in fragments."""
    if call.id:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _choice(index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
    return b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, finish)
