"""Renders messages to a prompt with the model's chat template and the helper functions that transformers provides.

A template comes with the model and runs only in jinja2's immutable sandbox. Templates in requests are not supported: an
endless loop in one could block the server.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ridgeline.core.errors import ConfigError, RequestError, UnsupportedField
from ridgeline.text.breakpoints import Place
from ridgeline.text.messages import normalize, unread_members

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"})
_TAIL_MARK = f"~end {secrets.randbelow(10**30):030}~ "
"""Marks the end of the message that the model continues. It is random, so no message contains it."""


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How to end the prompt.

    add_generation_prompt: open the assistant's turn. continue_final_message: leave the last message open instead.
    variables: the request's chat_template_kwargs. places: ends of prefixes, whose tokens are counted.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    places: Sequence[Place] = ()


class ChatTemplate:
    """A compiled chat template.

    takes_parts: content may be a list of parts; otherwise the texts of a list are joined with a newline. names: the variables that
    the template reads.
    """

    def __init__(
        self,
        source: str,
        specials: Mapping[str, str],
        *,
        rewrite: Callable[[str], str] | None = None,
        role: Callable[[str], str] = str,
    ) -> None:
        """specials: variables such as bos_token that the template may use. rewrite: applied to specials and to every string in the
        template's source. role: maps each role to the value that the template sees.

        Raises ConfigError when the template is not valid.
        """
        environment = _environment()
        try:
            syntax = environment.parse(source)
            self.names = frozenset(meta.find_undeclared_variables(syntax))
            members = _members(syntax)
            if rewrite is not None:
                _rewrite_strings(syntax, rewrite)
                specials = {name: rewrite(text) for name, text in specials.items()}
            self._template = environment.from_string(syntax)
        except jinja2.TemplateError as error:
            raise ConfigError(f"The chat template is not valid: {error}") from error
        self.source = source
        self._specials = dict(specials)
        self._role = role
        self.takes_parts = self._shows([{"type": "text", "text": "PROBE"}])
        self.takes_text = not self.takes_parts or self._shows("PROBE")
        shows_name = self._shows("x" if self.takes_text else [{"type": "text", "text": "x"}], name="PROBE")
        self._members = members - (set() if shows_name else {"name"})  # "name" may be read of a function only

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: RenderOptions = RenderOptions(),
    ) -> str:
        """The prompt text of OpenAI-style messages. `text.prompts.ChatEncoder` turns it into token ids.

        Raises RequestError with the template's message when it rejects the conversation, UnsupportedField for content that is not
        text.
        """
        reserved = sorted(_RESERVED & options.variables.keys())
        if reserved:
            raise RequestError(
                f"chat_template_kwargs must not contain {reserved[0]}: send {reserved[0]} as a field of the request.",
                param="chat_template_kwargs",
            )
        if tools and "tools" not in self.names:
            raise UnsupportedField(
                "tools is not supported: this model's chat template does not show tools to the model. Leave tools out.",
                param="tools",
            )
        normalized = normalize(
            messages, parts=self.takes_parts, text=self.takes_text, developer="developer" in self.source
        )
        for message in normalized:
            message["role"] = self._role(message["role"])
        if options.continue_final_message:
            return self._render_open(normalized, tools, options)
        return self._render(normalized, tools, options.add_generation_prompt, options.variables)

    def ignored(self, messages: Sequence[Mapping[str, Any]], variables: Iterable[str]) -> tuple[str, ...]:
        """Names of members and variables that the template does not read: `messages.name`, `chat_template_kwargs.name`.

        messages: as they were rendered. variables: names of the request's variables.
        """
        unknown = (f"chat_template_kwargs.{name}" for name in variables if name not in self.names)
        return tuple(dict.fromkeys((*unread_members(messages, self._members), *unknown)))

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        values = {**self._specials, **variables, "messages": messages, "tools": tools or None}
        try:
            return self._template.render(values, add_generation_prompt=add_generation_prompt)
        except jinja2.UndefinedError as error:
            raise RequestError(
                f"The chat template reads a value that the request does not contain: {error}. Add it to messages or to "
                "chat_template_kwargs.",
                param="messages",
            ) from error
        except jinja2.TemplateError as error:
            reason = str(error).rstrip(".")
            raise RequestError(
                f"The chat template refuses these messages: {reason}. Change messages.", param="messages"
            ) from error
        except Exception as error:  # the request has values that the template does not expect
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(
                f"The chat template fails on these messages ({reason}): change messages or chat_template_kwargs.",
                param="messages",
            ) from error

    def _render_open(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, options: RenderOptions
    ) -> str:
        """Mark the end of the last message, render, and cut at the mark. The template's text after it would close the turn."""
        if options.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true: set add_generation_prompt to false.",
                param="continue_final_message",
            )
        last = messages[-1]
        content = last.get("content")
        if isinstance(content, str):
            last["content"] = content + _TAIL_MARK
        elif content:
            content[-1]["text"] += _TAIL_MARK
        else:
            raise RequestError(
                "continue_final_message is true, but the last message has no text: add content to it, or set "
                "continue_final_message to false.",
                param="continue_final_message",
            )
        prompt = self._render(messages, tools, False, options.variables)
        cut = prompt.rfind(_TAIL_MARK.rstrip())
        if cut < 0:
            raise RequestError(
                "continue_final_message is not possible: the chat template does not show the end of the last message. Set "
                "continue_final_message to false.",
                param="continue_final_message",
            )
        # If the mark's trailing space is gone, the template trims messages, so trailing spaces of the text are cut too.
        trimmed = not prompt.startswith(_TAIL_MARK, cut)
        return prompt[:cut].rstrip() if trimmed else prompt[:cut]

    def _shows(self, content: Any, **members: Any) -> bool:
        """Whether the template renders the text of such a message. Tests by rendering; the source is not inspected."""
        try:
            prompt = self._render([{"role": "user", "content": content, **members}], None, True, {})
        except RequestError:
            return False
        return "PROBE" in prompt and "'type'" not in prompt and '"type"' not in prompt


def _members(syntax: nodes.Template) -> frozenset[str]:
    """Names that a template may read from a message: attributes, and all strings in its code."""
    attributes = (node.attr for node in syntax.find_all(nodes.Getattr))
    return frozenset({*attributes, *(str(node.value) for node in syntax.find_all(nodes.Const))})


def _rewrite_strings(syntax: nodes.Template, rewrite: Callable[[str], str]) -> None:
    """Apply `rewrite` in place to every string of a template: the text that it writes, and constants in its code."""
    for constant in syntax.find_all(nodes.Const):
        if isinstance(constant.value, str):
            constant.value = rewrite(constant.value)
    for data in syntax.find_all(nodes.TemplateData):
        data.data = rewrite(data.data)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training. Only its body is rendered here."""

    tags = {"generation"}  # noqa: RUF012 - an instance variable in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
