"""Messages to a prompt through the model's own chat template, with the helpers that transformers gives it.

A template comes with the model and is run only in jinja2's immutable sandbox. Templates sent with a request are not
supported: a loop in one could hold the server for ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ridgeline.core.errors import ConfigError, RequestError, UnsupportedField
from ridgeline.text.messages import normalize, unread

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"})
_TAIL_MARK = "\ue000END-OF-FINAL-MESSAGE\ue001 "


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """add_generation_prompt: open the assistant's turn. continue_final_message: leave the last message open instead.

    variables: the request's chat_template_kwargs.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """A compiled template. `specials`: variables such as bos_token that it may use; `name` stands in messages.

    takes_parts: content may be a list of parts (else the texts of a list are joined with a newline). names: the
    variables the template reads.
    """

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        """Raises ConfigError when the template is not valid."""
        environment = _environment()
        try:
            syntax = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"The chat template is not valid: {error}") from error
        self.source = source
        self.names = frozenset(meta.find_undeclared_variables(syntax))
        self._specials = dict(specials)
        self.takes_parts = self._shows([{"type": "text", "text": "PROBE"}])
        self.takes_text = not self.takes_parts or self._shows("PROBE")
        named = self._shows("x" if self.takes_text else [{"type": "text", "text": "x"}], name="PROBE")
        self._members = _members(syntax) - (set() if named else {"name"})  # functions have names too

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: RenderOptions = RenderOptions(),
    ) -> str:
        """The prompt for OpenAI-style messages, to be encoded without further special tokens.

        Raises RequestError with the template's own message when it rejects the conversation, UnsupportedField for
        content that is not text.
        """
        clash = sorted(_RESERVED & options.variables.keys())
        if clash:
            raise RequestError(f"{clash[0]} is no template variable: set it as a field.", param="chat_template_kwargs")
        if tools and "tools" not in self.names:
            raise UnsupportedField("This model's chat template has no place for tools: remove them.", param="tools")
        plain = normalize(messages, parts=self.takes_parts, text=self.takes_text, developer="developer" in self.source)
        if options.continue_final_message:
            return self._render_open(plain, tools, options)
        return self._render(plain, tools, options.add_generation_prompt, options.variables)

    def ignored(self, messages: Sequence[Mapping[str, Any]], variables: Iterable[str]) -> tuple[str, ...]:
        """What the template reads of neither messages that were rendered nor a request's variables: `messages.name`,
        `chat_template_kwargs.name`."""
        strange = (f"chat_template_kwargs.{name}" for name in variables if name not in self.names)
        return tuple(dict.fromkeys((*unread(messages, self._members), *strange)))

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
            raise RequestError(f"The chat template misses something: {error}.", param="messages") from error
        except jinja2.TemplateError as error:
            raise RequestError(f"The chat template refuses this conversation: {error}", param="messages") from error
        except Exception as error:  # a template meets values it was not written for: whatever it raises is about them
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(f"The chat template fails on this conversation: {reason}", param="messages") from error

    def _render_open(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, options: RenderOptions
    ) -> str:
        """Mark the end of the last message, render, and cut at the mark (what follows would close the turn)."""
        if options.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: set one to false.",
                param="continue_final_message",
            )
        last = messages[-1]
        content = last.get("content")
        if isinstance(content, str):
            last["content"] = content + _TAIL_MARK
        elif content:
            content[-1]["text"] += _TAIL_MARK
        else:
            raise RequestError("The last message has no text to continue.", param="continue_final_message")
        prompt = self._render(messages, tools, False, options.variables)
        cut = prompt.rfind(_TAIL_MARK.rstrip())
        if cut < 0:
            raise RequestError("The chat template drops the end of the last message.", param="continue_final_message")
        # A template that trims its messages has eaten the mark's space, and would have eaten the text's own.
        trimmed = not prompt.startswith(_TAIL_MARK, cut)
        return prompt[:cut].rstrip() if trimmed else prompt[:cut]

    def _shows(self, content: Any, **members: Any) -> bool:
        """Whether the template renders such a message's text: asked of the template, not guessed from its source."""
        try:
            prompt = self._render([{"role": "user", "content": content, **members}], None, True, {})
        except RequestError:
            return False
        return "PROBE" in prompt and "'type'" not in prompt and '"type"' not in prompt


class ChatTemplates:
    """The templates of a model: the usual one, the one for tools, or none at all."""

    def __init__(self, sources: Mapping[str, str], specials: Mapping[str, str]) -> None:
        """sources: name -> text. Raises ConfigError when one is not valid."""
        self._templates = {name: ChatTemplate(source, specials) for name, source in sources.items()}

    def choose(self, *, tools: bool) -> ChatTemplate:
        """The template for a request with or without tools. Raises RequestError when the model has none."""
        names = ("tool_use", "default") if tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise RequestError(
            "This model has no chat template: use /v1/completions, or start the server with --chat-template FILE.",
            param="messages",
        )


def _members(syntax: nodes.Template) -> frozenset[str]:
    """Names that a template may read of a message: its attributes, and all strings in its code."""
    attributes = (node.attr for node in syntax.find_all(nodes.Getattr))
    return frozenset({*attributes, *(str(node.value) for node in syntax.find_all(nodes.Const))})


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it is only its body."""

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
