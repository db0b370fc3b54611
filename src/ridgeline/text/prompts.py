"""Conversations to prompts: the text that a chat template makes of messages, and its token ids.

Control tokens come from the template only. Request text (contents, names, tool schemas, tool results, variables) that spells a
control token is tokenized as ordinary text:

- The template's strings contain private names for control tokens (`text.control_tokens`). Requests cannot spell such a name.
- A copy of the tokenizer knows control tokens by these names only.
- A template may build a control token from strings and a role (`'<|' + message.role + '|>'`). Roles are validated first, so a
  role that a template prints carries a mark, and a control token built from it is recognized by the mark.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import ConfigError, RequestError
from ridgeline.text.breakpoints import Place, common_length, shortened, tokens_before
from ridgeline.text.chat import ChatTemplate, RenderOptions
from ridgeline.text.control_tokens import MARK, ControlTokens, without_private_names
from ridgeline.text.messages import ROLES
from ridgeline.text.reasoning import choose_tags
from ridgeline.text.tokenizer import Tokenizer, check_unicode
from ridgeline.text.tool_formats import AUTO, choose_format

_ROLE_MARK = f"~role{secrets.randbelow(10**16):016}~"
"""Prefix of a role that a template prints. It is random, so no request contains it."""

_USER_MESSAGE = {"role": "user", "content": "a"}
_ASSISTANT_MESSAGE = {"role": "assistant", "content": "b"}
_TOOL_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
_SAMPLES: tuple[list[dict[str, Any]], ...] = (
    [_USER_MESSAGE],
    [{"role": "system", "content": "s"}, _USER_MESSAGE],
    [_USER_MESSAGE, _ASSISTANT_MESSAGE, _USER_MESSAGE],
    [_USER_MESSAGE, {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]}],
    [
        _USER_MESSAGE,
        {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]},
        {"role": "tool", "tool_call_id": "call00000", "content": "t"},
    ],
)
"""Conversations that show which control tokens a template writes, and where."""
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as text and as token ids. marks: tokens before each of RenderOptions.places."""

    text: str
    ids: list[int]
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names of the parsers of reasoning and tool calls. "auto": by the chat template; "none": no parser."""

    reasoning: str = AUTO
    tool_calls: str = AUTO


class ChatEncoder:
    """Makes prompts with one chat template.

    template: the template without private names. parsers: of the answers.
    """

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, control: ControlTokens, parsers: Parsers = Parsers()
    ) -> None:
        """Raises ConfigError when the template writes a control token that cannot be distinguished from text."""
        self.template = template
        self.tags = choose_tags(parsers.reasoning, template.source)
        self.tool_format = choose_format(parsers.tool_calls, template)
        self._control = control
        self._from_roles = {
            text.replace(role, _ROLE_MARK + role, 1): MARK + text
            for text in control.texts
            for role in ROLES
            if role in text
        }
        self._named = ChatTemplate(
            template.source, tokenizer.specials, rewrite=control.name, role=_Role if self._from_roles else str
        )
        for named in map(self._name_role_tokens, _sample_texts(self._named)):
            self._check(tokenizer, named)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: RenderOptions = RenderOptions(),
        add_special_tokens: bool = False,
        check: Callable[[str], None] | None = None,
    ) -> Prompt:
        """The prompt for OpenAI-style messages.

        add_special_tokens: add the tokens that the tokenizer puts around a text. check: called with the text before it is
        tokenized; may raise. Raises as ChatTemplate.render does.
        """
        try:
            rendered = self._named.render(messages, tools=tools, options=options)
        except RequestError as error:  # its message may quote the template's strings
            raise type(error)(
                without_private_names(error.message).replace(_ROLE_MARK, ""), param=error.param
            ) from error
        named = self._name_role_tokens(rendered)
        text = without_private_names(named)
        check_unicode(text)
        if check is not None:
            check(text)
        if not options.places:
            return Prompt(text, self._control.encode(named, add_special_tokens=add_special_tokens))
        ids, offsets = self._control.encode_with_offsets(named, add_special_tokens=add_special_tokens)
        ends = [self._end(text, place, messages, tools, options.variables) for place in options.places]
        return Prompt(text, ids, tuple(tokens_before(offsets, end) for end in ends))

    def _end(
        self,
        text: str,
        place: Place,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> int:
        """Characters of the prompt `text` up to a place of its conversation. 0: it has no such place."""
        options = RenderOptions(add_generation_prompt=False, variables=variables)
        if place.tools and not tools:  # the request offers none
            return 0
        for shorter, fewer in shortened(place, messages, tools):
            try:
                rendered = self._named.render(shorter, tools=fewer, options=options)
            except RequestError:
                continue
            return common_length(text, without_private_names(self._name_role_tokens(rendered)))
        return 0

    def _name_role_tokens(self, rendered: str) -> str:
        """Replace control tokens that were built from a role by their private names."""
        for text, name in self._from_roles.items():
            rendered = rendered.replace(text, name)
        return rendered.replace(_ROLE_MARK, "")

    def _check(self, tokenizer: Tokenizer, named: str) -> None:
        """Raises ConfigError unless the tokenizer gives the same ids for the text without private names."""
        expected = tokenizer.encode(without_private_names(named), add_special_tokens=False)
        ids = self._control.encode(named, add_special_tokens=False)
        if ids != expected:
            missing = next((index for index in expected if expected.count(index) > ids.count(index)), None)
            text = (
                "a control token" if missing is None else repr(tokenizer.decode([missing], skip_special_tokens=False))
            )
            raise ConfigError(
                f"The chat template does not write {text} as one string, so it cannot be distinguished from the text of a request: "
                "change the template (--chat-template FILE), or start with --allow-special-in-content."
            )


class ChatTemplates:
    """The chat templates of a model: the default one, one for tools, or none."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sources: Mapping[str, str] | None = None,
        *,
        allow_special_in_content: bool = False,
        parsers: Parsers = Parsers(),
    ) -> None:
        """sources: text by name; None: the tokenizer's templates. allow_special_in_content: request text that spells a control
        token becomes that token. Raises ConfigError when a template is not valid.
        """
        chosen = tokenizer.templates if sources is None else sources
        templates = {name: ChatTemplate(source, tokenizer.specials) for name, source in chosen.items()}
        texts = frozenset() if allow_special_in_content else _control_texts(tokenizer, templates.values(), parsers)
        control = ControlTokens(tokenizer, texts)
        self._encoders = {
            name: ChatEncoder(template, tokenizer, control, parsers) for name, template in templates.items()
        }

    def choose(self, *, tools: bool) -> ChatEncoder:
        """The template for a request with or without tools. Raises RequestError if the model has none."""
        names = ("tool_use", "default") if tools else ("default",)
        for name in names:
            if name in self._encoders:
                return self._encoders[name]
        raise RequestError(
            "This model has no chat template: use /v1/completions, or start the server with --chat-template FILE.",
            param="messages",
        )


class _Role(str):
    """A role that equals the ordinary string, but prints with _ROLE_MARK in a template."""

    __slots__ = ()

    def __str__(self) -> str:
        return _ROLE_MARK + super().__str__()

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _control_texts(tokenizer: Tokenizer, templates: Iterable[ChatTemplate], parsers: Parsers) -> frozenset[str]:
    """Texts of a model's control tokens: all special tokens, and tags in templates that the tokenizer does not mark as special.

    White space is excluded, because it marks nothing. Tags of reasoning and of tool calls are excluded where templates split the
    text of earlier answers at them.
    """
    added = tokenizer.backend.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    tags: set[str] = set()
    for template in templates:
        written = "".join((template.source, *_sample_texts(template)))
        special |= {token.content for token in added if _is_tag(token.content) and token.content in written}
        thoughts, calls = choose_tags(parsers.reasoning, template.source), choose_format(parsers.tool_calls, template)
        tags |= {thoughts.open, thoughts.close} if thoughts is not None and thoughts.in_content else set()
        tags |= {calls.open, calls.close} if calls is not None and calls.in_content else set()
    return frozenset(text for text in special - tags if text.strip())


def _is_tag(text: str) -> bool:
    """Whether a text is a name between two symbols, like <|user|> or [INST]. Others are words, numbers, runs of spaces."""
    ends = (text[:1], text[-1:])
    symbols = not any(end.isalnum() or end.isspace() for end in ends)
    return len(text) > 2 and symbols and any(map(str.isalpha, text))


def _sample_texts(template: ChatTemplate) -> Iterator[str]:
    """The template's output for each sample conversation that it accepts."""
    for tools in (None, [_TOOL]):
        for messages in _SAMPLES:
            for generate in (True, False):
                try:
                    yield template.render(messages, tools=tools, options=RenderOptions(add_generation_prompt=generate))
                except RequestError:  # templates refuse some orders of roles
                    continue
